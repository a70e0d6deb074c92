"""Everything the trainer raises on purpose, and the one place that may catch everything.

ClawTrainError
|-- ConfigError      (ValueError)       a key, value, file or port that the user can mend; exit code 2
|-- RunInUseError    (RuntimeError)     another process holds the run folder; exit code 2
|-- ModelError       (OSError)          weights cannot be found, checked or held; exit code 2
|-- ChildError       (RuntimeError)     a child process died or never came up
|-- EngineError      (ConnectionError)  the engine failed after retries
|-- JudgeError       (RuntimeError)     no usable verdict; never a score
|-- LedgerError      (RuntimeError)     a broken invariant of the ledger
|   `-- DiskError    (OSError)          the ledger's disk failed
|-- GuardError       (RuntimeError)     a guard halted training: mismatch, failure share, non-finite loss
`-- TrainerError     (RuntimeError)     the trainer refused or failed a step
"""

from collections.abc import Iterator
from contextlib import contextmanager


class ClawTrainError(Exception):
    """Base of all errors raised by claw_train."""


class ConfigError(ClawTrainError, ValueError):
    """Something the user can mend; the message is one line with the key or file and the fix."""


class RunInUseError(ClawTrainError, RuntimeError):
    """Another process holds the run folder."""


class ModelError(ClawTrainError, OSError):
    """Weights that cannot be found, checked or held in memory."""


class ChildError(ClawTrainError, RuntimeError):
    """A child process died or did not come up; the message carries the end of its log."""


class EngineError(ClawTrainError, ConnectionError):
    """The engine failed after retries."""


class JudgeError(ClawTrainError, RuntimeError):
    """The judge gave no usable verdict. Never turned into a score."""


class LedgerError(ClawTrainError, RuntimeError):
    """An invariant of the ledger would break."""


class DiskError(LedgerError, OSError):
    """The disk under the ledger failed or is full."""


class GuardError(ClawTrainError, RuntimeError):
    """A guard stopped training; the message says which, with the figure and the limit."""


class TrainerError(ClawTrainError, RuntimeError):
    """The trainer refused or failed a step."""


class StoppedError(ClawTrainError, RuntimeError):
    """A run that had begun stopped before its last step; the message carries the reason and how to go on."""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show for loops that ended together: the first of ours, else the first of all."""
    leaves: list[BaseException] = []
    queue: list[BaseException] = [group]
    while queue:
        error = queue.pop(0)
        if isinstance(error, BaseExceptionGroup):
            queue.extend(error.exceptions)  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        else:
            leaves.append(error)
    return next((e for e in leaves if isinstance(e, ClawTrainError)), leaves[0])


@contextmanager
def boundary(kind: type[Exception], what: str, *, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns any unexpected exception of a foreign library into `kind`. The only broad except.

    Our own errors and those named in `passing` pass unchanged.
    """
    try:
        yield
    except (ClawTrainError, *passing):
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {error}") from error
