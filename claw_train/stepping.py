"""The stepping loop: batches in, optimizer steps, published weights out; and the swap that serves them.

    lease(k) committed -> optimizer step -> checkpoint renamed -> consumed(k) committed -> published -> engine swaps
    -> slots released

The only finite loop: its last step ends training. Every figure it makes is an output.
"""

import asyncio
import logging
import statistics
import time
from collections.abc import Callable, Mapping

from claw_train.assembling.batching import Assembled
from claw_train.channels import WeightsChannel
from claw_train.errors import GuardError
from claw_train.ledger import Ledger
from claw_train.protocols import Engine, Trainer
from claw_train.slots import SlotBudget
from claw_train.types import Batch, StepReport, WeightRef

logger = logging.getLogger(__name__)


def batch_ages(batch: Batch) -> list[int]:
    """Age in versions of every trained token, against the weights the step starts from."""
    return [
        batch.step - 1 - version.step
        for sample in batch.samples
        for version, trained in zip(sample.versions, sample.loss_mask, strict=True)
        if trained and version is not None
    ]


class Stepping:
    """Drives the trainer from a channel of batches."""

    def __init__(
        self,
        *,
        batches: "asyncio.Queue[Assembled]",
        weights: WeightsChannel,
        trainer: Trainer,
        ledger: Ledger,
        max_staleness: int,
        stall_s: float,
        waiting_for: Callable[[], Mapping[str, str]],
        on_step: Callable[[StepReport, Mapping[str, float]], None],
    ) -> None:
        self._batches = batches
        self._weights = weights
        self._trainer = trainer
        self._ledger = ledger
        self._max_staleness = max_staleness
        self._stall_s = stall_s
        self._waiting_for = waiting_for
        self._on_step = on_step

    async def run(self, *, first: int, last: int) -> None:
        """Steps `first` to `last`.

        Raises:
            GuardError: no batch came in time, a trained token is too old (a broken promise of assembly), or the
                trainer's own guards.
            TrainerError: the ranks failed.
        """
        for step in range(first, last + 1):
            waited = time.monotonic()
            assembled = await self._next_batch(step)
            started = time.monotonic()
            assert assembled.batch.step == step, (assembled.batch.step, step)
            ages = batch_ages(assembled.batch)
            if ages and max(ages) > self._max_staleness:
                raise GuardError(f"step {step}: a token of age {max(ages)} passed max_staleness={self._max_staleness}")
            report = await self._trainer.step(assembled.batch)
            figures = {
                **report.metrics,
                "reward": (assembled.mean_outcome + 1) / 2,
                "batch_tokens": float(assembled.batch.num_loss_tokens),
                "samples": float(len(assembled.batch.samples)),
                "token_age_mean": statistics.fmean(ages) if ages else 0.0,
                "token_age_max": float(max(ages, default=0)),
                "wait_s": started - waited,
                "round_trip_s": time.monotonic() - started,
            }
            await self._ledger.consume(step, report.checkpoint or "", metrics=figures)
            self._weights.put(report.weights, assembled.group_ids)
            self._on_step(report, figures)

    async def _next_batch(self, step: int) -> Assembled:
        """Waits for the batch, but not for ever."""
        try:
            async with asyncio.timeout(self._stall_s):
                return await self._batches.get()
        except TimeoutError:
            missing = "; ".join(f"{group}: {what}" for group, what in self._waiting_for().items()) or "no open group"
            raise GuardError(
                f"no batch for step {step} in {self._stall_s:.0f} s (guards.stall_s); waiting for {missing}"
            ) from None


class Swapping:
    """Serves the newest weights and gives slots back."""

    def __init__(self, *, weights: WeightsChannel, engine: Engine, slots: SlotBudget) -> None:
        self._weights = weights
        self._engine = engine
        self._slots = slots
        self._served = asyncio.Condition()
        self.newest: WeightRef | None = None
        """Weights served last; None while the base is served."""
        self.seconds: list[float] = []
        """Duration of each swap as the client saw it."""

    async def run(self) -> None:
        """Swaps until cancelled."""
        while True:
            ref, groups = await self._weights.get()
            await self.serve(ref)
            for group_id in groups:
                self._slots.release(group_id, "trained")

    async def serve(self, ref: WeightRef) -> None:
        """Makes the engine serve `ref`; returns when it does."""
        started = time.monotonic()
        await self._engine.load_weights(ref)
        self.seconds.append(time.monotonic() - started)
        async with self._served:
            self.newest = ref
            self._served.notify_all()

    async def wait_for(self, step: int) -> WeightRef:
        """Waits until weights of `step` or newer are served."""
        async with self._served:
            await self._served.wait_for(lambda: self.newest is not None and self.newest.version.step >= step)
        assert self.newest is not None
        return self.newest
