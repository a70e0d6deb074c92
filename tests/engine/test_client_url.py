"""The client of a server that other runs use too, that is busy, or that goes away more than once."""

import asyncio

import pytest

from claw_train.serving.transport import Lost, Transient
from claw_train.types import Version
from tests.engine.scripted_support import adapter_ref, ask, full_ref, held, run


def test_runs_on_one_server_neither_share_nor_leave_adapters(engine, adapters):
    names: list[list[str]] = []

    async def inner(client):
        await client.load_weights(adapter_ref(adapters[1], 151))
        names.append(held(engine, "main-0-151"))
        return await client.generate(ask(seed=5))

    async def outer(client):
        await client.load_weights(adapter_ref(adapters[0], 151))
        before = await client.generate(ask(seed=5))
        other = await asyncio.to_thread(run, engine.url, inner, kind="url")
        names.append(held(engine, "main-0-151"))
        return before, other, await client.generate(ask(seed=5))

    before, other, after = run(engine.url, outer, kind="url")
    names.append(held(engine, "main-0-151"))
    assert [len(listed) for listed in names] == [2, 1, 0]
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-4)
    if "embedded" in str(engine.log):  # the script's log-probabilities do not depend on the weights
        assert other.logprobs != pytest.approx(before.logprobs, abs=1e-2)


def test_full_weights_are_loaded_though_the_server_does_not_answer_at_once(scripted, qwen3_later):
    server = scripted()

    async def work(client):
        call, failures = client._transport.call, [Transient("busy", retry_after_s=0.0)]

        async def sometimes(method, path, body=None, **limits):
            if path == "/server_info" and failures:
                raise failures.pop()
            return await call(method, path, body, **limits)

        client._transport.call = sometimes
        await client.load_weights(full_ref(qwen3_later, 1))
        return client.newest

    assert run(server.url, work, kind="url") == Version("main", 0, 1)


def test_each_outage_has_its_own_time_limit(scripted):
    gone, busy = Lost("gone", down=True), Transient("busy", retry_after_s=0.6)
    coming = [gone, busy, gone]

    async def work(client):
        client._heal = lambda: asyncio.sleep(0)

        async def call():
            if coming:
                raise coming.pop(0)
            return "answered"

        return await client._persist(call)

    assert run(scripted().url, work, start_timeout_s=0.5) == "answered"
