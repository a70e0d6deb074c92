"""A disk that fails: every call says so, nothing is half-written, the sums stay readable, a new opening goes on."""

import asyncio
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from claw_train.errors import DiskError
from claw_train.ledger import Ledger
from claw_train.ledger.export import iter_turns
from tests.ledger.values import group, state, turn


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    if mount is None or os.geteuid() or subprocess.run(command, capture_output=True, timeout=10).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


async def fill(ledger: Ledger, start: int = 0) -> int:
    """Captures until the disk fails; how many returned."""
    for i in range(start, start + 10_000):
        try:
            await ledger.capture(turn(f"s{i}", prompt=(i,) * 500))
        except DiskError:
            return i - start
    raise AssertionError("the disk never failed")


async def check_failed(ledger: Ledger, done: int) -> None:
    assert isinstance(ledger.failed, DiskError)
    assert ledger.counts().captured == ledger.counts().total == done
    for call in (ledger.bind(turn("s0").id, state()), ledger.capture(turn("later")), ledger.audit()):
        with pytest.raises(DiskError):
            await call


async def check_whole(run_dir: Path, done: int) -> None:
    assert [t.id.session for t in iter_turns(run_dir)] == [f"s{i}" for i in range(done)]
    async with Ledger.open(run_dir, create=False) as ledger:
        assert (await ledger.audit()).captured == done
        await ledger.capture(turn("after"))
        assert ledger.failed is None


def test_a_full_disk(small_disk):
    run_dir = small_disk / "run"

    async def go() -> None:
        ballast = small_disk / "ballast"
        ballast.write_bytes(b"x" * 200_000)
        ledger = Ledger.open(run_dir, create=True)
        await ledger.add_group(group())
        done = await fill(ledger)
        assert done > 0
        await check_failed(ledger, done)
        await ledger.aclose()
        ballast.unlink()
        await check_whole(run_dir, done)

    asyncio.run(go())


def test_a_write_error(run_dir):
    async def go() -> None:
        ledger = Ledger.open(run_dir, create=True)
        await ledger.add_group(group())
        with file_size_limit(300_000):
            done = await fill(ledger)
            assert done > 0
            await check_failed(ledger, done)
            await ledger.aclose()
        await check_whole(run_dir, done)

    asyncio.run(go())


def test_concurrent_callers_all_hear_of_it(run_dir):
    async def go() -> None:
        ledger = Ledger.open(run_dir, create=True)
        await ledger.add_group(group())
        with file_size_limit(300_000):
            results: list[object] = []
            for start in range(0, 400, 20):
                calls = (ledger.capture(turn(f"s{i}", prompt=(i,) * 500)) for i in range(start, start + 20))
                results += await asyncio.gather(*calls, return_exceptions=True)
            await ledger.aclose()
        done = [f"s{i}" for i, result in enumerate(results) if result is None]
        assert {type(r) for r in results} == {type(None), DiskError}
        assert [t.id.session for t in iter_turns(run_dir)] == done
        assert ledger.counts().captured == len(done)

    asyncio.run(go())


def test_a_disk_that_is_full_from_the_start(run_dir):
    run_dir.mkdir()
    with file_size_limit(0), pytest.raises(DiskError):
        Ledger.open(run_dir, create=True)
    assert not Ledger.exists(run_dir)
    asyncio.run(Ledger.open(run_dir, create=True).aclose())
