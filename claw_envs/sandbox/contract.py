"""The contract of `Sandbox` as a function to call in a test, for any backend.

In: a way to make a sandbox. Out: nothing, or an AssertionError that says which rule broke. What a backend says that it
does not enforce (`capabilities`) is not asked of it; files are named relative to the shell's start folder, so that
backends without a real `/work` can be held to the rest.
"""

from collections.abc import Callable

from claw_envs.errors import SandboxLost
from claw_envs.sandbox.base import WORKDIR, Sandbox

Make = Callable[[], Sandbox]
LONG_S = 20.0
SHORT_S = 0.5


def check_sandbox(make: Make) -> None:
    """Holds a backend to the contract; makes and closes a few sandboxes, some 5 s.

    Raises:
        AssertionError: a rule is broken.
        SandboxUnavailable: the backend does not run here.
    """
    _with_one(make, check_results)
    _with_one(make, check_hostile_commands)
    _with_one(make, check_state)
    _with_one(make, check_timeout)
    _with_one(make, check_output_cap)
    _with_one(make, check_files)
    _with_one(make, check_freeze)
    check_close(make)


def _with_one(make: Make, check: Callable[[Sandbox], None]) -> None:
    sandbox = make()
    try:
        check(sandbox)
    finally:
        sandbox.close()


def check_results(sandbox: Sandbox) -> None:
    """Exit code, both streams as raw bytes, empty standard input."""
    assert isinstance(sandbox, Sandbox)
    result = sandbox.exec("printf out; printf 'e\\377r' >&2; (exit 3)", timeout_s=LONG_S)
    assert (result.stdout, result.stderr, result.exit_code) == (b"out", b"e\xffr", 3), result
    assert result.bytes_total == 6
    assert (result.timed_out, result.oom, result.shell_restarted) == (False, False, False)
    reader = sandbox.exec("cat; read -r line; echo $?", timeout_s=LONG_S)
    assert (reader.stdout, reader.timed_out) == (b"1\n", False), "standard input is not empty"


def check_hostile_commands(sandbox: Sandbox) -> None:
    """A command that is no valid shell, or ends the shell, is data; the next command works."""
    for command in ("echo 'open", 'echo "$(', "if true", ")", "cat <<EOF\nopen", "}", "echo \\", "\x00", "", "#"):
        result = sandbox.exec(command, timeout_s=LONG_S)
        assert not result.timed_out, f"{command!r} hung"
        assert not result.shell_restarted, f"{command!r} ended the shell"
    endings = {"exit 7": 7, "set -e; false": 1, "exec true": 0, "kill -9 $$": 137}
    for command, code in endings.items():
        result = sandbox.exec(command, timeout_s=LONG_S)
        assert result.shell_restarted, f"{command!r} did not end the shell"
        assert result.exit_code == code, f"{command!r} ended with {result.exit_code}, not {code}"
        alive = sandbox.exec("echo alive", timeout_s=LONG_S)
        assert alive.stdout == b"alive\n", f"no shell after {command!r}"


def check_state(sandbox: Sandbox) -> None:
    """Folder, variables and functions persist; a background job delays nothing."""
    sandbox.exec("mkdir sub && cd sub; x=4; f() { echo f$x; }", timeout_s=LONG_S)
    result = sandbox.exec("f; pwd", timeout_s=LONG_S)
    assert result.stdout.startswith(b"f4\n"), result
    assert result.stdout.endswith(b"/sub\n"), result
    background = sandbox.exec("sleep 60 & echo started", timeout_s=LONG_S)
    assert (background.stdout, background.timed_out) == (b"started\n", False), "a background job blocks the return"


def check_timeout(sandbox: Sandbox) -> None:
    """At the deadline what the command started dies, what was said comes back, and the shell lives on."""
    sandbox.exec("x=kept; sleep 61 & kept=$!", timeout_s=LONG_S)
    commands = (
        "echo partial; sleep 62; echo late",
        "echo partial; while :; do sleep 0.01; done",
        "echo partial; while :; do :; done",
    )
    for command in commands:
        result = sandbox.exec(command, timeout_s=SHORT_S)
        assert result.timed_out, command
        assert result.exit_code is None, command
        assert result.stdout == b"partial\n", f"{command!r} gave {result.stdout!r}"
        assert not result.shell_restarted, f"{command!r} cost the shell"
    after = sandbox.exec("echo $x; kill -0 $kept && echo older job lives; pgrep -x sleep | wc -l", timeout_s=LONG_S)
    assert after.stdout.startswith(b"kept\nolder job lives\n"), after


