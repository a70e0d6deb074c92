"""One process per run folder.

An exclusive `flock` on `run_dir/lock`; the file holds the owner's pid for the message of whoever comes second. The
kernel releases it when the owner dies, however it dies, so no lock is ever stale.
"""

import fcntl
import os
from pathlib import Path

from claw_train.errors import DiskError, RunInUseError


class RunLock:
    """Holds a run folder until `release`."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    @classmethod
    def acquire(cls, run_dir: Path) -> "RunLock":
        """Locks `run_dir`, which exists.

        Raises:
            RunInUseError: another process, or another ledger of this one, holds it; names the pid.
            DiskError: the lock file cannot be written.
        """
        path = run_dir / "lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DiskError(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise RunInUseError(
                f"run folder {run_dir} is in use by process {pid}: stop it or choose another run_dir"
            ) from None
        except OSError as error:
            os.close(fd)
            raise DiskError(f"cannot lock {path}: {error.strerror}") from error
        return cls(fd)

    def release(self) -> None:
        """Gives the folder back; harmless when done twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
