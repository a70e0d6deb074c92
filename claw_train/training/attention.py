"""Attention over packed rows, plugged into transformers under the name `claw_tree`.

In: a model's queries, keys and values of one row and the row's blocks (given to the model's forward as `claw_blocks`).
Out: what each sample's own causal attention would give. Knows neither samples nor losses.
"""

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
        module: the attention layer; its `num_key_value_groups` says how many query heads share a key head.
        query: [1, H, P, D]
        key: [1, K, P, D]
        value: [1, K, P, D]
        attention_mask: unused; the blocks hold the mask.
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
    groups = query.shape[1] // key.shape[1]
    outputs: list[Tensor] = []
    for block in claw_blocks:
        seen_keys, seen_values = (_spread(_take(x, block), groups) for x in (key, value))
        outputs.append(
            nn.functional.scaled_dot_product_attention(
                query[:, :, block.start : block.end], seen_keys, seen_values, attn_mask=block.mask, scale=scaling
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _take(x: Tensor, block: Block) -> Tensor:
    parts = [x[:, :, a:b] for a, b in block.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _spread(x: Tensor, groups: int) -> Tensor:
    """[1, K, S, D] -> [1, K * groups, S, D]; each key head beside itself."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)
