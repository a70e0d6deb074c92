"""Fixtures of the ledger's tests."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

HERE = Path(__file__).parent


@dataclass
class Workload:
    """The process that plays `workload.py` in children of its own."""

    stdin: IO[str]
    stdout: IO[str]

    def start(self, run_dir: Path, *, crash_at: str = "", kill_after: int = 0, work: str = "run") -> dict[str, int]:
        job = {"run_dir": str(run_dir), "crash_at": crash_at, "kill_after": kill_after, "work": work}
        return self.say(json.dumps(job))

    def say(self, line: str) -> dict[str, int]:
        self.stdin.write(line + "\n")
        self.stdin.flush()
        return json.loads(self.stdout.readline())


@pytest.fixture(scope="session")
def workload() -> Iterator[Workload]:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    with subprocess.Popen(
        [sys.executable, str(HERE / "workload.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Workload(process.stdin, process.stdout)
        process.stdin.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run folder to be, in memory where there is such a place: a killed process loses no page of either."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder) / "run"
