"""Decides how one pass attends: which rows decode together and which prefixes they read once for all.

In: the work of a pass, pool by pool. Out: a `Layout`. Rows of one group or conversation begin alike; reading their
common keys once instead of once a row is most of a decoding pass when prompts are long. It changes no request.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from claw_train.engine.attention import Chunk, DecodeGroup, Layout, SharedPrefix
from claw_train.engine.prefix import BLOCK
from claw_train.engine.request import Request
from claw_train.engine.work import Work

_WORTH = 1536
"""Token reads that a shared prefix must save in a pass; below, the extra calls cost more than they save."""


def lay_out(works: Sequence[Work], dtype: torch.dtype, device: torch.device) -> Layout:
    """The layout of `works`, which are ordered by pool, decoding rows first and by index."""
    decoding = [w for w in works if w.count == 1]
    # only the CPU's attention reports its normalisers
    shared = choose_shared([w.request for w in decoding]) if device.type == "cpu" else {}
    by_prefix: dict[bytes, list[Work]] = {}
    for w in decoding:
        if (found := shared.get(w.request)) is not None:
            by_prefix.setdefault(found[0], []).append(w)
    sharing = [w.start for members in by_prefix.values() for w in members]
    lengths = {request: length for request, (_, length) in shared.items()}
    return Layout(
        groups=tuple(_group(run, lengths, dtype, device) for run in _runs(decoding)),
        chunks=tuple(_chunk(w, dtype, device) for w in works if w.count > 1),
        shared=tuple(_prefix(members, lengths) for members in by_prefix.values()),
        sharing=torch.tensor(sharing, dtype=torch.long, device=device),
    )


def choose_shared(requests: Sequence[Request]) -> dict[Request, tuple[bytes, int]]:
    """(name, tokens) of the prefix that each request reads together with others; those that read alone are left out.

    Prompts form a tree. At each branching either the rows that meet there share what they have in common, or some of
    its branches, which have more in common, share among themselves: whichever saves more reads.
    """
    return _best(list(requests), 0)[1]


def _best(requests: list[Request], depth: int) -> tuple[int, dict[Request, tuple[bytes, int]]]:
    """(blocks of reads saved, choice) for requests that have `depth` blocks in common."""
    if len(requests) < 2:
        return 0, {}
    branches = _branches(requests, depth)
    while len(branches) == 1 and None not in branches:
        depth += 1
        branches = _branches(requests, depth)
    found = [(branch, *_best(branch, depth + 1)) for name, branch in branches.items() if name is not None]
    apart = sum(saved for _, saved, _ in found)
    deeper = [f for f in found if f[1] > len(f[0]) * depth]
    inside = {r for branch, _, _ in deeper for r in branch}
    here = [r for r in requests if r not in inside]
    saved_here = (len(here) - 1) * depth
    if saved_here * BLOCK < _WORTH or saved_here + sum(f[1] for f in deeper) <= apart:
        return apart, {r: choice for _, _, chosen in found for r, choice in chosen.items()}
    choice = (here[0].boundaries[depth - 1], depth * BLOCK)
    chosen = {r: c for _, _, below in deeper for r, c in below.items()} | dict.fromkeys(here, choice)
    return saved_here + sum(f[1] for f in deeper), chosen


def _branches(requests: Sequence[Request], depth: int) -> dict[bytes | None, list[Request]]:
    """Requests by the name of their next block; None where there is none."""
    branches: dict[bytes | None, list[Request]] = {}
    for r in requests:
        branches.setdefault(r.boundaries[depth] if len(r.boundaries) > depth else None, []).append(r)
    return branches


def _prefix(members: Sequence[Work], lengths: Mapping[Request, int]) -> SharedPrefix:
    row = members[0].row
    return SharedPrefix(pool=row.pool, row=row.index, length=lengths[members[0].request], count=len(members))


def _runs(decoding: Sequence[Work]) -> list[list[Work]]:
    """Splits into runs of neighbouring rows of one pool."""
    runs: list[list[Work]] = []
    for work in decoding:
        last = runs[-1][-1].row if runs else None
        if last is not None and last.pool is work.row.pool and last.index + 1 == work.row.index:
            runs[-1].append(work)
        else:
            runs.append([work])
    return runs


def _group(run: Sequence[Work], shared: Mapping[Request, int], dtype: torch.dtype, device: torch.device) -> DecodeGroup:
    ends = [w.request.computed + 1 for w in run]
    starts = [shared.get(w.request, 0) for w in run]
    skipped, longest = min(starts), max(ends)
    return DecodeGroup(
        pool=run[0].row.pool,
        first_row=run[0].row.index,
        start=run[0].start,
        count=len(run),
        skipped=skipped,
        longest=longest,
        mask=None if max(starts) == skipped and min(ends) == longest else _mask(starts, ends, dtype, device),
    )


def _mask(starts: Sequence[int], ends: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    positions = torch.arange(min(starts), max(ends), device=device)
    outside = positions >= torch.tensor(ends, device=device)[:, None]
    outside |= positions < torch.tensor(starts, device=device)[:, None]
    mask = torch.zeros(outside.shape, dtype=dtype, device=device).masked_fill_(outside, float("-inf"))
    return mask[:, None, None]


def _chunk(work: Work, dtype: torch.dtype, device: torch.device) -> Chunk:
    past, count = work.request.computed, work.count
    mask = None
    if past:
        mask = torch.full((count, past + count), float("-inf"), dtype=dtype, device=device).triu_(past + 1)
    return Chunk(pool=work.row.pool, row=work.row.index, start=work.start, count=count, past=past, mask=mask)
