"""From a model's reply to an action.

In: the reply's text and the action format. Out: a typed `Action`. Any string is accepted: a reply that holds no action
is data, never an error. Knows no environment and no model.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

SUBMIT = "submit"
"""Alone or as the last line it ends the episode."""

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[ \t]*\1[`~]*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_ONE_LINE_FENCE = re.compile(r"```([^\n`]+)```")


class ActionFormat(StrEnum):
    """How a reply carries its command."""

    RAW = "raw"
    """The whole reply is the command."""
    FENCED = "fenced"
    """The first fenced code block is the command; text around it is ignored."""


class ActionKind(StrEnum):
    """What a reply asks for."""

    COMMAND = "command"
    SUBMIT = "submit"
    """A declared end without a command."""
    NONE = "none"
    """No action in the reply: also a declared end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One parsed reply."""

    kind: ActionKind
    command: str = ""
    """What the shell runs; empty unless `kind` is `COMMAND`."""
    ends: bool = False
    """True when the reply declares the end of the episode, after the command if there is one."""


def parse_action(reply: str, action_format: ActionFormat) -> Action:
    """Reads the action out of a reply.

    Example: `parse_action("ls", ActionFormat.RAW)` is the command `ls`; with `submit` on a line of its own after it,
    the command also ends the episode.
    """
    body = reply if action_format is ActionFormat.RAW else _fenced(reply)
    if body is None:
        return Action(kind=ActionKind.SUBMIT if reply.strip() == SUBMIT else ActionKind.NONE, ends=True)
    lines = body.strip().split("\n")
    ends = lines[-1].strip() == SUBMIT
    command = "\n".join(lines[:-1] if ends else lines).strip()
    if not command:
        return Action(kind=ActionKind.SUBMIT if ends else ActionKind.NONE, ends=True)
    return Action(kind=ActionKind.COMMAND, command=command, ends=ends)


def _fenced(reply: str) -> str | None:
    """The inside of the first fenced block; an unclosed one runs to the end."""
    blocks = [m for m in (_FENCE.search(reply), _ONE_LINE_FENCE.search(reply)) if m]
    if not blocks:
        return None
    first = min(blocks, key=lambda m: m.start())
    return first.group(first.lastindex or 0)
