"""Weights on disk into weights to compute with.

In: a Hugging Face folder of safetensors, or a PEFT adapter folder. Out: `Weights` and `Adapter`, with query, key and
value fused into one product, gate and up into another, and the two halves of every query and key head interleaved
(see `model.py`: a rotation is then one complex product). It knows no request and no version.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from claw_train.engine.linear import Linear, LowRank
from claw_train.engine.spec import ModelSpec, read_spec
from claw_train.errors import ModelError

PRODUCTS = ("qkv", "o", "gate_up", "down")
"""The fused products of a layer."""
_MEMBERS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One block."""

    attn_norm: Tensor
    """[hidden], float32 like all norms"""
    mlp_norm: Tensor
    """[hidden]"""
    q_norm: Tensor | None
    """[head_dim], interleaved; None without query and key norms"""
    k_norm: Tensor | None
    products: Mapping[str, Linear]
    """By name in `PRODUCTS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A whole model."""

    embedding: Tensor
    """[vocab, hidden]"""
    layers: tuple[Layer, ...]
    final_norm: Tensor
    """[hidden]"""
    head: Linear
    """hidden -> vocab"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """A LoRA adapter; two loads under one name are two adapters (compared by identity)."""

    name: str
    layers: tuple[Mapping[str, LowRank], ...]
    """For each layer the products it changes."""


def interleave(rows: Tensor, head_dim: int) -> Tensor:
    """Reorders dim 0 within each head from (first half, second half) to pairs (first[i], second[i])."""
    return rows.view(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def load_weights(folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Weights:
    """Reads and arranges all weights. End tokens are not compared: a checkpoint lacks generation_config.json.

    Raises:
        ModelError: the folder is of another model, a tensor is missing or has the wrong shape.
    """
    other = dataclasses.replace(read_spec(folder), eos_ids=spec.eos_ids)
    if other != spec:
        differing = [f for f in spec.__dataclass_fields__ if getattr(other, f) != getattr(spec, f)]
        raise ModelError(f"{folder} holds another model: {', '.join(differing)} differ")
    with _Tensors(folder, dtype, device) as read:
        embedding = read("model.embed_tokens.weight", (spec.vocab, spec.hidden))
        return Weights(
            embedding=embedding,
            layers=tuple(_layer(read, spec, i) for i in range(spec.layers)),
            final_norm=read("model.norm.weight", (spec.hidden,), torch.float32),
            head=Linear(embedding if spec.tied else read("lm_head.weight", (spec.vocab, spec.hidden))),
        )


def _layer(read: "_Tensors", spec: ModelSpec, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    shapes = _shapes(spec)

    def product(name: str) -> Linear:
        parts = [_arranged(m, read(f"{prefix}{m}.weight", shapes[m]), spec) for m in _MEMBERS[name]]
        return Linear(torch.cat(parts))

    def head_norm(name: str) -> Tensor | None:
        if not spec.qk_norm:
            return None
        weight = read(f"{prefix}self_attn.{name}.weight", (spec.head_dim,), torch.float32)
        return interleave(weight, spec.head_dim)

    return Layer(
        attn_norm=read(f"{prefix}input_layernorm.weight", (spec.hidden,), torch.float32),
        mlp_norm=read(f"{prefix}post_attention_layernorm.weight", (spec.hidden,), torch.float32),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        products={name: product(name) for name in PRODUCTS},
    )


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(out, in) of every matrix of a layer."""
    return {
        "self_attn.q_proj": (spec.q_size, spec.hidden),
        "self_attn.k_proj": (spec.kv_size, spec.hidden),
        "self_attn.v_proj": (spec.kv_size, spec.hidden),
        "self_attn.o_proj": (spec.hidden, spec.q_size),
        "mlp.gate_proj": (spec.intermediate, spec.hidden),
        "mlp.up_proj": (spec.intermediate, spec.hidden),
        "mlp.down_proj": (spec.hidden, spec.intermediate),
    }


def _arranged(member: str, rows: Tensor, spec: ModelSpec) -> Tensor:
    """Rows of a query or key matrix interleaved, others as they are."""
    rotated = member in ("self_attn.q_proj", "self_attn.k_proj")
    return interleave(rows, spec.head_dim) if rotated else rows


