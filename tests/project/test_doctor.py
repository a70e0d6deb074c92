"""`claw doctor`: right about what is there and what is not, and never without a fix for what pip can mend."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from claw_envs import cli, doctor
from claw_envs.doctor import Check, Status
from claw_envs.errors import SandboxError
from claw_envs.sandbox import factory, reaper
from claw_envs.sandbox.base import Capabilities

ROOT = Path(__file__).parents[2]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH; tests put programs into it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def put(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def row(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A listening socket where Docker's would be."""
    path = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        yield listening


def answer(listening: socket.socket, reply: bytes) -> threading.Thread:
    """Answers one request with `reply`, on a thread."""

    def serve() -> None:
        peer, _ = listening.accept()
        with peer:
            peer.recv(4096)
            peer.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_the_report_of_this_machine_is_whole():
    done = subprocess.run(
        [sys.executable, "-m", "claw_envs.cli", "doctor", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    report = json.loads(done.stdout)
    assert list(report)[:3] == ["machine", "sandboxes", "extras"]
    assert {"python", "cores", "memory", "gpu"} <= {check["name"] for check in report["machine"]}
    assert "smollm2-135m" in {check["name"] for check in report["models"]}


def test_the_table_lines_up(capsys):
    assert cli.main(["doctor"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ") and "->" not in line]
    columns = {line.index(f"  {status} ") for line in lines for status in Status if f"  {status} " in line}
    assert len(lines) > 10
    assert len(columns) == 1


def test_an_extra_that_is_missing_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda _: ['numpy>=1; extra == "here"', 'nowhere-1>=2; extra == "gone"'])
    here, gone = row(doctor.extras(), "here"), row(doctor.extras(), "gone")
    assert (here.status, here.fix) == (Status.OK, "")
    assert (gone.status, gone.detail, gone.fix) == (Status.MISSING, "without nowhere-1", "pip install 'claw-rl[gone]'")


def test_a_bare_checkout_is_told_apart(monkeypatch):
    monkeypatch.setattr(doctor, "DISTRIBUTION", "no-such-distribution")
    (only,) = doctor.extras()
    assert (only.status, only.detail) == (Status.MISSING, "runs from a bare checkout")


def test_extras_are_read_from_every_spelling():
    assert doctor.wanted_by_extra(
        ["numpy>=1", "torch>=2.6; extra == 'train'", 'ray[default]>=2 ; extra=="ray"', 'ray[default]; extra == "all"']
    ) == {"train": {"torch"}, "ray": {"ray"}}


def backend(monkeypatch: pytest.MonkeyPatch, capabilities: Capabilities | None) -> Check:
    """The row of a namespace backend whose trial came out like this."""
    monkeypatch.setattr(
        factory,
        "probe",
        lambda: {"namespace": factory.Probe(usable=bool(capabilities), detail="tried", capabilities=capabilities)},
    )
    return row(doctor.sandboxes(), "namespace")


EVERYTHING = Capabilities(isolated=True, network_off=True, memory_limit=True, pids_limit=True, disk_limit=True)


def test_a_backend_that_cannot_run_is_missing(monkeypatch):
    found = backend(monkeypatch, None)
    assert (found.status, found.detail) == (Status.MISSING, "tried")


def test_a_missing_program_has_a_fix(monkeypatch, programs):
    assert "system-packages" in backend(monkeypatch, None).fix


def test_a_backend_that_enforces_everything_is_ok(monkeypatch):
    assert backend(monkeypatch, EVERYTHING).status is Status.OK


def test_a_backend_names_the_limits_it_cannot_enforce(monkeypatch):
    found = backend(monkeypatch, replace(EVERYTHING, memory_limit=False, pids_limit=False))
    assert found.status is Status.LIMITED
    assert found.detail == "tried; not enforced: memory_limit, pids_limit"
    assert found.fix


@pytest.mark.sandbox
def test_a_working_bubblewrap_is_tried(monkeypatch):
    assert row(doctor.sandboxes(), "namespace").status is not Status.MISSING


def test_a_docker_engine_is_asked_for_its_version(engine):
    thread = answer(engine, b"HTTP/1.1 200 OK\r\nApi-Version: 1.41\r\nContent-Length: 2\r\n\r\nOK")
    found = row(doctor.sandboxes(), "docker")
    thread.join()
    assert found.status is Status.OK
    assert "engine API 1.41" in found.detail


def test_a_docker_engine_that_speaks_nonsense_is_missing(engine):
    thread = answer(engine, b"go away\r\n\r\n")
    found = row(doctor.sandboxes(), "docker")
    thread.join()
    assert found.status is Status.MISSING


def test_a_docker_engine_that_never_answers_is_missing(engine, monkeypatch):
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.05)
    found = row(doctor.sandboxes(), "docker")
    assert (found.status, found.fix) == (Status.MISSING, "start the Docker engine")


def test_no_docker_socket_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    found = row(doctor.sandboxes(), "docker")
    assert (found.status, found.detail) == (Status.MISSING, f"no engine at {tmp_path}/none.sock")


def test_a_gpu_is_named(programs):
    put(programs, "nvidia-smi", "echo 'NVIDIA H200, 143771 MiB'")
    found = row(doctor.machine(), "gpu")
    assert (found.status, found.detail) == (Status.OK, "NVIDIA H200, 143771 MiB")


@pytest.mark.parametrize("body", ["exit 9", "exec /bin/sleep 60", ":"])
def test_a_driver_without_a_gpu_is_no_gpu(programs, monkeypatch, body):
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.2)
    put(programs, "nvidia-smi", body)
    assert row(doctor.machine(), "gpu").status is Status.LIMITED


def test_little_disk_space_is_told(tmp_path):
    found = doctor.disk("runs", tmp_path / "not" / "yet", need_bytes=2**60)
    assert found.status is Status.LIMITED
    assert found.fix


def test_a_section_whose_package_is_missing_does_not_hide_the_others(monkeypatch):
    point = metadata.EntryPoint(name="models", value="nowhere_at_all:rows", group="claw.doctor")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    sections = doctor.examine()
    assert [section.title for section in sections] == ["machine", "sandboxes", "extras", "models"]
    assert sections[-1].checks[0].status is Status.MISSING


def add_command(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = metadata.EntryPoint(name="extra", value=value, group="claw.commands")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])


