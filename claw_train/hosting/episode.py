"""One episode: prompt, reply, next state, until the environment ends it.

In: an environment host, an engine, a renderer. Out: every turn to a `Sink` as soon as it is known, and the trajectory
at the end. A failure of the world or the engine becomes an invalid trajectory; it never raises and never scores 0. An
episode that outgrows the model's context ends truncated and ungraded: neither the world nor the engine failed.
Knows nothing of rewards, judges or training.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from claw_envs.errors import ClawEnvError
from claw_train.errors import EngineError
from claw_train.hosting.host import EnvHost, EnvironmentBroke, EpisodeStart, StepOutcome
from claw_train.protocols import Engine, Renderer
from claw_train.types import (
    Completion,
    GenerateRequest,
    Reward,
    RewardStatus,
    Sampling,
    Trajectory,
    TrajectoryStatus,
    Turn,
    TurnId,
    TurnKind,
    TurnStatus,
    Version,
)

logger = logging.getLogger(__name__)

_LOOP_MIN_TOKENS = 12
_LOOP_MAX_PERIOD = 3


class Sink(Protocol):
    """Where an episode's data goes."""

    async def captured(self, turn: Turn) -> None:
        """A reply was sampled; returns once it is durable."""
        ...

    async def bound(self, turn: Turn) -> None:
        """The turn's next state is known."""
        ...

    async def lost(self, turn: Turn) -> None:
        """The turn will never have a next state."""
        ...

    async def ended(self, trajectory: Trajectory) -> None:
        """The episode is over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """What to play."""

    stream: str
    session: str
    group_id: str
    attempt: int
    kind: TurnKind
    policy: str
    split: str
    env_seed: int
    """Chooses the task; equal for all members of a group."""
    sampling_seed: int
    """Differs between members; with the same weights it reproduces the replies."""
    sampling: Sampling
    context: int
    """Tokens that a prompt and its reply may have together; an episode that needs more is cut without a grade."""
    version: Version | None = None
    """Weights to use; None is the newest at each turn."""


def derive_seed(*parts: object) -> int:
    """A 31-bit seed that depends on every part and on nothing else."""
    digest = hashlib.sha256("/".join(str(p) for p in parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def turn_status(completion: Completion, stop_token_ids: Sequence[int]) -> TurnStatus:
    """Tells a sound reply from a cut, aborted, empty or looping one."""
    if completion.finish_reason == "abort":
        return TurnStatus.ABORTED
    ids = [t for t in completion.token_ids if t not in stop_token_ids]
    if not completion.text.strip() or not ids:
        return TurnStatus.DEGENERATE
    tail = ids[-_LOOP_MIN_TOKENS:]
    if len(tail) == _LOOP_MIN_TOKENS and any(
        all(tail[i] == tail[i - period] for i in range(period, len(tail))) for period in range(1, _LOOP_MAX_PERIOD + 1)
    ):
        return TurnStatus.DEGENERATE
    return TurnStatus.CUT if completion.finish_reason == "length" else TurnStatus.OK


class Episode:
    """The state of one running episode."""

    def __init__(self, spec: EpisodeSpec, engine: Engine, renderer: Renderer, sink: Sink) -> None:
        self._spec = spec
        self._engine = engine
        self._renderer = renderer
        self._sink = sink
        self._turn_ids: list[TurnId] = []
        self._task_id = ""
        self.instruction = ""
        """What the environment asked for; empty before the reset."""

    async def run(self, host: EnvHost) -> Trajectory:
        """Plays to the end and reports it."""
        try:
            trajectory = await self._play(host)
        except ClawEnvError as error:
            broke = isinstance(error, EnvironmentBroke)
            level = logging.WARNING if broke else logging.INFO
            logger.log(level, "session %s: world failed: %s", self._spec.session, error, exc_info=broke)
            trajectory = self._invalid(TrajectoryStatus.INFRA_ERROR, str(error))
        await self._sink.ended(trajectory)
        return trajectory

    async def _play(self, host: EnvHost) -> Trajectory:
        spec = self._spec
        start = await host.reset(seed=spec.env_seed, options={"split": spec.split})
        self._task_id = start.task_id
        self.instruction = start.instruction
        if not start.valid:
            return self._invalid(TrajectoryStatus.INFRA_ERROR, start.failure_kind or "reset failed")
        prompt_ids = self._renderer.start(opening_messages(start))
        while True:
            need = len(prompt_ids) + spec.sampling.max_new_tokens
            if need > spec.context:
                return self._out_of_context(need)
            turn = await self._ask(prompt_ids)
            if turn.status in (TurnStatus.ENGINE_ERROR, TurnStatus.ABORTED):
                await self._lose(turn)
                return self._invalid(TrajectoryStatus.ENGINE_ERROR, f"turn {turn.id} {turn.status}")
            try:
                outcome = await host.step(turn.completion.text)
            except ClawEnvError:
                await self._lose(turn)
                raise
            await self._sink.bound(replace(turn, next_state=outcome.next_state))
            if outcome.terminated or outcome.truncated or not outcome.valid:
                return self._finished(outcome)
            prompt_ids = self._renderer.extend(
                prompt_ids,
                turn.completion.token_ids,
                ({"role": "user", "content": outcome.text},),
            )

    async def _lose(self, turn: Turn) -> None:
        """Takes a turn without a next state out of the trajectory."""
        self._turn_ids.remove(turn.id)
        await self._sink.lost(turn)

    async def _ask(self, prompt_ids: tuple[int, ...]) -> Turn:
        """Samples one reply and captures the turn, whatever became of it."""
        spec = self._spec
        turn_id = TurnId(spec.stream, spec.session, len(self._turn_ids), spec.attempt)
        sampling = replace(
            spec.sampling,
            stop_token_ids=self._renderer.stop_token_ids,
            seed=derive_seed(spec.sampling_seed, turn_id.index),
        )
        request = GenerateRequest(id=str(turn_id), prompt_ids=prompt_ids, sampling=sampling, version=spec.version)
        try:
            completion = await self._engine.generate(request)
            status = turn_status(completion, self._renderer.stop_token_ids)
        except EngineError as error:
            logger.warning("turn %s: %s", turn_id, error)
            completion = Completion(
                token_ids=(), logprobs=(), versions=(), finish_reason="abort", sampling=sampling, text=""
            )
            status = TurnStatus.ENGINE_ERROR
        turn = Turn(
            id=turn_id,
            policy=spec.policy,
            kind=spec.kind,
            prompt_ids=prompt_ids,
            completion=completion,
            status=status,
            group_id=spec.group_id,
            task_id=self._task_id,
        )
        self._turn_ids.append(turn_id)
        await self._sink.captured(turn)
        return turn

    def _finished(self, outcome: StepOutcome) -> Trajectory:
        if not outcome.valid:
            kind = outcome.next_state.failure_kind
            return self._invalid(TrajectoryStatus.INFRA_ERROR, str(kind) if kind else "invalid")
        reward = Reward(value=2.0 * outcome.reward - 1.0, status=RewardStatus.VALID, source="env")
        ended = TrajectoryStatus.TERMINATED if outcome.terminated else TrajectoryStatus.TRUNCATED
        return self._trajectory(ended, reward)

    def _invalid(self, status: TrajectoryStatus, reason: str) -> Trajectory:
        return self._trajectory(
            status, Reward(value=None, status=RewardStatus.INFRA_ERROR, source="env", reason=reason)
        )

    def _out_of_context(self, need: int) -> Trajectory:
        """The environment grades only at an end of its own, so nothing is known of what was achieved."""
        reason = f"out of context: prompt and reply need {need} tokens of {self._spec.context}"
        logger.info("session %s: %s", self._spec.session, reason)
        ungraded = Reward(value=None, status=RewardStatus.UNGRADED, source="env", reason=reason)
        return self._trajectory(TrajectoryStatus.TRUNCATED, ungraded)

    def _trajectory(self, status: TrajectoryStatus, outcome: Reward) -> Trajectory:
        return Trajectory(
            id=self._spec.session,
            group_id=self._spec.group_id,
            task_id=self._task_id,
            outcome=outcome,
            status=status,
            turn_ids=tuple(self._turn_ids),
        )


def opening_messages(start: EpisodeStart) -> list[dict[str, str]]:
    """System prompt, worked examples, instruction."""
    messages = [{"role": "system", "content": start.system_prompt}] if start.system_prompt else []
    messages.extend(dict(m) for m in start.example_messages)
    return [*messages, {"role": "user", "content": start.instruction}]
