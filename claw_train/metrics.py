"""Metrics are outputs: a line in metrics.jsonl and TensorBoard events for every step. No loop reads them back.

In: a step and named numbers. Out: files that can be read while the run goes on. After a resume the log goes on behind
the last step that the checkpoint holds: lines of steps that are done again are cut off first, and a new event file
tells TensorBoard to forget them. Every name:

    step, time                  optimizer step; seconds since 1970
    reward                      mean outcome of the step's valid episodes, in [0, 1]; never shuffled
    samples, batch_tokens       sequences and trained tokens of the batch
    token_age_mean, token_age_max      of the trained tokens, in versions, against the weights the step began with
    wait_s, round_trip_s        seconds without a batch; seconds from batch to the trainer's report
    tokens_per_s                sampled tokens of training episodes, over this process's time of training
    queue_turns, queue_scored, queue_ready, queue_slots     depth of each channel after the step
    out_of_context              episodes cut by the model's context since the process began
    drop_<reason>               turns left out since the process began, see `ledger.DropReason`
    heldout, heldout_families   mean outcome of held-out tasks, of families never trained on, in [0, 1]
    heldout_parse_share         share of first replies with an action, in an evaluation between steps
    loss, policy_loss, kl, entropy, grad_norm, lr, ratio_mean, clip_fraction, tis_capped_fraction, outlier_fraction,
    mismatch_{k1,k3,max_abs,tokens}, drift_{k1,k3,max_abs,tokens}, staleness_mean, staleness_max, loss_tokens,
    computed_tokens, sample_tokens, packed_tokens, rows, step_s, checkpoint_s, publish_s, packed_tokens_per_s
                                the trainer's own, explained in `training.trainer`; absent for a batch without tokens

A row has what was measured at its moment: a step, or an evaluation.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from claw_train.run_folder import disk_errors, open_private, write_text

_DIGITS = 6
"""Significant digits that are kept."""


class MetricsLog:
    """Both files of one run. Every method that writes raises `DiskError` when the disk refuses."""

    def __init__(self, path: Path, tensorboard: Path, *, from_step: int) -> None:
        """Opens them; lines for steps above `from_step` are removed."""
        self._path = path
        self._history = [row for row in read_metrics(path) if row["step"] <= from_step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in self._history))
        self._file = open_private(path, "ab")
        try:
            self._events = _EventFile(tensorboard, from_step)
        except BaseException:
            self._file.close()
            raise

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
        row.update({k: _short(float(v)) for k, v in values.items() if math.isfinite(v)})
        self._history.append(row)
        with disk_errors(self._path):
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
        self._events.write(row)

    def close(self) -> None:
        """Closes both files."""
        with disk_errors(self._path):
            try:
                self._file.close()
            finally:
                self._events.close()


class _EventFile:
    """One TensorBoard event file; each process of a run writes its own.

    TensorBoard's own writer has a thread whose failure is a traceback, and `torch.utils.tensorboard` imports torch.
    """

    def __init__(self, folder: Path, from_step: int) -> None:
        """Makes it; readers forget what earlier files of `folder` say of steps above `from_step`."""
        from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"  # read in the order of their names
        with disk_errors(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._file: IO[bytes] = open_private(self._path, "xb")
        self._records = RecordWriter(self._file)
        self._add(wall_time=time.time(), file_version="brain.Event:2")
        start = SessionLog(status=SessionLog.START)
        self._add(wall_time=time.time(), step=from_step + 1, session_log=start)

    def write(self, row: Mapping[str, float]) -> None:
        """Adds every value of a row."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=k, simple_value=v) for k, v in row.items() if k not in ("step", "time")]
        self._add(wall_time=row["time"], step=row["step"], summary=Summary(value=values))

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        with disk_errors(self._path):
            self._records.write(Event(**fields).SerializeToString())
            self._file.flush()

    def close(self) -> None:
        """Closes it."""
        self._file.close()


def _short(value: float) -> float:
    """Rounded to significant digits, however small; whole numbers stay as they are."""
    return value if value.is_integer() else float(f"{value:.{_DIGITS}g}")


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
