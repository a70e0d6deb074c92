"""The engine's one thread: admits requests, runs passes, draws tokens, changes weights in between.

In: requests (`submit`) and functions to run between two passes (`call`), from any thread. Out: requests that end, each
exactly once, told through their `notify`. Waiting requests are bounded, rows and kept prefixes stay inside the token
budget, and no request is dropped by a change of weights. It knows no HTTP.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

import torch

from claw_train.engine.batch import build, choose
from claw_train.engine.checkpoint import Adapter, Weights
from claw_train.engine.kv import KvStore
from claw_train.engine.model import Model
from claw_train.engine.prefix import BLOCK, PrefixCache, boundaries
from claw_train.engine.request import Finish, FinishKind, Request
from claw_train.engine.sampling import Drawn, draw, score
from claw_train.engine.spec import ModelSpec
from claw_train.engine.text import Texts
from claw_train.engine.work import Work
from claw_train.errors import ClawTrainError, EngineError, boundary

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PROMPT_TOKENS = 256
"""Of prompts in one pass: bounds how long decoding requests wait for it."""
_LOGIT_ROWS = 64
"""Rows of prompt logits held at once."""
_LOOKAHEAD = 64
"""Waiting requests looked at when the first ones wait for a prefix."""


class PauseMode(StrEnum):
    """What a pause does to running requests."""

    ABORT = "abort"
    RETRACT = "retract"
    """They give their keys and values back and compute them again."""
    IN_PLACE = "in_place"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the engine."""

    max_running: int
    max_total_tokens: int
    context: int
    max_waiting: int = 4096
    prompt_tokens: int = _PROMPT_TOKENS


@dataclass(slots=True)
class Served:
    """The weights in use. Changed between passes only."""

    weights: Weights
    version: str
    epoch: int = 0
    """Counts changes of the base weights."""
    adapters: dict[str, Adapter] = field(default_factory=dict[str, Adapter])
    """That new requests may name."""


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    passes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    shared_reads: int = 0
    """Rows that read a prefix together with others, summed over passes."""
    finished: int = 0
    failed_passes: int = 0
    longest_gap_s: float = 0.0
    """Between the ends of two passes while requests were running; reset when read."""


