"""One run from the command line to its summary: children, evaluations, report, and what an error becomes.

In: a composed configuration. Out: a run folder and an exit code. The learning itself is `orchestrator`; this starts
what it needs, measures before and after it, and leaves nothing running however it ends.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from claw_train.children import cores
from claw_train.config import TrainConfig, to_config
from claw_train.errors import ClawTrainError, ConfigError, DiskError, EngineError, StoppedError, first_error
from claw_train.hosting.evaluate import Evaluation
from claw_train.hosting.pool import HostPool
from claw_train.ledger import Ledger, Recovery
from claw_train.ledger.records import RecordWriter
from claw_train.log import setup_logging
from claw_train.metrics import MetricsLog
from claw_train.orchestrator import POLICY, Orchestrator
from claw_train.preflight import Preflight
from claw_train.progress import Progress, StepView, open_progress
from claw_train.report import Report
from claw_train.run_folder import RunFolder, disk_errors
from claw_train.serving.client import EngineClient
from claw_train.serving.server import EngineServer
from claw_train.training.folders import latest_checkpoint
from claw_train.training.remote import RemoteTrainer
from claw_train.types import StepReport, Version, WeightKind

logger = logging.getLogger(__name__)

A = TypeVar("A")
B = TypeVar("B")

_RECORDS_EVERY_S = 2.0
_HEALTH_PAUSES_S = (0.5, 1.0)
"""Between the tries to find the engine at the start."""


async def follow(writer: RecordWriter, *, every_s: float) -> None:
    """Lets `writer` catch up on a thread every `every_s` seconds until cancelled, then once more, and closes it."""
    round_ = asyncio.ensure_future(asyncio.to_thread(writer.catch_up))
    try:
        while True:
            await asyncio.shield(round_)
            await asyncio.sleep(every_s)
            round_ = asyncio.ensure_future(asyncio.to_thread(writer.catch_up))
    finally:
        await asyncio.wait({round_})  # a thread cannot be cancelled, and the writer serves one at a time
        writer.catch_up()
        writer.close()


async def both(first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """The results of both; when one fails, the other is cancelled and has ended before the error is seen.

    Raises:
        ExceptionGroup: of what they raised.
    """
    async with asyncio.TaskGroup() as group:
        tasks = group.create_task(first), group.create_task(second)
    return tasks[0].result(), tasks[1].result()


async def check_engine(engine: EngineClient, config: TrainConfig) -> None:
    """Makes sure, before anything is played, that the engine answers and that its context is long enough.

    Raises:
        EngineError: it does not answer.
        ConfigError: a server that was given by URL holds fewer tokens than `model.context`.
    """
    where = config.engine.url or "the engine server"
    for pause_s in (*_HEALTH_PAUSES_S, None):  # a busy machine may miss a first short limit
        if await engine.health():
            break
        if pause_s is None:
            raise EngineError(f"{where} does not answer /health: check that it runs and that engine.url is right")
        await asyncio.sleep(pause_s)
    if config.engine.kind == "url":
        context = (await engine.server_info()).context
        if context is not None and context < config.model.context:
            raise ConfigError(
                f"model.context={config.model.context} is more than the {context} tokens of {where}: "
                "start it with a longer context or lower model.context"
            )


class Run:
    """One process's part of a run."""

    def __init__(
        self, config: TrainConfig, folder: RunFolder, ledger: Ledger, preflight: Preflight, progress: Progress
    ) -> None:
        self._config = config
        self._folder = folder
        self._ledger = ledger
        self._preflight = preflight
        self._progress = progress
        self._report = Report(folder, config)
        self._base = Version(POLICY, 0, 0)
        self._heldout: float | None = None
        self._began = self._training_since = time.monotonic()
        self.begun = False
        """True once all children are up."""

    async def execute(self) -> None:
        """Starts the children, trains, evaluates, reports."""
        config = self._config
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._ledger)
            checkpoint = latest_checkpoint(self._folder.path)
            self._first = checkpoint.step + 1 if checkpoint else 1
            recovery = await self._ledger.reconcile(self._first - 1)
            self._progress.phase(f"starting engine and trainer; run folder {self._folder.path}")
            threads = cores() if config.trainer.max_staleness == 0 else max(1, cores() // 2)
            trainer = RemoteTrainer(self._preflight.trainer_spec(self._folder.path), threads=threads)
            stack.push_async_callback(trainer.aclose)
            self._server = EngineServer(self._preflight.engine_launch(self._base, self._folder.logs, threads))
            self._engine, started = await both(
                self._start_engine(stack), trainer.start(checkpoint.path if checkpoint else None)
            )
            pools = {s.name: HostPool(s) for s in config.streams}
            for pool in pools.values():
                stack.push_async_callback(pool.close)
            self._folder.write_config(config)
            self._folder.write_manifest({**self._preflight.facts(), "first_step": self._first})
            self._metrics = MetricsLog(self._folder.metrics, self._folder.tensorboard, from_step=self._first - 1)
            stack.callback(self._metrics.close)
            if checkpoint and not self._metrics.knows(checkpoint.step):  # its step died before it could report
                self._metrics.write(checkpoint.step, checkpoint.metrics)
            self._loops = Orchestrator(
                config,
                ledger=self._ledger,
                engine=self._engine,
                trainer=trainer,
                renderer=self._preflight.renderer,
                judge=self._preflight.judge,
                pools=pools,
                first_step=self._first,
                on_step=self._on_step,
            )
            self.begun = True
            if started.weights is not None:  # before any episode begins, or its first tokens would be too old
                await self._loops.swapping.serve(started.weights)
            await self._work(recovery)

    async def _start_engine(self, stack: AsyncExitStack) -> EngineClient:
        """Starts the server and its client, which `stack` ends, and checks them."""
        await stack.enter_async_context(self._server)
        engine = EngineClient(self._server.url, self._server.key, self._config.engine, base=self._base)
        stack.push_async_callback(engine.aclose)
        await check_engine(engine, self._config)
        return engine

    async def _work(self, recovery: Recovery) -> None:
        """Evaluates, trains, evaluates again, beside the services that a run needs throughout."""
        steps = self._config.trainer.steps
        async with asyncio.TaskGroup() as group:
            services = [
                group.create_task(service)
                for service in (
                    self._server.watch(),
                    self._loops.swapping.run(),
                    self._report.watch_memory(),
                    self._keep_records(),
                    self._evaluate_between(),
                )
            ]
            before = await self._evaluate("before", self._base)
            again = await self._evaluate("base-again", self._base)
            if self._first <= steps:
                self._progress.phase(f"training, {steps} steps")
                self._training_since = time.monotonic()
                await self._loops.train(recovery)
                self._report.training_s = time.monotonic() - self._training_since
            newest = (await self._loops.swapping.wait_for(steps)).version if steps else self._base
            after = await self._evaluate("after", newest)
            for service in services:
                service.cancel()
        self._report.finish(
            before=before,
            after=after,
            again=again,
            counts=await self._ledger.audit(),
            swaps=self._loops.swapping.seconds,
            history=self._metrics.history,
        )
        self._progress.phase("done")
        for line in self._report.lines():
            self._progress.note(line)

    async def _keep_records(self) -> None:
        """Writes the readable records behind the ledger until cancelled."""
        writer = await asyncio.to_thread(RecordWriter, self._folder.path, self._preflight.renderer.decode)
        await follow(writer, every_s=_RECORDS_EVERY_S)

    async def _evaluate(self, label: str, version: Version) -> Evaluation:
        """Held-out tasks and held-out families, or what an earlier process measured with the same weights."""
        done = self._report.stored(label, version)
        if done is not None:
            self._heldout = done.tasks.mean
            return done
        self._progress.phase(f"held-out evaluation: {label}")
        sizes = {"eval": self._config.eval.tasks, "heldout": self._config.eval.heldout_tasks}
        scores = {
            split: await self._loops.evaluator.score(split=split, num_tasks=n, version=version, label=label)
            for split, n in sizes.items()
        }
        evaluation = Evaluation(label=label, tasks=scores["eval"], families=scores["heldout"])
        self._report.store(evaluation)
        if label != "base-again":
            self._heldout = evaluation.tasks.mean
            figures = {"heldout": evaluation.tasks.mean, "heldout_families": evaluation.families.mean}
            self._metrics.write(version.step, _measured(figures))
        return evaluation

    async def _evaluate_between(self) -> None:
        """Quick held-out scores while training goes on, every `eval.every_steps` steps."""
        settings = self._config.eval
        if not settings.every_steps or not settings.quick_tasks:
            return
        due = (self._first - 1) // settings.every_steps * settings.every_steps + settings.every_steps
        while due < self._config.trainer.steps:
            newest = await self._loops.swapping.wait_for(due)
            # full weights replace one another on the server: only adapters can be kept for the whole evaluation
            version = newest.version if newest.kind is WeightKind.LORA else None
            with self._engine.holding(version) if version else contextlib.nullcontext():
                scores = await self._loops.evaluator.score(
                    split="eval", num_tasks=settings.quick_tasks, version=version, label=f"step{due}"
                )
            self._heldout = scores.mean
            step = newest.version.step
            figures = {"heldout": scores.mean, "heldout_parse_share": scores.parse_share}
            self._metrics.write(step, _measured(figures))
            due = max(due, step // settings.every_steps * settings.every_steps) + settings.every_steps

    def _on_step(self, report: StepReport, figures: Mapping[str, float]) -> None:
        self._metrics.write(report.step, figures)
        now, steps = time.monotonic(), self._config.trainer.steps
        per_step = (now - self._training_since) / (report.step - self._first + 1)
        self._progress.step(
            StepView(
                step=report.step,
                steps=steps,
                reward=figures["reward"],
                heldout=self._heldout,
                tokens_per_s=figures["tokens_per_s"],
                staleness=figures["token_age_mean"],
                queues=self._loops.queues,
                elapsed_s=now - self._began,
                left_s=per_step * (steps - report.step),
            )
        )


def _measured(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if value is not None}


def launch(raw: Mapping[str, Any], overrides: Sequence[str]) -> int:
    """Runs what a composed configuration describes, new or resumed; returns the exit code.

    Raises:
        ClawTrainError: named in `errors`; those at start left nothing running and nothing half-written.
        KeyboardInterrupt: the run was interrupted or terminated; says what is left of it, and its folder is whole.
    """
    resume = raw.get("resume")
    if resume is not None:
        folder, config = RunFolder.reopen(Path(str(resume)), _resume_overrides(overrides))
        preflight = Preflight.check(config)
    else:
        config = to_config(raw)
        preflight = Preflight.check(config)
        folder = RunFolder.create(config)
    logging.raiseExceptions = False  # a line that finds no room on the disk must not become a traceback
    try:
        with disk_errors(folder.logs):
            folder.logs.mkdir(mode=0o700, exist_ok=True)
            setup_logging(file=folder.logs / "claw-train.log")
        ledger = Ledger.open(folder.path, create=resume is None)
    except DiskError:
        if resume is None:
            folder.abandon()
        raise
    progress = open_progress()
    run = Run(config, folder, ledger, preflight, progress)
    try:
        asyncio.run(_supervised(run))
    except (KeyboardInterrupt, asyncio.CancelledError):  # the latter is SIGTERM
        kept = run.begun or resume is not None
        raise KeyboardInterrupt(
            f"interrupted; the run folder is whole: continue with resume={folder.path}"
            if kept
            else "interrupted before the run began: nothing of it is kept but its logs"
        ) from None
    except (ClawTrainError, BaseExceptionGroup) as error:
        cause = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(cause, ClawTrainError):
            raise
        logger.error("stopped: %s: %s", type(cause).__name__, cause)
        if not run.begun:
            raise cause from error
        raise StoppedError(f"{type(cause).__name__}: {cause}; go on with resume={folder.path}") from error
    finally:
        progress.close()
        if not run.begun and resume is None:
            folder.abandon()
    return 0


async def _supervised(run: Run) -> None:
    """The run, ended by SIGTERM as by an interrupt."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await run.execute()


def _resume_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """What may change on resume: how long, and how it is watched; never what is learned from what.

    `RunFolder.reopen` refuses what of these has to stay.
    """
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
