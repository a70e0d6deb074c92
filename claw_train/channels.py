"""The weights channel: holds the newest published weights, never makes the trainer wait.

Slots of every step that a swap covers are given back together, so groups of a skipped version are not forgotten.
"""

import asyncio
from collections.abc import Sequence

from claw_train.types import WeightRef


class WeightsChannel:
    """Capacity one, newest wins."""

    def __init__(self) -> None:
        self._ref: WeightRef | None = None
        self._groups: list[str] = []
        self._ready = asyncio.Event()

    def put(self, ref: WeightRef, group_ids: Sequence[str]) -> None:
        """Replaces what nobody took yet; `group_ids` wait for these or newer weights."""
        self._ref = ref
        self._groups.extend(group_ids)
        self._ready.set()

    async def get(self) -> tuple[WeightRef, list[str]]:
        """The newest weights, and all groups that wait for them."""
        await self._ready.wait()
        self._ready.clear()
        assert self._ref is not None
        ref, groups = self._ref, self._groups
        self._ref, self._groups = None, []
        return ref, groups
