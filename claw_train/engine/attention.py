"""Attention over rows of a pool: decoding rows side by side, chunks of prompts, prefixes that many rows share.

In: queries of the flat tokens, and where their keys lie. Out: the attention's result for each of them. Rows that
begin with the same tokens read those keys once, together; the two parts of their result, shared prefix and own rest,
are joined by their normalisers (as in flash decoding: softmax over a union is the mean of the parts' softmaxes,
weighted by their sums of exponentials). It knows no weights and no request.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from claw_train.engine.kv import Pool
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
    skipped: int
    """Tokens that every row of the group leaves to a shared prefix."""
    longest: int
    """Tokens of the longest row, the new one included."""
    mask: Tensor | None
    """[count, 1, 1, longest - skipped] -inf outside what a row reads itself; None when nothing is masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """Tokens that some decoding rows have in common."""

    pool: Pool
    row: int
    """One of the rows: all hold the same keys."""
    length: int
    """Tokens."""
    count: int
    """Rows that read it."""


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
class Layout:
    """All attention of one pass."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    shared: tuple[SharedPrefix, ...]
    sharing: Tensor
    """Flat tokens of the rows that read `shared`, prefix by prefix."""


class Attention:
    """Computes for one model's sizes."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._scale = spec.head_dim**-0.5

    def __call__(self, q: Tensor, layer: int, layout: Layout) -> Tensor:
        """[T, heads * head_dim] -> the same shape."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        sums = q.new_empty(len(q), self._spec.heads, dtype=torch.float32) if layout.shared else None
        for group in layout.groups:
            rows = slice(group.start, group.start + group.count)
            if sums is None:
                out[rows] = self._decode(q[rows], group, layer)
            else:
                out[rows], sums[rows] = self._decode_with_sums(q[rows], group, layer)
        if sums is not None:
            self._join(q, out, sums, layer, layout)
        for chunk in layout.chunks:
            rows = slice(chunk.start, chunk.start + chunk.count)
            out[rows] = self._prefill(q[rows], chunk, layer)
        return out

    def _keys(self, pool: Pool, layer: int) -> Tensor:
        """[rows, capacity, 2 * kv_heads, head_dim]"""
        return pool.layers[layer].view(-1, pool.capacity, 2 * self._spec.kv_heads, self._spec.head_dim)

    def _arranged(self, q: Tensor, group: DecodeGroup, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values and mask of a group.

        The query heads of one key head take the place of query positions, so that its keys are read once.
        """
        rows = slice(group.first_row, group.first_row + group.count)
        kv = self._keys(group.pool, layer)[rows, group.skipped : group.longest]
        k, v = kv.transpose(1, 2).chunk(2, 1)
        q = q.view(group.count, self._spec.kv_heads, -1, self._spec.head_dim)
        return q, k, v, group.mask if group.mask is None else group.mask.expand(-1, 1, q.shape[2], -1)

    def _decode(self, q: Tensor, group: DecodeGroup, layer: int) -> Tensor:
        q, k, v, mask = self._arranged(q, group, layer)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self._scale)
        return out.reshape(group.count, self._spec.q_size)

    def _decode_with_sums(self, q: Tensor, group: DecodeGroup, layer: int) -> tuple[Tensor, Tensor]:
        """The result, and the logarithm of each head's sum of exponentials [count, heads]."""
        out, sums = _flash(*self._arranged(q, group, layer), scale=self._scale)
        return out.reshape(group.count, self._spec.q_size), sums.reshape(group.count, self._spec.heads)

    def _join(self, q: Tensor, out: Tensor, sums: Tensor, layer: int, layout: Layout) -> None:
        """Adds the shared prefixes' part to the rows that read them."""
        spec = self._spec
        heads = (spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        queries = q[layout.sharing].view(-1, *heads).transpose(0, 1)
        start = 0
        for prefix in layout.shared:
            kv = self._keys(prefix.pool, layer)[prefix.row, : prefix.length]
            k, v = kv.transpose(0, 1)[None].chunk(2, 1)
            part = queries[:, start : start + prefix.count].reshape(1, spec.kv_heads, -1, spec.head_dim)
            o, lse = _flash(part, k, v, None, scale=self._scale)
            outs.append(o.view(spec.kv_heads, prefix.count, *heads[1:]).transpose(0, 1))
            lses.append(lse.view(spec.kv_heads, prefix.count, heads[1]).transpose(0, 1))
            start += prefix.count
        shared = torch.cat(outs).view(-1, spec.heads, spec.head_dim)
        own = out[layout.sharing].view(-1, spec.heads, spec.head_dim)
        weight = torch.sigmoid(torch.cat(lses).view(-1, spec.heads) - sums[layout.sharing])[..., None]
        joined = torch.lerp(own.float(), shared.float(), weight)
        out[layout.sharing] = joined.view(-1, spec.q_size).to(out.dtype)

    def _prefill(self, q: Tensor, chunk: Chunk, layer: int) -> Tensor:
        kv = self._keys(chunk.pool, layer)[chunk.row, : chunk.past + chunk.count].transpose(0, 1)[None]
        k, v = kv.chunk(2, 1)
        q = q.view(chunk.count, self._spec.heads, self._spec.head_dim).transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=self._scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(chunk.count, self._spec.q_size)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and the logarithm of its sums of exponentials: [b, h, n, d] -> ([b, h, n, d], [b, h, n])."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
