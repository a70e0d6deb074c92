"""How far the policy has moved from a reference, estimated on the tokens that were sampled.

In: parallel tensors [N]. Out: [N]. Knows no model, batch or configuration.

    r_i  = exp(reference_i - logp_i)
    k3_i = r_i - 1 - log r_i          >= 0; its mean over tokens drawn from the policy is KL(policy || reference)

Schulman, "Approximating KL divergence" (2020), estimator k3.
"""

from torch import Tensor

from claw_train.losses.ratios import k3_of


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """Low-variance, unbiased estimate of KL(policy || reference), one value a token.

    Args:
        logp: [N] natural log-probabilities of the sampled tokens under the policy.
        reference: [N] the same under the reference; no gradient flows into it.

    Returns:
        [N], never negative.

    Raises:
        ValueError: shapes differ.
    """
    if logp.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(logp.shape)} and {tuple(reference.shape)}")
    return k3_of(reference.detach() - logp)
