"""From an HTTP body to queued requests, and the wait for their end.

In: a `GenerateBody`. Out: `Pending` requests, checked against the model and its limits before they are queued, so that
nothing a caller sends can fail a pass. It knows no JSON of replies.
"""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator

from claw_train.engine.checkpoint import Adapter
from claw_train.engine.protocol import GenerateBody, SamplingParams
from claw_train.engine.request import Params, Request
from claw_train.engine.sampling import mix
from claw_train.engine.scheduler import Scheduler
from claw_train.errors import EngineError


class QueueFullError(EngineError):
    """No further request may wait; try again later."""


class Pending:
    """The requests of one call, queued together."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.requests: list[Request] = []
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def notify(self, _: Request) -> None:
        """Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._changed.set)

    async def ended(self) -> None:
        """Returns when every request has ended."""
        async for _ in self.changes():
            pass

    async def changes(self) -> AsyncIterator[list[int]]:
        """Yields the indices that have new tokens or have ended, until all have ended."""
        seen = [(-1, False)] * len(self.requests)
        while not all(ended for _, ended in seen):
            await self._changed.wait()
            self._changed.clear()
            now = [(len(r.output), r.finish is not None) for r in self.requests]
            changed = [i for i, state in enumerate(now) if state != seen[i]]
            seen = now
            if changed:
                yield changed

    def cancel(self) -> None:
        """Aborts what has not ended."""
        if any(r.finish is None for r in self.requests):
            self._scheduler.call(lambda: self._scheduler.abort(lambda r: r in self.requests, "the client went away"))


class Intake:
    """Checks and queues."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self._scheduler, self._seed = scheduler, seed
        self._counter = itertools.count()

    def submit(self, body: GenerateBody) -> Pending:
        """Queues every prompt of `body`.

        Raises:
            ValueError: something the caller can mend, named.
            QueueFullError: too many requests wait.
        """
        if self._scheduler.full:
            raise QueueFullError(f"{self._scheduler.limits.max_waiting} requests wait already")
        pending = Pending(self._scheduler)
        pending.requests = [self._request(body, i, pending) for i in range(len(body.prompts))]
        for request in pending.requests:
            self._scheduler.submit(request)
        return pending

    def probe(self) -> Pending:
        """Queues one token, before all others."""
        body = GenerateBody(input_ids=[0], sampling_params=SamplingParams(max_new_tokens=1), priority=1 << 30)
        return self.submit(body)

    def _request(self, body: GenerateBody, index: int, pending: Pending) -> Request:
        prompt = body.prompts[index]
        ids = self._scheduler.texts.encode(prompt) if isinstance(prompt, str) else prompt
        sampling = body.entry("sampling_params", index)
        assert isinstance(sampling, SamplingParams)
        params = sampling.params()
        self._check(ids, params)
        wants_logprobs = bool(body.entry("return_logprob", index))
        top = int(str(body.entry("top_logprobs_num", index))) if wants_logprobs else 0
        if top > self._scheduler.spec.vocab:
            raise ValueError(f"top_logprobs_num {top} is above the vocabulary's {self._scheduler.spec.vocab}")
        return Request(
            rid=self._rid(body, index),
            prompt=ids,
            params=params,
            adapter=self._adapter(body.entry("lora_path", index)),
            priority=body.priority or 0,
            return_logprob=wants_logprobs,
            score_from=self._score_from(body.entry("logprob_start_len", index), ids)
            if wants_logprobs
            else len(ids) - 1,
            top_logprobs=top,
            seed=params.seed if params.seed is not None else mix(self._seed ^ mix(next(self._counter))),
            notify=pending.notify,
            stream=body.stream,
        )

    def _check(self, ids: list[int], params: Params) -> None:
        spec, limits = self._scheduler.spec, self._scheduler.limits
        if not ids:
            raise ValueError("the prompt is empty")
        if min(ids) < 0 or max(ids) >= spec.vocab:
            raise ValueError(f"input_ids must lie in [0, {spec.vocab})")
        outside = [t for t in params.stop_token_ids if not 0 <= t < spec.vocab]
        if outside:
            raise ValueError(f"stop_token_ids {outside} lie outside [0, {spec.vocab})")
        total = len(ids) + params.max_new_tokens
        for what, limit in (("context length", limits.context), ("max_total_tokens", limits.max_total_tokens)):
            if total > limit:
                raise ValueError(
                    f"{len(ids)} prompt tokens and max_new_tokens {params.max_new_tokens} exceed the {what} of {limit}"
                )
        if params.stop and not self._scheduler.texts.present:
            raise ValueError("this model has no tokenizer.json: use stop_token_ids instead of stop")

    def _adapter(self, name: object) -> Adapter | None:
        if name is None:
            return None
        adapter = self._scheduler.served.adapters.get(str(name))
        if adapter is None:
            loaded = ", ".join(sorted(self._scheduler.served.adapters)) or "none"
            raise ValueError(f"lora_path {name!r} is not a loaded adapter (loaded: {loaded})")
        return adapter

    @staticmethod
    def _score_from(value: object, ids: list[int]) -> int:
        start = int(str(value))
        if not -1 <= start < len(ids):
            raise ValueError(f"logprob_start_len {start} lies outside the prompt of {len(ids)} tokens")
        return start if start >= 0 else len(ids) - 1

    @staticmethod
    def _rid(body: GenerateBody, index: int) -> str:
        if body.rid is None:
            return uuid.uuid4().hex
        if isinstance(body.rid, list):
            return body.rid[index]
        return f"{body.rid}_{index}" if body.batched else body.rid
