"""Which calls are legal in which state, and that illegal ones change nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from claw_train.errors import LedgerError
from claw_train.ledger import DropReason, Ledger, State
from claw_train.ledger.export import iter_turns
from claw_train.types import Turn, TurnKind
from tests.ledger.values import group, scored, state, trajectory, turn

Call = Callable[[Ledger, Turn], Awaitable[None]]
CALLS: dict[str, Call] = {
    "capture": lambda ledger, t: ledger.capture(t),
    "bind": lambda ledger, t: ledger.bind(t.id, state()),
    "judge": lambda ledger, t: ledger.judge(scored(t)),
    "eligible": lambda ledger, t: ledger.eligible([t.id]),
    "lease": lambda ledger, t: ledger.lease(1, [t.id]),
    "consume": lambda ledger, t: ledger.consume(1, "c"),
    "drop": lambda ledger, t: ledger.drop([t.id], DropReason.CUT),
    "erase": lambda ledger, t: ledger.erase(t.id.session),
}
PATHS = {
    State.CAPTURED: "capture",
    State.BOUND: "capture bind",
    State.JUDGED: "capture bind judge",
    State.ELIGIBLE: "capture bind judge eligible",
    State.LEASED: "capture bind judge eligible lease",
    State.CONSUMED: "capture bind judge eligible lease consume",
    State.DROPPED: "capture drop",
    State.SIDE: "capture",
    State.EVAL: "capture",
    State.ERASED: "capture erase",
}
LEGAL = {
    State.CAPTURED: {"bind": State.BOUND, "drop": State.DROPPED, "erase": State.ERASED},
    State.BOUND: {"judge": State.JUDGED, "drop": State.DROPPED, "erase": State.ERASED},
    State.JUDGED: {"eligible": State.ELIGIBLE, "drop": State.DROPPED, "erase": State.ERASED},
    State.ELIGIBLE: {
        "eligible": State.ELIGIBLE,
        "lease": State.LEASED,
        "drop": State.DROPPED,
        "erase": State.ERASED,
    },
    State.LEASED: {"consume": State.CONSUMED, "drop": State.DROPPED},
    State.CONSUMED: {"erase": State.ERASED},
    State.DROPPED: {"erase": State.ERASED},
    State.SIDE: {"bind": State.SIDE, "erase": State.ERASED},
    State.EVAL: {"bind": State.EVAL, "erase": State.ERASED},
    State.ERASED: {"erase": State.ERASED},
}
# A step without leased turns may be recorded, so `consume` is about the step and legal in every other state, once.
CASES = [(s, c) for s in State for c in CALLS if c != "consume" or s in (State.LEASED, State.CONSUMED)]


@pytest.mark.parametrize(("before", "call"), CASES)
def test_a_call_moves_or_is_refused(run_dir, before, call):
    kind = {State.SIDE: TurnKind.SIDE, State.EVAL: TurnKind.EVAL}.get(before, TurnKind.MAIN)
    one = turn(kind=kind)

    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            for name in PATHS[before].split():
                await CALLS[name](ledger, one)
            counts = await ledger.audit()
            after = LEGAL[before].get(call)
            if after is None:
                with pytest.raises(LedgerError):
                    await CALLS[call](ledger, one)
                assert await ledger.audit() == counts
                after = before
            else:
                await CALLS[call](ledger, one)
                await ledger.audit()
        assert [t.state for t in iter_turns(run_dir)] == [after]

    asyncio.run(go())


@pytest.fixture
def ready(run_dir):
    """(ledger, two eligible turns) inside a running loop."""

    async def make():
        ledger = Ledger.open(run_dir, create=True)
        await ledger.add_group(group())
        turns = [turn(index=i) for i in range(2)]
        for one in turns:
            await ledger.capture(one)
            await ledger.bind(one.id, state())
            await ledger.judge(scored(one))
            await ledger.eligible([one.id])
        return ledger, turns

    return make


def refused(ready, call: Callable[[Ledger, list[Turn]], Awaitable[None]], match: str) -> None:
    async def go() -> None:
        ledger, turns = await ready()
        counts = ledger.counts()
        with pytest.raises(LedgerError, match=match):
            await call(ledger, turns)
        assert await ledger.audit() == counts
        await ledger.aclose()

    asyncio.run(go())


def test_a_lease_is_all_or_none(ready):
    refused(ready, lambda ledger, turns: ledger.lease(1, [turns[0].id, turn(index=7).id]), "no turn")


def test_a_turn_is_leased_once_in_a_batch(ready):
    refused(ready, lambda ledger, turns: ledger.lease(1, [turns[0].id, turns[0].id]), "twice")


def test_a_main_turn_needs_its_group(ready):
    refused(ready, lambda ledger, turns: ledger.capture(turn("s", group_id="other")), "never added")


def test_a_group_index_is_taken_once(ready):
    refused(
        ready,
        lambda ledger, turns: ledger.add_group(replace(group(0), id="x")),
        "index 0 is taken",
    )


def test_a_trajectory_holds_turns_of_its_group(ready):
    async def call(ledger, turns):
        await ledger.add_group(group(1))
        await ledger.end_trajectory(trajectory("g1-0", (turns[0].id,), group_id="g1"))

    refused(ready, call, "is of group g0")


def test_a_trajectory_ends_once(ready):
    async def call(ledger, turns):
        ended = trajectory("g0-0", tuple(t.id for t in turns))
        await ledger.end_trajectory(ended)
        await ledger.end_trajectory(ended)

    refused(ready, call, "has ended already")


def test_a_step_is_leased_once(ready):
    async def go() -> None:
        ledger, turns = await ready()
        await ledger.lease(3, [turns[0].id])
        for step in (2, 3):
            with pytest.raises(LedgerError, match="step 3 is leased"):
                await ledger.lease(step, [turns[1].id])
        await ledger.aclose()

    asyncio.run(go())


def test_steps_are_consumed_in_order(ready):
    async def go() -> None:
        ledger, turns = await ready()
        await ledger.lease(1, [turns[0].id])
        await ledger.lease(2, [turns[1].id])
        with pytest.raises(LedgerError, match="step 1 is still leased"):
            await ledger.consume(2, "c2")
        await ledger.consume(1, "c1")
        await ledger.consume(2, "c2")
        await ledger.consume(4, None)
        for step in (3, 4):
            with pytest.raises(LedgerError, match="step 4 is committed"):
                await ledger.consume(step, "c")
        assert (await ledger.audit()).consumed == 2
        await ledger.aclose()

    asyncio.run(go())


def test_the_same_group_again_changes_nothing(ready):
    async def go() -> None:
        ledger, _ = await ready()
        await ledger.add_group(group())
        with pytest.raises(LedgerError, match="already recorded"):
            await ledger.add_group(replace(group(5), id="g0"))
        await ledger.aclose()

    asyncio.run(go())


def test_dropping_a_group_drops_what_is_open(ready):
    async def go() -> None:
        ledger, turns = await ready()
        await ledger.lease(1, [turns[0].id])
        await ledger.consume(1, "c")
        await ledger.drop_group("g0", DropReason.STALE)
        counts = await ledger.audit()
        assert (counts.consumed, dict(counts.dropped_by)) == (1, {DropReason.STALE: 1})
        await ledger.aclose()

    asyncio.run(go())


def test_a_leased_session_is_not_erased(ready):
    async def call(ledger, turns):
        await ledger.lease(1, [turns[1].id])
        with pytest.raises(LedgerError, match="leased"):
            await ledger.erase("g0-0")
        await ledger.drop([turns[1].id], DropReason.GUARD)
        await ledger.erase("g0-0")
        counts = await ledger.audit()
        assert (counts.total, counts.erased) == (0, 2)
        await ledger.aclose()

    async def go() -> None:
        await call(*await ready())

    asyncio.run(go())
