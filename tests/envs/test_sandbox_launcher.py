"""The launcher: many threads, several processes, and nothing left behind however they end."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from claw_envs.errors import SandboxLost, SandboxUnavailable
from claw_envs.sandbox.base import Limits
from claw_envs.sandbox.host import leases, procs
from claw_envs.sandbox.launcher import Launcher, get_launcher
from claw_envs.sandbox.namespace import NamespaceSandbox
from claw_envs.sandbox.reaper import reap
from tests.helpers.sandboxes import ROOT, TIMEOUT_S, Owner, any_alive, groups_of, identities, until

pytestmark = pytest.mark.sandbox


@pytest.fixture
def own(tmp_path):
    """Starts owners with that many sandboxes, all with one state folder."""
    owners: list[Owner] = []

    def start(sandboxes: int) -> Owner:
        owners.append(Owner(tmp_path, sandboxes))
        return owners[-1]

    yield start
    for owner in owners:
        owner.clean()


def run_script(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )


def test_64_sandboxes_from_64_threads_at_once():
    def episode(number: int) -> tuple[int, bytes | None, bytes]:
        with NamespaceSandbox() as sandbox:
            sandbox.exec(f"echo {number} > f; x={number}", timeout_s=TIMEOUT_S)
            counted = sandbox.exec("seq 1000 | wc -l; echo $x; ls -d /proc/[0-9]* | wc -l", timeout_s=TIMEOUT_S)
            sandbox.freeze()
            return number, sandbox.read("/work/f", max_bytes=100), counted.stdout

    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(episode, range(64)))
    for number, text, counted in results:
        assert text == f"{number}\n".encode()
        assert counted.split()[:2] == [b"1000", str(number).encode()]
        assert int(counted.split()[2]) < 10


def test_a_sandbox_outlives_the_thread_that_made_it():
    with ThreadPoolExecutor(1) as pool:
        sandbox = pool.submit(NamespaceSandbox).result()
        begin = "x=1; sleep 1000 & until pgrep sleep; do :; done"
        pool.submit(sandbox.exec, begin, timeout_s=TIMEOUT_S).result()
    with sandbox:
        assert sandbox.exec("echo $x; pgrep -c sleep", timeout_s=TIMEOUT_S).stdout == b"1\n1\n"


def test_closing_leaves_nothing():
    sandbox = NamespaceSandbox()
    sandbox.exec("setsid nohup sleep 1000 >/dev/null 2>&1 &", timeout_s=TIMEOUT_S)
    sandbox.run_check(["true"], timeout_s=TIMEOUT_S)
    inside = [pair for pair in identities(get_launcher().pid) if pair[0] != get_launcher().pid]
    folder = leases.default_state() / sandbox.id
    assert folder.is_dir()
    assert any_alive(inside)
    sandbox.close()
    assert not any_alive(inside)
    assert not folder.exists()
    assert groups_of([sandbox.id]) == []


def test_two_processes_at_once_do_not_meet(own):
    first, second = own(2), own(2)
    first.kill()
    until(lambda: not any_alive(first.processes), "the first owner's processes end")
    assert any_alive([second.processes[-1]])
    assert all((second.state / identifier).is_dir() for identifier in second.ids)
    second.kill()
    until(lambda: not any_alive(second.processes), "the second owner's processes end")


def test_a_killed_owner_leaves_nothing(own):
    owner = own(3)
    assert len(groups_of(owner.ids)) >= 3 or os.getuid() != 0
    owner.kill()
    until(lambda: not any_alive(owner.processes), "all processes end")
    assert list(owner.state.iterdir()) == []
    assert groups_of(owner.ids) == []
    assert str(owner.state) not in Path("/proc/mounts").read_text()


def test_the_launcher_ends_with_its_owner_whoever_else_holds_the_socket(tmp_path):
    code = """
import subprocess, time
from claw_envs.sandbox.launcher import get_launcher
from claw_envs.sandbox.namespace import NamespaceSandbox
held, launcher = NamespaceSandbox(), get_launcher()
keeper = subprocess.Popen(["sleep", "1000"], pass_fds=[launcher._socket.fileno()], stdout=subprocess.DEVNULL)
print(launcher.pid, keeper.pid, flush=True)
time.sleep(1000)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, cwd=ROOT) as owner:
        assert owner.stdout is not None
        launcher, keeper = (int(word) for word in owner.stdout.readline().split())
        owner.kill()
    try:
        until(lambda: procs.start_time(launcher) is None, "the launcher ends")
        assert list((tmp_path / "claw").iterdir()) == []
    finally:
        os.kill(keeper, signal.SIGKILL)


def test_an_orderly_close_does_not_wait_for_other_holders_of_the_socket(tmp_path):
    launcher = Launcher(tmp_path / "state")
    copy = launcher._socket.dup()
    launcher.close()
    copy.close()
    assert launcher._process.returncode == 0


def test_a_killed_launcher_takes_its_sandboxes_along_and_reap_removes_the_rest(own):
    owner = own(2)
    os.kill(owner.launcher, signal.SIGKILL)
    until(lambda: not any_alive([pair for pair in owner.processes if pair[0] != owner.process.pid]), "sandboxes end")
    owner.kill()
    assert {path.name for path in owner.state.iterdir()} >= set(owner.ids)
    report = reap(owner.state)
    assert set(report.sandboxes) >= set(owner.ids)
    assert report.failed == ()
    assert list(owner.state.iterdir()) == []
    assert groups_of(owner.ids) == []


