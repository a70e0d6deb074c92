"""Whole runs: real processes and sockets, scripted replies, a real trainer on a tiny model; what a kill leaves."""

import asyncio
import json
import os
import signal

import pytest

import tests.helpers.toy_env  # noqa: F401  its next states are in the ledgers that are read here
from claw_train.crash import POINTS
from claw_train.ledger import Ledger, State
from claw_train.ledger.export import consumed_turns, iter_turns
from tests.helpers import runs
from tests.helpers.runs import Workplace, alive_with, call, loss_trace, start, wait_for

STEPS = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Workplace.make(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def uninterrupted(place):
    done = call(place.command(run="uninterrupted"))
    assert done.returncode == 0, done.stderr
    return place.path / "uninterrupted"


def consumed(run):
    """Step by step, which replies were trained on; how often a turn was replayed does not matter."""
    return [(t.session, t.index) for t in consumed_turns(run)]


def audit(run):
    async def check():
        async with Ledger.open(run, create=False) as ledger:
            return await ledger.audit()

    return asyncio.run(check())


def assert_equal_to(run, reference):
    counts = audit(run)
    assert counts.consumed == len(consumed(reference))
    assert consumed(run) == consumed(reference)
    assert loss_trace(run) == loss_trace(reference)
    assert len(set(consumed(run))) == len(consumed(run)), "a turn was trained on twice"


def test_a_run_leaves_everything_it_promises(uninterrupted):
    names = {p.name for p in uninterrupted.iterdir()}
    assert names >= {
        "manifest.json",
        "config.yaml",
        "ledger.sqlite",
        "records",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "weights",
        "logs",
        "curve.png",
        "summary.json",
        "replies.md",
    }
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["ledger"]["total"] == sum(
        summary["ledger"][s] for s in ("captured", "bound", "judged", "eligible", "leased", "consumed", "dropped")
    )
    assert [step for step, _, _ in loss_trace(uninterrupted)] == [1, 2, 3, 4]
    assert any(norm > 0 for _, _, norm in loss_trace(uninterrupted)), "the toy must give a gradient"


def test_every_trained_id_is_an_id_that_was_served(uninterrupted):
    trained = list(iter_turns(uninterrupted, states=frozenset({State.CONSUMED})))
    assert trained
    for stored in trained:
        assert stored.turn is not None
        assert len(stored.turn.completion.logprobs) == len(stored.turn.completion.token_ids) > 0
        assert stored.reward is not None


def test_synchronous_training_never_uses_old_tokens(uninterrupted):
    rows = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [row["staleness_max"] for row in rows if "loss" in row] == [0.0] * STEPS


def test_nothing_is_left_running(uninterrupted):
    assert alive_with(str(uninterrupted)) == []


def crash_and_resume(place, reference, point, run):
    crashed = call(place.command(run=run), CLAW_CRASH_AT=point)
    assert crashed.returncode not in (0, 2), (crashed.returncode, crashed.stderr)
    path = place.path / run
    assert wait_for(lambda: not alive_with(str(path))), f"still running: {alive_with(str(path))}"
    resumed = call(place.resume_command(run=run))
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_to(path, reference)


FAST = ("ledger.lease.after:2", "trainer.checkpoint.after_rename:2")


@pytest.mark.parametrize("point", FAST)
def test_a_kill_at_a_named_point_changes_nothing(place, uninterrupted, point):
    crash_and_resume(place, uninterrupted, point, f"crash-{point.replace(':', '-')}")


@pytest.mark.slow
@pytest.mark.parametrize("point", sorted(f"{p}:{2 if p.startswith(('trainer', 'engine')) else 5}" for p in POINTS))
def test_a_kill_at_any_named_point_changes_nothing(place, uninterrupted, point):
    if point.startswith(("ledger.lease", "ledger.consume")):
        point = point.replace(":5", ":3")
    crash_and_resume(place, uninterrupted, point, f"any-{point.replace(':', '-')}")


def pids_of(command_part, run):
    return [p for p in alive_with(str(run)) if command_part in " ".join(p.cmdline())]


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(20))
def test_a_kill_at_a_random_moment_changes_nothing(place, uninterrupted, round_):
    import random

    rng = random.Random(round_)
    run = place.path / f"random-{round_}"
    victim = ("claw_train ", "claw_train.engine", "claw_train.training.worker")[round_ % 3]
    process = start(place.command("env.kwargs.pause_s=0.3", run=run.name))
    try:
        assert wait_for(lambda: (run / "metrics.jsonl").exists() and loss_trace(run), timeout_s=120)
        wait_for(lambda: False, timeout_s=rng.uniform(0.0, 0.8))
        if victim == "claw_train ":
            process.kill()
        else:
            for target in pids_of(victim, run):
                os.kill(target.pid, signal.SIGKILL)
        process.wait(timeout=120)
    finally:
        process.kill()
        process.wait(timeout=10)
    assert wait_for(lambda: not alive_with(str(run))), f"still running: {alive_with(str(run))}"
    resumed = call(place.resume_command(run=run.name))
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_to(run, uninterrupted)


