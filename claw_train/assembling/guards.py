"""Watches shares of failures over a sliding window and halts training above a limit.

In: one mark per episode or turn. Out: a `GuardError` that says which share, over what window, against which limit.
Nothing is judged before the window is full, so a bad start of a small run is not a verdict.
"""

from collections import deque

from claw_train.config import GuardConfig
from claw_train.errors import GuardError
from claw_train.types import RewardStatus, ScoredTurn, Trajectory, TrajectoryStatus, TurnStatus


class ShareGuard:
    """One share of bad marks over the last `window` marks."""

    def __init__(self, name: str, *, limit: float, window: int, fix: str) -> None:
        self.name = name
        self._limit = limit
        self._marks: deque[bool] = deque(maxlen=window)
        self._fix = fix

    def mark(self, bad: bool) -> None:
        """Adds one observation.

        Raises:
            GuardError: the window is full and the share of bad marks is above the limit.
        """
        self._marks.append(bad)
        if len(self._marks) == self._marks.maxlen and self.share > self._limit:
            raise GuardError(
                f"{self.name}: {self.share:.0%} of the last {len(self._marks)}, above the limit of {self._limit:.0%}; "
                f"{self._fix}"
            )

    @property
    def share(self) -> float:
        """Share of bad marks; 0.0 when there are none."""
        return sum(self._marks) / len(self._marks) if self._marks else 0.0


class FailureGuards:
    """All shares of the failure table, fed by the assembling loop."""

    def __init__(self, config: GuardConfig) -> None:
        self.invalid = ShareGuard(
            "episodes lost to the world",
            limit=config.invalid_share,
            window=config.window,
            fix="see the sandbox errors in the log, or raise guards.invalid_share",
        )
        self.judge = ShareGuard(
            "turns without a verdict",
            limit=config.judge_failed_share,
            window=config.window,
            fix="see the judge's errors in the log, or raise guards.judge_failed_share",
        )
        self.cut = ShareGuard(
            "replies cut, empty or looping",
            limit=config.cut_share,
            window=config.window,
            fix="raise sampling.max_new_tokens, or guards.cut_share",
        )
        self._engine_limit = config.engine_failures
        self._engine_row = 0

    def see_turn(self, scored: ScoredTurn) -> None:
        """Marks one judged turn.

        Raises:
            GuardError: a share is above its limit.
        """
        self.judge.mark(scored.reward.status is RewardStatus.INFRA_ERROR)
        self.cut.mark(scored.turn.status is not TurnStatus.OK)

    def see_trajectory(self, trajectory: Trajectory) -> None:
        """Marks one ended episode.

        Raises:
            GuardError: a share or the run of engine failures is above its limit.
        """
        engine_failed = trajectory.status is TrajectoryStatus.ENGINE_ERROR
        self._engine_row = self._engine_row + 1 if engine_failed else 0
        if self._engine_row > self._engine_limit:
            raise GuardError(
                f"the engine failed {self._engine_row} episodes in a row (guards.engine_failures={self._engine_limit})"
            )
        if not engine_failed:
            self.invalid.mark(trajectory.outcome.status is RewardStatus.INFRA_ERROR)
