"""The client against real servers: one contract for both engines, and every mishap on the scripted one."""

import asyncio

import pytest

from claw_train.errors import EngineError
from claw_train.serving.client import EngineClient
from claw_train.serving.transport import Transient, Transport
from claw_train.types import Version
from tests.engine.scripted_support import (
    BASE,
    ENGINES,
    KEY,
    PROMPT,
    Server,
    adapter_ref,
    ask,
    config,
    full_ref,
    held,
    run,
    until,
)
from tests.engine.support import make_adapter

# what every engine does


def test_a_reply_is_whole_and_of_the_base(engine):
    reply = run(engine.url, lambda c: c.generate(ask()))
    assert 0 < len(reply.token_ids) == len(reply.logprobs) <= 24
    assert set(reply.versions) == {BASE}
    assert all(value <= 0 for value in reply.logprobs)


def test_the_same_seed_gives_the_same_reply(engine):
    async def work(client):
        return [await client.generate(ask(f"a/{i}", seed=11)) for i in range(2)]

    first, second = run(engine.url, work)
    assert first.token_ids == second.token_ids
    assert first.logprobs == pytest.approx(second.logprobs, abs=1e-4)


def test_the_length_limit_cuts(engine):
    reply = run(engine.url, lambda c: c.generate(ask(max_new_tokens=2, seed=5)))
    assert (len(reply.token_ids), reply.finish_reason) == (2, "length")


def test_a_stop_token_is_the_last_sampled_one(engine):
    async def work(client):
        free = await client.generate(ask(seed=2))
        stop = free.token_ids[3]
        return free, stop, await client.generate(ask(seed=2, stop_token_ids=(stop,)))

    free, stop, stopped = run(engine.url, work)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_scores_of_a_reply_are_its_logprobs(engine):
    async def work(client):
        reply = await client.generate(ask(temperature=1.0))
        return reply, await client.score(PROMPT, reply.token_ids)

    reply, scores = run(engine.url, work)
    assert scores.logprobs == pytest.approx(reply.logprobs, abs=1e-3)


def test_the_likeliest_tokens_come_with_the_scores(engine):
    scores = run(engine.url, lambda c: c.score(PROMPT, (8, 9, 10), top_k=4))
    assert [len(row) for row in scores.top_ids] == [4, 4, 4]
    assert all(list(row) == sorted(row, reverse=True) for row in scores.top_logprobs)


def test_a_loaded_adapter_answers_requests_that_name_no_version(engine, adapters):
    async def work(client):
        await client.load_weights(adapter_ref(adapters[0], 101))
        return await client.generate(ask())

    assert set(run(engine.url, work).versions) == {Version("main", 0, 101)}


def test_base_and_previous_adapter_stay_served(engine, adapters):
    wanted = [BASE, Version("main", 0, 111), Version("main", 0, 112)]

    async def work(client):
        for step in (111, 112):
            await client.load_weights(adapter_ref(adapters[step % 4], step))
        return await asyncio.gather(*(client.generate(ask(f"b/{v}", version=v)) for v in wanted))

    assert [set(reply.versions) for reply in run(engine.url, work)] == [{v} for v in wanted]


def test_older_adapters_are_unloaded(engine, adapters):
    async def work(client):
        for step in (121, 122, 123):
            await client.load_weights(adapter_ref(adapters[0], step))

    run(engine.url, work)
    assert held(engine, "main-0-12") == ["main-0-122", "main-0-123"]


def test_a_version_in_use_stays_until_its_last_request_ends(engine, adapters):
    first = Version("main", 0, 131)

    async def work(client):
        await client.load_weights(adapter_ref(adapters[0], 131))
        with client.holding(first):
            for step in (132, 133, 134):
                await client.load_weights(adapter_ref(adapters[1], step))
            return await client.generate(ask(version=first))

    assert set(run(engine.url, work).versions) == {first}
    assert str(first) not in held(engine, "main-0-13")


def test_loading_a_version_again_changes_nothing(engine, adapters):
    async def work(client):
        for _ in range(2):
            await client.load_weights(adapter_ref(adapters[2], 141))
        return client.newest

    assert run(engine.url, work) == Version("main", 0, 141)


def test_a_version_that_was_never_loaded_is_refused(engine):
    with pytest.raises(EngineError, match="main-0-7 is not served; the engine holds main-0-0"):
        run(engine.url, lambda c: c.generate(ask(version=Version("main", 0, 7))))


def orders(client) -> list[tuple[str, object]]:
    """Every path and request id that the client sends from now on."""
    sent: list[tuple[str, object]] = []
    call = client._transport.call

    async def recorded(method, path, body=None, **limits):
        sent.append((path, (body or {}).get("rid")))
        return await call(method, path, body, **limits)

    client._transport.call = recorded
    return sent


def test_cancelling_a_call_aborts_it_on_the_server(scripted):
    server = scripted("--token-delay-s", "0.5")

    async def work(client):
        sent = orders(client)
        call = asyncio.create_task(client.generate(ask("gone")))
        while not await asyncio.to_thread(lambda: server.info()["num_running"]):
            pass
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: len(sent) == 2)
        return sent

    # a server behind a proxy does not see that the connection has closed: it must be told
    assert run(server.url, work) == [("/generate", "gone;"), ("/abort_request", "gone;")]
    server.wait(lambda info: info["num_running"] == 0, "the request ended")


