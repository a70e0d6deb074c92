"""Names, and the seeded drawing of them. The pools of the splits share no entry.

In: a split and a random generator. Out: file names, folder names, lines of text. Knows no task.
"""

import random
from dataclasses import dataclass, field

SPLITS = ("train", "eval", "heldout")


def _pool(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_STEMS = {
    "train": _pool(
        "notes report letter draft recipe journal budget summary essay speech memo script lecture diary agenda "
        "review outline story address answers birds cities coffee colors dates events faces friends goals grades "
        "ideas jokes keys lists names orders people phones players points prices puzzles rules scores songs steps "
        "teams topics towns trips values visits votes wishes"
    ),
    "eval": _pool(
        "paper guide menu quote profile survey ticket invoice manual article chart lesson record novel thesis "
        "receipt column verse animals bills bonds books boxes cards cars chapters classes coins dishes doctors "
        "dreams drinks exams facts farms flowers fruits guests habits hotels items letters meals members models "
        "months movies numbers offers parts plants questions roads rooms"
    ),
    "heldout": _pool(
        "flight harbor engine market garden planet signal castle mirror bridge airport anchor arrow basket battle "
        "beach blanket bottle button camera candle carpet circle clock cloud corner curtain desk door dragon "
        "feather fence glove hammer jacket kettle ladder lamp needle pillow ribbon"
    ),
}
_FOLDERS = {
    "train": _pool(
        "archive backup photos music work school projects images games data docs drafts home inbox lab logs maps "
        "media pages plans private public reports samples shared source storage tests"
    ),
    "eval": _pool(
        "videos travel health sports science kitchen family holiday office history art bank club college company "
        "downloads finance food garage hobby law magazines money nature newspapers paintings party shop"
    ),
    "heldout": _pool(
        "attic barn cabin camp chapel church clinic court library museum station factory farm hospital hotel "
        "stadium theater tower village warehouse"
    ),
}
_WORDS = {
    "train": _pool(
        "apple banana cherry lemon orange peach tiger lion horse monkey rabbit copper silver gold iron red green "
        "blue yellow purple bread butter cheese honey sugar winter summer spring water"
    ),
    "eval": _pool(
        "carrot onion potato pepper bean garlic eagle whale shark snake turtle cotton glass stone black white "
        "brown pink grey paint bacon salad cookie candy juice thunder shadow rainbow sunset storm"
    ),
    "heldout": _pool(
        "river mountain valley desert island ocean lake cliff meadow jungle canyon glacier volcano swamp prairie"
    ),
}
_SCRIPTS = {
    "train": _pool(
        "build start deploy setup install clean launch begin boot compile convert count download draw export fetch "
        "finish format init load main make merge open pack print process"
    ),
    "eval": _pool(
        "update check sync monitor migrate refresh prepare restart batch close connect create daily debug demo "
        "encode extract filter generate import inspect job lint notify patch ping"
    ),
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
        """A line of that are not used up by `word`."""
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
