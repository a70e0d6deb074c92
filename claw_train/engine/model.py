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

from claw_train.engine.checkpoint import Adapter, Layer, Weights
from claw_train.engine.kv import Pool
from claw_train.engine.linear import LowRank, add_low_rank
from claw_train.engine.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """One new token for each of some neighbouring rows of a pool."""

    pool: Pool
    first_row: int
    start: int
    """Of its tokens in the flat list."""
    count: int
    """Rows, and tokens."""
    longest: int
    """Tokens of the longest row, the new one included."""
    mask: Tensor | None
    """[count, 1, 1, longest] -inf beyond a row's length; None when all are equally long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some tokens of one prompt."""

    pool: Pool
    row: int
    start: int
    """Of its tokens in the flat list."""
    count: int
    past: int
    """Tokens already in the row."""
    mask: Tensor | None
    """[count, past + count] -inf above the diagonal; None when `past` is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One pass."""

    ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    writes: tuple[tuple[Pool, int, int, Tensor], ...]
    """(pool, start, end, slots [end - start]): where the keys of flat tokens [start, end) go."""
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    adapters: tuple[tuple[Tensor | None, Adapter], ...]
    """Adapters and the flat tokens they act on; None is all."""
    wanted: Tensor
    """[W] flat tokens whose hidden states are asked for."""


class Model:
    """Computes; holds positions, not weights."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self._dtype = spec, dtype
        self._rotations = _rotations(spec, device)
        self._scale = spec.head_dim**-0.5

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
        x.add_(product("o", self._attention(q, index, plan)))
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

    def _attention(self, q: Tensor, index: int, plan: Plan) -> Tensor:
        """[T, heads * head_dim] -> the same shape."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in plan.groups:
            rows = slice(group.start, group.start + group.count)
            out[rows] = self._decode(q[rows], group, index)
        for chunk in plan.chunks:
            rows = slice(chunk.start, chunk.start + chunk.count)
            out[rows] = self._prefill(q[rows], chunk, index)
        return out

    def _decode(self, q: Tensor, group: DecodeGroup, index: int) -> Tensor:
        spec, pool = self.spec, group.pool
        rows = slice(group.first_row, group.first_row + group.count)
        kv = pool.layers[index].view(-1, pool.capacity, 2 * spec.kv_heads, spec.head_dim)[rows, : group.longest]
        k, v = kv.transpose(1, 2).chunk(2, 1)
        # the query heads of one key head take the place of query positions: its keys are read once
        q = q.view(group.count, spec.kv_heads, -1, spec.head_dim)
        mask = group.mask if group.mask is None else group.mask.expand(-1, 1, q.shape[2], -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self._scale)
        return out.reshape(group.count, spec.q_size)

    def _prefill(self, q: Tensor, chunk: Chunk, index: int) -> Tensor:
        spec, start = self.spec, chunk.row * chunk.pool.capacity
        kv = chunk.pool.layers[index][start : start + chunk.past + chunk.count].transpose(0, 1)[None]
        k, v = kv.chunk(2, 1)
        q = q.view(chunk.count, spec.heads, spec.head_dim).transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=self._scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(chunk.count, spec.q_size)


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
