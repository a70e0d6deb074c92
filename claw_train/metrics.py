"""Metrics are outputs: a line in metrics.jsonl and TensorBoard events for every step. No loop reads them back.

In: a step and named numbers. Out: files that can be read while the run goes on. After a resume the log goes on behind
the last step that the checkpoint holds; lines of steps that are done again are cut off first.
"""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsLog:
    """Both files of one run."""

    def __init__(self, path: Path, tensorboard: Path, *, from_step: int) -> None:
        """Opens them; lines for steps above `from_step` are removed."""
        self._path = path
        self._history = [row for row in read_metrics(path) if row["step"] <= from_step]
        path.write_text("".join(json.dumps(row) + "\n" for row in self._history), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = tensorboard
        self._events: Any = None

    @property
    def history(self) -> list[dict[str, float]]:
        """All rows so far, oldest first."""
        return self._history

    def knows(self, step: int) -> bool:
        """Whether the step's loss is in the log."""
        return any(row["step"] == step and "loss" in row for row in self._history)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one row; values that are no finite numbers are left out."""
        row = {"step": step, "time": round(time.time(), 3)}
        row.update({k: round(float(v), 8) for k, v in values.items() if math.isfinite(v)})
        self._history.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._write_events(step, row)

    def _write_events(self, step: int, row: Mapping[str, float]) -> None:
        # tensorboard's own writer: torch.utils.tensorboard would import torch into this process
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._events is None:
            self._events = EventFileWriter(str(self._tensorboard))
        values = [Summary.Value(tag=k, simple_value=v) for k, v in row.items() if k not in ("step", "time")]
        self._events.add_event(Event(wall_time=row["time"], step=step, summary=Summary(value=values)))
        self._events.flush()

    def close(self) -> None:
        """Flushes and closes both files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Rows of a metrics.jsonl; a last line that was cut by a crash is left out."""
    if not path.is_file():
        return []
    rows: list[dict[str, float]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
