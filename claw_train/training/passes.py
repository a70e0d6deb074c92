"""Forward and backward passes over the rows of one update, and the sums that are reported about them.

In: a policy, a rank's rows, the batch's tokens and the divisor of the whole update. Out: gradients in the parameters,
`Sums` of this rank. Knows neither optimizer, guards nor files.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from claw_train.config import MethodConfig
from claw_train.losses.kl import k3
from claw_train.losses.mismatch import mismatch
from claw_train.losses.policy import policy_loss
from claw_train.training.model import Policy
from claw_train.training.packing import Row, Strand, Tokens, pack, split, strands
from claw_train.training.ranks import Ranks
from claw_train.types import Sample


@dataclass(frozen=True, slots=True)
class Sums:
    """Numbers that add over rows and ranks, and numbers of which the largest counts."""

    total: dict[str, float] = field(default_factory=dict[str, float])
    peak: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, name: str, value: Tensor | float) -> None:
        """Adds to a total."""
        self.total[name] = self.total.get(name, 0.0) + float(value)

    def raise_to(self, name: str, value: Tensor | float) -> None:
        """Raises a maximum; a value that is no number stays."""
        old, new = self.peak.get(name, 0.0), float(value)
        self.peak[name] = old if math.isnan(old) or new <= old else new

    def merge(self, other: "Sums") -> None:
        """Takes in another's numbers."""
        for name, value in other.total.items():
            self.add(name, value)
        for name, value in other.peak.items():
            self.raise_to(name, value)

    def reduce(self, ranks: Ranks) -> "Sums":
        """The same over all ranks; each rank must hold the same names."""
        return Sums(ranks.total(self.total), ranks.peak(self.peak))


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A rank's work for one optimizer update."""

    rows: tuple[Row, ...]
    scale: float
    """Of the loss: the number of ranks, since gradients are averaged; 0 when the rows only stand in for no work."""
    divisor: int
    """Trained tokens of the update over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Old:
    """Log-probabilities [N] at the start of the step; entries of other ranks are NaN."""

    policy: Tensor
    reference: Tensor | None


def plan(
    samples: Sequence[Sample], *, minibatches: int, ranks: Ranks, max_tokens: int, zero_advantage: bool
) -> list[Update]:
    """Splits a batch into this rank's share of each update.

    Sample i goes to update i mod `minibatches`, so a group is spread over all of them. Every rank gets at least one row
    of every update, because all must take part in its gradient exchange.

    Args:
        samples: of the batch.
        minibatches: updates; one without trained tokens is left out.
        ranks: this rank among the others.
        max_tokens: packed tokens of a row.
        zero_advantage: whether tokens without advantage are computed.
    """
    work = strands(samples, zero_advantage=zero_advantage)
    stand_in = next(s for s in strands(samples, zero_advantage=True) if s is not None)
    updates: list[Update] = []
    for m in range(minibatches):
        divisor = sum(sum(sample.loss_mask) for sample in samples[m::minibatches])
        if divisor == 0:
            continue
        mine: list[Strand] = split([s for s in work[m::minibatches] if s is not None], ranks.count)[ranks.rank]
        rows = tuple(row.to(ranks.device) for row in pack(mine or [stand_in], max_tokens))
        updates.append(Update(rows=rows, scale=float(ranks.count) if mine else 0.0, divisor=divisor))
    return updates


def score_old(policy: Policy, updates: Sequence[Update], count: int) -> Old:
    """Log-probabilities of a rank's tokens under the weights as they are, without gradient.

    Args:
        policy: model and reference.
        updates: this rank's.
        count: N, trained tokens of the batch.
    """
    old = torch.full((count,), float("nan"), device=updates[0].rows[0].ids.device)
    reference = old.clone() if policy.reference is not None else None
    with torch.no_grad():
        for row in (row for update in updates for row in update.rows):
            old[row.item_token] = policy.scorer(row)[0]
            if policy.reference is not None and reference is not None:
                reference[row.item_token] = policy.reference(row)[0]
    return Old(policy=old, reference=reference)


def compare(tokens: Tokens, old: Tensor, row: Row, sums: Sums, *, active: bool) -> None:
    """Trainer against engine on one row: mismatch on fresh tokens, drift on older ones; nothing unless `active`."""
    index = row.item_token
    behaviour, fresh = tokens.behaviour[index], tokens.fresh[index]
    for name, mask in (("mismatch", fresh & active), ("drift", ~fresh & active)):
        found = mismatch(old, behaviour, mask)
        sums.add(f"{name}_tokens", found.count)
        sums.add(f"{name}_k1", found.k1_sum)
        sums.add(f"{name}_k3", found.k3_sum)
        sums.raise_to(f"{name}_max_abs", found.max_abs)


def accumulate(
    policy: Policy,
    model: nn.Module,
    ranks: Ranks,
    update: Update,
    tokens: Tokens,
    method: MethodConfig,
    old: Old | None,
) -> Sums:
    """Adds the gradient of one update to the parameters.

    Args:
        policy: for its reference.
        model: the scorer, wrapped for several ranks.
        ranks: averages the gradients with the last row.
        update: this rank's work.
        tokens: of the whole batch.
        method: the loss's constants.
        old: log-probabilities at the start of the step; None when the weights have not changed since.
    """
    sums = Sums()
    for i, row in enumerate(update.rows):
        last = i == len(update.rows) - 1
        with nullcontext() if last else ranks.no_sync(model):
            logprobs, entropies = model(row)
            loss = _loss(policy, row, logprobs, tokens, update, method, old, sums)
            ranks.backward(loss * update.scale)
        weight = float(update.scale > 0)
        sums.add("entropy", weight * entropies.sum())
        sums.add("computed", weight * len(row.item_token))
        sums.add("packed", weight * len(row.ids))
        sums.add("rows", weight)
    return sums


def _loss(
    policy: Policy,
    row: Row,
    logprobs: Tensor,
    tokens: Tokens,
    update: Update,
    method: MethodConfig,
    old: Old | None,
    sums: Sums,
) -> Tensor:
    index = row.item_token
    start = logprobs.detach() if old is None else old.policy[index]
    if old is None:
        compare(tokens, start, row, sums, active=update.scale > 0)
    found = policy_loss(
        logprobs,
        start,
        tokens.behaviour[index],
        tokens.advantages[index],
        divisor=update.divisor,
        clip_low=method.clip_low,
        clip_high=method.clip_high,
        tis_cap=method.tis_cap,
        outlier_logratio=method.outlier_logratio,
    )
    weight = float(update.scale > 0)
    for name in ("clipped", "ratio_sum", "capped", "outliers"):
        sums.add(name, weight * getattr(found, name))
    sums.add("policy_loss", weight * found.loss.detach())
    loss = found.loss
    if policy.reference is not None:
        divergence = k3(logprobs, _reference(policy.reference, row, old)).sum() / update.divisor
        sums.add("kl", weight * divergence.detach())
        loss = loss + method.kl_coef * divergence
    sums.add("loss", weight * loss.detach())
    return loss


def _reference(reference: Callable[[Row], tuple[Tensor, Tensor]], row: Row, old: Old | None) -> Tensor:
    if old is not None:
        assert old.reference is not None
        return old.reference[row.item_token]
    with torch.no_grad():
        return reference(row)[0]
