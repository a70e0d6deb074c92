"""The hosting loop: takes a slot a group, plays the group's episodes at once, hands on every turn as it is bound.

Which group comes when depends on the run's seed alone: group `i` of a run has the same stream, task and sampling seeds
whenever and however often it is played. Interrupted groups of an earlier process come first.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from claw_train.config import StreamConfig
from claw_train.hosting.episode import Episode, EpisodeSpec, derive_seed
from claw_train.hosting.pool import HostPool
from claw_train.ledger import DropReason, GroupRecord, Ledger
from claw_train.protocols import Engine, Renderer
from claw_train.slots import SlotBudget
from claw_train.types import RewardStatus, Sampling, ScoredTurn, Trajectory, Turn, TurnKind, TurnStatus

_LOST = {TurnStatus.ENGINE_ERROR: DropReason.ENGINE_ERROR, TurnStatus.ABORTED: DropReason.ABORTED}


def group_stream(streams: Sequence[StreamConfig], *, seed: int, index: int) -> StreamConfig:
    """The stream of group `index`, drawn by share."""
    point = derive_seed(seed, "stream", index) / 2**31 * sum(s.share for s in streams)
    for stream in streams:
        point -= stream.share
        if point < 0:
            return stream
    return streams[-1]


def new_groups(streams: Sequence[StreamConfig], *, seed: int, size: int, first: int) -> Iterator[GroupRecord]:
    """Groups `first`, `first + 1`, ... without end."""
    for index in itertools.count(first):
        stream = group_stream(streams, seed=seed, index=index)
        yield GroupRecord(
            id=f"g{index:06d}",
            stream=stream.name,
            index=index,
            seed=derive_seed(seed, "group", index),
            task_id=None,
            size=size,
            attempt=0,
        )


class TrainSink:
    """Sends an episode's data to the ledger, then to judging and assembling."""

    def __init__(
        self, ledger: Ledger, turns: "asyncio.Queue[Turn]", scored: "asyncio.Queue[ScoredTurn | Trajectory]"
    ) -> None:
        self._ledger = ledger
        self._turns = turns
        self._scored = scored
        self.num_tokens = 0
        """Sampled so far."""

    async def captured(self, turn: Turn) -> None:
        """Committed when it returns."""
        self.num_tokens += len(turn.completion.token_ids)
        await self._ledger.capture(turn)

    async def bound(self, turn: Turn) -> None:
        """Committed, then sent to judging."""
        assert turn.next_state is not None
        await self._ledger.bind(turn.id, turn.next_state)
        await self._turns.put(turn)

    async def lost(self, turn: Turn) -> None:
        """Its next state will never come."""
        await self._ledger.drop([turn.id], _LOST.get(turn.status, DropReason.INFRA_ERROR))

    async def ended(self, trajectory: Trajectory) -> None:
        """Committed, then sent to assembling."""
        await self._ledger.end_trajectory(trajectory)
        await self._scored.put(trajectory)


class Hosting:
    """State of the loop."""

    def __init__(
        self,
        *,
        pools: Mapping[str, HostPool],
        engine: Engine,
        renderer: Renderer,
        ledger: Ledger,
        slots: SlotBudget,
        sink: TrainSink,
        sampling: Sampling,
        context: int,
        seed: int,
        policy: str,
        on_group_start: Callable[[GroupRecord], None],
    ) -> None:
        self._pools = pools
        self._engine = engine
        self._renderer = renderer
        self._ledger = ledger
        self._slots = slots
        self._sink = sink
        self._sampling = sampling
        self._context = context
        self._seed = seed
        self._policy = policy
        self._on_group_start = on_group_start
        self.out_of_context = 0
        """Those of them that were cut, ungraded, because they outgrew the context."""

    async def run(self, *, reissue: Sequence[GroupRecord], fresh: Iterator[GroupRecord]) -> None:
        """Plays groups until cancelled: first `reissue` (already in the ledger), then `fresh` ones."""
        async with asyncio.TaskGroup() as groups:
            for record in itertools.chain(reissue, fresh):
                await self._slots.take(record.id)
                if record.attempt == 0:
                    await self._ledger.add_group(record)
                self._on_group_start(record)
                groups.create_task(self._play(record))

    async def _play(self, record: GroupRecord) -> None:
        async with asyncio.TaskGroup() as members:
            for member in range(record.size):
                members.create_task(self._episode(record, member))

    async def _episode(self, record: GroupRecord, member: int) -> None:
        spec = EpisodeSpec(
            stream=record.stream,
            session=f"{record.id}-{member:02d}",
            group_id=record.id,
            attempt=record.attempt,
            kind=TurnKind.MAIN,
            policy=self._policy,
            split="train",
            env_seed=record.seed,
            sampling_seed=derive_seed(self._seed, "sampling", record.index, member),
            sampling=self._sampling,
            context=self._context,
        )
        async with self._pools[record.stream].host() as host:
            trajectory = await Episode(spec, self._engine, self._renderer, self._sink).run(host)
        self.out_of_context += trajectory.outcome.status is RewardStatus.UNGRADED
