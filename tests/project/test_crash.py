"""Crash points kill where and when they are told to, and name only places that exist."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from claw_train import crash
from claw_train.crash import POINTS, crash_point

ROOT = Path(__file__).parents[2]
PASSES = """
from claw_train.crash import crash_point
for n in range(1, 5):
    crash_point("ledger.bind.before")
    crash_point("ledger.bind.after")
    print(n, flush=True)
"""


def run_passes(target: str) -> tuple[int, str]:
    """Exit status and last loop count of a process that passes two points four times."""
    done = subprocess.run(
        [sys.executable, "-c", PASSES],
        env={**os.environ, "CLAW_CRASH_AT": target},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.split()[-1] if done.stdout else ""


@pytest.mark.parametrize(
    ("target", "last"), [("ledger.bind.before:3", "2"), ("ledger.bind.after:1", ""), ("ledger.bind.after", "")]
)
def test_the_named_pass_of_the_named_point_kills(target, last):
    assert run_passes(target) == (-signal.SIGKILL, last)


def test_a_point_that_is_not_passed_often_enough_kills_nobody():
    assert run_passes("ledger.bind.before:5") == (0, "4")


def test_without_a_target_nothing_happens(monkeypatch):
    monkeypatch.delenv("CLAW_CRASH_AT", raising=False)
    killed: list[int] = []
    monkeypatch.setattr(crash.os, "kill", lambda pid, _: killed.append(pid))
    crash_point("ledger.bind.before")
    assert killed == []


def test_a_target_that_is_no_point_is_refused(monkeypatch):
    monkeypatch.setenv("CLAW_CRASH_AT", "ledger.bound.before:1")
    with pytest.raises(ValueError, match=r"no crash point: 'ledger\.bound\.before'"):
        crash_point("ledger.bind.before")


def test_every_point_in_the_code_is_listed():
    named = {
        node.args[0].value
        for path in (ROOT / "claw_train").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", None)) == "crash_point"
        and isinstance(node.args[0], ast.Constant)
    }
    assert named - POINTS == set()
