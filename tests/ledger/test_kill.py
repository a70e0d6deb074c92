"""kill -9 anywhere: sums hold, nothing is trained twice, and the surviving run is the uninterrupted one."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from claw_train.crash import POINTS
from claw_train.ledger import Ledger
from claw_train.ledger.export import consumed_turns, iter_turns, reader, step_records
from claw_train.ledger.states import StepStatus
from tests.ledger.workload import STEPS, TURNS

KILLED = -9
USED = sorted(
    p for p in POINTS if p.startswith(("ledger.", "trainer.checkpoint.")) and not p.startswith(("ledger.erase",))
)
LATER = ["ledger.capture.after", "ledger.judge.before", "ledger.trajectory.after", "ledger.drop.before"]
LATER += ["ledger.lease.after", "ledger.consume.before", "trainer.checkpoint.after_rename"]


def outcome(run_dir: Path) -> tuple[list[tuple[str, int]], str]:
    """What was trained on, in order and whatever the attempt, and the last checkpoint's trace."""
    order = [(t.session, t.index) for t in consumed_turns(run_dir)]
    return order, (run_dir / f"checkpoint-{STEPS}.json").read_text()


async def check_sums(run_dir: Path) -> None:
    async with Ledger.open(run_dir, create=False) as ledger:
        counts = await ledger.audit()
        assert counts.pending == 0
        assert counts.total == counts.consumed + counts.dropped


def check_records(run_dir: Path) -> None:
    files = (run_dir / "records").glob("*.jsonl")
    lines = [json.loads(line)["seq"] for path in files for line in path.read_bytes().splitlines()]
    connection = reader(run_dir)
    wanted = [row[0] for row in connection.execute("SELECT seq FROM events WHERE what <> 'step' ORDER BY seq")]
    connection.close()
    assert sorted(lines) == wanted


def check(run_dir: Path, expected: tuple[list[tuple[str, int]], str]) -> None:
    order, trace = outcome(run_dir)
    assert order == expected[0]
    assert len(set(order)) == len(order)
    assert trace == expected[1]
    committed = [s.step for s in step_records(run_dir) if s.status is StepStatus.COMMITTED]
    assert committed == list(range(1, STEPS + 1))
    asyncio.run(check_sums(run_dir))
    check_records(run_dir)


@pytest.fixture(scope="module")
def uninterrupted(workload, tmp_path_factory: pytest.TempPathFactory):
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert workload.start(run_dir)["exit"] == 0
    expected = outcome(run_dir)
    assert len(expected[0]) > 2 * STEPS
    check(run_dir, expected)
    return expected


@pytest.mark.parametrize(("point", "nth"), [*((p, 1) for p in USED), *((p, 3) for p in LATER)])
def test_kill_at_a_crash_point(workload, uninterrupted, run_dir, point, nth):
    if point.startswith("ledger.reconcile"):
        assert workload.start(run_dir, kill_after=20 * nth)["exit"] == KILLED  # something to reconcile
        nth = 1
    assert workload.start(run_dir, crash_at=f"{point}:{nth}")["exit"] == KILLED
    assert workload.start(run_dir)["exit"] == 0
    check(run_dir, uninterrupted)


def test_kill_at_every_crash_point_in_turn(workload, uninterrupted, run_dir):
    kills = [workload.start(run_dir, crash_at=f"{point}:1")["exit"] for point in USED]
    assert kills.count(KILLED) > len(USED) // 2
    assert workload.start(run_dir)["exit"] == 0
    check(run_dir, uninterrupted)


@pytest.mark.parametrize("seed", range(5))
def test_kills_at_random_times(workload, uninterrupted, run_dir, seed):
    draw = random.Random(seed)
    for _ in range(4):
        workload.start(run_dir, kill_after=draw.randrange(15, 60))  # never thrice in one lease: that is poison
    assert workload.start(run_dir)["exit"] == 0
    check(run_dir, uninterrupted)


@pytest.mark.parametrize(("moment", "erased"), [("before", 0), ("after", TURNS)])
def test_a_killed_erasure_is_all_or_none(workload, run_dir, moment, erased):
    assert workload.start(run_dir)["exit"] == 0
    assert workload.start(run_dir, work="erase", crash_at=f"ledger.erase.{moment}")["exit"] == KILLED
    turns = list(iter_turns(run_dir, session="g0-0"))
    assert sum(t.turn is None for t in turns) == erased
    assert len(turns) == TURNS
    asyncio.run(check_sums(run_dir))
