"""The ranks as processes: one handle, real workers, real deaths."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import pytest

from claw_train.errors import ChildError, ConfigError, GuardError, ModelError, TrainerError
from claw_train.training.folders import latest_checkpoint, list_checkpoints
from claw_train.training.ranks import Ranks
from claw_train.training.remote import RemoteTrainer
from claw_train.training.spec import TrainerSpec
from claw_train.training.trainer import Trainer
from claw_train.types import Version


@contextlib.asynccontextmanager
async def running(spec: TrainerSpec) -> AsyncIterator[RemoteTrainer]:
    trainer = RemoteTrainer(spec, threads=1)
    try:
        yield trainer
    finally:
        await trainer.aclose()


def pids(trainer: RemoteTrainer) -> list[int]:
    return [rank.child.pid for rank in trainer._ranks]


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 240))


def test_a_worker_gives_what_the_rank_itself_gives(qwen3, samples, batch_of, spec_of, tmp_path):
    local = Trainer(spec_of(qwen3, run_dir=tmp_path / "local"), Ranks())
    local.start(None, 0)
    want = local.step(batch_of(samples))

    async def main() -> None:
        async with running(spec_of(qwen3, mismatch_max_abs=20.0)) as trainer:
            begun = await trainer.start()
            assert begun.version == Version("main", 0, 0)
            assert begun.weights is None
            (pid,) = pids(trainer)
            key = trainer._ranks[0]._key.hex().encode()
            assert key not in Path(f"/proc/{pid}/cmdline").read_bytes()

            # a guard's halt leaves the rank as it was
            place = samples[0].loss_mask.index(True)
            far = tuple(b - 40.0 * (i == place) for i, b in enumerate(samples[0].behaviour_logprobs))
            with pytest.raises(GuardError, match="mismatch_max_abs"):
                await trainer.step(batch_of([dataclasses.replace(samples[0], behaviour_logprobs=far)]))

            got = await trainer.step(batch_of(samples))
            assert got.metrics["loss"] == want.metrics["loss"]
            assert got.weights.checksum == want.weights.checksum
            assert got.checkpoint is not None
            assert latest_checkpoint(tmp_path / "run") is not None
            await trainer.aclose()
            assert gone(pid)

    run(main)


def test_two_ranks_equal_one(qwen3, samples, batch_of, spec_of, tmp_path):
    keys = {"tokens_per_micro_batch": 14, "lr": 1e-3}
    # the third has fewer samples than ranks: one of them only takes part in the exchange
    batches = [batch_of(samples, 1), batch_of(samples, 2), batch_of(samples[:1], 3)]
    local = Trainer(spec_of(qwen3, run_dir=tmp_path / "local", **keys), Ranks())
    local.start(None, 0)
    want = [local.step(batch).metrics for batch in batches]
    found = []

    async def main() -> None:
        async with running(spec_of(qwen3, num_ranks=2, **keys)) as trainer:
            await trainer.start()
            for batch in batches:
                found.append((await trainer.step(batch)).metrics)

    run(main)
    for one, two in zip(want, found, strict=True):
        for name in (
            "loss",
            "policy_loss",
            "kl",
            "entropy",
            "grad_norm",
            "ratio_mean",
            "loss_tokens",
            "computed_tokens",
        ):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def test_a_dead_rank_is_named_and_a_restart_goes_on(qwen3, samples, batch_of, spec_of, tmp_path):
    async def main() -> None:
        async with running(spec_of(qwen3)) as trainer:
            await trainer.start()
            await trainer.step(batch_of(samples))
            os.kill(pids(trainer)[0], signal.SIGKILL)
            with pytest.raises(ChildError, match=r"trainer rank 0 died \(status -9\).*log: .*trainer-0\.log"):
                await trainer.step(batch_of(samples, 2))
            with pytest.raises(TrainerError, match="not running"):
                await trainer.step(batch_of(samples, 2))
            latest = latest_checkpoint(tmp_path / "run")
            assert latest is not None
            begun = await trainer.start(latest.path)
            assert begun.version == Version("main", 1, 1)
            assert (await trainer.step(batch_of(samples, 2))).weights.version == Version("main", 1, 2)
            # and back, without a restart
            assert (await trainer.load(latest.path)).version == Version("main", 2, 1)
            assert [c.step for c in list_checkpoints(tmp_path / "run")] == [1]

    run(main)


@pytest.mark.slow
def test_a_silent_rank_is_ended(qwen3, samples, batch_of, spec_of):
    async def main() -> None:
        async with running(spec_of(qwen3, step_timeout_s=1.0)) as trainer:
            await trainer.start()
            (pid,) = pids(trainer)
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(TrainerError, match="silent for 1 s"):
                await trainer.step(batch_of(samples))
            assert gone(pid)

    run(main)


def test_a_cancelled_step_leaves_nothing_behind(qwen3, samples, batch_of, spec_of):
    async def main() -> None:
        async with running(spec_of(qwen3)) as trainer:
            await trainer.start()
            (pid,) = pids(trainer)
            os.kill(pid, signal.SIGSTOP)
            task = asyncio.create_task(trainer.step(batch_of(samples)))
            while not trainer._busy.locked():
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert gone(pid)

    run(main)


def test_a_missing_model_is_named_before_anything_starts(spec_of, tmp_path):
    async def main() -> None:
        async with running(spec_of(tmp_path / "nowhere")) as trainer:
            with pytest.raises(ModelError, match="nowhere"):
                await trainer.start()
            assert not trainer._ranks

    run(main)


@pytest.mark.slow
def test_a_failed_start_names_its_reason_and_leaves_no_process(qwen3, spec_of):
    async def main() -> None:
        async with running(spec_of(qwen3, lora_targets=("no_such_layer",))) as trainer:
            with pytest.raises(ConfigError, match="lora_targets"):
                await trainer.start()
            assert not trainer._ranks

    run(main)


def test_a_stranger_without_the_key_is_refused(qwen3, spec_of):
    async def main() -> None:
        async with running(spec_of(qwen3)) as trainer:
            handles = []

            async def keep_out(self, timeout_s: float) -> None:
                handles.append(self)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("claw_train.training.remote._RankHandle.connect", keep_out)
                await trainer._spawn()
            address = handles[0]._address
            while not Path(address).exists():
                await asyncio.sleep(0.02)
            assert Path(address).parent.stat().st_mode & 0o077 == 0
            with pytest.raises((AuthenticationError, ConnectionError, EOFError)):
                await asyncio.to_thread(Client, address, "AF_UNIX", b"guess")

    run(main)


def test_the_handle_imports_no_torch():
    code = "import sys, claw_train.training.remote, claw_train.training.folders; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
