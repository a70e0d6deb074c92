"""Small valid values for the ledger's tests."""

from claw_envs.types import NextState, Role, TerminalState
from claw_train.ledger import GroupRecord
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

V3 = Version("main", 0, 3)
PLUS = Reward(value=1.0, status=RewardStatus.VALID, source="rules", votes=(1, 1, -1), judge_version="r1", reason="ok")
FAILED = Reward(value=None, status=RewardStatus.INFRA_ERROR, source="judge", reason="timeout")


def group(index: int = 0, *, size: int = 1) -> GroupRecord:
    return GroupRecord(id=f"g{index}", stream="terminal", index=index, seed=2**63 + index, size=size)


def turn(
    session: str = "g0-0",
    index: int = 0,
    *,
    group_id: str = "g0",
    attempt: int = 0,
    kind: TurnKind = TurnKind.MAIN,
    prompt: tuple[int, ...] = (1, 2, 3),
    reply: tuple[int, ...] = (70000, 5, 6),
    version: Version = V3,
    status: TurnStatus = TurnStatus.OK,
    text: str = "ls -la",
) -> Turn:
    completion = Completion(
        token_ids=reply,
        logprobs=tuple(-1 / (3 + i) for i in range(len(reply))),
        versions=(version,) * len(reply),
        finish_reason="stop",
        sampling=Sampling(temperature=0.7, seed=11, stop=("</s>",)),
        text=text,
    )
    return Turn(
        id=TurnId("terminal", session, index, attempt),
        policy="main",
        kind=kind,
        prompt_ids=prompt,
        completion=completion,
        status=status,
        group_id=group_id,
        task_id=f"task-{group_id}",
    )


def state(text: str = "total 0") -> NextState:
    return TerminalState(role=Role.TERMINAL, text=text, stdout=text, exit_code=0, newly_passed=("a",))


def scored(of: Turn, reward: Reward = PLUS) -> ScoredTurn:
    return ScoredTurn(turn=of, reward=reward, hints=("look first",))


def trajectory(session: str, turn_ids: tuple[TurnId, ...], *, group_id: str = "g0", failed: bool = False) -> Trajectory:
    return Trajectory(
        id=session,
        group_id=group_id,
        task_id=f"task-{group_id}",
        outcome=FAILED if failed else PLUS,
        status=TrajectoryStatus.INFRA_ERROR if failed else TrajectoryStatus.TERMINATED,
        turn_ids=turn_ids,
    )
