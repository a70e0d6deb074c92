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
    """Slots that know who holds them and why they came back."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a slot budget needs at least 1 slot, got {capacity}")
        self.capacity = capacity
        self.released: dict[str, int] = {}
        """Reason -> slots given back for it."""
        self._held: dict[str, Lease] = {}
        self._changed = asyncio.Event()

    async def take(self, group_id: str) -> Lease:
        """Waits for a slot.

        Raises:
            ValueError: the group holds one already.
        """
        while self.in_use >= self.capacity:
            self._changed.clear()
            await self._changed.wait()
        return self.hold(group_id)

    def hold(self, group_id: str) -> Lease:
        """Takes a slot at once, beyond the capacity if need be: for work that an earlier process left.

        Raises:
            ValueError: the group holds one already.
        """
        if group_id in self._held:
            raise ValueError(f"group {group_id} holds a slot already")
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
        self._changed.set()