def test_a_call_that_took_too_long_is_aborted_before_it_is_repeated(scripted):
    server = scripted("--fault", "slow:1:1", "--slow-s", "60")

    async def work(client):
        sent = orders(client)
        await client.generate(ask("late"))
        return [path for path, _ in sent]

    assert run(server.url, work, timeout_s=1.0) == ["/generate", "/abort_request", "/generate"]


def test_cancelling_a_call_leaves_others_with_a_longer_id_alone(scripted):
    server = scripted("--token-delay-s", "0.02")

    async def work(client):
        short, long = (asyncio.create_task(client.generate(ask(rid))) for rid in ("e/1", "e/10"))
        while await asyncio.to_thread(lambda: server.info()["num_running"]) < 2:
            pass
        short.cancel()
        return await long

    assert run(server.url, work).finish_reason != "abort"


def test_a_wrong_key_is_no_matter_for_retries(engine):
    async def work():
        client = EngineClient(engine.url, "wrong", config(), base=BASE)
        try:
            await client.generate(ask())
        finally:
            await client.aclose()

    with pytest.raises(EngineError, match="401"):
        asyncio.run(work())


def test_a_prompt_that_does_not_fit_is_refused_by_the_server(engine):
    with pytest.raises(EngineError, match="400"):
        run(engine.url, lambda c: c.generate(ask(prompt_ids=(1,) * 3000, max_new_tokens=1 << 20)))


def test_the_server_describes_itself(engine):
    info = run(engine.url, lambda c: c.server_info())
    assert (info.engine[:5], info.weight_version, bool(info.context)) == ("claw-", "main-0-0", True)


# full weights


@pytest.mark.parametrize(("name", "kind"), [("scripted", "scripted"), ("embedded", "url")])
def test_full_weights_replace_the_base(name, kind, qwen3, qwen3_later, tmp_path):
    server = Server(tmp_path, qwen3, module=ENGINES[name])

    async def work(client):
        await client.load_weights(full_ref(qwen3_later, 1))
        reply = await client.generate(ask())
        with pytest.raises(EngineError, match="is not served"):
            await client.generate(ask(version=BASE))
        return reply

    try:
        assert set(run(server.url, work, kind=kind).versions) == {Version("main", 0, 1)}
    finally:
        server.close()


@pytest.mark.parametrize("kind", ["scripted", "url"])
def test_tokens_of_a_request_in_flight_carry_their_own_version(kind, scripted, qwen3_later):
    server = scripted("--token-delay-s", "0.02")

    async def work(client):
        call = asyncio.create_task(client.generate(ask()))
        while not await asyncio.to_thread(lambda: server.info()["num_running"]):
            pass
        await asyncio.sleep(0.1)  # some tokens of the old weights, 0.02 s each
        await client.load_weights(full_ref(qwen3_later, 1))
        return await call

    versions = run(server.url, work, kind=kind).versions
    assert len(versions) == 24
    assert sorted(set(versions)) == [BASE, Version("main", 0, 1)]
    assert list(versions) == sorted(versions)


def test_weights_that_the_server_refuses_leave_it_running_with_the_old_ones(scripted, tmp_path):
    server = scripted()

    async def work(client):
        with pytest.raises(EngineError, match="no model folder"):
            await client.load_weights(full_ref(tmp_path / "nothing", 1))
        return await client.generate(ask())

    assert set(run(server.url, work, kind="url").versions) == {BASE}
    assert server.info()["status"] == "ready"


def test_a_cancelled_load_does_not_leave_the_server_frozen(scripted, qwen3_later):
    server = scripted()

    async def work(client):
        load = asyncio.create_task(client.load_weights(full_ref(qwen3_later, 1)))
        while server.info()["status"] != "paused" and not load.done():
            await asyncio.sleep(0)
        frozen = not load.done()
        load.cancel()
        await asyncio.wait([load])
        return frozen, await client.generate(ask())

    frozen, reply = run(server.url, work, kind="url")
    assert frozen
    assert reply.token_ids


def test_a_damaged_adapter_is_not_loaded(scripted, tmp_path):
    folder = make_adapter(tmp_path / "adapter", seed=1)
    ref = adapter_ref(folder, 1)
    (folder / "adapter_model.safetensors").write_bytes(b"other")
    server = scripted()

    async def work(client):
        with pytest.raises(EngineError, match="was published with"):
            await client.load_weights(ref)
        return client.newest

    assert run(server.url, work) == BASE
    assert server.info()["loaded_adapters"] == []


def test_a_load_that_other_weights_answer_is_an_error(scripted, adapters):
    server = scripted("--fault", "wrong_version:1", "--fault-rid", "probe/")

    async def work(client):
        with pytest.raises(EngineError, match="answers with other weights"):
            await client.load_weights(adapter_ref(adapters[0], 1))
        return client.newest

    assert run(server.url, work) == BASE


