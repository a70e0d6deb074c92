"""The built-in task families, by name. A new family is one function and one line here."""

from claw_envs.terminal.families import heldout, making, moving, texts
from claw_envs.terminal.families.base import Exercise, Family

__all__ = ["FAMILIES", "Exercise", "Family"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(name="rename", make=moving.rename),
        Family(name="copy", make=moving.copy),
        Family(name="delete", make=moving.delete),
        Family(name="move_into", make=moving.move_into),
        Family(name="make_folder", make=making.make_folder),
        Family(name="make_empty", make=making.make_empty),
        Family(name="make_executable", make=making.make_executable),
        Family(name="count_lines", make=texts.count_lines),
        Family(name="sort_lines", make=texts.sort_lines),
        Family(name="search_word", make=texts.search_word),
        Family(name="append_line", make=texts.append_line),
        Family(name="first_lines", make=heldout.first_lines, heldout=True),
        Family(name="join_files", make=heldout.join_files, heldout=True),
        Family(name="make_private", make=heldout.make_private, heldout=True),
    )
}
