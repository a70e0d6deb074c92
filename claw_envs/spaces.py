"""Spaces that Gymnasium lacks.

`UnicodeText` is not derived from Gymnasium's `Text`: that one bounds characters by a fixed alphabet (no newline by
default, no "é"), and the shared-memory path of `AsyncVectorEnv` silently returns constant text for it. For a space it
does not know, Gymnasium raises instead; use `AsyncVectorEnv(..., shared_memory=False)`.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import Space

_SAMPLE_WORDS = ("echo", "ls", "pwd", "hello", "world", "true", "é", "日本", "notes.txt", "42")


class UnicodeText(Space[str]):
    """All strings whose UTF-8 form has at most `max_bytes` bytes; lone surrogates are outside.

    Samples are a few short harmless words, so that a sampled action may be run.
    """

    def __init__(self, max_bytes: int, *, seed: int | np.random.Generator | None = None) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes} must be at least 1")
        self.max_bytes = max_bytes
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: text has no fixed numeric form."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A seeded random member.

        Raises:
            ValueError: a mask or probability is given; text has none.
        """
        if mask is not None or probability is not None:
            raise ValueError("UnicodeText takes neither mask nor probability")
        count = int(self.np_random.integers(1, 4))
        words = [_SAMPLE_WORDS[int(i)] for i in self.np_random.integers(0, len(_SAMPLE_WORDS), size=count)]
        text = " ".join(words)
        return text if self.contains(text) else ""

    def contains(self, x: Any) -> bool:
        """True for a string within the bound that UTF-8 can carry."""
        if not isinstance(x, str) or len(x) > self.max_bytes:
            return False
        try:
            return len(x.encode()) <= self.max_bytes
        except UnicodeEncodeError:
            return False

    def to_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        """A batch as a JSON value."""
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        """The batch back from `to_jsonable`."""
        return [str(text) for text in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText) and other.max_bytes == self.max_bytes

    def __hash__(self) -> int:
        return hash((UnicodeText, self.max_bytes))

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_bytes})"


def fit(text: str, max_bytes: int) -> str:
    """The longest start of `text` that `UnicodeText(max_bytes)` contains; lone surrogates become `?`."""
    raw = text.encode("utf-8", "replace")
    return raw[:max_bytes].decode("utf-8", "ignore")
