"""The script that installs system packages: quiet when all is there, clear when it may not act."""

import subprocess

import pytest

from tests.helpers.sandboxes import ROOT


@pytest.fixture
def run(tmp_path):
    """Runs the script where only the given programs exist; each is a small shell script."""

    def run_with(**programs: str) -> subprocess.CompletedProcess[str]:
        for name, body in programs.items():
            path = tmp_path / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{body}\n")
            path.chmod(0o755)
        return subprocess.run(
            ["/bin/sh", ROOT / "scripts/system-packages"],
            env={"PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    return run_with


def test_it_is_silent_when_nothing_is_missing(run):
    done = run(bwrap="exit 0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("programs", [{"id": "echo 1000", "apt_get": "exit 9"}, {"id": "echo 0"}])
def test_it_prints_what_to_install_when_it_cannot(run, programs):
    done = run(**programs)
    assert done.returncode == 1
    assert "apt-get install -y --no-install-recommends bubblewrap" in done.stderr


def test_root_installs_after_an_update_where_the_lists_are_old(run, tmp_path):
    log = tmp_path / "log"
    apt = f'echo "$@" >> {log}; [ "$1" = update ] && : > {tmp_path}/updated; [ -e {tmp_path}/updated ]'
    done = run(id="echo 0", apt_get=apt)
    assert (done.returncode, done.stdout) == (0, "Installed: bubblewrap\n")
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["install", "update", "install"]


def test_a_failed_installation_is_no_success(run):
    assert run(id="echo 0", apt_get="exit 100").returncode != 0
