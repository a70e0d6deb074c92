"""Whole weights from disk while requests run, and pauses."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.support import Reference, Server, prompt


@pytest.fixture(scope="module")
def changing(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose weights change."""
    running = Server(tmp_path_factory.mktemp("changing"), qwen3, "--max-total-tokens", "8000")
    yield running
    running.close()


@pytest.fixture
def own_server(changing: Server, qwen3: Path) -> Server:
    """The same, serving the first weights as v1."""
    update(changing, qwen3, "v1")
    return changing


def update(server, folder, version: str, **options):
    return server.ok("/update_weights_from_disk", model_path=str(folder), weight_version=version, **options)


def test_a_running_request_goes_on_and_carries_both_versions(own_server, qwen3_later):
    ids = prompt(300, 40)
    versions = []
    last = {}
    events = own_server.events(ids, max_new_tokens=3000, ignore_eos=True, sampling_seed=1)
    for event in events:
        if not versions:
            update(own_server, qwen3_later, "v2")
        last = event
        versions = event["meta_info"]["weight_versions"]
        if len(versions) == 2 and versions[1]["end"] - versions[1]["start"] > 5:
            break
    events.close()
    assert [v["version"] for v in versions] == ["v1", "v2"]
    assert versions[0]["start"] == 0
    assert versions[0]["end"] == versions[1]["start"] > 0
    assert versions[1]["end"] == last["meta_info"]["completion_tokens"]


def test_new_requests_use_the_new_weights_and_none_of_the_old_prefixes(own_server, qwen3, qwen3_later):
    ids = prompt(301, 64)
    own_server.generate(ids, max_new_tokens=4)
    assert own_server.generate(ids, max_new_tokens=1)["meta_info"]["cached_tokens"] == 63
    update(own_server, qwen3_later, "v2", flush_cache=False)
    meta = own_server.generate(ids, max_new_tokens=1)["meta_info"]
    assert (meta["cached_tokens"], meta["weight_version"]) == (0, "v2")
    assert (own_server.score(ids) - Reference(qwen3_later).score(ids)).abs().max() < 1e-4
    update(own_server, qwen3, "v3")
    assert (own_server.score(ids) - Reference(qwen3).score(ids)).abs().max() < 1e-4


def test_a_request_of_two_versions_leaves_no_prefix_behind(own_server, qwen3_later):
    ids = prompt(302, 48)
    events = own_server.events(ids, max_new_tokens=400, ignore_eos=True)
    next(events)
    own_server.ok("/pause_generation", mode="in_place")
    update(own_server, qwen3_later, "v2", flush_cache=False)
    own_server.ok("/continue_generation")
    last = list(events)[-1]
    assert [v["version"] for v in last["meta_info"]["weight_versions"]] == ["v1", "v2"]
    assert own_server.generate(ids, max_new_tokens=1)["meta_info"]["cached_tokens"] == 0


def test_a_retracted_request_computes_everything_under_the_new_weights(own_server, qwen3_later):
    ids = prompt(303, 48)
    events = own_server.events(ids, max_new_tokens=200, ignore_eos=True, sampling_seed=3)
    next(events)
    own_server.ok("/pause_generation", mode="retract")
    update(own_server, qwen3_later, "v2")
    own_server.ok("/continue_generation")
    last = list(events)[-1]
    second = last["meta_info"]["weight_versions"][1]
    rows = Reference(qwen3_later).score(ids + last["output_ids"])[len(ids) - 1 :]
    got = torch.tensor([t[0] for t in last["meta_info"]["output_token_logprobs"]])
    assert second["end"] == 200
    assert (rows - got)[second["start"] :].abs().max() < 1e-4


def test_an_update_may_abort_what_runs(own_server, qwen3_later):
    events = own_server.events(prompt(304, 10), max_new_tokens=3000, ignore_eos=True)
    next(events)
    update(own_server, qwen3_later, "v2", abort_all_requests=True)
    last = list(events)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["weight_versions"][-1]["version"] == "v1"


@pytest.mark.parametrize("fault", ["missing", "other model", "damaged"])
def test_a_bad_folder_leaves_the_old_weights_in_place(server, qwen3, llama, tmp_path, fault):
    ids = prompt(305, 30)
    before = server.score(ids)
    folder = tmp_path / "weights"
    if fault != "missing":
        shutil.copytree(llama if fault == "other model" else qwen3, folder)
    if fault == "damaged":
        (folder / "model.safetensors").write_bytes(b"\0" * 100)
    reply = server.post("/update_weights_from_disk", model_path=str(folder), weight_version="v9")
    assert reply.status_code == 400
    assert reply.json()["success"] is False
    assert server.info()["weight_version"] == "base"
    assert torch.equal(server.score(ids), before)


def test_nothing_is_drawn_while_paused(server):
    events = server.events(prompt(306, 10), max_new_tokens=200, ignore_eos=True)
    next(events)
    server.ok("/pause_generation", mode="in_place")
    drawn = server.info()["output_tokens"]
    assert server.http.get("/ready").status_code == 503
    server.ok("/flush_cache")
    assert server.info()["output_tokens"] == drawn
    server.ok("/continue_generation")
    assert server.http.get("/ready").status_code == 200
    assert list(events)[-1]["meta_info"]["completion_tokens"] == 200


def test_a_pause_may_abort_what_runs_and_new_requests_wait(server):
    events = server.events(prompt(307, 10), max_new_tokens=3000, ignore_eos=True)
    next(events)
    server.ok("/pause_generation")
    last = list(events)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["finish_reason"]["status_code"] is None
    assert len(last["output_ids"]) == last["meta_info"]["completion_tokens"] > 0
    server.ok("/continue_generation")
    assert server.generate(prompt(307, 10), max_new_tokens=3, ignore_eos=True)["meta_info"]["completion_tokens"] == 3
