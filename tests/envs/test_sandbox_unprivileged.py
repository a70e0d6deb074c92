"""The namespace sandbox as a plain user, without control groups."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.sandboxes import ROOT

pytestmark = pytest.mark.sandbox
UID = "54321"
TIMEOUT_S = 60

PROBE = "import os, sys; sys.exit(sys.version_info < (3, 11) or not os.access(sys.executable, os.X_OK))"
SCRIPT = """
import json
from claw_envs.sandbox.contract import check_sandbox
from claw_envs.sandbox.namespace import NamespaceSandbox
from claw_envs.sandbox.host.leases import default_state

check_sandbox(NamespaceSandbox)
first, second = NamespaceSandbox(), NamespaceSandbox()
for sandbox in (first, second):
    sandbox.exec("for i in $(seq 40); do sleep 1000 & done", timeout_s=20)
counts = [int(sandbox.exec("pgrep -c sleep", timeout_s=20).stdout) for sandbox in (first, second)]
more = first.exec("for i in $(seq 60); do sleep 1000 & done", timeout_s=0.5)
disk = second.exec("head -c 200m /dev/zero > big", timeout_s=20)
memory = second.exec("python3 -c 'bytearray(10**9)' || perl -e '$x = \\"a\\" x 1000000000'", timeout_s=20)
second.exec("rm big; echo text > f; chmod 000 f /work; exit 1", timeout_s=20)
second.freeze()
locked = [second.read("/work/f", max_bytes=9), second.run_check(["cat", "f"], timeout_s=20).stdout]
caps = first.capabilities
for sandbox in (first, second):
    sandbox.close()
print(json.dumps({
    "counts": counts, "refused": b"Resource temporarily unavailable" in more.stderr, "disk": disk.stderr.decode(),
    "locked": [found.decode() for found in locked if found is not None],
    "memory": memory.exit_code, "pids_limit": caps.pids_limit, "disk_limit": caps.disk_limit,
    "memory_limit": caps.memory_limit, "left": [path.name for path in default_state().iterdir()],
}))
"""


@pytest.fixture(scope="module")
def report():
    """What the script said, run by a user who is not root, on a copy of the package that this user can read."""
    if os.getuid() != 0:
        pytest.skip("every other test runs as a plain user here already")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is missing")
    folder = Path(tempfile.mkdtemp(prefix="claw-test-", dir="/tmp"))  # TMPDIR may be closed to other users
    try:
        folder.chmod(0o755)
        shutil.copytree(
            ROOT / "claw_envs/sandbox", folder / "claw_envs/sandbox", ignore=shutil.ignore_patterns("__pycache__")
        )
        for name in ("types.py", "errors.py"):
            shutil.copy(ROOT / "claw_envs" / name, folder / "claw_envs" / name)
        (folder / "claw_envs/__init__.py").touch()
        (folder / "run").mkdir()
        os.chown(folder / "run", int(UID), int(UID))
        yield json.loads(run_as_user(folder))
    finally:
        shutil.rmtree(folder)


def run_as_user(folder: Path) -> str:
    user = ["setpriv", "--reuid", UID, "--regid", UID, "--clear-groups"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "XDG_RUNTIME_DIR": str(folder / "run")}
    for python in (sys.executable, "/usr/bin/python3"):
        probe = [*user, python, "-c", PROBE]
        try:
            usable = subprocess.run(probe, timeout=TIMEOUT_S, check=False, capture_output=True, cwd="/").returncode == 0
        except OSError:
            usable = False
        if usable:
            command = [*user, python, "-B", "-c", SCRIPT]
            done = subprocess.run(
                command, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, cwd="/", check=False
            )
            assert done.returncode == 0, done.stderr
            return done.stdout
    pytest.skip("no Python 3.11 that a plain user may run")


def test_the_contract_holds_and_processes_are_counted_for_each_sandbox(report):
    assert report["counts"] == [40, 40]
    assert report["refused"]
    assert report["pids_limit"]


def test_the_disk_is_limited(report):
    assert report["disk_limit"]
    assert "No space left" in report["disk"]


def test_memory_is_limited_for_each_process_and_said_to_be_no_whole_limit(report):
    assert report["memory"] != 0
    assert not report["memory_limit"]


def test_a_grader_reads_what_the_agent_locked(report):
    assert report["locked"] == ["text\n", "text\n"]


def test_nothing_is_left(report):
    assert report["left"] in ([], [name for name in report["left"] if name.startswith("launcher-")])
