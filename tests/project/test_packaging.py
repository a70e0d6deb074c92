"""The distribution: whole, and working where there is no checkout."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*argv: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs with nothing of the checkout on the path; fails the test when the program does."""
    done = subprocess.run(
        [str(a) for a in argv],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(cwd), "PIP_DISABLE_PIP_VERSION_CHECK": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def venv(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel installed; other packages are borrowed from ours, the editable install is not."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=dist)
    wheel = next(dist.glob("*.whl"))
    run(sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "-qq", "--no-deps", wheel, cwd=dist)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def files_under(folder: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_both_packages_and_all_configuration(dist):
    names = set(zipfile.ZipFile(next(dist.glob("*.whl"))).namelist())
    wanted = files_under("claw_envs") | files_under("claw_train") | {f"claw_train/{n}" for n in files_under("conf")}
    assert {"claw_train/conf/config.yaml", "claw_envs/py.typed", "claw_train/py.typed"} <= names
    assert wanted - names == set()


def test_the_wheel_holds_nothing_else(dist):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(next(dist.glob("*.whl"))).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"claw_envs", "claw_train"}


def test_the_source_distribution_holds_what_a_build_needs(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as packed:
        names = {name.split("/", 1)[1] for name in packed.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "conf/config.yaml"} <= names
    assert not [name for name in names if name.startswith((".venv", "runs", "tests"))]


def test_the_licence_travels_with_the_wheel(dist):
    wheel = zipfile.ZipFile(next(dist.glob("*.whl")))
    (licence,) = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_the_installed_packages_are_the_ones_that_run(venv, tmp_path):
    code = "import claw_envs, claw_train; print(claw_envs.__file__, claw_train.__file__)"
    shown = run(venv / "bin/python", "-c", code, cwd=tmp_path).stdout.split()
    assert all(Path(path).is_relative_to(venv) for path in shown)


def test_the_installed_doctor_reports(venv, tmp_path):
    shown = run(venv / "bin/claw", "doctor", cwd=tmp_path).stdout
    assert "smollm2-135m" in shown
    assert "bare checkout" not in shown


def test_the_installed_trainer_explains_itself(venv, tmp_path):
    shown = run(venv / "bin/claw-train", "--help", cwd=tmp_path).stdout
    assert "smollm2-135m" in shown
    assert "resume=" in shown


def test_the_installed_trainer_composes_its_configuration(venv, tmp_path):
    shown = run(venv / "bin/claw-train", "model=tiny", "--cfg", "job", cwd=tmp_path).stdout
    assert "name: tiny" in shown
    assert list(tmp_path.iterdir()) == []


def test_an_installed_environment_is_found_by_its_id(venv, tmp_path):
    code = "import gymnasium, claw_envs; print(gymnasium.spec('ClawTerminal-v0').entry_point)"
    assert "claw_envs.terminal" in run(venv / "bin/python", "-c", code, cwd=tmp_path).stdout
