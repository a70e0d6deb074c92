"""Log-probabilities of given tokens from hidden states, without ever holding the logits.

In: hidden states at the places that need logits, the output matrix, the tokens. Out: float32 log-probabilities and
entropies. Knows neither rows nor losses.

    z_u  = hidden_u W^T / temperature_u
    logp = z_u[y] - logsumexp(z_u)            d logp / d hidden_u = (W[y] - softmax(z_u) W) / temperature_u

The vocabulary is walked in tiles small enough for the processor's cache, with running maxima as in online softmax
(Milakov and Gimelshein, arXiv 1805.02867). The Jacobian of one log-probability is a single vector of the hidden size,
so it is formed on the way forward; only a trained output matrix makes the way back walk the tiles again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_ROWS = 512
_COLUMNS = 2048
"""Tile of places and vocabulary; 4 MiB in float32."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    temperatures: Tensor,
    item_source: Tensor,
    item_target: Tensor,
    *,
    narrow: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens at the temperature they were sampled at.

    Args:
        hidden: [U, H] any float type.
        weight: [V, H] output matrix; logits are computed in its type, float32 for training.
        temperatures: [U] more than 0.
        item_source: [n] row of `hidden`, ascending.
        item_target: [n] token id.
        narrow: both inputs hold bfloat16 values, so products of bfloat16, summed in float32, are exact and may be used;
            the expectation under the softmax, which only the gradient needs, is formed in bfloat16.

    Returns:
        log-probabilities [n] with gradient, entropies in nats [U] without; both in `weight`'s type.
    """
    narrow = narrow and hidden.dtype == torch.bfloat16
    return _TokenLogprobs.apply(hidden, weight, temperatures, item_source, item_target, narrow)  # pyright: ignore


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        temperatures: Tensor,
        item_source: Tensor,
        item_target: Tensor,
        narrow: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(item_source.shape, dtype=weight.dtype, device=hidden.device)
        entropies = torch.empty(hidden.shape[:1], dtype=weight.dtype, device=hidden.device)
        totals = torch.empty_like(entropies)
        jacobian = None
        if hidden.requires_grad and not weight.requires_grad:
            jacobian = torch.empty(len(item_source), weight.shape[1], dtype=weight.dtype, device=hidden.device)
        with _exact_in_bfloat16(narrow, hidden.device.type):
            for rows, items in _chunks(len(hidden), item_source):
                chunk = _Chunk(hidden[rows], weight, temperatures[rows], jacobian is not None, narrow)
                source, target = item_source[items] - rows.start, item_target[items]
                logprobs[items] = chunk.walk(source, target) - chunk.total[source]
                totals[rows], entropies[rows] = chunk.total, chunk.entropy()
                if jacobian is not None:
                    scale = temperatures[rows][source, None]
                    jacobian[items] = (weight[target] - chunk.expectation()[source]) / scale
        ctx.save_for_backward(hidden, weight, temperatures, item_source, item_target, totals, jacobian)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad_outputs[0]
        hidden, weight, temperatures, item_source, item_target, totals, jacobian = ctx.saved_tensors
        grad_hidden = torch.zeros(hidden.shape, dtype=weight.dtype, device=hidden.device)
        if jacobian is not None:
            grad_hidden.index_add_(0, item_source, jacobian * grad[:, None])
            return grad_hidden.to(hidden.dtype), None, None, None, None, None
        grad_weight = torch.zeros_like(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, items in _chunks(len(hidden), item_source):
                x, scale = hidden[rows].to(weight.dtype), temperatures[rows, None]
                source, target = item_source[items] - rows.start, item_target[items]
                # d loss / d z: the item's grad at its token, minus the row's summed grad spread over the softmax
                row_grad = torch.zeros_like(totals[rows]).index_add_(0, source, grad[items])
                for a, b in _tiles(len(weight)):
                    dz = (x @ weight[a:b].T).div_(scale).sub_(totals[rows, None]).exp_().mul_(-row_grad[:, None])
                    here = (target >= a) & (target < b)
                    dz.index_put_((source[here], target[here] - a), grad[items][here], accumulate=True)
                    dz.div_(scale)
                    grad_hidden[rows] += dz @ weight[a:b]
                    grad_weight[a:b] += dz.T @ x
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


class _Chunk:
    """Running sums over the vocabulary for some places: maximum, normaliser, mean logit, mean output vector."""

    def __init__(self, hidden: Tensor, weight: Tensor, temperatures: Tensor, expect: bool, narrow: bool) -> None:
        self._x = hidden.to(weight.dtype)
        self._weight = weight
        self._temperatures = None if bool((temperatures == 1).all()) else temperatures[:, None]
        self._mixing = torch.bfloat16 if narrow else weight.dtype
        self._peak = self._x.new_full((len(hidden),), float("-inf"))
        self._norm = torch.zeros_like(self._peak)
        self._dot = torch.zeros_like(self._peak)
        self._mean = torch.zeros_like(self._x) if expect else None
        self.total = self._peak
        """[U] logsumexp, after `walk`."""

    def walk(self, source: Tensor, target: Tensor) -> Tensor:
        """Visits all tiles; returns the logits of the items [n]."""
        picked = self._x.new_empty(len(target))
        for a, b in _tiles(len(self._weight)):
            z = self._x @ self._weight[a:b].T
            if self._temperatures is not None:
                z.div_(self._temperatures)
            here = (target >= a) & (target < b)
            picked[here] = z[source[here], target[here] - a]
            self._take(z, a, b)
        self.total = self._peak + self._norm.log()
        return picked

    def _take(self, z: Tensor, a: int, b: int) -> None:
        peak = torch.maximum(self._peak, z.amax(-1))
        shrink = (self._peak - peak).exp_()
        z.sub_(peak[:, None])
        p = z.exp()
        # the mean logit is kept relative to the peak, so it moves with it
        moved = torch.where(self._norm > 0, self._norm * (self._peak - peak), 0.0)
        self._dot.add_(moved).mul_(shrink).add_(torch.linalg.vecdot(p, z))
        self._norm.mul_(shrink).add_(p.sum(-1))
        if self._mean is not None:
            self._mean.mul_(shrink[:, None]).add_(p.to(self._mixing) @ self._weight[a:b].to(self._mixing))
        self._peak = peak

    def entropy(self) -> Tensor:
        """[U] nats."""
        return self._norm.log() - self._dot / self._norm

    def expectation(self) -> Tensor:
        """[U, H] output vectors under the softmax."""
        assert self._mean is not None
        return self._mean / self._norm[:, None]


@contextmanager
def _exact_in_bfloat16(narrow: bool, device: str) -> Iterator[None]:
    """No autocast; with `narrow`, float32 products of bfloat16 values by the faster units."""
    before = torch.get_float32_matmul_precision()
    try:
        if narrow:
            torch.set_float32_matmul_precision("medium")
        with torch.autocast(device, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _tiles(columns: int) -> Iterator[tuple[int, int]]:
    for a in range(0, columns, _COLUMNS):
        yield a, min(columns, a + _COLUMNS)


def _chunks(count: int, item_source: Tensor) -> list[tuple[slice, slice]]:
    """Slices of the places and, for each, of the items that use them."""
    bounds = [*range(0, count, _ROWS), count]
    at = torch.searchsorted(item_source, torch.tensor(bounds, device=item_source.device)).tolist()
    return [(slice(a, b), slice(i, j)) for a, b, i, j in zip(bounds[:-1], bounds[1:], at[:-1], at[1:], strict=True)]
