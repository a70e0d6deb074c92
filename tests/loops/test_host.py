"""Hosts: nothing that an environment does reaches beyond its own episode."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from claw_envs.errors import SandboxError, SandboxLost, SandboxTimeout
from claw_train.config import StreamConfig
from claw_train.errors import ConfigError
from claw_train.hosting.host import EnvHost, EnvironmentBroke
from claw_train.hosting.pool import HostPool
from claw_train.hosting.thread import EnvThread, LostThreads, TooManyStuck
from tests.helpers.toy_env import HANGING

ROOT = Path(__file__).resolve().parents[2]


def stream(env_id="Toy-v0", *, max_concurrent=1, deadline_s=30.0, **kwargs):
    return StreamConfig(
        name="toy",
        id=f"tests.helpers.toy_env:{env_id}",
        kwargs=kwargs,
        max_concurrent=max_concurrent,
        deadline_s=deadline_s,
    )


@contextlib.contextmanager
def hanging():
    """While it lasts, whatever of a toy is told to hang does; then every thread is let go."""
    HANGING.clear()
    try:
        yield
    finally:
        HANGING.set()


async def begin(host):
    """A reset and a step."""
    await host.reset(seed=1, options={})
    await host.step("ab")


def with_host(config, use):
    async def main():
        host = EnvHost(config)
        try:
            return await use(host)
        finally:
            await host.close()

    return asyncio.run(main())


def test_a_host_that_never_answers_is_replaced():
    async def main():
        pool = HostPool(stream())
        async with pool.host() as first:
            await first.reset(seed=1, options={})
            first.lost = True
        async with pool.host() as second:
            assert second is not first
            await second.reset(seed=1, options={})
        async with pool.host() as third:
            assert third is second
        await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("where", ["init", "reset", "step"])
def test_no_answer_by_the_deadline_of_the_stream_loses_the_host(where):
    async def use(host):
        with pytest.raises(SandboxTimeout, match=r"in 0\.05 s"):
            await begin(host)
        assert host.lost

    with hanging():
        with_host(stream(hang_on=where, deadline_s=0.05), use)


def test_an_environment_that_hangs_does_not_keep_the_process_alive():
    code = """
import asyncio
from claw_train.config import StreamConfig
from claw_train.hosting.host import EnvHost
async def main():
    host = EnvHost(StreamConfig(name="toy", id="tests.helpers.toy_env:Toy-v0", kwargs={"hang_on": "reset"}))
    waiting = asyncio.ensure_future(host.reset(seed=1, options={}))
    from tests.helpers.toy_env import ENTERED
    while not ENTERED.is_set():
        await asyncio.sleep(0.01)
    waiting.cancel()
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=40, check=False).returncode == 0


def test_hosts_that_hang_do_not_pile_up_and_count_until_they_come_back():
    async def main():
        pool = HostPool(stream(hang_on="reset", deadline_s=0.05))
        with hanging():
            for _ in range(8):
                async with pool.host() as host:
                    with pytest.raises(SandboxTimeout):
                        await host.reset(seed=1, options={})
            async with pool.host() as host:
                with pytest.raises(TooManyStuck, match=r"streams\.toy: 8 environments hang"):
                    await host.reset(seed=1, options={})
        for thread in [t for t in threading.enumerate() if t.name == "env-toy"]:
            await asyncio.to_thread(thread.join, 30)
        async with pool.host() as host:
            assert (await host.reset(seed=1, options={})).valid
        await pool.close()

    asyncio.run(main())


def test_an_answer_after_the_loop_has_closed_is_nobodys():
    release, done = threading.Event(), threading.Event()
    thread = EnvThread("late")

    async def main():
        thread.submit(lambda: release.wait(30))

    asyncio.run(main())
    release.set()
    thread.end(done.set)
    assert done.wait(30)  # the thread lived on to carry out what came after


def test_a_thread_that_was_ended_takes_no_further_call():
    async def main():
        thread = EnvThread("ended")
        await thread.submit(lambda: 1)
        thread.end()
        with pytest.raises(SandboxError, match="closed"):
            thread.submit(lambda: 2)

    asyncio.run(main())


def test_calls_that_wait_are_bounded():
    release = threading.Event()

    async def main():
        thread = EnvThread("full")
        with pytest.raises(SandboxError, match="wait already"):
            [thread.submit(lambda: release.wait(30)) for _ in range(10)]
        release.set()
        thread.end()

    asyncio.run(main())


def test_threads_that_have_ended_are_not_counted():
    lost = LostThreads("toy", limit=1)
    lost.add(EnvThread("never-started"))
    lost.check()
    assert lost._threads == []


@pytest.mark.parametrize(("where", "error"), [("reset", "KeyError"), ("step", "OSError"), ("step", "SystemExit")])
def test_an_error_of_the_environments_own_is_a_lost_sandbox(where, error):
    async def use(host):
        with pytest.raises(EnvironmentBroke, match=f"{where}: {error}: .*the kitchen is closed"):
            await begin(host)

    with_host(stream(raise_on=where, error=error), use)


def test_an_error_that_environments_may_raise_passes_as_it_is():
    async def use(host):
        with pytest.raises(SandboxLost):
            await begin(host)

    with_host(stream(raise_on="step", error="SandboxLost"), use)


def test_the_episode_after_an_error_gets_a_new_environment():
    async def use(host):
        before = await host.reset(seed=1, options={})
        first = host._env
        with pytest.raises(EnvironmentBroke):
            await host.step("ab")
        assert await host.reset(seed=1, options={}) == before
        assert host._env is not first

    with_host(stream(raise_on="step"), use)


def test_closing_forgives_an_environment_that_cannot_close(caplog):
    with_host(stream(raise_on="close"), lambda host: host.reset(seed=1, options={}))
    assert "close: KeyError" in caplog.text


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [({"reward": 7.0}, r"7\.0 is not in \[0, 1\]"), ({"next_state": "text"}, "next_state is a str"), ({}, None)],
)
def test_answers_that_no_environment_may_give_are_refused(answer, complaint):
    async def use(host):
        await host.reset(seed=1, options={})
        if complaint is None:
            return await host.step("ab")
        with pytest.raises(EnvironmentBroke, match=complaint):
            await host.step("ab")
        return None

    outcome = with_host(stream(turns=1, answer=answer), use)
    assert complaint or outcome.terminated


def test_an_environment_needs_only_its_info_keys():
    async def use(host):
        start = await host.reset(seed=1, options={"split": "train"})
        assert (start.system_prompt, start.example_messages, start.instruction) == ("", (), "Say it.")
        return await host.step("ab")

    assert with_host(stream("Bare-v0"), use).text == "heard"


def test_an_environment_may_render_its_next_state_itself():
    async def use(host):
        await host.reset(seed=1, options={})
        return await host.step("ab")

    assert with_host(stream("Rendering-v0"), use).text == "<2 characters>"


def test_a_wrong_argument_of_an_environment_names_its_key():
    with pytest.raises(ConfigError, match=r"streams\.toy\.kwargs.*no_such_argument"):
        with_host(stream(no_such_argument=1), lambda host: host.reset(seed=0, options={}))


def test_an_unknown_environment_names_the_id():
    config = StreamConfig(name="x", id="ClawNothing-v0")
    with pytest.raises(ConfigError, match=r"streams\.x\.id='ClawNothing-v0'"):
        with_host(config, lambda host: host.reset(seed=0, options={}))
