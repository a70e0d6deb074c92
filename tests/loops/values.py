"""Small sound values for the loops' tests."""

from claw_envs.types import FailureKind, Role, TerminalState
from claw_train.ledger import CompleteGroup, GroupRecord
from claw_train.types import (
    Completion,
    Reward,
    RewardStatus,
    Sampling,
    ScoredTurn,
    Trajectory,
    TrajectoryStatus,
    Turn,
    TurnId,
    TurnKind,
    TurnStatus,
    Version,
)

BASE = Version("main", 0, 0)


def state(text="ok", **fields) -> TerminalState:
    return TerminalState(role=Role.TERMINAL, text=text, **fields)


def broken_state() -> TerminalState:
    return state(valid=False, failure_kind=FailureKind.SANDBOX_LOST)


def turn(
    session="g0-0",
    index=0,
    *,
    group="g0",
    prompt=(1, 2, 3),
    reply=(4, 5),
    text="ls",
    status=TurnStatus.OK,
    version=BASE,
    next_state=None,
    attempt=0,
) -> Turn:
    return Turn(
        id=TurnId("terminal", session, index, attempt),
        policy="main",
        kind=TurnKind.MAIN,
        prompt_ids=tuple(prompt),
        completion=Completion(
            token_ids=tuple(reply),
            logprobs=tuple(-0.5 for _ in reply),
            versions=tuple(version for _ in reply),
            finish_reason="stop",
            sampling=Sampling(temperature=0.7),
            text=text,
        ),
        status=status,
        group_id=group,
        task_id="t",
        next_state=state() if next_state is None else next_state,
    )


def reward(value=None, status=None) -> Reward:
    if status is None:
        status = RewardStatus.ABSTAIN if value is None else RewardStatus.VALID
    return Reward(value=value, status=status, source="test")


def scored(of: Turn, value=None, status=None) -> ScoredTurn:
    return ScoredTurn(turn=of, reward=reward(value, status))


def trajectory(session="g0-0", *, group="g0", outcome=1.0, turns=1, status=TrajectoryStatus.TERMINATED) -> Trajectory:
    verdict = reward(outcome) if outcome is not None else reward(status=RewardStatus.INFRA_ERROR)
    return Trajectory(
        id=session,
        group_id=group,
        task_id="t",
        outcome=verdict,
        status=status if outcome is not None else TrajectoryStatus.INFRA_ERROR,
        turn_ids=tuple(TurnId("terminal", session, i, 0) for i in range(turns)),
    )


def record(group="g0", *, index=0, size=2) -> GroupRecord:
    return GroupRecord(id=group, stream="terminal", index=index, seed=7, size=size)


def group(name="g0", *, index=0, outcomes=(1.0, -1.0), votes=None, version=BASE, statuses=None) -> CompleteGroup:
    """One-turn trajectories with the given outcomes; `votes[i]` is a value, None (abstains) or a RewardStatus."""
    trajectories, turns = [], []
    for i, outcome in enumerate(outcomes):
        session = f"{name}-{i}"
        trajectories.append(trajectory(session, group=name, outcome=outcome))
        vote = votes[i] if votes else None
        status = vote if isinstance(vote, RewardStatus) else None
        of = turn(
            session, group=name, version=version, reply=(10 + i, 2), status=statuses[i] if statuses else TurnStatus.OK
        )
        turns.append(scored(of, None if status else vote, status))
    return CompleteGroup(
        record=record(name, index=index, size=len(outcomes)), trajectories=tuple(trajectories), scored=tuple(turns)
    )
