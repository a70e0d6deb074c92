"""The ledger as JSON lines for people and scripts: `run_dir/records/<version>.jsonl`, mode 0600.

In: the ledger's events, through a read-only connection. Out: one line an event, in the file of the version that sampled
the reply (`unversioned` when it has no token); a version's file is kept when the version is superseded. Every event is
written once, whatever dies when: a file's last whole line says how far it is, `cursor` says how far all are.

A line holds `seq`, `at`, `event`, `turn`, `session` and what the event adds: prompt and reply as text, the next state,
reward with votes, hints, or a decision with its step or reason. `prompt` of a turn that `continues` another is only
what came after that turn's reply. Whoever reads a line with `"erased": true` finds no content.
"""

import json
import os
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from claw_train.errors import DiskError, LedgerError, boundary
from claw_train.ledger.export import reader
from claw_train.ledger.rows import Contexts, Ids, turn_id
from claw_train.ledger.states import State

Line = dict[str, Any]
_PAGE = 500
_BLOCK = 1 << 16
_CAPTURES = frozenset({"captured", "side", "eval"})
_UNVERSIONED = "unversioned"
_EVENTS = """
SELECT e.seq, e.at, e.what, e.attempt AS event_attempt, e.data, t.*, p.outcome, p.status AS ended, p.id AS trajectory,
  p.turn_rows, p.task_id AS ended_task, p.group_id AS ended_group
FROM events AS e LEFT JOIN turns AS t ON t.row = e.turn
  LEFT JOIN trajectories AS p ON e.what = 'trajectory' AND p.row = json_extract(e.data, '$.trajectory')
WHERE e.seq > ? ORDER BY e.seq LIMIT ?
"""


