"""The scripted engine: the same contract without a model, the same replies in every run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from claw_train.engine.scripted_replies import Fault, FaultKind, Faults, Script
from claw_train.errors import ConfigError, ModelError
from claw_train.models.tokenizer import Tokenizer
from tests.engine.scripted_support import KEY, Server, make_script

REPLIES = [{"ids": [41, 42, 43, 44]}, {"ids": [51, 52]}, {"ids": [61, 62, 63]}]


@pytest.fixture(scope="module")
def server(tmp_path_factory, qwen3):
    tmp = tmp_path_factory.mktemp("scripted")
    running = Server(tmp, qwen3, "--script", str(make_script(tmp, *REPLIES)), "--context", "256")
    yield running
    running.close()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as client:
        yield client


def generate(http, ids, seed, **fields):
    params = {"max_new_tokens": 8, "sampling_seed": seed}
    reply = http.post("/generate", json={"input_ids": ids, "sampling_params": params, "return_logprob": True, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


# replies


def test_a_reply_depends_on_prompt_and_seed_alone(qwen3):
    one, two = (Script({"replies": REPLIES}, None) for _ in range(2))
    asked = [((1, 2, i), seed) for i in range(20) for seed in range(3)]
    want = [one.reply(*a) for a in asked]
    assert [two.reply(*a) for a in reversed(asked)] == want[::-1]
    assert set(want) == {tuple(r["ids"]) for r in REPLIES}


def test_a_weight_of_nought_is_never_chosen():
    script = Script({"replies": [{"ids": [1], "weight": 0}, {"ids": [2]}]}, None)
    assert {script.reply((i,), 0) for i in range(50)} == {(2,)}


def test_a_reply_may_depend_on_the_prompts_text(qwen3):
    tokenizer = Tokenizer(qwen3)
    script = Script({"replies": [{"ids": [1], "when": "count"}, {"ids": [2], "when": "list"}, {"ids": [3]}]}, tokenizer)
    said = [script.reply(tokenizer.encode(text), 0) for text in ("please count", "please list", "hello")]
    assert said == [(1,), (2,), (3,)]


def test_texts_end_with_the_models_end_token(qwen3):
    tokenizer = Tokenizer(qwen3)
    script = Script({"replies": ["ls"]}, tokenizer)
    assert script.reply((1,), 0) == (*tokenizer.encode("ls"), *tokenizer.stop_token_ids[:1])


def test_a_token_has_the_same_logprob_sampled_or_scored(http):
    sampled = generate(http, [1, 2, 3], 0)
    whole = [1, 2, 3, *sampled["output_ids"]]
    scored = generate(http, whole, 0, logprob_start_len=2, sampling_params={"max_new_tokens": 0}, top_logprobs_num=3)[
        "meta_info"
    ]
    assert scored["input_token_logprobs"][1:] == sampled["meta_info"]["output_token_logprobs"]
    assert [row[0][0] for row in scored["input_top_logprobs"][1:]] == [
        row[0] for row in scored["input_token_logprobs"][1:]
    ]


def test_logprobs_can_be_fixed():
    assert Script({"replies": [{"ids": [1]}], "logprob": -10.8}, None).logprobs([1, 2, 3], 1) == [-10.8, -10.8]


@pytest.mark.parametrize(
    "source", [{}, {"replies": []}, {"replies": ["ls"]}, {"replies": [{"ids": [1], "text": "x"}]}, {"reply": [[1]]}]
)
def test_a_script_of_another_form_is_refused(source):
    with pytest.raises(ConfigError):
        Script(source, None)


# faults


def test_faults_hit_by_request_whatever_the_order():
    rids = [f"r/{i}" for i in range(200)]

    def hits(order):
        faults = Faults([Fault.parse("5xx:0.3")], seed=5)
        return {rid for rid in order if faults.next(rid) is FaultKind.ERROR}

    assert hits(rids) == hits(rids[::-1])
    assert 30 < len(hits(rids)) < 90


def test_a_fault_may_pass_at_the_next_try():
    faults = Faults([Fault.parse("drop:0.5")])
    assert {faults.next("r") for _ in range(30)} == {None, FaultKind.DROP}


def test_a_fault_stops_at_its_limit_and_hits_only_its_prefix():
    faults = Faults([Fault.parse("slow:1:2")], prefix="a/")
    assert [faults.next(rid) for rid in ("b/1", "a/1", "a/2", "a/3")] == [None, FaultKind.SLOW, FaultKind.SLOW, None]


@pytest.mark.parametrize("text", ["explode:1", "slow:2", "slow:x"])
def test_an_unknown_fault_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011
        Fault.parse(text)


# the contract


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/generate", {"input_ids": []}, "input_ids"),
        ("/generate", {"input_ids": [1], "grammar": "x"}, "grammar"),
        ("/generate", {"input_ids": [1] * 250, "sampling_params": {"max_new_tokens": 8}}, "context"),
        ("/generate", {"input_ids": [1], "lora_path": "main-0-5"}, "not loaded"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, "no adapter folder"),
        ("/unload_lora_adapter", {"lora_name": "a"}, "not loaded"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "no model folder"),
        ("/pause_generation", {"mode": "nap"}, "nap"),
        ("/abort_request", {}, "rid"),
    ],
)
def test_what_the_caller_can_mend_is_a_400_that_says_so(path, body, part, http):
    reply = http.post(path, json=body)
    assert reply.status_code == 400
    assert part in reply.json()["error"]["message"]


def test_an_unknown_route_is_a_404(http):
    assert http.get("/nothing").status_code == http.post("/nothing", json={}).status_code == 404


def test_only_health_is_open_without_the_key(server):
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        assert client.post("/generate", json={"input_ids": [1]}).status_code == 401


def test_a_streamed_reply_ends_with_the_whole_one(tmp_path, qwen3):
    script = make_script(tmp_path, *REPLIES)
    server = Server(tmp_path, qwen3, "--script", str(script), "--token-delay-s", "0.001")
    try:
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as client:
            whole = generate(client, [1, 2], 0)
            body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8, "sampling_seed": 0}, "stream": True}
            lines = [line for line in client.post("/generate", json=body).text.splitlines() if line]
    finally:
        server.close()
    assert lines[-1] == "data: [DONE]"
    replies = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [r["output_ids"] for r in replies] == [whole["output_ids"][: i + 1] for i in range(len(replies))]
    assert replies[-1]["output_ids"] == whole["output_ids"]


def test_paused_requests_go_on_when_continued(http):
    http.post("/pause_generation", json={"mode": "in_place"})
    assert http.get("/ready").status_code == 503
    with pytest.raises(httpx.ReadTimeout):
        http.post("/generate", json={"input_ids": [1]}, timeout=0.2)
    http.post("/continue_generation", json={})
    assert generate(http, [1, 2], 0)["output_ids"]


# the process


def start(*args, stdin=subprocess.DEVNULL):
    command = [sys.executable, "-m", "claw_train.engine.scripted", *args]
    return subprocess.run(command, stdin=stdin, capture_output=True, text=True, timeout=60)


def test_it_ends_with_its_parent(tmp_path, qwen3):
    server = Server(tmp_path, qwen3)
    server.close()
    assert server.process.returncode is not None


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("--port", "{taken}"), "cannot be used"),
        (("--script", "/nowhere.json"), "unreadable"),
        (("--host", "0.0.0.0"), "set a key"),
    ],
)
def test_a_bad_start_is_one_line_and_exit_code_2(args, part, server, qwen3):
    args = [a.format(taken=server.port) for a in args]
    reader, writer = os.pipe()
    done = start("--model", str(qwen3), *args, stdin=reader)
    os.close(writer)
    os.close(reader)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert part in done.stderr


def test_texts_without_a_tokenizer_are_refused(tmp_path: Path):
    with pytest.raises((ConfigError, ModelError)):
        Script.load(None, tmp_path)


def test_the_torch_free_parts_import_no_torch():
    code = (
        "import sys, claw_train.engine.scripted, claw_train.serving.client, claw_train.serving.render, "
        "claw_train.models; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
