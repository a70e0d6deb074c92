"""Collects scored turns and trajectory ends until a group is complete. Order does not matter.

In: what judging and hosting emit, in any order. Out: a `CompleteGroup` once every trajectory has ended and each of its
turns came back from judging exactly once.
"""

from dataclasses import dataclass, field

from claw_train.errors import LedgerError
from claw_train.ledger import CompleteGroup, GroupRecord
from claw_train.types import ScoredTurn, Trajectory, TurnId


@dataclass(slots=True)
class _Open:
    record: GroupRecord
    trajectories: dict[str, Trajectory] = field(default_factory=dict[str, Trajectory])
    scored: dict[TurnId, ScoredTurn] = field(default_factory=dict[TurnId, ScoredTurn])

    def complete(self) -> bool:
        if len(self.trajectories) < self.record.size:
            return False
        return all(
            turn_id in self.scored for trajectory in self.trajectories.values() for turn_id in trajectory.turn_ids
        )


class GroupBook:
    """Groups under way, by id."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def open(self, record: GroupRecord) -> None:
        """Expects `record.size` trajectories from now on."""
        if record.id in self._open:
            raise LedgerError(f"group {record.id} is open already")
        self._open[record.id] = _Open(record)

    def add_turn(self, scored: ScoredTurn) -> CompleteGroup | None:
        """Takes one verdict; the group if this completes it.

        Raises:
            LedgerError: the turn came back twice, or its group is not open.
        """
        group = self._find(scored.turn.group_id)
        if scored.turn.id in group.scored:
            raise LedgerError(f"turn {scored.turn.id} came back from judging twice")
        group.scored[scored.turn.id] = scored
        return self._close_if_complete(group)

    def add_trajectory(self, trajectory: Trajectory) -> CompleteGroup | None:
        """Takes one ended trajectory; the group if this completes it.

        Raises:
            LedgerError: it ended twice, or its group is not open.
        """
        group = self._find(trajectory.group_id)
        if trajectory.id in group.trajectories:
            raise LedgerError(f"trajectory {trajectory.id} ended twice")
        group.trajectories[trajectory.id] = trajectory
        return self._close_if_complete(group)

    def _find(self, group_id: str) -> _Open:
        if group_id not in self._open:
            raise LedgerError(f"group {group_id} is not open")
        return self._open[group_id]

    def _close_if_complete(self, group: _Open) -> CompleteGroup | None:
        if not group.complete():
            return None
        del self._open[group.record.id]
        return CompleteGroup(
            record=group.record,
            trajectories=tuple(sorted(group.trajectories.values(), key=lambda t: t.id)),
            scored=tuple(sorted(group.scored.values(), key=lambda s: s.turn.id)),
        )

    @property
    def waiting(self) -> dict[str, str]:
        """Group -> what it still lacks, for the stall report."""
        return {
            group_id: f"{len(g.trajectories)}/{g.record.size} trajectories, {len(g.scored)} turns judged"
            for group_id, g in self._open.items()
        }
