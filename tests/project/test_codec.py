"""Stored values come back equal, or not at all."""

import dataclasses
import gc
import math

import pytest

from claw_envs.types import FailureKind, NextState, Role, TerminalState
from claw_train import codec
from claw_train.errors import LedgerError
from claw_train.types import (
    Batch,
    Completion,
    Reward,
    RewardStatus,
    Sample,
    Sampling,
    Span,
    StepReport,
    Trajectory,
    TrajectoryStatus,
    TurnId,
    Version,
    WeightKind,
    WeightRef,
)

V1 = Version("main", 0, 1)
TURN = TurnId("terminal", "s1", 0)
COMPLETION = Completion(
    token_ids=(5, 9),
    logprobs=(-0.1, -1e-17),
    versions=(V1, Version("main", 1, 0)),
    finish_reason="stop",
    sampling=Sampling(stop=("\n",), seed=3),
    text="écho 'ü'\n\u2028",
)
SAMPLE = Sample(
    spans=(Span(TURN, 1, 3),),
    token_ids=(1, 2, 3),
    loss_mask=(False, True, True),
    behaviour_logprobs=(0.0, -0.3, -1 / 3),
    versions=(None, V1, V1),
    advantages=(0.0, 1.0, -1.0),
    temperature=0.7,
    policy="main",
    group_id="g",
)
WEIGHTS = WeightRef(version=V1, kind=WeightKind.LORA, path="weights/1", checksum="ab")
OUTCOME = Reward(value=None, status=RewardStatus.INFRA_ERROR, source="env", votes=(1, -1))


@pytest.mark.parametrize(
    "value",
    [
        COMPLETION,
        Batch(step=1, samples=(SAMPLE,), num_loss_tokens=2),
        StepReport(step=1, weights=WEIGHTS, metrics={"loss": 0.1}, checkpoint=None),
        Trajectory(
            id="s1", group_id="g", task_id="t", outcome=OUTCOME, status=TrajectoryStatus.INFRA_ERROR, turn_ids=(TURN,)
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_equal(value):
    assert codec.load(type(value), codec.dump(value)) == value


def test_figures_that_are_not_finite_survive():
    report = StepReport(step=1, weights=WEIGHTS, metrics={"kl": math.nan, "up": math.inf, "down": -math.inf})
    back = codec.load(StepReport, codec.dump(report)).metrics
    assert math.isnan(back["kl"])
    assert (back["up"], back["down"]) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"null", b'{"step": 1}', codec.dump(WEIGHTS), codec.dump(COMPLETION).replace(b"-0.1", b'"low"')],
)
def test_what_is_no_completion_is_refused(data):
    with pytest.raises(LedgerError, match="stored Completion is unreadable"):
        codec.load(Completion, data)


def test_a_stored_value_is_checked_like_a_new_one():
    shorter = codec.dump(COMPLETION).replace(b"[5,9]", b"[5]")
    with pytest.raises(LedgerError, match="lengths differ"):
        codec.load(Completion, shorter)


@pytest.mark.parametrize(
    "state",
    [
        NextState(role=Role.USER, text="thanks"),
        TerminalState(role=Role.TERMINAL, text="$ ls", stdout="a\n", exit_code=0, newly_passed=("made",), cwd="/work"),
        TerminalState(role=Role.TERMINAL, text="", valid=False, failure_kind=FailureKind.SANDBOX_LOST),
    ],
)
def test_a_next_state_comes_back_as_its_own_class(state):
    back = codec.load_next_state(*codec.dump_next_state(state))
    assert type(back) is type(state)
    assert back == state


def test_the_leftover_of_a_slotted_class_is_never_used():
    gc.disable()
    try:

        @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
        class FreshState(NextState):
            extra: int = 0

        same_name = [c for c in NextState.__subclasses__() if c.__name__ == "FreshState"]
        assert len(same_name) == 2
        state = FreshState(role=Role.TOOL, text="", extra=4)
        assert type(codec.load_next_state(*codec.dump_next_state(state))) is FreshState
    finally:
        gc.enable()


def test_a_class_that_is_not_loaded_is_named():
    with pytest.raises(LedgerError, match="unknown class 'HologramState'"):
        codec.load_next_state("HologramState", b"{}")


def test_classes_beside_the_next_states_are_out_of_reach():
    with pytest.raises(LedgerError, match="unknown class 'Task'"):
        codec.load_next_state("Task", b"{}")
