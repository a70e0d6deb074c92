"""Slots: how many groups of rollouts may be under way. Hosting takes one a group; its step, or its drop, gives it back.

Slots only throttle. What bounds staleness is the age check at assembly and at the step.
"""

import asyncio


class Lease:
    """One group's slot."""

    def __init__(self, budget: "SlotBudget", group_id: str) -> None:
        self.group_id = group_id
        self._budget = budget
        self._held = True

    def release(self, reason: str) -> None:
        """Gives the slot back; later calls do nothing. `reason` is counted."""
        if self._held:
            self._held = False
            self._budget._give_back(self, reason)


class SlotBudget:
    """A counted semaphore that knows who holds it and why slots came back."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a slot budget needs at least 1 slot, got {capacity}")
        self.capacity = capacity
        self.released: dict[str, int] = {}
        """Reason -> slots given back for it."""
        self._held: dict[str, Lease] = {}
        self._free = asyncio.Semaphore(capacity)

    async def take(self, group_id: str) -> Lease:
        """Waits for a slot.

        Raises:
            ValueError: the group holds one already.
        """
        if group_id in self._held:
            raise ValueError(f"group {group_id} holds a slot already")
        await self._free.acquire()
        lease = Lease(self, group_id)
        self._held[group_id] = lease
        return lease

    def release(self, group_id: str, reason: str) -> None:
        """Gives back the slot of a group; nothing happens when it holds none."""
        lease = self._held.get(group_id)
        if lease is not None:
            lease.release(reason)

    @property
    def in_use(self) -> int:
        """Slots held."""
        return len(self._held)

    def _give_back(self, lease: Lease, reason: str) -> None:
        del self._held[lease.group_id]
        self.released[reason] = self.released.get(reason, 0) + 1
        self._free.release()
