"""What the namespace and the local sandbox share: a launcher's sandbox with a live shell and files.

In: commands and files. Out: results. The backend decides only what the launcher starts; the state machine (running,
frozen, closed) and the recovery from a shell that ended live here.
"""

import contextlib
import os
import threading
import time
import uuid
from pathlib import PurePosixPath

from claw_envs.errors import SandboxError, SandboxLost, SandboxTimeout, SandboxUnavailable
from claw_envs.sandbox.base import WORKDIR, Capabilities, Limits
from claw_envs.sandbox.host import files
from claw_envs.sandbox.host.bwrap import TESTS, WRITABLE, limits_line
from claw_envs.sandbox.host.cgroups import oom_kills
from claw_envs.sandbox.host.sandboxes import Part
from claw_envs.sandbox.launcher import Launcher, get_launcher
from claw_envs.sandbox.output import HeadTail
from claw_envs.sandbox.shell import Answer, Pipes, Shell, collect
from claw_envs.types import ExecResult

READY_S = 20.0
EXIT_S = 1.0
"""Time for a shell that closed its pipes to be gone by itself."""


class HostedSandbox:
    """A sandbox that the launcher holds. Thread-safe: one call runs at a time, `close` interrupts it."""

    local = False

    def __init__(self, limits: Limits | None = None, *, launcher: Launcher | None = None) -> None:
        """Makes the sandbox and starts its shell.

        Raises:
            SandboxUnavailable: this machine cannot run the backend; the message names what is missing.
            SandboxLost: the launcher died meanwhile.
        """
        self.limits = limits or Limits()
        self.id = uuid.uuid4().hex
        self._lock = threading.RLock()
        self._closed = False
        self._shell: Shell | None = None
        self._frozen = False
        self._grade_fd: int | None = None
        self._launcher = launcher or get_launcher()
        self._made = self._launcher.create(self.id, self.limits, local=self.local)
        self.capabilities = Capabilities(
            isolated=not self.local,
            network_off=not self.local,
            memory_limit=self._made.events_fd is not None,
            pids_limit=self._made.events_fd is not None or not self.local,
            disk_limit=self._made.disk_limit,
        )
        with contextlib.ExitStack() as unfinished:
            unfinished.callback(self.close)
            self._start_shell()
            if self._shell is None:
                raise SandboxUnavailable("the sandbox's shell is killed for memory as it starts: raise memory_bytes")
            unfinished.pop_all()

    # -- commands -----------------------------------------------------------------------------------------------

    def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        """See `Sandbox.exec`. A shell that the command ended is replaced, with all processes of the sandbox."""
        with self._lock:
            self._check_open()
            if self._frozen:
                raise SandboxError("a frozen sandbox runs no commands; use run_check")
            killed = self._oom_count()
            if self._shell is None:
                self._start_shell()
            if self._shell is None:
                return ExecResult(stdout=b"", stderr=b"", exit_code=137, oom=True, shell_restarted=True)
            answer = self._run(command, timeout_s)
            code = self._replace_shell(answer) if answer.ended else answer.exit_code
            return _result(
                answer.stdout,
                answer.stderr,
                code,
                timed_out=answer.timed_out,
                oom=self._oom_count() > killed,
                shell_restarted=answer.ended,
                cwd=answer.cwd,
            )

    def _run(self, command: str, timeout_s: float) -> Answer:
        """Leaves `_shell` None when the shell ended or an exception came between: its next answer would be stale."""
        assert self._shell is not None
        shell, self._shell = self._shell, None
        ended = True
        try:
            answer = shell.run(command, timeout_s)
            ended = answer.ended
            return answer
        finally:
            if ended:
                shell.close()
            else:
                self._shell = shell

    def _oom_count(self) -> int:
        return _oom_count(self._made.events_fd)

    def _start_shell(self) -> None:
        """Leaves `_shell` None when the kernel kills the new shell for memory."""
        killed = self._oom_count()
        pipes = Pipes.make()
        try:
            pid = self._launcher.start_shell(self.id, pipes.theirs)
        except SandboxError:
            pipes.close()
            raise
        finally:
            pipes.close_theirs()
        shell = Shell(
            pipes,
            pid,
            output_bytes=self.limits.output_bytes,
            prologue=self._prologue(),
            lost=lambda: self._closed,
        )
        answer = shell.ready(READY_S)
        if answer.exit_code == 0:
            self._shell = shell
            return
        shell.close()
        self._check_open()
        if self._oom_count() > killed:
            return
        if answer.timed_out:
            raise SandboxTimeout(f"the sandbox's shell did not start within {READY_S:g} s")
        raise SandboxLost(
            f"the sandbox's shell did not start: {answer.stderr.value().decode(errors='replace').strip()}"
        )

    def _prologue(self) -> str:
        """What the shell does first; a folder that the agent locked is no reason not to start."""
        if self.local:
            return ""
        lines = [f"cd {WORKDIR} 2>/dev/null"]
        if self._made.events_fd is None:
            lines.append(limits_line(self.limits.pids, self.limits.memory_bytes))
        return "\n".join(lines)

    def _replace_shell(self, answer: Answer) -> int | None:
        self._check_open()
        code = self._launcher.end(self.id, Part.SHELL, 0.0 if answer.timed_out else EXIT_S)
        self._start_shell()
        return code

    # -- files --------------------------------------------------------------------------------------------------

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `Sandbox.write`. What lies below `/tests` is seen by checks only.

        Raises:
            ValueError: `path` is not absolute, or outside the places that can be written.
            OSError: the disk of the sandbox is full, or a parent is no folder.
        """
        with self._lock:
            self._check_open()
            root = self._root_of(path)
            if root is None:
                raise ValueError(f"cannot write {path!r}: only below {', '.join((*WRITABLE, TESTS))}")
            files.write(root, path, data, mode, self._made.uid if root == self._made.files_fd else self._made.check_uid)

    def read(self, path: str, *, max_bytes: int) -> bytes | None:
        """See `Sandbox.read`. Links are followed as inside the sandbox; system files are not there."""
        with self._lock:
            self._check_open()
            root = self._root_of(path)
            if root is None:
                return None
            try:
                found = files.open_regular(root, path)
            except PermissionError:  # the agent locked it, and we are its user
                found = self._launcher.open_file(self.id, path)
            return None if found is None else files.read_open(found, path, max_bytes)

    def _root_of(self, path: str) -> int | None:
        pure = PurePosixPath(path)
        if not pure.is_absolute() or ".." in pure.parts:
            raise ValueError(f"need an absolute path without '..', got {path!r}")
        if pure.is_relative_to(TESTS):
            if self._grade_fd is None:
                self._grade_fd = self._launcher.open_grade(self.id)
            return self._grade_fd
        inside = any(pure.is_relative_to(place) and str(pure) != place for place in WRITABLE)
        return self._made.files_fd if inside else None

    # -- grading and the end ------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """See `Sandbox.freeze`. Idempotent."""
        with self._lock:
            self._check_open()
            self._launcher.freeze(self.id)
            self._frozen = True
            self._drop_shell()

    def run_check(self, argv: list[str], *, timeout_s: float) -> ExecResult:
        """See `Sandbox.run_check`. The program may write to /grade and read /tests; how it ends is data."""
        with self._lock:
            self._check_open()
            pipes = Pipes.make()
            stdin = os.open(os.devnull, os.O_RDONLY)
            events: int | None = None
            try:
                try:
                    events = self._launcher.start_check(self.id, argv, (stdin, *pipes.theirs[1:3]))
                finally:
                    os.close(stdin)
                    pipes.close_theirs()
                killed = _oom_count(events)
                out, err, done = collect(pipes, self.limits.output_bytes, time.monotonic() + timeout_s)
                self._check_open()
                code = self._launcher.end(self.id, Part.CHECK, EXIT_S if done else 0.0)
                oom = _oom_count(events) > killed
                return _result(out, err, code, timed_out=not done, oom=oom)
            finally:
                pipes.close()
                if events is not None:
                    os.close(events)

    def close(self) -> None:
        """See `Sandbox.close`. Interrupts a command that another thread runs here."""
        if self._closed or self._launcher.owner != os.getpid():
            return
        self._closed = True
        with contextlib.suppress(SandboxError):  # a dead launcher's sandboxes are dead, and reaped by the next one
            self._launcher.destroy(self.id)
        with self._lock:
            self._drop_shell()
            for fd in (self._made.files_fd, self._made.events_fd, self._grade_fd):
                if fd is not None:
                    os.close(fd)

    def _drop_shell(self) -> None:
        if self._shell is not None:
            self._shell.close()
            self._shell = None

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxLost("the sandbox is closed")
        if self._launcher.owner != os.getpid():
            raise SandboxLost("this sandbox belongs to the process that forked this one")

    def __enter__(self) -> "HostedSandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _oom_count(events_fd: int | None) -> int:
    if events_fd is None:
        return 0
    try:
        return oom_kills(os.pread(events_fd, 4096, 0))
    except OSError:
        return 0  # the group was removed: the next call says that the sandbox is gone


def _result(
    out: HeadTail,
    err: HeadTail,
    code: int | None,
    *,
    timed_out: bool,
    oom: bool,
    shell_restarted: bool = False,
    cwd: str = "",
) -> ExecResult:
    return ExecResult(
        stdout=out.value(),
        stderr=err.value(),
        exit_code=None if timed_out else code,
        timed_out=timed_out,
        oom=oom,
        bytes_total=out.total + err.total,
        stdout_omitted=out.omitted,
        stderr_omitted=err.omitted,
        shell_restarted=shell_restarted,
        cwd=cwd,
    )
