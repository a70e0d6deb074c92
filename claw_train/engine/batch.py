"""Turns the running requests into one pass of the model.

In: requests with a row each. Out: a `Plan` and the `Work` it does for each request. All requests that need one token
decode together; what is left of the pass goes to chunks of prompts. It changes no request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from claw_train.engine.checkpoint import Adapter
from claw_train.engine.kv import Pool
from claw_train.engine.model import Chunk, DecodeGroup, Plan
from claw_train.engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one pass does for one request."""

    request: Request
    start: int
    """Of its tokens in the flat list."""
    count: int
    scores: tuple[int, int]
    """Prompt positions [from, to) whose log-probabilities this pass gives."""
    draws: bool
    """Whether the next token can be drawn afterwards."""

    @property
    def wanted(self) -> list[int]:
        """Flat indices whose logits are needed."""
        offset = self.start - self.request.computed - 1
        indices = [offset + p for p in range(*self.scores)]
        return [*indices, self.start + self.count - 1] if self.draws else indices


def choose(running: Sequence[Request], prompt_tokens: int) -> list[tuple[Request, int]]:
    """(request, tokens to compute): every decode, then prompts in order of priority within `prompt_tokens`."""
    chosen = [(r, 1) for r in running if r.remaining == 1]
    for request in sorted((r for r in running if r.remaining > 1), key=lambda r: r.sort_key):
        count = min(request.remaining, prompt_tokens)
        if count:
            chosen.append((request, count))
            prompt_tokens -= count
    return chosen


def build(chosen: Sequence[tuple[Request, int]], dtype: torch.dtype, device: torch.device) -> tuple[Plan, list[Work]]:
    """Lays the chosen tokens out, pool by pool."""
    pools: dict[Pool, list[tuple[Request, int]]] = {}
    for request, count in chosen:
        assert request.row is not None
        pools.setdefault(request.row.pool, []).append((request, count))
    works: list[Work] = []
    groups: list[DecodeGroup] = []
    chunks: list[Chunk] = []
    writes: list[tuple[Pool, int, int, Tensor]] = []
    flat = 0
    for pool, members in pools.items():
        first = flat
        decodes = sorted((r for r, count in members if count == 1), key=_row)
        singles = [_work(r, flat + i, 1) for i, r in enumerate(decodes)]
        groups.extend(_groups(pool, singles, dtype, device))
        works.extend(singles)
        flat += len(singles)
        for request, count in members:
            if count > 1:
                works.append(_work(request, flat, count))
                chunks.append(_chunk(pool, works[-1], dtype, device))
                flat += count
        slots = [s for w in works if w.start >= first for s in _slots(w)]
        writes.append((pool, first, flat, torch.tensor(slots, device=device)))
    plan = Plan(
        ids=torch.tensor([t for w in works for t in _ids(w)], device=device),
        positions=torch.tensor([p for w in works for p in _span(w)], device=device),
        writes=tuple(writes),
        groups=tuple(groups),
        chunks=tuple(chunks),
        adapters=_adapters(works, device),
        wanted=torch.tensor([i for w in works for i in w.wanted], dtype=torch.long, device=device),
    )
    return plan, works


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row.index


def _span(work: Work) -> range:
    return range(work.request.computed, work.request.computed + work.count)


def _ids(work: Work) -> list[int]:
    return work.request.tokens[work.request.computed : work.request.computed + work.count]


def _slots(work: Work) -> range:
    row = work.request.row
    assert row is not None
    return range(row.start + row.filled, row.start + row.filled + work.count)


def _work(request: Request, start: int, count: int) -> Work:
    end = request.computed + count
    first = request.score_from + 1 + len(request.input_scores)
    last = min(end + 1, len(request.prompt))
    finished = end == len(request.tokens)
    return Work(
        request=request,
        start=start,
        count=count,
        scores=(first, max(first, last)),
        draws=finished and request.params.max_new_tokens > 0,
    )


def _groups(pool: Pool, works: Sequence[Work], dtype: torch.dtype, device: torch.device) -> list[DecodeGroup]:
    """One group for each run of neighbouring rows."""
    groups: list[DecodeGroup] = []
    run: list[Work] = []
    for work in [*works, None]:
        if run and (work is None or _row(work.request) != _row(run[-1].request) + 1):
            groups.append(_group(pool, run, dtype, device))
            run = []
        if work is not None:
            run.append(work)
    return groups


def _group(pool: Pool, run: Sequence[Work], dtype: torch.dtype, device: torch.device) -> DecodeGroup:
    lengths = [w.request.computed + 1 for w in run]
    longest = max(lengths)
    mask = None
    if min(lengths) < longest:
        beyond = torch.arange(longest, device=device) >= torch.tensor(lengths, device=device)[:, None]
        mask = torch.zeros(len(run), longest, dtype=dtype, device=device).masked_fill_(beyond, float("-inf"))
        mask = mask[:, None, None]
    return DecodeGroup(
        pool=pool,
        first_row=_row(run[0].request),
        start=run[0].start,
        count=len(run),
        longest=longest,
        mask=mask,
    )


def _chunk(pool: Pool, work: Work, dtype: torch.dtype, device: torch.device) -> Chunk:
    past, count = work.request.computed, work.count
    mask = None
    if past:
        mask = torch.full((count, past + count), float("-inf"), dtype=dtype, device=device).triu_(past + 1)
    return Chunk(pool=pool, row=_row(work.request), start=work.start, count=count, past=past, mask=mask)


def _adapters(works: Sequence[Work], device: torch.device) -> tuple[tuple[Tensor | None, Adapter], ...]:
    rows: dict[Adapter | None, list[int]] = {}
    for w in works:
        rows.setdefault(w.request.adapter, []).extend(range(w.start, w.start + w.count))
    if len(rows) == 1:
        return tuple((None, a) for a in rows if a is not None)
    return tuple((torch.tensor(r, device=device), a) for a, r in rows.items() if a is not None)
