"""How far two programs disagree about the same tokens under the same weights.

In: parallel tensors [N] and a mask. Out: sums that add over calls and ranks. Knows no model, batch or configuration.

    d_i = trainer_i - engine_i        k1 = mean(-d)    k3 = mean(exp(d) - 1 - d)    max_abs = max |d|

Under tokens drawn by the engine, k1 and k3 both estimate KL(engine || trainer); k3 is never negative and has the
smaller variance (Schulman, "Approximating KL divergence", 2020).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from claw_train.losses.ratios import k3_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Sums over the tokens of a mask, all scalars; divide by `count` for means."""

    count: Tensor
    k1_sum: Tensor
    k3_sum: Tensor
    max_abs: Tensor
    """0 when the mask is empty."""


def mismatch(trainer: Tensor, engine: Tensor, mask: Tensor) -> Mismatch:
    """Compares log-probabilities where `mask` is True.

    Args:
        trainer: [N] natural log-probabilities by the trainer.
        engine: [N] the same as the engine reported them.
        mask: [N] bool.

    Raises:
        ValueError: shapes differ.
    """
    if not trainer.shape == engine.shape == mask.shape:
        raise ValueError(f"shapes differ: {tuple(trainer.shape)}, {tuple(engine.shape)}, {tuple(mask.shape)}")
    gap = (trainer.detach() - engine.detach())[mask].double()
    return Mismatch(
        count=mask.sum(),
        k1_sum=-gap.sum(),
        k3_sum=k3_of(gap).sum(),
        max_abs=gap.abs().max() if gap.numel() else torch.zeros((), dtype=gap.dtype, device=gap.device),
    )
