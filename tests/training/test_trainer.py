"""One rank: what a step changes, what it must not change, and when it refuses."""

import dataclasses
import math

import pytest
import torch

from claw_train.errors import GuardError, TrainerError
from claw_train.training.packing import pack, strands
from claw_train.training.ranks import Ranks
from claw_train.training.trainer import Trainer
from claw_train.types import Version


def started(spec) -> Trainer:
    trainer = Trainer(spec, Ranks())
    trainer.start(None, 0)
    return trainer


def logprobs(trainer: Trainer, samples) -> torch.Tensor:
    """By sample: mean log-probability of its trained tokens."""
    found = []
    for part in strands(samples, zero_advantage=True):
        assert part is not None
        (row,) = pack([part], 1000)
        with torch.no_grad():
            found.append(trainer._policy.scorer(row)[0].mean())
    return torch.stack(found)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer._policy.trainable().items()}


def honest(trainer: Trainer, samples, version: Version):
    """The samples as if the trainer's weights had sampled them."""
    result = []
    for sample in samples:
        (row,) = pack([s for s in strands([sample], zero_advantage=True) if s], 1000)
        with torch.no_grad():
            values = trainer._policy.scorer(row)[0].tolist()
        by_token = dict(zip(row.item_token.tolist(), values, strict=True))
        places = [i for i, m in enumerate(sample.loss_mask) if m]
        behaviour = [0.0] * len(sample.token_ids)
        for k, place in enumerate(places):
            behaviour[place] = by_token[k]
        versions = tuple(version if m else None for m in sample.loss_mask)
        result.append(dataclasses.replace(sample, behaviour_logprobs=tuple(behaviour), versions=versions))
    return result


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_it_learns(kind: str, qwen3, sample, batch_of, spec_of):
    trainer = started(spec_of(qwen3, kind=kind, kl_coef=0.0))
    group = [sample([1, 2, 3, 10 + i, 20 + i, 4], [(3, 6)], advantage=1.0 if i % 2 else -1.0) for i in range(8)]
    before = logprobs(trainer, group)
    for step in range(1, 6):
        trainer.step(batch_of(honest(trainer, group, Version("main", 0, step - 1)), step))
    change = logprobs(trainer, group) - before
    assert (change[1::2] > 0.05).all()
    assert (change[::2] < -0.05).all()


def test_kl_to_the_base_is_nothing_at_first_and_grows(qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3, kl_coef=0.1))
    first = trainer.step(batch_of(samples, 1))
    second = trainer.step(batch_of(samples, 2))
    assert first.metrics["kl"] == 0.0
    assert second.metrics["kl"] > 1e-4


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_reference_stays_the_base(kind: str, qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3, kind=kind))
    (row,) = pack([s for s in strands(samples, zero_advantage=True) if s], 1000)
    reference = trainer._policy.reference
    assert reference is not None
    before = trainer._policy.scorer(row)[0].detach()
    trainer.step(batch_of(samples))
    torch.testing.assert_close(reference(row)[0], before, rtol=0, atol=0)
    assert not torch.equal(trainer._policy.scorer(row)[0], before)


def test_a_lora_reference_takes_no_memory_of_its_own(qwen3, spec_of):
    policy = started(spec_of(qwen3))._policy
    assert policy.reference is not None
    base = {p.data_ptr() for p in policy.causal.parameters()}
    assert {p.data_ptr() for p in policy.reference.parameters()} <= base


def test_without_a_kl_weight_there_is_no_reference(qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3, kl_coef=0.0))
    assert trainer._policy.reference is None
    assert "kl" not in trainer.step(batch_of(samples)).metrics


def test_a_strong_kl_weight_holds_the_policy(qwen3, samples, batch_of, spec_of, tmp_path):
    moved = []
    for coefficient in (0.0, 50.0):
        trainer = started(spec_of(qwen3, kl_coef=coefficient, run_dir=tmp_path / str(coefficient), lr=3e-3))
        before = logprobs(trainer, samples)
        for step in range(1, 7):
            trainer.step(batch_of(samples, step))
        moved.append(float((logprobs(trainer, samples) - before).abs().mean()))
    assert moved[1] < 0.5 * moved[0]


def test_frozen_embeddings_stay(qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3, kind="full", freeze_embeddings=True))
    embedding = trainer._policy.causal.get_input_embeddings().weight
    before = embedding.detach().clone()
    trainer.step(batch_of(samples))
    assert torch.equal(embedding, before)


