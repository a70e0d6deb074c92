"""The clipped policy loss: numbers by hand, invariances, and what its gradient does."""

import math

import pytest
import torch

from claw_train.losses.policy import PolicyLoss, policy_loss

CONSTANTS = {"clip_low": 0.2, "clip_high": 0.28, "tis_cap": 2.0, "outlier_logratio": 5.0}


def loss_of(logp, old, behaviour, advantages, *, divisor: float | None = None, **constants: float) -> PolicyLoss:
    tensors = [torch.as_tensor(x, dtype=torch.float64) for x in (logp, old, behaviour, advantages)]
    return policy_loss(*tensors, divisor=divisor or len(tensors[0]), **{**CONSTANTS, **constants})


def test_numbers_by_hand():
    # ratios 1, 1.5 (A > 0: clipped to 1.28), 0.5 (A < 0: clipped to 0.8), 1.5 (A < 0: not clipped);
    # weights 1, exp(log 1.1) = 1.1, exp(log 4) cut to 2, 0.5
    ratios, weights, advantages = [1.0, 1.5, 0.5, 1.5], [1.0, 1.1, 4.0, 0.5], [2.0, 1.0, -1.0, -2.0]
    old = [-1.0, -2.0, -0.5, -3.0]
    logp = [o + math.log(r) for o, r in zip(old, ratios, strict=True)]
    behaviour = [o - math.log(w) for o, w in zip(old, weights, strict=True)]
    found = loss_of(logp, old, behaviour, advantages)
    want = -(1.0 * 2.0 + 1.1 * 1.28 + 2.0 * -0.8 + 0.5 * -3.0) / 4
    assert float(found.loss) == pytest.approx(want, abs=1e-12)
    assert (int(found.clipped), int(found.capped), int(found.outliers)) == (2, 1, 0)
    assert float(found.ratio_sum) == pytest.approx(4.5)


def test_outliers_lose_their_weight_but_stay_in_the_divisor():
    found = loss_of([-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0], [-1.0, -7.0, 5.0], [1.0, 1.0, 1.0])
    assert float(found.loss) == pytest.approx(-1 / 3)
    assert int(found.outliers) == 2


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gradient_descent_moves_a_token_with_its_advantage(advantage: float):
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    policy_loss(logp, logp.detach(), logp.detach(), torch.full((2,), advantage), divisor=2, **CONSTANTS).loss.backward()
    assert logp.grad is not None
    assert (-logp.grad * advantage > 0).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "flows"), [(1.3, 1, False), (1.3, -1, True), (0.7, 1, True), (0.7, -1, False)]
)
def test_a_bound_stops_only_the_gradient_that_goes_further_out(ratio: float, advantage: float, flows: bool):
    logp = torch.tensor([math.log(ratio)], requires_grad=True)
    zero = torch.zeros(1)
    policy_loss(logp, zero, zero, torch.tensor([float(advantage)]), divisor=1, **CONSTANTS).loss.backward()
    assert logp.grad is not None
    assert bool(logp.grad.abs() > 0) is flows


def test_the_weight_carries_no_gradient():
    old = torch.tensor([-1.0], requires_grad=True)
    behaviour = torch.tensor([-1.5], requires_grad=True)
    logp = torch.tensor([-1.0], requires_grad=True)
    policy_loss(logp, old, behaviour, torch.ones(1), divisor=1, **CONSTANTS).loss.backward()
    assert old.grad is None
    assert behaviour.grad is None
    assert logp.grad is not None
    assert float(logp.grad) == pytest.approx(-math.exp(0.5))


def test_tokens_of_no_advantage_add_nothing():
    full = loss_of([-1.0, -2.0, -3.0], [-1.1, -2.0, -9.0], [-1.0, -2.2, -1.0], [1.0, -1.0, 0.0], divisor=2)
    part = loss_of([-1.0, -2.0], [-1.1, -2.0], [-1.0, -2.2], [1.0, -1.0], divisor=2)
    assert float(full.loss) == pytest.approx(float(part.loss), abs=1e-15)


def test_micro_batches_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    logp, old, behaviour, advantages = torch.randn(4, 31, generator=generator)
    whole = loss_of(logp, old, behaviour, advantages, divisor=31).loss
    parts = [
        loss_of(logp[i : i + 7], old[i : i + 7], behaviour[i : i + 7], advantages[i : i + 7], divisor=31).loss
        for i in range(0, 31, 7)
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-6)


def test_it_is_the_policy_gradient_on_a_tiny_vocabulary():
    # mean over all actions, weighed by their probability, of the loss's gradient = -d E[A] / d logits
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    logp = logits.log_softmax(-1)
    probabilities = logp.exp().detach()
    loss = policy_loss(logp, logp.detach(), logp.detach(), advantages * probabilities, divisor=1, **CONSTANTS).loss
    (got,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (want,) = torch.autograd.grad(-(logits.softmax(-1) * advantages).sum(), logits)
    torch.testing.assert_close(got, want)


def test_tokens_sampled_elsewhere_are_weighed_back():
    # drawn from mu, weighed by pi_old / mu below the cap, the gradient is the on-policy one
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    mu = torch.tensor([0.35, 0.25, 0.4], dtype=torch.float64)
    logp = logits.log_softmax(-1)
    loss = policy_loss(logp, logp.detach(), mu.log(), advantages * mu, divisor=1, **CONSTANTS).loss
    (got,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (want,) = torch.autograd.grad(-(logits.softmax(-1) * advantages).sum(), logits)
    torch.testing.assert_close(got, want)


def test_absurd_ratios_stay_finite():
    logp = torch.tensor([100.0, -100.0], requires_grad=True)
    found = policy_loss(logp, torch.zeros(2), torch.tensor([-90.0, 90.0]), torch.tensor([-1.0, 1.0]), divisor=2,
                        **{**CONSTANTS, "outlier_logratio": 1e9})  # fmt: skip
    found.loss.backward()
    assert torch.isfinite(found.loss)
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="shapes differ"):
        loss_of([-1.0], [-1.0, -1.0], [-1.0], [1.0])
    with pytest.raises(ValueError, match="divisor is -1"):
        loss_of([-1.0], [-1.0], [-1.0], [1.0], divisor=-1)
