"""Seeded tasks and their grading.

In: a task id (`family/split/seed/level`) or its parts. Out: a `Task`, and for a frozen sandbox its `Verdict`. The same
id always names the same task. Splits: `train`, `eval` (the same families; names, contents and wordings that training
never sees) and `heldout` (families that training never sees).
"""

import random
from collections.abc import Iterator, Mapping

from claw_envs.errors import GraderError, TaskError
from claw_envs.sandbox.base import Sandbox
from claw_envs.terminal.families import FAMILIES, Exercise
from claw_envs.terminal.tree import Tree, snapshot
from claw_envs.terminal.words import SPLITS, Draw
from claw_envs.types import Task, Verdict

MAX_SEED = 2**31
"""Seeds lie in [0, MAX_SEED)."""


def families_of(split: str) -> tuple[str, ...]:
    """Names of the families that a split holds, in a fixed order.

    Raises:
        TaskError: no such split.
    """
    if split not in SPLITS:
        raise TaskError(f"split={split!r} is not one of {', '.join(SPLITS)}")
    return tuple(name for name, family in FAMILIES.items() if family.heldout == (split == "heldout"))


def make_task(family: str, split: str, seed: int, level: int) -> Task:
    """The task that these four name.

    Raises:
        TaskError: no such family, split or level, or a seed out of range.
    """
    exercise = _exercise(family, split, seed, level)
    return Task(
        id=f"{family}/{split}/{seed}/{level}",
        family=family,
        split=split,
        seed=seed,
        level=level,
        instruction=exercise.instruction,
        files=exercise.files,
        modes=exercise.modes,
        oracle=exercise.oracle,
    )


def load_task(task_id: str) -> Task:
    """The task of an id, as `Task.id` gives it.

    Raises:
        TaskError: not an id of a built-in task.
    """
    parts = task_id.split("/")
    if len(parts) != 4 or not (parts[2].isdecimal() and parts[3].isdecimal()):
        raise TaskError(f"task_id={task_id!r} is not of the form family/split/seed/level")
    task = make_task(parts[0], parts[1], int(parts[2]), int(parts[3]))
    if task.id != task_id:
        raise TaskError(f"task_id={task_id!r} is written {task.id!r}")
    return task


def list_tasks(
    split: str, count: int, *, families: tuple[str, ...] = (), levels: tuple[int, ...] = (1,), seed: int = 0
) -> Iterator[Task]:
    """The first `count` tasks from `seed` on, taking families and levels in turn.

    Raises:
        TaskError: no such split, family or level.
    """
    names = families or families_of(split)
    kinds = [(name, level) for level in levels for name in names]
    for n in range(count):
        name, level = kinds[n % len(kinds)]
        yield make_task(name, split, seed + n // len(kinds), level)


def check(task: Task, tree: Tree) -> dict[str, bool]:
    """Every check of the task on a tree, by name.

    Raises:
        GraderError: a check broke.
    """
    exercise = _exercise(task.family, task.split, task.seed, task.level)
    try:
        return dict(exercise.checks(tree))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise GraderError(f"the grader of {task.id} broke: {type(error).__name__}: {error}") from error


def start_passing(task: Task) -> frozenset[str]:
    """Names of the checks that the start state already passes (such as "the rest is untouched")."""
    return _passing(check(task, Tree.of_start(task.files, task.modes)))


def grade(task: Task, sandbox: Sandbox) -> Verdict:
    """The verdict on a sandbox's working folder: 1.0 if every check passes, else 0.0. Freeze the sandbox first.

    Raises:
        SandboxLost: the sandbox is gone.
        GraderError: the end state could not be listed, or a check broke.
    """
    tree = snapshot(sandbox)
    checks = check(task, tree)
    return Verdict(value=float(tree.complete and all(checks.values())), checks=checks)


def newly_passed(task: Task, checks: Mapping[str, bool]) -> tuple[str, ...]:
    """Names of the checks that pass now and did not at the start; none when one that passed then fails now.

    What does the task and some damage beside is not praised: trained on, it would stay.
    """
    before, now = start_passing(task), _passing(checks)
    return tuple(sorted(now - before)) if before <= now else ()


def _passing(checks: Mapping[str, bool]) -> frozenset[str]:
    """Names of the checks that pass."""
    return frozenset(name for name, passed in checks.items() if passed)


def _exercise(family: str, split: str, seed: int, level: int) -> Exercise:
    names = families_of(split)
    if family not in names:
        raise TaskError(f"family={family!r} is not one of split {split}: {', '.join(names)}")
    if level not in FAMILIES[family].levels:
        raise TaskError(f"level={level!r} is not one of {FAMILIES[family].levels} for family {family}")
    if not 0 <= seed < MAX_SEED:
        raise TaskError(f"seed={seed!r} is not in [0, {MAX_SEED})")
    draw = Draw(split=split, random=random.Random(f"{family}/{split}/{seed}/{level}"))
    return FAMILIES[family].make(draw, level)
