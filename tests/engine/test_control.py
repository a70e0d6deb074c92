"""Ending requests early, keys, health, and what the server says of itself."""

import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.engine.support import KEY, Server, prompt


def test_abort_matches_the_beginning_of_the_id_and_keeps_the_tokens(server):
    with ThreadPoolExecutor(2) as pool:
        options = {"max_new_tokens": 3500, "ignore_eos": True}
        jobs = [pool.submit(server.generate, prompt(400 + i, 10), rid=f"run/{i}", **options) for i in range(2)]
        server.wait(lambda info: info["num_running"] == 2, "both run")
        before = server.info()["output_tokens"]
        server.wait(lambda info: info["output_tokens"] > before, "tokens are drawn")
        assert server.ok("/abort_request", rid="run/")["aborted"] == 2
        metas = [job.result()["meta_info"] for job in jobs]
    assert [m["finish_reason"]["type"] for m in metas] == ["abort", "abort"]
    assert all(0 < m["completion_tokens"] < 3500 for m in metas)


def test_a_waiting_request_can_be_aborted(server):
    server.ok("/pause_generation", mode="in_place")
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(server.generate, prompt(402, 10), rid="waits", max_new_tokens=5)
        server.wait(lambda info: info["num_waiting"] == 1, "it waits")
        assert server.ok("/abort_request", abort_all=True)["aborted"] == 1
        reply = job.result()
    server.ok("/continue_generation")
    assert reply["output_ids"] == []
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"


def test_an_abort_that_names_nothing_is_refused(server):
    assert server.post("/abort_request").status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_request(server, stream):
    body = {"input_ids": prompt(403, 10), "sampling_params": {"max_new_tokens": 3500, "ignore_eos": True}}
    before = server.info()["finished"]
    with httpx.Client(base_url=server.url, headers=server.http.headers) as client:
        if stream:
            with client.stream("POST", "/generate", json=body | {"stream": True}) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/generate", json=body, timeout=0.3)
    info = server.wait(lambda info: info["num_running"] + info["num_waiting"] == 0, "cancelled")
    assert info["finished"] == before + 1


def test_a_stream_grows_to_the_whole_reply(server):
    options = {"max_new_tokens": 12, "sampling_seed": 8, "ignore_eos": True}
    events = list(server.events(prompt(404, 10), **options))
    whole = server.generate(prompt(404, 10), **options)
    assert [len(e["output_ids"]) for e in events] == sorted({len(e["output_ids"]) for e in events})
    for event in events:
        n = len(event["output_ids"])
        assert event["output_ids"] == whole["output_ids"][:n]
        assert len(event["meta_info"]["output_token_logprobs"]) == n
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert events[0]["meta_info"]["finish_reason"] is None


def test_a_stream_ends_with_done(server):
    body = {"input_ids": [[1], [2]], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}, "stream": True}
    lines = [line for line in server.post("/generate", **body).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert {'"index":0' in line for line in lines[:-1]} == {True, False}


@pytest.mark.parametrize("header", [None, "Bearer wrong", "a-test-key"])
def test_only_the_key_opens_the_routes(server, header):
    with httpx.Client(base_url=server.url, headers={"Authorization": header} if header else {}) as stranger:
        for path in ("/generate", "/load_lora_adapter", "/abort_request", "/pause_generation"):
            assert stranger.post(path, json={}).status_code == 401
        assert stranger.get("/server_info").status_code == 401
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/ready").status_code == 200


def test_a_huge_body_is_refused_unread(server):
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {1 << 40}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_health_generates_when_asked(server):
    before = server.info()["finished"]
    assert server.http.get("/health_generate").status_code == 200
    assert server.info()["finished"] == before + 1


@pytest.mark.parametrize("prefix", ["", "get_"])
def test_the_server_says_what_it_is(server, qwen3, prefix):
    info = server.http.get(f"/{prefix}server_info").json()
    assert info["max_total_num_tokens"] == 20000
    assert tuple(int(x) for x in info["version"].split(".")) >= (0, 5, 21)
    model = server.http.get(f"/{prefix}model_info").json()
    assert (model["model_path"], model["weight_version"], model["is_generation"]) == (str(qwen3), "base", True)


def test_flush_forgets_prefixes(server: Server):
    server.generate(prompt(405, 64), max_new_tokens=1)
    assert server.info()["prefix_tokens"] > 0
    assert server.http.get("/flush_cache").status_code == 200
    assert server.info()["prefix_tokens"] == 0
