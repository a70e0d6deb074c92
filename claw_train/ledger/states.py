"""Words of the ledger: the states of a turn, the legal moves between them, the reasons for a drop, and the sums.

    captured -> bound -> judged -> eligible -> leased(step) -> consumed(step)
    any of the first five -> dropped(reason);  side, eval and erased turns rest in states of their own

Knows no SQL and no loop.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from claw_train.errors import LedgerError
from claw_train.types import ScoredTurn, Trajectory, TurnKind


class State(StrEnum):
    """Where a turn stands."""

    CAPTURED = "captured"
    BOUND = "bound"
    """Its next state is known."""
    JUDGED = "judged"
    """It came back from judging, with a reward or with the reason why there is none."""
    ELIGIBLE = "eligible"
    """Assembling wants to train on it."""
    LEASED = "leased"
    """It is in the batch of a step that has not been committed."""
    CONSUMED = "consumed"
    """A committed step trained on it."""
    DROPPED = "dropped"
    SIDE = "side"
    EVAL = "eval"
    ERASED = "erased"
    """A tombstone: the key is kept, the content is gone."""


MAIN_STATES = (
    State.CAPTURED,
    State.BOUND,
    State.JUDGED,
    State.ELIGIBLE,
    State.LEASED,
    State.CONSUMED,
    State.DROPPED,
)
PENDING = frozenset({State.CAPTURED, State.BOUND, State.JUDGED, State.ELIGIBLE, State.LEASED})

_STEPS: Mapping[State, frozenset[State]] = {
    State.CAPTURED: frozenset({State.BOUND, State.DROPPED, State.ERASED}),
    State.BOUND: frozenset({State.JUDGED, State.DROPPED, State.ERASED}),
    State.JUDGED: frozenset({State.ELIGIBLE, State.DROPPED, State.ERASED}),
    State.ELIGIBLE: frozenset({State.LEASED, State.DROPPED, State.ERASED}),
    State.LEASED: frozenset({State.CONSUMED, State.DROPPED}),
    State.CONSUMED: frozenset({State.ERASED}),
    State.DROPPED: frozenset({State.ERASED}),
    State.SIDE: frozenset({State.ERASED}),
    State.EVAL: frozenset({State.ERASED}),
    State.ERASED: frozenset(),
}
_RECOVERY: Mapping[State, frozenset[State]] = {
    State.LEASED: frozenset({State.ELIGIBLE}),
    State.CONSUMED: frozenset({State.ELIGIBLE, State.DROPPED}),
    State.DROPPED: frozenset({State.ELIGIBLE}),
}


def first_state(kind: TurnKind) -> State:
    """The state of a turn of this kind when it is captured."""
    return {TurnKind.MAIN: State.CAPTURED, TurnKind.SIDE: State.SIDE, TurnKind.EVAL: State.EVAL}[kind]


def check_move(turn: object, old: State, new: State, *, recovery: bool = False) -> None:
    """Passes a legal move.

    Raises:
        LedgerError: the move is illegal; `recovery` allows those that only `reconcile` may make.
    """
    if new in _STEPS[old] or (recovery and new in _RECOVERY.get(old, frozenset())):
        return
    raise LedgerError(f"turn {turn} is {old} and cannot become {new}")


class DropReason(StrEnum):
    """Why a turn never trains."""

    CUT = "cut"
    ABORTED = "aborted"
    DEGENERATE = "degenerate"
    ENGINE_ERROR = "engine_error"
    INFRA_ERROR = "infra_error"
    JUDGE_FAILED = "judge_failed"
    NO_REWARD = "no_reward"
    """Judged, but neither an outcome nor a vote gives it a value."""
    NO_SIGNAL = "no_signal"
    """Its group is constant: nothing to learn from the comparison."""
    NO_NEXT_STATE = "no_next_state"
    STALE = "stale"
    """Sampled by weights that are too old at the step, or that no longer exist."""
    PARTIAL_SUPPORT = "partial_support"
    """Sampled greedily or from a truncated distribution: its log-probabilities give no importance ratio."""
    SHARE = "share"
    """Its session, task or user already supplies its share of the batch."""
    GUARD = "guard"
    """A guard skipped its step."""
    POISON = "poison"
    """The process died three times while it was leased."""
    INTERRUPTED = "interrupted"
    """Its episode was cut off by a crash; its group runs again."""
    ROLLED_BACK = "rolled_back"
    """The step that consumed it was undone by a guard."""
    RUN_ENDED = "run_ended"
    """The last step was taken while it waited."""


RECOVERY_REASONS = frozenset({DropReason.POISON, DropReason.INTERRUPTED, DropReason.ROLLED_BACK})


class StepStatus(StrEnum):
    """Whether a recorded step is part of the surviving weights."""

    COMMITTED = "committed"
    LOST = "lost"
    """Its checkpoint did not survive a crash; its turns became eligible again."""
    ROLLED_BACK = "rolled_back"
    """A guard undid it; its turns were dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One lease of rollouts: `size` episodes of one task that are compared with one another."""

    id: str
    stream: str
    index: int
    """Sequential per run, from 0."""
    seed: int
    size: int
    """Episodes."""
    task_id: str | None = None
    """None until an episode names it."""
    attempt: int = 0
    """Raised each time the group runs again; the attempt of the turns its episodes capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteGroup:
    """A finished group: every episode ended, every turn back from judging."""

    record: GroupRecord
    trajectories: tuple[Trajectory, ...]
    """By id."""
    scored: tuple[ScoredTurn, ...]
    """Judged turns by id. Those that came back from a recovery are eligible, whatever had been decided about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a run has to do to go on as if it had never stopped."""

    next_group_index: int
    reissue: tuple[GroupRecord, ...] = ()
    """Interrupted groups by index, with their old seed and the attempt to use now."""
    complete: tuple[CompleteGroup, ...] = ()
    """By group index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Turns by state. `total` is kept apart from the states, so `check` can fail."""

    total: int = 0
    """Main turns that are not erased."""
    captured: int = 0
    bound: int = 0
    judged: int = 0
    eligible: int = 0
    leased: int = 0
    consumed: int = 0
    dropped: int = 0
    side: int = 0
    eval: int = 0
    erased: int = 0
    dropped_by: Mapping[DropReason, int] = field(default_factory=dict[DropReason, int])

    @property
    def pending(self) -> int:
        """Main turns whose fate is open."""
        return self.captured + self.bound + self.judged + self.eligible + self.leased

    def check(self) -> "LedgerCounts":
        """Returns itself.

        Raises:
            LedgerError: the sum over the states is not the total.
        """
        if self.total != self.pending + self.consumed + self.dropped:
            raise LedgerError(f"ledger sum is broken: {self}")
        if sum(self.dropped_by.values()) != self.dropped:
            raise LedgerError(f"drop reasons do not sum to {self.dropped}: {dict(self.dropped_by)}")
        return self