def test_free_embeddings_train_through_both_uses(qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3, kind="full", freeze_embeddings=False, weight_decay=0.0))
    embedding = trainer._policy.causal.get_input_embeddings().weight
    before = embedding.detach().clone()
    trainer.step(batch_of(samples))
    # id 3 is in no sample: only the output matrix can move it
    assert not torch.equal(embedding[3], before[3])


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_smaller_rows_change_nothing(kind: str, qwen3, samples, batch_of, spec_of, tmp_path):
    results = []
    for bound in (1000, 14):
        trainer = started(spec_of(qwen3, kind=kind, tokens_per_micro_batch=bound, run_dir=tmp_path / str(bound)))
        report = trainer.step(batch_of(samples))
        results.append((report.metrics, {n: p.grad for n, p in trainer._policy.trainable().items()}))
    (whole, whole_grad), (parts, parts_grad) = results
    assert parts["rows"] > whole["rows"]
    for name in ("loss", "policy_loss", "entropy", "grad_norm", "drift_tokens", "mismatch_k3", "mismatch_max_abs"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name
    for name, grad in whole_grad.items():
        torch.testing.assert_close(parts_grad[name], grad, rtol=1e-4, atol=1e-6)


def test_leaving_out_tokens_without_advantage_changes_nothing(qwen3, sample, batch_of, spec_of, tmp_path):
    group = [sample([1, 2, 3, 10 + i], [(3, 4)], advantage=a) for i, a in enumerate([1.0, 0.0, -1.0, 0.0])]
    trainer = started(spec_of(qwen3, kl_coef=0.0, run_dir=tmp_path / "a"))
    report = trainer.step(batch_of(group))
    assert report.metrics["computed_tokens"] == 2
    # a vanishing KL weight forces the full computation
    full = started(spec_of(qwen3, kl_coef=1e-12, run_dir=tmp_path / "b")).step(batch_of(group))
    assert full.metrics["computed_tokens"] == 4
    assert report.metrics["policy_loss"] == pytest.approx(full.metrics["policy_loss"], abs=1e-7)
    assert report.metrics["grad_norm"] == pytest.approx(full.metrics["grad_norm"], abs=1e-6)


def test_a_batch_without_any_advantage_still_makes_a_step(qwen3, sample, batch_of, spec_of):
    trainer = started(spec_of(qwen3, kl_coef=0.0))
    report = trainer.step(batch_of([sample([1, 2, 3], [(2, 3)], advantage=0.0)]))
    assert report.metrics["loss"] == 0.0
    assert report.metrics["grad_norm"] == 0.0
    assert report.weights.version == Version("main", 0, 1)


def test_the_second_minibatch_sees_ratios_to_the_start_of_the_step(qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3, minibatches=2, lr=5e-2))
    report = trainer.step(batch_of(samples))
    assert report.metrics["ratio_mean"] != pytest.approx(1.0, abs=1e-4)
    assert report.metrics["loss_tokens"] == report.metrics["computed_tokens"]


def test_one_minibatch_equals_the_pass_that_two_make_first(qwen3, samples, batch_of, spec_of, tmp_path):
    reports = [
        started(spec_of(qwen3, minibatches=m, lr=0.0, run_dir=tmp_path / str(m))).step(batch_of(samples))
        for m in (1, 2)
    ]
    for name in ("mismatch_k3", "mismatch_max_abs", "ratio_mean", "entropy", "kl"):
        assert reports[0].metrics[name] == pytest.approx(reports[1].metrics[name], rel=1e-5, abs=1e-7), name


def test_warm_up_then_constant(qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3, lr=1e-3, warmup_steps=2))
    rates = [trainer.step(batch_of(samples, step)).metrics["lr"] for step in (1, 2, 3)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3])


def test_mismatch_counts_only_tokens_of_these_very_weights(qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3, mismatch_max_abs=1e-4, lr=1e-2))
    trainer.step(batch_of(honest(trainer, samples, Version("main", 0, 0))))
    # sampled by the weights before: they differ by more than the limit, but that is staleness, not mismatch
    stale = [dataclasses.replace(s, versions=tuple(v and Version("main", 0, 0) for v in s.versions)) for s in samples]
    report = trainer.step(batch_of(stale, 2))
    assert report.metrics["mismatch_tokens"] == 0
    assert "mismatch_k3" not in report.metrics
    assert report.metrics["drift_max_abs"] > 1e-4
    assert (report.metrics["staleness_mean"], report.metrics["staleness_max"]) == (1.0, 1.0)


