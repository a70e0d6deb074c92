"""From outcomes and votes to advantages: step values, standardised among a group's trajectories at the same step index.

Step value of turn t of trajectory i (arXiv 2603.10165, step-wise reward of general agents; `v = o + mean(votes)`):

    v[i, t] = outcome_weight * o[i] + process_weight * r[i, t]
    A[i, t] = (v[i, t] - mean over i of v[:, t]) / (population std over i of v[:, t] + floor)

A bucket is one group's turns at one step index. If the judge failed for any turn of a bucket, the whole bucket uses
outcomes only, since a missing vote is not a vote of 0. A bucket of one is measured against all values of the batch.
Pure functions of plain numbers; knows no tokens, ledger or queue.
"""

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from claw_train.config import MethodConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValue:
    """One turn's value before standardisation."""

    group_id: str
    trajectory_id: str
    index: int
    """Step index t."""
    outcome: float
    """o in [-1, 1]."""
    process: float | None
    """r in [-1, 1], 0.0 when the judge abstained, None when it failed."""
    failed_reply: bool = False
    """The reply was cut, empty or looping: its value is -1 at best and its advantage never positive."""


def step_values(rows: Sequence[StepValue], method: MethodConfig) -> list[float]:
    """V for each row. Rows of a bucket with a failed judge use the outcome alone."""
    without_judge = {(row.group_id, row.index) for row in rows if row.process is None}
    values: list[float] = []
    for row in rows:
        process = 0.0 if (row.group_id, row.index) in without_judge else row.process
        assert process is not None
        value = method.outcome_weight * row.outcome + method.process_weight * process
        values.append(min(value, -1.0) if row.failed_reply else value)
    return values


def buckets(rows: Sequence[StepValue]) -> dict[tuple[str, int], list[int]]:
    """(group, step index) -> positions of its rows: those that are compared with one another."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        found[row.group_id, row.index].append(i)
    return found


def advantages(rows: Sequence[StepValue], values: Sequence[float], *, std_floor: float) -> list[float]:
    """A for each row, in order; 0.0 throughout a bucket whose values are all equal."""
    if len(rows) != len(values):
        raise ValueError(f"{len(rows)} rows but {len(values)} values")
    result = [0.0] * len(rows)
    for members in buckets(rows).values():
        reference = [values[i] for i in (members if len(members) > 1 else range(len(rows)))]
        mean, std = statistics.fmean(reference), statistics.pstdev(reference)
        if std < 1e-9:  # a constant bucket tells nothing; rounding must not blow it up
            continue
        for i in members:
            advantage = (values[i] - mean) / (std + std_floor)
            result[i] = min(advantage, 0.0) if rows[i].failed_reply else advantage
    return result


def shuffle_rows(rows: Sequence[StepValue], *, seed: int) -> list[StepValue]:
    """Negative control: outcomes and votes change places between the batch's trajectories, step index by step index.

    What was said and in which group it stays; what it was worth comes from a random other trajectory, so any learning
    that remains does not come from the reward.
    """
    by_index: dict[int, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        by_index[row.index].append(i)
    rng = random.Random(seed)
    shuffled = list(rows)
    for members in (by_index[t] for t in sorted(by_index)):
        givers = members.copy()
        rng.shuffle(givers)
        for taker, giver in zip(members, givers, strict=True):
            shuffled[taker] = replace(rows[taker], outcome=rows[giver].outcome, process=rows[giver].process)
    return shuffled
