"""Builds the parts, wires the channels, runs the loops. This is the claw-train process: asyncio, no torch.

     gym envs <--act-- hosting ----/generate (ids)----> engine server      trainer ranks
         +--NextState--> |  | turns (next state known)       ^  load          ^      |
                         |  +--------> judging               |  weights    Batch  WeightRef
                         | trajectory     | scored           |               |      |
                         +--------> assembling --batches--> stepping --------+      |
                              ^                              swapping <--- weights --+
                              +--------- slots given back ------+

    channel   carries               bound                          when full          filled by   emptied by
    slots     Lease, one a group    (max_staleness + 1) x groups   hosting waits      swapping    hosting
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
import contextlib
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from claw_train.assembling.batching import Assembled
from claw_train.assembling.guards import FailureGuards
from claw_train.assembling.loop import Assembling
from claw_train.channels import WeightsChannel
from claw_train.children import cores
from claw_train.config import TrainConfig, to_config
from claw_train.errors import ClawTrainError, ConfigError, StoppedError, first_error
from claw_train.hosting.episode import derive_seed
from claw_train.hosting.evaluate import Evaluation, Evaluator
from claw_train.hosting.loop import Hosting, TrainSink, new_groups
from claw_train.hosting.pool import HostPool
from claw_train.judging.loop import JudgingLoop
from claw_train.ledger import CompleteGroup, Ledger, Recovery
from claw_train.ledger.records import RecordWriter
from claw_train.log import setup_logging
from claw_train.metrics import MetricsLog
from claw_train.preflight import Preflight
from claw_train.progress import Progress, StepView, open_progress
from claw_train.report import Report
from claw_train.run_folder import RunFolder
from claw_train.serving.client import EngineClient
from claw_train.serving.server import EngineServer
from claw_train.slots import SlotBudget
from claw_train.stepping import Stepping, Swapping
from claw_train.training.folders import latest_checkpoint
from claw_train.training.remote import RemoteTrainer
from claw_train.types import Sampling, ScoredTurn, StepReport, Trajectory, Turn, Version

logger = logging.getLogger(__name__)

POLICY = "main"
_JUDGE_CONCURRENCY = 8
_JUDGE_TIMEOUT_S = 60.0
_RECORDS_EVERY_S = 2.0


class Run:
    """One run from its first child process to its summary."""

    def __init__(
        self, config: TrainConfig, folder: RunFolder, ledger: Ledger, preflight: Preflight, progress: Progress
    ) -> None:
        self._config = config
        self._folder = folder
        self._ledger = ledger
        self._preflight = preflight
        self._progress = progress
        self._report = Report(folder, config)
        self._heldout: float | None = None
        self._began = time.monotonic()
        self.begun = False
        """True once all children are up."""
        self._base = Version(POLICY, 0, 0)

    async def execute(self) -> None:
        """Starts the children, trains, evaluates, reports; leaves nothing running however it ends."""
        config = self._config
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._ledger)
            checkpoint = latest_checkpoint(self._folder.path)
            self._first = checkpoint.step + 1 if checkpoint else 1
            recovery = await self._ledger.reconcile(self._first - 1)
            self._progress.phase(f"starting engine and trainer; run folder {self._folder.path}")
            threads = cores() if config.trainer.max_staleness == 0 else max(1, cores() // 2)
            self._trainer = RemoteTrainer(self._preflight.trainer_spec(self._folder.path), threads=threads)
            stack.push_async_callback(self._trainer.aclose)
            self._server = EngineServer(self._preflight.engine_launch(self._base, self._folder.logs, threads))
            _, started = await asyncio.gather(
                stack.enter_async_context(self._server), self._trainer.start(checkpoint.path if checkpoint else None)
            )
            self._engine = EngineClient(self._server.url, self._server.key, config.engine, base=self._base)
            stack.push_async_callback(self._engine.aclose)
            self._pools = {s.name: HostPool(s) for s in config.streams}
            for pool in self._pools.values():
                stack.push_async_callback(pool.close)
            self._folder.write_manifest({**self._preflight.facts(), "first_step": self._first})
            self._wire()
            self.begun = True
            if started.weights is not None:  # before any episode begins, or its first tokens would be too old
                await self._swapping.serve(started.weights)
            await self._work(recovery)

    def _wire(self) -> None:
        """Makes the channels and the loops between them."""
        config, trainer = self._config, self._config.trainer
        sampling = Sampling(temperature=config.sampling.temperature, max_new_tokens=config.sampling.max_new_tokens)
        self._slots = SlotBudget((trainer.max_staleness + 1) * trainer.groups_per_step)
        self._turns: asyncio.Queue[Turn] = asyncio.Queue(2 * _JUDGE_CONCURRENCY)
        self._scored: asyncio.Queue[ScoredTurn | Trajectory] = asyncio.Queue(trainer.groups_per_step)
        self._batches: asyncio.Queue[Assembled] = asyncio.Queue(1)
        self._weights = WeightsChannel()
        self._assembling = Assembling(
            ledger=self._ledger,
            slots=self._slots,
            batches=self._batches,
            trainer=trainer,
            method=config.method,
            guards=FailureGuards(config.guards),
            next_step=self._first,
            shuffle_seed=derive_seed(config.seed, "shuffle") if config.reward == "shuffled" else None,
            on_group_end=self._forget_group,
        )
        self._sink = TrainSink(self._ledger, self._turns, self._scored)
        self._judging = JudgingLoop(
            self._preflight.judge,
            self._turns,
            self._judged,
            concurrency=_JUDGE_CONCURRENCY,
            timeout_s=_JUDGE_TIMEOUT_S,
        )
        common: dict[str, Any] = {
            "pools": self._pools,
            "engine": self._engine,
            "renderer": self._preflight.renderer,
            "ledger": self._ledger,
            "sampling": sampling,
            "seed": config.seed,
            "policy": POLICY,
        }
        self._hosting = Hosting(slots=self._slots, sink=self._sink, on_group_start=self._assembling.expect, **common)
        self._evaluator = Evaluator(streams=config.streams, incarnation=self._first, **common)
        self._swapping = Swapping(weights=self._weights, engine=self._engine, slots=self._slots)
        self._stepping = Stepping(
            batches=self._batches,
            weights=self._weights,
            trainer=self._trainer,
            ledger=self._ledger,
            max_staleness=trainer.max_staleness,
            on_step=self._on_step,
        )
        self._metrics = MetricsLog(self._folder.metrics, self._folder.tensorboard, from_step=self._first - 1)

    async def _judged(self, scored: ScoredTurn) -> None:
        await self._ledger.judge(scored)
        await self._scored.put(scored)

    def _forget_group(self, group: CompleteGroup) -> None:
        for trajectory in group.trajectories:
            self._judging.forget(trajectory.id)

    async def _work(self, recovery: Recovery) -> None:
        """Evaluates, trains, evaluates again; the loops live as long as the training does."""
        async with asyncio.TaskGroup() as service:
            watching = service.create_task(self._server.watch())
            swapping = service.create_task(self._swapping.run())
            memory = service.create_task(self._report.watch_memory())
            records = service.create_task(self._keep_records())
            before = await self._evaluate("before", self._base)
            again = await self._evaluate("base-again", self._base)
            if self._first <= self._config.trainer.steps:
                self._progress.phase(f"training, {self._config.trainer.steps} steps")
                await self._train(recovery)
            newest = await self._swapping.wait_for(self._config.trainer.steps) if self._config.trainer.steps else None
            after = await self._evaluate("after", newest.version if newest else self._base)
            for task in (watching, swapping, memory, records):
                task.cancel()
        counts = await self._ledger.audit()
        self._metrics.close()
        self._report.finish(
            before=before,
            after=after,
            again=again,
            counts=counts,
            swaps=self._swapping.seconds,
            history=self._metrics.history,
        )
        self._progress.phase("done")
        for line in self._report.lines():
            self._progress.note(line)

    async def _train(self, recovery: Recovery) -> None:
        trainer = self._config.trainer
        self._training_since = time.monotonic()
        for group in recovery.complete:
            await self._slots.take(group.record.id)
            await self._assembling.settle(group, recovered=True)
        fresh = new_groups(
            self._config.streams, seed=self._config.seed, size=trainer.group_size, first=recovery.next_group_index
        )
        async with asyncio.TaskGroup() as loops:
            endless = (
                loops.create_task(self._hosting.run(reissue=recovery.reissue, fresh=fresh)),
                loops.create_task(self._judging.run()),
                loops.create_task(self._assembling.run(self._scored)),
                loops.create_task(self._evaluate_between()),
            )
            await self._stepping.run(first=self._first, last=trainer.steps)
            for task in endless:
                task.cancel()
        self._report.training_s = time.monotonic() - self._training_since

    async def _keep_records(self) -> None:
        """Writes the readable records behind the ledger until cancelled."""
        writer = await asyncio.to_thread(RecordWriter, self._folder.path, self._preflight.renderer.decode)
        try:
            while True:
                await asyncio.to_thread(writer.catch_up)
                await asyncio.sleep(_RECORDS_EVERY_S)
        finally:
            writer.catch_up()
            writer.close()

    async def _evaluate_between(self) -> None:
        """Quick held-out scores while training goes on, every `eval.every_steps` steps."""
        every = self._config.eval.every_steps
        if not every or not self._config.eval.quick_tasks:
            await asyncio.Event().wait()
        due = (self._first - 1) // every * every + every
        while True:
            newest = await self._swapping.wait_for(due)
            with self._engine.holding(newest.version):
                scores = await self._evaluator.score(
                    split="eval", num_tasks=self._config.eval.quick_tasks, version=newest.version, label=f"step{due}"
                )
            self._heldout = scores.mean
            self._metrics.write(
                newest.version.step, {"heldout": scores.mean, "heldout_parse_share": scores.parse_share}
            )
            due = max(due, newest.version.step // every * every) + every

    async def _evaluate(self, label: str, version: Version) -> Evaluation:
        """Held-out tasks and held-out families, or what an earlier process of this run already measured."""
        done = self._report.stored(label)
        if done is not None:
            return done
        self._progress.phase(f"held-out evaluation: {label}")
        sizes = {"eval": self._config.eval.tasks, "heldout": self._config.eval.heldout_tasks}
        scores = {
            split: await self._evaluator.score(split=split, num_tasks=n, version=version, label=label)
            for split, n in sizes.items()
        }
        evaluation = Evaluation(label=label, tasks=scores["eval"], families=scores["heldout"])
        self._report.store(evaluation)
        self._heldout = evaluation.tasks.mean
        if label != "base-again":
            self._metrics.write(
                version.step, {"heldout": evaluation.tasks.mean, "heldout_families": evaluation.families.mean}
            )
        return evaluation

    def _on_step(self, assembled: Assembled, report: StepReport, figures: Mapping[str, float]) -> None:
        del assembled
        queues = {
            "turns": self._turns.qsize(),
            "scored": self._scored.qsize(),
            "ready": self._assembling.num_ready,
            "slots": self._slots.in_use,
        }
        elapsed = time.monotonic() - self._began
        trained = time.monotonic() - self._training_since
        done, steps = report.step - self._first + 1, self._config.trainer.steps
        tokens_per_s = self._sink.num_tokens / trained
        drops = {f"drop_{reason}": float(n) for reason, n in self._assembling.drops.items()}
        depths = {f"queue_{name}": float(n) for name, n in queues.items()}
        self._metrics.write(report.step, {**figures, **depths, **drops, "tokens_per_s": tokens_per_s})
        self._progress.step(
            StepView(
                step=report.step,
                steps=steps,
                reward=figures["reward"],
                heldout=self._heldout,
                tokens_per_s=tokens_per_s,
                staleness=figures["staleness_mean"],
                queues=queues,
                elapsed_s=elapsed,
                left_s=trained / done * (steps - report.step),
            )
        )


def launch(raw: Mapping[str, Any], overrides: Sequence[str]) -> int:
    """Runs what a composed configuration describes, new or resumed; returns the exit code.

    Raises:
        ClawTrainError: named in `errors`; those at start left nothing running and nothing half-written.
    """
    resume = raw.get("resume")
    if resume is not None:
        folder, config = RunFolder.reopen(Path(str(resume)), _resume_overrides(overrides))
    else:
        config = to_config(raw)
        folder = None
    preflight = Preflight.check(config)
    folder = folder or RunFolder.create(config)
    setup_logging(file=folder.logs / "claw-train.log")
    ledger = Ledger.open(folder.path, create=resume is None)
    progress = open_progress()
    try:
        asyncio.run(_main(config, folder, ledger, preflight, progress))
    finally:
        progress.close()
    return 0


def _resume_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """What may change on resume: how long, and how it is watched; never what is learned from what."""
    from omegaconf import OmegaConf

    free = ("trainer.steps=", "eval.", "engine.", "guards.")
    kept = [text for text in overrides if not text.startswith("resume=")]
    for text in kept:
        if not text.startswith(free):
            raise ConfigError(
                f"{text}: a resumed run keeps its configuration but for trainer.steps, eval, engine and guards"
            )
    container = OmegaConf.to_container(OmegaConf.from_dotlist(kept))
    return {str(k): v for k, v in container.items()} if isinstance(container, dict) else {}


async def _main(
    config: TrainConfig, folder: RunFolder, ledger: Ledger, preflight: Preflight, progress: Progress
) -> None:
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    run = Run(config, folder, ledger, preflight, progress)
    try:
        await run.execute()
    except (ClawTrainError, BaseExceptionGroup) as error:
        cause = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        if run.begun and isinstance(cause, ClawTrainError):
            logger.error("stopped: %s: %s", type(cause).__name__, cause)
            raise StoppedError(f"{type(cause).__name__}: {cause}; go on with resume={folder.path}") from error
        raise cause from error
