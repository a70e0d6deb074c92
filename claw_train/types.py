"""The values that flow between the loops: from a request to a weight update.

    GenerateRequest -> Completion -> Turn -> ScoredTurn + Trajectory -> Sample -> Batch -> WeightRef

All are frozen; lengths and ranges are checked when a value is made, so a value that exists is sound. Token ids,
log-probabilities and versions are parallel tuples. Nothing here imports a loop, torch or an environment's internals.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from claw_envs.types import NextState


class TurnKind(StrEnum):
    """Main turns may train; side turns (titles, summaries, memory) and eval turns never do."""

    MAIN = "main"
    SIDE = "side"
    EVAL = "eval"


class TurnStatus(StrEnum):
    """How a reply ended. Only `OK` may ever carry a positive reward."""

    OK = "ok"
    CUT = "cut"
    """Ended by the length limit."""
    ABORTED = "aborted"
    DEGENERATE = "degenerate"
    """Empty or looping."""
    ENGINE_ERROR = "engine_error"


class RewardStatus(StrEnum):
    """Whether a reward has a value, and if not, why."""

    VALID = "valid"
    ABSTAIN = "abstain"
    """The judge saw the turn and declined: neither good nor bad can be told."""
    INFRA_ERROR = "infra_error"
    """The world or the judge failed."""
    UNGRADED = "ungraded"
    """Never judged: its next state never came, or no judge is configured."""


class TrajectoryStatus(StrEnum):
    """How an episode ended."""

    TERMINATED = "terminated"
    """By the policy's own declaration."""
    TRUNCATED = "truncated"
    """By a limit of ours: the environment's is graded all the same, the model's context is not."""
    INFRA_ERROR = "infra_error"
    """The world failed: the outcome is invalid."""
    ENGINE_ERROR = "engine_error"
    """The engine failed after retries: the outcome is invalid."""


class Version(NamedTuple):
    """Names one set of weights for ever. Every load or rollback starts a new lineage."""

    policy: str
    lineage: int
    step: int
    """Optimizer steps behind these weights; 0 is the base."""

    def __str__(self) -> str:
        return f"{self.policy}-{self.lineage}-{self.step}"

    @classmethod
    def parse(cls, text: str) -> "Version":
        """Reads `str(version)`.

        Raises:
            ValueError: not of the form policy-lineage-step.
        """
        try:
            policy, lineage, step = text.rsplit("-", 2)
            return cls(policy, int(lineage), int(step))
        except ValueError:
            raise ValueError(f"not a version (policy-lineage-step): {text!r}") from None


@dataclass(frozen=True, slots=True, order=True)
class TurnId:
    """Unique key of a turn; `str()` of it is the engine's request id."""

    stream: str
    session: str
    """One episode or conversation."""
    index: int
    """Position in its session, from 0."""
    attempt: int = 0
    """Raised each time the turn is replayed after a crash or an interruption."""

    def __str__(self) -> str:
        return f"{self.stream}/{self.session}/{self.index}/{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Stored with every reply: log-probabilities are those of this distribution."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 is off."""
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """None lets the engine choose."""

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1:
            raise ValueError(f"sampling out of range: {self}")

    @property
    def full_support(self) -> bool:
        """True when log-probabilities cover the whole vocabulary, so that importance ratios are exact."""
        return self.top_p == 1.0 and self.top_k == -1 and self.temperature > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One call of the engine: ids in, ids out."""

    id: str
    prompt_ids: tuple[int, ...]
    """[P]"""
    sampling: Sampling
    version: Version | None = None
    """Weights to use; None is the newest the engine serves."""
    live: bool = False
    """True for a waiting person: goes before hosted work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A sampled reply.

    Example: `token_ids=(5, 9, 2), logprobs=(-0.1, -2.0, -0.01), versions=(v3, v3, v4)`: weights were swapped
    before the last token.
    """

    token_ids: tuple[int, ...]
    """[T] as sampled, the end token included."""
    logprobs: tuple[float, ...]
    """[T] natural log, after temperature, of the distribution that was sampled."""
    versions: tuple[Version, ...]
    """[T]"""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    sampling: Sampling
    text: str
    """For people and parsers; never tokenised again."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(f"lengths differ: {[len(x) for x in (self.token_ids, self.logprobs, self.versions)]}")
        if not all(math.isfinite(x) for x in self.logprobs):
            raise ValueError("a log-probability is not finite: no importance ratio can be made of it")
        if self.finish_reason not in ("stop", "length", "abort"):
            raise ValueError(f"unknown finish_reason {self.finish_reason!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Log-probabilities of given tokens under some weights (a teacher, a reference)."""

    logprobs: tuple[float, ...]
    """[T]"""
    top_ids: tuple[tuple[int, ...], ...] = ()
    """[T, K]; empty when not asked for."""
    top_logprobs: tuple[tuple[float, ...], ...] = ()
    """[T, K]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One transition: what the policy saw, what it said, what followed."""

    id: TurnId
    policy: str
    kind: TurnKind
    prompt_ids: tuple[int, ...]
    """[P] exactly the ids that were served."""
    completion: Completion
    status: TurnStatus
    group_id: str
    """Trajectories of one task that are compared with one another."""
    task_id: str
    next_state: NextState | None = None
    """None until the next state is known."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"turn {self.id} has an empty prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """How good one action or one episode was, or why that is not known."""

    value: float | None
    """In [-1, 1]; None if and only if `status` is not `VALID`."""
    status: RewardStatus
    source: str
    """Who said so: `rules`, `llm`, `env`, ..."""
    votes: tuple[int, ...] = ()
    """Single votes in {-1, 0, 1}, in the order they came; empty where the source does not vote."""
    judge_version: str = ""
    reason: str = ""
    """For people: which rule fired, what failed."""

    def __post_init__(self) -> None:
        if (self.value is None) == (self.status is RewardStatus.VALID):
            raise ValueError(f"value {self.value} does not go with status {self.status}")
        if self.value is not None and not -1.0 <= self.value <= 1.0:
            raise ValueError(f"a reward lies in [-1, 1], got {self.value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTurn:
    """A turn that came back from judging: exactly one for each turn sent."""

    turn: Turn
    reward: Reward
    hints: tuple[str, ...] = ()
    """Candidates that say how the action should have differed."""

    def __post_init__(self) -> None:
        if self.turn.status is not TurnStatus.OK and (self.reward.value or 0.0) > 0:
            raise ValueError(f"turn {self.turn.id} is {self.turn.status}: its reward cannot be {self.reward.value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The end of an episode."""

    id: str
    """The session of its turns."""
    group_id: str
    task_id: str
    outcome: Reward
    status: TrajectoryStatus
    turn_ids: tuple[TurnId, ...]
    """In order."""


