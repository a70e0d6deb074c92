"""The loops together, with a real ledger and parts that fail and straggle: no deadlock, no stale or lost token."""

import asyncio
import random

import pytest

from claw_train.config import (
    EngineConfig,
    EvalConfig,
    GuardConfig,
    MethodConfig,
    ModelConfig,
    StreamConfig,
    TrainConfig,
    TrainerConfig,
)
from claw_train.errors import EngineError, GuardError, JudgeError, first_error
from claw_train.hosting.pool import HostPool
from claw_train.ledger import Ledger
from claw_train.orchestrator import Orchestrator
from claw_train.types import Completion, ScoredTurn, StepReport, Version, WeightKind, WeightRef

from .test_episode import END, LetterRenderer
from .values import reward


class Straggler:
    """An engine whose replies take very different times, and some never come."""

    def __init__(self, rng, failing):
        self.rng, self.failing = rng, failing
        self.version = Version("main", 0, 0)
        self.loaded = []

    async def generate(self, request):
        version = self.version  # a straggler keeps the weights it began with
        await asyncio.sleep(self.rng.choice([0.0, 0.0, 0.001, 0.03]))  # the straggling under test
        if self.rng.random() < self.failing:
            raise EngineError("gone")
        text = "x" * self.rng.randint(1, 6)
        ids = (*(ord(c) for c in text), END)
        return Completion(
            token_ids=ids,
            logprobs=tuple(-1.0 for _ in ids),
            versions=tuple(version for _ in ids),
            finish_reason=self.rng.choice(["stop"] * 9 + ["length"]),
            sampling=request.sampling,
            text=text,
        )

    async def load_weights(self, ref):
        await asyncio.sleep(0.002)  # a swap takes time
        self.version = ref.version
        self.loaded.append(ref.version.step)


class Moody:
    """A judge that fails now and then."""

    def __init__(self, rng, failing):
        self.rng, self.failing = rng, failing

    async def score(self, turn, history):
        await asyncio.sleep(self.rng.choice([0.0, 0.002]))  # so that turns overtake one another
        if self.rng.random() < self.failing:
            raise JudgeError("no mode")
        return ScoredTurn(turn=turn, reward=reward(self.rng.choice([None, -1.0])))


class Counting:
    """A trainer that only counts, slower than a reply and faster than a straggler."""

    def __init__(self):
        self.batches = []

    async def step(self, batch):
        self.batches.append(batch)
        await asyncio.sleep(0.005)  # slower than a reply, faster than a straggler
        ref = WeightRef(version=Version("main", 0, batch.step), kind=WeightKind.LORA, path="/w", checksum="0")
        return StepReport(step=batch.step, weights=ref)


def config(max_staleness, *, steps=12, **guards):
    return TrainConfig(
        model=ModelConfig(name="none"),
        streams=[
            StreamConfig(
                name="toy",
                id="tests.helpers.toy_env:Toy-v0",
                kwargs={"turns": 3, "fail_every": 9},
                max_concurrent=6,
            )
        ],
        engine=EngineConfig(),
        judge={"_target_": "unused"},
        method=MethodConfig(),
        trainer=TrainerConfig(steps=steps, groups_per_step=2, group_size=3, max_staleness=max_staleness),
        guards=GuardConfig(**{"window": 10_000, "stall_s": 20.0, **guards}),
        eval=EvalConfig(tasks=0, heldout_tasks=0),
    )


def run_loops(settings, path, *, engine_failing=0.02, judge_failing=0.2, seed=0):
    """Trains to the end; what everybody saw."""

    async def main():
        rng = random.Random(seed)
        engine, trainer = Straggler(rng, engine_failing), Counting()
        pools = {s.name: HostPool(s) for s in settings.streams}
        figures = []
        async with Ledger.open(path, create=True) as ledger:
            recovery = await ledger.reconcile(0)
            loops = Orchestrator(
                settings,
                ledger=ledger,
                engine=engine,
                trainer=trainer,
                renderer=LetterRenderer(),
                judge=Moody(rng, judge_failing),
                pools=pools,
                first_step=1,
                on_step=lambda report, row: figures.append(row),
            )
            swapping = asyncio.create_task(loops.swapping.run())
            try:
                await asyncio.wait_for(loops.train(recovery), 60)
                await loops.swapping.wait_for(settings.trainer.steps)
                return engine, trainer, figures, await ledger.audit(), loops
            finally:
                swapping.cancel()
                for pool in pools.values():
                    await pool.close()

    return asyncio.run(main())


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_deadlock_and_no_token_older_than_allowed(tmp_path, max_staleness):
    _, trainer, figures, counts, _ = run_loops(config(max_staleness), tmp_path)
    ages = [
        batch.step - 1 - version.step
        for batch in trainer.batches
        for sample in batch.samples
        for version, trained in zip(sample.versions, sample.loss_mask, strict=True)
        if trained
    ]
    assert len(trainer.batches) == len(figures) == 12
    assert ages
    assert 0 <= max(ages) <= max_staleness
    trained = {span.turn_id for b in trainer.batches for s in b.samples for span in s.spans}
    assert counts.consumed == len(trained) == sum(len(s.spans) for b in trainer.batches for s in b.samples)


