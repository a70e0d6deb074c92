"""Reports: paired differences, intervals, and files a person can read."""

import asyncio
import errno
import json
import random
from contextlib import nullcontext
from pathlib import Path

import pytest

from claw_train.errors import DiskError, GuardError
from claw_train.hosting.evaluate import Evaluation, Scores, TaskScore
from claw_train.hosting.pool import HostPool
from claw_train.ledger import Ledger, LedgerCounts
from claw_train.metrics import MetricsLog, read_metrics
from claw_train.orchestrator import Orchestrator
from claw_train.progress import StepView, clock, describe, sparkline
from claw_train.report import Report, bootstrap_interval, compare, draw_curve, replies_text
from claw_train.run_folder import RunFolder, open_private
from claw_train.types import Version

from .test_episode import LetterRenderer
from .test_four_loops import Counting, Moody, Straggler
from .test_four_loops import config as loops_config


def config():
    return loops_config(0)


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


def test_both_means_are_over_the_tasks_that_both_could_grade():
    got = compare(scores(0.0, 1.0, 1.0, None), scores(1.0, None, 1.0, 0.0))
    assert (got["before"], got["after"], got["difference"]) == (0.5, 1.0, 0.5)


def test_a_comparison_of_nothing_is_null():
    got = compare(scores(0.0, None), scores(None, 1.0))
    assert (got["before"], got["after"], got["difference"], got["interval_95"]) == (None, None, None, None)
    assert got["parse_share"] == got["among_parsable"] == {"before": None, "after": None}
    json.dumps(got, allow_nan=False)


@pytest.mark.parametrize("outcomes", [(None, None), (None, None, 1.0)])
def test_an_evaluation_that_mostly_failed_is_no_score(outcomes):
    with pytest.raises(GuardError, match=rf"{len(outcomes) - 2} of {len(outcomes)} tasks \((0|33)%\)"):
        scores(*outcomes).check("before")


@pytest.mark.parametrize(("failing", "fails"), [(1.0, True), (0.0, False)])
def test_an_engine_that_is_down_gives_no_score(tmp_path, failing, fails):
    settings = config()
    pools = {s.name: HostPool(s) for s in settings.streams}

    async def main():
        async with Ledger.open(tmp_path, create=True) as ledger:
            loops = Orchestrator(
                settings,
                ledger=ledger,
                engine=Straggler(random.Random(0), failing),
                trainer=Counting(),
                renderer=LetterRenderer(),
                judge=Moody(random.Random(0), 0.0),
                pools=pools,
                first_step=1,
                on_step=lambda report, row: None,
            )
            try:
                return await loops.evaluator.score(split="eval", num_tasks=4, version=None, label="before")
            finally:
                for pool in pools.values():
                    await pool.close()

    with pytest.raises(GuardError, match="evaluation before, split eval: 0 of 4") if fails else nullcontext():
        assert len(asyncio.run(main()).rows) == 4


@pytest.mark.parametrize("outcomes", [(), (None, 1.0)])
def test_an_evaluation_of_nothing_or_half_valid_passes(outcomes):
    assert scores(*outcomes).check("before").mean == (1.0 if outcomes else None)


def test_an_evaluation_is_used_again_for_the_same_weights_only(tmp_path):
    report = Report(RunFolder(tmp_path), config())
    old = scores(1.0, version="main-0-24")
    report.store(Evaluation(label="after", tasks=old, families=old))
    assert report.stored("after", Version("main", 0, 24)) is not None
    assert report.stored("after", Version("main", 1, 24)) is None
    assert report.stored("after", Version("main", 1, 48)) is None


def test_a_report_of_nothing_is_json_and_lines(tmp_path):
    report, nothing = Report(RunFolder(tmp_path), config()), scores()
    evaluation = Evaluation(label="x", tasks=nothing, families=nothing)
    report.finish(before=evaluation, after=evaluation, again=evaluation, counts=LedgerCounts(), swaps=[], history=[])
    assert "NaN" not in (tmp_path / "summary.json").read_text()
    assert report.lines()[0].startswith("held-out tasks     - -> -")


def test_what_holds_replies_is_its_owners_alone(tmp_path):
    report, some = Report(RunFolder(tmp_path), config()), scores(1.0)
    evaluation = Evaluation(label="x", tasks=some, families=some)
    report.store(evaluation)
    report.finish(before=evaluation, after=evaluation, again=evaluation, counts=LedgerCounts(), swaps=[], history=[])
    modes = {p.relative_to(tmp_path).as_posix(): p.stat().st_mode & 0o777 for p in tmp_path.rglob("*")}
    assert modes == {"eval": 0o700, "eval/x.json": 0o600} | dict.fromkeys(
        ("summary.json", "replies.md", "curve.png"), 0o600
    )


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


def test_tensorboard_shows_a_step_that_was_done_again_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = tmp_path / "metrics.jsonl"
    for from_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        log = MetricsLog(path, tmp_path / "tb", from_step=from_step)
        for step in steps:
            log.write(step, {"loss": 10.0 * from_step + step})
        log.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0)]


def test_small_figures_keep_their_digits_and_whole_ones_all_of_them(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl", tmp_path / "tb", from_step=0)
    log.write(1, {"mismatch_k3": 4.1234567e-9, "loss_tokens": 12345678.0})
    log.close()
    (row,) = read_metrics(tmp_path / "m.jsonl")
    assert (row["mismatch_k3"], row["loss_tokens"]) == (4.12346e-9, 12345678.0)


def test_a_log_that_cannot_be_cut_is_kept_whole(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    log = MetricsLog(path, tmp_path / "tb", from_step=0)
    log.write(1, {"loss": 1.0})
    log.close()
    before = path.read_bytes()

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskError, match="No space left"):
        MetricsLog(path, tmp_path / "tb", from_step=0)
    assert path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"m.jsonl", "tb"}


def _opens_a_full_disk_for(name):
    return lambda path, mode: Path("/dev/full").open("ab") if path.name == name else open_private(path, mode)


def test_a_full_disk_is_named_by_whoever_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("claw_train.metrics.open_private", _opens_a_full_disk_for("m.jsonl"))
    full = MetricsLog(tmp_path / "m.jsonl", tmp_path / "tb", from_step=0)
    with pytest.raises(DiskError, match=r"m\.jsonl cannot be written: No space left"):
        full.write(1, {"loss": 1.0})
    with pytest.raises(DiskError, match=r"m\.jsonl"):
        full.close()


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
