"""What a checkpoint says about the ledger: which turns are trained, which go again, which are lost.

In: an open store inside a transaction and the step of the last durable checkpoint. Out: a `Recovery`. The checkpoint
wins: a turn leased for a step it holds was trained on, one for a later step was not.
"""

import json
import sqlite3
from typing import cast

from claw_train.codec import load
from claw_train.ledger.rows import decode_scored, turn_id
from claw_train.ledger.states import (
    RECOVERY_REASONS,
    CompleteGroup,
    DropReason,
    GroupRecord,
    Recovery,
    State,
    StepStatus,
)
from claw_train.ledger.store import Store, read_group
from claw_train.types import Reward, ScoredTurn, Trajectory, TrajectoryStatus, TurnKind

MAX_LOST_LEASES = 2
_UNSETTLED = """
SELECT * FROM groups WHERE EXISTS (
  SELECT 1 FROM turns WHERE group_id = groups.id
  AND (state IN ('captured', 'bound', 'judged', 'eligible', 'leased') OR (state = 'dropped' AND step > ?))
) OR (closed IS NULL AND size > (
  SELECT count(*) FROM trajectories WHERE group_id = groups.id AND group_attempt = groups.attempt
)) ORDER BY idx
"""
_FAILED = {
    TrajectoryStatus.INFRA_ERROR: DropReason.INFRA_ERROR,
    TrajectoryStatus.ENGINE_ERROR: DropReason.ENGINE_ERROR,
}


def reconcile(store: Store, checkpoint_step: int, *, rolled_back: bool) -> Recovery:
    """Brings the ledger to the checkpoint of `checkpoint_step` (0: the base weights).

    With `rolled_back`, a guard undid the later steps and their turns are dropped; without, a crash lost them and they
    are eligible again. Every turn that moves back gets a new attempt.
    """
    _settle_steps(store, checkpoint_step, rolled_back=rolled_back)
    reissue: list[GroupRecord] = []
    complete: list[CompleteGroup] = []
    forgotten = None if rolled_back else checkpoint_step
    for row in store.connection.execute(_UNSETTLED, (forgotten,)).fetchall():
        if row["closed"] is not None:
            for turn in store.open_turns(row["id"]):
                store.move(turn, State.DROPPED, reason=DropReason(row["closed"]))
        else:
            _settle_group(store, read_group(row), forgotten, reissue, complete)
    newest = store.connection.execute("SELECT max(idx) FROM groups").fetchone()[0]
    return Recovery(
        next_group_index=0 if newest is None else newest + 1, reissue=tuple(reissue), complete=tuple(complete)
    )


def _settle_steps(store: Store, checkpoint_step: int, *, rolled_back: bool) -> None:
    rows = store.connection.execute(
        "SELECT * FROM turns WHERE state IN ('leased', 'consumed') AND step IS NOT NULL ORDER BY step, pos"
    ).fetchall()
    status = StepStatus.ROLLED_BACK if rolled_back else StepStatus.LOST
    store.connection.execute(
        "UPDATE steps SET status = ? WHERE status = 'committed' AND step > ?", (status.value, checkpoint_step)
    )
    for row in rows:
        leased = row["state"] == State.LEASED
        if row["step"] > checkpoint_step:
            if rolled_back:
                store.move(row, State.DROPPED, reason=DropReason.ROLLED_BACK, recovery=True)
            else:
                _give_back(store, row, lost=row["lost"] + leased)
        elif leased:
            store.move(row, State.CONSUMED, step=row["step"], pos=row["pos"])
    for step in sorted({r["step"] for r in rows if r["state"] == State.LEASED and r["step"] <= checkpoint_step}):
        store.record_step(step, None, {})


def _give_back(store: Store, row: sqlite3.Row, *, lost: int) -> None:
    """Eligible again under a new attempt; poison once the process died too often while it was leased."""
    poison = lost > MAX_LOST_LEASES
    newest = store.connection.execute(
        "SELECT max(attempt) FROM turns WHERE stream = ? AND session = ? AND idx = ?",
        (row["stream"], row["session"], row["idx"]),
    ).fetchone()[0]
    store.move(
        row,
        State.DROPPED if poison else State.ELIGIBLE,
        reason=DropReason.POISON if poison else None,
        attempt=newest + 1,
        recovery=True,
    )
    store.connection.execute("UPDATE turns SET lost = ? WHERE row = ?", (lost, row["row"]))


