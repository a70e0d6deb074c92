"""Order and conservation of places."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from claw_train.serving.priority import PriorityGate, Urgency


def test_the_more_urgent_go_first_and_equals_in_order_of_arrival():
    order: list[str] = []
    arrivals = {
        "hosted 1": Urgency.HOSTED,
        "score": Urgency.SCORE,
        "hosted 2": Urgency.HOSTED,
        "live": Urgency.LIVE,
    }

    async def one(gate, name):
        async with gate.turn(arrivals[name]):
            order.append(name)

    async def main():
        gate = PriorityGate(1)
        async with asyncio.TaskGroup() as group, gate.turn(Urgency.HOSTED):
            for name in arrivals:
                group.create_task(one(gate, name))
                await asyncio.sleep(0)
            assert gate.waiting == len(arrivals)

    asyncio.run(main())
    assert order == ["live", "score", "hosted 1", "hosted 2"]


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(1, 3),
    jobs=st.lists(st.tuples(st.sampled_from(Urgency), st.integers(0, 3), st.booleans()), max_size=12),
    cancel_at=st.integers(0, 8),
)
def test_no_place_is_lost_or_made_by_cancellation(capacity, jobs, cancel_at):
    held = most = 0

    async def one(gate, urgency, steps):
        nonlocal held, most
        async with gate.turn(urgency):
            held += 1
            most = max(most, held)
            try:
                for _ in range(steps):
                    await asyncio.sleep(0)
            finally:
                held -= 1

    async def main():
        gate = PriorityGate(capacity)
        tasks = [asyncio.create_task(one(gate, urgency, steps)) for urgency, steps, _ in jobs]
        for _ in range(cancel_at):
            await asyncio.sleep(0)
        for task, (_, _, cancelled) in zip(tasks, jobs, strict=True):
            if cancelled:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # all places are back: as many holders as ever may enter at once
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            inside = asyncio.Barrier(capacity)

            async def enter():
                async with gate.turn(Urgency.HOSTED):
                    await inside.wait()

            for _ in range(capacity):
                group.create_task(enter())
        assert gate.waiting == 0

    asyncio.run(main())
    assert most <= capacity
