"""What the losses do alike with the logarithm of a ratio of probabilities.

In: a tensor of log-ratios. Out: one of the same shape. Knows no model, batch or configuration.
"""

from torch import Tensor

MAX_EXPONENT = 20.0
"""Log-ratios beyond this are cut before `exp`, so that no infinity reaches a gradient."""


def k3_of(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x, entry by entry, never negative; x is cut at both ends.

    Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    bounded = log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    # expm1 keeps the digits that exp(x) - 1 loses near zero, where a healthy run lives
    return (bounded.expm1() - bounded).clamp(min=0.0)
