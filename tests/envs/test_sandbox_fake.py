"""The fake answers from its script and misbehaves exactly as told."""

import pytest

from claw_envs.errors import SandboxLost, SandboxTimeout, SandboxUnavailable
from claw_envs.sandbox.base import Sandbox
from claw_envs.sandbox.fake import FakeSandbox, Fault
from claw_envs.types import ExecResult

OK = ExecResult(stdout=b"ok", stderr=b"", exit_code=0)


def test_answers_follow_the_script():
    sandbox = FakeSandbox(
        {"ls.*": OK, "echo (.*)": lambda command: ExecResult(stdout=command.encode(), stderr=b"", exit_code=4)}
    )
    assert isinstance(sandbox, Sandbox)
    assert sandbox.exec("ls -la", timeout_s=1) is OK
    assert sandbox.exec("echo a", timeout_s=1).stdout == b"echo a"
    assert sandbox.exec("rm", timeout_s=1).exit_code == 127
    assert sandbox.commands == ["ls -la", "echo a", "rm"]


def test_files_are_kept():
    sandbox = FakeSandbox()
    sandbox.write("/work/a", b"data")
    assert sandbox.read("/work/a", max_bytes=4) == b"data"
    assert sandbox.read("/work/b", max_bytes=4) is None
    with pytest.raises(ValueError, match="more than the 3"):
        sandbox.read("/work/a", max_bytes=3)


def test_failing_at_start():
    with pytest.raises(SandboxUnavailable):
        FakeSandbox(fault=Fault.START)


def test_dying_after_some_commands_is_for_good():
    sandbox = FakeSandbox({".*": OK}, fault=Fault.DIE, after=1)
    sandbox.exec("a", timeout_s=1)
    for _ in range(2):
        with pytest.raises(SandboxLost):
            sandbox.exec("b", timeout_s=1)
    with pytest.raises(SandboxLost):
        sandbox.freeze()


def test_hanging():
    with pytest.raises(SandboxTimeout, match="gave up after 3 s"):
        FakeSandbox(fault=Fault.HANG).exec("a", timeout_s=3)


def test_breaking_at_grading_only():
    sandbox = FakeSandbox({".*": OK}, fault=Fault.GRADE)
    sandbox.write("/work/a", b"data")
    assert sandbox.exec("a", timeout_s=1) is OK
    assert sandbox.read("/work/a", max_bytes=10) == b"data"
    with pytest.raises(SandboxLost):
        sandbox.freeze()
    with pytest.raises(SandboxLost):
        sandbox.run_check(["true"], timeout_s=1)
