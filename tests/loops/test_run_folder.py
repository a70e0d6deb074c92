"""The run folder over the processes of one run: what stays, what is added, and who may read it."""

import asyncio
import json
from dataclasses import asdict, replace

import pytest

from claw_train.config import EngineConfig
from claw_train.errors import ChildError, ConfigError, DiskError, EngineError
from claw_train.run import both, check_engine, launch
from claw_train.run_folder import RunFolder, disk_errors, write_bytes, write_text
from tests.helpers.runs import Workplace, call

from .test_four_loops import config as loops_config


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(settings(tmp_path / "run"))


def settings(run_dir, **engine):
    return replace(loops_config(0), run_dir=str(run_dir), engine=EngineConfig(**engine))


def test_a_new_run_is_its_owners_alone(folder):
    folder.write_manifest({})
    modes = {p.name: p.stat().st_mode & 0o777 for p in (folder.path, *folder.path.iterdir())}
    assert modes == {"run": 0o700, "logs": 0o700, "config.yaml": 0o600, "manifest.json": 0o600}


def test_a_failed_write_keeps_what_was_there_and_leaves_nothing_beside_it(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    write_text(file, "old")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskError, match=r"a\.json cannot be written: No space left on device"):
        write_text(file, "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "old")]


def test_a_failure_that_has_its_words_keeps_them(tmp_path):
    with pytest.raises(DiskError, match=r"^said before$"), disk_errors(tmp_path):
        raise DiskError("said before")


def test_what_a_resume_changed_stays_changed(folder):
    _, changed = RunFolder.reopen(folder.path, {"trainer": {"steps": 48}, "guards": {"window": 7}})
    folder.write_config(changed)
    _, again = RunFolder.reopen(folder.path, {})
    assert (again.trainer.steps, again.guards.window) == (48, 7)
    assert again == changed


def test_reopening_alone_changes_nothing(folder):
    before = folder.config.read_bytes()
    RunFolder.reopen(folder.path, {"trainer": {"steps": 48}})
    assert folder.config.read_bytes() == before


@pytest.mark.parametrize("name", ["tasks", "heldout_tasks"])
def test_a_resume_cannot_change_what_its_evaluations_play(folder, name):
    with pytest.raises(ConfigError, match=rf"eval\.{name}=5: the run began with eval\.{name}=0"):
        RunFolder.reopen(folder.path, {"eval": {name: 5}})


def test_a_resume_may_name_the_same_tasks_and_change_the_rest(folder):
    _, config = RunFolder.reopen(folder.path, {"eval": {"tasks": 0, "every_steps": 2}})
    assert (config.eval.tasks, config.eval.every_steps) == (0, 2)


def test_the_first_manifest_stays_and_resumes_are_added(folder, monkeypatch):
    for command, first_step in (("one", 1), ("two", 5), ("three", 9)):
        monkeypatch.setattr("sys.argv", ["claw-train", command])
        folder.write_manifest({"seed": 3, "first_step": first_step})
    manifest = json.loads((folder.path / "manifest.json").read_text())
    assert (manifest["command"], manifest["first_step"], manifest["seed"]) == ("claw-train one", 1, 3)
    assert [(r["command"], r["first_step"]) for r in manifest["resumes"]] == [
        ("claw-train two", 5),
        ("claw-train three", 9),
    ]
    assert all(set(r) == {"command", "started", "commit", "first_step"} for r in manifest["resumes"])


class Engine:
    """Answers at the `after`-th time it is asked whether it is well."""

    def __init__(self, after=1, context=None):
        self.after, self.context = after, context

    async def health(self):
        self.after -= 1
        return self.after <= 0

    async def server_info(self):
        return self


def test_an_engine_that_does_not_answer_stops_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("claw_train.run._HEALTH_PAUSES_S", (0.0, 0.0))
    config = settings(tmp_path, kind="url", url="http://127.0.0.1:1")
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:1 does not answer"):
        asyncio.run(check_engine(Engine(after=4), config))
    asyncio.run(check_engine(Engine(after=3), config))


def test_a_server_with_too_short_a_context_is_refused(tmp_path):
    config = settings(tmp_path, kind="url", url="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"model\.context=8192 is more than the 4096 tokens"):
        asyncio.run(check_engine(Engine(context=4096), config))
    for enough in (8192, None):
        asyncio.run(check_engine(Engine(context=enough), config))


def test_what_is_started_beside_a_failure_has_ended_when_the_failure_is_seen():
    ended = []

    async def waits():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("trainer")

    async def fails():
        await asyncio.sleep(0)
        raise ChildError("port 80 is taken")

    async def main():
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(both(fails(), waits()), 20)
        assert ended == ["trainer"]
        assert [str(e) for e in caught.value.exceptions] == ["port 80 is taken"]

    asyncio.run(main())


def test_both_results_come_in_order():
    async def value(x):
        return x

    assert asyncio.run(both(value(1), value("b"))) == (1, "b")


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupt_says_what_is_left(tmp_path, monkeypatch, begun):
    async def execute(run):
        async with run._ledger:
            run.begun = begun
            raise KeyboardInterrupt

    monkeypatch.setattr("logging.raiseExceptions", True)  # put back afterwards
    monkeypatch.setattr("claw_train.run.setup_logging", lambda file: None)
    monkeypatch.setattr("claw_train.run.Preflight.check", lambda config: None)
    monkeypatch.setattr("claw_train.run.Run.execute", execute)
    with pytest.raises(KeyboardInterrupt) as caught:
        launch(asdict(settings(tmp_path / "run")), [])
    kept = (tmp_path / "run" / "config.yaml").exists()
    assert kept is begun
    assert ("continue with resume=" in str(caught.value)) is begun
    assert ("nothing of it is kept" in str(caught.value)) is not begun


@pytest.mark.slow
def test_a_longer_run_is_measured_again_and_goes_on_as_it_was_resumed(tmp_path):
    place = Workplace.make(tmp_path)
    run = tmp_path / "run"
    for command in (
        place.command("trainer.steps=1", run="run"),
        place.resume_command("trainer.steps=2", run="run"),
        place.resume_command(run="run"),
    ):
        done = call(command)
        assert done.returncode == 0, done.stderr
    after = json.loads((run / "eval" / "after.json").read_text())
    assert after["tasks"]["version"].endswith("-2")
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    manifest = json.loads((run / "manifest.json").read_text())
    assert [row["first_step"] for row in manifest["resumes"]] == [2, 3]
    assert len(manifest["tokenizer"]["fingerprint"]) == len(manifest["tokenizer"]["template_sha256"]) == 64


def test_of_two_runs_on_one_folder_at_once_the_second_changes_nothing(tmp_path):
    """What both would do between looking for a configuration and writing one."""
    path = tmp_path / "config.yaml"
    write_bytes(path, b"first", exclusive=True)
    with pytest.raises(FileExistsError):
        write_bytes(path, b"second", exclusive=True)
    assert path.read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
