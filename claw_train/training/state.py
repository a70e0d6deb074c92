"""What a checkpoint holds, written and read exactly: trained parameters, AdamW moments, random states, counters.

In: a policy, its optimizer, a `Progress`. Out: `trainable.safetensors`, `optimizer.safetensors`, `rng.safetensors` and
`state.json` in a given folder, and the same values back. Tensors are safetensors, everything else JSON; nothing is
pickled. Knows neither batches nor when a checkpoint is due.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from claw_train.errors import ConfigError, TrainerError, boundary
from claw_train.training.folders import STATE_FILE, read_state
from claw_train.training.spec import TrainerSpec
from claw_train.types import Version

_TRAINABLE = "trainable.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_RNG = "rng.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a checkpoint must have in common with the run that loads it."""

    kind: str
    lora_rank: int
    lora_alpha: int
    lora_targets: tuple[str, ...]
    freeze_embeddings: bool
    base_sha256: str
    """Over the safetensors files of the model folder, in order of name."""
    tokenizer_sha256: str
    """Of tokenizer.json; empty when the folder has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The counters of a trainer."""

    version: Version
    over_limit: int = 0
    """Batches in a row whose mismatch was above the limit."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the step that led here: a process that dies before it reports leaves them in the checkpoint."""


def identity(spec: TrainerSpec) -> Identity:
    """Reads the model folder once, all of it."""
    folder, config = Path(spec.model_path), spec.trainer
    lora = config.kind == "lora"
    return Identity(
        kind=config.kind,
        lora_rank=config.lora_rank if lora else 0,
        lora_alpha=config.lora_alpha if lora else 0,
        lora_targets=tuple(sorted(spec.lora_targets)) if lora else (),
        freeze_embeddings=config.freeze_embeddings and not lora,
        base_sha256=sha256(*sorted(folder.glob("*.safetensors"))),
        tokenizer_sha256=sha256(folder / "tokenizer.json") if (folder / "tokenizer.json").exists() else "",
    )


def sha256(*files: Path) -> str:
    """Of the files' contents, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def save(
    folder: Path,
    trainable: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    who: Identity,
) -> None:
    """Writes all files of a checkpoint into an existing, empty folder.

    Raises:
        TrainerError: the disk is full or failed.
    """
    moments = {
        f"{kind}.{name}": optimizer.state[p][kind].contiguous()
        for name, p in trainable.items()
        for kind in _MOMENTS
        if kind in optimizer.state.get(p, {})
    }
    with boundary(TrainerError, f"checkpoint {folder} cannot be written"):
        save_file({name: p.detach().contiguous() for name, p in trainable.items()}, folder / _TRAINABLE)
        save_file(moments, folder / _OPTIMIZER)
        save_file(_random_states(), folder / _RNG)
        state = {
            "step": progress.version.step,
            "version": str(progress.version),
            "over_limit": progress.over_limit,
            "metrics": dict(progress.metrics),
            "identity": asdict(who),
            "files": {name: (folder / name).stat().st_size for name in (_TRAINABLE, _OPTIMIZER, _RNG)},
        }
        (folder / STATE_FILE).write_text(json.dumps(state, indent=1))


def load(
    folder: Path, trainable: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, who: Identity
) -> Progress:
    """Puts a checkpoint's values in place, exactly.

    Raises:
        ConfigError: it is no whole checkpoint, or one of another model or configuration; names file, key and fix.
    """
    state = read_state(folder)
    _check_identity(folder / STATE_FILE, state["identity"], who)
    with boundary(ConfigError, f"checkpoint {folder} cannot be read; choose another one"):
        values, moments = load_file(folder / _TRAINABLE), load_file(folder / _OPTIMIZER)
        rng = load_file(folder / _RNG)
    if values.keys() != trainable.keys():
        odd = sorted(values.keys() ^ trainable.keys())[0]
        raise ConfigError(f"{folder / _TRAINABLE} holds other parameters than this model ({odd}); choose another one")
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(values[name])
    optimizer.state.clear()
    for key, value in moments.items():
        kind, _, name = key.partition(".")
        parameter = trainable[name]
        # AdamW keeps its step counter on the CPU
        optimizer.state[parameter][kind] = value if kind == "step" else value.to(parameter.device)
    _set_random_states(rng)
    return Progress(
        version=Version.parse(state["version"]), over_limit=int(state["over_limit"]), metrics=state.get("metrics", {})
    )


def _check_identity(file: Path, stored: Mapping[str, Any], who: Identity) -> None:
    for key, want in asdict(who).items():
        have = stored.get(key)
        if (tuple(have) if isinstance(have, list) else have) != want:
            raise ConfigError(
                f"{file} was written with {key}={have!r}, this run has {want!r}: "
                "use the run's own model and trainer configuration, or start a new run"
            )


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    for i in range(torch.cuda.device_count()):
        states[f"cuda.{i}"] = torch.cuda.get_rng_state(i)
    return states


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for i in range(torch.cuda.device_count()):
        if f"cuda.{i}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{i}"], i)
