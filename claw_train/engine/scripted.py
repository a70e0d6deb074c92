"""`python -m claw_train.engine.scripted`: an engine server without a model, for tests of everything around it.

In: the command line and the HTTP contract of the embedded engine, a script of replies, faults to commit. Out: replies
that depend on prompt and seed alone, with the weights they would have come from. Starts in a moment; imports no torch.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import uvicorn

from claw_train.children import watch_parent
from claw_train.engine.access import Access, Receive, Scope, Send
from claw_train.engine.scripted_replies import Fault, FaultKind, Faults, Script
from claw_train.engine.scripted_state import BadRequestError, Json, ScriptedEngine
from claw_train.errors import ConfigError, ModelError
from claw_train.log import setup_logging

_RETRY_AFTER_S = 1


class ScriptedApp:
    """The routes, as an ASGI application."""

    def __init__(self, engine: ScriptedEngine, faults: Faults, *, model_path: str) -> None:
        self._engine = engine
        self._faults = faults
        self._model_path = model_path
        self._posts: dict[str, Callable[[Mapping[str, Any]], Json]] = {
            "/abort_request": engine.abort,
            "/load_lora_adapter": engine.load_adapter,
            "/unload_lora_adapter": engine.unload_adapter,
            "/update_weights_from_disk": engine.update_weights,
            "/pause_generation": engine.pause,
            "/continue_generation": lambda _: engine.resume(),
            "/flush_cache": lambda _: {"success": True, "message": "nothing is kept"},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        path, method = str(scope["path"]), str(scope["method"])
        try:
            if method == "GET":
                await self._get(path, send)
                return
            body = await _read_json(receive)
            if path == "/generate":
                await self._generate(body, receive, send)
            elif path in self._posts:
                await _answer(send, 200, self._posts[path](body))
            else:
                await _answer(send, 404, {"error": {"message": f"no route {path}"}})
        except BadRequestError as error:
            await _answer(send, 400, {"success": False, "error_message": str(error), "error": {"message": str(error)}})

    async def _get(self, path: str, send: Send) -> None:
        engine = self._engine
        if path in ("/health", "/health_generate"):
            await _answer(send, 200, {})
        elif path == "/ready":
            await _answer(send, 503 if engine.paused else 200, {})
        elif path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            info = {
                "engine": "claw-scripted",
                "version": "0.5.23",
                "model_path": self._model_path,
                "is_generation": True,
                "weight_version": engine.weight_version,
                "loaded_adapters": sorted(engine.adapters),
                "context_length": engine.context,
                "status": "paused" if engine.paused else "ready",
                "num_running": len(engine.running),
                "finished": engine.served,
            }
            await _answer(send, 200, info)
        else:
            await _answer(send, 404, {"error": {"message": f"no route {path}"}})

    async def _generate(self, body: Mapping[str, Any], receive: Receive, send: Send) -> None:
        fault = self._faults.next(str(body.get("rid") or ""))
        if fault is FaultKind.ERROR:
            await _answer(send, 503, {"error": {"message": "out of order, as ordered"}})
            return
        if fault is FaultKind.BUSY:
            await _answer(send, 429, {"error": {"message": "busy, as ordered"}}, retry_after_s=_RETRY_AFTER_S)
            return
        replies = self._engine.generate(body, fault)
        work = asyncio.create_task(
            self._stream(replies, send) if body.get("stream") else self._whole(replies, send, fault)
        )
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            for task in (work, gone):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, BadRequestError):
                    await task
            await replies.aclose()

    async def _whole(self, replies: AsyncGenerator[Json, None], send: Send, fault: FaultKind | None) -> None:
        last: Json = {}
        async for reply in replies:
            last = reply
        await _answer(send, 200, last, broken=fault is FaultKind.DROP)

    async def _stream(self, replies: AsyncGenerator[Json, None], send: Send) -> None:
        first = await anext(replies)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await _event(send, json.dumps(first))
        async for reply in replies:
            await _event(send, json.dumps(reply))
        await _event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b""})


async def _event(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


async def _answer(
    send: Send, status: int, body: Json, *, retry_after_s: int | None = None, broken: bool = False
) -> None:
    content = json.dumps(body).encode() if body else b""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if broken:
        # an answer shorter than promised makes the server break the connection
        content = content[: len(content) // 2]
    await send({"type": "http.response.body", "body": content})


async def _read_json(receive: Receive) -> Mapping[str, Any]:
    content = b""
    more = True
    while more:
        message = await receive()
        content += message.get("body", b"")
        more = bool(message.get("more_body"))
    try:
        found = json.loads(content or b"{}")
    except ValueError as error:
        raise BadRequestError(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRequestError("send a JSON object")
    return cast(Mapping[str, Any], found)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server; returns the exit code."""
    args = _parser().parse_args(argv)
    watch_parent()
    setup_logging()
    try:
        script = Script.load(args.script, args.model)
        key = os.environ.get(args.key_env) if args.key_env else None
        if args.host not in ("127.0.0.1", "localhost", "::1") and not key:
            raise ConfigError(f"--host {args.host} is not loopback: set a key in the variable named by --key-env")
        with _listen(args.host, args.port) as sock:
            asyncio.run(_serve(args, script, key, sock))
    except (ConfigError, ModelError) as error:
        sys.stderr.write(f"scripted engine: {error}\n")
        return 2
    return 0


async def _serve(args: argparse.Namespace, script: Script, key: str | None, sock: socket.socket) -> None:
    engine = ScriptedEngine(
        script,
        weight_version=args.weight_version,
        seed=args.seed,
        token_delay_s=args.token_delay_s,
        slow_s=args.slow_s,
        context=args.context or 1 << 20,
        max_running=args.max_running,
    )
    faults = Faults(args.fault, seed=args.fault_seed, prefix=args.fault_rid)
    app = Access(ScriptedApp(engine, faults, model_path=str(args.model)), key)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    if args.port_file is not None:
        _write_port(args.port_file, sock.getsockname()[1])
    await uvicorn.Server(config).serve(sockets=[sock])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m claw_train.engine.scripted", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder with a tokenizer; needed for texts only")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--port-file", type=Path, help="where the port is written once requests can be sent")
    parser.add_argument("--max-running", type=int, default=32, help="replies on their way at once")
    parser.add_argument("--context", type=int, help="prompt and reply together, in tokens")
    parser.add_argument("--key-env", default="", help="environment variable that holds the API key")
    parser.add_argument("--weight-version", default="base")
    parser.add_argument("--seed", type=int, default=0)
    for ignored in ("--dtype", "--device", "--max-total-tokens", "--max-lora-rank"):
        parser.add_argument(ignored, help="ignored: there is no model")
    parser.add_argument("--script", type=Path, help="JSON of replies; see scripted_replies.Script")
    parser.add_argument("--token-delay-s", type=float, default=0.0)
    parser.add_argument("--slow-s", type=float, default=1.0, help="delay of a slow reply")
    parser.add_argument("--fault", type=Fault.parse, action="append", default=[], help="KIND:RATE[:LIMIT]; repeatable")
    parser.add_argument("--fault-seed", type=int, default=0)
    parser.add_argument("--fault-rid", default="", help="only request ids that begin with this")
    return parser


def _listen(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen()
    except OSError as error:
        sock.close()
        raise ConfigError(f"--port {port} on {host} cannot be used: {error.strerror}; choose another or 0") from None
    return sock


def _write_port(file: Path, port: int) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        part.write_text(str(port))
        part.replace(file)
    except OSError as error:
        raise ConfigError(f"--port-file {file} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
