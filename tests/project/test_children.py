"""Child processes: their environment, their start, their end, and the end of their parent."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from claw_train.children import Child, ChildSpec, thread_env
from claw_train.errors import ChildError

ROOT = Path(__file__).parents[2]

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen(["sleep", "600"])
print(grandchild.pid, flush=True)
time.sleep(600)
"""
WATCHED = """
import subprocess, time
from claw_train.children import watch_parent
watch_parent()
grandchild = subprocess.Popen(["sleep", "600"])
print(grandchild.pid, flush=True)
time.sleep(600)
"""
POLITE = """
import signal, sys, time
from claw_train.children import watch_parent
def farewell(*_):
    print("farewell", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, farewell)
watch_parent()
print("up", flush=True)
time.sleep(600)
"""
PARENT = """
import asyncio, sys
from pathlib import Path
from claw_train.children import Child, ChildSpec
async def main():
    spec = ChildSpec(name="watched", module="watched", log=Path(sys.argv[1]))
    child = await Child.start(spec)
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""


@pytest.fixture
def make_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ChildSpec]:
    """Writes a module that children can run, and returns how to run it."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def make(name: str, source: str, **kwargs: object) -> ChildSpec:
        (tmp_path / f"{name}.py").write_text(source)
        return ChildSpec(name=name, module=name, log=tmp_path / "logs" / f"{name}.log", **kwargs)  # type: ignore[arg-type]

    return make


def logged(spec: ChildSpec, text: str = "\n") -> Callable[[], Awaitable[bool]]:
    """A probe that is true once the log holds `text`."""

    async def probe() -> bool:
        return text in spec.log.read_text()

    return probe


async def started(spec: ChildSpec, text: str = "\n") -> Child:
    child = await Child.start(spec)
    await child.wait_ready(logged(spec, text), timeout_s=30)
    return child


def wait_gone(pidfd: int) -> bool:
    """True once the process behind `pidfd` has ended; False after 20 s."""
    return bool(select.select([pidfd], [], [], 20)[0])


def test_thread_counts_stand_in_the_environment_before_the_child_runs(make_spec):
    spec = make_spec(
        "show", "import json, os; print(json.dumps(dict(os.environ)))", threads=3, env={"CLAW_TEST_KEY": "secret"}
    )

    async def run() -> int:
        child = await Child.start(spec)
        code = await child.wait()
        await child.stop()
        return code

    assert asyncio.run(run()) == 0
    seen = json.loads(spec.log.read_text())
    assert thread_env(3).items() <= seen.items()
    assert seen["OMP_NUM_THREADS"] == "3"
    assert seen["OMP_WAIT_POLICY"] == "PASSIVE"
    assert seen["CLAW_TEST_KEY"] == "secret"


def test_a_thread_budget_below_one_is_one():
    assert thread_env(0)["OMP_NUM_THREADS"] == "1"


def test_a_killed_parent_takes_child_and_grandchild_along(make_spec, tmp_path):
    spec = make_spec("watched", WATCHED)
    (tmp_path / "parent.py").write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, "-m", "parent", str(spec.log)], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        asyncio.run(until(logged(spec)))
        grandchild = int(spec.log.read_text())
        fds = [os.pidfd_open(pid) for pid in (child, grandchild)]
        parent.send_signal(signal.SIGKILL)
        try:
            assert [wait_gone(fd) for fd in fds] == [True, True]
        finally:
            for fd in fds:
                os.close(fd)


