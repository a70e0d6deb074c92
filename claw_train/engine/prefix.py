"""Kept keys and values of prefixes, so that a prompt seen before is not computed again.

In: rows whose tokens are computed. Out: blocks to copy into a new row. A tree of blocks of 16 tokens grows from one
root per (weights, adapter), so nothing computed under other weights can ever match. The least recently used leaf goes
first when room is needed. It knows no request.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from torch import Tensor

from claw_train.engine.kv import KvStore, Row

BLOCK = 16
"""Tokens of a block."""


def boundaries(root: str, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Names the prefixes of 1, 2, ... whole blocks of `tokens`, short of the last token.

    `root` names the weights; two names are equal if and only if the weights and the tokens are.
    """
    name = root.encode()
    names: list[bytes] = []
    for start in range(0, len(tokens) - BLOCK, BLOCK):
        block = array("q", tokens[start : start + BLOCK]).tobytes()
        name = hashlib.blake2b(name + block, digest_size=16).digest()
        names.append(name)
    return tuple(names)


class _Node:
    __slots__ = ("by_first", "children", "kv", "parent", "tokens")

    def __init__(self, parent: "_Node | None", tokens: tuple[int, ...], kv: Tensor | None) -> None:
        self.parent, self.tokens, self.kv = parent, tokens, kv
        self.children: dict[tuple[int, ...], _Node] = {}
        self.by_first: dict[int, _Node] = {}
        """Newest child for each first token: the candidate for a partial match."""


class PrefixCache:
    """The tree, inside the budget of `store`."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self._roots: dict[Hashable, _Node] = {}
        self._recent: OrderedDict[_Node, None] = OrderedDict()

    def match(self, key: Hashable, tokens: Sequence[int]) -> list[Tensor]:
        """Blocks [layers, n, 2 * kv_heads, head_dim] that cover the longest kept prefix of `tokens`."""
        node = self._roots.get(key)
        found: list[Tensor] = []
        position = 0
        while node is not None:
            child = node.children.get(tuple(tokens[position : position + BLOCK]))
            if child is None or child.kv is None:
                break
            found.append(child.kv)
            position += BLOCK
            node = child
        if node is not None:
            self._touch(node)
            if position < len(tokens) and (partial := node.by_first.get(tokens[position])) and partial.kv is not None:
                common = _common(partial.tokens, tokens[position : position + BLOCK])
                found.append(partial.kv[:, :common])
        return found

    def keep(self, key: Hashable, tokens: Sequence[int], row: Row) -> None:
        """Keeps all whole blocks of `tokens`, whose keys and values `row` holds, as far as there is room."""
        node = self._roots.setdefault(key, _Node(None, (), None))
        position = 0
        while position + BLOCK <= len(tokens):
            block = tuple(tokens[position : position + BLOCK])
            child = node.children.get(block)
            if child is None:
                if self._store.free < BLOCK and not self._evict_one(sparing=node):
                    break
                child = self._add(node, block, row.read(position, position + BLOCK))
            node = child
            position += BLOCK
        self._touch(node)

    def _add(self, parent: _Node, block: tuple[int, ...], kv: Tensor) -> _Node:
        child = _Node(parent, block, kv)
        parent.children[block] = child
        parent.by_first[block[0]] = child
        self._store.kept += BLOCK
        self._touch(child)
        return child

    def _touch(self, node: _Node | None) -> None:
        """Marks a path as used, the leaf first, so that a parent is always more recent than its children."""
        while node is not None and node.parent is not None:
            self._recent[node] = None
            self._recent.move_to_end(node)
            node = node.parent

    def evict(self, tokens: int) -> None:
        """Frees at least `tokens` tokens, or everything."""
        target = self._store.kept - tokens
        while self._store.kept > target and self._evict_one():
            pass

    def _evict_one(self, sparing: _Node | None = None) -> bool:
        oldest = next(iter(self._recent), None)
        if oldest is None or oldest is sparing:
            return False
        self._forget(oldest)
        assert oldest.parent is not None
        del oldest.parent.children[oldest.tokens]
        if oldest.parent.by_first.get(oldest.tokens[0]) is oldest:
            del oldest.parent.by_first[oldest.tokens[0]]
        return True

    def _forget(self, node: _Node) -> None:
        del self._recent[node]
        node.kv = None
        self._store.kept -= BLOCK

    def drop(self, key: Hashable | None = None) -> None:
        """Forgets everything under `key`; None is all keys."""
        roots = list(self._roots.values()) if key is None else [self._roots[key]] if key in self._roots else []
        while roots:
            node = roots.pop()
            roots.extend(node.children.values())
            if node.kv is not None:
                self._forget(node)
        if key is None:
            self._roots.clear()
        else:
            self._roots.pop(key, None)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