def test_a_large_mismatch_halts_before_anything_changes(qwen3, samples, batch_of, spec_of, tmp_path):
    trainer = started(spec_of(qwen3, mismatch_max_abs=1e-3))
    before = weights(trainer)
    wrong = honest(trainer, samples, Version("main", 0, 0))
    place = wrong[0].loss_mask.index(True)
    shifted = tuple(b + 0.01 * (i == place) for i, b in enumerate(wrong[0].behaviour_logprobs))
    wrong[0] = dataclasses.replace(wrong[0], behaviour_logprobs=shifted)
    with pytest.raises(GuardError, match=r"mismatch_max_abs.*1\.00e-02.*1\.00e-03"):
        trainer.step(batch_of(wrong))
    assert all(torch.equal(p, before[n]) for n, p in trainer._policy.trainable().items())
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert not (tmp_path / "run" / "weights").exists()
    # and the trainer goes on with a sound batch
    assert trainer.step(batch_of(honest(trainer, samples, Version("main", 0, 0)))).step == 1


def test_a_k3_above_the_limit_halts_after_patience(qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3, mismatch_k3=1e-6, mismatch_patience=2, lr=0.0))
    trainer.step(batch_of(samples))
    again = [dataclasses.replace(s, versions=tuple(v and Version("main", 0, 1) for v in s.versions)) for s in samples]
    with pytest.raises(GuardError, match="2 batches in a row"):
        trainer.step(batch_of(again, 2))


def test_a_sound_batch_resets_the_patience(qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3, mismatch_k3=1e-6, mismatch_patience=2, lr=0.0))
    for step in range(1, 5):
        version = Version("main", 0, step - 1)
        bad = [dataclasses.replace(s, versions=tuple(v and version for v in s.versions)) for s in samples]
        trainer.step(batch_of(bad if step % 2 else honest(trainer, samples, version), step))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_halts_before_anything_changes(
    value: float, qwen3, samples, batch_of, spec_of, tmp_path
):
    trainer = started(spec_of(qwen3))
    before = weights(trainer)
    bad = [
        *samples,
        dataclasses.replace(samples[0], advantages=tuple(value * m if m else 0.0 for m in samples[0].loss_mask)),
    ]
    with pytest.raises(GuardError, match="must be finite"):
        trainer.step(batch_of(bad))
    assert all(torch.equal(p, before[n]) for n, p in trainer._policy.trainable().items())
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_batch_out_of_order_is_refused(qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3))
    with pytest.raises(TrainerError, match="step 2 given to a trainer at step 0"):
        trainer.step(batch_of(samples, 2))


def test_greedy_samples_are_refused(qwen3, sample, batch_of, spec_of):
    trainer = started(spec_of(qwen3))
    with pytest.raises(TrainerError, match="temperature 0"):
        trainer.step(batch_of([sample([1, 2, 3], [(2, 3)], temperature=0.0)]))


def test_a_batch_without_trained_tokens_counts_as_a_step_and_changes_no_weight(qwen3, samples, batch_of, spec_of):
    trainer = started(spec_of(qwen3))
    before = {n: p.clone() for n, p in trainer._policy.trainable().items()}
    report = trainer.step(batch_of([]))
    assert report.weights.version.step == report.step == 1
    assert report.checkpoint is not None
    assert all(torch.equal(p, before[n]) for n, p in trainer._policy.trainable().items())
    assert trainer.step(batch_of(samples, 2)).metrics["grad_norm"] > 0


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_bfloat16_stays_near_float32(kind: str, qwen3, samples, batch_of, spec_of, tmp_path):
    reports = {
        dtype: started(spec_of(qwen3, kind=kind, dtype=dtype, run_dir=tmp_path / dtype)).step(batch_of(samples))
        for dtype in ("float32", "bfloat16")
    }
    low, high = reports["bfloat16"].metrics, reports["float32"].metrics
    assert low["kl"] == 0.0
    assert low["policy_loss"] == pytest.approx(high["policy_loss"], abs=0.05)
    assert low["grad_norm"] == pytest.approx(high["grad_norm"], rel=0.1)
