"""Turns the running requests into one pass of the model.

In: requests with a row each. Out: a `Plan` and the `Work` it does for each request. All requests that need one token
decode together; what is left of the pass goes to chunks of prompts. It changes no request.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from claw_train.engine.checkpoint import Adapter
from claw_train.engine.kv import Pool
from claw_train.engine.layout import lay_out
from claw_train.engine.model import Plan
from claw_train.engine.request import Request
from claw_train.engine.work import Work


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
    """Lays the chosen tokens out, pool by pool, decoding rows first and by index."""
    pools: dict[Pool, list[tuple[Request, int]]] = {}
    for request, count in chosen:
        assert request.row is not None
        pools.setdefault(request.row.pool, []).append((request, count))
    works: list[Work] = []
    writes: list[tuple[Pool, int, int, Tensor]] = []
    flat = 0
    for pool, members in pools.items():
        first, before = flat, len(works)
        for request, count in sorted(members, key=_decodes_first):
            works.append(Work.plan(request, flat, count))
            flat += count
        slots = [s for w in works[before:] for s in w.slots]
        writes.append((pool, first, flat, torch.tensor(slots, device=device)))
    plan = Plan(
        ids=torch.tensor([t for w in works for t in w.ids], device=device),
        positions=torch.tensor([p for w in works for p in w.positions], device=device),
        writes=tuple(writes),
        layout=lay_out(works, dtype, device),
        adapters=_adapters(works, device),
        wanted=torch.tensor([i for w in works for i in w.wanted], dtype=torch.long, device=device),
    )
    return plan, works


def _decodes_first(member: tuple[Request, int]) -> tuple[bool, int]:
    request, count = member
    assert request.row is not None
    return count > 1, request.row.index


def _adapters(works: Sequence[Work], device: torch.device) -> tuple[tuple[Tensor | None, Adapter], ...]:
    rows: dict[Adapter | None, list[int]] = {}
    for w in works:
        rows.setdefault(w.request.adapter, []).extend(range(w.start, w.start + w.count))
    if len(rows) == 1:
        return tuple((None, a) for a in rows if a is not None)
    return tuple((torch.tensor(r, device=device), a) for a, r in rows.items() if a is not None)
