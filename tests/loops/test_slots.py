"""Slots: bounded, given back once, accounted for."""

import asyncio

import pytest

from claw_train.slots import SlotBudget


def test_the_budget_bounds_what_is_under_way():
    async def main():
        budget = SlotBudget(2)
        first = await budget.take("a")
        await budget.take("b")
        third = asyncio.create_task(budget.take("c"))
        await asyncio.sleep(0)
        assert not third.done()
        first.release("trained")
        await asyncio.wait_for(third, 1)
        assert budget.in_use == 2

    asyncio.run(main())


def test_release_is_idempotent():
    async def main():
        budget = SlotBudget(1)
        lease = await budget.take("a")
        lease.release("trained")
        lease.release("trained")
        budget.release("a", "stale")
        await budget.take("b")
        waiting = asyncio.create_task(budget.take("c"))
        await asyncio.sleep(0)
        assert not waiting.done(), "a second release must not make a second slot"
        assert budget.released == {"trained": 1}
        waiting.cancel()

    asyncio.run(main())


def test_a_group_holds_at_most_one_slot():
    async def main():
        budget = SlotBudget(2)
        await budget.take("a")
        with pytest.raises(ValueError, match="holds a slot already"):
            await budget.take("a")

    asyncio.run(main())


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        SlotBudget(0)


def test_work_that_was_left_over_is_held_beyond_the_budget_and_blocks_new_work():
    async def main():
        budget = SlotBudget(1)
        leases = [budget.hold(name) for name in "abc"]
        new = asyncio.create_task(budget.take("d"))
        for lease in leases[:2]:
            lease.release("trained")
            await asyncio.sleep(0)
        assert not new.done()
        leases[2].release("trained")
        async with asyncio.timeout(1):
            await new

    asyncio.run(main())
