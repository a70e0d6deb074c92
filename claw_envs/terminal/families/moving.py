"""Families that move whole files about: rename, copy, delete, move into a folder."""

from claw_envs.terminal.families.base import Checks, Exercise
from claw_envs.terminal.tree import Tree
from claw_envs.terminal.words import Draw


def rename(draw: Draw, level: int) -> Exercise:
    """Give one file (level 2: two files) a new name."""
    pairs = [(draw.file(), draw.file()) for _ in range(level)]
    files = {old: draw.text() for old, _ in pairs} | {draw.file(): draw.text()}
    listed = " and ".join(f"{old} to {new}" for old, new in pairs)
    instruction = draw.say(
        train=[f"Rename {listed}.", f"Change the name of {listed}."],
        other=[f"Please rename {listed}.", f"Rename the file {listed}."],
    )

    def checks(tree: Tree) -> Checks:
        touched = [name for pair in pairs for name in pair]
        return {
            "renamed": all(tree.text(new) == files[old] and old not in tree.entries for old, new in pairs),
            "rest_untouched": tree.unchanged(files, but=touched),
        }

    oracle = tuple(f"mv {old} {new}" for old, new in pairs)
    return Exercise(instruction=instruction, files=files, oracle=oracle, checks=checks)


def copy(draw: Draw, level: int) -> Exercise:
    """Copy a file to a new name (level 2: two files)."""
    pairs = [(draw.file(), draw.file()) for _ in range(level)]
    files = {source: draw.text() for source, _ in pairs} | {draw.file(): draw.text()}
    listed = " and ".join(f"{source} to {target}" for source, target in pairs)
    named = " and ".join(f"of {source} named {target}" for source, target in pairs)
    instruction = draw.say(
        train=[f"Copy {listed}.", f"Make a copy {named}."],
        other=[f"Please copy {listed}.", f"Copy the file {listed}."],
    )

    def checks(tree: Tree) -> Checks:
        return {
            "copied": all(tree.text(target) == files[source] == tree.text(source) for source, target in pairs),
            "rest_untouched": tree.unchanged(files, but=[target for _, target in pairs]),
        }

    oracle = tuple(f"cp {source} {target}" for source, target in pairs)
    return Exercise(instruction=instruction, files=files, oracle=oracle, checks=checks)


def delete(draw: Draw, level: int) -> Exercise:
    """Delete one file of three (level 2: a file and a folder with what it holds)."""
    victim, folder = draw.file(), draw.folder()
    files = {victim: draw.text(), draw.file(): draw.text(), draw.file(): draw.text()}
    oracle, gone = [f"rm {victim}"], [victim]
    what = victim
    if level == 2:
        inner = f"{folder}/{draw.file()}"
        files[inner] = draw.text()
        oracle.append(f"rm -r {folder}")
        gone += [folder, inner]
        what = f"{victim} and the folder {folder}"
    instruction = draw.say(
        train=[f"Delete {what}.", f"Please remove {what}."],
        other=[f"Please delete {what}.", f"Remove the file {what}."],
    )

    def checks(tree: Tree) -> Checks:
        kept = [path for path in files if path not in gone]
        return {
            "only_it_is_gone": {*kept, *gone} & set(tree.entries) == set(kept),
            "rest_untouched": tree.unchanged(files, but=gone),
        }

    return Exercise(instruction=instruction, files=files, oracle=tuple(oracle), checks=checks)


def move_into(draw: Draw, level: int) -> Exercise:
    """Move a file into a folder (level 2: two files into two folders)."""
    moves = [(draw.file(), draw.folder()) for _ in range(level)]
    files = {name: draw.text() for name, _ in moves} | {f"{folder}/": "" for _, folder in moves}
    files[draw.file()] = draw.text()
    listed = " and ".join(f"{name} into {folder}" for name, folder in moves)
    longer = " and ".join(f"{name} into the folder {folder}" for name, folder in moves)
    instruction = draw.say(
        train=[f"Move {listed}.", f"Put {longer}."], other=[f"Please move {listed}.", f"Move the file {longer}."]
    )

    def checks(tree: Tree) -> Checks:
        targets = {name: f"{folder}/{name}" for name, folder in moves}
        return {
            "moved": all(tree.text(to) == files[name] and name not in tree.entries for name, to in targets.items()),
            "rest_untouched": tree.unchanged(files, but=[*targets, *targets.values()]),
        }

    oracle = tuple(f"mv {name} {folder}/" for name, folder in moves)
    return Exercise(instruction=instruction, files=files, oracle=oracle, checks=checks)
