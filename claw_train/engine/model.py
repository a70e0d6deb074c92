"""The forward pass of Llama and Qwen3 over a ragged batch.

In: a flat list of tokens, each with its position and its place in a key-value row. Out: hidden states and logits.
Decoding requests and chunks of prompts go through the matrices together; only attention treats them apart.
The residual stream and the norms are float32 whatever the weights are. It knows no request and samples nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from claw_train.engine.attention import Attention, Layout
from claw_train.engine.checkpoint import Adapter, Layer, Weights
from claw_train.engine.kv import Pool
from claw_train.engine.linear import LowRank, add_low_rank
from claw_train.engine.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One pass."""

    ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    writes: tuple[tuple[Pool, int, int, Tensor], ...]
    """(pool, start, end, slots [end - start]): where the keys of flat tokens [start, end) go."""
    layout: Layout
    adapters: tuple[tuple[Tensor | None, Adapter], ...]
    """Adapters and the flat tokens they act on; None is all."""
    wanted: Tensor
    """[W] flat tokens whose hidden states are asked for."""


class Model:
    """Computes; holds positions, not weights."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self._dtype = spec, dtype
        self._rotations = _rotations(spec, device)
        self._attention = Attention(spec)

    def forward(self, weights: Weights, plan: Plan) -> Tensor:
        """Normalised hidden states [W, hidden] of the wanted tokens; keys and values are written."""
        x = weights.embedding[plan.ids].float()
        rotation = self._rotations[plan.positions][:, None]
        for index, layer in enumerate(weights.layers):
            parts = {name: _parts(plan, index, name) for name in layer.products} if plan.adapters else {}
            self._block(x, layer, index, plan, rotation, parts)
        return self._norm(x[plan.wanted], weights.final_norm)

    def logits(self, weights: Weights, hidden: Tensor) -> Tensor:
        """[W, hidden] -> [W, vocab] float32."""
        return weights.head(hidden).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.spec.hidden,), weight, self.spec.eps).to(self._dtype)

    def _block(
        self,
        x: Tensor,
        layer: Layer,
        index: int,
        plan: Plan,
        rotation: Tensor,
        parts: Mapping[str, "_Parts"],
    ) -> None:
        """One layer, added to the residual stream `x` [T, hidden] in place."""
        products = layer.products

        def product(name: str, inputs: Tensor) -> Tensor:
            y = products[name](inputs)
            if parts:
                add_low_rank(y, inputs, parts[name])
            return y

        qkv = product("qkv", self._norm(x, layer.attn_norm))
        self._rotate(qkv, layer, rotation)
        q, kv = qkv[:, : self.spec.q_size], qkv[:, self.spec.q_size :]
        kv = kv.view(len(kv), 2 * self.spec.kv_heads, self.spec.head_dim)
        for pool, start, end, slots in plan.writes:
            pool.layers[index].index_copy_(0, slots, kv[start:end])
        x.add_(product("o", self._attention(q, index, plan.layout)))
        gate, up = product("gate_up", self._norm(x, layer.mlp_norm)).chunk(2, -1)
        x.add_(product("down", F.silu(gate).mul_(up)))

    def _rotate(self, qkv: Tensor, layer: Layer, rotation: Tensor) -> None:
        """Normalises (Qwen3) and rotates queries and keys in place; pairs are neighbours, so one complex product."""
        spec = self.spec
        heads = qkv[:, : spec.q_size + spec.kv_size].view(len(qkv), spec.heads + spec.kv_heads, spec.head_dim)
        x = heads.float()
        if layer.q_norm is not None and layer.k_norm is not None:
            x = F.rms_norm(x, (spec.head_dim,), None, spec.eps)
            x[:, : spec.heads] *= layer.q_norm
            x[:, spec.heads :] *= layer.k_norm
        pairs = torch.view_as_complex(x.view(*x.shape[:2], spec.head_dim // 2, 2))
        heads.copy_(torch.view_as_real(pairs * rotation).flatten(2))


_Parts = Sequence[tuple[Tensor | None, LowRank]]


def _parts(plan: Plan, index: int, product: str) -> list[tuple[Tensor | None, LowRank]]:
    """The adapters' shares of one product of one layer."""
    return [(rows, a.layers[index][product]) for rows, a in plan.adapters if product in a.layers[index]]


def _rotations(spec: ModelSpec, device: torch.device) -> Tensor:
    """e^(i * position * frequency) as [context, head_dim / 2] complex64 (RoPE, arXiv 2104.09864, equation 15)."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=device) / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    positions = torch.arange(spec.context, dtype=torch.float32, device=device) / spec.rope_factor
    angles = torch.outer(positions, frequencies)
    return torch.polar(torch.ones_like(angles), angles)
