"""The one client of engine servers: our own embedded one, the scripted one of tests, and stock SGLang.

In: `GenerateRequest`s, texts to score, `WeightRef`s. Out: checked `Completion`s and `TokenScores` with the version of
every token. A failure that may pass is tried again with the same request id; a server that was restarted gets its
weights back first. What is not whole becomes an `EngineError`, never a value. Knows no session, judge or ledger.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from claw_train.config import EngineConfig
from claw_train.errors import EngineError
from claw_train.serving.loading import Loader
from claw_train.serving.priority import PriorityGate, Urgency
from claw_train.serving.transport import Lost, Refused, Transient, Transport
from claw_train.serving.versions import Route, ServedVersions, served_name
from claw_train.serving.wire import generate_body, read_completion, read_scores, score_body
from claw_train.types import Completion, GenerateRequest, TokenScores, Version, WeightKind, WeightRef

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CONTROL_CONNECTIONS = 8
_CONTROL_TIMEOUT_S = 30.0
_HEALTH_TIMEOUT_S = 2.0
_ABORT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 10.0
_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 5.0
_DOWN_POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server says of itself; empty or None where it says nothing."""

    engine: str
    """`claw-...` for our own servers; empty for others."""
    version: str
    """Of the server program, or of SGLang's contract that it follows."""
    model_path: str
    weight_version: str
    context: int | None
    """Tokens."""
    max_total_tokens: int | None
    """Of key-value cache."""


