"""What a model folder says of itself: sizes, positions, end tokens.

In: `config.json` and `generation_config.json` of a Hugging Face folder. Out: a `ModelSpec`. It knows no tensors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from claw_train.errors import ModelError

_ARCHITECTURES = {"llama", "qwen3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes of a decoder-only transformer."""

    architecture: str
    """`llama` or `qwen3` (adds a norm over each query and key head)."""
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    """Longest sequence in tokens."""
    eps: float
    """Of every RMS norm."""
    rope_theta: float
    rope_factor: float
    """Linear stretching of positions; 1.0 is none."""
    tied: bool
    """The output head is the embedding matrix."""
    eos_ids: frozenset[int]

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return self.architecture == "qwen3"

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.kv_heads * self.head_dim


def read_spec(folder: Path) -> ModelSpec:
    """Reads the sizes of the model in `folder`.

    Raises:
        ModelError: no such folder or file, an architecture or an option the engine does not compute.
    """
    config = _read_json(folder / "config.json")
    kind = str(config.get("model_type"))
    if kind not in _ARCHITECTURES:
        raise ModelError(f"{folder}: model_type {kind!r} needs an SGLang server; the embedded engine runs llama, qwen3")
    for option in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(option):
            raise ModelError(f"{folder}: config.json sets {option}, which the embedded engine does not compute")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{folder}: hidden_act {config['hidden_act']!r} is not silu")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        theta, factor = _rope(config, folder)
        return ModelSpec(
            architecture=kind,
            vocab=int(config["vocab_size"]),
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            context=int(config.get("max_position_embeddings", 2048)),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_factor=factor,
            tied=bool(config.get("tie_word_embeddings", False)),
            eos_ids=_eos_ids(folder, config),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder}/config.json: missing or malformed value: {error}") from None


def _rope(config: Mapping[str, Any], folder: Path) -> tuple[float, float]:
    """(theta, linear factor), from either generation of the configuration format."""
    rope = cast(dict[str, Any], config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear"):
        raise ModelError(f"{folder}: rope_type {kind!r} is not default or linear")
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    return theta, float(rope.get("factor", 1.0)) if kind == "linear" else 1.0


def _eos_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    generation = folder / "generation_config.json"
    for source in (config, _read_json(generation) if generation.exists() else {}):
        value = source.get("eos_token_id")
        if value is not None:
            found.update(cast(list[int], value) if isinstance(value, list) else [int(value)])
    return frozenset(found)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], json.loads(path.read_text()))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: not a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
