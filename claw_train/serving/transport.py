"""HTTP to an engine server: JSON in, JSON out, every failure sorted into what may be tried again and what may not.

In: a path and a body. Out: the decoded object. Timeouts on everything, replies bounded in size, the key in a header.
Knows no route and repeats nothing by itself.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

import httpx

from claw_train.errors import EngineError

_MAX_REPLY_BYTES = 256 * 1024 * 1024
_MAX_MESSAGE = 300
_MAX_RETRY_AFTER_S = 30.0
_CONNECT_TIMEOUT_S = 5.0


class Refused(EngineError):
    """The server understood and will not: trying again gives the same answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Transient(EngineError):
    """May go well the next time."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """What the server asked for; None when it asked for nothing."""


class Lost(Transient):
    """The connection broke or was never made: the server may have been replaced by one that forgot everything."""

    def __init__(self, message: str, *, down: bool = False) -> None:
        super().__init__(message)
        self.down = down
        """Nobody listened: the request was not even sent."""


class Transport:
    """One server's HTTP connections.

    Args:
        url: base URL.
        api_key: sent as a bearer token; None sends none.
        connections: open at once.
    """

    def __init__(self, url: str, api_key: str | None, *, connections: int) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,  # a proxy of the environment must not come between us and a local server
        )

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float
    ) -> dict[str, Any]:
        """One exchange.

        Raises:
            Refused: a 4xx answer, or one that is no JSON object.
            Transient: 408, 429, 5xx or no answer within `timeout_s`.
            Lost: no connection, or one that broke.
        """
        what = f"{method} {self.url}{path}"
        limits = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(method, path, json=body, timeout=limits) as response,
            ):
                content = await _read(response)
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout):
            raise Transient(f"{what}: no answer within {timeout_s:.0f} s") from None
        except httpx.RequestError as error:
            down = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise Lost(f"{what}: {type(error).__name__}: {error}", down=down) from None
        return _sort(what, response, content)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()


async def _read(response: httpx.Response) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > _MAX_REPLY_BYTES:
            raise Refused(f"{response.url}: the reply is above {_MAX_REPLY_BYTES} bytes", response.status_code)
        parts.append(part)
    return b"".join(parts)


def _sort(what: str, response: httpx.Response, content: bytes) -> dict[str, Any]:
    status = response.status_code
    if status == 429 or status == 408 or status >= 500:
        raise Transient(f"{what}: {status} {_message(content)}", retry_after_s=_retry_after(response))
    if status >= 400:
        raise Refused(f"{what}: {status} {_message(content)}", status)
    if not content.strip():
        return {}
    try:
        # NaN and Infinity are no JSON, but servers send them: the reader of the reply decides
        found = json.loads(content)
    except ValueError:
        found = content.decode("utf-8", "replace")
    if isinstance(found, dict):
        return cast(dict[str, Any], found)
    return {"message": str(found)[:_MAX_MESSAGE]}


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return min(max(float(response.headers.get("retry-after", "")), 0.0), _MAX_RETRY_AFTER_S)
    except ValueError:
        return None


def _message(content: bytes) -> str:
    """The server's own words, in one short line."""
    text = content.decode("utf-8", "replace")
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if isinstance(found, dict):
        row = cast(dict[str, Any], found)
        for name in ("error", "error_message", "message", "detail"):
            value = row.get(name)
            if isinstance(value, dict):
                value = cast(dict[str, Any], value).get("message")
            if value:
                text = str(value)
                break
    return " ".join(text.split())[:_MAX_MESSAGE]