class EngineClient:
    """Samples, scores and loads weights. Implements `protocols.Engine`.

    Args:
        url: base URL of the server.
        api_key: None for a server without one.
        config: time limits, retries, concurrency and the kind of server.
        base: names the weights that the server starts with.

    Example: `await client.generate(GenerateRequest(id="term/17/0/0", prompt_ids=(5, 9), sampling=Sampling()))`.
    """

    def __init__(self, url: str, api_key: str | None, config: EngineConfig, *, base: Version) -> None:
        self._config = config
        self._stock = config.kind == "url"
        self._transport = Transport(url, api_key, connections=config.concurrency + _CONTROL_CONNECTIONS)
        self._versions = ServedVersions(base, stock=self._stock)
        self._loader = Loader(self._transport, pause=self._stock, stock=self._stock)
        self._gate = PriorityGate(config.concurrency)
        self._loading = asyncio.Lock()
        self._suspect = False
        """The server may have been replaced by one without our weights."""
        self._cache_keys = False
        self._scores = 0
        self._background: set[asyncio.Task[None]] = set()

    @property
    def newest(self) -> Version:
        """Used by requests that name no version."""
        return self._versions.newest

    @property
    def waiting(self) -> int:
        """Requests that wait for a free place."""
        return self._gate.waiting

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples one reply; retries what may pass, with the same request id.

        Cancelling the call aborts the request on the server.

        Raises:
            EngineError: the version is not served, the server refuses, the reply is not whole, or retries ran out.
        """
        rid = f"{request.id};"  # servers abort by prefix: without an end mark .../1 would take .../10 along
        urgency = Urgency.LIVE if request.live else Urgency.HOSTED
        async with self._gate.turn(urgency), self._using(request.version) as route:
            body = generate_body(request, rid, route.adapter, priorities=not self._stock)
            body |= self._cache_key(route)
            reply = await self._ask(body, rid)
            return read_completion(
                reply,
                request.sampling,
                lambda name: self._versions.label(name, route),
                # a server that keeps no spans names its last weights only; the first ones are the safe label
                lambda name: self._versions.label(name, route) and route.version,
            )

    async def score(
        self,
        prompt_ids: tuple[int, ...],
        token_ids: tuple[int, ...],
        *,
        version: Version | None = None,
        top_k: int = 0,
    ) -> TokenScores:
        """Log-probabilities (temperature 1) of `token_ids` [T] after `prompt_ids` [P], and of the `top_k` likeliest.

        Raises:
            EngineError: as `generate`.
        """
        if not prompt_ids or not token_ids:
            raise ValueError("score needs at least one prompt token and one token to score")
        self._scores += 1
        rid = f"score/{self._scores};"
        async with self._gate.turn(Urgency.SCORE), self._using(version) as route:
            body = {**score_body(rid, prompt_ids, token_ids, top_k, route.adapter), **self._cache_key(route)}
            reply = await self._ask(body, rid)

            def check(name: str) -> Version:
                found = self._versions.label(name, route)
                if version is not None and found != version:
                    raise EngineError(f"asked for scores of {version}, answered by {name}")
                return found

            return read_scores(reply, token_ids, top_k, check)

    async def load_weights(self, ref: WeightRef) -> None:
        """Makes `ref` the newest version without dropping a request; verified before it returns.

        Loading a version again gives it to a server that was restarted.

        Raises:
            EngineError: the weights were not taken over; requests go on with the old ones.
        """
        async with self._loading:
            if self._stock and ref.kind is WeightKind.FULL:
                # ours key cached prefixes by version themselves, and refuse a field they do not know
                info = await self._persist(self.server_info, heal=False)
                self._cache_keys = not info.engine.startswith("claw")
            self._versions.announce(ref)
            await self._persist(lambda: self._loader.load(ref), heal=False)
            self._versions.loaded(ref)
        logger.info("engine serves %s", ref.version)
        self._retire()

    @contextlib.contextmanager
    def holding(self, version: Version) -> Iterator[None]:
        """Keeps `version` served between requests, for as long as the block lasts.

        Raises:
            EngineError: it is not served.
        """
        with self._versions.using(self._versions.route(version)):
            yield
        self._retire()

    async def health(self) -> bool:
        """Whether the server answers; never raises."""
        try:
            await self._transport.call("GET", "/health", timeout_s=_HEALTH_TIMEOUT_S)
        except EngineError:
            return False
        return True

    async def server_info(self) -> ServerInfo:
        """Asks under the new names of the routes, then under the old ones.

        Raises:
            EngineError: no answer under either.
        """
        server = await self._get("/server_info", "/get_server_info")
        model = await self._get("/model_info", "/get_model_info")
        both = {**server, **{k: v for k, v in model.items() if v is not None}}
        return ServerInfo(
            engine=str(both.get("engine") or ""),
            version=str(both.get("version") or ""),
            model_path=str(both.get("model_path") or ""),
            weight_version=str(both.get("weight_version") or ""),
            context=_whole(both.get("context_length")) or _whole(both.get("max_context_length")),
            max_total_tokens=_whole(both.get("max_total_num_tokens")) or _whole(both.get("max_total_tokens")),
        )

    async def abort_all(self) -> None:
        """Ends every request on the server; their calls return with finish reason `abort`.

        Raises:
            EngineError: the server did not take the order.
        """
        await self._transport.call("POST", "/abort_request", {"abort_all": True}, timeout_s=_CONTROL_TIMEOUT_S)

    async def aclose(self) -> None:
        """Closes connections; the server is not stopped. One that outlives the run is relieved of its adapters."""
        if self._stock:
            for name in self._versions.sent():
                self._spawn(self._loader.unload(name))
        pending = list(self._background)
        if pending:
            _, late = await asyncio.wait(pending, timeout=_CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._transport.aclose()

    @contextlib.asynccontextmanager
    async def _using(self, version: Version | None) -> AsyncIterator[Route]:
        route = self._versions.route(version)
        try:
            with self._versions.using(route):
                yield route
        finally:
            self._retire()

    def _cache_key(self, route: Route) -> dict[str, Any]:
        """Keeps a stock server from reusing cached prefixes of weights that were replaced."""
        if not self._stock or route.adapter is not None or route.version.step == 0:
            return {}
        return {"extra_key": str(route.version)} if self._cache_keys else {}

    async def _ask(self, body: dict[str, Any], rid: str) -> dict[str, Any]:
        """One /generate, repeated as needed and aborted on the server when we are cancelled."""
        try:
            return await self._persist(
                lambda: self._transport.call("POST", "/generate", body, timeout_s=self._config.timeout_s), rid=rid
            )
        except asyncio.CancelledError:
            self._spawn(self._abort(rid))
            raise

    async def _persist(self, call: Callable[[], Awaitable[T]], *, heal: bool = True, rid: str | None = None) -> T:
        """Repeats `call` while it fails in a way that may pass.

        A server of ours that is down is being restarted: waiting for it costs no retry, up to `start_timeout_s`.
        """
        loop = asyncio.get_running_loop()
        failures = 0
        down_since: float | None = None
        while True:
            try:
                if heal:
                    await self._heal()
                return await call()
            except Transient as error:
                if isinstance(error, Lost):
                    self._suspect = True
                if isinstance(error, Lost) and error.down and not self._stock:
                    down_since = loop.time() if down_since is None else down_since
                    if loop.time() - down_since > self._config.start_timeout_s:
                        raise EngineError(f"the engine is down: {error}") from error
                    await asyncio.sleep(_DOWN_POLL_S)
                    continue
                down_since = None  # somebody listened: the next time nobody does is another outage
                failures += 1
                if failures > self._config.retries:
                    raise EngineError(f"failed {failures} times, last: {error}") from error
                logger.info("request %s: attempt %d: %s", rid, failures, error)
                if rid is not None and error.retry_after_s is None:
                    await self._abort(rid)  # the first attempt may still be running under this id
                await asyncio.sleep(_wait_s(failures, error.retry_after_s))

    async def _heal(self) -> None:
        """Gives a server that was replaced the weights it needs, once, before anything else is asked of it.

        Raises:
            Transient: it is not up yet.
        """
        if not self._suspect:
            return
        async with self._loading:
            if not self._suspect:
                return
            await self._transport.call("GET", "/health", timeout_s=_HEALTH_TIMEOUT_S)
            for ref in self._versions.kept():
                if not await self._loader.holds(ref):
                    await self._load_again(ref)
            self._suspect = False

    async def _load_again(self, ref: WeightRef) -> None:
        logger.warning("engine lost %s: loading it again", ref.version)
        try:
            await self._loader.load(ref)
        except Transient:
            raise
        except EngineError as error:
            if ref.version == self.newest:
                raise
            logger.warning("engine goes on without %s: %s", ref.version, error)
            self._versions.dropped(ref)

    async def _get(self, path: str, old: str) -> dict[str, Any]:
        try:
            return await self._transport.call("GET", path, timeout_s=_CONTROL_TIMEOUT_S)
        except Refused as error:
            if error.status != 404:
                raise
        return await self._transport.call("GET", old, timeout_s=_CONTROL_TIMEOUT_S)

    async def _abort(self, rid: str) -> None:
        with contextlib.suppress(EngineError):
            await self._transport.call("POST", "/abort_request", {"rid": rid}, timeout_s=_ABORT_TIMEOUT_S)

    def _retire(self) -> None:
        """Unloads adapters that nobody uses any more, in the background."""
        for ref in self._versions.unused():
            self._versions.dropped(ref)
            self._spawn(self._loader.unload(served_name(ref)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _wait_s(failures: int, asked_s: float | None) -> float:
    """What the server asked for; else doubling, with a spread so that clients do not come back together."""
    if asked_s is not None:
        return asked_s
    return min(_BACKOFF_S * 2 ** (failures - 1), _MAX_BACKOFF_S) * random.uniform(0.5, 1.0)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
