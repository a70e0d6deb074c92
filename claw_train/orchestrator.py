"""Builds the parts, wires the channels, runs the loops. This is the claw-train process: asyncio, no torch.

     gym envs <--act-- hosting ----/generate (ids)----> engine server      trainer ranks
         +--NextState--> |  | turns (next state known)       ^  load          ^      |
                         |  +--------> judging               |  weights    Batch  WeightRef
                         | trajectory     | scored           |               |      |
                         +--------> assembling --batches--> stepping --------+      |
                              ^                              swapping <--- weights --+
                              +--------- slots given back ------+

    channel   carries               bound                          when full          filled by   emptied by
    slots     Lease, one a group    (max_staleness + 1) x groups   hosting waits      swapping,   hosting
                                                                                      drops
    requests  GenerateRequest       engine.concurrency             hosting waits      hosting     engine
    turns     Turn                  2 x judge concurrency          hosting waits      hosting     judging
    scored    ScoredTurn,           groups a step                  sender waits       judging,    assembling
              Trajectory                                                              hosting
    batches   Assembled             1                              assembling waits   assembling  stepping
    weights   WeightRef             1, newest wins                 nobody waits       stepping    swapping

Every arrow that carries data is committed to the ledger first: a channel is a cache of it. Stepping is the only finite
loop; its end cancels the others, and the end of any other loop is an error that stops them all.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from claw_train.assembling.batching import Assembled
from claw_train.assembling.guards import FailureGuards
from claw_train.assembling.loop import Assembling
from claw_train.channels import WeightsChannel
from claw_train.config import TrainConfig
from claw_train.hosting.episode import derive_seed
from claw_train.hosting.evaluate import Evaluator
from claw_train.hosting.loop import Hosting, TrainSink, new_groups
from claw_train.hosting.pool import HostPool
from claw_train.judging.loop import JudgingLoop
from claw_train.ledger import CompleteGroup, Ledger, Recovery
from claw_train.protocols import Engine, Judge, Renderer, Trainer
from claw_train.slots import SlotBudget
from claw_train.stepping import Stepping, Swapping
from claw_train.types import Sampling, ScoredTurn, StepReport, Trajectory, Turn

POLICY = "main"
_JUDGE_CONCURRENCY = 8
_JUDGE_TIMEOUT_S = 60.0


class Orchestrator:
    """The loops of one run and the channels between them."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        ledger: Ledger,
        engine: Engine,
        trainer: Trainer,
        renderer: Renderer,
        judge: Judge,
        pools: Mapping[str, HostPool],
        first_step: int,
        on_step: Callable[[StepReport, Mapping[str, float]], None],
    ) -> None:
        """Wires the parts; nothing runs yet.

        `on_step` hears of every step after its weights were published.
        """
        self._config = config
        self._ledger = ledger
        self._first = first_step
        self._on_step = on_step
        settings = config.trainer
        self._slots = SlotBudget((settings.max_staleness + 1) * settings.groups_per_step)
        self._turns: asyncio.Queue[Turn] = asyncio.Queue(2 * _JUDGE_CONCURRENCY)
        self._scored: asyncio.Queue[ScoredTurn | Trajectory] = asyncio.Queue(settings.groups_per_step)
        self._batches: asyncio.Queue[Assembled] = asyncio.Queue(1)
        self._weights = WeightsChannel()
        self._sink = TrainSink(ledger, self._turns, self._scored)
        self._assembling = Assembling(
            ledger=ledger,
            slots=self._slots,
            batches=self._batches,
            trainer=settings,
            method=config.method,
            guards=FailureGuards(config.guards),
            next_step=first_step,
            shuffle_seed=derive_seed(config.seed, "shuffle") if config.reward == "shuffled" else None,
            on_group_end=self._forget_group,
        )
        self._judging = JudgingLoop(
            judge, self._turns, self._judged, concurrency=_JUDGE_CONCURRENCY, timeout_s=_JUDGE_TIMEOUT_S
        )
        playing: dict[str, Any] = {
            "pools": pools,
            "engine": engine,
            "renderer": renderer,
            "ledger": ledger,
            "sampling": Sampling(
                temperature=config.sampling.temperature, max_new_tokens=config.sampling.max_new_tokens
            ),
            "context": min(config.model.context, config.engine.max_total_tokens),
            "seed": config.seed,
            "policy": POLICY,
        }
        self._hosting = Hosting(slots=self._slots, sink=self._sink, on_group_start=self._assembling.expect, **playing)
        self.evaluator = Evaluator(streams=config.streams, incarnation=ledger.incarnation, **playing)
        self.swapping = Swapping(weights=self._weights, engine=engine, slots=self._slots)
        self._stepping = Stepping(
            batches=self._batches,
            weights=self._weights,
            trainer=trainer,
            ledger=ledger,
            max_staleness=settings.max_staleness,
            stall_s=config.guards.stall_s,
            waiting_for=lambda: self._assembling.waiting,
            on_step=self._stepped,
        )
        self._since = time.monotonic()

    async def train(self, recovery: Recovery) -> None:
        """Runs the loops until the last step is taken. `swapping.run` must be running beside it.

        Raises:
            ExceptionGroup: what any of the loops raised; the others were cancelled.
        """
        config = self._config
        self._since = time.monotonic()
        for group in recovery.complete:
            self._slots.hold(group.record.id)
            await self._assembling.settle(group, recovered=True)
        fresh = new_groups(
            config.streams, seed=config.seed, size=config.trainer.group_size, first=recovery.next_group_index
        )
        async with asyncio.TaskGroup() as loops:
            endless = (
                loops.create_task(self._hosting.run(reissue=recovery.reissue, fresh=fresh)),
                loops.create_task(self._judging.run()),
                loops.create_task(self._assembling.run(self._scored)),
            )
            await self._stepping.run(first=self._first, last=config.trainer.steps)
            for task in endless:
                task.cancel()

    @property
    def queues(self) -> dict[str, int]:
        """Depth of each channel."""
        return {
            "turns": self._turns.qsize(),
            "scored": self._scored.qsize(),
            "ready": self._assembling.num_ready,
            "slots": self._slots.in_use,
        }

    async def _judged(self, scored: ScoredTurn) -> None:
        await self._ledger.judge(scored)
        await self._scored.put(scored)

    def _forget_group(self, group: CompleteGroup) -> None:
        for trajectory in group.trajectories:
            self._judging.forget(trajectory.id)

    def _stepped(self, report: StepReport, figures: Mapping[str, float]) -> None:
        """Adds what only the loops know."""
        depths = {f"queue_{name}": float(n) for name, n in self.queues.items()}
        drops = {f"drop_{reason}": float(n) for reason, n in self._assembling.drops.items()}
        episodes = {"out_of_context": float(self._hosting.out_of_context)}
        tokens_per_s = self._sink.num_tokens / (time.monotonic() - self._since)
        self._on_step(report, {**figures, **depths, **drops, **episodes, "tokens_per_s": tokens_per_s})
