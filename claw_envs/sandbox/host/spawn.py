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

from . import mounts, procs
from .cgroups import Cgroup


class Identity(NamedTuple):
    """The user a child becomes before it execs; only for a launcher that is root."""

    uid: int
    also: int | None = None
    """When given, the child is root of a new user namespace that holds `uid` as 0 and this host user as 1000."""


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

    A child that cannot get that far writes why to its descriptor 2 and exits with 126. Raises OSError.
    """
    gate = _Gate() if identity is not None and identity.also is not None else None
    pid = os.fork()
    if pid:
        if gate is not None and identity is not None:
            gate.admit(pid, identity)
        return pid
    try:
        os.setsid()
        if group is not None:
            group.join()
        if identity is not None:
            _become(identity, gate)
        _arrange(fds, folder)
        os.execve(argv[0], list(argv), dict(environment))
    except (OSError, ValueError) as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(126)  # whatever happened, nothing may return into the parent's loop from here


class _Gate:
    """Lets a child wait in its new user namespace until the parent has mapped its users."""

    def __init__(self) -> None:
        self._made, self._child_made = os.pipe()
        self._child_mapped, self._mapped = os.pipe()

    def pass_through(self) -> None:
        """In the child."""
        mounts.new_user_namespace()
        os.write(self._child_made, b"1")
        if os.read(self._child_mapped, 1) != b"1":
            raise OSError("the users of the namespace were not mapped")

    def admit(self, pid: int, identity: Identity) -> None:
        """In the parent."""
        ends = (self._made, self._child_made, self._child_mapped, self._mapped)
        os.close(self._child_made)
        try:
            if os.read(self._made, 1) == b"1":  # a child that died closes the pipe
                users = f"0 {identity.uid} 1\n1000 {identity.also} 1\n"
                for name in ("uid_map", "gid_map"):
                    (procs.PROC / str(pid) / name).write_text(users)
                os.write(self._mapped, b"1")
        except OSError as error:
            log(f"cannot map users: {error}")
        finally:
            for fd in ends[:1] + ends[2:]:
                os.close(fd)


def _become(identity: Identity, gate: _Gate | None) -> None:
    os.setgroups([])
    uid = identity.uid
    if gate is not None:
        gate.pass_through()
        uid = 0
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _arrange(fds: Sequence[int], folder: str) -> None:
    os.chdir(folder)
    # Two passes: a wanted descriptor may sit on a number that an earlier one must take.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, len(fds)) for fd in fds]
    for number, fd in enumerate(high):
        os.dup2(fd, number, inheritable=True)
    os.closerange(len(fds), max(high) + 1)
    for sig in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.umask(0o022)


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
    """Kills child `pid`, a bwrap, and all below it; returns its exit code, None if it outlived `timeout_s`.

    Its child is process 1 inside: killing that one ends the whole process id namespace, and bwrap exits only when the
    kernel has removed every process of it.
    """
    inner = procs.children(pid)
    for child in inner:
        procs.send(child, signal.SIGKILL)
    if not inner:
        procs.send(pid, signal.SIGKILL)
    code = wait(pid, timeout_s)
    return end_tree(pid, timeout_s) if code is None else code


def end_tree(pid: int, timeout_s: float = 5.0) -> int | None:
    """The same for a child without a process id namespace; what left its tree is not found."""
    procs.kill_all(procs.tree(pid))
    return wait(pid, timeout_s)


def log(message: str) -> None:
    """One line on the launcher's standard error, which is its parent's."""
    sys.stderr.write(f"claw launcher: {message}\n")