def check_output_cap(sandbox: Sandbox) -> None:
    """A flood keeps its first and last part, and says how much there was."""
    result = sandbox.exec("echo first; head -c 5000000 /dev/zero; echo; echo last", timeout_s=LONG_S)
    assert result.bytes_total == 5_000_012, result.bytes_total
    assert len(result.stdout) + result.stdout_omitted == result.bytes_total
    assert len(result.stdout) < 2**20, "the output is not capped"
    assert result.stdout.startswith(b"first\n")
    assert result.stdout.endswith(b"\nlast\n")


def check_files(sandbox: Sandbox) -> None:
    """Files go in and out whole; only regular files inside can be read, and nothing blocks."""
    data = bytes(range(256)) * 100
    sandbox.write(f"{WORKDIR}/a/b/c.bin", data, mode=0o640)
    assert sandbox.exec("stat -c '%a %s' a/b/c.bin", timeout_s=LONG_S).stdout == b"640 25600\n"
    assert sandbox.read(f"{WORKDIR}/a/b/c.bin", max_bytes=len(data)) == data
    try:
        sandbox.read(f"{WORKDIR}/a/b/c.bin", max_bytes=len(data) - 1)
    except ValueError:
        pass
    else:
        raise AssertionError("a file longer than max_bytes was read")
    sandbox.exec("mkfifo pipe; ln -s /etc/passwd out; ln -s ../../../../../../etc up; mkdir folder", timeout_s=LONG_S)
    for name in ("pipe", "out", "up/passwd", "folder", "absent", "a/b/c.bin/x"):
        assert sandbox.read(f"{WORKDIR}/{name}", max_bytes=10_000) is None, f"{name} was read"
    sandbox.write(f"{WORKDIR}/pipe", b"replaced")
    assert sandbox.read(f"{WORKDIR}/pipe", max_bytes=100) == b"replaced", "a FIFO in the way was not replaced"


def check_freeze(sandbox: Sandbox) -> None:
    """After `freeze` files stand still, checks see them and cannot change them."""
    sandbox.exec(
        "(setsid nohup bash -c 'while :; do date +%N >> ticks; sleep 0.01; done' >/dev/null 2>&1 &)", timeout_s=LONG_S
    )
    sandbox.exec("until [ -s ticks ]; do sleep 0.01; done", timeout_s=LONG_S)
    sandbox.freeze()
    before = sandbox.read(f"{WORKDIR}/ticks", max_bytes=10**7)
    result = sandbox.run_check(["/bin/sh", "-c", "wc -c < ticks; exit 5"], timeout_s=LONG_S)
    assert result.exit_code == 5, result
    assert before is not None
    assert int(result.stdout) == len(before), "files change after freeze"
    if sandbox.capabilities.isolated:
        denied = sandbox.run_check(["/bin/sh", "-c", "echo no > ticks"], timeout_s=LONG_S)
        assert denied.exit_code != 0, "a check may change the agent's files"
    slow = sandbox.run_check(["/bin/sh", "-c", "echo partial; sleep 63"], timeout_s=SHORT_S)
    assert (slow.timed_out, slow.exit_code, slow.stdout) == (True, None, b"partial\n"), slow


def check_close(make: Make) -> None:
    """`close` may be repeated; every other method then raises `SandboxLost`."""
    sandbox = make()
    sandbox.close()
    sandbox.close()
    calls: list[Callable[[], object]] = [
        lambda: sandbox.exec("true", timeout_s=LONG_S),
        lambda: sandbox.write(f"{WORKDIR}/x", b""),
        lambda: sandbox.read(f"{WORKDIR}/x", max_bytes=1),
        sandbox.freeze,
        lambda: sandbox.run_check(["true"], timeout_s=LONG_S),
    ]
    for call in calls:
        try:
            call()
        except SandboxLost:
            continue
        raise AssertionError("a closed sandbox answered")
