"""The world fails, not the agent: truncated, invalid, reward 0.0, and the reason is named."""

import gymnasium
import pytest

from claw_envs.errors import SandboxLost, SandboxUnavailable
from claw_envs.sandbox.fake import FakeSandbox, Fault
from claw_envs.terminal import env as module
from claw_envs.terminal import tasks
from claw_envs.types import ExecResult, FailureKind

OK = ExecResult(stdout=b"fine\n", stderr=b"", exit_code=0, bytes_total=5, cwd="/work")
TASK = {"task_id": "rename/train/0/1"}


@pytest.fixture
def fakes(monkeypatch):
    """Sandboxes that the environment will open, in order; the last one again and again."""
    queue: list[FakeSandbox] = []

    def open_sandbox(backend, limits):
        return queue.pop(0) if len(queue) > 1 else queue[0]

    monkeypatch.setattr(module, "open_sandbox", open_sandbox)
    return queue


def assert_failed(step, kind):
    obs, reward, terminated, truncated, info = step
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert (info["valid"], info["failure_kind"]) == (False, kind)
    assert (obs["valid"], obs["failure_kind"]) == (0, str(kind))
    assert not info["next_state"].valid


@pytest.mark.parametrize("fault", [Fault.DIE, Fault.HANG])
def test_a_sandbox_lost_in_a_command_ends_the_episode_invalid(fakes, make, fault):
    fakes.append(FakeSandbox({".*": OK}, fault=fault, after=1))
    env = make()
    env.reset(options=TASK)
    assert env.step("ls")[4]["valid"]
    assert_failed(env.step("ls"), FailureKind.SANDBOX_LOST)
    assert fakes[0].closed


def test_a_sandbox_lost_in_grading_ends_the_episode_invalid(fakes, make):
    fakes.append(FakeSandbox({".*": OK}, fault=Fault.GRADE))
    env = make()
    env.reset(options=TASK)
    assert_failed(env.step("submit"), FailureKind.SANDBOX_LOST)


def test_a_listing_that_fails_ends_the_episode_invalid(fakes, make):
    fakes.append(FakeSandbox({".*": OK}, checks=ExecResult(stdout=b"", stderr=b"no", exit_code=1)))
    env = make(max_turns=1)
    env.reset(options=TASK)
    assert_failed(env.step("ls"), FailureKind.GRADER_BROKE)


def test_a_check_that_raises_ends_the_episode_invalid(fakes, make, monkeypatch):
    fakes.append(FakeSandbox({".*": OK}))
    env = make()
    env.reset(options=TASK)
    monkeypatch.setattr(tasks, "snapshot", lambda sandbox: None)
    assert_failed(env.step("submit"), FailureKind.GRADER_BROKE)


@pytest.mark.parametrize("error", [SandboxLost("gone"), OSError("no space")])
def test_a_failed_reset_shows_at_once_and_ends_at_the_first_step(fakes, make, monkeypatch, error):
    def write(*args, **kwargs):
        raise error

    fakes.append(FakeSandbox({".*": OK}))
    env = make()
    with monkeypatch.context() as patch:
        patch.setattr(fakes[0], "write", write)
        obs, info = env.reset(options=TASK)
    assert (info["valid"], info["failure_kind"], info["task_id"]) == (False, FailureKind.RESET_FAILED, TASK["task_id"])
    assert obs["instruction"].startswith(("Rename", "Please rename"))
    assert_failed(env.step("ls"), FailureKind.RESET_FAILED)


def test_a_machine_that_cannot_run_the_backend_is_told_so(fakes, make, monkeypatch):
    def open_sandbox(backend, limits):
        raise SandboxUnavailable("bubblewrap is missing")

    monkeypatch.setattr(module, "open_sandbox", open_sandbox)
    with pytest.raises(SandboxUnavailable, match="bubblewrap"):
        make().reset()


def test_the_next_episode_is_sound_again(fakes, make):
    fakes += [FakeSandbox({".*": OK}, fault=Fault.DIE), FakeSandbox({".*": OK})]
    env = make()
    env.reset(options=TASK)
    assert_failed(env.step("ls"), FailureKind.SANDBOX_LOST)
    assert env.reset(options=TASK)[1]["valid"]
    assert env.step("ls")[4]["valid"]


def test_after_the_end_a_reset_is_needed(fakes, make):
    fakes.append(FakeSandbox({".*": OK}, fault=Fault.DIE))
    env = make().unwrapped
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("ls")
    env.reset(options=TASK)
    env.step("ls")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("ls")


def test_the_sandbox_goes_at_the_end_and_at_a_reset(fakes, make):
    fakes += [FakeSandbox({".*": OK}) for _ in range(3)]
    first, second, third = fakes
    env = make()
    env.reset(options=TASK)
    env.reset(options=TASK)
    assert first.closed
    env.step("submit")
    assert second.closed
    env.reset(options=TASK)
    env.close()
    assert third.closed


@pytest.mark.parametrize("reply", ["x" * 20_000, "ls\0", "\ud800"])
def test_a_reply_that_no_shell_can_take_is_refused_and_costs_a_turn(fakes, make, reply):
    fakes.append(FakeSandbox({".*": OK}))
    env = make(max_turns=2)
    env.reset(options=TASK)
    _, reward, terminated, truncated, info = env.step(reply)
    assert fakes[0].commands == []
    assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, True)
    assert (info["next_state"].command, info["next_state"].is_error) == (False, True)
    assert env.step(reply)[3]


def test_an_action_that_is_no_text_is_an_error(fakes, make):
    fakes.append(FakeSandbox({".*": OK}))
    env = make().unwrapped
    env.reset(options=TASK)
    with pytest.raises(TypeError, match="int"):
        env.step(3)
