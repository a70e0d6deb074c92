"""A packed row gives each sample the log-probabilities and gradients it has alone in a plain forward pass."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from claw_train.training.model import Scorer, load_causal
from claw_train.training.packing import flatten, pack, strands
from claw_train.types import Version


@pytest.fixture(params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def weights(samples) -> torch.Tensor:
    return flatten(samples, Version("main", 0, 0)).advantages


def alone(folder: Path, samples, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Plain attention, one sample at a time, all logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    found = []
    for sample in samples:
        logits = model(torch.tensor([sample.token_ids]), use_cache=False).logits[0] / sample.temperature
        logprobs = logits.log_softmax(-1)
        found += [logprobs[i - 1, t] for i, t in enumerate(sample.token_ids) if sample.loss_mask[i]]
    result = torch.stack(found)
    (result * weights(samples)).mean().backward()
    return result.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def packed(folder: Path, samples, max_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = load_causal(folder, dtype)
    scorer = Scorer(model, dtype)
    count = len(flatten(samples, Version("main", 0, 0)))
    result = torch.full((count,), float("nan"), dtype=dtype)
    for row in pack([s for s in strands(samples, zero_advantage=True) if s], max_tokens):
        logprobs, _ = scorer(row)
        ((logprobs * weights(samples)[row.item_token]).sum() / count).backward()
        result[row.item_token] = logprobs.detach()
    return result, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("max_tokens", [1000, 14, 1])
def test_logprobs_and_gradients(folder: Path, samples, max_tokens: int):
    want, want_grad = alone(folder, samples, torch.float64)
    got, got_grad = packed(folder, samples, max_tokens, torch.float64)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    assert got_grad.keys() == want_grad.keys()
    for name, grad in want_grad.items():
        torch.testing.assert_close(got_grad[name], grad, rtol=0, atol=1e-6)


def test_logprobs_in_the_trainers_own_precision(folder: Path, samples):
    want, _ = alone(folder, samples, torch.float64)
    got, _ = packed(folder, samples, 1000, torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_many_blocks(folder: Path, sample, monkeypatch: pytest.MonkeyPatch):
    # small rows fit one block; with free blocks each run of tokens gets its own
    monkeypatch.setattr("claw_train.training.blocks._BLOCK_OVERHEAD", 0)
    monkeypatch.setattr("claw_train.training.blocks._MAX_QUERIES", 3)
    group = [sample([1, 2, 3, 4, g, 5, 6, i, 7 + i], [(7, 9)]) for g in range(3) for i in range(3)]
    (row,) = pack([s for s in strands(group, zero_advantage=True) if s], 1000)
    assert len(row.blocks) > 5
    want, got = alone(folder, group, torch.float64)[0], packed(folder, group, 1000, torch.float64)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
