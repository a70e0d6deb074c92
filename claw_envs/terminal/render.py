"""From what a command did to what the agent is told of it.

In: an `ExecResult`. Out: a `TerminalState` whose `text` is bounded, valid Unicode and free of terminal control. The
raw streams keep their control characters; only the text view drops them.
"""

import re

from claw_envs.types import ExecResult, FailureKind, Role, TerminalState

_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC, DCS, ...: titles, links
    r"|\x1b[ -/]*[0-~]?"  # other escapes
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # what is left, but tab and newline
)


def plain(text: str) -> str:
    """`text` without terminal control; a carriage return before a newline goes too."""
    return _CONTROL.sub("", text)


def clip(text: str, limit: int) -> str:
    """At most `limit` characters: the first and the last half, and between them how many are left out."""
    if len(text) <= limit:
        return text
    note = f"\n[{len(text) - limit} characters left out]\n"
    room = max(limit - len(note), 0)
    return (text[: room - room // 2] + note + text[len(text) - room // 2 :])[:limit]


def command_state(result: ExecResult, *, timeout_s: float, text_limit: int) -> TerminalState:
    """The state after a command ran. `text_limit` bounds `text`, in characters."""
    stdout, stderr = (stream.decode("utf-8", "replace") for stream in (result.stdout, result.stderr))
    notes = _notes(result, timeout_s)
    room = text_limit - sum(len(note) + 1 for note in notes)
    output = clip("\n".join(part for part in (plain(stdout).rstrip(), plain(stderr).rstrip()) if part), max(room, 0))
    return TerminalState(
        role=Role.TERMINAL,
        text="\n".join([output, *notes] if output else notes or ["[no output]"])[:text_limit],
        is_error=result.exit_code != 0,
        stdout=stdout,
        stderr=stderr,
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        oom=result.oom,
        bytes_total=result.bytes_total,
        cwd=result.cwd,
    )


def _notes(result: ExecResult, timeout_s: float) -> list[str]:
    notes: list[str] = []
    left_out = result.stdout_omitted + result.stderr_omitted
    if left_out:
        notes.append(f"[{left_out} bytes of output left out]")
    if result.timed_out:
        notes.append(f"[killed after {timeout_s:g} s]")
    if result.oom:
        notes.append("[out of memory]")
    if result.shell_restarted:
        notes.append("[the shell ended; a new one runs]")
    if result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    return notes


def message_state(text: str, *, cwd: str, role: Role = Role.TERMINAL, command: bool = False) -> TerminalState:
    """A state in which nothing ran: the start, a declared end, or (`command=False`) a reply that held no action."""
    return TerminalState(role=role, text=text, command=command, is_error=not command, cwd=cwd)


def failed_state(kind: FailureKind, *, cwd: str) -> TerminalState:
    """The world failed; nothing may be learned from this state."""
    return TerminalState(role=Role.TERMINAL, text="", valid=False, failure_kind=kind, cwd=cwd)
