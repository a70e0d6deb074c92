"""A limit on requests in flight that lets the more urgent ones go first.

In: an urgency for each request. Out: its turn. Knows nothing of what is requested.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import IntEnum


class Urgency(IntEnum):
    """Who waits behind whom; equals wait in order of arrival."""

    LIVE = 0
    """A person waits."""
    SCORE = 1
    """Judges and teachers."""
    HOSTED = 2


class PriorityGate:
    """At most `capacity` holders at once."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._arrivals = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """Requests that have no turn yet."""
        return sum(1 for _, _, turn in self._waiting if not turn.done())

    @asynccontextmanager
    async def turn(self, urgency: Urgency) -> AsyncIterator[None]:
        """Waits for a place, most urgent first, and holds it."""
        await self._acquire(urgency)
        try:
            yield
        finally:
            self._pass_on()

    async def _acquire(self, urgency: Urgency) -> None:
        if self._free > 0:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals += 1
        heapq.heappush(self._waiting, (urgency, self._arrivals, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # the place came together with the cancellation
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
