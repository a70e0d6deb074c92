"""The observation: the fields of a `TerminalState` as members of Gymnasium spaces.

In: a state and the instruction. Out: a plain dict. Absent values have a stand-in inside the space (-1, empty text),
since a space has no None.
"""

from typing import Any

from gymnasium import spaces

from claw_envs.sandbox.base import Limits
from claw_envs.spaces import UnicodeText, fit
from claw_envs.types import TerminalState

NO_EXIT_CODE = -1
_STREAM_BYTES = 3 * Limits().output_bytes + 1024
"""A byte that is not UTF-8 becomes a replacement character of three."""
_NAME_BYTES = 256
_MAX_COUNT = 2**40
_TEXTS = {"instruction": 8192, "stdout": _STREAM_BYTES, "stderr": _STREAM_BYTES, "cwd": 4096, "newly_passed": 1024}
_NAMES = ("role", "failure_kind")
_FLAGS = ("valid", "command", "is_error", "timed_out", "oom")


def observation_space(text_limit: int) -> spaces.Dict:
    """The space, for a rendered text of at most `text_limit` characters."""
    members: dict[str, spaces.Space[Any]] = {"text": UnicodeText(4 * text_limit)}
    members |= {key: UnicodeText(size) for key, size in _TEXTS.items()}
    members |= {key: UnicodeText(_NAME_BYTES) for key in _NAMES}
    members |= {key: spaces.Discrete(2) for key in _FLAGS}
    members["exit_code"] = spaces.Discrete(257, start=NO_EXIT_CODE)
    members["bytes_total"] = spaces.Discrete(_MAX_COUNT)
    return spaces.Dict(members)


def observe(state: TerminalState, instruction: str, text_limit: int) -> dict[str, Any]:
    """The observation of a state; a new dict at every call."""
    texts = {
        "instruction": instruction,
        "stdout": state.stdout,
        "stderr": state.stderr,
        "cwd": state.cwd,
        "newly_passed": "\n".join(state.newly_passed or ()),
    }
    return {
        "text": fit(state.text, 4 * text_limit),
        **{key: fit(texts[key], size) for key, size in _TEXTS.items()},
        "role": str(state.role),
        "failure_kind": str(state.failure_kind or ""),
        **{key: int(getattr(state, key)) for key in _FLAGS},
        "exit_code": NO_EXIT_CODE if state.exit_code is None else min(max(state.exit_code, NO_EXIT_CODE), 255),
        "bytes_total": min(state.bytes_total, _MAX_COUNT - 1),
    }
