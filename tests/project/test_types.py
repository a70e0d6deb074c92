"""The values between the loops: one that exists is sound."""

import dataclasses
from typing import Any

import pytest

from claw_envs.types import FailureKind, NextState, Role, TerminalState, Verdict
from claw_train import types
from claw_train.types import (
    Batch,
    Completion,
    Reward,
    RewardStatus,
    Sample,
    Sampling,
    Span,
    Turn,
    TurnId,
    TurnKind,
    TurnStatus,
    Version,
)

V1 = Version("main", 0, 1)
TURN = TurnId("terminal", "s1", 0)
COMPLETION = Completion(
    token_ids=(5, 9), logprobs=(-0.1, -2.0), versions=(V1, V1), finish_reason="stop", sampling=Sampling(), text="ls"
)


def make_sample(**changes: Any) -> Sample:
    """Two prompt tokens, then a reply of three, the last of which is masked."""
    fields: dict[str, Any] = {
        "spans": (Span(TURN, 2, 5),),
        "token_ids": (1, 2, 3, 4, 5),
        "loss_mask": (False, False, True, True, False),
        "behaviour_logprobs": (0.0, 0.0, -0.5, -0.6, 0.0),
        "versions": (None, None, V1, V1, None),
        "advantages": (0.0, 0.0, 1.0, 1.0, 0.0),
        "temperature": 1.0,
        "policy": "main",
        "group_id": "g",
    }
    return Sample(**{**fields, **changes})


def test_every_type_is_frozen_and_slotted():
    classes = [c for c in vars(types).values() if isinstance(c, type) and dataclasses.is_dataclass(c)]
    assert len(classes) > 10
    loose = [c.__name__ for c in classes if not c.__dataclass_params__.frozen or "__slots__" not in vars(c)]  # type: ignore[attr-defined]
    assert loose == []


@pytest.mark.parametrize("policy", ["main", "judge-small", "a-1"])
def test_a_version_reads_what_it_writes(policy):
    version = Version(policy, 2, 31)
    assert Version.parse(str(version)) == version


@pytest.mark.parametrize("text", ["", "main", "main-1", "main-1-x", "main-x-1"])
def test_text_that_is_no_version_is_refused(text):
    with pytest.raises(ValueError, match="not a version"):
        Version.parse(text)


def test_request_ids_of_two_attempts_differ():
    assert str(TURN) == "terminal/s1/0/0"
    assert str(dataclasses.replace(TURN, attempt=1)) != str(TURN)


@pytest.mark.parametrize("bad", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"max_new_tokens": 0}])
def test_sampling_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match="sampling out of range"):
        Sampling(**bad)


@pytest.mark.parametrize(
    ("sampling", "full"),
    [({}, True), ({"top_p": 0.9}, False), ({"top_k": 50}, False), ({"temperature": 0}, False)],
)
def test_only_untruncated_sampling_has_full_support(sampling, full):
    assert Sampling(**sampling).full_support is full


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "versions"])
def test_a_completion_of_unequal_lengths_is_refused(field):
    with pytest.raises(ValueError, match="lengths differ"):
        dataclasses.replace(COMPLETION, **{field: getattr(COMPLETION, field)[:1]})


def test_an_unknown_finish_reason_is_refused():
    with pytest.raises(ValueError, match="finish_reason 'eos'"):
        dataclasses.replace(COMPLETION, finish_reason="eos")


def test_a_turn_has_a_prompt():
    with pytest.raises(ValueError, match="empty prompt"):
        Turn(
            id=TURN,
            policy="main",
            kind=TurnKind.MAIN,
            prompt_ids=(),
            completion=COMPLETION,
            status=TurnStatus.OK,
            group_id="g",
            task_id="t",
        )


@pytest.mark.parametrize("status", list(RewardStatus))
def test_a_reward_has_a_value_exactly_when_it_is_valid(status):
    value, other = (0.5, None) if status is RewardStatus.VALID else (None, 0.5)
    assert Reward(value=value, status=status, source="rules").value == value
    with pytest.raises(ValueError, match="does not go with"):
        Reward(value=other, status=status, source="rules")


@pytest.mark.parametrize("value", [-1.01, 1.01, float("nan")])
def test_a_reward_outside_its_range_is_refused(value):
    with pytest.raises(ValueError, match=r"lies in \[-1, 1\]"):
        Reward(value=value, status=RewardStatus.VALID, source="rules")


def test_a_sample_may_mask_a_sampled_token():
    assert sum(make_sample().loss_mask) == 2


@pytest.mark.parametrize("field", ["loss_mask", "behaviour_logprobs", "versions", "advantages"])
def test_a_sample_of_unequal_lengths_is_refused(field):
    with pytest.raises(ValueError, match="differ in length"):
        make_sample(**{field: getattr(make_sample(), field)[:-1]})


def test_teacher_scores_cover_every_token():
    with pytest.raises(ValueError, match="4 teacher log-probabilities for 5 tokens"):
        make_sample(teacher_logprobs=(0.0,) * 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spans": (Span(TURN, 3, 5),)}, "token 2 is trained but was never sampled"),
        ({"versions": (None, None, V1, None, None)}, "token 3 is trained but was never sampled"),
        ({"advantages": (0.0, 1.0, 1.0, 1.0, 0.0)}, "token 1 is masked but carries a value"),
        ({"behaviour_logprobs": (0.0, 0.0, -0.5, -0.6, -0.7)}, "token 4 is masked but carries a value"),
        ({"spans": (Span(TURN, 2, 6),)}, r"span \[2, 6\)"),
        ({"spans": (Span(TURN, 5, 2),)}, r"span \[5, 2\)"),
        ({"spans": (Span(TURN, -3, 5),)}, r"span \[-3, 5\)"),
        ({"spans": (Span(TURN, 2, 4), Span(TURN, 3, 5))}, r"span \[3, 5\)"),
    ],
)
def test_a_sample_trains_only_what_was_sampled(changes, message):
    with pytest.raises(ValueError, match=message):
        make_sample(**changes)


def test_a_batch_counts_the_tokens_it_trains():
    assert Batch(step=1, samples=(make_sample(), make_sample()), num_loss_tokens=4).num_loss_tokens == 4
    with pytest.raises(ValueError, match="num_loss_tokens is 5, the masks sum to 4"):
        Batch(step=1, samples=(make_sample(), make_sample()), num_loss_tokens=5)


def test_a_next_state_says_why_it_is_invalid():
    assert NextState(role=Role.TOOL, text="", valid=False, failure_kind=FailureKind.SANDBOX_LOST).valid is False
    with pytest.raises(ValueError, match="valid=False"):
        TerminalState(role=Role.TERMINAL, text="", valid=False)
    with pytest.raises(ValueError, match="valid=True"):
        TerminalState(role=Role.TERMINAL, text="", failure_kind=FailureKind.DEADLINE)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_verdict_outside_its_range_is_refused(value):
    with pytest.raises(ValueError, match="verdict"):
        Verdict(value=value)
