"""Samples to rows in which every common prefix is computed once.

In: `Sample`s. Out: `Tokens`, the trained tokens of the batch as flat tensors, and `Row`s, each a tree of tokens laid
out depth first: a token attends to its ancestors only, so a row gives each sample the log-probabilities and gradients
it would have alone. Nothing after a sample's last trained token is computed, and only the predecessors of trained
tokens get logits. Knows neither model nor loss.

    samples   a b c D E          row   a b c D | F          sources  c, D      (capitals are trained)
              a b c F G                                              c, F

Sorting samples by their ids puts each beside the one it shares most with, so the tree needs no nodes: a sample adds the
ids that it does not share with its predecessor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from claw_train.training.blocks import Block, query_blocks
from claw_train.types import Sample, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """All trained tokens of a batch, sample after sample; [N] each."""

    advantages: Tensor
    behaviour: Tensor
    """Log-probabilities as sampled."""
    fresh: Tensor
    """True where the sampling weights are the trainer's own."""
    lag: Tensor
    """Optimizer steps between the sampling version and the trainer's."""

    def __len__(self) -> int:
        return int(self.advantages.numel())

    def to(self, device: torch.device) -> "Tokens":
        """The same on a device."""
        return Tokens(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Strand:
    """What packing needs of one sample."""

    ids: tuple[int, ...]
    """[L] cut after the last input that matters."""
    trained: tuple[int, ...]
    """Positions of trained tokens, ascending; the logits come from the position before."""
    targets: tuple[int, ...]
    """Ids of the trained tokens."""
    tokens: tuple[int, ...]
    """Index in `Tokens` of each."""
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One forward and backward pass over P packed tokens with U places that need logits and n trained tokens."""

    ids: Tensor
    """[P]"""
    positions: Tensor
    """[P] distance from the start of the sample."""
    blocks: tuple[Block, ...]
    """Which queries see which keys."""
    sources: Tensor
    """[U] packed places whose logits are needed; one for each pair of place and temperature."""
    temperatures: Tensor
    """[U]"""
    item_source: Tensor
    """[n] index into `sources`, ascending."""
    item_token: Tensor
    """[n] index into `Tokens`."""
    item_target: Tensor
    """[n] token id."""

    def to(self, device: torch.device) -> "Row":
        """The same on a device."""
        tensors = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "blocks"}
        return Row(**tensors, blocks=tuple(block.to(device) for block in self.blocks))


def flatten(samples: Sequence[Sample], current: Version) -> Tokens:
    """The trained tokens of `samples`, in order.

    Args:
        samples: of one batch.
        current: the trainer's version before the update.

    Raises:
        ValueError: a sample trains its first token, or was sampled at temperature 0.
    """
    advantages: list[float] = []
    behaviour: list[float] = []
    fresh: list[bool] = []
    lag: list[int] = []
    for sample in samples:
        if sample.temperature <= 0:
            raise ValueError(f"a greedy sample (temperature {sample.temperature}) has no log-probabilities to train on")
        if sample.loss_mask and sample.loss_mask[0]:
            raise ValueError("the first token of a sample is trained, but nothing comes before it")
        for i, trained in enumerate(sample.loss_mask):
            if trained:
                version = sample.versions[i]
                assert version is not None
                advantages.append(sample.advantages[i])
                behaviour.append(sample.behaviour_logprobs[i])
                fresh.append(version == current or _both_base(version, current))
                lag.append(max(0, current.step - version.step))
    return Tokens(
        advantages=torch.tensor(advantages, dtype=torch.float32),
        behaviour=torch.tensor(behaviour, dtype=torch.float32),
        fresh=torch.tensor(fresh, dtype=torch.bool),
        lag=torch.tensor(lag, dtype=torch.float32),
    )


def _both_base(one: Version, other: Version) -> bool:
    """Step 0 is the untouched base, whichever lineage begins there."""
    return one.policy == other.policy and one.step == other.step == 0


def strands(samples: Sequence[Sample], *, zero_advantage: bool) -> list[Strand | None]:
    """What each sample needs computed; None where nothing.

    Args:
        samples: of one batch, in the order given to `flatten`.
        zero_advantage: whether tokens without an advantage are needed (for the KL term).
    """
    result: list[Strand | None] = []
    token = 0
    for sample in samples:
        trained: list[int] = []
        tokens: list[int] = []
        for i, is_trained in enumerate(sample.loss_mask):
            if not is_trained:
                continue
            if zero_advantage or sample.advantages[i] != 0.0:
                trained.append(i)
                tokens.append(token)
            token += 1
        if trained:
            result.append(
                Strand(
                    ids=sample.token_ids[: trained[-1]],
                    trained=tuple(trained),
                    targets=tuple(sample.token_ids[i] for i in trained),
                    tokens=tuple(tokens),
                    temperature=sample.temperature,
                )
            )
        else:
            result.append(None)
    return result


def pack(parts: Sequence[Strand], max_tokens: int) -> list[Row]:
    """Lays strands out in rows of at most `max_tokens` packed tokens.

    A strand longer than `max_tokens` gets a row of its own.
    """
    rows: list[Row] = []
    builder = _RowBuilder()
    for part in sorted(parts, key=lambda p: p.ids):
        if builder.size and builder.size + builder.cost(part.ids) > max_tokens:
            rows.append(builder.build())
            builder = _RowBuilder()
        builder.add(part)
    if builder.size:
        rows.append(builder.build())
    return rows


def split(parts: Sequence[Strand], count: int) -> list[list[Strand]]:
    """Deals strands to `count` ranks: runs of neighbours in sorted order, of about equal packed size.

    A rank may get none.
    """
    ordered = sorted(parts, key=lambda p: p.ids)
    costs = [len(p.ids) - _common(p.ids, ordered[i - 1].ids if i else ()) + 1 for i, p in enumerate(ordered)]
    total, done = sum(costs), 0
    shares: list[list[Strand]] = [[] for _ in range(count)]
    for part, cost in zip(ordered, costs, strict=True):
        middle = done + cost / 2
        shares[min(count - 1, math.floor(middle * count / total))].append(part)
        done += cost
    return shares


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


class _RowBuilder:
    """A row under construction; strands must come in sorted order."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._path: list[int] = []
        """Packed places of the last strand."""
        self._last: tuple[int, ...] = ()
        self._segments: list[tuple[list[int], int, int]] = []
        """For each run of new tokens: the places of its ancestors, its start and its end."""
        self._sources: dict[tuple[int, float], int] = {}
        self._items: list[tuple[int, int, int]] = []

    @property
    def size(self) -> int:
        return len(self._ids)

    def cost(self, ids: tuple[int, ...]) -> int:
        """Packed tokens that adding `ids` takes."""
        return len(ids) - _common(ids, self._last)

    def add(self, part: Strand) -> None:
        shared = _common(part.ids, self._last)
        start = len(self._ids)
        new = part.ids[shared:]
        path = self._path[:shared]
        if new:
            self._segments.append((path, start, start + len(new)))
        self._ids.extend(new)
        self._positions.extend(range(shared, len(part.ids)))
        self._path = path + list(range(start, start + len(new)))
        self._last = part.ids
        for position, target, token in zip(part.trained, part.targets, part.tokens, strict=True):
            key = (self._path[position - 1], part.temperature)
            source = self._sources.setdefault(key, len(self._sources))
            self._items.append((source, token, target))

    def build(self) -> Row:
        items = sorted(self._items)
        return Row(
            ids=torch.tensor(self._ids, dtype=torch.long),
            positions=torch.tensor(self._positions, dtype=torch.long),
            blocks=query_blocks(self._segments),
            sources=torch.tensor([place for place, _ in self._sources], dtype=torch.long),
            temperatures=torch.tensor([temperature for _, temperature in self._sources], dtype=torch.float32),
            item_source=torch.tensor([source for source, _, _ in items], dtype=torch.long),
            item_token=torch.tensor([token for _, token, _ in items], dtype=torch.long),
            item_target=torch.tensor([target for _, _, target in items], dtype=torch.long),
        )
