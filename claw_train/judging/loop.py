"""The judging loop: turns in, scored turns out, exactly one for each.

A judge that fails or is silent yields a reward without a value and the reason; it never stalls a turn, because a turn
that does not come back would keep its group's slot for ever.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from claw_train.errors import ClawTrainError, JudgeError, boundary
from claw_train.protocols import Judge
from claw_train.types import Reward, RewardStatus, ScoredTurn, Turn

logger = logging.getLogger(__name__)


async def judge_turn(judge: Judge, turn: Turn, history: tuple[Turn, ...], *, timeout_s: float) -> ScoredTurn:
    """One verdict, or the reason why there is none."""
    try:
        with boundary(JudgeError, "judge"):
            async with asyncio.timeout(timeout_s):
                return await judge.score(turn, history)
    except ClawTrainError as error:  # also an engine's: whatever fails while judging is no verdict
        reason = str(error) or "timeout"
        logger.warning("turn %s: no verdict: %s", turn.id, reason)
        reward = Reward(value=None, status=RewardStatus.INFRA_ERROR, source="judge", reason=reason)
        return ScoredTurn(turn=turn, reward=reward)


class JudgingLoop:
    """Workers between two channels. Keeps each open session's earlier turns as history."""

    def __init__(
        self,
        judge: Judge,
        turns: "asyncio.Queue[Turn]",
        emit: Callable[[ScoredTurn], Awaitable[None]],
        *,
        concurrency: int,
        timeout_s: float,
    ) -> None:
        self._judge = judge
        self._turns = turns
        self._emit = emit
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._history: dict[str, list[Turn]] = {}

    def forget(self, session: str) -> None:
        """Drops the history of a session that has ended."""
        self._history.pop(session, None)

    async def run(self) -> None:
        """Judges until cancelled."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._concurrency):
                workers.create_task(self._work())

    async def _work(self) -> None:
        while True:
            turn = await self._turns.get()
            earlier = self._history.setdefault(turn.id.session, [])
            history = tuple(sorted((t for t in earlier if t.id < turn.id), key=lambda t: t.id))
            earlier.append(turn)
            await self._emit(await judge_turn(self._judge, turn, history, timeout_s=self._timeout_s))
            self._turns.task_done()
