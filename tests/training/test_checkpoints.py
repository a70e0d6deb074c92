"""Checkpoints resume exactly, are whole or not there, and belong to one model; weights load where they must."""

import json
import resource
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from claw_train.errors import ConfigError, TrainerError
from claw_train.training.folders import latest_checkpoint, list_checkpoints, next_lineage, read_checkpoint
from claw_train.training.packing import pack, strands
from claw_train.training.ranks import Ranks
from claw_train.training.state import sha256
from claw_train.training.trainer import Trainer
from claw_train.types import Version, WeightKind


def started(spec, checkpoint: Path | None = None, lineage: int = 0) -> Trainer:
    trainer = Trainer(spec, Ranks())
    trainer.start(checkpoint, lineage)
    return trainer


def moments(trainer: Trainer) -> list[torch.Tensor]:
    states = [trainer._optimizer.state[p] for p in trainer._policy.trainable().values()]
    return [state[kind] for state in states for kind in ("step", "exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("keys", [{"kind": "lora"}, {"kind": "full"}, {"kind": "lora", "minibatches": 2}])
def test_a_reload_goes_on_exactly(keys: dict[str, object], qwen3, samples, batch_of, spec_of, tmp_path):
    whole = started(spec_of(qwen3, run_dir=tmp_path / "whole", **keys))
    for step in (1, 2):
        whole.step(batch_of(samples, step))
    checkpoint = latest_checkpoint(tmp_path / "whole")
    assert checkpoint is not None
    resumed = started(spec_of(qwen3, run_dir=tmp_path / "whole", **keys), checkpoint.path, 1)
    want, got = (
        whole._train(batch_of(samples, 3), whole._check(batch_of(samples, 3))),
        resumed.step(batch_of(samples, 3)),
    )
    assert got.metrics["grad_norm"] == want[1]
    mine, theirs = resumed._policy.trainable(), whole._policy.trainable()
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert all(torch.equal(a, b) for a, b in zip(moments(resumed), moments(whole), strict=True))


def test_a_load_starts_a_lineage_and_publishes_under_it(qwen3, samples, batch_of, spec_of, tmp_path):
    spec = spec_of(qwen3)
    first = started(spec).step(batch_of(samples))
    assert first.checkpoint is not None
    trainer = Trainer(spec, Ranks())
    begun = trainer.start(Path(first.checkpoint), 3)
    assert begun.version == Version("main", 3, 1)
    assert begun.weights is not None
    assert begun.weights.version == begun.version
    assert begun.weights.checksum == first.weights.checksum
    assert begun.weights.path != first.weights.path


def test_loading_an_earlier_checkpoint_ends_the_later_ones(qwen3, samples, batch_of, spec_of, tmp_path):
    spec = spec_of(qwen3)
    trainer = started(spec)
    reports = [trainer.step(batch_of(samples, step)) for step in (1, 2)]
    trainer.start(Path(reports[0].checkpoint), 1)
    latest = latest_checkpoint(tmp_path / "run")
    assert latest is not None
    assert latest.step == 1
    assert trainer.step(batch_of(samples, 2)).weights.version == Version("main", 1, 2)


@pytest.mark.parametrize("key", ["lora_rank", "lora_alpha", "kind", "lora_targets"])
def test_a_checkpoint_of_another_configuration_is_refused(key: str, qwen3, samples, batch_of, spec_of, tmp_path):
    report = started(spec_of(qwen3)).step(batch_of(samples))
    changed = {"lora_rank": 2, "lora_alpha": 3, "kind": "full", "lora_targets": ("q_proj",)}[key]
    trainer = Trainer(spec_of(qwen3, run_dir=tmp_path / "other", **{key: changed}), Ranks())
    with pytest.raises(ConfigError, match=rf"step-000001/state\.json was written with {key}="):
        trainer.start(Path(report.checkpoint), 0)


def test_a_checkpoint_of_another_model_is_refused(qwen3, other_model, samples, batch_of, spec_of, tmp_path):
    report = started(spec_of(qwen3)).step(batch_of(samples))
    trainer = Trainer(spec_of(other_model, run_dir=tmp_path / "other"), Ranks())
    with pytest.raises(ConfigError, match=r"base_sha256.*use the run's own model"):
        trainer.start(Path(report.checkpoint), 0)


@pytest.mark.parametrize("damage", ["missing", "short", "no state", "half a state", "no identity"])
def test_a_damaged_checkpoint_is_passed_over_and_refused(damage: str, qwen3, samples, batch_of, spec_of, tmp_path):
    trainer = started(spec_of(qwen3))
    reports = [trainer.step(batch_of(samples, step)) for step in (1, 2)]
    newest = Path(reports[1].checkpoint)
    match damage:
        case "missing":
            (newest / "optimizer.safetensors").unlink()
        case "short":
            with (newest / "trainable.safetensors").open("r+b") as file:
                file.truncate(100)
        case "no state":
            (newest / "state.json").unlink()
        case "no identity":
            state = newest / "state.json"
            state.write_text(json.dumps({k: v for k, v in json.loads(state.read_text()).items() if k != "identity"}))
        case _:
            (newest / "state.json").write_text('{"step": 2, "ver')
    latest = latest_checkpoint(tmp_path / "run")
    assert latest is not None
    assert latest.step == 1
    with pytest.raises(ConfigError, match="step-000002"):
        read_checkpoint(newest)


def test_a_checkpoint_without_figures_is_read(qwen3, batch_of, spec_of):
    report = started(spec_of(qwen3)).step(batch_of([]))
    file = Path(report.checkpoint) / "state.json"
    state = json.loads(file.read_text())
    del state["metrics"]
    file.write_text(json.dumps(state))
    assert read_checkpoint(Path(report.checkpoint)).metrics == {}
    assert started(spec_of(qwen3), Path(report.checkpoint), 1)._progress.metrics == {}


def test_a_run_without_checkpoints_has_no_latest(tmp_path):
    assert latest_checkpoint(tmp_path / "nothing") is None
    (tmp_path / "checkpoints" / ".tmp-step-000007").mkdir(parents=True)
    assert latest_checkpoint(tmp_path) is None


def test_a_full_disk_leaves_the_old_checkpoint_and_stops_the_trainer(qwen3, samples, batch_of, spec_of, tmp_path):
    spec = spec_of(qwen3)
    trainer = started(spec)
    trainer.step(batch_of(samples))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # the kernel refuses to grow any file beyond this, as a full disk would
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(TrainerError, match=r"step-000002.* cannot be written"):
            trainer.step(batch_of(samples, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [c.step for c in list_checkpoints(tmp_path / "run")] == [1]
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-step*"))
    assert [p.name for p in (tmp_path / "run" / "weights").iterdir()] == ["main-0-1"]
    with pytest.raises(TrainerError, match="start it from its last checkpoint"):
        trainer.step(batch_of(samples, 2))
    latest = latest_checkpoint(tmp_path / "run")
    assert latest is not None
    trainer.start(latest.path, 1)
    assert trainer.step(batch_of(samples, 2)).step == 2


@pytest.mark.parametrize(
    ("checkpoints", "staleness", "weights"), [(1, 0, [5, 6]), (1, 2, [3, 4, 5, 6]), (3, 0, [4, 5, 6])]
)
def test_only_the_newest_folders_stay(
    checkpoints: int, staleness: int, weights: list[int], qwen3, batch_of, spec_of, tmp_path
):
    trainer = started(spec_of(qwen3, keep_checkpoints=checkpoints, max_staleness=staleness))
    for step in range(1, 7):
        trainer.step(batch_of([], step))
    assert [c.step for c in list_checkpoints(tmp_path / "run")] == list(range(7 - checkpoints, 7))
    # the engine may load a folder as late as its slots let the trainer run ahead
    assert sorted(p.name for p in (tmp_path / "run" / "weights").iterdir()) == [f"main-0-{step}" for step in weights]


def test_leftovers_of_an_interrupted_writer_are_removed(qwen3, spec_of, tmp_path):
    left = tmp_path / "run" / "weights" / ".tmp-main-0-1"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    started(spec_of(qwen3))
    assert not left.exists()


def test_full_checkpoints_come_by_steps_and_at_the_end(qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3, kind="full", checkpoint_every_steps=2, steps=5))
    written = [trainer.step(batch_of(samples, step)).checkpoint is not None for step in range(1, 6)]
    assert written == [False, True, False, True, True]


def test_full_checkpoints_come_by_minutes_too(qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3, kind="full", checkpoint_every_steps=100, checkpoint_every_minutes=1e-6))
    assert trainer.step(batch_of(samples)).checkpoint is not None


def test_a_lineage_is_never_given_twice(tmp_path):
    assert [next_lineage(tmp_path) for _ in range(3)] == [0, 1, 2]


def test_an_unreadable_lineage_counter_is_no_fresh_start(tmp_path):
    next_lineage(tmp_path)
    (tmp_path / "checkpoints" / "lineage").write_text("?")
    with pytest.raises(TrainerError, match="lineage"):
        next_lineage(tmp_path)


def test_nothing_in_a_checkpoint_is_pickled(qwen3, samples, batch_of, spec_of):
    report = started(spec_of(qwen3)).step(batch_of(samples))
    for file in Path(report.checkpoint).iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            assert file.suffix == ".safetensors"
            load_file(file)


def trainer_logprobs(trainer: Trainer, sample) -> torch.Tensor:
    (row,) = pack([s for s in strands([sample], zero_advantage=True) if s], 1000)
    with torch.no_grad():
        return trainer._policy.scorer(row)[0]


def plain_logprobs(model, sample) -> torch.Tensor:
    with torch.no_grad():
        logprobs = model(torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
    return torch.stack([logprobs[i - 1, t] for i, t in enumerate(sample.token_ids) if sample.loss_mask[i]])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_published_adapter_loads_into_peft(llama, samples, batch_of, spec_of):
    trainer = started(spec_of(llama, lora_targets=("q_proj", "down_proj")))
    report = trainer.step(batch_of(samples))
    assert report.weights.kind is WeightKind.LORA
    base = AutoModelForCausalLM.from_pretrained(llama)
    model = PeftModel.from_pretrained(base, report.weights.path)
    torch.testing.assert_close(
        plain_logprobs(model, samples[0]), trainer_logprobs(trainer, samples[0]), rtol=0, atol=1e-5
    )
    assert report.weights.checksum == sha256(Path(report.weights.path) / "adapter_model.safetensors")


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_published_full_weights_load_into_transformers(model: str, samples, batch_of, spec_of, request):
    trainer = started(spec_of(request.getfixturevalue(model), kind="full", freeze_embeddings=False))
    report = trainer.step(batch_of(samples))
    assert report.weights.kind is WeightKind.FULL
    loaded = AutoModelForCausalLM.from_pretrained(report.weights.path, dtype="auto")
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(
        plain_logprobs(loaded, samples[0]), trainer_logprobs(trainer, samples[0]), rtol=0, atol=1e-5
    )
    assert report.weights.checksum == sha256(Path(report.weights.path) / "model.safetensors")


def test_full_weights_are_in_the_engines_type(qwen3, samples, batch_of, spec_of):
    report = started(spec_of(qwen3, kind="full", weights_dtype="bfloat16")).step(batch_of(samples))
    stored = load_file(Path(report.weights.path) / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(report.weights.path, dtype="auto").dtype == torch.bfloat16


def test_the_same_seed_gives_the_same_adapters(qwen3, spec_of, tmp_path):
    one, two, three = (
        started(spec_of(qwen3, seed=s, run_dir=tmp_path / str(i)))._policy.trainable() for i, s in enumerate((0, 0, 1))
    )
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert not all(torch.equal(one[n], three[n]) for n in one)