def test_asynchronous_training_really_uses_older_tokens(tmp_path):
    _, _, figures, _, _ = run_loops(config(1), tmp_path)
    assert max(row["token_age_max"] for row in figures) == 1.0


def test_weights_are_served_in_order_and_the_last_ones_at_the_end(tmp_path):
    engine, _, _, _, _ = run_loops(config(1), tmp_path)
    assert engine.loaded == sorted(engine.loaded)
    assert engine.loaded[-1] == 12


def test_slots_bound_what_is_under_way(tmp_path):
    _, _, figures, _, _ = run_loops(config(1), tmp_path)
    assert max(row["queue_slots"] for row in figures) <= 4


def test_every_turn_that_left_the_engine_has_a_fate_or_is_still_open(tmp_path):
    _, _, _, counts, _ = run_loops(config(1), tmp_path)
    assert counts.total == counts.consumed + counts.dropped + counts.pending
    assert {str(r) for r in counts.dropped_by} >= {"infra_error", "cut"}


def test_turns_without_a_verdict_never_reach_a_batch(tmp_path):
    settings = config(1, judge_failed_share=1.0)
    _, trainer, _, _, _ = run_loops(settings, tmp_path, judge_failing=1.0)
    assert len(trainer.batches) == 12
    assert not any(batch.samples for batch in trainer.batches)


def test_a_judge_that_is_down_too_often_halts_training(tmp_path):
    with pytest.raises(BaseExceptionGroup) as caught:
        run_loops(config(1, window=8, judge_failed_share=0.5), tmp_path, judge_failing=1.0)
    error = first_error(caught.value)
    assert isinstance(error, GuardError)
    assert "without a verdict" in str(error)


def test_an_engine_that_is_gone_halts_training(tmp_path):
    with pytest.raises(BaseExceptionGroup) as caught:
        run_loops(config(1, engine_failures=4), tmp_path, engine_failing=1.0)
    assert "the engine failed 5 episodes in a row" in str(first_error(caught.value))


def test_a_crash_in_one_loop_stops_them_all_with_its_own_error(tmp_path):
    class Broken(Counting):
        async def step(self, batch):
            raise ZeroDivisionError("a bug")

    settings = config(0)
    original = Counting.step
    Counting.step = Broken.step
    try:
        with pytest.raises(BaseExceptionGroup) as caught:
            run_loops(settings, tmp_path)
    finally:
        Counting.step = original
    assert isinstance(first_error(caught.value), ZeroDivisionError)


def test_a_resume_behind_many_lost_steps_goes_on(tmp_path):
    """More complete groups come back than there are slots; those of lost weights are dropped, the rest trains."""
    settings = config(0, steps=6)
    run_loops(settings, tmp_path)

    async def main():
        trainer = Counting()
        pools = {s.name: HostPool(s) for s in settings.streams}
        async with Ledger.open(tmp_path, create=False) as ledger:
            recovery = await ledger.reconcile(0)
            assert len(recovery.complete) > settings.trainer.groups_per_step
            rng = random.Random(1)
            loops = Orchestrator(
                settings,
                ledger=ledger,
                engine=Straggler(rng, 0.0),
                trainer=trainer,
                renderer=LetterRenderer(),
                judge=Moody(rng, 0.0),
                pools=pools,
                first_step=1,
                on_step=lambda report, row: None,
            )
            swapping = asyncio.create_task(loops.swapping.run())
            try:
                async with asyncio.timeout(60):
                    await loops.train(recovery)
                return trainer, await ledger.audit()
            finally:
                swapping.cancel()
                for pool in pools.values():
                    await pool.close()

    trainer, counts = asyncio.run(main())
    assert [batch.step for batch in trainer.batches] == [1, 2, 3, 4, 5, 6]
    assert counts.dropped_by["stale"] > 0
