"""Whole runs as a user starts them: `python -m claw_train` in a process of its own, on the toy environment."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240

CONFIG = """\
name: toy
id: tests.helpers.toy_env:Toy-v0
max_concurrent: 8
"""
REPLIES = ["ab", "abcd", "no!", "hello", "good", "x"]

QUICK = (
    "model=tiny",
    "engine=scripted",
    "trainer.steps=4",
    "trainer.groups_per_step=2",
    "trainer.group_size=4",
    "trainer.max_staleness=0",
    "trainer.dtype=float32",
    "trainer.threads=1",
    "sampling.max_new_tokens=12",
    "eval.tasks=4",
    "eval.heldout_tasks=2",
    # the script's log-probabilities are nobody's: what is measured here is the bookkeeping
    "guards.mismatch_k3=1e9",
    "method.outlier_logratio=1e9",
)


@dataclass(frozen=True)
class Workplace:
    """A folder with the toy's configuration."""

    path: Path

    @classmethod
    def make(cls, path: Path) -> "Workplace":
        (path / "conf" / "env").mkdir(parents=True)
        (path / "conf" / "env" / "toy.yaml").write_text(CONFIG)
        (path / "script.json").write_text(json.dumps({"replies": REPLIES}))
        return cls(path)

    def command(self, *overrides: str, run: str = "run", env: str | None = "toy") -> list[str]:
        return [
            sys.executable,
            "-m",
            "claw_train",
            "--config-dir",
            str(self.path / "conf"),
            *([f"env={env}"] if env else []),
            *QUICK,
            f"engine.script={self.path / 'script.json'}",
            f"run_dir={self.path / run}",
            *overrides,
        ]

    def resume_command(self, *overrides: str, run: str = "run") -> list[str]:
        conf = str(self.path / "conf")
        return [sys.executable, "-m", "claw_train", "--config-dir", conf, f"resume={self.path / run}", *overrides]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **extra}


def call(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(**env), cwd=ROOT, check=False
    )


# a shell that puts us into the background makes all our children ignore an interrupt
_LISTENING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


def start(command: list[str], **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _LISTENING, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(**env),
        cwd=ROOT,
    )


def wait_for(condition, *, timeout_s: float = 60.0) -> bool:
    """Polls until `condition()` holds; False when time is up."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def alive_with(text: str) -> list[psutil.Process]:
    """Processes whose command line mentions `text`, zombies left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and text in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def loss_trace(run: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every step of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
