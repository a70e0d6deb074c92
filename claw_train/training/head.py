"""Log-probabilities of given tokens from hidden states, without keeping logits.

In: hidden states at the places that need logits, the output matrix, the tokens. Out: float32 log-probabilities and
entropies. Knows neither rows nor losses.

    z_u  = hidden_u W^T / temperature_u
    logp = z_u[y] - logsumexp(z_u)            d logp / d hidden_u = (W[y] - softmax(z_u) W) / temperature_u

The Jacobian of one log-probability is a single vector of the hidden size, so it is formed on the way forward and the
[U, V] logits live for one chunk only. Only a trained output matrix makes the way back compute them again.
"""

from typing import Any

import torch
from torch import Tensor

_CHUNK = 256
"""Places whose logits exist at once."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    temperatures: Tensor,
    item_source: Tensor,
    item_target: Tensor,
    *,
    fast_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens at the temperature they were sampled at.

    Args:
        hidden: [U, H] any float type.
        weight: [V, H] output matrix; logits are computed in its type, float32 for training.
        temperatures: [U] more than 0.
        item_source: [n] row of `hidden`, ascending.
        item_target: [n] token id.
        fast_gradient: forms the expectation under the softmax in bfloat16; log-probabilities stay exact.

    Returns:
        log-probabilities [n] with gradient, entropies in nats [U] without; both in `weight`'s type.
    """
    return _TokenLogprobs.apply(hidden, weight, temperatures, item_source, item_target, fast_gradient)  # pyright: ignore


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        temperatures: Tensor,
        item_source: Tensor,
        item_target: Tensor,
        fast_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        x = hidden.to(weight.dtype)
        logprobs = torch.empty(item_source.shape, dtype=weight.dtype, device=x.device)
        entropies = torch.empty(x.shape[:1], dtype=weight.dtype, device=x.device)
        jacobian = None
        if hidden.requires_grad and not weight.requires_grad:
            jacobian = torch.empty(len(item_source), x.shape[1], dtype=weight.dtype, device=x.device)
        mixing = weight.to(torch.bfloat16) if fast_gradient and jacobian is not None else weight
        with torch.autocast(x.device.type, enabled=False):
            for rows, items in _chunks(len(x), item_source):
                z = _logits(x[rows], weight, temperatures[rows])
                total = z.logsumexp(-1)
                source, target = item_source[items] - rows.start, item_target[items]
                logprobs[items] = z[source, target] - total[source]
                p = (z - total[:, None]).exp_()
                entropies[rows] = total - (z * p).sum(-1)
                if jacobian is not None:
                    mean = (p.to(mixing.dtype) @ mixing).to(weight.dtype)
                    jacobian[items] = (weight[target] - mean[source]) / temperatures[rows][source, None]
        ctx.save_for_backward(hidden, weight, temperatures, item_source, item_target, jacobian)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad_outputs[0]
        hidden, weight, temperatures, item_source, item_target, jacobian = ctx.saved_tensors
        grad_hidden = torch.zeros(hidden.shape, dtype=weight.dtype, device=hidden.device)
        if jacobian is not None:
            grad_hidden.index_add_(0, item_source, jacobian * grad[:, None])
            return grad_hidden.to(hidden.dtype), None, None, None, None, None
        grad_weight = torch.zeros_like(weight)
        x = hidden.to(weight.dtype)
        with torch.autocast(x.device.type, enabled=False):
            for rows, items in _chunks(len(x), item_source):
                source, target = item_source[items] - rows.start, item_target[items]
                # d loss / d z: grad at the token, minus the row's summed grad spread over the softmax
                row_grad = torch.zeros(rows.stop - rows.start, dtype=x.dtype, device=x.device)
                row_grad.index_add_(0, source, grad[items])
                dz = _logits(x[rows], weight, temperatures[rows]).softmax(-1).mul_(-row_grad[:, None])
                dz.index_put_((source, target), grad[items], accumulate=True)
                dz /= temperatures[rows, None]
                grad_hidden[rows] = dz @ weight
                grad_weight += dz.T @ x[rows]
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


def _logits(x: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    return (x @ weight.T).div_(temperatures[:, None])


def _chunks(count: int, item_source: Tensor) -> list[tuple[slice, slice]]:
    """Slices of the places and, for each, of the items that use them."""
    bounds = [*range(0, count, _CHUNK), count]
    at = torch.searchsorted(item_source, torch.tensor(bounds, device=item_source.device)).tolist()
    return [(slice(a, b), slice(i, j)) for a, b, i, j in zip(bounds[:-1], bounds[1:], at[:-1], at[1:], strict=True)]
