"""Step values and advantages: hand-computed numbers, and who is compared with whom."""

import math

import pytest

from claw_train.assembling.advantages import StepValue, advantages, shuffle_rows, step_values
from claw_train.config import MethodConfig

METHOD = MethodConfig()


def row(trajectory, outcome, process=0.0, *, group="g", index=0, failed=False):
    return StepValue(
        group_id=group, trajectory_id=trajectory, index=index, outcome=outcome, process=process, failed_reply=failed
    )


def test_step_value_is_outcome_plus_vote():
    rows = [row("a", 1.0, 1.0), row("b", -1.0, -1.0), row("c", 1.0, 0.0)]
    assert step_values(rows, METHOD) == [2.0, -2.0, 1.0]


def test_weights_scale_both_parts():
    method = MethodConfig(outcome_weight=0.5, process_weight=2.0)
    assert step_values([row("a", 1.0, -1.0)], method) == [-1.5]


def test_one_failed_judge_takes_the_votes_of_its_whole_bucket():
    rows = [row("a", 1.0, -1.0), row("b", -1.0, None), row("c", 1.0, -1.0, index=1)]
    assert step_values(rows, METHOD) == [1.0, -1.0, 0.0]


def test_advantages_are_standardised_with_the_population_deviation():
    rows = [row("a", 1.0), row("b", -1.0), row("c", -1.0), row("d", -1.0)]
    values = step_values(rows, METHOD)
    got = advantages(rows, values, std_floor=0.0)
    std = math.sqrt(((1.5) ** 2 + 3 * 0.5**2) / 4)  # mean -0.5
    assert got == pytest.approx([1.5 / std, -0.5 / std, -0.5 / std, -0.5 / std])


def test_step_indices_are_compared_apart():
    rows = [row("a", 1.0), row("b", -1.0), row("a", 1.0, index=1), row("b", 1.0, index=1)]
    got = advantages(rows, step_values(rows, METHOD), std_floor=0.0)
    assert got == pytest.approx([1.0, -1.0, 0.0, 0.0])


def test_groups_are_compared_apart():
    rows = [row("a", 1.0), row("b", 1.0), row("c", -1.0, group="h"), row("d", -1.0, group="h")]
    assert advantages(rows, step_values(rows, METHOD), std_floor=1e-6) == [0.0] * 4


def test_a_bucket_of_one_is_measured_against_the_batch_not_taken_raw():
    rows = [row("a", 1.0), row("b", -1.0), row("c", 1.0, index=1)]
    values = step_values(rows, METHOD)
    mean = sum(values) / 3
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / 3)
    assert advantages(rows, values, std_floor=0.0)[2] == pytest.approx((1.0 - mean) / std)


def test_equal_values_give_no_advantage_even_with_a_tiny_floor():
    rows = [row("a", 0.1 + 0.2), row("b", 0.3)]
    assert advantages(rows, [0.1 + 0.2, 0.3], std_floor=1e-12) == [0.0, 0.0]


def test_a_failed_reply_never_gains():
    rows = [row("a", 1.0, failed=True), row("b", -1.0, -1.0)]
    values = step_values(rows, METHOD)
    assert values[0] == -1.0
    got = advantages(rows, values, std_floor=0.0)
    assert got[0] <= 0.0


def test_shuffle_keeps_the_values_and_the_places_but_not_who_has_which():
    rows = [row(str(i), float(i), 0.0, group=f"g{i % 2}", index=i % 3) for i in range(60)]
    mixed = shuffle_rows(rows, seed=1)
    assert [(r.group_id, r.trajectory_id, r.index) for r in mixed] == [
        (r.group_id, r.trajectory_id, r.index) for r in rows
    ]
    for t in range(3):
        assert sorted(r.outcome for r in mixed if r.index == t) == sorted(r.outcome for r in rows if r.index == t)
    assert sum(m.outcome != r.outcome for m, r in zip(mixed, rows, strict=True)) > 40
    assert mixed == shuffle_rows(rows, seed=1)


def test_rows_and_values_must_match():
    with pytest.raises(ValueError, match="1 rows but 0 values"):
        advantages([row("a", 1.0)], [], std_floor=0.0)
