"""One matrix product, in the layout that is fastest for its device, with low-rank adapters on top.

In: a weight [out, in] and activations [T, in]. Out: [T, out]. A CPU weight is reordered once into the blocked layout
of oneDNN, which is up to three times faster for few rows than the row-major one. It knows no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_HINT = 32


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's part in one product: y += x @ down.T @ up.T."""

    down: Tensor
    """[r, in]"""
    up: Tensor
    """[out, r], already scaled."""


class Linear:
    """y = x W^T without a bias."""

    __slots__ = ("_packed", "_weight")

    def __init__(self, weight: Tensor) -> None:
        self._packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self._weight = _reorder(weight) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return F.linear(x, self._weight)


def _reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)


def add_low_rank(y: Tensor, x: Tensor, parts: Sequence[tuple[Tensor | None, LowRank]]) -> None:
    """Adds adapters in place to some rows of `y` [T, out] from the same rows of `x` [T, in].

    A part names its rows by an index tensor; None is all rows.
    """
    for rows, part in parts:
        if rows is None:
            y.addmm_(F.linear(x, part.down), part.up.T)
        else:
            y.index_add_(0, rows, F.linear(F.linear(x.index_select(0, rows), part.down), part.up))
