"""The ledger's file: tables, creation, opening, and what each of SQLite's errors means to us.

`run_dir/ledger.sqlite` (mode 0600, WAL, every commit fsynced). It is built under another name and renamed, so a file of
this name is always whole. A newer file than this program knows is refused, never guessed at.
"""

import os
import sqlite3
from pathlib import Path

from claw_train.errors import DiskError, LedgerError

FILE_NAME = "ledger.sqlite"
SCHEMA_VERSION = 1
APPLICATION_ID = 0x436C6177  # "Claw": tells our file from any other SQLite file
_BUSY_TIMEOUT_S = 10.0

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('opened', 0);

CREATE TABLE groups (
  id TEXT PRIMARY KEY, stream TEXT NOT NULL, idx INTEGER NOT NULL UNIQUE, seed TEXT NOT NULL, size INTEGER NOT NULL,
  task_id TEXT, attempt INTEGER NOT NULL, closed TEXT
) WITHOUT ROWID;

CREATE TABLE prompts (row INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, ids BLOB NOT NULL);

CREATE TABLE turns (
  row INTEGER PRIMARY KEY,
  stream TEXT NOT NULL, session TEXT NOT NULL, idx INTEGER NOT NULL, attempt INTEGER NOT NULL,
  kind TEXT NOT NULL, state TEXT NOT NULL, policy TEXT NOT NULL, status TEXT NOT NULL,
  group_id TEXT NOT NULL, group_attempt INTEGER NOT NULL, task_id TEXT NOT NULL, version TEXT,
  parent INTEGER REFERENCES turns(row), prompt INTEGER REFERENCES prompts(row),
  shared INTEGER NOT NULL, suffix BLOB, reply BLOB, logprobs BLOB, versions TEXT, finish TEXT, sampling BLOB, text BLOB,
  next_class TEXT, next_state BLOB, reward BLOB, hints TEXT,
  step INTEGER, pos INTEGER, reason TEXT, lost INTEGER NOT NULL DEFAULT 0,
  UNIQUE (stream, session, idx, attempt),
  CHECK (state IN ('captured','bound','judged','eligible','leased','consumed','dropped','side','eval','erased')),
  CHECK (state IN ('side','eval','erased') OR kind = 'main'),
  CHECK ((state = 'dropped') = (reason IS NOT NULL)),
  CHECK (state NOT IN ('leased','consumed') OR (step IS NOT NULL AND pos IS NOT NULL)),
  CHECK (state NOT IN ('judged','eligible','leased','consumed') OR (reward IS NOT NULL AND next_state IS NOT NULL))
);
CREATE INDEX turns_by_group ON turns (group_id, group_attempt);
CREATE INDEX turns_by_step ON turns (step) WHERE step IS NOT NULL;
CREATE INDEX turns_by_session ON turns (session);

CREATE TABLE trajectories (
  row INTEGER PRIMARY KEY, id TEXT NOT NULL, group_id TEXT NOT NULL, group_attempt INTEGER NOT NULL,
  task_id TEXT NOT NULL, outcome BLOB NOT NULL, status TEXT NOT NULL, turn_rows TEXT NOT NULL,
  UNIQUE (group_id, group_attempt, id)
);

CREATE TABLE steps (
  row INTEGER PRIMARY KEY, step INTEGER NOT NULL, status TEXT NOT NULL, checkpoint TEXT, metrics TEXT NOT NULL,
  at REAL NOT NULL
);
CREATE UNIQUE INDEX steps_committed ON steps (step) WHERE status = 'committed';

CREATE TABLE events (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, what TEXT NOT NULL, turn INTEGER, attempt INTEGER, data TEXT
);
CREATE INDEX events_by_turn ON events (turn, seq);
"""

_DISK_CODES = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_PERM,
    }
)


def translate(error: sqlite3.Error, what: str) -> LedgerError:
    """SQLite's error as ours: `DiskError` when the disk or the file failed, else `LedgerError`."""
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int) and code & 0xFF in _DISK_CODES:
        return DiskError(f"{what}: {error}; free space or check the disk, then resume the run")
    return LedgerError(f"{what}: {error}")


def create(run_dir: Path) -> None:
    """Makes an empty ledger in `run_dir`, which exists and is locked by us.

    Raises:
        LedgerError: there is a ledger already.
        DiskError: it cannot be written.
    """
    path = run_dir / FILE_NAME
    if path.exists():
        raise LedgerError(f"{run_dir} already holds a run: continue it with resume={run_dir} or choose another run_dir")
    building = run_dir / f".{FILE_NAME}.new"
    try:
        for old in (building, *_side_files(building), *_side_files(path)):
            old.unlink(missing_ok=True)
        os.close(os.open(building, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        connection = sqlite3.connect(building, isolation_level=None)
        try:
            connection.executescript(
                f"PRAGMA application_id={APPLICATION_ID}; BEGIN; {_TABLES}PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
            )
        finally:
            connection.close()
        building.rename(path)
        _fsync_dir(run_dir)
    except sqlite3.Error as error:
        raise translate(error, f"cannot create {path}") from error
    except OSError as error:
        raise DiskError(f"cannot create {path}: {error.strerror}") from error


def connect(run_dir: Path, *, readonly: bool = False) -> sqlite3.Connection:
    """Opens the ledger of `run_dir`; the connection may be used from any one thread at a time.

    Raises:
        LedgerError: there is none, it is not a ledger, or a newer program wrote it.
        DiskError: the disk refuses.
    """
    path = run_dir / FILE_NAME
    if not path.is_file():
        raise LedgerError(f"no ledger in {run_dir}: nothing to resume there")
    uri = f"{path.absolute().as_uri()}?mode={'ro' if readonly else 'rw'}"
    connection: sqlite3.Connection | None = None
    try:
        connection = sqlite3.connect(
            uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        _check_file(connection, path)
        if not readonly:
            _configure(connection)
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise LedgerError(f"{path} is unreadable: {error}") from error
        raise translate(error, f"cannot open {path}") from error
    except LedgerError:
        if connection is not None:
            connection.close()
        raise
    return connection


def count_opening(connection: sqlite3.Connection) -> int:
    """How often the ledger was opened for writing, this time included.

    Raises:
        LedgerError: it cannot be written.
    """
    try:
        return connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'opened' RETURNING value").fetchall()[
            0
        ][0]
    except sqlite3.Error as error:
        raise translate(error, "cannot write the ledger") from error


def _check_file(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise LedgerError(f"{path} is not a ledger of ours")
    if version > SCHEMA_VERSION:
        raise LedgerError(f"{path} has schema {version}, this program reads up to {SCHEMA_VERSION}: update claw-rl")


def _configure(connection: sqlite3.Connection) -> None:
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",  # an answered capture must survive a power cut, not just a kill
        "foreign_keys=ON",
        "secure_delete=ON",  # erased content must leave the file, not only the tables
        "journal_size_limit=67108864",
        "temp_store=MEMORY",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _side_files(path: Path) -> tuple[Path, ...]:
    return tuple(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal"))


def _fsync_dir(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