def extra_command(args: list[str]) -> int:
    """A command of another package."""
    return len(args)


def test_a_command_of_another_package_gets_its_arguments(monkeypatch):
    monkeypatch.setitem(sys.modules, "the_other_package", sys.modules[__name__])
    add_command(monkeypatch, "the_other_package:extra_command")
    assert cli.main(["extra", "--flag", "x"]) == 2


def test_a_command_whose_package_is_missing_says_what_to_install(monkeypatch, capsys):
    add_command(monkeypatch, "nowhere_at_all:main")
    assert cli.main(["extra"]) == cli.EXIT_USAGE
    assert "pip install 'claw-rl[train]'" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "said"), [([], "command"), (["doctr"], "'doctor'")])
def test_an_unknown_command_is_a_usage_error(argv, said, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == cli.EXIT_USAGE
    assert said in capsys.readouterr().err


def test_reaping_says_what_was_removed(monkeypatch, capsys):
    monkeypatch.setattr(reaper, "reap", lambda: reaper.Reaped(("a", "b"), 3, ()))
    assert cli.main(["reap"]) == 0
    assert capsys.readouterr().out == "removed 2 sandboxes, 3 processes\n"


def test_a_sandbox_that_cannot_be_reaped_is_named(monkeypatch, capsys):
    monkeypatch.setattr(reaper, "reap", lambda: reaper.Reaped((), 0, ("stuck-1",)))
    assert cli.main(["reap"]) == cli.EXIT_LEFT
    assert "stuck-1" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line(monkeypatch, capsys):
    def refuse() -> None:
        raise SandboxError("the folder of leases belongs to another user")

    monkeypatch.setattr(reaper, "reap", refuse)
    assert cli.main(["reap"]) == cli.EXIT_USAGE
    assert capsys.readouterr().err == "claw reap: the folder of leases belongs to another user\n"
