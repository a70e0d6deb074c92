"""The ranks as processes: one handle, real workers, real deaths."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import pytest

from claw_train import codec
from claw_train.errors import ChildError, ConfigError, GuardError, ModelError, TrainerError
from claw_train.training.folders import latest_checkpoint, list_checkpoints, private_folder
from claw_train.training.ranks import Ranks
from claw_train.training.remote import RemoteTrainer
from claw_train.training.spec import Reply, Request, TrainerSpec
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

            # a step that is cancelled leaves no process behind
            os.kill(pid, signal.SIGSTOP)
            task = asyncio.create_task(trainer.step(batch_of(samples, 2)))
            while not trainer._busy.locked():
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert gone(pid)

    run(main)


@pytest.mark.slow
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


@pytest.mark.slow
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
            (pid,) = pids(trainer)
            await trainer.aclose()
            assert gone(pid)

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


def test_closing_ends_a_start_in_progress(qwen3, spec_of):
    async def main() -> None:
        trainer = RemoteTrainer(spec_of(qwen3), threads=1)
        start = asyncio.create_task(trainer.start())
        while not trainer._ranks:
            await asyncio.sleep(0.01)
        (pid,) = pids(trainer)
        waiting = asyncio.create_task(trainer.start())
        await asyncio.sleep(0)
        await trainer.aclose()
        assert gone(pid)
        with pytest.raises(TrainerError, match="closed while it started"):
            await start
        with pytest.raises(TrainerError, match="closed before it started"):
            await waiting

    run(main)


@pytest.mark.parametrize(
    ("keys", "budget", "each"), [({}, 4, 4), ({"num_ranks": 2}, 4, 2), ({"num_ranks": 8}, 4, 1), ({"threads": 3}, 4, 3)]
)
def test_ranks_share_the_threads(keys: dict[str, int], budget: int, each: int, qwen3, spec_of):
    # one budget for all ranks, unless each is given its own
    assert RemoteTrainer(spec_of(qwen3, **keys), threads=budget)._threads == each


def test_a_batch_is_written_out_beside_the_event_loop(
    qwen3, samples, batch_of, spec_of, monkeypatch: pytest.MonkeyPatch
):
    class Halting:
        async def ask(self, payload: bytes, timeout_s: float) -> Reply:
            assert codec.load(Request, payload).batch == batch_of(samples)
            return Reply.of(GuardError("enough"))

    places, dump = [], codec.dump

    def noting(value: object) -> bytes:
        places.append(threading.current_thread())
        return dump(value)

    async def main() -> None:
        trainer = RemoteTrainer(spec_of(qwen3))
        monkeypatch.setattr(trainer, "_ranks", [Halting()])
        monkeypatch.setattr(codec, "dump", noting)
        with pytest.raises(GuardError, match="enough"):
            await trainer.step(batch_of(samples))
        assert places
        assert threading.current_thread() not in places

    run(main)


@pytest.mark.parametrize("trap", ["link", "stranger's"])
def test_a_folder_that_is_not_ours_is_refused(trap: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = private_folder(tmp_path / "run", "main")
    assert private_folder(tmp_path / "other", "main") != folder
    found = folder.lstat()
    if trap == "link":
        folder.rmdir()
        folder.symlink_to(tmp_path)
    else:
        foreign = os.stat_result((*found[:4], found.st_uid + 1, *found[5:10]))
        monkeypatch.setattr(Path, "lstat", lambda _: foreign)
    with pytest.raises(TrainerError, match="belongs to somebody else"):
        private_folder(tmp_path / "run", "main")


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
            # a killed run could not clear its folder
            left = private_folder(Path(trainer.spec.run_dir), "main") / "rank0"
            left.write_text("")
            handles = []

            async def keep_out(self, timeout_s: float) -> None:
                handles.append(self)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("claw_train.training.remote._RankHandle.connect", keep_out)
                await trainer._spawn()
            address = handles[0]._address
            assert address == str(left)
            while not Path(address).exists():
                await asyncio.sleep(0.02)
            assert Path(address).parent.stat().st_mode & 0o077 == 0
            with pytest.raises((AuthenticationError, ConnectionError, EOFError)):
                await asyncio.to_thread(Client, address, "AF_UNIX", b"guess")

    run(main)


def test_the_handle_imports_no_torch():
    code = "import sys, claw_train.training.remote, claw_train.training.folders; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
