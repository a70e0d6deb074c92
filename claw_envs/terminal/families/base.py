"""The seam between a family of tasks and everything else.

A family turns a seeded `Draw` and a level into an `Exercise`: what the agent is told, the start files, commands that
solve it, and the checks of the end state. Level 1 takes one command, level 2 two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from claw_envs.terminal.tree import Tree
from claw_envs.terminal.words import Draw

Checks = Mapping[str, bool]
"""Name of a check -> passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """One concrete task of a family, with its grader."""

    instruction: str
    files: Mapping[str, str]
    """As `Task.files`."""
    oracle: tuple[str, ...]
    checks: Callable[[Tree], Checks]
    """The outcome is 1.0 if all pass. At least one must fail on the start state; none may newly pass by doing another
    task's work (a move is no half copy), since a check that newly passes is good news to a judge."""
    modes: Mapping[str, int] = field(default_factory=dict[str, int])


Make = Callable[[Draw, int], Exercise]
"""Draws the exercise of a level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of task."""

    name: str
    make: Make
    example: tuple[str, str] | None = None
    """A worked example, (instruction, command), of names that no task uses; None for families never trained on."""
    heldout: bool = False
    """True for families that are never trained on; their only split is `heldout`."""
    levels: tuple[int, ...] = (1, 2)
