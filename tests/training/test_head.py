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


@pytest.mark.parametrize("tile", [512, 4])
@pytest.mark.parametrize("weight_trains", [False, True])
def test_values_and_gradients(inputs, weight_trains: bool, tile: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("claw_train.training.head._ROWS", tile)
    monkeypatch.setattr("claw_train.training.head._COLUMNS", tile)
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


def test_narrow_products_of_bfloat16_values_are_exact_and_the_gradient_close():
    generator = torch.Generator().manual_seed(1)
    # large enough for the fast units to be used where there are any
    hidden = torch.randn(64, 128, generator=generator).bfloat16()
    weight = torch.randn(512, 128, generator=generator).bfloat16().float()
    temperatures = torch.rand(64, generator=generator) + 0.5
    source, target = torch.arange(64), torch.randint(512, (64,), generator=generator)
    found = []
    for narrow in (False, True):
        h = hidden.clone().requires_grad_()
        logprobs, _ = token_logprobs(h, weight, temperatures, source, target, narrow=narrow)
        logprobs.sum().backward()
        found.append((logprobs.detach(), h.grad))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0.02, atol=0.05)
    assert torch.get_float32_matmul_precision() == "highest"


def test_logits_far_apart_neither_overflow_nor_vanish():
    hidden = torch.tensor([[500.0], [-500.0]])
    weight = torch.tensor([[-1.0], [0.0], [1.0]])
    logprobs, entropies = token_logprobs(
        hidden, weight, torch.ones(2), torch.tensor([0, 0, 1]), torch.tensor([2, 0, 2])
    )
    assert logprobs.tolist() == [0.0, -1000.0, -1000.0]
    assert entropies.tolist() == [0.0, 0.0]


def test_autocast_does_not_coarsen_the_logits(inputs):
    hidden, weight, temperatures = (x.float() for x in inputs)
    want, _ = token_logprobs(hidden, weight, temperatures, SOURCE, TARGET)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = token_logprobs(hidden, weight, temperatures, SOURCE, TARGET)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
