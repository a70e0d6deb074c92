"""Log-probabilities without kept logits equal the plain computation, values and gradients."""

import pytest
import torch

from claw_train.training.head import token_logprobs

U, H, V = 9, 6, 23
SOURCE = torch.tensor([0, 0, 1, 3, 4, 4, 4, 7, 8, 8])
TARGET = torch.tensor([1, 1, 5, 22, 0, 3, 9, 11, 2, 19])


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(U, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    return hidden, weight, torch.rand(U, generator=generator, dtype=torch.float64) + 0.5


def plain(hidden, weight, temperatures):
    logprobs = (hidden @ weight.T / temperatures[:, None]).log_softmax(-1)
    return logprobs[SOURCE, TARGET], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk", [256, 4])
@pytest.mark.parametrize("weight_trains", [False, True])
def test_values_and_gradients(inputs, weight_trains: bool, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("claw_train.training.head._CHUNK", chunk)
    hidden, weight, temperatures = inputs
    scale = torch.linspace(-1, 2, len(SOURCE), dtype=torch.float64)
    grads = []
    for compute in (plain, lambda h, w, t: token_logprobs(h, w, t, SOURCE, TARGET)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(weight_trains)
        logprobs, entropies = compute(h, w, temperatures)
        (logprobs * scale).sum().backward()
        grads.append((logprobs.detach(), entropies.detach(), h.grad, w.grad))
    for got, want in zip(grads[1], grads[0], strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_the_fast_gradient_is_close_and_leaves_values_exact(inputs):
    hidden, weight, temperatures = (x.float() for x in inputs)
    found = []
    for fast in (False, True):
        h = hidden.clone().requires_grad_()
        logprobs, _ = token_logprobs(h, weight, temperatures, SOURCE, TARGET, fast_gradient=fast)
        logprobs.sum().backward()
        found.append((logprobs.detach(), h.grad))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0.02, atol=0.05)


def test_autocast_does_not_coarsen_the_logits(inputs):
    hidden, weight, temperatures = (x.float() for x in inputs)
    want, _ = token_logprobs(hidden, weight, temperatures, SOURCE, TARGET)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = token_logprobs(hidden, weight, temperatures, SOURCE, TARGET)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