def _settle_group(
    store: Store,
    group: GroupRecord,
    forgotten: int | None,
    reissue: list[GroupRecord],
    complete: list[CompleteGroup],
) -> None:
    """Decides about one group; drops made for a step after `forgotten` do not count (None: all count)."""
    trajectories = store.connection.execute(
        "SELECT * FROM trajectories WHERE group_id = ? AND group_attempt = ? ORDER BY row", (group.id, group.attempt)
    ).fetchall()
    if len(trajectories) >= group.size:
        _drop_failed(store, trajectories)
    waiting = store.open_turns(group.id)
    unjudged = [row for row in waiting if row["state"] in (State.CAPTURED, State.BOUND)]
    turns = [r for r in store.group_turns(group.id) if r["group_attempt"] == group.attempt]
    if len(trajectories) < group.size or unjudged:
        for row in waiting:
            store.move(row, State.DROPPED, reason=DropReason.INTERRUPTED)
        if not any(row["state"] == State.CONSUMED or row["reason"] in RECOVERY_REASONS for row in turns):
            reissue.append(_next_attempt(store, group))
    elif waiting or any(_undone(row, forgotten) for row in turns):
        complete.append(_complete(store, group, trajectories, turns))


def _undone(row: sqlite3.Row, forgotten: int | None) -> bool:
    """True for a drop that was decided while a batch was made whose step never came to be."""
    if forgotten is None or row["state"] != State.DROPPED or row["step"] is None:
        return False
    return row["step"] > forgotten and row["reward"] is not None and row["reason"] not in RECOVERY_REASONS


def _drop_failed(store: Store, trajectories: list[sqlite3.Row]) -> None:
    """Unjudged turns of an episode whose world failed can never train; their group need not run again for them."""
    for trajectory in trajectories:
        reason = _FAILED.get(TrajectoryStatus(trajectory["status"]))
        if reason is None:
            continue
        for row in _rows(store, trajectory):
            if row["kind"] == TurnKind.MAIN and row["state"] in (State.CAPTURED, State.BOUND):
                store.move(row, State.DROPPED, reason=reason)


def _next_attempt(store: Store, group: GroupRecord) -> GroupRecord:
    used = store.connection.execute("SELECT max(attempt) FROM turns WHERE group_id = ?", (group.id,)).fetchone()[0]
    attempt = 1 + max(group.attempt, used or 0)
    store.connection.execute("UPDATE groups SET attempt = ? WHERE id = ?", (attempt, group.id))
    again = store.group(group.id)
    assert again is not None
    return again


def _complete(
    store: Store, group: GroupRecord, trajectories: list[sqlite3.Row], turns: list[sqlite3.Row]
) -> CompleteGroup:
    """All judged turns of the group, eligible; what assembling had dropped returns, or its baselines would change."""
    scored: list[ScoredTurn] = []
    for row in turns:
        if row["kind"] != TurnKind.MAIN or row["reward"] is None or row["reason"] in RECOVERY_REASONS:
            continue
        if row["state"] in (State.JUDGED, State.DROPPED):
            store.move(row, State.ELIGIBLE, recovery=True)
        if row["state"] in (State.JUDGED, State.DROPPED, State.ELIGIBLE):
            scored.append(decode_scored(row, store.contexts))
    ended = tuple(
        Trajectory(
            id=t["id"],
            group_id=t["group_id"],
            task_id=t["task_id"],
            outcome=load(Reward, t["outcome"]),
            status=TrajectoryStatus(t["status"]),
            turn_ids=tuple(turn_id(row) for row in _rows(store, t)),
        )
        for t in sorted(trajectories, key=lambda t: t["id"])
    )
    return CompleteGroup(record=group, trajectories=ended, scored=tuple(sorted(scored, key=lambda s: s.turn.id)))


def _rows(store: Store, trajectory: sqlite3.Row) -> list[sqlite3.Row]:
    numbers = cast(list[int], json.loads(trajectory["turn_rows"]))
    return [store.connection.execute("SELECT * FROM turns WHERE row = ?", (n,)).fetchone() for n in numbers]