class Scheduler:
    """Continuous batching over one model."""

    def __init__(
        self, *, spec: ModelSpec, weights: Weights, version: str, limits: Limits, texts: Texts, dtype: torch.dtype
    ) -> None:
        self.spec, self.limits, self.texts = spec, limits, texts
        self.served = Served(weights, version)
        self.counters = Counters()
        self.paused = False
        self._dtype, self._device = dtype, weights.embedding.device
        self._model = Model(spec, dtype, self._device)
        self._store = self._new_store()
        self._prefixes = PrefixCache(self._store)
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._threads = torch.get_num_threads()
        self._last_pass = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _new_store(self) -> KvStore:
        return KvStore(
            budget=self.limits.max_total_tokens,
            layers=self.spec.layers,
            kv_heads=self.spec.kv_heads,
            head_dim=self.spec.head_dim,
            dtype=self._dtype,
            device=self._device,
        )

    # ---- from any thread

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after its pass; requests are aborted."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def load(self) -> tuple[int, int, int, int]:
        """(running, waiting, tokens in rows, tokens in kept prefixes)."""
        return len(self._running), len(self._waiting) + len(self._inbox), self._store.allocated, self._store.kept

    @property
    def full(self) -> bool:
        """Whether no further request may wait."""
        return len(self._waiting) + len(self._inbox) >= self.limits.max_waiting

    def submit(self, request: Request) -> None:
        """Queues a request."""
        self._post(lambda: self._waiting.append(request))

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Runs `function` between two passes; its result or exception is in the future."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                with boundary(EngineError, "a change of the engine failed"):
                    future.set_result(function())
            except ClawTrainError as error:
                future.set_exception(error)

        self._post(run)
        return future

    def _post(self, item: Callable[[], None]) -> None:
        self._inbox.append(item)
        self._wake.set()

    # ---- called between passes

    def abort(self, matches: Callable[[Request], bool], message: str = "aborted by request") -> int:
        """Ends every request that `matches`; their tokens so far are kept."""
        chosen = [r for r in [*self._running, *self._waiting] if matches(r)]
        for request in chosen:
            self._finish(request, Finish(kind=FinishKind.ABORT, message=message))
        return len(chosen)

    def pause(self, mode: PauseMode) -> None:
        """Stops passes; new requests wait."""
        self.paused = True
        if mode is PauseMode.ABORT:
            self.abort(lambda _: True, "aborted by pause_generation")
        elif mode is PauseMode.RETRACT:
            for request in list(self._running):
                self._retract(request)

    def resume(self) -> None:
        """Passes go on."""
        self.paused = False

    def flush(self) -> None:
        """Forgets kept prefixes."""
        self._prefixes.drop()

    def replace_weights(self, weights: Weights, version: str) -> None:
        """Serves other base weights from the next pass on; running requests go on with the keys they have."""
        self.served.weights, self.served.version = weights, version
        self.served.epoch += 1
        self._prefixes.drop()
        for request in self._running:
            request.epoch = -1
            if request.remaining > 1:
                request.boundaries = ()  # the keys of its prompt will be of both weights

    def add_adapter(self, adapter: Adapter) -> None:
        """Serves `adapter` under its name."""
        self.served.adapters[adapter.name] = adapter

    def remove_adapter(self, name: str) -> None:
        """Serves it to no new request; those that use it go on."""
        adapter = self.served.adapters.pop(name)
        self._prefixes.drop((self.served.epoch, adapter))

    # ---- the thread

    def _run(self) -> None:
        # the count is a thread's own, but only from its first use on: another thread sets a smaller one for itself
        torch.set_num_threads(self._threads)
        assert torch.get_num_threads() == self._threads
        with torch.inference_mode():
            while not self._closing:
                while self._inbox:
                    self._inbox.popleft()()
                if self.paused or not self._pass():
                    self._last_pass = 0.0
                    self._wake.wait(timeout=1.0)
                    self._wake.clear()
            self.abort(lambda _: True, "the server is closing")

    def _pass(self) -> bool:
        """Admits, computes, draws; False when there was nothing to do."""
        self._admit()
        chosen = choose(self._running, self.limits.prompt_tokens)
        if not chosen:
            return False
        try:
            with boundary(EngineError, "a pass failed"):
                self._compute(chosen)
        except EngineError as error:
            logger.error("%s; %d requests fail with it", error, len(self._running))
            self.counters.failed_passes += 1
            self._start_over(str(error))
        now = time.monotonic()
        if self._last_pass:
            self.counters.longest_gap_s = max(self.counters.longest_gap_s, now - self._last_pass)
        self._last_pass = now
        return True

    def _start_over(self, message: str) -> None:
        """Fails the running requests and forgets all keys and values, whose state is unknown."""
        for request in list(self._running):
            request.row = None
            self._finish(request, Finish(kind=FinishKind.ABORT, message=message, status_code=500))
        self._store = self._new_store()
        self._prefixes = PrefixCache(self._store)

    def _key(self, request: Request) -> tuple[int, Adapter | None]:
        return self.served.epoch, request.adapter

    def _admit(self) -> None:
        """Gives rows to waiting requests in order, as far as rows and tokens last."""
        if not self._waiting:
            return
        self._waiting.sort(key=lambda r: r.sort_key)
        arriving = {self._next_block(r, r.computed) for r in self._running if r.remaining > 1}
        for request in self._waiting[:_LOOKAHEAD]:
            if len(self._running) >= self.limits.max_running:
                break
            reusable = self._prefixes.match(self._key(request), request.tokens[: request.reusable])
            covered = sum(b.shape[1] for b in reusable)
            block = self._next_block(request, covered // BLOCK * BLOCK)
            if block is not None and block in arriving:
                continue  # another request computes what this one can soon copy
            if not self._place(request, reusable, covered):
                break
            arriving.add(block)

    def _next_block(self, request: Request, computed: int) -> object:
        """Names the block of tokens after `computed`; None when the request could not copy it."""
        start = computed // BLOCK * BLOCK
        if start + BLOCK > request.reusable:
            return None
        return self._key(request), tuple(request.tokens[: start + BLOCK])

    def _place(self, request: Request, reusable: Sequence[torch.Tensor], covered: int) -> bool:
        total = len(request.prompt) + request.params.max_new_tokens
        row = self._store.reserve(total, self._prefixes.evict)
        if row is None:
            return False
        if covered:
            row.write(0, list(reusable))
            row.filled = covered
        request.row, request.epoch = row, self.served.epoch
        request.boundaries = boundaries(f"{self.served.epoch}/{id(request.adapter)}", request.prompt)
        if not request.retractions:
            request.cached_tokens = covered
            self.counters.cached_tokens += covered
            self.counters.prompt_tokens += len(request.prompt) - covered
        self._waiting.remove(request)
        self._running.append(request)
        return True

    def _compute(self, chosen: Sequence[tuple[Request, int]]) -> None:
        plan, works = build(chosen, self._dtype, self._device)
        hidden = self._model.forward(self.served.weights, plan)
        at = 0
        drawing: list[int] = []
        for work in works:
            wanted = len(work.wanted)
            if work.draws:
                drawing.append(at + wanted - 1)
            self._score(work, hidden[at : at + work.scores[1] - work.scores[0]])
            at += wanted
        finished_prompts = [w for w in works if w.draws and w.count > 1]
        for work in works:
            assert work.request.row is not None
            work.request.row.filled += work.count
        self.counters.passes += 1
        self.counters.shared_reads += len(plan.layout.sharing)
        for work in finished_prompts:
            self._keep(work.request)
        self._draw([w for w in works if w.draws], hidden[drawing])
        for work in works:
            if not work.request.params.max_new_tokens and not work.request.remaining:
                self._finish(work.request, Finish(kind=FinishKind.LENGTH, length=0))

    def _score(self, work: Work, hidden: torch.Tensor) -> None:
        request, position = work.request, work.scores[0]
        for rows in hidden.split(_LOGIT_ROWS) if len(hidden) else ():
            targets = request.prompt[position : position + len(rows)]
            logits = self._model.logits(self.served.weights, rows)
            request.input_scores.extend(score(logits, targets, request.top_logprobs))
            position += len(rows)

    def _draw(self, works: Sequence[Work], hidden: torch.Tensor) -> None:
        if not works:
            return
        draws = [w.request.next_draw(self.spec.eos_ids) for w in works]
        drawn = draw(self._model.logits(self.served.weights, hidden), draws)
        for work, one in zip(works, drawn, strict=True):
            self._take(work.request, one)
        self.counters.output_tokens += len(works)

    def _take(self, request: Request, drawn: Drawn) -> None:
        """Appends a token and ends the request if it is the last one."""
        if drawn.logprob != drawn.logprob:
            message = "the model's logits are not finite"
            self._finish(request, Finish(kind=FinishKind.ABORT, message=message, status_code=500), poisoned=True)
            return
        request.append(drawn, request.adapter.name if request.adapter else self.served.version)
        finish = self._ended(request)
        if finish is not None:
            self._finish(request, finish)
        elif request.stream:
            request.notify(request)

    def _ended(self, request: Request) -> Finish | None:
        p, token = request.params, request.tokens[-1]
        if not p.ignore_eos and (token in self.spec.eos_ids or token in p.stop_token_ids):
            return Finish(kind=FinishKind.STOP, matched=token)
        try:
            ids = request.tokens[len(request.prompt) :]
            matched = self.texts.matched(ids, p.stop, skip_special=p.skip_special_tokens)
        except EngineError as error:
            return Finish(kind=FinishKind.ABORT, message=str(error), status_code=500)
        if matched is not None and len(request.output) >= p.min_new_tokens:
            return Finish(kind=FinishKind.STOP, matched=matched)
        if len(request.output) >= p.max_new_tokens:
            return Finish(kind=FinishKind.LENGTH, length=len(request.output))
        return None

    def _keep(self, request: Request) -> None:
        adapter = request.adapter
        retired = adapter is not None and self.served.adapters.get(adapter.name) is not adapter
        if request.epoch == self.served.epoch and request.row is not None and not retired:
            self._prefixes.keep(self._key(request), request.tokens[: request.row.filled], request.row)

    def _release(self, request: Request, *, poisoned: bool = False) -> None:
        if request.row is not None:
            self._store.release(request.row, poisoned=poisoned)
            request.row = None

    def _retract(self, request: Request) -> None:
        self._release(request)
        self._running.remove(request)
        request.retractions += 1
        self._waiting.append(request)

    def _finish(self, request: Request, finish: Finish, *, poisoned: bool = False) -> None:
        if not poisoned and finish.status_code is None:
            self._keep(request)
        self._release(request, poisoned=poisoned)
        for queue in (self._running, self._waiting):
            with contextlib.suppress(ValueError):
                queue.remove(request)
        request.finish = finish
        request.version = request.adapter.name if request.adapter else self.served.version
        self.counters.finished += 1
        request.notify(request)
