"""The ledger's operations on one connection, blocking, inside a transaction that the writer opens and commits.

Each either does all it says or raises before a savepoint is released; sums are moved along and become visible with the
commit. Knows no thread and no event loop.
"""

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from claw_train.codec import dump
from claw_train.errors import LedgerError
from claw_train.ledger.rows import (
    Contexts,
    encode_next_state,
    pack_ids,
    prompt_hash,
    shared_length,
    turn_id,
)
from claw_train.ledger.states import (
    PENDING,
    DropReason,
    GroupRecord,
    LedgerCounts,
    State,
    StepStatus,
    check_move,
    first_state,
)
from claw_train.types import Reward, RewardStatus, Trajectory, Turn, TurnId, TurnKind

Encoded = Mapping[str, object]
_COUNTED = tuple(f.name for f in fields(LedgerCounts) if f.name not in ("total", "dropped_by"))


class Store:
    """Operations and sums of one open ledger."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        connection.row_factory = sqlite3.Row
        self.connection = connection
        self.contexts = Contexts(connection)
        self.moved: Counter[str] = Counter()
        """Change of the sums by the operation under way: state names, `total`, `dropped/<reason>`."""
        self.uncommitted: Counter[str] = Counter()
        """Change of the sums by the operations before it in the same transaction."""
        self.counts = self.count()
        """As of the last commit."""

    # groups and turns

    def add_group(self, group: GroupRecord) -> None:
        """Registers a group; the same record again changes nothing.

        Raises:
            LedgerError: another record has this id or index.
        """
        known = self.group(group.id)
        if known is not None and (known.seed, known.index, known.attempt) == (group.seed, group.index, group.attempt):
            return
        if known is not None:
            raise LedgerError(f"group {group.id} is already recorded as {known}")
        row = (group.id, group.stream, group.index, str(group.seed), group.size, group.task_id, group.attempt)
        try:
            self.connection.execute("INSERT INTO groups VALUES (?,?,?,?,?,?,?,NULL)", row)
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"group {group.id}: index {group.index} is taken") from error

    def group(self, group_id: str) -> GroupRecord | None:
        """The record of a group."""
        row = self.connection.execute("SELECT * FROM groups WHERE id = ?", (group_id,)).fetchone()
        return None if row is None else read_group(row)

    def capture(self, turn: Turn, encoded: Encoded) -> None:
        """Stores a turn; `encoded` are its reply's columns. One that has its next state is bound at once.

        Raises:
            LedgerError: its key is taken, or it is a main turn of a group that was never added.
        """
        group = self.group(turn.group_id)
        if group is None and turn.kind is TurnKind.MAIN:
            raise LedgerError(f"turn {turn.id} belongs to group {turn.group_id!r}, which was never added")
        state = first_state(turn.kind)
        group_attempt = 0 if group is None else group.attempt
        columns: dict[str, object] = {
            "stream": turn.id.stream,
            "session": turn.id.session,
            "idx": turn.id.index,
            "attempt": turn.id.attempt,
            "kind": turn.kind.value,
            "state": state.value,
            "policy": turn.policy,
            "status": turn.status.value,
            "group_id": turn.group_id,
            "group_attempt": group_attempt,
            "task_id": turn.task_id,
            **self._prompt_columns(turn, group_attempt),
            **encoded,
        }
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        try:
            cursor = self.connection.execute(f"INSERT INTO turns ({names}) VALUES ({marks})", tuple(columns.values()))
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"turn {turn.id} is already in the ledger") from error
        row = cursor.lastrowid
        assert row is not None
        self._event(state.value, row, turn.id.attempt)
        self.moved[state.value] += 1
        self.moved["total"] += turn.kind is TurnKind.MAIN
        if turn.next_state is not None:
            self.bind(turn.id, *encode_next_state(turn.next_state))
        self.contexts.keep(row, turn.prompt_ids + turn.completion.token_ids)

    def _prompt_columns(self, turn: Turn, group_attempt: int) -> dict[str, object]:
        parent = self._parent(turn, group_attempt) if turn.id.index else None
        if parent is not None:
            shared = shared_length(self.contexts.context(parent), turn.prompt_ids)
            if shared:
                return {"parent": parent, "shared": shared, "suffix": pack_ids(turn.prompt_ids[shared:])}
        ids = pack_ids(turn.prompt_ids)
        key = prompt_hash(ids)
        known = self.connection.execute("SELECT row FROM prompts WHERE hash = ?", (key,)).fetchone()
        if known is None:
            row = self.connection.execute("INSERT INTO prompts (hash, ids) VALUES (?, ?)", (key, ids)).lastrowid
        else:
            row = known["row"]
        return {"prompt": row, "shared": len(turn.prompt_ids), "suffix": b""}

    def _parent(self, turn: Turn, group_attempt: int) -> int | None:
        """Row of the turn before this one in its session."""
        found = self.connection.execute(
            "SELECT row FROM turns WHERE stream = ? AND session = ? AND idx < ? AND kind = ? AND group_attempt = ?"
            " AND state <> 'erased' ORDER BY idx DESC, attempt DESC LIMIT 1",
            (turn.id.stream, turn.id.session, turn.id.index, turn.kind.value, group_attempt),
        ).fetchone()
        return None if found is None else found["row"]

    def bind(self, key: TurnId, name: str, state: bytes) -> None:
        """Adds the next state (class name, JSON); a side or eval turn keeps its own state.

        Raises:
            LedgerError: no such turn, or it has a next state already.
        """
        row = self.find(key)
        if row["next_class"] is not None:
            raise LedgerError(f"turn {key} is {row['state']} and has a next state already")
        self.connection.execute(
            "UPDATE turns SET next_class = ?, next_state = ? WHERE row = ?", (name, state, row["row"])
        )
        self._advance(row, State.BOUND)

    def judge(self, key: TurnId, reward: bytes, hints: str) -> None:
        """Adds what judging said, a failure included; a side or eval turn keeps its own state.

        Raises:
            LedgerError: no such turn, its next state is not known, or it was judged already.
        """
        row = self.find(key)
        if row["reward"] is not None or row["next_class"] is None:
            why = "was judged already" if row["reward"] is not None else "has no next state"
            raise LedgerError(f"turn {key} is {row['state']} and {why}")
        self.connection.execute("UPDATE turns SET reward = ?, hints = ? WHERE row = ?", (reward, hints, row["row"]))
        self._advance(row, State.JUDGED)

    def _advance(self, row: sqlite3.Row, state: State) -> None:
        if State(row["state"]) in (State.SIDE, State.EVAL):
            self._event(state.value, row["row"], row["attempt"])
        else:
            self.move(row, state)

    def end_trajectory(self, trajectory: Trajectory) -> None:
        """Records the end of an episode of the group's current attempt.

        Raises:
            LedgerError: it ended before, a turn is unknown or is of another group.
        """
        group = self.group(trajectory.group_id)
        rows = [self.find(key) for key in trajectory.turn_ids]
        for key, row in zip(trajectory.turn_ids, rows, strict=True):
            if row["group_id"] != trajectory.group_id:
                raise LedgerError(f"turn {key} is of group {row['group_id']}, its trajectory of {trajectory.group_id}")
        values = (
            trajectory.id,
            trajectory.group_id,
            0 if group is None else group.attempt,
            trajectory.task_id,
            dump(trajectory.outcome),
            trajectory.status.value,
            json.dumps([row["row"] for row in rows]),
        )
        try:
            cursor = self.connection.execute(
                "INSERT INTO trajectories (id, group_id, group_attempt, task_id, outcome, status, turn_rows)"
                " VALUES (?,?,?,?,?,?,?)",
                values,
            )
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"trajectory {trajectory.id} of group {trajectory.group_id} has ended already") from error
        last = (rows[-1]["row"], rows[-1]["attempt"]) if rows else (None, None)
        self._event("trajectory", *last, trajectory=cursor.lastrowid)

    # towards a step

    def eligible(self, keys: Sequence[TurnId]) -> None:
        """From judged to eligible; those that are eligible already (after a recovery) stay.

        Raises:
            LedgerError: one of them is in another state; none is moved.
        """
        for row in self._find_all(keys):
            if row["state"] != State.ELIGIBLE:
                self.move(row, State.ELIGIBLE)

    def lease(self, step: int, keys: Sequence[TurnId]) -> None:
        """From eligible to leased(step), in this order; all of a step's turns at once.

        Raises:
            LedgerError: the step is leased or committed already, or a turn is not eligible.
        """
        if not keys:
            raise LedgerError(f"step {step} leases nothing")
        taken = self.connection.execute(
            "SELECT max(step) FROM (SELECT step FROM steps WHERE status = 'committed'"
            " UNION ALL SELECT step FROM turns WHERE step IS NOT NULL AND state = 'leased')"
        ).fetchone()[0]
        if taken is not None and step <= taken:
            raise LedgerError(f"step {step} cannot be leased: step {taken} is leased or committed")
        for pos, row in enumerate(self._find_all(keys)):
            self.move(row, State.LEASED, step=step, pos=pos)

    def consume(self, step: int, checkpoint: str | None, metrics: Mapping[str, float]) -> None:
        """From leased(step) to consumed(step) for every turn of the step, with the step's record.

        A step whose groups gave no signal leased nothing; it is recorded all the same.

        Raises:
            LedgerError: the step, or a later one, is committed already, or an earlier one is still leased.
        """
        last, open_ = self.connection.execute(
            "SELECT (SELECT max(step) FROM steps WHERE status = 'committed'),"
            " (SELECT min(step) FROM turns WHERE step IS NOT NULL AND state = 'leased')"
        ).fetchone()
        if last is not None and step <= last:
            raise LedgerError(f"step {step} cannot be consumed: step {last} is committed")
        if open_ is not None and open_ < step:
            raise LedgerError(f"step {step} cannot be consumed: step {open_} is still leased")
        for row in self.leased(step):
            self.move(row, State.CONSUMED, step=step, pos=row["pos"])
        self.record_step(step, checkpoint, metrics)

    def record_step(self, step: int, checkpoint: str | None, metrics: Mapping[str, float]) -> None:
        """Adds a committed step."""
        self.connection.execute(
            "INSERT INTO steps (step, status, checkpoint, metrics, at) VALUES (?, ?, ?, ?, ?)",
            (step, StepStatus.COMMITTED.value, checkpoint, json.dumps(dict(metrics)), time.time()),
        )
        self._event("step", None, None, step=step)

    def leased(self, step: int) -> list[sqlite3.Row]:
        """Rows leased for a step, in the order of the lease."""
        query = "SELECT * FROM turns WHERE step = ? AND state = 'leased' ORDER BY pos"
        return self.connection.execute(query, (step,)).fetchall()

    def drop(self, keys: Sequence[TurnId], reason: DropReason, step: int | None) -> None:
        """From any state before consumed to dropped.

        Raises:
            LedgerError: one is consumed, dropped, side, eval or erased; none is moved.
        """
        for row in self._find_all(keys):
            self.move(row, State.DROPPED, reason=reason, step=step)

    def drop_group(self, group_id: str, reason: DropReason) -> None:
        """Drops every turn of a group whose fate is open and closes the group: it is not reissued.

        Raises:
            LedgerError: no such group.
        """
        if self.group(group_id) is None:
            raise LedgerError(f"no group {group_id!r}")
        self.connection.execute("UPDATE groups SET closed = ? WHERE id = ?", (reason.value, group_id))
        for row in self.open_turns(group_id):
            self.move(row, State.DROPPED, reason=reason)

    def open_turns(self, group_id: str) -> list[sqlite3.Row]:
        """Main turns of a group whose fate is open."""
        return [r for r in self.group_turns(group_id) if r["kind"] == TurnKind.MAIN and State(r["state"]) in PENDING]

    def group_turns(self, group_id: str) -> list[sqlite3.Row]:
        """All rows of a group, every attempt."""
        query = "SELECT * FROM turns WHERE group_id = ? ORDER BY session, idx, row"
        return self.connection.execute(query, (group_id,)).fetchall()

    # erasing

    def erase(self, session: str) -> None:
        """Removes the content of a session and keeps its keys.

        Raises:
            LedgerError: one of its turns is leased; wait for the step.
        """
        rows = self.connection.execute("SELECT * FROM turns WHERE session = ?", (session,)).fetchall()
        for row in rows:
            if row["state"] == State.ERASED:
                continue
            self.move(row, State.ERASED, step=row["step"], pos=row["pos"])
        self.connection.execute(
            "UPDATE turns SET parent = NULL, prompt = NULL, shared = 0, suffix = NULL, reply = NULL, logprobs = NULL,"
            " versions = NULL, finish = NULL, sampling = NULL, text = NULL, next_class = NULL, next_state = NULL,"
            " reward = NULL, hints = NULL WHERE session = ?",
            (session,),
        )
        self.connection.execute(
            "DELETE FROM prompts WHERE NOT EXISTS (SELECT 1 FROM turns WHERE turns.prompt = prompts.row)"
        )
        blank = dump(Reward(value=None, status=RewardStatus.UNGRADED, source="erased"))
        self.connection.execute("UPDATE trajectories SET outcome = ? WHERE id = ?", (blank, session))
        self._event("erased_session", None, None, session=session)
        self.contexts.forget()

    # moving

    def find(self, key: TurnId) -> sqlite3.Row:
        """The row of a turn.

        Raises:
            LedgerError: there is none.
        """
        row = self.connection.execute(
            "SELECT * FROM turns WHERE stream = ? AND session = ? AND idx = ? AND attempt = ?",
            (key.stream, key.session, key.index, key.attempt),
        ).fetchone()
        if row is None:
            raise LedgerError(f"no turn {key} in the ledger")
        return row

    def _find_all(self, keys: Iterable[TurnId]) -> list[sqlite3.Row]:
        listed = list(keys)
        if len(set(listed)) != len(listed):
            raise LedgerError("a turn is named twice in one call")
        return [self.find(key) for key in listed]

    def move(
        self,
        row: sqlite3.Row,
        new: State,
        *,
        step: int | None = None,
        pos: int | None = None,
        reason: DropReason | None = None,
        attempt: int | None = None,
        recovery: bool = False,
    ) -> None:
        """Puts one row into another state (and attempt), with its event and the change of the sums.

        Raises:
            LedgerError: the move is illegal.
        """
        old = State(row["state"])
        check_move(turn_id(row), old, new, recovery=recovery)
        attempt = row["attempt"] if attempt is None else attempt
        self.connection.execute(
            "UPDATE turns SET state = ?, step = ?, pos = ?, reason = ?, attempt = ? WHERE row = ?",
            (new.value, step, pos, None if reason is None else reason.value, attempt, row["row"]),
        )
        details = {"step": step, "reason": None if reason is None else reason.value}
        self._event(new.value, row["row"], attempt, **{k: v for k, v in details.items() if v is not None})
        self.moved[old.value] -= 1
        self.moved[new.value] += 1
        if old is State.DROPPED:
            self.moved[f"dropped/{row['reason']}"] -= 1
        if reason is not None:
            self.moved[f"dropped/{reason.value}"] += 1
        if new is State.ERASED and row["kind"] == TurnKind.MAIN:
            self.moved["total"] -= 1

    def _event(self, what: str, row: int | None, attempt: int | None, **data: object) -> None:
        self.connection.execute(
            "INSERT INTO events (at, what, turn, attempt, data) VALUES (?, ?, ?, ?, ?)",
            (time.time(), what, row, attempt, json.dumps(data) if data else None),
        )

    # sums

    def count(self) -> LedgerCounts:
        """Counts the rows; `total` comes from the events, so that the sum is a check and not a definition.

        Raises:
            LedgerError: the sum does not hold.
        """
        states = dict[str, int](self.connection.execute("SELECT state, count(*) FROM turns GROUP BY state").fetchall())
        reasons = self.connection.execute("SELECT reason, count(*) FROM turns WHERE reason IS NOT NULL GROUP BY reason")
        total = self.connection.execute(
            "SELECT (SELECT count(*) FROM events WHERE what = 'captured') - (SELECT count(*) FROM events AS e"
            " WHERE what = 'erased' AND EXISTS (SELECT 1 FROM events WHERE turn = e.turn AND what = 'captured'))"
        ).fetchone()[0]
        return LedgerCounts(
            total=total,
            dropped_by={DropReason(reason): n for reason, n in reasons},
            **{name: states.get(name, 0) for name in _COUNTED},
        ).check()

    def audit(self) -> LedgerCounts:
        """Counts the rows and compares them with the running sums and each row with its history.

        Raises:
            LedgerError: a sum does not hold, a state is not the one of the row's last event, or a turn of one session
                and index was consumed twice.
        """
        strays = self.connection.execute(
            "SELECT turns.row, turns.state, last.what FROM turns LEFT JOIN (SELECT turn, what, max(seq) FROM events"
            f" WHERE what IN ({', '.join(repr(s.value) for s in State)}) GROUP BY turn) AS last"
            " ON last.turn = turns.row WHERE turns.state IS NOT last.what"
            " AND turns.state NOT IN ('side', 'eval') LIMIT 1"
        ).fetchone()
        if strays is not None:
            raise LedgerError(f"turn row {strays[0]} is {strays[1]} but its last event is {strays[2]}")
        twice = self.connection.execute(
            "SELECT stream, session, idx FROM turns WHERE state = 'consumed' GROUP BY 1, 2, 3 HAVING count(*) > 1"
        ).fetchone()
        if twice is not None:
            raise LedgerError(f"turn {'/'.join(map(str, twice))} was consumed twice")
        orphans = self.connection.execute(
            "SELECT turns.step FROM turns WHERE state = 'consumed' AND NOT EXISTS"
            " (SELECT 1 FROM steps WHERE steps.step = turns.step AND steps.status = 'committed') LIMIT 1"
        ).fetchone()
        if orphans is not None:
            raise LedgerError(f"turns were consumed by step {orphans[0]}, which has no record")
        counted, running = self.count(), apply(self.counts, self.uncommitted)
        if counted != running:
            raise LedgerError(f"the running sums {running} are not those of the rows {counted}")
        return counted


def apply(counts: LedgerCounts, moved: Mapping[str, int]) -> LedgerCounts:
    """The sums after a commit."""
    reasons = Counter(counts.dropped_by)
    for name, n in moved.items():
        if name.startswith("dropped/"):
            reasons[DropReason(name.removeprefix("dropped/"))] += n
    return LedgerCounts(
        total=counts.total + moved.get("total", 0),
        dropped_by={reason: n for reason, n in reasons.items() if n},
        **{name: getattr(counts, name) + moved.get(name, 0) for name in _COUNTED},
    )


def read_group(row: sqlite3.Row) -> GroupRecord:
    """The record of a row of `groups`."""
    return GroupRecord(
        id=row["id"],
        stream=row["stream"],
        index=row["idx"],
        seed=int(row["seed"]),
        size=row["size"],
        task_id=row["task_id"],
        attempt=row["attempt"],
    )
