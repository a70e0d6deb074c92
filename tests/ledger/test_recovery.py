"""What a checkpoint makes of the ledger: the rules of `reconcile`, one by one."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from claw_train.ledger import DropReason, Ledger, Recovery, State
from claw_train.ledger.export import consumed_turns, iter_turns, step_records
from claw_train.ledger.states import StepStatus
from claw_train.types import TurnId
from tests.ledger.values import FAILED, PLUS, group, scored, state, trajectory, turn


async def played(ledger: Ledger, index: int, *, ended: int = 2) -> list[TurnId]:
    """A group of two episodes with one judged turn each, `ended` of them ended."""
    await ledger.add_group(group(index, size=2))
    keys: list[TurnId] = []
    for member in range(2):
        one = turn(f"g{index}-{member}", group_id=f"g{index}", text=f"reply {member}")
        await ledger.capture(one)
        await ledger.bind(one.id, state())
        await ledger.judge(scored(one, PLUS if member else FAILED))
        keys.append(one.id)
        if member < ended:
            await ledger.end_trajectory(trajectory(f"g{index}-{member}", (one.id,), group_id=f"g{index}"))
    return keys


async def leased(ledger: Ledger, index: int, step: int) -> list[TurnId]:
    keys = await played(ledger, index)
    await ledger.eligible(keys)
    await ledger.lease(step, keys)
    return keys


def restart(folder: Path, script, checkpoint_step: int, **how: bool) -> Recovery:
    """Plays `script`, reopens, reconciles, audits."""

    async def go() -> Recovery:
        async with Ledger.open(folder, create=True) as ledger:
            await script(ledger)
        async with Ledger.open(folder, create=False) as ledger:
            recovery = await ledger.reconcile(checkpoint_step, **how)
            await ledger.audit()
            return recovery

    return asyncio.run(go())


def fates(folder: Path) -> list[tuple[State, int, DropReason | None]]:
    return [(t.state, t.id.attempt, t.reason) for t in iter_turns(folder)]


def test_a_lease_the_checkpoint_holds_is_consumed(run_dir):
    recovery = restart(run_dir, lambda ledger: leased(ledger, 0, 1), 1)
    assert fates(run_dir) == [(State.CONSUMED, 0, None)] * 2
    assert recovery == Recovery(next_group_index=1)
    assert [(s.step, s.status) for s in step_records(run_dir)] == [(1, StepStatus.COMMITTED)]


def test_a_lease_it_does_not_hold_goes_again(run_dir):
    recovery = restart(run_dir, lambda ledger: leased(ledger, 0, 1), 0)
    assert fates(run_dir) == [(State.ELIGIBLE, 1, None)] * 2
    (complete,) = recovery.complete
    assert [s.turn.id.attempt for s in complete.scored] == [1, 1]
    assert [t.turn_ids for t in complete.trajectories] == [(s.turn.id,) for s in complete.scored]
    assert [s.reward for s in complete.scored] == [FAILED, PLUS]
    assert complete.scored[1].turn.completion.text == "reply 1"


def test_a_third_lost_lease_is_poison(run_dir):
    restart(run_dir, lambda ledger: leased(ledger, 0, 1), 0)

    async def again() -> Recovery:
        async with Ledger.open(run_dir, create=False) as ledger:
            (complete,) = (await ledger.reconcile(0)).complete
            await ledger.lease(1, [s.turn.id for s in complete.scored])
        async with Ledger.open(run_dir, create=False) as ledger:
            recovery = await ledger.reconcile(0)
            await ledger.audit()
            return recovery

    assert len(asyncio.run(again()).complete) == 1
    assert asyncio.run(again()).complete == ()
    assert fates(run_dir) == [(State.DROPPED, 3, DropReason.POISON)] * 2


@pytest.mark.parametrize(
    ("rolled_back", "fate", "status"),
    [
        (False, (State.ELIGIBLE, 1, None), StepStatus.LOST),
        (True, (State.DROPPED, 0, DropReason.ROLLED_BACK), StepStatus.ROLLED_BACK),
    ],
)
def test_a_step_after_the_checkpoint_is_lost_or_rolled_back(run_dir, rolled_back, fate, status):
    async def script(ledger: Ledger) -> None:
        for step in (1, 2):
            await leased(ledger, step, step)
            await ledger.consume(step, f"c{step}", {"loss": 0.5})

    recovery = restart(run_dir, script, 1, rolled_back=rolled_back)
    assert fates(run_dir) == [(State.CONSUMED, 0, None)] * 2 + [fate] * 2
    assert [s.status for s in step_records(run_dir)] == [StepStatus.COMMITTED, status]
    assert [c.record.id for c in recovery.complete] == ([] if rolled_back else ["g2"])
    assert [t.session for t in consumed_turns(run_dir)] == ["g1-0", "g1-1"]


def test_a_lost_checkpoint_poisons_nobody(run_dir):
    async def script(ledger: Ledger) -> None:
        await leased(ledger, 0, 1)
        await ledger.consume(1, "c1")

    restart(run_dir, script, 0)

    async def again() -> None:
        for _ in range(4):
            async with Ledger.open(run_dir, create=False) as ledger:
                (complete,) = (await ledger.reconcile(0)).complete
                await ledger.lease(1, [s.turn.id for s in complete.scored])
                await ledger.consume(1, "c1")
                await ledger.audit()

    asyncio.run(again())
    assert fates(run_dir) == [(State.CONSUMED, 5 - 1, None)] * 2


def test_an_unfinished_group_is_interrupted_and_reissued(run_dir):
    recovery = restart(run_dir, lambda ledger: played(ledger, 0, ended=1), 0)
    assert fates(run_dir) == [(State.DROPPED, 0, DropReason.INTERRUPTED)] * 2
    assert recovery.reissue == (replace(group(0, size=2), attempt=1),)
    assert recovery.complete == ()


def test_a_reissued_group_counts_its_own_trajectories_only(run_dir):
    restart(run_dir, lambda ledger: played(ledger, 0, ended=1), 0)

    async def again() -> Recovery:
        async with Ledger.open(run_dir, create=False) as ledger:
            one = turn("g0-1", attempt=1)
            await ledger.capture(one)
            await ledger.bind(one.id, state())
            await ledger.judge(scored(one))
            await ledger.end_trajectory(trajectory("g0-1", (one.id,)))
            return await ledger.reconcile(0)

    assert [g.attempt for g in asyncio.run(again()).reissue] == [2]


def test_a_group_with_an_unjudged_turn_is_reissued(run_dir):
    async def script(ledger: Ledger) -> None:
        await played(ledger, 0)
        late = turn("g0-0", 1)
        await ledger.capture(late)
        await ledger.bind(late.id, state())

    assert [g.id for g in restart(run_dir, script, 0).reissue] == ["g0"]


def test_an_unjudged_turn_of_a_failed_episode_holds_nothing_up(run_dir):
    async def script(ledger: Ledger) -> None:
        keys = await played(ledger, 0, ended=1)
        late = turn("g0-1", 1)
        await ledger.capture(late)
        await ledger.end_trajectory(trajectory("g0-1", (keys[1], late.id), failed=True))

    recovery = restart(run_dir, script, 0)
    assert [len(c.scored) for c in recovery.complete] == [2]
    assert fates(run_dir)[2] == (State.DROPPED, 0, DropReason.INFRA_ERROR)


def test_decisions_about_an_unfinished_step_are_forgotten(run_dir):
    async def script(ledger: Ledger) -> None:
        keys = await played(ledger, 0)
        await ledger.drop(keys[:1], DropReason.CUT)
        await ledger.eligible(keys[1:])
        await ledger.lease(1, keys[1:])

    recovery = restart(run_dir, script, 0)
    assert [s.turn.id.session for s in recovery.complete[0].scored] == ["g0-0", "g0-1"]
    assert fates(run_dir) == [(State.ELIGIBLE, 0, None), (State.ELIGIBLE, 1, None)]


@pytest.mark.parametrize(("checkpoint", "back"), [(0, True), (1, False)])
def test_a_group_left_out_of_a_batch_comes_back_with_its_step(run_dir, checkpoint, back):
    async def script(ledger: Ledger) -> None:
        await ledger.drop(await played(ledger, 0), DropReason.NO_SIGNAL, step=1)
        await ledger.consume(1, "c1")

    recovery = restart(run_dir, script, checkpoint)
    assert [len(c.scored) for c in recovery.complete] == ([2] if back else [])
    assert {f[0] for f in fates(run_dir)} == {State.ELIGIBLE if back else State.DROPPED}


def test_a_group_left_out_of_a_rolled_back_batch_stays_dropped(run_dir):
    async def script(ledger: Ledger) -> None:
        await ledger.drop(await played(ledger, 0), DropReason.NO_SIGNAL, step=1)
        await ledger.consume(1, "c1")

    assert restart(run_dir, script, 0, rolled_back=True).complete == ()
    assert fates(run_dir) == [(State.DROPPED, 0, DropReason.NO_SIGNAL)] * 2


def test_decisions_about_a_settled_group_stand(run_dir):
    async def script(ledger: Ledger) -> None:
        await ledger.drop(await played(ledger, 0), DropReason.NO_SIGNAL)
        keys = await leased(ledger, 1, 1)
        await ledger.drop(keys[:1], DropReason.CUT)

    recovery = restart(run_dir, script, 1)
    assert (recovery.complete, recovery.reissue) == ((), ())
    assert [f[0] for f in fates(run_dir)] == [State.DROPPED] * 3 + [State.CONSUMED]


def test_a_closed_group_stays_closed(run_dir):
    async def script(ledger: Ledger) -> None:
        await played(ledger, 0, ended=1)
        await ledger.drop_group("g0", DropReason.STALE)
        await ledger.capture(turn("g0-1", 1))  # an episode that had not heard of it yet

    recovery = restart(run_dir, script, 0)
    assert (recovery.complete, recovery.reissue) == ((), ())
    assert fates(run_dir) == [(State.DROPPED, 0, DropReason.STALE)] * 3


def test_groups_come_back_by_index(run_dir):
    async def script(ledger: Ledger) -> None:
        for index in (3, 0, 2, 1):
            await played(ledger, index, ended=index % 2 + 1)

    recovery = restart(run_dir, script, 0)
    assert [g.index for g in recovery.reissue] == [0, 2]
    assert [c.record.index for c in recovery.complete] == [1, 3]
    assert recovery.next_group_index == 4


def test_reconciling_twice_is_reconciling_once(run_dir):
    first = restart(run_dir, lambda ledger: leased(ledger, 0, 1), 0)

    async def again() -> Recovery:
        async with Ledger.open(run_dir, create=False) as ledger:
            return await ledger.reconcile(0)

    assert asyncio.run(again()) == first


def test_the_group_of_a_consumed_turn_is_never_played_again(run_dir):
    async def script(ledger: Ledger) -> None:
        keys = await played(ledger, 0, ended=1)
        await ledger.eligible(keys[:1])
        await ledger.lease(1, keys[:1])
        await ledger.consume(1, "c1")

    recovery = restart(run_dir, script, 1)
    assert (recovery.complete, recovery.reissue) == ((), ())
    assert [f[0] for f in fates(run_dir)] == [State.CONSUMED, State.DROPPED]
