"""Attention over packed rows, plugged into transformers under the name `claw_tree`.

In: a model's queries, keys and values of one row and the row's blocks (given to the model's forward as `claw_blocks`).
Out: what each sample's own causal attention would give. Knows neither samples nor losses.

The way forward is torch's fused kernel. The way back is written out in matrix products: on a CPU it is three times as
fast as the fused kernel's, and the slices of keys and values add into one buffer instead of a padded copy each.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from claw_train.training.blocks import Block

NAME = "claw_tree"


def register() -> None:
    """Makes `NAME` known to transformers. Idempotent."""
    AttentionInterface.register(NAME, tree_attention)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    claw_blocks: tuple[Block, ...] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """One row's attention, block by block.

    Args:
        module: the attention layer; not used.
        query: [1, H, P, D]
        key: [1, K, P, D]; K divides H, and each key head serves H / K query heads in a row.
        value: [1, K, P, D]
        attention_mask: not used; the blocks hold the mask.
        scaling: factor of the scores; None is 1 / sqrt(D).
        dropout: must be 0.
        claw_blocks: cover the queries 0 to P without a gap.

    Returns:
        [1, P, H, D] and no weights.

    Raises:
        ValueError: called without blocks, or with dropout.
    """
    if claw_blocks is None or dropout:
        raise ValueError("packed attention needs claw_blocks and no dropout")
    scale = scaling if scaling is not None else 1.0 / math.sqrt(query.shape[-1])
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    q, k, v = (x[0].to(dtype) for x in (query, key, value))
    output: Tensor = _TreeAttention.apply(q, k, v, claw_blocks, scale)  # pyright: ignore[reportAssignmentType]
    return output.transpose(0, 1)[None].contiguous(), None


class _TreeAttention(torch.autograd.Function):
    """[H, P, D], [K, P, D], [K, P, D] -> [H, P, D]"""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Block, ...], scale: float) -> Tensor:
        groups = query.shape[0] // key.shape[0]
        output = torch.empty_like(query)
        for block in blocks:
            keys, values = (_take(x, block).repeat_interleave(groups, dim=0)[None] for x in (key, value))
            queries = query[None, :, block.start : block.end]
            bias = block.bias(query.dtype)
            output[:, block.start : block.end] = nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=bias, scale=scale
            )[0]
        ctx.save_for_backward(query, key, value, output)
        ctx.blocks, ctx.scale = blocks, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        kinds = {"dtype": torch.promote_types(query.dtype, torch.float32), "device": query.device}
        grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        grad_key, grad_value = torch.zeros(key.shape, **kinds), torch.zeros(value.shape, **kinds)
        heads = key.shape[0]
        for block in ctx.blocks:
            at = slice(block.start, block.end)
            # query heads that share a key head become more queries of it: [K, H / K * Q, D]
            q, o, g = (x[:, at].reshape(heads, -1, x.shape[-1]) for x in (query, output, grad))
            k, v = _take(key, block), _take(value, block)
            bias = block.bias(kinds["dtype"]).repeat(query.shape[0] // heads, 1)
            p = torch.add(bias, q @ k.transpose(1, 2), alpha=ctx.scale).softmax(-1)
            inner = (g.to(kinds["dtype"]) * o).sum(-1, keepdim=True)
            ds = ((g @ v.transpose(1, 2)) - inner).mul_(p).mul_(ctx.scale).to(query.dtype)
            grad_query[:, at] = (ds @ k).reshape(query[:, at].shape)
            _give(grad_value, block, p.to(query.dtype).transpose(1, 2) @ g)
            _give(grad_key, block, ds.transpose(1, 2) @ q)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _take(x: Tensor, block: Block) -> Tensor:
    """[K, P, D] -> [K, S, D], the keys of a block."""
    parts = [x[:, a:b] for a, b in block.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _give(x: Tensor, block: Block, part: Tensor) -> None:
    """Adds [K, S, D] where `_take` took it from."""
    at = 0
    for a, b in block.keys:
        x[:, a:b] += part[:, at : at + b - a]
        at += b - a