# what may pass


@pytest.mark.parametrize("fault", ["5xx:1:2", "drop:1:2", "429:1:1", "slow:1:1"])
def test_a_failure_that_passes_changes_nothing_in_the_reply(fault, scripted):
    healthy, faulty = scripted(), scripted("--fault", fault, "--slow-s", "60")
    want = run(healthy.url, lambda c: c.generate(ask()))
    assert run(faulty.url, lambda c: c.generate(ask()), timeout_s=2.0) == want


@pytest.mark.parametrize("fault", ["5xx:1", "drop:1"])
def test_retries_run_out(fault, scripted):
    server = scripted("--fault", fault)
    with pytest.raises(EngineError, match="failed 3 times"):
        run(server.url, lambda c: c.generate(ask()))


def test_the_servers_wish_to_wait_is_heard(scripted):
    server = scripted("--fault", "429:1")

    async def work():
        transport = Transport(server.url, KEY, connections=1)
        try:
            await transport.call("POST", "/generate", {"input_ids": [1]}, timeout_s=5)
        finally:
            await transport.aclose()

    with pytest.raises(Transient) as caught:
        asyncio.run(work())
    assert caught.value.retry_after_s == 1.0


@pytest.mark.parametrize(
    ("fault", "message"), [("nan_logprobs:1", "log-probability nan"), ("wrong_version:1", "nobody-99-99")]
)
def test_a_reply_that_is_not_sound_is_no_completion(fault, message, scripted):
    server = scripted("--fault", fault)
    with pytest.raises(EngineError, match=message):
        run(server.url, lambda c: c.generate(ask()))


@pytest.mark.parametrize(
    ("fault", "finish", "tokens"), [("abort:1", "abort", 12), ("cut:1", "length", 12), ("empty:1", "stop", 0)]
)
def test_how_a_reply_ended_is_told(fault, finish, tokens, scripted):
    server = scripted("--fault", fault)
    reply = run(server.url, lambda c: c.generate(ask(max_new_tokens=24, seed=3)))
    assert reply.finish_reason == finish
    assert (len(reply.token_ids) == 0) == (tokens == 0)
    assert len(reply.token_ids) < 24


def test_all_requests_can_be_aborted_with_what_they_have(scripted):
    server = scripted("--token-delay-s", "0.02")

    async def work(client):
        calls = [asyncio.create_task(client.generate(ask(f"c/{i}"))) for i in range(3)]
        while await asyncio.to_thread(lambda: server.info()["num_running"]) < 3:
            pass
        await client.abort_all()
        return await asyncio.gather(*calls)

    replies = run(server.url, work)
    assert {reply.finish_reason for reply in replies} == {"abort"}
    assert all(len(reply.token_ids) < 24 for reply in replies)


# a server that dies


def test_a_restarted_server_gets_its_adapters_back_before_it_is_asked(scripted, adapters):
    first = scripted()
    refs = [adapter_ref(adapters[i], i + 1) for i in range(2)]

    async def work(client):
        for ref in refs:
            await client.load_weights(ref)
        first.kill()
        calls = [asyncio.create_task(client.generate(ask(f"d/{i}"))) for i in range(4)]
        old = asyncio.create_task(client.generate(ask("d/old", version=refs[0].version)))
        await until(lambda: client._suspect)
        await asyncio.to_thread(scripted, port=first.port)
        return await asyncio.gather(*calls, old)

    *replies, old = run(first.url, work)
    assert {v for reply in replies for v in reply.versions} == {refs[1].version}
    assert set(old.versions) == {refs[0].version}


def test_a_request_in_flight_survives_the_servers_death(scripted):
    first = scripted("--token-delay-s", "0.05")
    want = run(scripted().url, lambda c: c.generate(ask()))

    async def work(client):
        call = asyncio.create_task(client.generate(ask()))
        while not await asyncio.to_thread(lambda: first.info()["num_running"]):
            pass
        first.kill()
        await asyncio.to_thread(scripted, port=first.port)
        return await call

    assert run(first.url, work) == want


def test_a_server_that_does_not_come_back_is_an_error_in_time(scripted):
    server = scripted()
    server.kill()
    with pytest.raises(EngineError, match="the engine is down"):
        run(server.url, lambda c: c.generate(ask()), start_timeout_s=0.5)


def test_health_never_raises(scripted):
    server = scripted()
    assert run(server.url, lambda c: c.health()) is True
    server.kill()
    assert run(server.url, lambda c: c.health()) is False


# who goes first


def test_a_live_request_overtakes_hosted_ones(scripted):
    server = scripted("--token-delay-s", "0.001")
    ended: list[str] = []

    async def one(client, rid, live):
        await client.generate(ask(rid, live=live, max_new_tokens=3))
        ended.append(rid)

    async def work(client):
        async with asyncio.TaskGroup() as group:
            for i in range(4):
                group.create_task(one(client, f"hosted/{i}", False))
            await until(lambda: client.waiting == 3)
            group.create_task(one(client, "live", True))

    run(server.url, work, concurrency=1)
    assert ended.index("live") == 1
