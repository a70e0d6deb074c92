"""Which queries of a packed row see which keys, as few dense rectangles.

In: the runs of new tokens of a row, each with the places of its ancestors. Out: `Block`s, each a run of queries, the
keys that any of them sees and up to where each key is seen. A row of P tokens in a wide tree allows only a small part
of P x P pairs; the rectangles skip most of the rest. Knows no model.

A row is a tree laid out depth first, so what descends from a token lies in one run that begins with the token itself:
one number a key says who sees it, and a long row takes memory in proportion to its length.

    place k is seen by queries k <= q < until[k]
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK_OVERHEAD = 16_384
"""Pairs of query and key that cost as much as one more rectangle."""
_MAX_QUERIES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Q queries [start, end) of a row and the S keys they see."""

    start: int
    end: int
    keys: tuple[tuple[int, int], ...]
    """Runs [a, b) of the row, ascending; S places."""
    until: Tensor
    """[S] the first query after those that see the key."""

    def bias(self, dtype: torch.dtype) -> Tensor:
        """[Q, S] 0 where the query sees the key, else -inf; made for each use: all of a row's would be P x P."""
        device = self.until.device
        places = torch.cat([torch.arange(a, b, device=device) for a, b in self.keys])
        queries = torch.arange(self.start, self.end, device=device)[:, None]
        unseen = (places > queries) | (queries >= self.until)
        return torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, float("-inf"))

    def to(self, device: torch.device) -> "Block":
        """The same on a device."""
        return replace(self, until=self.until.to(device))


def query_blocks(segments: Sequence[tuple[Sequence[int], int, int]]) -> tuple[Block, ...]:
    """Covers the queries of a row with blocks.

    Args:
        segments: (places of the ancestors, start, end) of each run of tokens; the runs follow one another from 0, each
            token also sees the earlier ones of its run and itself, and the ancestors of a run begin the sequence of
            ancestors and tokens of the run before.
    """
    until = _until(segments)
    blocks: list[Block] = []
    for start, end in _cuts(segments, until):
        used = _seen(until, start, end)
        blocks.append(Block(start=start, end=end, keys=_runs(used), until=torch.from_numpy(until[used])))
    return tuple(blocks)


def _until(segments: Sequence[tuple[Sequence[int], int, int]]) -> NDArray[np.int64]:
    """[P] for each place the first query after its descendants."""
    total = segments[-1][2] if segments else 0
    until = np.full(total, total, dtype=np.int64)
    living: list[int] = []
    for path, start, end in segments:
        until[living[len(path) :]] = start
        living = [*path, *range(start, end)]
    return until


def _seen(until: NDArray[np.int64], start: int, end: int) -> NDArray[np.bool_]:
    """[P] which keys any of the queries [start, end) sees."""
    seen = until > start
    seen[end:] = False
    return seen


def _cuts(segments: Sequence[tuple[Sequence[int], int, int]], until: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Runs of queries: neighbours are joined while that costs less than a block of their own."""
    cuts: list[tuple[int, int]] = []
    seen = np.zeros(0, dtype=bool)
    for _, first, last in segments:
        for start in range(first, last, _MAX_QUERIES):
            end = min(last, start + _MAX_QUERIES)
            keys = _seen(until, start, end)
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
