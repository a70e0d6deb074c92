"""Families that make names or set bits: new folder, empty file, executable script, archive of bits."""

from claw_envs.terminal.families.base import Checks, Exercise
from claw_envs.terminal.tree import Tree
from claw_envs.terminal.words import Draw


def make_folder(draw: Draw, level: int) -> Exercise:
    """Make a folder (level 2: and a folder inside it)."""
    names = [draw.folder() for _ in range(level)]
    paths = ["/".join(names[: n + 1]) for n in range(level)]
    files = {draw.file(): draw.text()}
    inner = f" and a folder named {names[-1]} inside it" if level == 2 else ""
    instruction = draw.say(
        train=[f"Make a folder named {names[0]}{inner}.", f"Create the folder {names[0]}{inner}."],
        other=[f"Create a folder named {names[0]}{inner}.", f"Make a new folder called {names[0]}{inner}."],
    )

    def checks(tree: Tree) -> Checks:
        return {
            "folder_exists": all(tree.is_folder(path) for path in paths),
            "rest_untouched": tree.unchanged(files, but=paths),
        }

    oracle = tuple(f"mkdir {path}" for path in paths)
    return Exercise(instruction=instruction, files=files, oracle=oracle, checks=checks)


def make_empty(draw: Draw, level: int) -> Exercise:
    """Make an empty file (level 2: two, one of them in a folder that exists)."""
    paths = [draw.file()]
    files = {draw.file(): draw.text()}
    if level == 2:
        folder = draw.folder()
        files[f"{folder}/"] = ""
        paths.append(f"{folder}/{draw.file()}")
    listed = " and ".join(paths)
    noun = "empty files" if level == 2 else "an empty file"
    instruction = draw.say(
        train=[f"Make {noun} named {listed}.", f"Create {noun} called {listed}."],
        other=[f"Create {noun} named {listed}.", f"Please make {noun} called {listed}."],
    )

    def checks(tree: Tree) -> Checks:
        return {
            "empty_file_exists": all(tree.text(path) == "" for path in paths),
            "rest_untouched": tree.unchanged(files, but=paths),
        }

    return Exercise(instruction=instruction, files=files, oracle=tuple(f"touch {p}" for p in paths), checks=checks)


def make_executable(draw: Draw, level: int) -> Exercise:
    """Set a script's executable bit (level 2: and clear another's)."""
    on, off = draw.script(), draw.script()
    files = {on: f"echo {draw.line()}\n", off: f"echo {draw.line()}\n", draw.file(): draw.text()}
    oracle = [f"chmod +x {on}"]
    modes = {off: 0o755} if level == 2 else {}
    instruction = draw.say(
        train=[f"Make {on} executable.", f"Make the script {on} executable."],
        other=[f"Please make {on} executable.", f"Make the file {on} executable."],
    )
    if level == 2:
        instruction += draw.say(train=[f" Make {off} not executable."], other=[f" But {off} must not be executable."])
        oracle.append(f"chmod -x {off}")

    def checks(tree: Tree) -> Checks:
        return {
            "owner_may_run_it": tree.is_file(on) and bool((tree.mode(on) or 0) & 0o100),
            "other_may_not": tree.is_file(off) and not (tree.mode(off) or 0) & 0o111,
            "texts_untouched": all(tree.text(script) == files[script] for script in (on, off)),
            "rest_untouched": tree.unchanged(files, but=(on, off)),
        }

    return Exercise(instruction=instruction, files=files, modes=modes, oracle=tuple(oracle), checks=checks)
