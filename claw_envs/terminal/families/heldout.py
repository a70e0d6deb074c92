"""Families that are never trained on: their score shows what carries over to new kinds of task."""

from claw_envs.terminal.families.base import Checks, Exercise
from claw_envs.terminal.tree import Tree
from claw_envs.terminal.words import Draw, as_text


def rename_folder(draw: Draw, level: int) -> Exercise:
    """Give a folder, with what it holds, a new name (level 2: two folders)."""
    pairs = [(draw.folder(), draw.folder()) for _ in range(level)]
    held = {old: draw.file() for old, _ in pairs}
    files = {f"{old}/{name}": draw.text() for old, name in held.items()} | {draw.file(): draw.text()}
    instruction = "Rename the folder " + " and the folder ".join(f"{old} to {new}" for old, new in pairs) + "."

    def checks(tree: Tree) -> Checks:
        texts = [(tree.text(f"{new}/{held[old]}"), files[f"{old}/{held[old]}"]) for old, new in pairs]
        names = [name for old, new in pairs for name in (old, new, f"{old}/{held[old]}", f"{new}/{held[old]}")]
        return {
            "new_folder_holds_the_text": all(now == then for now, then in texts),
            "old_folder_is_gone": all(old not in tree.entries for old, _ in pairs),
            "rest_untouched": tree.unchanged(files, but=names),
        }

    oracle = tuple(f"mv {old} {new}" for old, new in pairs)
    return Exercise(instruction=instruction, files=files, oracle=oracle, checks=checks)


def copy_into(draw: Draw, level: int) -> Exercise:
    """Copy a file into a folder that exists (level 2: two files into two folders)."""
    pairs = [(draw.file(), draw.folder()) for _ in range(level)]
    files = {name: draw.text() for name, _ in pairs} | {f"{folder}/": "" for _, folder in pairs}
    files[draw.file()] = draw.text()
    instruction = "Copy " + " and ".join(f"{name} into the folder {folder}" for name, folder in pairs) + "."

    def checks(tree: Tree) -> Checks:
        targets = {f"{folder}/{name}": name for name, folder in pairs}
        return {
            "copy_is_in_the_folder": all(tree.text(to) == files[name] for to, name in targets.items()),
            "rest_untouched": tree.unchanged(files, but=targets),
        }

    oracle = tuple(f"cp {name} {folder}/" for name, folder in pairs)
    return Exercise(instruction=instruction, files=files, oracle=oracle, checks=checks)


def first_lines(draw: Draw, level: int) -> Exercise:
    """Write the first lines of a file into another (level 2: and the last ones into a third)."""
    source, target, other = draw.file(), draw.file(), draw.file()
    lines = draw.lines(draw.random.randint(8, 14))
    count = draw.random.randint(2, 4)
    wanted, oracle = {target: lines[:count]}, [f"head -n {count} {source} > {target}"]
    instruction = f"Write the first {count} lines of {source} into {target}."
    if level == 2:
        wanted[other] = lines[-count:]
        oracle.append(f"tail -n {count} {source} > {other}")
        instruction += f" Write the last {count} lines into {other}."
    files = {source: as_text(lines)}

    def checks(tree: Tree) -> Checks:
        return {
            "lines_are_right": all(tree.lines(path) == rows for path, rows in wanted.items()),
            "rest_untouched": tree.unchanged(files, but=wanted),
        }

    return Exercise(instruction=instruction, files=files, oracle=tuple(oracle), checks=checks)


def join_files(draw: Draw, level: int) -> Exercise:
    """Join two files into a third (level 2: and delete the first of them)."""
    one, two, target = draw.file(), draw.file(), draw.file()
    files = {one: draw.text(), two: draw.text()}
    oracle, gone = [f"cat {one} {two} > {target}"], []
    instruction = f"Join {one} and {two} into {target}."
    if level == 2:
        oracle.append(f"rm {one}")
        gone.append(one)
        instruction += f" Then delete {one}."

    def checks(tree: Tree) -> Checks:
        return {
            "joined_in_order": tree.text(target) == files[one] + files[two],
            "gone": all(path not in tree.entries for path in gone),
            "rest_untouched": tree.unchanged(files, but=[target, *gone]),
        }

    return Exercise(instruction=instruction, files=files, oracle=tuple(oracle), checks=checks)


def make_private(draw: Draw, level: int) -> Exercise:
    """Take all rights from group and others (level 2: of a file and of a new folder)."""
    secret, folder = draw.file(), draw.folder()
    files = {secret: draw.text(), draw.file(): draw.text()}
    private, oracle = [secret], [f"chmod 600 {secret}"]
    instruction = f"Make {secret} private: only its owner may read and write it."
    if level == 2:
        private.append(folder)
        oracle.append(f"mkdir -m 700 {folder}")
        instruction += f" Also make a private folder named {folder}."

    def checks(tree: Tree) -> Checks:
        return {
            "owner_keeps_rights": all((tree.mode(path) or 0) & 0o600 == 0o600 for path in private),
            "nobody_else_has_any": all(path in tree.entries and not (tree.mode(path) or 0) & 0o77 for path in private),
            "folder_exists": level == 1 or tree.is_folder(folder),
            "text_untouched": tree.text(secret) == files[secret],
            "rest_untouched": tree.unchanged(files, but=private),
        }

    return Exercise(instruction=instruction, files=files, oracle=tuple(oracle), checks=checks)
