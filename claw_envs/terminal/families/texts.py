"""Families that derive a text from a text: count lines, sort, search a word, append a line."""

import re

from claw_envs.terminal.families.base import Checks, Exercise
from claw_envs.terminal.tree import Tree
from claw_envs.terminal.words import Draw, as_text


def count_lines(draw: Draw, level: int) -> Exercise:
    """Write the number of lines of a file into another (level 2: of two files)."""
    pairs = [(draw.file(), draw.file()) for _ in range(level)]
    counts = [draw.random.randint(5, 60) for _ in pairs]
    files = {source: as_text(draw.lines(n)) for (source, _), n in zip(pairs, counts, strict=True)}
    listed = " and ".join(f"the lines of {source} into {target}" for source, target in pairs)
    instruction = draw.say(
        train=[f"Count {listed}.", f"Write the number of {listed}."],
        other=[f"Please count {listed}.", f"Put the number of {listed}."],
    )

    def checks(tree: Tree) -> Checks:
        found = [tree.text(target) or "" for _, target in pairs]
        wanted = [rf"\s*{n}(\s+{re.escape(source)})?\s*" for (source, _), n in zip(pairs, counts, strict=True)]
        return {
            "count_is_right": all(re.fullmatch(w, f) is not None for w, f in zip(wanted, found, strict=True)),
            "rest_untouched": tree.unchanged(files, but=[target for _, target in pairs]),
        }

    oracle = tuple(f"wc -l {source} > {target}" for source, target in pairs)
    return Exercise(instruction=instruction, files=files, oracle=oracle, checks=checks)


def sort_lines(draw: Draw, level: int) -> Exercise:
    """Sort a file's lines into another file (level 2: and in reverse into a third)."""
    source, target, reverse = draw.file(), draw.file(), draw.file()
    lines = draw.lines(draw.random.randint(5, 9))
    if lines in (sorted(lines), sorted(lines, reverse=True)):
        lines = [*lines[1:], lines[0]]
    files = {source: as_text(lines), draw.file(): draw.text()}
    wanted = {target: sorted(lines)}
    oracle = [f"sort {source} > {target}"]
    instruction = draw.say(
        train=[f"Sort {source} into {target}.", f"Sort the lines of {source} into {target}."],
        other=[f"Please sort {source} into {target}.", f"Sort the file {source} into {target}."],
    )
    if level == 2:
        wanted[reverse] = sorted(lines, reverse=True)
        oracle.append(f"sort -r {source} > {reverse}")
        instruction += draw.say(
            train=[f" Sort it in reverse into {reverse}."], other=[f" Then sort it in reverse into {reverse}."]
        )

    def checks(tree: Tree) -> Checks:
        return {
            "sorted": all(tree.lines(path) == rows for path, rows in wanted.items()),
            "rest_untouched": tree.unchanged(files, but=wanted),
        }

    return Exercise(instruction=instruction, files=files, oracle=tuple(oracle), checks=checks)


def search_word(draw: Draw, level: int) -> Exercise:
    """Write the lines that hold a word into a file (level 2: two words, two files)."""
    source, words = draw.file(), [draw.word() for _ in range(level)]
    targets = [draw.file() for _ in words]
    hits = {word: [f"{draw.line(2)} {word}" for _ in range(draw.random.randint(2, 4))] for word in words}
    lines = [*(line for rows in hits.values() for line in rows), *draw.lines(5)]
    draw.random.shuffle(lines)
    files = {source: as_text(lines), draw.file(): draw.text()}
    asked = list(zip(words, targets, strict=True))
    listed = " and ".join(f"{word} in {source} into {target}" for word, target in asked)
    instruction = draw.say(
        train=[f"Search {listed}.", f"Search the word {listed}."],
        other=[f"Please search {listed}.", f"Find the word {listed}."],
    )

    def checks(tree: Tree) -> Checks:
        wanted = {target: [line for line in lines if word in line.split()] for word, target in asked}
        return {
            "lines_found": all(tree.lines(target) == rows for target, rows in wanted.items()),
            "rest_untouched": tree.unchanged(files, but=targets),
        }

    oracle = tuple(f"grep {word} {source} > {target}" for word, target in asked)
    return Exercise(instruction=instruction, files=files, oracle=oracle, checks=checks)


def append_line(draw: Draw, level: int) -> Exercise:
    """Add a line at the end of a file (level 2: of two files)."""
    adds = [(draw.file(), draw.word()) for _ in range(level)]
    files = {name: draw.text() for name, _ in adds} | {draw.file(): draw.text()}
    listed = " and ".join(f"the line {word} to {name}" for name, word in adds)
    instruction = draw.say(
        train=[f"Add {listed}.", f"Append {listed}."],
        other=[f"Please add {listed}.", f"At the end, add {listed}."],
    )

    def checks(tree: Tree) -> Checks:
        return {
            "line_added": all(tree.text(name) == files[name] + word + "\n" for name, word in adds),
            "rest_untouched": tree.unchanged(files, but=[name for name, _ in adds]),
        }

    oracle = tuple(f"echo {word} >> {name}" for name, word in adds)
    return Exercise(instruction=instruction, files=files, oracle=oracle, checks=checks)
