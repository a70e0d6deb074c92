"""Reports: paired differences, intervals, and files a person can read."""

import json

import pytest

from claw_train.hosting.evaluate import Scores, TaskScore
from claw_train.metrics import MetricsLog, read_metrics
from claw_train.progress import StepView, clock, describe, sparkline
from claw_train.report import bootstrap_interval, compare, draw_curve, replies_text


def scores(*outcomes, parsable=None, version="main-0-0"):
    rows = [
        TaskScore(
            task_id=f"fam{i % 2}/eval/{i}/1",
            instruction=f"do {i}",
            outcome=outcome,
            parsable=parsable[i] if parsable else True,
            replies=(f"reply {i}",),
            num_tokens=3,
        )
        for i, outcome in enumerate(outcomes)
    ]
    return Scores(split="eval", version=version, rows=tuple(rows))


def test_the_difference_is_paired_by_task():
    got = compare(scores(0.0, 1.0, 0.0, 0.0), scores(1.0, 1.0, 1.0, 0.0))
    assert got["difference"] == 0.5
    assert got["by_family"] == {"fam0": [0.0, 1.0], "fam1": [0.5, 0.5]}


def test_a_task_whose_world_failed_is_left_out_and_counted():
    got = compare(scores(0.0, None, 0.0), scores(1.0, 1.0, None))
    assert (got["tasks"], got["ungraded"]) == (1, 2)
    assert got["difference"] == 1.0


def test_success_among_parsable_replies_is_reported_apart():
    before = scores(1.0, 0.0, 0.0, 0.0, parsable=[True, True, False, False])
    got = compare(before, scores(1.0, 0.0, 1.0, 1.0))
    assert got["among_parsable"] == {"before": 0.5, "after": 0.75}
    assert got["parse_share"] == {"before": 0.5, "after": 1.0}


def test_the_interval_covers_the_mean_and_shrinks_with_more_data():
    few, many = [0.0, 1.0] * 5, [0.0, 1.0] * 100
    low, high = bootstrap_interval(few)
    assert low < 0.5 < high
    low2, high2 = bootstrap_interval(many)
    assert high2 - low2 < high - low
    assert bootstrap_interval([1.0] * 9) == (1.0, 1.0)


def test_replies_show_both_sides():
    text = replies_text(scores(0.0), scores(1.0))
    assert text.index("do 0") < text.index("**before** (outcome 0)") < text.index("**after** (outcome 1)")


def test_the_curve_is_a_picture(tmp_path):
    history = [{"step": 0, "heldout": 0.1}, {"step": 1, "reward": 0.2}, {"step": 2, "reward": 0.4, "heldout": 0.5}]
    draw_curve(tmp_path / "curve.png", history, title="t")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_go_on_behind_the_step_of_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path, tmp_path / "tb", from_step=0)
    for step in (1, 2, 3):
        first.write(step, {"loss": step / 10, "bad": float("nan")})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # cut by a crash
    second = MetricsLog(path, tmp_path / "tb", from_step=2)
    second.write(3, {"loss": 9.0})
    second.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(1, 0.1), (2, 0.2), (3, 9.0)]
    assert "bad" not in json.loads(path.read_text().splitlines()[0])
    assert list((tmp_path / "tb").iterdir())


def test_a_step_reads_as_one_line():
    view = StepView(
        step=3,
        steps=24,
        reward=0.5,
        heldout=None,
        tokens_per_s=120.4,
        staleness=0.5,
        queues={"turns": 1, "ready": 2},
        elapsed_s=61,
        left_s=3700,
    )
    assert describe(view) == (
        "step 3/24  reward 0.50  held-out -  120 tok/s  staleness 0.5  [turns 1 ready 2]  01:01, 1:01:40 left"
    )


@pytest.mark.parametrize(("seconds", "text"), [(0, "00:00"), (59.9, "00:59"), (3600, "1:00:00")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_sparkline_spans_the_range():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