class Span(NamedTuple):
    """Where a turn's reply lies in a sample's ids: [start, end)."""

    turn_id: TurnId
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence to train on: turns on one unbroken prefix."""

    spans: tuple[Span, ...]
    token_ids: tuple[int, ...]
    """[L]"""
    loss_mask: tuple[bool, ...]
    """[L] True on trained tokens; each was sampled."""
    behaviour_logprobs: tuple[float, ...]
    """[L] as sampled; 0.0 where masked."""
    versions: tuple[Version | None, ...]
    """[L] None where masked."""
    advantages: tuple[float, ...]
    """[L] 0.0 where masked."""
    temperature: float
    """At which the trained tokens were sampled; the trainer's log-probabilities use it too."""
    policy: str
    group_id: str
    teacher_logprobs: tuple[float, ...] | None = None
    """[L] of the same ids under the teacher; None when there is no teacher."""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        parallel = (self.loss_mask, self.behaviour_logprobs, self.versions, self.advantages)
        if any(len(p) != n for p in parallel):
            raise ValueError(f"a sample's parallel fields differ in length: {n}, {[len(p) for p in parallel]}")
        if self.teacher_logprobs is not None and len(self.teacher_logprobs) != n:
            raise ValueError(f"{len(self.teacher_logprobs)} teacher log-probabilities for {n} tokens")
        covered = [False] * n
        after = 0
        for turn_id, start, end in self.spans:
            if not after <= start <= end <= n:
                raise ValueError(f"span [{start}, {end}) of turn {turn_id} overlaps another or leaves the {n} tokens")
            covered[start:end] = [True] * (end - start)
            after = end
        for i, trained in enumerate(self.loss_mask):
            if trained and (not covered[i] or self.versions[i] is None):
                raise ValueError(f"token {i} is trained but was never sampled")
            if not trained and (self.behaviour_logprobs[i] != 0.0 or self.advantages[i] != 0.0):
                raise ValueError(f"token {i} is masked but carries a value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimizer step consumes."""

    step: int
    """The step it is for; the trainer's weights before it are `step - 1`."""
    samples: tuple[Sample, ...]
    num_loss_tokens: int
    """Divisor of the token mean over the whole batch, whatever the micro-batches."""

    def __post_init__(self) -> None:
        n = sum(sum(s.loss_mask) for s in self.samples)
        if n != self.num_loss_tokens:
            raise ValueError(f"num_loss_tokens is {self.num_loss_tokens}, the masks sum to {n}")


class WeightKind(StrEnum):
    """What a weight folder holds."""

    LORA = "lora"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRef:
    """Published weights on disk (safetensors)."""

    version: Version
    kind: WeightKind
    path: str
    """A folder that never changes once it is named here."""
    checksum: str
    """sha256 of the safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What the trainer says of one optimizer step."""

    step: int
    weights: WeightRef
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Outputs only: loss, grad_norm, kl, mismatch_k3, ...; names are documented in `training/trainer.py`."""
    checkpoint: str | None = None
    """Folder of the checkpoint written by this step; None when this step wrote none."""
