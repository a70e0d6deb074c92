"""The arguments of `ClawTerminal-v0`, checked by name; and the options of its `reset`.

In: plain JSON-able values. Out: frozen settings. Knows no sandbox and runs nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from claw_envs.actions import ActionFormat
from claw_envs.errors import TaskError
from claw_envs.terminal.families import FAMILIES
from claw_envs.terminal.words import SPLITS

RESET_OPTIONS = ("task_id", "split", "family", "level")


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalSettings:
    """What `gym.make` was given.

    Raises:
        TaskError: an unknown family, level or split.
        ValueError: any other argument of a wrong type or out of range.
    """

    families: tuple[str, ...]
    levels: tuple[int, ...]
    split: str
    max_turns: int
    action_format: ActionFormat
    sandbox: str
    timeout_s: float
    memory_mb: int
    examples: int
    text_limit: int

    def __post_init__(self) -> None:
        for name in self.families:
            check_family(name)
        if not self.levels:
            raise TaskError("levels is empty: give at least one, for example (1,)")
        for level in self.levels:
            check_level(level)
        check_split(self.split)
        _whole("max_turns", self.max_turns, 1, 1000)
        _whole("examples", self.examples, 0, len(FAMILIES))
        _whole("memory_mb", self.memory_mb, 16, 2**20)
        _whole("text_limit", self.text_limit, 200, 100_000)
        if not isinstance(self.sandbox, str):
            raise ValueError(f"sandbox={self.sandbox!r} is not the name of a backend")
        timeout: object = self.timeout_s
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 3600:
            raise ValueError(f"timeout_s={timeout!r} is out of range: more than 0 and at most 3600 seconds")


def _whole(key: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{key}={value!r} is out of range: a whole number from {low} to {high}")


def to_format(value: object) -> ActionFormat:
    """The action format of a name.

    Raises:
        ValueError: no such format.
    """
    try:
        return ActionFormat(value)
    except ValueError:
        raise ValueError(f"action_format={value!r} is not one of {', '.join(ActionFormat)}") from None


def to_tuple(key: str, value: object) -> tuple[Any, ...]:
    """A list or tuple argument.

    Raises:
        ValueError: neither.
    """
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key}={value!r} is not a list")
    return tuple(value)


def check_family(name: object) -> None:
    """Raises TaskError unless it is a family's name."""
    if name not in FAMILIES:
        raise TaskError(f"family={name!r} is not one of {', '.join(FAMILIES)}")


def check_level(level: object) -> None:
    """Raises TaskError unless it is a level that some family has."""
    known = sorted({level for family in FAMILIES.values() for level in family.levels})
    if isinstance(level, bool) or level not in known:
        raise TaskError(f"level={level!r} is not one of {', '.join(map(str, known))}")


def check_split(split: object) -> None:
    """Raises TaskError unless it is a split."""
    if split not in SPLITS:
        raise TaskError(f"split={split!r} is not one of {', '.join(SPLITS)}")


def reset_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The checked options of a reset.

    Raises:
        TaskError: an unknown option, family, level or split, or `task_id` beside another one.
    """
    given = dict(options or {})
    for key in given:
        if key not in RESET_OPTIONS:
            raise TaskError(f"unknown reset option {key!r}: valid ones are {', '.join(RESET_OPTIONS)}")
    if "task_id" in given:
        if len(given) > 1:
            raise TaskError(f"task_id names the whole task; leave out {', '.join(k for k in given if k != 'task_id')}")
        if not isinstance(given["task_id"], str):
            raise TaskError(f"task_id={given['task_id']!r} is not text")
    for key, check in (("split", check_split), ("family", check_family), ("level", check_level)):
        if key in given:
            check(given[key])
    return given