def test_a_second_process_is_refused_by_name(place):
    run = place.path / "twice"
    process = start(place.command(run="twice"))
    try:
        assert wait_for(lambda: (run / "lock").exists() and (run / "ledger.sqlite").exists())
        second = call(place.resume_command(run="twice"))
        assert second.returncode == 2
        assert str(process.pid) in second.stderr
        assert len(second.stderr.strip().splitlines()) == 1
    finally:
        process.terminate()
        process.wait(timeout=30)
    assert wait_for(lambda: not alive_with(str(run)))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("trainer.lrr=1",), "unknown key trainer.lrr: did you mean trainer.lr?"),
        (("trainer.steps=many",), "trainer.steps"),
        (("trainer.steps=-1",), "trainer.steps=-1 is out of range"),
        (("env.kwargs.turnz=3",), "streams.toy.kwargs"),
        (("env.id=Nothing-v0",), "streams.toy.id='Nothing-v0'"),
        (("judge._target_=nowhere.Judge",), "judge._target_='nowhere.Judge'"),
        (("engine=embeded",), "engine/embeded"),
        (("model.path=/no/such/folder",), "/no/such/folder"),
        (("reward=random",), "reward='random'"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(place, overrides, said):
    done = call(place.command(*overrides, run="mistake"))
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (place.path / "mistake").exists()
    assert alive_with(str(place.path / "mistake")) == []


def test_a_taken_port_names_it(place):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = call(place.command(f"engine.port={port}", run="port"))
    assert done.returncode == 2, done.stderr
    assert str(port) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert [p.name for p in (place.path / "port").iterdir()] == ["logs"], "nothing half-written but what explains it"
    assert alive_with(str(place.path / "port")) == []


def test_a_run_folder_in_use_is_not_overwritten(place, uninterrupted):
    done = call(place.command(run="uninterrupted"))
    assert done.returncode == 2
    assert "resume=" in done.stderr


def test_resume_of_nothing_says_so(place):
    done = call(place.resume_command(run="never"))
    assert done.returncode == 2
    assert "no run there" in done.stderr


def test_resume_refuses_another_model(place, uninterrupted):
    done = call(place.resume_command("model.name=other", run="uninterrupted"))
    assert done.returncode == 2
    assert "model.name=other" in done.stderr


@pytest.mark.parametrize("fault", ["5xx:0.3", "drop:0.2", "nan_logprobs:0.1"])
@pytest.mark.slow
def test_engine_faults_are_retried_or_lost_but_never_trained_wrong(place, fault):
    run = f"fault-{fault.partition(':')[0]}"
    done = call(place.command(f"engine.faults=[{fault}]", run=run))
    assert done.returncode == 0, done.stderr
    audit(place.path / run)


def test_broken_worlds_are_left_out_and_the_sums_hold(place):
    done = call(place.command("env.kwargs.fail_every=4", run="broken"))
    assert done.returncode == 0, done.stderr
    counts = audit(place.path / "broken")
    assert counts.dropped_by.get("infra_error", 0) > 0
    for stored in iter_turns(place.path / "broken", states=frozenset({State.CONSUMED})):
        assert stored.turn is not None
        assert stored.turn.next_state is not None
        assert stored.turn.next_state.valid


def test_a_world_that_always_breaks_stops_the_run_before_a_step(place):
    done = call(place.command("env.kwargs.fail_every=1", "guards.window=16", run="hopeless"))
    assert done.returncode == 1, done.stderr
    assert "lost to the world" in done.stderr
    assert loss_trace(place.path / "hopeless") == []
    assert wait_for(lambda: not alive_with(str(place.path / "hopeless")))


def test_shuffled_reward_is_a_different_run_with_the_same_sums(place, uninterrupted):
    done = call(place.command("reward=shuffled", run="shuffled"))
    assert done.returncode == 0, done.stderr
    assert loss_trace(place.path / "shuffled") != loss_trace(uninterrupted)
    audit(place.path / "shuffled")


def test_an_interrupt_leaves_a_run_that_goes_on_to_the_same_end(place, uninterrupted):
    run = place.path / "interrupted"
    process = start(place.command("env.kwargs.pause_s=0.3", run="interrupted"))
    try:
        assert wait_for(lambda: (run / "metrics.jsonl").exists() and loss_trace(run), timeout_s=120)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait(timeout=10)
    assert wait_for(lambda: not alive_with(str(run)))
    resumed = call(place.resume_command(run="interrupted"))
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_to(run, uninterrupted)


def test_an_engine_that_is_killed_comes_back_with_its_weights(place, uninterrupted):
    run = place.path / "engine-killed"
    process = start(place.command("env.kwargs.pause_s=0.3", run="engine-killed"))
    try:
        assert wait_for(lambda: (run / "metrics.jsonl").exists() and loss_trace(run), timeout_s=120)
        for target in pids_of("claw_train.engine", run):
            target.kill()
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait(timeout=10)
    assert_equal_to(run, uninterrupted)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_one_line_and_leaves_nothing_running(place):
    import subprocess

    disk = place.path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)], check=True, timeout=10)
    try:
        full = call(place.command(f"run_dir={disk}/run", "trainer.steps=4"))
        assert full.returncode in (1, 2), full.stderr
        assert len(full.stderr.strip().splitlines()) == 1
        assert "space" in full.stderr.lower() or "disk" in full.stderr.lower()
        assert wait_for(lambda: not alive_with(str(disk)))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=10)


