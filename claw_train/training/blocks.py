"""Which queries of a packed row see which keys, as few dense rectangles.

In: the runs of new tokens of a row, each with the places of its ancestors. Out: `Block`s, each a run of queries, the
keys that any of them sees and which of them sees which. A row of P tokens in a wide tree allows only a small part of
P x P pairs; the rectangles skip most of the rest. Knows no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK_OVERHEAD = 16_384
"""Pairs of query and key that cost as much as one more rectangle."""
_MAX_QUERIES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Queries [start, end) of a row and the keys they see."""

    start: int
    end: int
    keys: tuple[tuple[int, int], ...]
    """Runs [a, b) of the row, ascending."""
    bias: Tensor
    """[end - start, sum of runs] 0 where the query sees the key, else -inf."""


def query_blocks(segments: Sequence[tuple[Sequence[int], int, int]]) -> tuple[Block, ...]:
    """Covers the queries of a row with blocks.

    Args:
        segments: (places of the ancestors, start, end) of each run of tokens; the runs follow one another from 0 and
            each token also sees the earlier ones of its run and itself.
    """
    total = segments[-1][2] if segments else 0
    allowed = np.zeros((total, total), dtype=bool)
    for path, start, end in segments:
        allowed[start:end, list(path)] = True
        allowed[start:end, start:end] = np.tri(end - start, dtype=bool)
    blocks: list[Block] = []
    for start, end in _cuts(segments, allowed):
        rows = allowed[start:end]
        runs = _runs(np.any(rows, axis=0))
        mask = np.concatenate([rows[:, a:b] for a, b in runs], axis=1)
        bias = torch.zeros(mask.shape).masked_fill_(torch.from_numpy(~mask), float("-inf"))
        blocks.append(Block(start=start, end=end, keys=runs, bias=bias))
    return tuple(blocks)


def _cuts(segments: Sequence[tuple[Sequence[int], int, int]], allowed: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs of queries: neighbours are joined while that costs less than a block of their own."""
    cuts: list[tuple[int, int]] = []
    seen = np.zeros(0, dtype=bool)
    for _, first, last in segments:
        for start in range(first, last, _MAX_QUERIES):
            end = min(last, start + _MAX_QUERIES)
            keys = np.any(allowed[start:end], axis=0)
            if cuts:
                before = cuts[-1][1] - cuts[-1][0]
                joined = before + end - start
                apart = before * seen.sum() + (end - start) * keys.sum() + _BLOCK_OVERHEAD
                if joined <= _MAX_QUERIES and joined * (seen | keys).sum() <= apart:
                    cuts[-1] = (cuts[-1][0], end)
                    seen = seen | keys
                    continue
            cuts.append((start, end))
            seen = keys
    return cuts


def _runs(used: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Runs [a, b) of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], used, [False])).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))
