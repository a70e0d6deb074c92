"""Names, words and the seeded drawing of them. The pools of the splits share no entry.

In: a split and a random generator. Out: file names, folder names, lines of text. Knows no task.
"""

import random
from dataclasses import dataclass, field

SPLITS = ("train", "eval", "heldout")


def _pool(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_STEMS = {
    "train": _pool(
        "notes report plan letter draft recipe journal budget summary essay poem speech memo script lecture "
        "diary agenda review outline story"
    ),
    "eval": _pool(
        "paper song guide menu quote profile survey ticket invoice manual article chart lesson record "
        "novel thesis receipt column verse"
    ),
    "heldout": _pool("flight harbor engine market garden planet signal castle mirror bridge"),
}
_FOLDERS = {
    "train": _pool("archive backup photos music work school projects images books games"),
    "eval": _pool("videos travel health sports science kitchen family holiday office history"),
    "heldout": _pool("attic cellar library museum station"),
}
_WORDS = {
    "train": _pool(
        "apple banana cherry lemon orange peach tiger lion horse monkey rabbit copper silver gold iron red green "
        "blue yellow purple"
    ),
    "eval": _pool(
        "carrot onion potato pepper bean garlic eagle whale shark snake turtle cotton glass stone black "
        "white brown pink grey"
    ),
    "heldout": _pool("river mountain valley desert island forest ocean lake cliff meadow"),
}
_SCRIPTS = {
    "train": _pool("run build start deploy setup install clean launch"),
    "eval": _pool("update check sync monitor migrate refresh prepare restart"),
    "heldout": _pool("rotate publish verify collect"),
}


@dataclass(kw_only=True)
class Draw:
    """Seeded choices out of one split's pools. A name is given out once."""

    split: str
    random: random.Random
    _used: set[str] = field(default_factory=set[str])

    def _take(self, pool: tuple[str, ...]) -> str:
        name = self.random.choice([entry for entry in pool if entry not in self._used])
        self._used.add(name)
        return name

    def file(self, suffix: str = ".txt") -> str:
        """A file name, `notes.txt`."""
        return self._take(_STEMS[self.split]) + suffix

    def script(self) -> str:
        """A script's name, `run.sh`."""
        return self._take(_SCRIPTS[self.split]) + ".sh"

    def folder(self) -> str:
        """A folder's name."""
        return self._take(_FOLDERS[self.split])

    def word(self) -> str:
        """A word that no other draw of this task holds."""
        return self._take(_WORDS[self.split])

    def line(self, words: int = 3) -> str:
        """A line of words that are not used up by `word`."""
        pool = [word for word in _WORDS[self.split] if word not in self._used]
        return " ".join(self.random.choice(pool) for _ in range(words))

    def lines(self, count: int, words: int = 3) -> list[str]:
        """Different lines, in random order."""
        lines: list[str] = []
        while len(lines) < count:
            line = self.line(words)
            if line not in lines:
                lines.append(line)
        return lines

    def text(self, low: int = 3, high: int = 9) -> str:
        """A file's text of `low` to `high` lines."""
        return as_text(self.lines(self.random.randint(low, high)))

    def say(self, *, train: list[str], other: list[str]) -> str:
        """One wording of the instruction: training and the other splits share none."""
        return self.random.choice(train if self.split == "train" else other)


def as_text(lines: list[str]) -> str:
    """Lines, each with its newline."""
    return "".join(line + "\n" for line in lines)
