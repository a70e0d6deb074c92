"""Starting one process tree: fork, join the group, change user, exec.

Runs only in the single-threaded launcher, where fork is safe and the parent-death signal of the child is tied to the
launcher itself. In: an argument list, file descriptors, group and user. Out: a process id, later an exit code.
"""

import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from . import procs
from .cgroups import Cgroup

CLONE_NEWUSER = 0x10000000


class Identity(NamedTuple):
    """The user a child becomes before it execs."""

    uid: int
    gid: int


def spawn(
    argv: Sequence[str],
    environment: Mapping[str, str],
    fds: Sequence[int],
    *,
    group: Cgroup | None = None,
    identity: Identity | None = None,
    folder: str = "/",
) -> int:
    """Starts `argv` with `fds` as its descriptors 0, 1, 2, ...; returns its process id.

    A child that cannot get that far writes why to its descriptor 2 and exits with 126.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        _become(fds, group, identity, folder)
        os.execve(argv[0], list(argv), dict(environment))
    except BaseException as error:  # nothing may return into the parent's loop from here
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(126)


def _become(fds: Sequence[int], group: Cgroup | None, identity: Identity | None, folder: str) -> None:
    if group is not None:
        group.join()
    os.setsid()
    if identity is not None:
        os.setgroups([])
        os.setresgid(identity.gid, identity.gid, identity.gid)
        os.setresuid(identity.uid, identity.uid, identity.uid)
    os.chdir(folder)
    # Two passes: a wanted descriptor may sit on a number that an earlier one must take.
    high = [_dup_above(fd, len(fds)) for fd in fds]
    for number, fd in enumerate(high):
        os.dup2(fd, number, inheritable=True)
    os.closerange(len(fds), max(high) + 1)
    for sig in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.umask(0o022)


def _dup_above(fd: int, lowest: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)


def wait(pid: int, timeout_s: float) -> int | None:
    """The exit code of child `pid` (128 + signal when killed); None when it runs on after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            select.select([handle], [], [], left)
    finally:
        os.close(handle)


def end(pid: int, timeout_s: float = 5.0) -> int | None:
    """Kills child `pid` and all below it; returns its exit code, None if it outlived `timeout_s`.

    For a sandbox, `pid` is bwrap and its child is process 1 inside: killing that one ends the whole process id
    namespace, and bwrap exits only when the kernel has removed every process of it.
    """
    inner = procs.children(pid)
    for child in inner:
        procs.send(child, signal.SIGKILL)
    if not inner:
        procs.send(pid, signal.SIGKILL)
    code = wait(pid, timeout_s)
    if code is None:
        procs.kill_all(procs.tree(pid))
        code = wait(pid, timeout_s)
    return code


def log(message: str) -> None:
    """One line on the launcher's standard error, which is its parent's."""
    sys.stderr.write(f"claw launcher: {message}\n")