def test_two_streams_full_weights_and_two_ranks_in_one_run(place):
    (place.path / "conf" / "experiment").mkdir(exist_ok=True)
    streams = "".join(
        f"  - {{name: {name}, id: 'tests.helpers.toy_env:Toy-v0', share: {share}, max_concurrent: 4}}\n"
        for name, share in (("left", 1.0), ("right", 3.0))
    )
    (place.path / "conf" / "experiment" / "both.yaml").write_text(f"# @package _global_\nstreams:\n{streams}")
    done = call(
        place.command(
            "experiment=both",
            "trainer=full",
            "trainer.num_ranks=2",
            "trainer.steps=3",
            "trainer.checkpoint_every_steps=2",
            "trainer.max_staleness=1",
            run="both",
            env=None,
        )
    )
    assert done.returncode == 0, done.stderr
    run = place.path / "both"
    assert {t.stream for t in consumed_turns(run)} == {"left", "right"}
    assert [step for step, _, _ in loss_trace(run)] == [1, 2, 3]
    audit(run)
    longer = call(place.resume_command("trainer.steps=4", run="both"))
    assert longer.returncode == 0, longer.stderr
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    assert [step for step, _, _ in loss_trace(run)] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["ü n", "a,b", "(x)", "it's"])
def test_a_path_may_hold_what_paths_hold(place, name):
    done = call([*place.command("--cfg"), f"run_dir={place.path / name}"])
    assert done.returncode == 0, done.stderr
    assert name in done.stdout or name.encode("unicode_escape").decode() in done.stdout


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("experiment=dmeo",), "dmeo"),
        (("judge=null",), "judge"),
        (("--config-dir", "/no/such/folder"), "/no/such/folder"),
    ],
)
def test_a_choice_that_does_not_exist_is_never_ignored(place, overrides, said):
    done = call([*place.command(run="choice"), *overrides])
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_broken_yaml_is_one_line(place, tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "bad.yaml").write_text("name: [unclosed\n")
    done = call(place.command("--config-dir", str(tmp_path), env="bad"))
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_truncated_configuration_of_a_run_is_one_line(place, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("model: {name: [\n")
    done = call([*place.resume_command(), f"resume={tmp_path / 'run'}"])
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_reader_that_goes_away_does_not_end_the_run(place):
    import subprocess

    command = " ".join(f"'{word}'" for word in place.command(run="piped"))
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"],
        env=runs.environment(),
        cwd=runs.ROOT,
        timeout=runs.TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (place.path / "piped" / "summary.json").is_file()


@pytest.mark.parametrize("damage", ["a file of the newest checkpoint", "all checkpoints and the lineage"])
def test_a_damaged_checkpoint_costs_its_steps_and_nothing_else(place, uninterrupted, damage):
    import shutil

    run = place.path / f"damaged-{damage[:3].strip()}"
    shutil.copytree(uninterrupted, run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(str(uninterrupted), str(run)))
    if damage.startswith("all"):
        shutil.rmtree(run / "checkpoints")
    else:
        (run / "checkpoints" / "step-000004" / "optimizer.safetensors").unlink()
    done = call(place.resume_command("trainer.steps=5", run=run.name))
    assert done.returncode == 0, done.stderr
    assert [step for step, _, _ in loss_trace(run)] == [1, 2, 3, 4, 5]
    audit(run)
