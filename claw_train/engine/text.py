"""Token ids to text, and the end of a reply by a stop string.

In: ids. Out: text; empty throughout when the model folder has no tokenizer. It knows no request.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from claw_train.errors import EngineError, ModelError, boundary

_SPARE_TOKENS = 4


class Texts:
    """A tokenizer that may be missing."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        if path.exists():
            with boundary(ModelError, f"{path} cannot be read"):
                self._tokenizer = Tokenizer.from_file(str(path))

    @property
    def present(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`.

        Raises:
            EngineError: the tokenizer failed on them.
        """
        if self._tokenizer is None:
            return ""
        with boundary(EngineError, "decoding failed"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, special tokens recognised, none added.

        Raises:
            ValueError: there is no tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer.json: send input_ids instead of text")
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def matched(self, ids: Sequence[int], stops: Sequence[str], *, skip_special: bool) -> str | None:
        """The first of `stops` that the end of `ids` contains."""
        if not stops or self._tokenizer is None:
            return None
        # a token is at least one byte, so this many tokens hold the longest stop string
        tail = max(len(s.encode()) for s in stops) + _SPARE_TOKENS
        text = self.decode(ids[-tail:], skip_special=skip_special)
        return next((s for s in stops if s in text), None)

    def reply(self, ids: Sequence[int], matched: int | str | None, *, skip_special: bool, trim: bool) -> str:
        """Text of a reply; `trim` cuts the token or string that ended it."""
        if trim and isinstance(matched, int):
            ids = ids[:-1]
        text = self.decode(ids, skip_special=skip_special)
        if trim and isinstance(matched, str) and (at := text.find(matched)) >= 0:
            text = text[:at]
        return text
