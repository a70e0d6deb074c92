"""What the scripted engine says: a function of the request alone, and mishaps on order.

In: a script (JSON), the ids and the seed of a request. Out: token ids and log-probabilities that are the same in every
run, whatever else is going on; and whether this arrival is to go wrong. Knows no HTTP. Imports no torch.
"""

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from claw_train.errors import ConfigError
from claw_train.models.tokenizer import Tokenizer

DEFAULT_SCRIPT: Mapping[str, Any] = {"replies": ["ls", "pwd", "echo ok", "submit"]}


class FaultKind(StrEnum):
    """How a request may go wrong."""

    SLOW = "slow"
    """Answered late."""
    ERROR = "5xx"
    BUSY = "429"
    """With Retry-After."""
    DROP = "drop"
    """The connection breaks in the middle of the answer."""
    WRONG_VERSION = "wrong_version"
    NAN_LOGPROBS = "nan_logprobs"
    ABORT = "abort"
    """Half of the reply, finish reason `abort`."""
    CUT = "cut"
    """Half of the reply, finish reason `length`."""
    EMPTY = "empty"
    """No token, finish reason `stop`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`KIND:RATE[:LIMIT]`, for example `5xx:0.2` or `drop:1:1` (the first one only)."""

    kind: FaultKind
    rate: float
    limit: int | None = None
    """How often at most; None is without limit."""

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Reads the command line's form.

        Raises:
            ValueError: not of that form.
        """
        kind, _, rest = text.partition(":")
        rate, _, limit = rest.partition(":")
        found = cls(FaultKind(kind), float(rate or 1.0), int(limit) if limit else None)
        if not 0.0 <= found.rate <= 1.0:
            raise ValueError(f"rate {found.rate} is not in [0, 1]")
        return found


class Faults:
    """Decides, from seed, request id and how often that id came, what goes wrong.

    Args:
        faults: in order; the first that applies wins.
        seed: another seed hits other requests.
        prefix: only request ids that begin with it are hit.
    """

    def __init__(self, faults: Sequence[Fault], *, seed: int = 0, prefix: str = "") -> None:
        self._faults = tuple(faults)
        self._seed = seed
        self._prefix = prefix
        self._arrivals: Counter[str] = Counter()
        self._done: Counter[Fault] = Counter()

    def next(self, rid: str) -> FaultKind | None:
        """What goes wrong with this arrival of `rid`; None is nothing."""
        if not self._faults or not rid.startswith(self._prefix):
            return None
        self._arrivals[rid] += 1
        for fault in self._faults:
            left = fault.limit is None or self._done[fault] < fault.limit
            if left and _uniform(self._seed, fault.kind, rid, self._arrivals[rid]) < fault.rate:
                self._done[fault] += 1
                return fault.kind
        return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One reply of the script."""

    ids: tuple[int, ...]
    weight: float
    when: str
    """Only for prompts whose text contains this."""


class Script:
    """Candidate replies and their log-probabilities.

    Args:
        source: `{"replies": [...], "logprob": number or null}`. A reply is a text, or an object with `text` or `ids`,
            and optionally `weight` and `when`. A text gets the model's end token; ids stay as they are.
        tokenizer: encodes texts and decodes prompts; None when no text occurs.

    Raises:
        ConfigError: the script is not of this form.
    """

    def __init__(self, source: Mapping[str, Any], tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        unknown = set(source) - {"replies", "logprob"}
        rows = source.get("replies")
        if unknown or not isinstance(rows, list) or not rows:
            raise ConfigError(
                f"a script holds `replies`, a list that is not empty, and perhaps `logprob`; got {source}"
            )
        self._candidates = [self._candidate(row) for row in cast(list[object], rows)]
        fixed = source.get("logprob")
        self._logprob = float(fixed) if fixed is not None else None

    @classmethod
    def load(cls, file: Path | None, model: Path) -> "Script":
        """Reads a script; None is a few shell commands.

        Raises:
            ConfigError: unreadable or not of the form of a script.
            ModelError: texts, but no tokenizer in `model`.
        """
        try:
            source = DEFAULT_SCRIPT if file is None else json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--script {file} is unreadable: {error}") from None
        if not isinstance(source, Mapping):
            raise ConfigError(f"--script {file} is no JSON object")
        has_tokenizer = (model / "tokenizer.json").is_file()
        return cls(cast(Mapping[str, Any], source), Tokenizer(model) if has_tokenizer else None)

    def reply(self, input_ids: Sequence[int], seed: int) -> tuple[int, ...]:
        """The reply to a prompt."""
        fitting = self._candidates
        if any(c.when for c in fitting):
            text = self.text(input_ids)
            meant = [c for c in fitting if c.when and c.when in text]
            fitting = meant or [c for c in fitting if not c.when] or fitting
        rng = random.Random(_digest("reply", seed, *input_ids))
        return rng.choices(fitting, weights=[c.weight for c in fitting])[0].ids

    def logprobs(self, ids: Sequence[int], start: int) -> list[float]:
        """One log-probability for each of `ids[start:]`, a function of the ids up to it."""
        if self._logprob is not None:
            return [self._logprob] * (len(ids) - start)
        state = hashlib.blake2b(digest_size=8)
        values: list[float] = []
        for i, token in enumerate(ids):
            state.update(token.to_bytes(4, "little"))
            if i >= start:
                share = (int.from_bytes(state.digest(), "little") + 1) / (1 << 64)
                values.append(max(0.5 * math.log(share), -20.0))
        return values

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply of this model; none without a tokenizer."""
        return self.tokenizer.stop_token_ids if self.tokenizer is not None else ()

    def text(self, ids: Sequence[int]) -> str:
        """Text of ids; empty without a tokenizer."""
        return self.tokenizer.decode(ids) if self.tokenizer is not None else ""

    def _candidate(self, row: object) -> Candidate:
        fields: Mapping[str, Any] = cast(Mapping[str, Any], row) if isinstance(row, Mapping) else {"text": row}
        ids, text = fields.get("ids"), fields.get("text")
        if isinstance(ids, list) and text is None:
            found = tuple(int(i) for i in cast(list[int], ids))
        elif isinstance(text, str) and ids is None and self.tokenizer is not None:
            found = self.tokenizer.encode(text) + self.tokenizer.stop_token_ids[:1]
        else:
            raise ConfigError(f"a scripted reply is a text (with a tokenizer in --model) or a list of ids; got {row}")
        return Candidate(found, float(fields.get("weight", 1.0)), str(fields.get("when", "")))


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _uniform(*parts: object) -> float:
    return _digest(*parts) / (1 << 64)
