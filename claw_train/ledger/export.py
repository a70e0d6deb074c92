"""Reads a ledger from outside the run: turns with their fate, the consumed order, the steps.

A read-only connection of its own; works while the run goes on and sees what was committed when the call began.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from claw_train.errors import LedgerError
from claw_train.ledger.rows import Contexts, decode_hints, decode_reward, decode_turn, turn_id
from claw_train.ledger.schema import connect, translate
from claw_train.ledger.states import DropReason, GroupRecord, State, StepStatus
from claw_train.ledger.store import read_group
from claw_train.types import Reward, Turn, TurnId

_PAGE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTurn:
    """A turn and its fate."""

    id: TurnId
    state: State
    turn: Turn | None
    """None when it was erased."""
    reward: Reward | None
    """None when it was not judged."""
    hints: tuple[str, ...]
    step: int | None
    """Of the lease; None outside one."""
    reason: DropReason | None
    """None when it was not dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One committed step."""

    step: int
    status: StepStatus
    checkpoint: str | None
    """None when the step wrote none, or died before it could say."""
    metrics: Mapping[str, float]
    at: float
    """Seconds since 1970."""


def iter_turns(
    run_dir: Path, *, states: frozenset[State] | None = None, session: str | None = None
) -> Iterator[StoredTurn]:
    """Turns in the order of capture, all or those in `states` and of `session`.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    with closing(reader(run_dir)) as connection:
        connection.execute("BEGIN")  # one snapshot to the end
        contexts = Contexts(connection)
        after = 0
        while rows := _page(connection, after, session):
            after = rows[-1]["row"]
            for row in rows:
                if states is None or State(row["state"]) in states:
                    yield _stored(row, contexts)


def consumed_turns(run_dir: Path) -> list[TurnId]:
    """What was trained on, by step and in the order of the batch.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    with closing(reader(run_dir)) as connection:
        query = "SELECT * FROM turns WHERE state = 'consumed' ORDER BY step, pos"
        return [turn_id(row) for row in _fetch(connection, query)]


def step_records(run_dir: Path) -> list[StepRecord]:
    """Every step ever committed, those lost or rolled back included, in the order they were taken.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    with closing(reader(run_dir)) as connection:
        return [
            StepRecord(
                step=row["step"],
                status=StepStatus(row["status"]),
                checkpoint=row["checkpoint"],
                metrics=cast(dict[str, float], json.loads(row["metrics"])),
                at=row["at"],
            )
            for row in _fetch(connection, "SELECT * FROM steps ORDER BY row")
        ]


def group_records(run_dir: Path) -> list[GroupRecord]:
    """All groups by index, with their newest attempt.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    with closing(reader(run_dir)) as connection:
        return [read_group(row) for row in _fetch(connection, "SELECT * FROM groups ORDER BY idx")]


def reader(run_dir: Path) -> sqlite3.Connection:
    """A read-only connection with named columns.

    Raises:
        LedgerError: there is no ledger, or it cannot be read.
    """
    connection = connect(run_dir, readonly=True)
    connection.row_factory = sqlite3.Row
    return connection


def _fetch(connection: sqlite3.Connection, query: str, values: tuple[object, ...] = ()) -> list[sqlite3.Row]:
    try:
        return connection.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise translate(error, "cannot read the ledger") from error


def _page(connection: sqlite3.Connection, after: int, session: str | None) -> list[sqlite3.Row]:
    where = "row > ?" if session is None else "row > ? AND session = ?"
    values = (after,) if session is None else (after, session)
    return _fetch(connection, f"SELECT * FROM turns WHERE {where} ORDER BY row LIMIT {_PAGE}", values)


def _stored(row: sqlite3.Row, contexts: Contexts) -> StoredTurn:
    erased = row["state"] == State.ERASED
    try:
        turn = None if erased else decode_turn(row, contexts)
    except sqlite3.Error as error:
        raise translate(error, "cannot read the ledger") from error
    except ValueError as error:
        raise LedgerError(f"turn {turn_id(row)} is unreadable: {error}") from error
    return StoredTurn(
        id=turn_id(row),
        state=State(row["state"]),
        turn=turn,
        reward=decode_reward(row),
        hints=decode_hints(row),
        step=row["step"],
        reason=None if row["reason"] is None else DropReason(row["reason"]),
    )