async def until(probe: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await probe():
            await asyncio.sleep(0.02)


def test_a_watcher_in_the_group_of_another_ends_alone(tmp_path):
    """Ranks share the group of the program that launched them; this one shares ours."""
    (tmp_path / "rank.py").write_text(WATCHED.replace("grandchild", "_").replace('["sleep", "600"]', '["true"]'))
    with subprocess.Popen(
        [sys.executable, tmp_path / "rank.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as rank:
        assert rank.stdout is not None
        assert rank.stdin is not None
        rank.stdout.readline()
        rank.stdin.close()
        assert rank.wait(timeout=20) == 1


def test_a_failed_start_carries_status_and_last_log_line(make_spec, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    spec = make_spec("broken", "import sys; print('noise'); sys.exit('port 80 is taken')")

    async def never() -> bool:
        return False

    async def run() -> None:
        child = await Child.start(spec)
        try:
            await child.wait_ready(never, timeout_s=30)
        finally:
            await child.stop()

    with pytest.raises(ChildError, match=r"broken ended with status 1 at start: port 80 is taken \(log: .*broken\.log"):
        asyncio.run(run())


def test_the_last_words_are_not_those_of_an_earlier_start(make_spec):
    spec = make_spec("silent", "")
    spec.log.parent.mkdir()
    spec.log.write_text("an old complaint\n")

    async def run() -> str:
        child = await Child.start(spec)
        await child.wait()
        await child.stop()
        return child.last_words()

    assert asyncio.run(run()).startswith("no output")
    assert spec.log.read_text() == "an old complaint\n"


@pytest.mark.parametrize("hangs", [False, True])
def test_a_child_that_never_gets_ready_is_reported(make_spec, hangs):
    spec = make_spec("stubborn", STUBBORN)

    async def probe() -> bool:
        if hangs:
            await asyncio.Event().wait()
        return False

    async def run() -> None:
        child = await Child.start(spec)
        try:
            await child.wait_ready(probe, timeout_s=0.2)
        finally:
            await child.stop(grace_s=0.1)

    with pytest.raises(ChildError, match="stubborn was not ready after"):
        asyncio.run(run())


def test_stop_ends_a_child_that_ignores_term_and_its_grandchild(make_spec):
    spec = make_spec("stubborn", STUBBORN)

    async def run() -> tuple[int | None, bool]:
        child = await started(spec)
        pidfd = os.pidfd_open(int(spec.log.read_text()))
        try:
            await child.stop(grace_s=0.1)
            return child.returncode, await asyncio.to_thread(wait_gone, pidfd)
        finally:
            os.close(pidfd)

    assert asyncio.run(run()) == (-signal.SIGKILL, True)


def test_stop_lets_a_child_that_heeds_term_finish(make_spec):
    spec = make_spec("polite", POLITE)

    async def run() -> int | None:
        child = await started(spec, "up")
        await child.stop(grace_s=30)
        return child.returncode

    assert asyncio.run(run()) == 0
    assert spec.log.read_text().split() == ["up", "farewell"]


def test_stop_ends_the_grandchildren_of_a_child_that_died_by_itself(make_spec):
    spec = make_spec("fleeting", STUBBORN.replace("time.sleep(600)", ""))

    async def run() -> bool:
        child = await Child.start(spec)
        await child.wait()
        pidfd = os.pidfd_open(int(spec.log.read_text()))
        try:
            await child.stop()
            return await asyncio.to_thread(wait_gone, pidfd)
        finally:
            os.close(pidfd)

    assert asyncio.run(run())


def test_a_second_stop_signals_nobody(make_spec, monkeypatch):
    spec = make_spec("polite", POLITE)
    signalled: list[int] = []

    async def run() -> None:
        child = await started(spec, "up")
        await child.stop(grace_s=30)
        monkeypatch.setattr(os, "killpg", lambda pid, sig: signalled.append(pid))
        await child.stop()

    asyncio.run(run())
    assert signalled == []


def test_a_log_folder_that_cannot_be_made_is_a_child_error(make_spec, tmp_path):
    spec = make_spec("show", "")
    (tmp_path / "logs").write_text("a file, not a folder")
    with pytest.raises(ChildError, match="show could not be started"):
        asyncio.run(Child.start(spec))


def test_a_missing_interpreter_is_a_child_error(make_spec, monkeypatch):
    spec = make_spec("show", "")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(ChildError, match="show could not be started"):
        asyncio.run(Child.start(spec))
