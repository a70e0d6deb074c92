"""The live shell under commands that break shells."""

import threading
from pathlib import Path

import pytest

from claw_envs.errors import SandboxLost
from claw_envs.sandbox import shell
from claw_envs.sandbox.host import procs
from claw_envs.sandbox.namespace import NamespaceSandbox
from tests.helpers.sandboxes import until

pytestmark = pytest.mark.sandbox
LONG = 20.0


@pytest.fixture
def sandbox():
    with NamespaceSandbox() as made:
        yield made


def sleepers(sandbox):
    return int(sandbox.exec("ps -eo args | grep -c '^sleep'", timeout_s=LONG).stdout)


def test_a_heredoc_and_many_lines(sandbox):
    result = sandbox.exec("cat <<'EOF' > f\n$x 'one\ntwo\nEOF\nfor i in 1 2\ndo echo $i\ndone; cat f", timeout_s=LONG)
    assert result.stdout == b"1\n2\n$x 'one\ntwo\n"


def test_half_a_megabyte_of_command(sandbox):
    result = sandbox.exec(f"x={'a' * 500_000}; echo ${{#x}}", timeout_s=LONG)
    assert result.stdout == b"500000\n"


def test_text_that_is_no_unicode_still_runs(sandbox):
    assert sandbox.exec("echo \ud800é", timeout_s=LONG).stdout == "?é\n".encode()


def test_streams_stay_apart_and_binary_is_kept(sandbox):
    result = sandbox.exec("printf '\\000\\377\\033[31m'; printf 'e\\200' >&2", timeout_s=LONG)
    assert (result.stdout, result.stderr) == (b"\x00\xff\x1b[31m", b"e\x80")


def test_the_folder_is_reported(sandbox):
    assert sandbox.exec("mkdir -p 'a b\nc'; cd 'a b\nc'", timeout_s=LONG).cwd == "/work/a b\nc"
    assert sandbox.exec("exit 1", timeout_s=LONG).cwd == ""
    assert sandbox.exec("true", timeout_s=LONG).cwd == "/work"


def test_redirections_of_the_shell_itself_persist(sandbox):
    sandbox.exec("exec > log", timeout_s=LONG)
    assert sandbox.exec("echo hidden", timeout_s=LONG).stdout == b""
    assert sandbox.read("/work/log", max_bytes=100) == b"hidden\n"


def test_a_program_in_the_shells_place_runs_to_its_end(sandbox):
    result = sandbox.exec("exec bash -c 'echo a; sleep 0.3; echo b; exit 9'", timeout_s=LONG)
    assert (result.stdout, result.exit_code, result.shell_restarted) == (b"a\nb\n", 9, True)


def test_a_program_in_the_shells_place_meets_the_deadline(sandbox):
    result = sandbox.exec("exec sleep 1000", timeout_s=0.3)
    assert (result.timed_out, result.exit_code, result.shell_restarted) == (True, None, True)
    assert sleepers(sandbox) == 0


@pytest.mark.parametrize(
    "command",
    [
        "sleep 1000",
        "sleep 1000 | sleep 1001; sleep 1002",
        "(setsid nohup sleep 1000 >/dev/null 2>&1 &); sleep 1001",
        "while true; do sleep 1000 & sleep 0.01; done",
        "x=$(sleep 1000); sleep 1001",
        "f() { sleep 1000; f; }; f",
        "trap '' TERM INT HUP; bash -c 'trap \"\" TERM INT HUP; sleep 1000; sleep 1001'",
        "read line < <(sleep 1000)",
        "until false; do :; done",
        "for ((;;)); do ((1)); done",
    ],
)
def test_a_deadline_kills_what_was_started_and_keeps_the_shell(sandbox, command):
    sandbox.exec("x=kept; cd /tmp", timeout_s=LONG)
    result = sandbox.exec(command, timeout_s=0.4)
    assert (result.timed_out, result.shell_restarted) == (True, False)
    assert sandbox.exec("echo $x; pwd", timeout_s=LONG).stdout == b"kept\n/tmp\n" or "x=" in command
    assert sleepers(sandbox) == 0


def test_a_deadline_spares_older_jobs_and_what_they_start_meanwhile(sandbox):
    sandbox.exec("bash -c 'until [ -e go ]; do sleep 0.01; done; sleep 1000 & wait' &", timeout_s=LONG)
    sandbox.exec("touch go; sleep 1001", timeout_s=0.5)
    assert sandbox.exec("pgrep -f -a '^sleep'", timeout_s=LONG).stdout.split()[1:] == [b"sleep", b"1000"]


@pytest.mark.parametrize(
    "command", ["kill -STOP $$", "set -n", "trap '' 41; while :; do :; done", "printf() { :; }; builtin() { :; }"]
)
def test_a_shell_that_cannot_come_to_rest_is_replaced(sandbox, command, monkeypatch):
    monkeypatch.setattr(shell, "GRACE_S", 0.3)
    result = sandbox.exec(command, timeout_s=0.3)
    assert (result.timed_out, result.shell_restarted) == (True, True)
    assert sandbox.exec("echo back", timeout_s=LONG).stdout == b"back\n"


@pytest.mark.parametrize(
    "command",
    [
        "exec 10>&- 11>&- 12>&-",
        "for f in /proc/$$/fd/*; do echo 'x 0 /' > $f; done 2>/dev/null",
        "exec 0<&- 1>&- 2>&-",
        "kill -9 -1",
        "ulimit -n 3",
        "enable -n printf builtin eval",
    ],
)
def test_an_attack_on_the_protocol_costs_at_most_the_shell(sandbox, command, monkeypatch):
    monkeypatch.setattr(shell, "GRACE_S", 0.3)
    sandbox.exec(command, timeout_s=0.5)
    sandbox.exec("true", timeout_s=0.5)
    assert sandbox.exec("exit 0", timeout_s=LONG).shell_restarted
    assert sandbox.exec("echo back", timeout_s=LONG).stdout == b"back\n"


def test_a_shell_killed_between_commands_is_data(sandbox):
    sandbox.exec("(sleep 0.1; kill -9 $$) & true", timeout_s=LONG)
    root = sandbox._shell._root
    until(lambda: procs.start_time(root) is None, "the shell ends")
    assert sandbox.exec("echo lost", timeout_s=LONG).shell_restarted
    assert sandbox.exec("echo back", timeout_s=LONG).stdout == b"back\n"


def test_files_outlive_the_shell(sandbox):
    sandbox.exec("echo text > f; exit 3", timeout_s=LONG)
    assert sandbox.exec("cat f", timeout_s=LONG).stdout == b"text\n"


def test_a_flood_is_capped_and_ends_at_the_deadline(sandbox):
    result = sandbox.exec("echo first; yes | cat", timeout_s=0.6)
    assert result.timed_out
    assert result.bytes_total > 10**6
    assert len(result.stdout) == sandbox.limits.output_bytes
    assert result.stdout.startswith(b"first\n")
    assert sandbox.exec("echo quiet", timeout_s=LONG).stdout == b"quiet\n"


def test_a_background_flood_delays_no_later_command(sandbox):
    sandbox.exec("yes &", timeout_s=LONG)
    result = sandbox.exec("echo done >&2", timeout_s=5.0)
    assert (result.stderr, result.timed_out) == (b"done\n", False)


def test_close_interrupts_a_running_command():
    sandbox = NamespaceSandbox()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            sandbox.exec("echo started > f; sleep 1000", timeout_s=1000)
        except SandboxLost as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: (Path(f"/proc/self/fd/{sandbox._made.files_fd}") / "work/f").exists(), "the command runs")
    sandbox.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(errors) == 1
