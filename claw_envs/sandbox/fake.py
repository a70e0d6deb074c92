"""A sandbox for tests: answers from a script and misbehaves on request.

In: commands mapped to results, and faults. Out: what a real sandbox would give or raise. It runs nothing and keeps
written files in memory. Use the real backends for everything that they can be made to do.
"""

import re
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum

from claw_envs.errors import SandboxError, SandboxLost, SandboxTimeout, SandboxUnavailable
from claw_envs.sandbox.base import WORKDIR, Capabilities, Limits
from claw_envs.types import ExecResult

Reply = ExecResult | Callable[[str], ExecResult]
_NOT_FOUND = 127


class Fault(StrEnum):
    """What a `FakeSandbox` can be told to do wrong."""

    START = "start"
    """Construction raises SandboxUnavailable."""
    DIE = "die"
    """`exec` raises SandboxLost, and everything after it too."""
    HANG = "hang"
    """`exec` raises SandboxTimeout."""
    GRADE = "grade"
    """`freeze`, `read` after it and `run_check` raise SandboxLost."""


class FakeSandbox:
    """Answers commands from `script`; the first key that matches the whole command as a pattern wins."""

    def __init__(
        self,
        script: Mapping[str, Reply] | None = None,
        *,
        fault: Fault | None = None,
        after: int = 0,
        checks: Reply | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Starts at once.

        Args:
            script: pattern -> result, or a function of the command; an unknown command gives exit code 127.
            fault: what goes wrong; None for nothing.
            after: commands that succeed before `DIE` or `HANG` strikes.
            checks: the result of every `run_check`; None gives exit code 0.
            limits: kept, not enforced.

        Raises:
            SandboxUnavailable: `fault` is `START`.
        """
        self.closed = False
        self.frozen = False
        self.commands: list[str] = []
        """Every command that was asked for."""
        self.files: dict[str, bytes] = {}
        self.limits = limits or Limits()
        self.capabilities = Capabilities(
            isolated=True, network_off=True, memory_limit=False, pids_limit=False, disk_limit=False
        )
        self._script = [(re.compile(pattern, re.DOTALL), reply) for pattern, reply in (script or {}).items()]
        self._fault = fault
        self._after = after
        self._checks = checks or ExecResult(stdout=b"", stderr=b"", exit_code=0)
        self._lock = threading.Lock()
        if fault is Fault.START:
            raise SandboxUnavailable("told to fail at start")

    def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        """See `Sandbox.exec`. Raises SandboxTimeout with `Fault.HANG`."""
        with self._lock:
            self._check_open()
            if self.frozen:
                raise SandboxError("a frozen sandbox runs no commands; use run_check")
            self.commands.append(command)
            if len(self.commands) > self._after:
                if self._fault is Fault.DIE:
                    self.closed = True
                    raise SandboxLost("told to die")
                if self._fault is Fault.HANG:
                    raise SandboxTimeout(f"told to hang; gave up after {timeout_s:g} s")
            for pattern, reply in self._script:
                if pattern.fullmatch(command):
                    return _answer(reply, command)
            missing = f"bash: {command}: command not found\n".encode("utf-8", "replace")
            return ExecResult(stdout=b"", stderr=missing, exit_code=_NOT_FOUND, bytes_total=len(missing), cwd=WORKDIR)

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `Sandbox.write`; permission bits are forgotten."""
        self._check_open()
        self.files[path] = data

    def read(self, path: str, *, max_bytes: int) -> bytes | None:
        """See `Sandbox.read`."""
        self._check_open()
        self._check_grading()
        data = self.files.get(path)
        if data is not None and len(data) > max_bytes:
            raise ValueError(f"{path} has {len(data)} bytes, more than the {max_bytes} allowed")
        return data

    def freeze(self) -> None:
        """See `Sandbox.freeze`."""
        self._check_open()
        self.frozen = True
        self._check_grading()

    def run_check(self, argv: list[str], *, timeout_s: float) -> ExecResult:
        """See `Sandbox.run_check`; every check gives the result told at construction."""
        self._check_open()
        self._check_grading()
        return _answer(self._checks, " ".join(argv))

    def close(self) -> None:
        """See `Sandbox.close`."""
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise SandboxLost("the sandbox is closed")

    def _check_grading(self) -> None:
        if self.frozen and self._fault is Fault.GRADE:
            raise SandboxLost("told to break at grading")


def _answer(reply: Reply, command: str) -> ExecResult:
    return reply if isinstance(reply, ExecResult) else reply(command)
