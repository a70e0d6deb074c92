"""Held-out scores: the same tasks before, during and after training, played with named weights.

Evaluation turns are recorded (kind `eval`) and never train. A task whose world failed is counted apart and left out of
every mean; both halves of a comparison then lack it. When most have failed there is no score at all.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from claw_train.config import StreamConfig
from claw_train.errors import GuardError
from claw_train.hosting.episode import Episode, EpisodeSpec, derive_seed
from claw_train.hosting.pool import HostPool
from claw_train.ledger import Ledger
from claw_train.protocols import Engine, Renderer
from claw_train.types import RewardStatus, Sampling, Trajectory, Turn, TurnKind, Version

_LEAST_VALID_SHARE = 0.5
"""Of the tasks of an evaluation; below it what is left says little of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """One held-out task, tried once."""

    task_id: str
    instruction: str
    outcome: float | None
    """Verified, in [0, 1]; None when the world failed or the context ran out."""
    parsable: bool
    """The first reply held an action the environment could carry out."""
    replies: tuple[str, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """An evaluation: one row a task, in a fixed order."""

    split: str
    version: str
    rows: tuple[TaskScore, ...]

    @property
    def mean(self) -> float | None:
        """Mean outcome over tasks whose world held; None when there is none."""
        valid = [row.outcome for row in self.rows if row.outcome is not None]
        return sum(valid) / len(valid) if valid else None

    @property
    def parse_share(self) -> float | None:
        """Share of parsable first replies over the same tasks; None when there is none."""
        valid = [row.parsable for row in self.rows if row.outcome is not None]
        return sum(valid) / len(valid) if valid else None

    def check(self, label: str) -> "Scores":
        """Itself.

        Raises:
            GuardError: fewer than half of the tasks have an outcome.
        """
        valid = sum(row.outcome is not None for row in self.rows)
        if valid < _LEAST_VALID_SHARE * len(self.rows):
            raise GuardError(
                f"held-out evaluation {label}, split {self.split}: {valid} of {len(self.rows)} tasks "
                f"({valid / len(self.rows):.0%}) have an outcome, at least {_LEAST_VALID_SHARE:.0%} are needed; the "
                "others were lost to the world, the engine or a full context, see the logs"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Both held-out splits under one set of weights."""

    label: str
    tasks: Scores
    """Trained families, unseen tasks."""
    families: Scores
    """Families never trained on."""

    def is_of(self, version: Version) -> bool:
        """Whether it was played with the weights of `version`, all of it."""
        return self.tasks.version == self.families.version == str(version)


class _EvalSink:
    """Keeps an episode's turns and records them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.turns: list[Turn] = []

    async def captured(self, turn: Turn) -> None:
        await self._ledger.capture(turn)

    async def bound(self, turn: Turn) -> None:
        assert turn.next_state is not None
        await self._ledger.bind(turn.id, turn.next_state)
        self.turns.append(turn)

    async def lost(self, turn: Turn) -> None:
        self.turns.append(turn)

    async def ended(self, trajectory: Trajectory) -> None:
        pass


class Evaluator:
    """Plays held-out tasks of every stream in turn."""

    def __init__(
        self,
        *,
        streams: Sequence[StreamConfig],
        pools: Mapping[str, HostPool],
        engine: Engine,
        renderer: Renderer,
        ledger: Ledger,
        sampling: Sampling,
        context: int,
        seed: int,
        policy: str,
        incarnation: int,
    ) -> None:
        """`incarnation` differs between processes of one run, so that a turn never has the key of another."""
        self._streams = streams
        self._pools = pools
        self._engine = engine
        self._renderer = renderer
        self._ledger = ledger
        self._sampling = sampling
        self._context = context
        self._seed = seed
        self._policy = policy
        self._attempt = incarnation * 1000

    async def score(self, *, split: str, num_tasks: int, version: Version | None, label: str) -> Scores:
        """Plays tasks 0 to `num_tasks - 1` of a split with `version`'s weights; the run's seed does not choose them.

        `label` separates the sampling of one evaluation from another's.

        Raises:
            GuardError: fewer than half of the tasks could be graded.
        """
        self._attempt += 1
        jobs = [self._task(i, split, version, label) for i in range(num_tasks)]
        rows = tuple(await asyncio.gather(*jobs))
        return Scores(split=split, version=str(version or "newest"), rows=rows).check(label)

    async def _task(self, i: int, split: str, version: Version | None, label: str) -> TaskScore:
        stream = self._streams[i % len(self._streams)]
        sink = _EvalSink(self._ledger)
        spec = EpisodeSpec(
            stream=stream.name,
            session=f"eval-{label}-{split}-{i:04d}",
            group_id=f"eval-{label}-{split}",
            attempt=self._attempt,
            kind=TurnKind.EVAL,
            policy=self._policy,
            split=split,
            env_seed=derive_seed("eval", split, i),
            sampling_seed=derive_seed(self._seed, "eval", label, split, i),
            sampling=self._sampling,
            context=self._context,
            version=version,
        )
        async with self._pools[stream.name].host() as host:
            episode = Episode(spec, self._engine, self._renderer, sink)
            trajectory = await episode.run(host)
        value = trajectory.outcome.value if trajectory.outcome.status is RewardStatus.VALID else None
        if trajectory.outcome.status is RewardStatus.UNGRADED:  # it talked until its context was full: not solved
            value = -1.0
        first = sink.turns[0].next_state if sink.turns else None
        return TaskScore(
            task_id=trajectory.task_id,
            instruction=episode.instruction,
            outcome=None if value is None else (value + 1.0) / 2.0,
            parsable=first is not None and first.command,
            replies=tuple(turn.completion.text for turn in sink.turns),
            num_tokens=sum(len(turn.completion.token_ids) for turn in sink.turns),
        )
