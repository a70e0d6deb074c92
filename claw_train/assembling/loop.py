"""The assembling loop: scored turns and trajectory ends in, batches out.

Every group ends here once: in a batch, or dropped with a reason; a dropped group gives its slot back at once, a batch's
groups keep theirs until its weights are served. The ledger hears of each decision before the next loop does.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from claw_train.assembling.batching import Assembled, assemble, is_stale, usable, why_invalid
from claw_train.assembling.groups import GroupBook
from claw_train.assembling.guards import FailureGuards
from claw_train.config import MethodConfig, TrainerConfig
from claw_train.ledger import CompleteGroup, DropReason, GroupRecord, Ledger
from claw_train.slots import SlotBudget
from claw_train.types import ScoredTurn, Trajectory, TurnId

logger = logging.getLogger(__name__)


class Assembling:
    """State of the loop: open groups, ready groups, the next step."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        slots: SlotBudget,
        batches: "asyncio.Queue[Assembled]",
        trainer: TrainerConfig,
        method: MethodConfig,
        guards: FailureGuards,
        next_step: int,
        shuffle_seed: int | None,
        on_group_end: Callable[[CompleteGroup], None],
    ) -> None:
        self._ledger = ledger
        self._slots = slots
        self._batches = batches
        self._trainer = trainer
        self._method = method
        self._guards = guards
        self._step = next_step
        self._shuffle_seed = shuffle_seed
        self._on_group_end = on_group_end
        self._book = GroupBook()
        self._ready: list[CompleteGroup] = []
        self.drops: Counter[str] = Counter()
        """Reason -> turns dropped."""

    def expect(self, record: GroupRecord) -> None:
        """A group starts."""
        self._book.open(record)

    @property
    def waiting(self) -> Mapping[str, str]:
        """Open groups and what each lacks."""
        return self._book.waiting

    @property
    def num_ready(self) -> int:
        """Groups complete and not yet in a batch."""
        return len(self._ready)

    async def run(self, scored: "asyncio.Queue[ScoredTurn | Trajectory]") -> None:
        """Takes until cancelled."""
        await self._make_batches()
        while True:
            item = await scored.get()
            if isinstance(item, ScoredTurn):
                self._guards.see_turn(item)
                group = self._book.add_turn(item)
            else:
                self._guards.see_trajectory(item)
                group = self._book.add_trajectory(item)
            if group is not None:
                await self.settle(group)
                await self._make_batches()

    async def settle(self, group: CompleteGroup, *, recovered: bool = False) -> None:
        """Decides whether a complete group may train."""
        self._on_group_end(group)
        if not usable(group):
            reasons = {why_invalid(t) for t in group.trajectories if t.outcome.value is None}
            await self._drop_group(group, min(reasons, default=DropReason.INFRA_ERROR))
            return
        if not recovered:
            await self._ledger.eligible([s.turn.id for s in group.scored])
        self._ready.append(group)

    async def _make_batches(self) -> None:
        """Makes batches while there are groups and steps for them."""
        while self._step <= self._trainer.steps:
            await self._drop_stale()
            if len(self._ready) < self._trainer.groups_per_step:
                return
            self._ready.sort(key=lambda g: g.record.index)
            chosen = self._ready[: self._trainer.groups_per_step]
            del self._ready[: self._trainer.groups_per_step]
            seed = None if self._shuffle_seed is None else self._shuffle_seed + self._step
            assembled = assemble(chosen, step=self._step, method=self._method, shuffle_seed=seed)
            await self._drop_turns(assembled.dropped, step=self._step)
            leased = [span.turn_id for sample in assembled.batch.samples for span in sample.spans]
            if leased:
                await self._ledger.lease(self._step, leased)
            self._step += 1
            await self._batches.put(assembled)

    async def _drop_stale(self) -> None:
        limit = self._trainer.max_staleness
        fresh: list[CompleteGroup] = []
        for group in self._ready:
            if is_stale(group, step=self._step, max_staleness=limit):
                await self._drop_group(group, DropReason.STALE)
            else:
                fresh.append(group)
        self._ready = fresh

    async def _drop_group(self, group: CompleteGroup, reason: DropReason) -> None:
        logger.info("group %s dropped: %s", group.record.id, reason)
        await self._drop_turns(dict.fromkeys((s.turn.id for s in group.scored), reason))
        self._slots.release(group.record.id, reason)

    async def _drop_turns(self, dropped: Mapping[TurnId, DropReason], *, step: int | None = None) -> None:
        """`step` names the batch that a turn was left out of: if that step is lost, its whole groups come back."""
        for reason, turn_ids in _by_reason(dropped.items()).items():
            self.drops[reason] += len(turn_ids)
            await self._ledger.drop(turn_ids, reason, step=step)


def _by_reason(rows: Iterable[tuple[TurnId, DropReason]]) -> Mapping[DropReason, Sequence[TurnId]]:
    grouped: dict[DropReason, list[TurnId]] = defaultdict(list)
    for turn_id, reason in rows:
        grouped[reason].append(turn_id)
    return grouped
