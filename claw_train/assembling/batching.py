"""Complete groups to a batch: step values, advantages, age check, one sample per unbroken prefix.

In: complete groups and the step they are for. Out: the batch, and for every turn that does not train the reason. Pure:
nothing is written here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from claw_train.assembling.advantages import StepValue, advantages, buckets, shuffle_rows, step_values
from claw_train.config import MethodConfig
from claw_train.ledger import CompleteGroup, DropReason
from claw_train.types import (
    Batch,
    Reward,
    RewardStatus,
    Sample,
    ScoredTurn,
    Span,
    Trajectory,
    Turn,
    TurnId,
    TurnStatus,
    Version,
)

_FAILED_REPLY = {
    TurnStatus.CUT: DropReason.CUT,
    TurnStatus.ABORTED: DropReason.ABORTED,
    TurnStatus.DEGENERATE: DropReason.DEGENERATE,
    TurnStatus.ENGINE_ERROR: DropReason.ENGINE_ERROR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A batch and the fate of everything that is not in it."""

    batch: Batch
    dropped: Mapping[TurnId, DropReason]
    mean_outcome: float
    """In [-1, 1], over valid trajectories; what the reward curve shows, never shuffled."""
    group_ids: tuple[str, ...]


def oldest_step(group: CompleteGroup) -> int:
    """Optimizer step of the oldest token of a group; a large number when it has no tokens."""
    return min((v.step for s in group.scored for v in s.turn.completion.versions), default=2**31)


def newest_step(group: CompleteGroup) -> int:
    """Optimizer step of the newest token of a group; -1 when it has no tokens."""
    return max((v.step for s in group.scored for v in s.turn.completion.versions), default=-1)


def is_stale(group: CompleteGroup, *, step: int, max_staleness: int) -> bool:
    """True when the oldest token is too old for optimizer step `step`, which starts from weights `step - 1`."""
    lost = newest_step(group) > step - 1  # sampled by weights that a crash took before their checkpoint
    return lost or (step - 1) - oldest_step(group) > max_staleness


def valid_trajectories(group: CompleteGroup) -> list[Trajectory]:
    """Those with a valid outcome; the others stay out of every mean."""
    return [t for t in group.trajectories if t.outcome.status is RewardStatus.VALID]


def why_invalid(trajectory: Trajectory) -> DropReason:
    """The reason for turns of an episode without a valid outcome: nobody's fault, or cut before it was graded."""
    ungraded = trajectory.outcome.status is RewardStatus.UNGRADED
    return DropReason.NO_REWARD if ungraded else DropReason.INFRA_ERROR


def usable(group: CompleteGroup) -> bool:
    """True when at least two members can be compared."""
    return len(valid_trajectories(group)) >= 2


def assemble(
    groups: Sequence[CompleteGroup], *, step: int, method: MethodConfig, shuffle_seed: int | None = None
) -> Assembled:
    """Makes the batch of one step from usable, fresh groups.

    `shuffle_seed` permutes outcomes and votes over the batch's trajectories (negative control).
    """
    ordered = sorted(groups, key=lambda g: g.record.index)
    dropped: dict[TurnId, DropReason] = {}
    rows: list[StepValue] = []
    turns: list[ScoredTurn] = []
    outcomes: list[float] = []
    for group in ordered:
        by_id = {s.turn.id: s for s in group.scored}
        valid = {t.id for t in valid_trajectories(group)}
        for trajectory in group.trajectories:
            members = [by_id[i] for i in trajectory.turn_ids if i in by_id]
            if trajectory.id not in valid:
                dropped.update({s.turn.id: why_invalid(trajectory) for s in members})
                continue
            outcome = trajectory.outcome.value
            assert outcome is not None
            outcomes.append(outcome)
            for scored in members:
                reason = _untrainable(scored.turn, method)
                if reason is not None:
                    dropped[scored.turn.id] = reason
                    continue
                turns.append(scored)
                rows.append(_row(scored, trajectory, outcome))
    if shuffle_seed is not None:
        rows = shuffle_rows(rows, seed=shuffle_seed)
    values = step_values(rows, method)
    by_turn = dict(zip((s.turn.id for s in turns), advantages(rows, values, std_floor=method.std_floor), strict=True))
    constant = _constant_buckets(rows, values)
    trained: dict[TurnId, float] = {}
    for scored, row in zip(turns, rows, strict=True):
        if scored.reward.status is RewardStatus.INFRA_ERROR:
            dropped[scored.turn.id] = DropReason.JUDGE_FAILED
        elif (row.group_id, row.index) in constant:
            dropped[scored.turn.id] = DropReason.NO_SIGNAL
        else:
            trained[scored.turn.id] = by_turn[scored.turn.id]
    samples = tuple(_samples(ordered, trained))
    return Assembled(
        batch=Batch(step=step, samples=samples, num_loss_tokens=sum(sum(s.loss_mask) for s in samples)),
        dropped=dropped,
        mean_outcome=sum(outcomes) / len(outcomes) if outcomes else 0.0,
        group_ids=tuple(g.record.id for g in ordered),
    )


