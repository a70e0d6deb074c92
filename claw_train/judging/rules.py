"""Deterministic rules: the first judge. They say -1, or +1 for a task check that newly passes, or abstain.

In: a turn with its next state and the session's earlier turns. Out: a reward. An exit code of 0 or a tool's success is
never good news by itself; a reply that was cut, aborted, empty or looping is never scored here (its status says
enough); a world that failed is no judgement.
"""

from claw_envs.types import NextState
from claw_train.errors import JudgeError
from claw_train.types import Reward, RewardStatus, ScoredTurn, Turn, TurnStatus

JUDGE_VERSION = "rules-1"


class RulesJudge:
    """`protocols.Judge` without a model."""

    async def score(self, turn: Turn, history: tuple[Turn, ...]) -> ScoredTurn:
        """Applies the rules.

        Raises:
            JudgeError: the turn has no next state, or an invalid one.
        """
        state = turn.next_state
        if state is None:
            raise JudgeError(f"turn {turn.id} has no next state")
        if not state.valid:
            raise JudgeError(f"turn {turn.id}: the world failed ({state.failure_kind})")
        vote, reason = _vote(turn, state, history)
        return ScoredTurn(turn=turn, reward=_reward(vote, reason))


def _vote(turn: Turn, state: NextState, history: tuple[Turn, ...]) -> tuple[int | None, str]:
    """(-1, +1 or None, which rule)."""
    if turn.status is not TurnStatus.OK:
        return None, f"reply {turn.status}"
    if state.newly_passed:
        return 1, f"newly passes {', '.join(state.newly_passed)}"
    if not state.command:
        return -1, "no action in the reply"
    if state.is_error:
        return -1, "the world refused the action"
    if any(_same(turn, earlier) for earlier in history):
        return -1, "exact repeat without effect"
    return None, "no rule applies"


def _same(turn: Turn, earlier: Turn) -> bool:
    """The same reply was answered by the same state before: nothing came of it."""
    return turn.completion.text == earlier.completion.text and turn.next_state == earlier.next_state


def _reward(vote: int | None, reason: str) -> Reward:
    if vote is None:
        return Reward(
            value=None, status=RewardStatus.ABSTAIN, source="rules", judge_version=JUDGE_VERSION, reason=reason
        )
    return Reward(
        value=float(vote),
        status=RewardStatus.VALID,
        source="rules",
        votes=(vote,),
        judge_version=JUDGE_VERSION,
        reason=reason,
    )
