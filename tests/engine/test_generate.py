"""What one request gets back."""

import json

import pytest
import torch

from tests.engine.support import EOS, Reference, Server, prompt


def test_greedy_reply_is_that_of_transformers(server, reference):
    ids = prompt(0, 40)
    reply = server.generate(ids, temperature=0, max_new_tokens=24, ignore_eos=True)
    for i, token in enumerate(reply["output_ids"]):
        row = reference.logprobs(ids + reply["output_ids"][:i])[-1]
        assert row[token] > row.max() - 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_output_logprobs_are_those_after_temperature(server, reference, temperature):
    ids = prompt(1, 30)
    reply = server.generate(
        ids, temperature=temperature, max_new_tokens=30, top_k=20, sampling_seed=3, ignore_eos=True, top_logprobs_num=4
    )
    rows = reference.logprobs(ids + reply["output_ids"], temperature)[len(ids) - 1 : -1]
    got = torch.tensor([t[0] for t in reply["meta_info"]["output_token_logprobs"]])
    want = rows.gather(1, torch.tensor(reply["output_ids"])[:, None])[:, 0]
    assert (got - want).abs().max() < 1e-4
    for row, top in zip(rows, reply["meta_info"]["output_top_logprobs"], strict=True):
        assert torch.allclose(torch.tensor([t[0] for t in top]), row.topk(4).values, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_scores_are_those_of_transformers(kind, server, request, tmp_path):
    folder = request.getfixturevalue(kind)
    ids = prompt(2, 600)  # several chunks of prompt
    want = Reference(folder).logprobs(ids)
    running = server if kind == "qwen3" else Server(tmp_path, folder)
    try:
        meta = running.generate(ids, max_new_tokens=0, logprob_start_len=0, top_logprobs_num=3)["meta_info"]
        assert meta["input_token_logprobs"][0] == [None, ids[0], None]
        assert meta["input_top_logprobs"][0] is None
        assert [t[1] for t in meta["input_token_logprobs"]] == ids
        got = torch.tensor([t[0] for t in meta["input_token_logprobs"][1:]])
        assert (got - want[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]).abs().max() < 1e-4
        top = torch.tensor([[t[0] for t in row] for row in meta["input_top_logprobs"][1:]])
        assert (top - want[:-1].topk(3).values).abs().max() < 1e-4
        assert meta["completion_tokens"] == 0
    finally:
        if running is not server:
            running.close()


def test_scores_start_where_asked(server):
    ids = prompt(3, 50)
    whole = server.generate(ids, max_new_tokens=0, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
    part = server.generate(ids, max_new_tokens=0, logprob_start_len=35)["meta_info"]["input_token_logprobs"]
    assert part[0] == [None, ids[35], None]
    assert [t[0] for t in part[1:]] == pytest.approx([t[0] for t in whole[36:]], abs=1e-5)


def test_meta_info_counts_tokens_and_names_the_weights(server):
    reply = server.generate(prompt(4, 21), max_new_tokens=5, ignore_eos=True, rid="turn/7")
    meta = reply["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("turn/7", 21, 5)
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["weight_version"] == "base"
    assert meta["weight_versions"] == [{"version": "base", "start": 0, "end": 5}]
    assert [t[1] for t in meta["output_token_logprobs"]] == reply["output_ids"]


def test_no_logprobs_unless_asked(server):
    reply = server.generate(prompt(4, 8), max_new_tokens=2, return_logprob=False)
    assert "output_token_logprobs" not in reply["meta_info"]


def forced(server, ids, seed=0):
    """A sampled reply to be cut by a later, equal request."""
    return server.generate(ids, max_new_tokens=30, ignore_eos=True, sampling_seed=seed)["output_ids"]


def test_a_stop_token_ends_the_reply_and_is_part_of_it(server):
    ids = prompt(5, 12)
    free = forced(server, ids)
    stop = free[10]
    first = free.index(stop)
    reply = server.generate(ids, max_new_tokens=30, sampling_seed=0, stop_token_ids=[stop], min_new_tokens=0)
    cut = next(i for i, t in enumerate(free) if t in (stop, EOS))
    assert reply["output_ids"] == free[: cut + 1]
    if cut == first:
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_the_end_token_ends_the_reply_even_as_the_last_one_allowed(server):
    ids = prompt(6, 12)
    for seed in range(300):
        free = forced(server, ids, seed)
        if EOS in free:
            break
    n = free.index(EOS) + 1
    reply = server.generate(ids, max_new_tokens=n, sampling_seed=seed)
    assert reply["output_ids"] == free[:n]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


def test_a_stop_string_is_cut_from_the_text_but_not_from_the_ids(server):
    ids = prompt(7, 12)
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 30, "sampling_seed": 0, "ignore_eos": True}}
    free = server.ok("/generate", **body)
    at = next(i for i in range(8, 25) if free["text"][i : i + 2].isascii() and free["text"][i : i + 2].isprintable())
    stop = free["text"][at : at + 2]
    body["sampling_params"]["stop"] = stop
    cut = server.ok("/generate", **body)
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert cut["text"] == free["text"][: free["text"].index(stop)]
    assert cut["output_ids"] == free["output_ids"][: len(cut["output_ids"])]
    body["sampling_params"]["no_stop_trim"] = True
    assert server.ok("/generate", **body)["text"].endswith(stop)


def test_min_new_tokens_keeps_end_tokens_away(server):
    ids = prompt(8, 10)
    everything = list(range(299))
    reply = server.generate(ids, max_new_tokens=12, min_new_tokens=6, stop_token_ids=everything)
    assert reply["meta_info"]["completion_tokens"] == 7
    assert set(reply["output_ids"][:6]) == {299}


def test_a_seed_fixes_the_tokens(server):
    ids = prompt(9, 20)
    replies = [forced(server, ids, seed) for seed in (5, 5, 6)]
    assert replies[0] == replies[1] != replies[2]


def test_top_k_one_is_greedy(server):
    ids = prompt(10, 20)
    greedy = server.generate(ids, temperature=0, max_new_tokens=16)["output_ids"]
    assert server.generate(ids, temperature=2.0, top_k=1, max_new_tokens=16)["output_ids"] == greedy


def test_top_p_draws_from_the_nucleus_only(server, reference):
    ids = prompt(11, 20)
    reply = server.generate(ids, temperature=1.5, top_p=0.5, max_new_tokens=40, ignore_eos=True)
    rows = reference.logprobs(ids + reply["output_ids"], 1.5)[len(ids) - 1 : -1].exp()
    for row, token in zip(rows, reply["output_ids"], strict=True):
        assert row[row > row[token]].sum() <= 0.5 + 1e-4


def test_sampling_follows_the_distribution(server, reference):
    ids = prompt(12, 10)
    p = reference.logprobs(ids)[-1].exp()
    drawn = [r["output_ids"][0] for r in server.generate([ids] * 2000, max_new_tokens=1, return_logprob=False)]
    counts = torch.bincount(torch.tensor(drawn), minlength=len(p)).float()
    for token in p.topk(5).indices.tolist():
        assert abs(counts[token] / 2000 - p[token]) < 5 * (p[token] * (1 - p[token]) / 2000).sqrt()


def test_a_batch_is_answered_in_order_with_its_own_options(server):
    prompts = [prompt(i, 5 + i) for i in range(4)]
    sampling = [{"max_new_tokens": i + 1, "ignore_eos": True} for i in range(4)]
    replies = server.ok("/generate", input_ids=prompts, sampling_params=sampling, rid=[f"r{i}" for i in range(4)])
    assert [r["meta_info"]["id"] for r in replies] == ["r0", "r1", "r2", "r3"]
    assert [r["meta_info"]["prompt_tokens"] for r in replies] == [5, 6, 7, 8]
    assert [len(r["output_ids"]) for r in replies] == [1, 2, 3, 4]


def test_text_is_encoded_and_prompt_ids_come_back(server):
    reply = server.ok("/generate", text="hi", sampling_params={"max_new_tokens": 1}, return_prompt_token_ids=True)
    assert reply["meta_info"]["prompt_tokens"] == 2
    again = server.ok("/generate", input_ids=reply["prompt_token_ids"], sampling_params={"max_new_tokens": 1})
    assert again["meta_info"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling_params": {"repetition_penalty": 1.2}}, "repetition_penalty"),
        ({"sampling_params": {"n": 2}}, "n is not supported"),
        ({"sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ({"sampling_params": {"temprature": 1.0}}, "temprature"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_new_tokens": 100000}}, "context length"),
        ({"sampling_params": {"min_new_tokens": 5, "max_new_tokens": 4}}, "min_new_tokens"),
        ({"sampling_params": {"stop_token_ids": [300]}}, "stop_token_ids"),
        ({"input_ids": [1, 300]}, "input_ids"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [[1], []]}, "empty"),
        ({"input_ids": None}, "input_ids or text"),
        ({"lora_path": "nobody"}, "nobody"),
        ({"return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ({"return_logprob": True, "top_logprobs_num": 301}, "top_logprobs_num"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"image_data": "x"}, "image_data"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server, change, named):
    reply = server.post("/generate", **({"input_ids": [1, 2]} | change))
    assert reply.status_code == 400
    assert named in reply.json()["error"]["message"]


def test_a_body_that_is_not_json_is_refused(server):
    reply = server.http.post("/generate", content=b"{", headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert json.loads(reply.text)["error"]["message"]
