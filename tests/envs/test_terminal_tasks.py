import itertools
import re

import pytest

from claw_envs.errors import TaskError
from claw_envs.terminal import words
from claw_envs.terminal.families import FAMILIES
from claw_envs.terminal.tasks import check, families_of, list_tasks, load_task, make_task, newly_passed, start_passing
from claw_envs.terminal.tree import Tree
from claw_envs.terminal.words import SPLITS

KINDS = [
    (family, split, level) for split in SPLITS for family in families_of(split) for level in FAMILIES[family].levels
]


def many(family: str, split: str, level: int):
    return [make_task(family, split, seed, level) for seed in range(40)]


def test_there_are_enough_families():
    assert families_of("train") == families_of("eval")
    assert len(families_of("train")) >= 8
    assert len(families_of("heldout")) >= 2
    assert not set(families_of("heldout")) & set(families_of("train"))
    assert all(set(family.levels) >= {1, 2} for family in FAMILIES.values())


@pytest.mark.parametrize(("family", "split", "level"), KINDS)
def test_an_id_names_one_task(family, split, level):
    for task in many(family, split, level)[:5]:
        assert load_task(task.id) == task == make_task(family, split, task.seed, level)


@pytest.mark.parametrize(("family", "split", "level"), KINDS)
def test_seeds_give_many_different_tasks(family, split, level):
    tasks = many(family, split, level)
    assert len({task.instruction for task in tasks}) > len(tasks) // 2


@pytest.mark.parametrize(("family", "split", "level"), KINDS)
def test_the_level_counts_the_commands(family, split, level):
    for task in many(family, split, level):
        assert len(task.oracle) == level


@pytest.mark.parametrize(("family", "split", "level"), KINDS)
@pytest.mark.parametrize("entries", ["none", "start"])
def test_neither_the_start_nor_an_emptied_folder_passes(family, split, level, entries):
    for task in many(family, split, level):
        tree = Tree.of_start(task.files, task.modes) if entries == "start" else Tree(entries={})
        checks = check(task, tree)
        assert len(checks) >= 2
        assert not all(checks.values())


@pytest.mark.parametrize(("family", "split", "level"), KINDS)
def test_no_name_of_a_task_is_used_twice(family, split, level):
    for task in many(family, split, level):
        names = re.findall(r"\w+\.(?:txt|sh)", " ".join(task.files))
        assert len(names) == len(set(names))


def test_pools_of_the_splits_are_disjoint():
    pools = (words._STEMS, words._FOLDERS, words._WORDS, words._SCRIPTS)
    for one, other in itertools.combinations(SPLITS, 2):
        ours = set().union(*(pool[one] for pool in pools))
        theirs = set().union(*(pool[other] for pool in pools))
        assert not ours & theirs


def test_names_and_contents_of_a_task_come_from_its_split():
    pools = (words._STEMS, words._FOLDERS, words._WORDS, words._SCRIPTS)
    for split in SPLITS:
        allowed = set().union(*(pool[split] for pool in pools)) | {"txt", "sh", "echo", ""}
        for task in list_tasks(split, 200, levels=(1, 2)):
            used = set(re.split(r"\W+", " ".join([*task.files, *task.files.values()])))
            assert used <= allowed


def test_worked_examples_use_names_of_no_task():
    pools = (words._STEMS, words._FOLDERS, words._WORDS, words._SCRIPTS)
    names = {word for pool in pools for split in SPLITS for word in pool[split]}
    examples = [word for family in FAMILIES.values() for word in re.findall(r"[a-z]+", (family.example or ("", ""))[1])]
    assert not names & set(examples)
    assert all((family.example is None) == family.heldout for family in FAMILIES.values())


def wording(task) -> str:
    """The instruction with every name and number blanked."""
    names = {word for pool in (words._STEMS, words._FOLDERS, words._WORDS, words._SCRIPTS) for word in pool[task.split]}
    return re.sub(r"[a-z]+|\d+", lambda m: "_" if m[0] in names or m[0].isdigit() else m[0], task.instruction)


@pytest.mark.parametrize("family", families_of("train"))
@pytest.mark.parametrize("level", [1, 2])
def test_wordings_of_train_and_eval_are_disjoint(family, level):
    train = {wording(task) for task in many(family, "train", level)}
    evaluation = {wording(task) for task in many(family, "eval", level)}
    assert len(train) >= 2 or level == 2
    assert not train & evaluation


def test_no_two_families_share_a_grader():
    graders = {family.make.__qualname__ for family in FAMILIES.values()}
    assert len(graders) == len(FAMILIES)


def test_a_task_says_which_checks_its_start_state_passes():
    task = make_task("rename", "train", 0, 1)
    assert start_passing(task) == {"rest_untouched"}


@pytest.mark.parametrize("seed", range(5))
def test_another_tasks_work_makes_no_check_pass(seed):
    task = make_task("copy", "train", seed, 1)
    source, target = task.oracle[0].split()[1:]
    moved = {target if name == source else name: text for name, text in task.files.items()}
    assert newly_passed(task, check(task, Tree.of_start(moved, {}))) == ()
    task = make_task("rename", "train", seed, 1)
    old, new = task.oracle[0].split()[1:]
    assert newly_passed(task, check(task, Tree.of_start({**task.files, new: task.files[old]}, {}))) == ()
    task = make_task("delete", "train", seed, 1)
    assert newly_passed(task, check(task, Tree(entries={}))) == ()


@pytest.mark.parametrize(
    ("task_id", "named"),
    [
        ("rename", "form"),
        ("rename/train/x/1", "form"),
        ("rename/train/-1/1", "form"),
        ("rename/train/01/1", "rename/train/1/1"),
        ("nosuch/train/0/1", "nosuch"),
        ("rename/test/0/1", "test"),
        ("rename/train/0/9", "level=9"),
        ("rename/heldout/0/1", "rename"),
        (f"rename/train/{2**31}/1", "seed"),
    ],
)
def test_a_wrong_id_is_refused_by_name(task_id, named):
    with pytest.raises(TaskError, match=named):
        load_task(task_id)


def test_list_tasks_takes_families_and_levels_in_turn():
    tasks = list(list_tasks("train", 6, families=("rename", "copy"), levels=(1, 2), seed=5))
    assert [task.id for task in tasks] == [
        "rename/train/5/1",
        "copy/train/5/1",
        "rename/train/5/2",
        "copy/train/5/2",
        "rename/train/6/1",
        "copy/train/6/1",
    ]
