"""The ledger as the loops see it: every turn's way from capture to a weight update, on disk before it counts.

    async with Ledger.open(run_dir, create=True) as ledger:
        await ledger.add_group(group)
        await ledger.capture(turn)           # fsynced when it returns
        await ledger.bind(turn.id, state)

In: turns, next states, rewards, ends of episodes, decisions. Out: sums at any time, and after a crash what has to go
on (`reconcile`). Async above; one thread writes. Knows no engine, judge or trainer. A cancelled call may still happen.
"""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

from claw_envs.types import NextState
from claw_train.errors import DiskError
from claw_train.ledger import recovery, schema
from claw_train.ledger.lock import RunLock
from claw_train.ledger.rows import encode_completion, encode_next_state, encode_scored
from claw_train.ledger.states import DropReason, GroupRecord, LedgerCounts, Recovery
from claw_train.ledger.store import Store
from claw_train.ledger.writer import Writer
from claw_train.types import ScoredTurn, Trajectory, Turn, TurnId

T = TypeVar("T")


class Ledger:
    """The durable record of one run. Every method raises `LedgerError` for an illegal call, which then changes
    nothing, and `DiskError` once the disk has failed; `counts` goes on working then.
    """

    def __init__(self, writer: Writer, lock: RunLock, incarnation: int) -> None:
        self._writer = writer
        self._lock = lock
        self.incarnation = incarnation
        """How often this ledger was opened, from 1. Fit for what must never repeat over restarts: the attempt of
        evaluation turns, a lineage of weights."""

    @classmethod
    def open(cls, run_dir: Path, *, create: bool) -> "Ledger":
        """Locks the run folder and opens its ledger; blocks for some milliseconds.

        Args:
            run_dir: made if missing with `create`.
            create: True makes a new ledger and refuses an existing one; False opens an existing one.

        Raises:
            RunInUseError: another process holds the folder; names its pid.
            DiskError: the disk refuses.
            LedgerError: there is none, or already one, it is unreadable or written by a newer program.
        """
        try:
            if create:
                run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise DiskError(f"cannot make run folder {run_dir}: {error.strerror}") from error
        lock = RunLock.acquire(run_dir)
        connection: sqlite3.Connection | None = None
        try:
            if create:
                schema.create(run_dir)
            connection = schema.connect(run_dir)
            incarnation = schema.count_opening(connection)
            return cls(Writer(Store(connection)), lock, incarnation)
        except BaseException:
            if connection is not None:
                connection.close()
            lock.release()
            raise

    @staticmethod
    def exists(run_dir: Path) -> bool:
        """True when `run_dir` holds a ledger, so that `open` needs `create=False`."""
        return (run_dir / schema.FILE_NAME).is_file()

    @property
    def failed(self) -> DiskError | None:
        """The failure of the disk after which nothing is recorded any more; None while all is well."""
        return self._writer.failed

    @property
    def commits(self) -> int:
        """Transactions committed since the opening: at most one for each call, fewer when calls come together."""
        return self._writer.commits

    async def add_group(self, group: GroupRecord) -> None:
        """Registers a group before its first turn; the same record again, as after a reissue, changes nothing."""
        await self._do("group", lambda store: store.add_group(group))

    async def capture(self, turn: Turn) -> None:
        """Stores a turn; it is on disk when this returns. Side and eval turns rest in states of their own."""
        encoded = encode_completion(turn.completion)
        await self._do("capture", lambda store: store.capture(turn, encoded))

    async def bind(self, turn_id: TurnId, next_state: NextState) -> None:
        """From captured to bound."""
        name, data = encode_next_state(next_state)
        await self._do("bind", lambda store: store.bind(turn_id, name, data))

    async def judge(self, scored: ScoredTurn) -> None:
        """From bound to judged; an abstention or a failure is a result too."""
        reward, hints = encode_scored(scored)
        await self._do("judge", lambda store: store.judge(scored.turn.id, reward, hints))

    async def end_trajectory(self, trajectory: Trajectory) -> None:
        """Records the end of an episode; a group is finished when `size` of its episodes have ended."""
        await self._do("trajectory", lambda store: store.end_trajectory(trajectory))

    async def eligible(self, turn_ids: Sequence[TurnId]) -> None:
        """From judged to eligible, all or none; eligible turns may be named again."""
        await self._do("eligible", lambda store: store.eligible(turn_ids))

    async def lease(self, step: int, turn_ids: Sequence[TurnId]) -> None:
        """From eligible to leased(step), all or none, in the order of training. Settle the rest of each group first."""
        await self._do("lease", lambda store: store.lease(step, turn_ids))

    async def consume(self, step: int, checkpoint: str | None, metrics: Mapping[str, float] | None = None) -> None:
        """From leased(step) to consumed(step) for the whole step, together with its record.

        Args:
            step: of the lease.
            checkpoint: folder of the checkpoint that holds the step; None when the step wrote none.
            metrics: kept with the step's record.
        """
        await self._do("consume", lambda store: store.consume(step, checkpoint or None, metrics or {}))

    async def drop(self, turn_ids: Sequence[TurnId], reason: DropReason, *, step: int | None = None) -> None:
        """From any state before consumed to dropped, all or none.

        Args:
            turn_ids: of main turns.
            reason: why they never train.
            step: whose batch they were left out of; if that step is lost, so is the decision, and the group comes back
                whole even when none of its turns was leased. None where no batch was made.
        """
        await self._do("drop", lambda store: store.drop(turn_ids, reason, step))

    async def drop_group(self, group_id: str, reason: DropReason) -> None:
        """Drops what is open of a group and closes it: it will not be reissued."""
        await self._do("drop", lambda store: store.drop_group(group_id, reason))

    async def reconcile(self, checkpoint_step: int, *, rolled_back: bool = False) -> Recovery:
        """Brings the ledger to the checkpoint that was loaded and says what has to go on. Nothing else may run.

        What had been decided about a group that did not reach its step is forgotten: all its judged turns are eligible.

        Leased for a step up to `checkpoint_step`: consumed. Leased later: eligible with the next attempt, or
        dropped(poison) the third time. Consumed later: eligible again when the checkpoint was lost, or, with
        `rolled_back`, dropped(rolled_back), as are later leases. Unfinished groups: dropped(interrupted) and reissued.
        """
        return await self._do(
            "reconcile", lambda store: recovery.reconcile(store, checkpoint_step, rolled_back=rolled_back)
        )

    async def erase(self, session: str) -> None:
        """Removes all content of a session; keys, states of counting and sums stay."""
        await self._do("erase", lambda store: store.erase(session))

    def counts(self) -> LedgerCounts:
        """Sums as of the last commit; works after a disk failure.

        Raises:
            LedgerError: the sum over the states is not the total.
        """
        return self._writer.counts.check()

    async def audit(self) -> LedgerCounts:
        """Counts the rows, compares them with their history and with `counts`.

        Raises:
            LedgerError: something does not agree.
        """
        return await self._do("", lambda store: store.audit())

    async def aclose(self) -> None:
        """Commits what was submitted, closes the file and releases the folder."""
        await self._writer.aclose()
        self._lock.release()

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes."""
        await self.aclose()

    async def _do(self, name: str, run: Callable[[Store], T]) -> T:
        return await self._writer.submit(name, run)
