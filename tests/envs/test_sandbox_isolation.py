"""What the agent cannot see, reach or use up; and what a grader can rely on."""

import os
from pathlib import Path

import pytest

from claw_envs.sandbox.base import Limits
from claw_envs.sandbox.namespace import NamespaceSandbox

pytestmark = pytest.mark.sandbox
LONG = 20.0


@pytest.fixture(scope="module")
def shared():
    """For cases that leave nothing behind."""
    with NamespaceSandbox() as made:
        yield made


@pytest.fixture
def sandbox():
    with NamespaceSandbox(Limits(memory_bytes=96 * 2**20, pids=32, disk_bytes=8 * 2**20)) as made:
        yield made


def out(sandbox, command):
    return sandbox.exec(command, timeout_s=LONG).stdout.decode().strip()


def test_the_agent_is_an_unprivileged_user_without_capabilities(shared):
    assert (
        out(shared, "id -u; id -un; awk '/^Cap/ {print $2}' /proc/self/status | sort -u")
        == "1000\nuser\n0000000000000000"
    )


def test_host_files_are_invisible(shared, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    seen = out(shared, f"cat {secret} {__file__} /etc/shadow; ls /root /sys /mnt {Path.home()}; echo end")
    assert seen == "end"


def test_the_environment_is_not_ours(shared, monkeypatch):
    monkeypatch.setenv("CLAW_TEST_SECRET", "hunter2")
    with NamespaceSandbox() as fresh:
        names = set(out(fresh, "env | cut -d= -f1").split())
    assert names <= {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "PWD", "OLDPWD", "SHLVL", "_"}


def test_other_processes_are_invisible(shared):
    assert (
        out(shared, f"kill -0 {os.getpid()} 2>/dev/null || echo none; ls -d /proc/[0-9]* | wc -l").split()[0] == "none"
    )
    assert int(out(shared, "ls -d /proc/[0-9]* | wc -l")) < 8


def test_only_loopback(shared):
    assert out(shared, "tail -n +3 /proc/net/dev | cut -d: -f1") == "lo"
    refused = shared.exec("exec 3<>/dev/tcp/192.0.2.1/80", timeout_s=LONG)
    assert (refused.exit_code, refused.timed_out) == (1, False)
    assert b"unreachable" in refused.stderr


@pytest.mark.parametrize("path", ["/x", "/dev/x", "/etc/x", "/usr/x", "/home/x", "/var/x", "/proc/sys/kernel/hostname"])
def test_nothing_of_the_system_can_be_written(shared, path):
    assert shared.exec(f"echo x > {path}", timeout_s=LONG).exit_code == 1


def test_no_privilege_can_be_gained(shared):
    for command in ("mount -t tmpfs none /tmp", "unshare -Ur true", "su -c true </dev/null", "mknod /work/m c 1 1"):
        assert shared.exec(command, timeout_s=LONG).exit_code != 0, command


def test_memory_is_limited_and_the_kill_is_flagged(sandbox):
    if not sandbox.capabilities.memory_limit:
        pytest.skip("no control group can be made here")
    result = sandbox.exec("x=1; head -c 500m /dev/zero | tail", timeout_s=LONG)
    assert (result.oom, result.exit_code, result.shell_restarted) == (True, 137, False)
    calm = sandbox.exec("echo $x", timeout_s=LONG)
    assert (calm.oom, calm.stdout) == (False, b"1\n")


def test_memory_taken_by_the_shell_itself_costs_the_shell(sandbox):
    if not sandbox.capabilities.memory_limit:
        pytest.skip("no control group can be made here")
    result = sandbox.exec("x=$(head -c 200m /dev/zero | tr '\\0' a)", timeout_s=LONG)
    assert result.oom
    assert out(sandbox, "echo back") == "back"


def test_a_fork_bomb_is_contained(sandbox):
    assert sandbox.capabilities.pids_limit
    sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 1000", timeout_s=0.5)
    counted = sandbox.exec("ls -d /proc/[0-9]* | wc -l", timeout_s=LONG)
    if counted.exit_code == 0:
        assert int(counted.stdout) <= 32
    sandbox.freeze()
    assert sandbox.run_check(["echo", "graded"], timeout_s=LONG).stdout == b"graded\n"


@pytest.mark.parametrize("place", ["/work", "/tmp", "/var/tmp", "/run", "/dev/shm", "$HOME"])
def test_the_disk_is_limited_everywhere(sandbox, place):
    assert sandbox.capabilities.disk_limit
    result = sandbox.exec(f"head -c 100m /dev/zero > {place}/big; stat -c %s {place}/big", timeout_s=LONG)
    assert b"No space left" in result.stderr
    assert int(result.stdout) <= 8 * 2**20


def test_a_million_files_are_contained(sandbox):
    result = sandbox.exec(
        "mkdir d; cd d; for ((i = 0; i < 100000; i++)); do : > $i || break; done; ls | wc -l", timeout_s=LONG
    )
    assert int(result.stdout) <= 8 * 2**20 // 4096


def test_a_full_sandbox_can_still_be_graded(sandbox):
    sandbox.exec("echo answer > f; head -c 100m /dev/zero > big; sleep 1000 & sleep 1001 &", timeout_s=LONG)
    sandbox.freeze()
    sandbox.write("/tests/check.sh", b"cp f /grade/copy && cat /grade/copy", mode=0o600)
    assert sandbox.run_check(["sh", "/tests/check.sh"], timeout_s=LONG).stdout == b"answer\n"


def test_a_daemon_does_not_survive_freeze(sandbox):
    sandbox.exec(
        "(setsid nohup bash -c 'trap \"\" TERM HUP; while :; do echo x >> f; done' >/dev/null 2>&1 &)", timeout_s=LONG
    )
    sandbox.exec("until [ -s f ]; do :; done", timeout_s=LONG)
    sandbox.freeze()
    sizes = {len(sandbox.read("/work/f", max_bytes=10**8) or b"") for _ in range(50)}
    assert len(sizes) == 1


def test_a_grader_reads_what_the_agent_locked_and_changes_nothing(sandbox):
    sandbox.exec("echo text > f; chmod 000 f; mkdir d; echo deep > d/g; chmod 000 d; chmod 000 /work", timeout_s=LONG)
    assert sandbox.exec("exit 1", timeout_s=LONG).shell_restarted
    assert out(sandbox, "echo alive") == "alive"
    sandbox.freeze()
    assert sandbox.run_check(["cat", "f", "d/g"], timeout_s=LONG).stdout == b"text\ndeep\n"
    assert sandbox.run_check(["stat", "-c", "%U %a", "f"], timeout_s=LONG).stdout == b"user 0\n"
    assert [sandbox.read(f"/work/{name}", max_bytes=10) for name in ("f", "d/g")] == [b"text\n", b"deep\n"]
    for path in ("f", "/work/new", "/tmp/new", "/tests/new", "/etc/new"):
        assert sandbox.run_check(["sh", "-c", f"echo x > {path}"], timeout_s=LONG).exit_code != 0, path
    inside = sandbox.run_check(["awk", "/^Cap(Eff|Bnd)/ {print $2}", "/proc/self/status"], timeout_s=LONG)
    assert set(inside.stdout.split()) <= {b"0000000000000004", b"000001ffffffffff"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a check a host user of its own")
def test_a_check_runs_as_another_host_user(sandbox):
    sandbox.freeze()
    agent, checker = sandbox._made.uid, sandbox._made.check_uid
    mapped = sandbox.run_check(["cat", "/proc/self/uid_map"], timeout_s=LONG).stdout.split()
    assert mapped == [b"0", str(checker).encode(), b"1", b"1000", str(agent).encode(), b"1"]
    assert len({0, agent, checker}) == 3


def test_a_check_has_its_own_user_processes_and_no_network(sandbox):
    sandbox.exec("echo mine > f; sleep 1000 &", timeout_s=LONG)
    seen = sandbox.run_check(
        ["sh", "-c", "ps -eo args | grep -c '^sleep'; tail -n +3 /proc/net/dev | cut -d: -f1"], timeout_s=LONG
    )
    assert seen.stdout.split() == [b"0", b"lo"]


def test_the_agent_never_sees_tests(sandbox):
    sandbox.write("/tests/secret.py", b"answer = 42")
    assert out(sandbox, "ls -d /tests /grade /proc/*/root/tests; grep -c -e /tests -e /grade /proc/mounts") == "0"
    assert sandbox.run_check(["cat", "/tests/secret.py"], timeout_s=LONG).stdout == b"answer = 42"


def test_two_sandboxes_share_nothing(sandbox, shared):
    sandbox.exec("echo mine > /tmp/f; echo mine > /dev/shm/f", timeout_s=LONG)
    assert out(shared, "ls /tmp /dev/shm | grep -c f") == "0"


def test_a_check_that_eats_memory_is_flagged(sandbox):
    if not sandbox.capabilities.memory_limit:
        pytest.skip("no control group can be made here")
    sandbox.freeze()
    result = sandbox.run_check(["sh", "-c", "head -c 500m /dev/zero | tail"], timeout_s=LONG)
    assert result.oom
    assert sandbox.run_check(["echo", "ok"], timeout_s=LONG).stdout == b"ok\n"


def test_a_check_that_does_not_exist_is_data(sandbox):
    sandbox.freeze()
    result = sandbox.run_check(["no-such-program"], timeout_s=LONG)
    assert result.exit_code not in (0, None)
    assert b"no-such-program" in result.stderr
