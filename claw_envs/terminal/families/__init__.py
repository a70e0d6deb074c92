"""The built-in task families, by name. A new family is one function and one line here."""

from claw_envs.terminal.families import heldout, making, moving, texts
from claw_envs.terminal.families.base import Exercise, Family, Make

__all__ = ["FAMILIES", "Exercise", "Family", "Make"]

_TRAINED: tuple[tuple[str, Make, tuple[str, str]], ...] = (
    ("rename", moving.rename, ("Rename old.txt to new.txt.", "mv old.txt new.txt")),
    ("count_lines", texts.count_lines, ("Count the lines of poem.txt into total.txt.", "wc -l poem.txt > total.txt")),
    ("copy", moving.copy, ("Copy plan.txt to safe.txt.", "cp plan.txt safe.txt")),
    ("delete", moving.delete, ("Delete junk.txt.", "rm junk.txt")),
    ("make_folder", making.make_folder, ("Make a folder named tools.", "mkdir tools")),
    ("make_executable", making.make_executable, ("Make run.sh executable.", "chmod +x run.sh")),
    ("move_into", moving.move_into, ("Move cat.txt into pets.", "mv cat.txt pets")),
    ("make_empty", making.make_empty, ("Make an empty file named blank.txt.", "touch blank.txt")),
    ("sort_lines", texts.sort_lines, ("Sort mix.txt into abc.txt.", "sort mix.txt > abc.txt")),
    ("search_word", texts.search_word, ("Search sun in sky.txt into found.txt.", "grep sun sky.txt > found.txt")),
    ("append_line", texts.append_line, ("Add the line end to last.txt.", "echo end >> last.txt")),
)
_HELDOUT: tuple[tuple[str, Make], ...] = (
    ("rename_folder", heldout.rename_folder),
    ("copy_into", heldout.copy_into),
    ("first_lines", heldout.first_lines),
    ("join_files", heldout.join_files),
    ("make_private", heldout.make_private),
)
FAMILIES: dict[str, Family] = {
    **{name: Family(name=name, make=make, example=example) for name, make, example in _TRAINED},
    **{name: Family(name=name, make=make, heldout=True) for name, make in _HELDOUT},
}
