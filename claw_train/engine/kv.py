"""Keys and values of the running requests, in rows of a few fixed capacities.

In: how many tokens a request may grow to. Out: a `Row` to write them into, or None while there is no room. The rows of
one capacity lie side by side without holes, so that one attention call serves all of them without copying. Rows in
use, spare rows and kept prefixes together never exceed the budget. It knows no request and no model.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_SMALLEST = 64


class Pool:
    """Rows of one capacity."""

    def __init__(self, capacity: int, template: Tensor, layers: int) -> None:
        self.capacity = capacity
        self.rows: list[Row] = []
        """In use, by index."""
        self.spare = 0
        """Allocated rows beyond `rows`."""
        self.layers = [template.new_zeros(0, *template.shape[1:]) for _ in range(layers)]
        """Each [rows * capacity, 2 * kv_heads, head_dim]: keys first, then values."""

    def resize(self, rows: int) -> None:
        """Allocates exactly `rows` rows and keeps what those in use hold."""
        kept = len(self.rows) * self.capacity
        for i, old in enumerate(self.layers):
            # zeros, not empty: a masked position may hold anything but NaN
            new = old.new_zeros(rows * self.capacity, *old.shape[1:])
            new[:kept] = old[:kept]
            self.layers[i] = new
        self.spare = rows - len(self.rows)


class Row:
    """Room for the keys and values of one request."""

    __slots__ = ("filled", "index", "pool")

    def __init__(self, pool: Pool, index: int) -> None:
        self.pool, self.index = pool, index
        self.filled = 0
        """Tokens whose keys and values it holds."""

    @property
    def start(self) -> int:
        """Of its first token in the pool's tensors."""
        return self.index * self.pool.capacity

    def read(self, start: int, end: int) -> Tensor:
        """Copy of tokens [start, end): [layers, end - start, 2 * kv_heads, head_dim]."""
        return torch.stack([layer[self.start + start : self.start + end] for layer in self.pool.layers])

    def write(self, start: int, blocks: list[Tensor]) -> None:
        """Puts blocks of tokens (as from `read`) at `start`, one after another."""
        for i, layer in enumerate(self.pool.layers):
            kv = torch.cat([block[i] for block in blocks])
            layer[self.start + start : self.start + start + len(kv)] = kv


class KvStore:
    """All pools under one budget."""

    def __init__(
        self, *, budget: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.budget = budget
        """Tokens."""
        self.kept = 0
        """Tokens of kept prefixes; kept by their owner."""
        self._template = torch.zeros(1, 2 * kv_heads, head_dim, dtype=dtype, device=device)
        self._num_layers = layers
        self._pools: dict[int, Pool] = {}

    @property
    def allocated(self) -> int:
        """Tokens of all rows, in use or spare."""
        return sum((len(p.rows) + p.spare) * p.capacity for p in self._pools.values())

    @property
    def free(self) -> int:
        """Tokens of the budget that nothing holds."""
        return self.budget - self.allocated - self.kept

    def capacity_for(self, tokens: int) -> int:
        """The smallest capacity that holds `tokens`: 64, 96, 128, 192, 256, 384, ... or the whole budget."""
        capacity = _SMALLEST
        while capacity < tokens:
            power_of_two = capacity & (capacity - 1) == 0
            capacity = capacity * 3 // 2 if power_of_two else capacity * 4 // 3
        return min(capacity, self.budget)

    def reserve(self, tokens: int, evict: Callable[[int], None]) -> Row | None:
        """A row that holds `tokens`, or None while there is no room.

        `evict(n)` is called to free `n` tokens of kept prefixes.
        """
        capacity = self.capacity_for(tokens)
        pool = self._pools.setdefault(capacity, Pool(capacity, self._template, self._num_layers))
        if not pool.spare and not self._grow(pool, evict):
            larger = [p for p in self._pools.values() if p.capacity > capacity and p.spare]
            if larger:
                pool = min(larger, key=lambda p: p.capacity)
            elif not self._drop_spares() or not self._grow(pool, evict):
                return None
        row = Row(pool, len(pool.rows))
        pool.rows.append(row)
        pool.spare -= 1
        return row

    def _grow(self, pool: Pool, evict: Callable[[int], None]) -> bool:
        """Adds half as many rows again, as growing copies the pool; fewer where the budget ends."""
        rows = len(pool.rows)
        wanted = 1 + rows // 2
        if self.free < wanted * pool.capacity:
            evict(wanted * pool.capacity - self.free)
        added = min(wanted, self.free // pool.capacity)
        if added > 0:
            pool.resize(rows + added)
        return added > 0

    def _drop_spares(self) -> bool:
        """Gives all spare rows back to the budget; whether there were any."""
        spares = [p for p in self._pools.values() if p.spare]
        for pool in spares:
            pool.resize(len(pool.rows))
        return bool(spares)

    def release(self, row: Row, *, poisoned: bool = False) -> None:
        """Gives a row back; the last row of its pool moves into its place. `poisoned` wipes non-finite numbers."""
        pool = row.pool
        last = pool.rows.pop()
        pool.spare += 1
        for layer in pool.layers:
            if poisoned:
                layer[row.start : row.start + pool.capacity] = 0
            if last is not row:
                layer[row.start : row.start + last.filled] = layer[last.start : last.start + last.filled]
        if last is not row:
            pool.rows[row.index] = last
            last.index = row.index

    def clear(self) -> None:
        """Forgets every row; the owners of rows forget them too."""
        self._pools.clear()
