"""Set-up and CI scripts: which torch they take, what they refuse, and that a failure fails."""

import importlib.machinery
import importlib.util
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SPEC = "torch==9.8.7"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`scripts/install-torch` as a module."""
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("install_torch", str(ROOT / "scripts/install-torch"))
    spec = importlib.util.spec_from_loader("install_torch", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def script(loaded: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The same on Linux without a GPU, with nothing installed."""
    monkeypatch.setattr(loaded.sys, "platform", "linux")
    monkeypatch.setattr(loaded, "has_gpu", lambda: False)
    monkeypatch.setattr(loaded, "installed", lambda: "")
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    return loaded


def installs(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *argv: str, works: str = "") -> list[tuple[str, ...]]:
    """The arguments of every call of pip; the first that holds `works` succeeds."""
    calls: list[tuple[str, ...]] = []

    def pip(*args: str, quiet: bool = False) -> bool:
        calls.append(args)
        return works in " ".join(args)

    monkeypatch.setattr(script, "pip", pip)
    script.main(["install-torch", *argv])
    return calls


def test_without_a_gpu_the_cpu_build_of_the_configured_index_is_enough(script, monkeypatch):
    assert installs(script, monkeypatch, SPEC, "auto") == [(f"{SPEC}+cpu",)]


def test_an_index_without_a_cpu_build_leads_to_the_one_that_has_only_those(script, monkeypatch):
    first, second = installs(script, monkeypatch, SPEC, "auto", works="--index-url")
    assert first == (f"{SPEC}+cpu",)
    assert second[-3:] == ("--index-url", script.CPU_INDEX, SPEC)
    assert "--no-deps" in second


def test_without_a_gpu_the_plain_build_is_never_asked_of_the_configured_index(script, monkeypatch):
    calls = installs(script, monkeypatch, SPEC, "auto", works="nothing works")
    assert [call for call in calls if SPEC in call and "--index-url" not in call] == []


def test_a_named_index_is_the_only_one_asked(script, monkeypatch):
    monkeypatch.setenv("TORCH_INDEX", "https://mirror.example/cpu")
    (call,) = installs(script, monkeypatch, SPEC, "auto")
    assert call[-3:] == ("--index-url", "https://mirror.example/cpu", SPEC)


@pytest.mark.parametrize(
    ("platform", "gpu", "build"), [("linux", True, "auto"), ("darwin", False, "auto"), ("linux", False, "cuda")]
)
def test_the_plain_build_serves_gpus_other_systems_and_who_asks(script, monkeypatch, platform, gpu, build):
    monkeypatch.setattr(script.sys, "platform", platform)
    monkeypatch.setattr(script, "has_gpu", lambda: gpu)
    assert installs(script, monkeypatch, SPEC, build) == [(SPEC,)]


def test_a_cpu_build_can_be_had_beside_a_gpu(script, monkeypatch):
    monkeypatch.setattr(script, "has_gpu", lambda: True)
    assert installs(script, monkeypatch, SPEC, "cpu") == [(f"{SPEC}+cpu",)]


@pytest.mark.parametrize(
    ("have", "calls"), [("9.8.7+cpu", 0), ("9.8.7", 1), ("9.8.7+cu130", 1), ("9.8.6+cpu", 1), ("", 1)]
)
def test_only_the_wanted_build_is_kept(script, monkeypatch, have, calls):
    monkeypatch.setattr(script, "installed", lambda: have)
    assert len(installs(script, monkeypatch, SPEC, "auto")) == calls


def test_a_failed_install_says_what_to_try(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "pip", lambda *args, quiet=False: False)
    assert script.main(["install-torch", SPEC, "auto"]) == 1
    assert "TORCH_INDEX" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], [SPEC], ["numpy==1", "auto"], [SPEC, "rocm"]])
def test_wrong_arguments_are_refused(script, argv):
    assert script.main(["install-torch", *argv]) == 2


@pytest.mark.parametrize(
    ("body", "seen"), [("echo 'GPU 0: NVIDIA H200'", True), ("exit 9", False), ("echo 'No devices were found'", False)]
)
def test_a_gpu_counts_when_the_driver_lists_it(loaded, tmp_path, monkeypatch, body, seen):
    put(tmp_path, "nvidia-smi", body)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert loaded.has_gpu() is seen


def put(folder: Path, name: str, body: str) -> Path:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)
    return folder / name


def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("body", [None, "exit 1"])
def test_a_missing_or_old_python_is_named(tmp_path, body):
    python = tmp_path / "python" if body is None else put(tmp_path, "python", body)
    done = run("scripts/set-up", str(tmp_path / "venv"), str(tmp_path / "stamp"), PYTHON=str(python), TORCH=SPEC)
    assert done.returncode == 2
    assert f"{python} is missing or older than 3.11" in done.stderr
    assert not (tmp_path / "venv").exists()


def stamp(**variables: str) -> str:
    settings = [f"{name}={value}" for name, value in variables.items()]
    return run("make", "-s", "--eval", "show: ; @echo $(READY)", "show", *settings).stdout.strip()


def test_another_torch_needs_another_environment():
    assert re.fullmatch(r"\.venv/ready-\d+-\d+", stamp())
    assert stamp() == stamp()
    assert len({stamp(), stamp(TORCH=SPEC), stamp(TORCH_BUILD="cuda")}) == 3


MAKE = """
echo "make $*"
echo "$*" >> "$CALLS"
if [ "$1" = test ]; then
  echo "=== short test summary info ==="
  echo "FAILED tests/test_x.py::test_y"
  exit "$TEST_CODE"
fi
exit "$CHECK_CODE"
"""


@pytest.mark.parametrize(("test_code", "check_code"), [(0, 0), (2, 0), (0, 2), (2, 2)])
def test_ci_runs_both_parts_and_fails_when_either_does(tmp_path, test_code, check_code):
    put(tmp_path, "make", MAKE)
    done = run(
        ".ci/run",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        CALLS=str(tmp_path / "calls"),
        TEST_CODE=str(test_code),
        CHECK_CODE=str(check_code),
    )
    assert (tmp_path / "calls").read_text().splitlines() == ["test", "-k check"]
    assert (done.returncode != 0) is (test_code + check_code > 0)
    assert "FAILED tests/test_x.py::test_y" in done.stdout.split("make -k check")[1]
