"""Folders in the user's cache that are whole or absent, whoever dies while one is made.

In: a name and a function that fills an empty folder. Out: the finished folder. Made under a lock file by one process at
a time, in a temporary folder that is fsynced and then renamed. Knows nothing of models.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from claw_train.errors import ModelError

_LOCK_TIMEOUT_S = 900.0
_LOCK_POLL_S = 0.1


def cache_dir() -> Path:
    """`$CLAW_CACHE`, else `$XDG_CACHE_HOME/claw`, else `~/.cache/claw`; not created here."""
    own = os.environ.get("CLAW_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / ".cache") / "claw"


@contextmanager
def clear_errors(folder: Path) -> Iterator[None]:
    """Turns what a disk may answer under `folder` into one clear line.

    Raises:
        ModelError: full, read-only, not allowed, or otherwise broken.
    """
    try:
        yield
    except ModelError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(f"no space left for the model cache {folder}: free some or set CLAW_CACHE") from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise ModelError(f"the model cache {folder} is not writable ({error.strerror}): set CLAW_CACHE") from error
        raise ModelError(f"the model cache {folder} failed: {error}") from error


def check_space(folder: Path, need_bytes: int) -> None:
    """Refuses to begin what the disk cannot hold; `folder` exists.

    Raises:
        ModelError: less than `need_bytes` free.
    """
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise ModelError(
            f"no space left for the model cache {folder}: {need_bytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free; "
            "free some or set CLAW_CACHE"
        )


@contextmanager
def locked(lock: Path, *, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[int]:
    """Holds an exclusive lock on the file `lock` and yields its descriptor.

    A child that inherits the descriptor keeps the lock for as long as it lives, so nobody clears its folder away when
    the parent is killed.

    Raises:
        ModelError: another process held it for `timeout_s` seconds.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"another process has held {lock} for {timeout_s:.0f} s: end it first") from None
                time.sleep(_LOCK_POLL_S)
        yield fd
    finally:
        os.close(fd)


def make_once(target: Path, fill: Callable[[Path, int], None], *, need_bytes: int = 0) -> Path:
    """Returns `target`, made by `fill(empty folder, lock descriptor)` if it is not there yet.

    Raises:
        ModelError: the disk refused, or `fill` raised it; `target` is then absent.
    """
    if target.is_dir():
        return target
    with clear_errors(target.parent), locked(target.parent / f".{target.name}.lock") as fd:
        if target.is_dir():
            return target
        prefix = f".{target.name}.tmp-"
        for stale in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(stale, ignore_errors=True)
        check_space(target.parent, need_bytes)
        temp = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            fill(temp, fd)
            temp.chmod(0o755)
            sync_tree(temp)
            temp.rename(target)
            _sync(target.parent)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
    return target


def sync_tree(folder: Path) -> None:
    """Brings every file under `folder`, and the folders themselves, to the disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(fd)
    finally:
        os.close(fd)