def load_adapter(
    name: str, folder: Path, spec: ModelSpec, *, max_rank: int, dtype: torch.dtype, device: torch.device
) -> Adapter:
    """Reads a PEFT LoRA folder.

    Raises:
        ModelError: not LoRA, a rank above `max_rank`, an unknown target or option, or wrong shapes.
    """
    config = _adapter_config(folder)
    with _Tensors(folder, dtype, device, pattern="adapter_model*.safetensors") as read:
        found = _by_module(read.names, folder, spec)
        layers: list[dict[str, LowRank]] = []
        for index in range(spec.layers):
            layer: dict[str, LowRank] = {}
            for product in PRODUCTS:
                keys = {m: found.pop((index, m)) for m in _MEMBERS[product] if (index, m) in found}
                if keys:
                    layer[product] = _fused_low_rank(read, keys, product, spec, config, max_rank)
            layers.append(layer)
    return Adapter(name=name, layers=tuple(layers))


def _adapter_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "adapter_config.json"
    try:
        config = cast(dict[str, Any], json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type {config.get('peft_type')!r} is not LORA")
    for option in ("use_dora", "alpha_pattern", "rank_pattern", "modules_to_save", "lora_bias"):
        if config.get(option):
            raise ModelError(f"{path}: {option} is not supported by the embedded engine")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias {config['bias']!r} is not none")
    return config


def _by_module(names: list[str], folder: Path, spec: ModelSpec) -> dict[tuple[int, str], str]:
    """(layer, member) -> common stem of the two tensor names."""
    members = {m for group in _MEMBERS.values() for m in group}
    found: dict[tuple[int, str], str] = {}
    for name in names:
        stem = name.rsplit(".lora_", 1)[0]
        _, _, rest = stem.partition(".layers.")
        index, _, member = rest.partition(".")
        if member not in members or not index.isdigit() or int(index) >= spec.layers:
            raise ModelError(f"{folder}: {name} fits no matrix of this model")
        found[int(index), member] = stem
    if not found:
        raise ModelError(f"{folder} holds no adapter tensors")
    return found


def _fused_low_rank(
    read: "_Tensors",
    stems: Mapping[str, str],
    product: str,
    spec: ModelSpec,
    config: Mapping[str, Any],
    max_rank: int,
) -> LowRank:
    """Stacks the members' A matrices and puts their B matrices on a block diagonal."""
    shapes = _shapes(spec)
    downs: list[Tensor] = []
    ups: list[Tensor] = []
    for member in _MEMBERS[product]:
        out, inner = shapes[member]
        if member not in stems:
            ups.append(torch.zeros(out, 0, dtype=read.dtype, device=read.device))
            continue
        down = read(f"{stems[member]}.lora_A.weight", (None, inner))
        rank = down.shape[0]
        if rank > max_rank:
            raise ModelError(f"{read.folder}: rank {rank} is above --max-lora-rank {max_rank}")
        up = read(f"{stems[member]}.lora_B.weight", (out, rank), torch.float32)
        scale = float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
        downs.append(down)
        ups.append((_arranged(member, up, spec) * scale).to(read.dtype))
    return LowRank(torch.cat(downs), torch.block_diag(*ups))


class _Tensors:
    """Named tensors of the safetensors files of a folder, checked and converted as they are read."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, pattern: str = "*.safetensors") -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        self._pattern = pattern
        self._files: dict[str, Any] = {}
        self._open: list[Any] = []

    def __enter__(self) -> "_Tensors":
        paths = sorted(self.folder.glob(self._pattern))
        if not paths:
            raise ModelError(f"{self.folder} holds no {self._pattern}")
        for path in paths:
            try:
                handle = safe_open(path, framework="pt")
                self._open.append(handle.__enter__())
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from None
            self._files.update(dict.fromkeys(handle.keys(), handle))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._open:
            handle.__exit__(None, None, None)

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._files)

    def __call__(self, name: str, shape: tuple[int | None, ...], dtype: torch.dtype | None = None) -> Tensor:
        if name not in self._files:
            raise ModelError(f"{self.folder}: tensor {name} is missing")
        try:
            tensor = cast(Tensor, self._files[name].get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.folder}: {name} cannot be read: {error}") from None
        if len(tensor.shape) != len(shape) or any(w not in (None, g) for w, g in zip(shape, tensor.shape, strict=True)):
            raise ModelError(f"{self.folder}: {name} has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor.to(self.device, dtype or self.dtype)
