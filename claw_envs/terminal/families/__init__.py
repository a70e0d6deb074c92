"""The built-in task families, by name. A new family is one function and one line here."""

from claw_envs.terminal.families import heldout, making, moving, texts
from claw_envs.terminal.families.base import Exercise, Family, Make

__all__ = ["FAMILIES", "Exercise", "Family", "Make"]

_TRAINED: tuple[tuple[str, Make, tuple[str, str]], ...] = (
    ("rename", moving.rename, ("Rename old.txt to new.txt.", "mv old.txt new.txt")),
    ("count_lines", texts.count_lines, ("Count the lines of log.txt into total.txt.", "wc -l log.txt > total.txt")),
    ("copy", moving.copy, ("Copy one.txt to two.txt.", "cp one.txt two.txt")),
    ("delete", moving.delete, ("Delete junk.txt.", "rm junk.txt")),
    ("make_folder", making.make_folder, ("Make a folder named box.", "mkdir box")),
    ("make_executable", making.make_executable, ("Make go.sh executable.", "chmod +x go.sh")),
    ("move_into", moving.move_into, ("Move cat.txt into zoo.", "mv cat.txt zoo")),
    ("make_empty", making.make_empty, ("Make an empty file named blank.txt.", "touch blank.txt")),
    ("sort_lines", texts.sort_lines, ("Sort mix.txt into abc.txt.", "sort mix.txt > abc.txt")),
    ("search_word", texts.search_word, ("Search sun in sky.txt into found.txt.", "grep sun sky.txt > found.txt")),
    ("append_line", texts.append_line, ("Add the line end to last.txt.", "echo end >> last.txt")),
)
_HELDOUT: tuple[tuple[str, Make], ...] = (
    ("first_lines", heldout.first_lines),
    ("join_files", heldout.join_files),
    ("make_private", heldout.make_private),
)
FAMILIES: dict[str, Family] = {
    **{name: Family(name=name, make=make, example=example) for name, make, example in _TRAINED},
    **{name: Family(name=name, make=make, heldout=True) for name, make in _HELDOUT},
}
