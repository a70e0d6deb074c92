"""Stepping and swapping: order of commits, staleness, slots given back, newest weights win."""

import asyncio

import pytest

from claw_train.assembling.batching import assemble
from claw_train.channels import WeightsChannel
from claw_train.config import MethodConfig
from claw_train.errors import GuardError
from claw_train.slots import SlotBudget
from claw_train.stepping import Stepping, Swapping, batch_ages
from claw_train.types import StepReport, Version, WeightKind, WeightRef

from .values import group


def ref(step):
    return WeightRef(version=Version("main", 0, step), kind=WeightKind.LORA, path=f"/w/{step}", checksum="0")


class Journal:
    """Stands for ledger, trainer and engine, and notes the order of their calls."""

    def __init__(self):
        self.events = []

    async def step(self, batch):
        self.events.append(f"step {batch.step}")
        metrics = {"step_s": 1.5, "staleness_max": 7.0, "staleness_mean": 6.0, "loss_tokens": 5.0}
        return StepReport(step=batch.step, weights=ref(batch.step), checkpoint=f"/c/{batch.step}", metrics=metrics)

    async def consume(self, step, checkpoint, metrics=None):
        self.events.append(f"consume {step}")
        self.figures = metrics

    async def load_weights(self, weights):
        self.events.append(f"load {weights.version.step}")

    async def aclose(self):
        pass


def batch(step, *, version=None):
    return assemble([group("g0", version=version or Version("main", 0, step - 1))], step=step, method=MethodConfig())


def stepping(journal, batches, weights, *, max_staleness=0):
    return Stepping(
        batches=batches,
        weights=weights,
        trainer=journal,
        ledger=journal,
        max_staleness=max_staleness,
        stall_s=0.2,
        waiting_for=lambda: {"g7": "1/2 trajectories"},
        on_step=lambda report, figures: journal.events.append(f"report {report.step}"),
    )


def test_the_ledger_hears_of_a_step_before_its_weights_are_published():
    async def main():
        journal, batches, weights = Journal(), asyncio.Queue(), WeightsChannel()
        await batches.put(batch(1))
        await stepping(journal, batches, weights).run(first=1, last=1)
        assert journal.events == ["step 1", "consume 1", "report 1"]
        assert (await weights.get())[0] == ref(1)

    asyncio.run(main())


def test_the_trainers_own_figures_are_kept_beside_ours():
    async def main():
        journal, batches = Journal(), asyncio.Queue()
        await batches.put(batch(3, version=Version("main", 0, 1)))
        await stepping(journal, batches, WeightsChannel(), max_staleness=1).run(first=3, last=3)
        trainers = {
            name: journal.figures[name] for name in ("step_s", "staleness_max", "staleness_mean", "loss_tokens")
        }
        assert trainers == {"step_s": 1.5, "staleness_max": 7.0, "staleness_mean": 6.0, "loss_tokens": 5.0}
        assert journal.figures["token_age_max"] == journal.figures["token_age_mean"] == 1.0
        assert journal.figures["batch_tokens"] == batch(3, version=Version("main", 0, 1)).batch.num_loss_tokens

    asyncio.run(main())


def test_a_token_that_is_too_old_stops_training_before_the_step():
    async def main():
        journal, batches = Journal(), asyncio.Queue()
        await batches.put(batch(5, version=Version("main", 0, 2)))
        with pytest.raises(GuardError, match="age 2 passed max_staleness=1"):
            await stepping(journal, batches, WeightsChannel(), max_staleness=1).run(first=5, last=5)
        assert journal.events == []

    asyncio.run(main())


def test_starvation_halts_and_names_what_is_missing():
    async def main():
        with pytest.raises(GuardError, match=r"no batch for step 1 .*g7: 1/2 trajectories"):
            await stepping(Journal(), asyncio.Queue(), WeightsChannel()).run(first=1, last=1)

    asyncio.run(main())


def test_ages_count_trained_tokens_only():
    assert set(batch_ages(batch(5, version=Version("main", 0, 2)).batch)) == {2}


def test_slots_come_back_when_the_engine_serves_the_weights():
    async def main():
        journal, weights, slots = Journal(), WeightsChannel(), SlotBudget(1)
        await slots.take("g0")
        swapping = Swapping(weights=weights, engine=journal, slots=slots)
        task = asyncio.create_task(swapping.run())
        waiting = asyncio.create_task(slots.take("g1"))
        await asyncio.sleep(0)
        assert not waiting.done()
        weights.put(ref(1), ["g0"])
        await asyncio.wait_for(waiting, 1)
        assert journal.events == ["load 1"]
        assert (await swapping.wait_for(1)).version.step == 1
        task.cancel()

    asyncio.run(main())


def test_the_newest_weights_win_and_no_group_is_forgotten():
    async def main():
        weights = WeightsChannel()
        weights.put(ref(1), ["a"])
        weights.put(ref(2), ["b"])
        assert await weights.get() == (ref(2), ["a", "b"])
        weights.put(ref(3), ["c"])
        assert await weights.get() == (ref(3), ["c"])

    asyncio.run(main())
