"""k3 and the engine mismatch: numbers by hand, exact KL on a tiny vocabulary, invariances."""

import math

import pytest
import torch

from claw_train.losses.kl import k3
from claw_train.losses.mismatch import mismatch

POLICY = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.1, 0.5], dtype=torch.float64)


def exact_kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p * (p / q).log()).sum())


def test_k3_by_hand():
    found = k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0 + math.log(3)]))
    assert found.tolist() == pytest.approx([0.0, 3 - 1 - math.log(3)], abs=1e-6)


def test_its_mean_under_the_policy_is_the_exact_kl():
    mean = float((POLICY * k3(POLICY.log(), REFERENCE.log())).sum())
    assert mean == pytest.approx(exact_kl(POLICY, REFERENCE), abs=1e-12)


def test_it_is_never_negative_not_even_by_rounding():
    gaps = torch.cat([torch.logspace(-9, 2, 200), -torch.logspace(-9, 2, 200)])
    logp = torch.full_like(gaps, -3.0)
    found = k3(logp, logp + gaps)
    assert (found >= 0).all()
    assert torch.isfinite(found).all()


def test_small_gaps_keep_their_digits():
    gap = torch.tensor([1e-3])
    assert float(k3(torch.zeros(1), gap)) == pytest.approx(0.5e-6, rel=1e-2)


def test_its_gradient_pulls_towards_the_reference():
    logp = torch.tensor([-1.0, -3.0], requires_grad=True)
    k3(logp, torch.tensor([-2.0, -2.0])).sum().backward()
    assert logp.grad is not None
    # descent lowers the first, which the reference likes less, and raises the second
    assert logp.grad[0] > 0 > logp.grad[1]


def test_no_gradient_reaches_the_reference():
    reference = torch.tensor([-1.0], requires_grad=True)
    logp = torch.tensor([-2.0], requires_grad=True)
    k3(logp, reference).sum().backward()
    assert reference.grad is None


def test_mismatch_by_hand():
    found = mismatch(
        torch.tensor([-1.0, -2.0, -7.0]), torch.tensor([-1.5, -1.0, -1.0]), torch.tensor([True, True, False])
    )
    assert int(found.count) == 2
    assert float(found.k1_sum) == pytest.approx(-0.5 + 1.0)
    assert float(found.k3_sum) == pytest.approx((math.exp(0.5) - 1 - 0.5) + (math.exp(-1.0) - 1 + 1.0))
    assert float(found.max_abs) == pytest.approx(1.0)


def test_mismatch_means_estimate_the_kl_of_engine_and_trainer():
    engine, trainer = POLICY.log(), REFERENCE.log()
    every = torch.ones(3, dtype=torch.bool)
    sums = [mismatch(trainer[i : i + 1], engine[i : i + 1], every[:1]) for i in range(3)]
    for name in ("k1_sum", "k3_sum"):
        mean = sum(float(p) * float(getattr(s, name)) for p, s in zip(POLICY, sums, strict=True))
        assert mean == pytest.approx(exact_kl(POLICY, REFERENCE), abs=1e-12)


def test_masked_values_do_not_count_whatever_they_are():
    mask = torch.tensor([True, False])
    one = mismatch(torch.tensor([-1.0, float("nan")]), torch.tensor([-1.1, 0.0]), mask)
    two = mismatch(torch.tensor([-1.0, 99.0]), torch.tensor([-1.1, -99.0]), mask)
    assert float(one.k3_sum) == float(two.k3_sum)
    assert float(one.max_abs) == float(two.max_abs)


def test_an_empty_mask_gives_zeros():
    found = mismatch(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([False]))
    assert (int(found.count), float(found.k3_sum), float(found.max_abs)) == (0, 0.0, 0.0)


def test_a_value_that_is_no_number_shows():
    found = mismatch(torch.tensor([float("nan"), -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([True, True]))
    assert math.isnan(float(found.max_abs))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="shapes differ"):
        k3(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="shapes differ"):
        mismatch(torch.zeros(2), torch.zeros(2), torch.zeros(3, dtype=torch.bool))
