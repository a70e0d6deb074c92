"""Who may speak to the server, and how much: an ASGI layer around the routes.

In: every HTTP request. Out: 401 without the key, 413 above the size limit, the rest passed on. The key is compared in
constant time and never logged.
"""

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = frozenset({"/health", "/ready"})
_MAX_BODY = 64 * 1024 * 1024


class Access:
    """Wraps `app`; `key` None asks for none."""

    def __init__(self, app: App, key: str | None) -> None:
        self._app = app
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection event loop of ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        if scope["path"] not in _OPEN and self._wanted is not None and not hmac.compare_digest(given, self._wanted):
            await _refuse(send, 401, "missing or wrong API key")
            return
        if not headers.get(b"content-length", b"0").isdigit() or b"transfer-encoding" in headers:
            await _refuse(send, 411, "send a content-length")
            return
        if int(headers.get(b"content-length", b"0")) > _MAX_BODY:
            await _refuse(send, 413, f"the body is above {_MAX_BODY} bytes")
            return
        await self._app(scope, receive, send)


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