def _untrainable(turn: Turn, method: MethodConfig) -> DropReason | None:
    """Why a turn cannot train whatever it was worth; None when it can."""
    if not turn.completion.token_ids:
        return DropReason.DEGENERATE
    if not turn.completion.sampling.full_support:
        return DropReason.PARTIAL_SUPPORT
    if turn.status in (TurnStatus.CUT, TurnStatus.DEGENERATE) and method.cut_reply == "penalise":
        return None
    return _FAILED_REPLY.get(turn.status)


def _row(scored: ScoredTurn, trajectory: Trajectory, outcome: float) -> StepValue:
    return StepValue(
        group_id=trajectory.group_id,
        trajectory_id=trajectory.id,
        index=scored.turn.id.index,
        outcome=outcome,
        process=_process(scored.reward),
        failed_reply=scored.turn.status is not TurnStatus.OK,
    )


def _process(reward: Reward) -> float | None:
    """Mean of valid votes; 0.0 for an abstention, None for a judge that failed."""
    if reward.status is RewardStatus.VALID:
        return reward.value
    return None if reward.status is RewardStatus.INFRA_ERROR else 0.0


def _constant_buckets(rows: Sequence[StepValue], values: Sequence[float]) -> set[tuple[str, int]]:
    """Buckets of several turns whose values are all equal."""
    of = {bucket: [values[i] for i in members] for bucket, members in buckets(rows).items()}
    return {bucket for bucket, v in of.items() if len(v) > 1 and max(v) - min(v) < 1e-9}


def _samples(groups: Iterable[CompleteGroup], trained: Mapping[TurnId, float]) -> Iterable[Sample]:
    for group in groups:
        by_id = {s.turn.id: s.turn for s in group.scored}
        for trajectory in group.trajectories:
            chain: list[Turn] = []
            for turn in (by_id[i] for i in trajectory.turn_ids if i in by_id):
                if chain and not _continues(chain[-1], turn):
                    yield from _sample(chain, trained)
                    chain = []
                chain.append(turn)
            yield from _sample(chain, trained)


def _continues(earlier: Turn, later: Turn) -> bool:
    """True when the later prompt begins with the earlier prompt and reply, id by id."""
    prefix = earlier.prompt_ids + earlier.completion.token_ids
    return later.prompt_ids[: len(prefix)] == prefix


def _sample(chain: Sequence[Turn], trained: Mapping[TurnId, float]) -> Iterable[Sample]:
    """One sample of turns on one prefix; none when no turn of it trains."""
    keep = [i for i, turn in enumerate(chain) if turn.id in trained]
    if not keep:
        return
    chain = chain[: keep[-1] + 1]  # nothing behind the last trained reply matters
    last = chain[-1]
    ids = last.prompt_ids + last.completion.token_ids
    n = len(ids)
    mask = [False] * n
    logprobs, gains = [0.0] * n, [0.0] * n
    versions: list[Version | None] = [None] * n
    spans: list[Span] = []
    for turn in chain:
        if turn.id not in trained:
            continue
        start = len(turn.prompt_ids)
        end = start + len(turn.completion.token_ids)
        spans.append(Span(turn.id, start, end))
        mask[start:end] = [True] * (end - start)
        logprobs[start:end] = turn.completion.logprobs
        versions[start:end] = turn.completion.versions
        gains[start:end] = [trained[turn.id]] * (end - start)
    yield Sample(
        spans=tuple(spans),
        token_ids=ids,
        loss_mask=tuple(mask),
        behaviour_logprobs=tuple(logprobs),
        versions=tuple(versions),
        advantages=tuple(gains),
        temperature=last.completion.sampling.temperature,
        policy=last.policy,
        group_id=last.group_id,
    )
