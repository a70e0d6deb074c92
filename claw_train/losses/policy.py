"""The clipped policy-gradient loss of one set of tokens, corrected for the engine's own log-probabilities.

In: parallel tensors [N], one entry a trained token, of any number of sequences, and the divisor of the token mean.
Out: a scalar whose gradient is right for any split of the tokens into calls, because the divisor is given and never
counted here. Knows no model, batch or configuration.

    ratio_i = exp(logp_i - old_i)                              trainer now / trainer at the start of the step
    w_i     = min(exp(old_i - behaviour_i), tis_cap)           trainer at the start of the step / engine, no gradient
    loss    = -1/divisor * sum_i w_i min(ratio_i A_i, clip(ratio_i, 1 - clip_low, 1 + clip_high) A_i)

Clipping: Schulman et al., arXiv 1707.06347, eq. 7, with the two bounds of DAPO, arXiv 2503.14476, eq. 10. The
truncated weight is decoupled PPO's (AReaL, arXiv 2505.24298, eq. 5) with a cap.
"""

from dataclasses import dataclass

from torch import Tensor

from claw_train.losses.ratios import MAX_EXPONENT


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The loss and what is reported about it; the counts are sums, so that they add over calls and ranks."""

    loss: Tensor
    """Scalar with gradient."""
    clipped: Tensor
    """Tokens whose ratio hit a clip bound that took their gradient away; scalar."""
    ratio_sum: Tensor
    """Sum of `ratio` over all tokens; scalar."""
    capped: Tensor
    """Tokens whose weight was cut to `tis_cap`; scalar."""
    outliers: Tensor
    """Tokens left out because trainer and engine disagree beyond `outlier_logratio`; scalar."""


def policy_loss(
    logp: Tensor,
    old: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    divisor: float,
    clip_low: float,
    clip_high: float,
    tis_cap: float,
    outlier_logratio: float,
) -> PolicyLoss:
    """Clipped surrogate with a truncated, detached importance weight.

    Args:
        logp: [N] natural log-probabilities under the weights being trained; carries the gradient.
        old: [N] the same under the weights at the start of the step.
        behaviour: [N] as sampled by the engine.
        advantages: [N] any sign; 0 contributes nothing.
        divisor: trained tokens of the whole update, all micro-batches and ranks together.
        clip_low: ratios below 1 - clip_low gain nothing more.
        clip_high: ratios above 1 + clip_high gain nothing more.
        tis_cap: at least 1.
        outlier_logratio: tokens with |old - behaviour| above it weigh 0; they still count in the divisor.

    Raises:
        ValueError: shapes differ or the divisor is not positive.
    """
    _same_shape(logp, old, behaviour, advantages)
    if divisor <= 0:
        raise ValueError(f"divisor is {divisor}, it must be positive")
    old, behaviour = old.detach(), behaviour.detach()
    gap = old - behaviour
    kept = gap.abs() <= outlier_logratio
    weight = gap.clamp(max=MAX_EXPONENT).exp().clamp(max=tis_cap) * kept
    ratio = (logp - old).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -(weight * free.minimum(bounded)).sum() / divisor
    return PolicyLoss(
        loss=loss,
        clipped=(kept & (bounded < free)).sum(),
        ratio_sum=ratio.detach().sum(),
        capped=(kept & (gap.clamp(max=MAX_EXPONENT).exp() > tis_cap)).sum(),
        outliers=(~kept).sum(),
    )


def _same_shape(first: Tensor, *others: Tensor) -> None:
    for other in others:
        if other.shape != first.shape:
            raise ValueError(f"shapes differ: {tuple(first.shape)} and {tuple(other.shape)}")
