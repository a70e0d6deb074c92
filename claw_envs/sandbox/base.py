"""The sandbox seam: what an environment may ask of a machine, whatever runs it.

A `Sandbox` is one disposable Linux machine with a live shell. Backends (one file each) implement it; the
contract test `claw_envs.testing.check_sandbox` holds them to it. Nothing here knows tasks or rewards.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from claw_envs.types import ExecResult

WORKDIR = "/work"
"""Where a task's files lie and where the shell starts, inside every sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resources of one sandbox."""

    memory_bytes: int = 256 * 2**20
    pids: int = 64
    disk_bytes: int = 64 * 2**20
    output_bytes: int = 16 * 1024
    """Kept per stream and command: first and last half."""
    lease_s: float = 3600.0
    """The sandbox is reaped at this age whatever happens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend really enforces here; a task's unmet need is refused by name."""

    isolated: bool
    """False for `local`: commands run on the host."""
    network_off: bool
    memory_limit: bool
    pids_limit: bool
    disk_limit: bool


@runtime_checkable
class Sandbox(Protocol):
    """One disposable machine. All methods block. After `close` every other method raises `SandboxLost`."""

    capabilities: Capabilities

    def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        """Runs one command in the live shell (folder, variables and functions persist).

        Standard input is empty. At `timeout_s` everything the command started is killed, the shell lives on and
        partial output is returned with `timed_out=True`.
        A command that ends the shell ends all processes of the sandbox; a new shell then runs (`shell_restarted=True`).
        So does one that finds the shell already dead; that command did not run.

        Raises:
            SandboxLost: the sandbox is gone.
        """
        ...

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a file (absolute path, parents are made).

        Raises:
            SandboxLost: the sandbox is gone.
        """
        ...

    def read(self, path: str, *, max_bytes: int) -> bytes | None:
        """Reads a regular file without following links out of the sandbox; None when there is none.

        Raises:
            SandboxLost: the sandbox is gone.
            ValueError: the file is longer than `max_bytes`.
        """
        ...

    def freeze(self) -> None:
        """Kills every process of the agent, for good, so that grading sees a still file system."""
        ...

    def run_check(self, argv: list[str], *, timeout_s: float) -> ExecResult:
        """After `freeze`: runs a grader's program in a new process, network off, agent's files read-only.

        Before `freeze` it runs beside the agent's processes, which may change the files meanwhile: a glimpse, no grade.

        Raises:
            SandboxLost: the sandbox is gone.
        """
        ...

    def close(self) -> None:
        """Kills and removes everything. Idempotent, also after a failed start."""
        ...
