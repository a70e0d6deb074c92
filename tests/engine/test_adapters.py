"""LoRA adapters: computed as PEFT does, side by side, loaded and unloaded while serving."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.support import Reference, Server, make_adapter, prompt


@pytest.fixture(scope="module")
def adapters(server: Server, tmp_path_factory: pytest.TempPathFactory):
    """Two adapters, loaded for this module."""
    root = tmp_path_factory.mktemp("adapters")
    folders = {
        "all-1": make_adapter(root / "a", 1),
        "attention-1": make_adapter(root / "b", 2, rank=2, targets=("self_attn.q_proj", "self_attn.v_proj")),
    }
    for name, folder in folders.items():
        reply = server.ok("/load_lora_adapter", lora_name=name, lora_path=str(folder))
        assert name in reply["loaded_adapters"]
    yield folders
    for name in folders:
        assert name not in server.ok("/unload_lora_adapter", lora_name=name)["loaded_adapters"]


@pytest.mark.parametrize("name", ["all-1", "attention-1"])
def test_scores_under_an_adapter_are_those_of_peft(server, qwen3, adapters, name, reference):
    ids = prompt(200, 60)
    want = Reference(qwen3, adapters[name]).score(ids)
    assert (server.score(ids, lora_path=name) - want).abs().max() < 1e-4
    assert (want - reference.score(ids)).abs().max() > 0.5


def test_several_adapters_in_one_batch_equal_each_alone(server, adapters):
    names = ["all-1", None, "attention-1", "all-1", "attention-1", None]
    prompts = [prompt(210 + i, 10 + 9 * i) for i in range(6)]
    options = {"max_new_tokens": 16, "sampling_seed": 2, "ignore_eos": True}
    alone = [server.generate(p, lora_path=n, **options) for p, n in zip(prompts, names, strict=True)]
    server.ok("/flush_cache")
    together = server.generate(prompts, lora_path=names, **options)
    for name, a, b in zip(names, alone, together, strict=True):
        assert a["output_ids"] == b["output_ids"]
        assert b["meta_info"]["weight_version"] == (name or "base")
        assert b["meta_info"]["weight_versions"] == [{"version": name or "base", "start": 0, "end": 16}]


def test_prefixes_are_not_shared_between_adapters(server, adapters):
    ids = prompt(220, 64)
    server.generate(ids, max_new_tokens=1)
    assert server.generate(ids, max_new_tokens=1, lora_path="all-1")["meta_info"]["cached_tokens"] == 0
    assert server.generate(ids, max_new_tokens=1, lora_path="all-1")["meta_info"]["cached_tokens"] == 63
    assert server.generate(ids, max_new_tokens=1, lora_path="attention-1")["meta_info"]["cached_tokens"] == 0


def test_a_name_is_never_given_to_other_weights(server, adapters):
    reply = server.post("/load_lora_adapter", lora_name="all-1", lora_path=str(adapters["attention-1"]))
    assert reply.status_code == 400
    assert "already loaded" in reply.json()["error_message"]


def test_loading_and_unloading_disturbs_no_running_request(server, tmp_path):
    options = {"max_new_tokens": 120, "sampling_seed": 3, "ignore_eos": True}
    folder = make_adapter(tmp_path / "a", 5)
    ids = prompt(230, 20)
    server.ok("/load_lora_adapter", lora_name="gone-1", lora_path=str(folder))
    plain = server.generate(ids, lora_path="gone-1", **options)
    events = server.events(ids, lora_path="gone-1", **options)
    next(events)
    server.ok("/load_lora_adapter", lora_name="other-1", lora_path=str(make_adapter(tmp_path / "b", 6)))
    server.ok("/unload_lora_adapter", lora_name="gone-1")
    refused = server.post("/generate", input_ids=ids, lora_path="gone-1")
    assert refused.status_code == 400
    last = list(events)[-1]
    assert last["output_ids"] == plain["output_ids"]
    server.ok("/load_lora_adapter", lora_name="gone-1", lora_path=str(make_adapter(tmp_path / "c", 7)))
    fresh = server.generate([*ids, *plain["output_ids"]], max_new_tokens=1, lora_path="gone-1")
    assert fresh["meta_info"]["cached_tokens"] == 0
    for name in ("other-1", "gone-1"):
        server.ok("/unload_lora_adapter", lora_name=name)


def test_an_adapter_with_numbers_that_are_not_finite_fails_its_requests_only(server, tmp_path):
    folder = make_adapter(tmp_path / "nan", 8)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({k: torch.full_like(v, float("nan")) for k, v in tensors.items()}, folder / "adapter_model.safetensors")
    server.ok("/load_lora_adapter", lora_name="nan-1", lora_path=str(folder))
    ids = prompt(240, 40)
    before = server.score(ids)
    reply = server.post("/generate", input_ids=ids, lora_path="nan-1", sampling_params={"max_new_tokens": 4})
    assert reply.status_code == 500
    assert "not finite" in reply.json()["error"]["message"]
    server.ok("/unload_lora_adapter", lora_name="nan-1")
    assert torch.equal(server.score(ids), before)
    assert all(t[0] > -100 for t in server.generate(ids, max_new_tokens=20)["meta_info"]["output_token_logprobs"])


def _rank(folder):
    make_adapter(folder, 1, rank=65)


def _dora(folder):
    make_adapter(folder, 1)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))


def _too_deep(folder):
    make_adapter(folder, 1, layers=4)


def _no_tensors(folder):
    make_adapter(folder, 1)
    (folder / "adapter_model.safetensors").unlink()


def _damaged(folder):
    make_adapter(folder, 1)
    (folder / "adapter_model.safetensors").write_bytes(b"\x01" * 50)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder: None, "adapter_config.json"),
        (_rank, "--max-lora-rank 64"),
        (_dora, "use_dora"),
        (_too_deep, "layers.3"),
        (_no_tensors, "adapter_model"),
        (_damaged, "cannot be read"),
    ],
)
def test_an_unfit_folder_is_refused_with_the_reason(server, tmp_path, spoil, named):
    spoil(tmp_path / "a")
    reply = server.post("/load_lora_adapter", lora_name="unfit-1", lora_path=str(tmp_path / "a"))
    assert reply.status_code == 400
    assert named in reply.json()["error_message"]
    assert "unfit-1" not in server.info()["loaded_adapters"]
