"""One request inside the engine: what was asked, how far it is, how it ended.

In: checked parameters from the routes. Out: fields that `reply.py` turns into JSON. Written by the engine's thread
alone; others read. It knows no tensor and no HTTP.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from claw_train.engine.checkpoint import Adapter
from claw_train.engine.kv import Row
from claw_train.engine.sampling import Draw, Drawn, uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Sampling parameters of one request; names and meanings are SGLang's."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    """Neither end tokens nor `stop_token_ids` end the reply."""
    min_new_tokens: int = 0
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    seed: int | None = None


class FinishKind(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a reply ended."""

    kind: FinishKind
    matched: int | str | None = None
    """Token id or string that ended it; for `STOP`."""
    length: int = 0
    """For `LENGTH`."""
    message: str = ""
    """For `ABORT`."""
    status_code: int | None = None
    """HTTP status of a failure; None for an abort that somebody asked for."""


@dataclass(slots=True)
class VersionSpan:
    """Output tokens [start, end) that one set of weights sampled."""

    version: str
    start: int
    end: int


_order = itertools.count()


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request and its state."""

    rid: str
    prompt: list[int]
    params: Params
    adapter: Adapter | None = None
    priority: int = 0
    return_logprob: bool = False
    score_from: int = 0
    """Prompt positions after this one are scored; len(prompt) - 1 is none."""
    top_logprobs: int = 0
    seed: int = 0
    notify: Callable[["Request"], None] = lambda _: None
    """Called in the engine's thread after each token if `stream`, and at the end."""
    stream: bool = False

    order: int = field(default_factory=lambda: next(_order))
    created: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    """Prompt and output."""
    row: Row | None = None
    epoch: int = -1
    """Of the base weights that computed everything in `row`; -1 when more than one did."""
    boundaries: tuple[bytes, ...] = ()
    """Names of the prompt's prefixes of 1, 2, ... blocks; equal names mean equal keys in the row."""
    cached_tokens: int = 0
    retractions: int = 0
    input_scores: list[Drawn] = field(default_factory=list)
    """Of prompt positions `score_from` + 1 and up."""
    output: list[Drawn] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: Finish | None = None
    version: str = ""
    """Served version when it ended."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are in the row."""
        return 0 if self.row is None else self.row.filled

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def reusable(self) -> int:
        """Most tokens that a kept prefix may cover: the last one, and those to score, must be computed."""
        scored = len(self.input_scores) == len(self.prompt) - 1 - self.score_from
        return len(self.tokens) - 1 if scored else self.score_from

    @property
    def sort_key(self) -> tuple[int, int]:
        """Higher priority first, then first come."""
        return -self.priority, self.order

    def next_draw(self, eos_ids: frozenset[int]) -> Draw:
        """How to draw the next token."""
        p = self.params
        position = len(self.output)
        ends = eos_ids | p.stop_token_ids if position < p.min_new_tokens else frozenset[int]()
        return Draw(
            temperature=p.temperature,
            top_p=p.top_p,
            top_k=p.top_k,
            min_p=p.min_p,
            uniform=uniform(self.seed, position),
            banned=ends,
            top_logprobs=self.top_logprobs,
        )

    def append(self, drawn: Drawn, version: str) -> None:
        """Takes one drawn token."""
        self.tokens.append(drawn.token)
        self.output.append(drawn)
        n = len(self.output)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = n
        else:
            self.spans.append(VersionSpan(version, n - 1, n))
