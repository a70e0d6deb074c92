"""Draws tokens and reads log-probabilities, for many requests at once.

In: logits [n, vocab] in float32 and one `Draw` for each row. Out: token ids and log-probabilities. A log-probability
is that of the softmax over the whole vocabulary after temperature and before any truncation; greedy rows are not
scaled. One uniform number, a function of (seed, position) alone, decides a token by inverting the cumulative
distribution, so a seed gives the same tokens whatever else is in the batch. It knows no request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_MASK = (1 << 64) - 1
_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How to draw one token."""

    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    uniform: float = 0.0
    """In [0, 1)."""
    banned: frozenset[int] = frozenset()
    """Ids that cannot be drawn; their log-probability is -inf."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to report."""

    @property
    def truncated(self) -> bool:
        """Whether part of the vocabulary is cut off."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token."""

    token: int
    logprob: float
    """NaN when the logits are not finite: the request must fail."""
    top: tuple[tuple[float, int], ...] = ()
    """(log-probability, id), likeliest first."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on both arguments alone (the finaliser of splitmix64, applied twice)."""
    mixed = mix(mix(seed & _MASK) ^ (position & _MASK))
    return (mixed >> 11) / (1 << 53)


def mix(z: int) -> int:
    """Scrambles a 64-bit number (splitmix64)."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def draw(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """One token for each row of `logits` [n, vocab] float32, which is overwritten."""
    _scale_and_ban(logits, draws)
    greedy = [i for i, d in enumerate(draws) if d.temperature == 0]
    best = logits[greedy].argmax(-1).tolist() if greedy else []
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    weights, blocks = _blocks(weights)
    sums = blocks.sum(-1, dtype=torch.float32).double()
    total = sums.sum(-1)
    target = torch.tensor([d.uniform for d in draws], dtype=torch.float64, device=logits.device)
    tokens = _invert(blocks, sums, target)
    truncated = [i for i, d in enumerate(draws) if d.truncated]
    if truncated:
        kept, kept_blocks = _blocks(_truncate(weights[truncated], total[truncated], [draws[i] for i in truncated]))
        del kept
        tokens[truncated] = _invert(kept_blocks, kept_blocks.sum(-1).double(), target[truncated])
    if greedy:
        tokens[greedy] = torch.tensor(best, device=tokens.device)
    logprobs = (weights.gather(1, tokens[:, None])[:, 0].double() / total).log().tolist()
    tops = _tops(weights, total, draws)
    ids = tokens.tolist()
    return [Drawn(token=ids[i], logprob=logprobs[i], top=tops[i]) for i in range(len(draws))]


def _scale_and_ban(logits: Tensor, draws: Sequence[Draw]) -> None:
    if any(d.temperature not in (0.0, 1.0) for d in draws):
        scale = [1.0 if d.temperature == 0 else 1.0 / d.temperature for d in draws]
        logits.mul_(torch.tensor(scale, device=logits.device)[:, None])
    for i, d in enumerate(draws):
        if d.banned:
            logits[i, list(d.banned)] = float("-inf")


def _blocks(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Pads [n, vocab] with zeros to whole blocks: ([n, padded], the same as [n, blocks, 256])."""
    if missing := -weights.shape[1] % _BLOCK:
        weights = F.pad(weights, (0, missing))
    return weights, weights.view(weights.shape[0], -1, _BLOCK)


def _invert(blocks: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """Index [n] at which the cumulative sum of `blocks` [n, b, 256] passes `uniforms` [n] of its total."""
    rows = torch.arange(len(blocks), device=blocks.device)
    cumulative = sums.cumsum(-1)
    target = uniforms * cumulative[:, -1]
    block = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp_(max=sums.shape[1] - 1)
    inner = blocks[rows, block].double().cumsum(-1)
    rest = target - (cumulative[rows, block] - sums[rows, block])
    # the block's two sums differ by rounding: stay below the one that is searched
    rest = torch.minimum(rest.clamp_(min=0), inner[:, -1] * (1 - 1e-12))
    offset = torch.searchsorted(inner, rest[:, None], right=True)[:, 0].clamp_(max=_BLOCK - 1)
    return block * _BLOCK + offset


def _truncate(weights: Tensor, total: Tensor, draws: Sequence[Draw]) -> Tensor:
    """`weights` [n, v] with everything outside top-k, top-p and min-p set to zero."""
    device = weights.device
    ordered, order = weights.sort(-1, descending=True)
    top_p = torch.tensor([d.top_p for d in draws], dtype=torch.float64, device=device)[:, None]
    top_k = torch.tensor([d.top_k if d.top_k > 0 else weights.shape[1] for d in draws], device=device)[:, None]
    min_p = torch.tensor([d.min_p for d in draws], device=device)[:, None]
    before = ordered.double().cumsum(-1) - ordered
    cut = before > top_p * total[:, None]
    cut |= torch.arange(weights.shape[1], device=device) >= top_k
    cut |= ordered < ordered[:, :1] * min_p
    ordered[cut] = 0
    return torch.zeros_like(weights).scatter_(1, order, ordered)


def _tops(weights: Tensor, total: Tensor, draws: Sequence[Draw]) -> list[tuple[tuple[float, int], ...]]:
    k = max((d.top_logprobs for d in draws), default=0)
    if not k:
        return [()] * len(draws)
    values, ids = weights.topk(k, -1)
    logprobs = (values.double() / total[:, None]).log().tolist()
    rows = zip(logprobs, ids.tolist(), draws, strict=True)
    return [tuple(zip(lp[: d.top_logprobs], i[: d.top_logprobs], strict=True)) for lp, i, d in rows]


def score(logits: Tensor, targets: Sequence[int], top: int) -> list[Drawn]:
    """Log-probabilities at temperature 1 of `targets` [n] under `logits` [n, vocab] float32."""
    normaliser = logits.logsumexp(-1)
    chosen = logits.gather(1, torch.tensor(targets, device=logits.device)[:, None])[:, 0]
    logprobs = (chosen - normaliser).tolist()
    if not top:
        return [Drawn(token=t, logprob=lp) for t, lp in zip(targets, logprobs, strict=True)]
    values, ids = logits.topk(top, -1)
    tops = zip((values - normaliser[:, None]).tolist(), ids.tolist(), strict=True)
    return [
        Drawn(token=t, logprob=lp, top=tuple(zip(*row, strict=True)))
        for t, lp, row in zip(targets, logprobs, tops, strict=True)
    ]
