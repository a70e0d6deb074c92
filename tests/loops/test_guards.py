"""Guards halt on a share over a full window, and say which."""

import pytest

from claw_train.assembling.guards import FailureGuards, ShareGuard
from claw_train.config import GuardConfig
from claw_train.errors import GuardError
from claw_train.types import RewardStatus, TrajectoryStatus, TurnStatus

from .values import reward, scored, trajectory, turn


def test_nothing_is_judged_before_the_window_is_full():
    guard = ShareGuard("x", limit=0.5, window=4, fix="mend it")
    for _ in range(3):
        guard.mark(True)
    with pytest.raises(GuardError, match=r"x: 100% of the last 4.*50%.*mend it"):
        guard.mark(True)


def test_old_marks_leave_the_window():
    guard = ShareGuard("x", limit=0.5, window=2, fix="")
    for bad in (True, False, False, True, False):
        guard.mark(bad)
    assert guard.share == 0.5


def test_lost_episodes_halt_but_engine_failures_are_counted_apart():
    guards = FailureGuards(GuardConfig(window=4, invalid_share=0.5, engine_failures=3))
    for _ in range(3):
        guards.see_trajectory(trajectory(outcome=None, status=TrajectoryStatus.INFRA_ERROR))
    with pytest.raises(GuardError, match="lost to the world"):
        guards.see_trajectory(trajectory(outcome=None))


def test_an_episode_that_outgrew_its_context_is_no_failure_of_the_world():
    import dataclasses

    guards = FailureGuards(GuardConfig(window=2, invalid_share=0.1))
    cut = dataclasses.replace(
        trajectory(outcome=None), status=TrajectoryStatus.TRUNCATED, outcome=reward(status=RewardStatus.UNGRADED)
    )
    for _ in range(4):
        guards.see_trajectory(cut)
    assert guards.invalid.share == 0.0


def test_engine_failures_in_a_row_halt():
    import dataclasses

    guards = FailureGuards(GuardConfig(window=128, engine_failures=2))
    failed = dataclasses.replace(trajectory(outcome=None), status=TrajectoryStatus.ENGINE_ERROR)
    guards.see_trajectory(failed)
    guards.see_trajectory(failed)
    guards.see_trajectory(trajectory())
    guards.see_trajectory(failed)
    guards.see_trajectory(failed)
    with pytest.raises(GuardError, match="3 episodes in a row"):
        guards.see_trajectory(failed)


def test_failed_judges_halt():
    guards = FailureGuards(GuardConfig(window=4, judge_failed_share=0.5))
    for i in range(3):
        guards.see_turn(scored(turn(index=i), status=RewardStatus.INFRA_ERROR))
    with pytest.raises(GuardError, match="without a verdict"):
        guards.see_turn(scored(turn(index=3), status=RewardStatus.INFRA_ERROR))


def test_cut_replies_halt():
    guards = FailureGuards(GuardConfig(window=4, cut_share=0.5))
    for i in range(3):
        guards.see_turn(scored(turn(index=i, status=TurnStatus.CUT)))
    with pytest.raises(GuardError, match="cut, empty or looping"):
        guards.see_turn(scored(turn(index=3, status=TurnStatus.CUT)))