def test_the_next_launcher_reaps_what_a_dead_one_left(own):
    owner = own(1)
    os.kill(owner.launcher, signal.SIGKILL)
    owner.kill()
    launcher = Launcher(owner.state)
    try:
        assert not (owner.state / owner.ids[0]).exists()
    finally:
        launcher.close()


def test_reap_spares_the_living(own):
    owner = own(1)
    assert reap(owner.state).sandboxes == ()
    assert any_alive([owner.processes[-1]])
    owner.kill()
    until(lambda: not any_alive(owner.processes), "all processes end")


def test_a_dead_launcher_loses_its_sandboxes_and_is_replaced():
    old = NamespaceSandbox()
    dead = get_launcher().pid
    processes = identities(dead)
    os.kill(dead, signal.SIGKILL)
    until(lambda: not any_alive(processes), "the launcher and its sandboxes end")
    with pytest.raises(SandboxLost):
        old.exec("echo alive", timeout_s=TIMEOUT_S)
    with NamespaceSandbox() as fresh:
        assert fresh.exec("echo alive", timeout_s=TIMEOUT_S).stdout == b"alive\n"
        assert get_launcher().pid != dead
        assert not (leases.default_state() / old.id).exists()
    with pytest.raises(SandboxLost):
        old.read("/tests/x", max_bytes=1)
    old.close()


def test_a_sandbox_ends_with_its_lease():
    with NamespaceSandbox(Limits(lease_s=1.0)) as sandbox:
        with pytest.raises(SandboxLost, match="lease"):
            sandbox.exec("sleep 1000", timeout_s=TIMEOUT_S)
        assert not (leases.default_state() / sandbox.id).exists()


def test_a_normal_exit_waits_for_the_clean_up(tmp_path):
    code = (
        "from claw_envs.sandbox.namespace import NamespaceSandbox as N; s = N();"
        "s.exec('sleep 1000 &', timeout_s=9); from claw_envs.sandbox.launcher import get_launcher as g; print(g().pid)"
    )
    done = run_script(code, XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert procs.start_time(int(done.stdout)) is None
    assert list((tmp_path / "claw").iterdir()) == []


def test_a_fork_may_not_use_its_parents_sandbox_but_may_make_its_own(tmp_path):
    code = """
import os, signal
from claw_envs.errors import SandboxLost
from claw_envs.sandbox import launcher
from claw_envs.sandbox.namespace import NamespaceSandbox
held = NamespaceSandbox()
launcher._current_lock.acquire()  # as a thread of the parent might at that moment
child = os.fork()
if child:
    launcher._current_lock.release()
else:
    signal.alarm(20)
    try:
        held.exec("true", timeout_s=9)
    except SandboxLost:
        held.close()
        with NamespaceSandbox() as own:
            os._exit(0 if own.exec("echo a", timeout_s=9).stdout == b"a\\n" else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert held.exec("echo alive", timeout_s=9).stdout == b"alive\\n"
"""
    done = run_script(code, XDG_RUNTIME_DIR=str(tmp_path), PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr


def test_an_interrupted_call_does_not_mix_up_answers(monkeypatch):
    launcher = get_launcher()
    real = launcher._receive

    def interrupted(serial: int) -> object:
        raise KeyboardInterrupt

    with NamespaceSandbox() as sandbox:
        monkeypatch.setattr(launcher, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launcher.ping()
        monkeypatch.setattr(launcher, "_receive", real)
        sandbox.freeze()
        assert sandbox.run_check(["echo", "a"], timeout_s=TIMEOUT_S).stdout == b"a\n"


@pytest.mark.parametrize("attack", ["link", "open to others"])
def test_a_planted_state_folder_is_refused(tmp_path, attack):
    state = tmp_path / "state"
    if attack == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        state.symlink_to(tmp_path / "elsewhere")
    else:
        state.mkdir()
        state.chmod(0o777)
    with pytest.raises(SandboxUnavailable, match="mode 0700"):
        Launcher(state)


def test_without_bubblewrap_the_error_says_how_to_get_it(tmp_path):
    code = """
from claw_envs.sandbox.factory import open_sandbox, probe
print(probe()["namespace"].detail)
open_sandbox()
"""
    done = run_script(code, XDG_RUNTIME_DIR=str(tmp_path), PATH="/nonexistent")
    assert "scripts/system-packages" in done.stdout
    assert "SandboxUnavailable: bubblewrap is not installed" in done.stderr.splitlines()[-1]
    assert list((tmp_path / "claw").iterdir()) == []


def test_the_launcher_imports_the_standard_library_only():
    folder = ROOT / "claw_envs/sandbox"
    load = f"import sys, json; sys.path.append({str(folder)!r}); import host.server"
    code = f"{load}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, timeout=TIMEOUT_S, check=True)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert loaded - set(sys.stdlib_module_names) <= {"host", "__main__"}
    assert not loaded & {"subprocess", "shutil", "threading", "asyncio", "dataclasses"}