class RecordWriter:
    """Follows one ledger; blocking, for one thread at a time."""

    def __init__(self, run_dir: Path, decode: Callable[[Ids], str]) -> None:
        """Opens the ledger and repairs what a crash left of the files.

        Args:
            run_dir: of the run.
            decode: token ids to text.

        Raises:
            LedgerError: the ledger cannot be read.
            DiskError: the records cannot be written.
        """
        self._folder = run_dir / "records"
        self._decode = decode
        self._connection = reader(run_dir)
        self._contexts = Contexts(self._connection)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._written = {path.name: _repair(path) for path in self._folder.glob("*.jsonl")}
            self._cursor = self._read_cursor()
        except OSError as error:
            self._connection.close()
            raise DiskError(f"records in {self._folder} cannot be written: {error.strerror}") from error

    def catch_up(self) -> int:
        """Writes every event committed so far and not yet written; returns how many it read.

        Raises:
            LedgerError: the ledger cannot be read; what was written stays.
            DiskError: the records cannot be written; the next call tries again.
        """
        total = 0
        while seen := self._page():
            total += seen
        return total

    def close(self) -> None:
        """Closes the connection; the files are closed after every `catch_up`."""
        self._connection.close()

    def _page(self) -> int:
        with boundary(LedgerError, "records"):
            self._connection.execute("BEGIN")  # one snapshot: a prompt must not be erased between two reads
            try:
                rows = self._connection.execute(_EVENTS, (self._cursor, _PAGE)).fetchall()
                lines = [(row, *self._line(row)) for row in rows if row["what"] not in ("step", "erased_session")]
            finally:
                self._connection.execute("COMMIT")
        if not rows:
            return 0
        try:
            self._append([(row["seq"], name, line) for row, name, line in lines])
            for row in rows:
                if row["what"] == "erased_session":
                    self._erase(json.loads(row["data"])["session"])
            self._write_cursor(rows[-1]["seq"])
        except OSError as error:
            raise DiskError(f"records in {self._folder} cannot be written: {error.strerror}") from error
        return len(rows)

    # lines

    def _line(self, row: sqlite3.Row) -> tuple[str, Line]:
        """(file name, line) of an event."""
        line: Line = {"seq": row["seq"], "at": row["at"], "event": row["what"]}
        version = _UNVERSIONED
        if row["row"] is not None:
            line["turn"] = str(replace(turn_id(row), attempt=row["event_attempt"]))
            line["session"] = row["session"]
            version = row["version"] or _UNVERSIONED
        if row["row"] is not None and row["state"] == State.ERASED:
            line["erased"] = True
        elif row["what"] == "trajectory":
            line |= self._trajectory(row)
        elif row["what"] in _CAPTURES:
            line |= self._capture(row)
        else:
            line |= _addition(row)
        return quote(version, safe="") + ".jsonl", line

    def _capture(self, row: sqlite3.Row) -> Line:
        prompt, parent, continues = self._contexts.prompt(row), row["parent"], None
        new = prompt
        if parent is not None and row["shared"] == len(self._contexts.context(parent)):
            query = "SELECT stream, session, idx, attempt FROM turns WHERE row = ?"
            continues = str(turn_id(self._connection.execute(query, (parent,)).fetchone()))
            new = prompt[row["shared"] :]
        return {
            "kind": row["kind"],
            "policy": row["policy"],
            "group": row["group_id"],
            "task": row["task_id"],
            "version": row["version"],
            "status": row["status"],
            "continues": continues,
            "prompt": self._decode(new),
            "reply": row["text"].decode("utf-8", "replace"),
            "finish": row["finish"],
            "sampling": json.loads(row["sampling"]),
            "prompt_tokens": len(prompt),
            "reply_tokens": len(row["reply"]) // 4,
        }

    def _trajectory(self, row: sqlite3.Row) -> Line:
        query = "SELECT stream, session, idx, attempt FROM turns WHERE row = ?"
        numbers = cast(list[int], json.loads(row["turn_rows"]))
        return {
            "session": row["trajectory"],
            "group": row["ended_group"],
            "task": row["ended_task"],
            "status": row["ended"],
            "outcome": json.loads(row["outcome"]),
            "turns": [str(turn_id(self._connection.execute(query, (n,)).fetchone())) for n in numbers],
        }

    # files

    def _append(self, lines: list[tuple[int, str, Line]]) -> None:
        by_file: dict[str, list[bytes]] = {}
        for seq, name, line in lines:
            if name not in self._written:
                self._written[name] = _repair(self._folder / name)
            if seq > self._written[name]:
                by_file.setdefault(name, []).append(_encode(line))
        for name, encoded in by_file.items():
            # Until the write has succeeded nothing is known of this file; the next call looks at it again.
            del self._written[name]
            _write(self._folder / name, b"".join(encoded), os.O_APPEND)
            self._written[name] = json.loads(encoded[-1])["seq"]

    def _erase(self, session: str) -> None:
        """Rewrites every file that speaks of a session; its lines keep their numbers."""
        self._contexts.forget()
        for path in sorted(self._folder.glob("*.jsonl")):
            old = [cast(Line, json.loads(line)) for line in path.read_bytes().splitlines()]
            new = [_tombstone(line) if line.get("session") == session else line for line in old]
            if new != old:
                _replace(path, b"".join(_encode(line) for line in new))

    def _read_cursor(self) -> int:
        path = self._folder / "cursor"
        try:
            return int(path.read_text()) if path.exists() else 0
        except ValueError:
            return 0  # a damaged cursor costs time, nothing else: the files know what they hold

    def _write_cursor(self, seq: int) -> None:
        _replace(self._folder / "cursor", f"{seq}\n".encode())
        self._cursor = seq


def _addition(row: sqlite3.Row) -> Line:
    """What an event after the capture adds."""
    if row["what"] == State.BOUND:
        return {"next_state": {"class": row["next_class"], **json.loads(row["next_state"])}}
    if row["what"] == State.JUDGED:
        return {"reward": json.loads(row["reward"]), "hints": json.loads(row["hints"])}
    return cast(Line, json.loads(row["data"])) if row["data"] else {}


def _tombstone(line: Line) -> Line:
    kept = {k: line[k] for k in ("seq", "at", "event", "turn", "session") if k in line}
    return {**kept, "erased": True}


def _encode(line: Line) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _repair(path: Path) -> int:
    """Cuts off a torn last line and returns the `seq` of the last whole one; 0 for an empty or missing file."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        tail, start = b"", end
        while start > 0 and tail.count(b"\n") < 2:
            block = min(_BLOCK, start)
            start -= block
            file.seek(start)
            tail = file.read(block) + tail
        whole = tail.rfind(b"\n") + 1
        file.truncate(start + whole)
        lines = tail[:whole].splitlines()
        return int(json.loads(lines[-1])["seq"]) if lines else 0


def _write(path: Path, data: bytes, flag: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    _write(new, data, os.O_TRUNC)
    new.replace(path)
