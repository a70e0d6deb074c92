"""Judging: rules that say -1, +1 on a newly passing check, or abstain; and exactly one answer a turn."""

import asyncio

import pytest

from claw_train.errors import EngineError, JudgeError
from claw_train.judging.loop import JudgingLoop, judge_turn
from claw_train.judging.rules import RulesJudge
from claw_train.types import RewardStatus, ScoredTurn, TurnStatus

from .values import broken_state, reward, state, turn


def score(of, history=()):
    return asyncio.run(RulesJudge().score(of, tuple(history))).reward


def test_a_refused_action_is_bad():
    assert score(turn(next_state=state("no such file", is_error=True))).value == -1.0


def test_a_reply_without_an_action_is_bad():
    assert score(turn(next_state=state(command=False))).value == -1.0


def test_success_alone_is_not_good():
    got = score(turn(next_state=state(exit_code=0)))
    assert got.status is RewardStatus.ABSTAIN
    assert got.value is None


def test_a_newly_passing_check_is_good():
    assert score(turn(next_state=state(newly_passed=("file exists",)))).value == 1.0


def test_a_check_that_passes_does_not_excuse_a_cut_reply():
    got = score(turn(next_state=state(newly_passed=("file exists",)), status=TurnStatus.CUT))
    assert got.value is None


def test_an_exact_repeat_with_the_same_answer_is_bad():
    assert score(turn(index=1), [turn(index=0)]).value == -1.0


def test_a_repeat_that_changed_something_is_not_bad():
    assert score(turn(index=1, next_state=state("b")), [turn(index=0, next_state=state("a"))]).value is None


@pytest.mark.parametrize("status", [s for s in TurnStatus if s is not TurnStatus.OK])
def test_a_failed_reply_is_not_scored_whatever_followed(status):
    assert score(turn(status=status, next_state=state(is_error=True))).value is None


def test_a_broken_world_is_no_verdict():
    with pytest.raises(JudgeError, match="world failed"):
        score(turn(next_state=broken_state()))


class Failing:
    def __init__(self, error):
        self.error = error

    async def score(self, turn, history):
        raise self.error


class Silent:
    async def score(self, turn, history):
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    "judge",
    [Failing(JudgeError("unreadable")), Failing(EngineError("down")), Failing(ZeroDivisionError("bug")), Silent()],
)
def test_a_judge_that_fails_gives_a_reason_and_no_score(judge):
    got = asyncio.run(judge_turn(judge, turn(), (), timeout_s=0.05))
    assert got.reward.status is RewardStatus.INFRA_ERROR
    assert got.reward.value is None
    assert got.reward.reason


@pytest.mark.parametrize("status", [s for s in TurnStatus if s is not TurnStatus.OK])
def test_nobody_can_reward_a_failed_reply(status):
    class Generous:
        async def score(self, turn, history):
            return ScoredTurn(turn=turn, reward=reward(1.0))

    got = asyncio.run(judge_turn(Generous(), turn(status=status), (), timeout_s=1.0))
    assert got.reward.status is RewardStatus.INFRA_ERROR
    assert got.reward.value is None


class Noting:
    """Remembers which history it was shown."""

    def __init__(self):
        self.seen = {}

    async def score(self, turn, history):
        self.seen[turn.id.index] = [t.id.index for t in history]
        if turn.id.index == 1:
            raise JudgeError("no")
        return ScoredTurn(turn=turn, reward=reward())


def test_every_turn_comes_back_once_and_sees_only_its_past():
    async def main():
        turns, out, judge = asyncio.Queue(4), [], Noting()

        async def emit(scored):
            out.append(scored)

        loop = JudgingLoop(judge, turns, emit, concurrency=3, timeout_s=1.0)
        task = asyncio.create_task(loop.run())
        for index in range(3):
            await turns.put(turn(index=index))
        await asyncio.wait_for(turns.join(), 2)
        task.cancel()
        assert sorted(s.turn.id.index for s in out) == [0, 1, 2]
        assert judge.seen == {0: [], 1: [0], 2: [0, 1]}

    asyncio.run(main())
