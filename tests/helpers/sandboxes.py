"""Watching what sandboxes leave on the machine: processes, groups, folders."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from claw_envs.sandbox.host import procs
from claw_envs.sandbox.reaper import reap

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 30


def until(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Waits for a condition that must come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.01)


def identities(root: int) -> list[tuple[int, int]]:
    """Every process at and below `root`, with its start time."""
    return [(pid, start) for pid in procs.tree(root) if (start := procs.start_time(pid)) is not None]


def any_alive(processes: list[tuple[int, int]]) -> bool:
    return any(procs.alive(pid, start) for pid, start in processes)


def groups_of(sandbox_ids: list[str]) -> list[Path]:
    """Control groups that carry one of these ids."""
    found: list[Path] = []
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        found += [Path(folder) / name for name in names if any(identifier in name for identifier in sandbox_ids)]
    return found


OWNER = """
import json, sys, time
from claw_envs.sandbox.launcher import get_launcher
from claw_envs.sandbox.namespace import NamespaceSandbox
from tests.helpers.sandboxes import identities

held = [NamespaceSandbox() for _ in range(int(sys.argv[1]))]
for sandbox in held:
    sandbox.exec("setsid nohup sleep 1000 >/dev/null 2>&1 & sleep 1001 & echo x > file", timeout_s=10)
    sandbox.run_check(["true"], timeout_s=10)
launcher = get_launcher().pid
print(json.dumps({"launcher": launcher, "ids": [s.id for s in held], "processes": identities(launcher)}), flush=True)
time.sleep(1000)
"""
"""A program that holds sandboxes full of daemons and says what it holds."""


class Owner:
    """A running `OWNER` whose leases lie in a folder of their own."""

    def __init__(self, state: Path, sandboxes: int) -> None:
        self.state = state / "claw"
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(sandboxes)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(state), "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.launcher: int = said["launcher"]
        self.ids: list[str] = said["ids"]
        self.processes: list[tuple[int, int]] = [tuple(pair) for pair in said["processes"]]

    def kill(self) -> None:
        """SIGKILL. May be repeated."""
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def clean(self) -> None:
        """Leaves nothing, also after a failed test."""
        self.kill()
        for pid, start in self.processes:
            procs.send(pid, signal.SIGKILL, start)
        until(lambda: not any_alive(self.processes), "the owner's processes end")
        reap(self.state)
