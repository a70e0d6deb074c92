import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_envs.terminal.render import clip, command_state, plain
from claw_envs.types import ExecResult


def result(stdout: bytes = b"", stderr: bytes = b"", exit_code: int | None = 0, **fields) -> ExecResult:
    fields.setdefault("bytes_total", len(stdout) + len(stderr))
    return ExecResult(stdout=stdout, stderr=stderr, exit_code=exit_code, **fields)


def state(*args, text_limit: int = 400, **fields):
    return command_state(result(*args, **fields), timeout_s=10.0, text_limit=text_limit)


@pytest.mark.parametrize(
    ("given_result", "text"),
    [
        (result(b"a\nb\n"), "a\nb"),
        (result(), "[no output]"),
        (result(b"out\n", b"bad\n", 2), "out\nbad\n[exit code 2]"),
        (result(exit_code=1), "[exit code 1]"),
        (result(b"part", exit_code=None, timed_out=True), "part\n[killed after 10 s]"),
        (result(exit_code=137, oom=True), "[out of memory]\n[exit code 137]"),
        (result(exit_code=3, shell_restarted=True), "[the shell ended; a new one runs]\n[exit code 3]"),
        (result(b"ab", bytes_total=9, stdout_omitted=7), "ab\n[7 bytes of output left out]"),
        (result(b"\x1b[31mred\x1b[0m\x1b]0;title\x07 \x00ok\r\n"), "red ok"),
        (result(b"\xff\xfe"), "\ufffd\ufffd"),
    ],
)
def test_what_a_model_is_shown(given_result, text):
    assert command_state(given_result, timeout_s=10.0, text_limit=400).text == text


def test_typed_fields_keep_what_the_text_drops():
    shown = state(b"\x1b[31mred", b"e", 3, cwd="/work/a")
    assert (shown.stdout, shown.stderr, shown.exit_code, shown.cwd) == ("\x1b[31mred", "e", 3, "/work/a")
    assert shown.bytes_total == 9


@pytest.mark.parametrize(("code", "is_error"), [(0, False), (1, True), (None, True)])
def test_a_failed_or_killed_command_is_an_error(code, is_error):
    assert state(exit_code=code, timed_out=code is None).is_error is is_error


@given(st.binary(max_size=600), st.binary(max_size=600), st.integers(200, 500))
def test_text_is_bounded_valid_and_free_of_control(stdout, stderr, limit):
    shown = state(stdout, stderr, 1, text_limit=limit)
    assert len(shown.text) <= limit
    assert shown.text.encode()
    assert not [c for c in shown.text if ord(c) < 32 and c not in "\t\n"]


def test_clip_keeps_both_ends_and_says_what_is_missing():
    shown = clip("a" * 500 + "b" * 500, 200)
    assert len(shown) <= 200
    assert shown.startswith("aaa")
    assert shown.endswith("bbb")
    assert "[800 characters left out]" in shown


def test_plain_leaves_text_alone():
    assert plain("tab\there\nnew é 日") == "tab\there\nnew é 日"
