"""Requests beside one another: what they share and what they must not change for one another."""

from concurrent.futures import ThreadPoolExecutor, wait

import httpx
import torch

from tests.engine.support import Server, prompt


def logprobs(reply) -> torch.Tensor:
    return torch.tensor([t[0] for t in reply["meta_info"]["output_token_logprobs"]])


def test_a_reply_does_not_depend_on_its_company(server):
    prompts = [prompt(100 + i, 5 + 17 * i) for i in range(12)]
    options = {"max_new_tokens": 20, "sampling_seed": 4, "ignore_eos": True}
    alone = [server.generate(p, **options) for p in prompts]
    server.ok("/flush_cache")
    together = server.generate(prompts, **options)
    for a, b in zip(alone, together, strict=True):
        assert a["output_ids"] == b["output_ids"]
        assert torch.allclose(logprobs(a), logprobs(b), atol=1e-5)


def test_a_reused_prefix_changes_nothing(server):
    ids = prompt(120, 100)
    server.ok("/flush_cache")
    options = {"max_new_tokens": 20, "sampling_seed": 1, "ignore_eos": True}
    first, second = (server.generate(ids, **options) for _ in range(2))
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == 99  # all but the last token
    assert first["output_ids"] == second["output_ids"]
    assert torch.allclose(logprobs(first), logprobs(second), atol=1e-5)


def test_the_next_turn_reuses_prompt_and_reply(server):
    ids = prompt(121, 64)
    reply = server.generate(ids, max_new_tokens=32, ignore_eos=True)["output_ids"]
    following = [*ids, *reply, *prompt(122, 10)]
    meta = server.generate(following, max_new_tokens=1)["meta_info"]
    assert meta["cached_tokens"] >= 64 + 32 - 16


def test_a_group_computes_its_common_prompt_once(server):
    ids = prompt(123, 160)
    server.ok("/flush_cache")
    before = server.info()["prompt_tokens"]
    replies = server.generate([ids] * 8, max_new_tokens=4, return_logprob=False)
    assert sum(r["meta_info"]["cached_tokens"] >= 144 for r in replies) == 7
    assert server.info()["prompt_tokens"] - before < 160 + 7 * 17


def test_scores_do_not_come_from_a_kept_prefix(server):
    ids = prompt(124, 80)
    cold = server.score(ids)
    assert torch.allclose(server.score(ids), cold, atol=1e-6)
    late = server.generate(ids, max_new_tokens=0, logprob_start_len=64)["meta_info"]
    assert late["cached_tokens"] == 64
    assert torch.allclose(torch.tensor([t[0] for t in late["input_token_logprobs"][1:]]), cold[64:], atol=1e-5)


def test_a_retracted_reply_goes_on_as_if_nothing_had_been(server):
    ids = prompt(125, 50)
    options = {"max_new_tokens": 120, "sampling_seed": 9, "ignore_eos": True}
    plain = server.generate(ids, **options)
    events = server.events(ids, **options)
    next(events)
    server.ok("/pause_generation", mode="retract")
    assert server.info()["num_running"] == 0
    server.ok("/flush_cache")
    server.ok("/continue_generation")
    last = list(events)[-1]
    assert last["meta_info"]["num_retractions"] == 1
    assert last["output_ids"] == plain["output_ids"]


def test_memory_stays_inside_its_bound_and_everybody_is_served(qwen3, tmp_path):
    bound = 600
    server = Server(tmp_path, qwen3, "--max-total-tokens", str(bound), "--max-running", "8")
    try:
        prompts = [prompt(i, 20 + 39 * i % 300) for i in range(20)]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.generate, prompts, max_new_tokens=16, ignore_eos=True)
            held = []
            with httpx.Client(base_url=server.url, headers=server.http.headers, timeout=30) as other:
                while not waiting.done():
                    info = other.get("/server_info").json()
                    held.append(info["row_tokens"] + info["prefix_tokens"])
                    wait([waiting], timeout=0.01)
        assert [len(r["output_ids"]) for r in waiting.result()] == [16] * 20
        assert max(held) <= bound
        assert max(held) > bound // 2
        refused = server.post("/generate", input_ids=prompt(0, 580), sampling_params={"max_new_tokens": 30})
        assert refused.status_code == 400
        assert "max_total_tokens" in refused.json()["error"]["message"]
    finally:
        server.close()


def test_higher_priority_goes_first(qwen3, tmp_path):
    server = Server(tmp_path, qwen3, "--max-running", "1")
    try:
        server.ok("/pause_generation", mode="in_place")
        order: list[str] = []

        def ask(name: str, priority: int) -> None:
            server.generate(prompt(1, 4), max_new_tokens=40, ignore_eos=True, priority=priority)
            order.append(name)

        with ThreadPoolExecutor(4) as pool:
            jobs = []
            for n, (name, priority) in enumerate([("first", 0), ("low", -1), ("high", 5), ("second", 0)]):
                jobs.append(pool.submit(ask, name, priority))
                server.wait(lambda info, n=n: info["num_waiting"] == n + 1, "queued")
            server.ok("/continue_generation")
        for job in jobs:
            job.result()
        assert order == ["high", "first", "second", "low"]
    finally:
        server.close()


def test_a_common_prefix_that_is_read_once_changes_nothing(server):
    first, second, odd = prompt(130, 300), prompt(131, 200), prompt(132, 90)
    prompts = [*[[*first, i] for i in range(8)], odd, *[[*second, i, i] for i in range(5)], first[:100]]
    options = {"max_new_tokens": 24, "sampling_seed": 4, "ignore_eos": True}
    server.ok("/flush_cache")
    alone = [server.generate(p, **options) for p in prompts]
    before = server.info()["shared_reads"]
    together = server.generate(prompts, **options)
    assert server.info()["shared_reads"] > before
    for a, b in zip(alone, together, strict=True):
        assert a["output_ids"] == b["output_ids"]
        assert torch.allclose(logprobs(a), logprobs(b), atol=1e-5)
