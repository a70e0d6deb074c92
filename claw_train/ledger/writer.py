"""The one thread that writes: takes operations from any number of callers and commits them in groups.

Whatever waits when a commit begins shares it; nobody waits for company, so a lone caller pays one fsync and a crowd
pays one fsync together. An operation that fails is undone alone; a disk that fails ends the writer for good.
"""

import asyncio
import logging
import queue
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from claw_train.crash import crash_point
from claw_train.errors import ClawTrainError, DiskError, LedgerError, boundary
from claw_train.ledger.schema import translate
from claw_train.ledger.states import LedgerCounts
from claw_train.ledger.store import Store, apply

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Operations submitted and not yet answered; further callers wait."""
_MAX_GROUP = 64
"""Operations in one transaction: about 6 ms of work, so that the first of them does not wait for a crowd."""


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    """Of its crash points; empty for an operation without."""
    run: Callable[[Store], Any]
    future: "asyncio.Future[Any]"
    loop: asyncio.AbstractEventLoop


_Outcome = tuple[_Operation, Any, Exception | None]


class Writer:
    """Owns the writing connection; `submit` is async, everything else happens on the thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: queue.Queue[_Operation | None] = queue.Queue(MAX_WAITING + 1)
        self._room = asyncio.Semaphore(MAX_WAITING)
        self.failed: DiskError | None = None
        """Set once the disk failed; every later operation raises it."""
        self.commits = 0
        """Transactions committed; each is one fsync."""
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="ledger-writer", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> LedgerCounts:
        """As of the last commit."""
        return self._store.counts

    async def submit(self, name: str, run: Callable[[Store], Any]) -> Any:
        """Runs `run` in a transaction and returns its result once that is on disk.

        A caller that is cancelled stops waiting; its operation happens all the same.

        Raises:
            LedgerError: the operation is illegal or the ledger is closed; nothing changed.
            DiskError: the disk failed, now or earlier.
        """
        async with self._room:
            if self.failed is not None:
                raise DiskError(str(self.failed))
            if self._closed:
                raise LedgerError("the ledger is closed")
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Any] = loop.create_future()
            self._queue.put_nowait(_Operation(name, run, future, loop))
            return await future

    async def aclose(self) -> None:
        """Commits what waits, closes the connection and ends the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)
        await asyncio.to_thread(self._thread.join)

    # on the thread

    def _loop(self) -> None:
        open_ = True
        while open_:
            group = [self._queue.get()]
            while len(group) < _MAX_GROUP and group[-1] is not None:
                try:
                    group.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            open_ = group[-1] is not None
            operations = [operation for operation in group if operation is not None]
            if operations:
                _answer(self._commit(operations))
        self._shut()

    def _commit(self, operations: list[_Operation]) -> list[_Outcome]:
        if self.failed is not None:
            return [(op, None, DiskError(str(self.failed))) for op in operations]
        try:
            with boundary(LedgerError, "ledger"):
                return self._transaction(operations)
        except LedgerError as error:
            failure = self._undo(error)
            return [(op, None, type(failure)(str(failure))) for op in operations]

    def _transaction(self, operations: list[_Operation]) -> list[_Outcome]:
        store = self._store
        store.uncommitted = Counter()
        store.connection.execute("BEGIN IMMEDIATE")
        outcomes = [self._run(op) for op in operations]
        done = [op.name for op, _, error in outcomes if error is None and op.name]
        for name in done:
            crash_point(f"ledger.{name}.before")
        store.connection.execute("COMMIT")
        self.commits += 1
        for name in done:
            crash_point(f"ledger.{name}.after")
        store.counts = apply(store.counts, store.uncommitted)
        if "erase" in done:
            self._checkpoint()
        return outcomes

    def _run(self, operation: _Operation) -> _Outcome:
        """One operation in a savepoint of its own; an error of the disk passes through and ends the whole group."""
        store = self._store
        store.moved = Counter()
        store.connection.execute("SAVEPOINT op")
        try:
            with boundary(LedgerError, f"ledger {operation.name or 'read'}"):
                result = operation.run(store)
        except ClawTrainError as error:
            if isinstance(_meaning(error), DiskError):
                raise
            store.connection.execute("ROLLBACK TO op")
            store.connection.execute("RELEASE op")
            return operation, None, error
        store.connection.execute("RELEASE op")
        store.uncommitted.update(store.moved)
        return operation, result, None

    def _undo(self, error: LedgerError) -> LedgerError:
        """Ends the transaction without a trace; a disk that failed stays failed."""
        failure = _meaning(error)
        try:
            if self._store.connection.in_transaction:
                self._store.connection.execute("ROLLBACK")
        except sqlite3.Error as second:
            failure = translate(second, f"ledger, after {error}")
        if isinstance(failure, DiskError):
            self.failed = failure
            logger.error("the ledger's disk failed, nothing more is recorded: %s", failure)
        return failure

    def _checkpoint(self) -> None:
        """Moves the log into the file and empties it, so that no erased content stays in the log."""
        try:
            busy = self._store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        except sqlite3.Error as error:
            logger.warning("the ledger's log could not be emptied: %s", error)
            return
        if busy:
            logger.warning("the ledger's log could not be emptied while a reader is open; it will be at the next close")

    def _shut(self) -> None:
        try:
            self._store.connection.close()
        except sqlite3.Error as error:
            logger.warning("the ledger did not close cleanly: %s", error)


def _meaning(error: ClawTrainError) -> LedgerError:
    """What SQLite's error behind `error` says, or `error` itself."""
    if isinstance(error.__cause__, sqlite3.Error):
        return translate(error.__cause__, "ledger")
    return error if isinstance(error, LedgerError) else LedgerError(str(error))


def _answer(outcomes: list[_Outcome]) -> None:
    """Wakes each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].loop, []).append(outcome)
    for loop, answers in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, answers)
        except RuntimeError:  # the loop was closed: nobody waits any more
            logger.debug("%d ledger answers came after their loop had closed", len(answers))


def _resolve(answers: list[_Outcome]) -> None:
    for operation, result, error in answers:
        if operation.future.done():
            continue
        if error is None:
            operation.future.set_result(result)
        else:
            operation.future.set_exception(error)
