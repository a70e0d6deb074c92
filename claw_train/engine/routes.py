"""The HTTP routes, with SGLang's names and shapes.

In: requests from `serving.client` (or any SGLang client). Out: JSON and server-sent events. A request whose client
goes away is cancelled. Errors are `{"error": {"message": ...}}`: 400 for what the caller can mend, 429 with
Retry-After when the queue is full, 5xx otherwise. It holds no state of its own.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse

from claw_train.engine.intake import Intake, Pending, QueueFullError
from claw_train.engine.protocol import (
    AbortBody,
    GenerateBody,
    LoadAdapterBody,
    PauseBody,
    UnloadAdapterBody,
    UpdateWeightsBody,
)
from claw_train.engine.reply import Json, reply
from claw_train.engine.scheduler import PauseMode, Scheduler
from claw_train.engine.updates import Updates
from claw_train.errors import EngineError, ModelError

CONTRACT = "0.5.23"
"""The SGLang version whose routes and shapes these are."""
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the routes speak to."""

    scheduler: Scheduler
    intake: Intake
    updates: Updates
    model_path: str


def make_app(parts: Parts) -> FastAPI:
    """The application, without access control; the scheduler starts and ends with it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        parts.scheduler.start()
        yield
        await asyncio.to_thread(parts.scheduler.close)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None)
    for router in (_generation(parts), _weights(parts), _control(parts), _status(parts)):
        app.include_router(router)
    app.add_exception_handler(RequestValidationError, _invalid)
    for kind, status in ((ValueError, 400), (ModelError, 400), (QueueFullError, 429), (EngineError, 500)):
        app.add_exception_handler(kind, _failing(status))
    return app


def _error(status: int, message: str) -> JSONResponse:
    headers = {"Retry-After": "1"} if status == 429 else None
    return JSONResponse({"error": {"message": message}}, status, headers)


def _invalid(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return _error(400, f"{where}: {first['msg']}" if where else str(first["msg"]))


def _failing(status: int) -> Callable[[HttpRequest, Exception], Response]:
    return lambda _, error: _error(status, str(error))


def _generation(parts: Parts) -> APIRouter:
    router = APIRouter()

    @router.api_route("/generate", methods=["POST", "PUT"])
    async def generate(body: GenerateBody, http: HttpRequest) -> Response:
        pending = parts.intake.submit(body)
        if body.stream:
            return StreamingResponse(_events(parts, body, pending), media_type="text/event-stream")
        if not await _finished(pending, http):
            return Response(status_code=499)
        for request in pending.requests:
            if request.finish is not None and request.finish.status_code is not None:
                return _error(request.finish.status_code, request.finish.message)
        replies = [_reply(parts, body, pending, i) for i in range(len(pending.requests))]
        return Response(_dumps(replies if body.batched else replies[0]), media_type="application/json")

    @router.post("/abort_request")
    async def abort_request(body: AbortBody) -> Json:
        if not body.abort_all and not body.rid:
            raise ValueError("send a rid or abort_all")
        scheduler = parts.scheduler
        future = scheduler.call(
            lambda: scheduler.abort(
                lambda r: body.abort_all or r.rid.startswith(body.rid), body.abort_message or "aborted by request"
            )
        )
        return {"success": True, "aborted": await asyncio.wrap_future(future)}

    return router


async def _finished(pending: Pending, http: HttpRequest) -> bool:
    """Waits for the end; False when the client went away first."""
    ended = asyncio.create_task(pending.ended())
    gone = asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
        return ended.done()
    finally:
        ended.cancel()
        gone.cancel()
        pending.cancel()


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _events(parts: Parts, body: GenerateBody, pending: Pending) -> AsyncIterator[bytes]:
    """Server-sent events, each with the whole reply so far."""
    try:
        async for changed in pending.changes():
            for index in changed:
                finish = pending.requests[index].finish
                if finish is not None and finish.status_code is not None:
                    event: Json = {"error": {"message": finish.message, "code": finish.status_code}}
                else:
                    event = _reply(parts, body, pending, index)
                if body.batched:
                    event["index"] = index
                yield b"data: " + _dumps(event) + b"\n\n"
        yield b"data: [DONE]\n\n"
    finally:
        pending.cancel()


def _reply(parts: Parts, body: GenerateBody, pending: Pending, index: int) -> Json:
    return reply(
        pending.requests[index],
        parts.scheduler.texts,
        token_texts=body.return_text_in_logprobs,
        prompt_ids=body.return_prompt_token_ids,
    )


def _dumps(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _weights(parts: Parts) -> APIRouter:
    router = APIRouter()
    updates = parts.updates

    def adapters(status: int, message: str = "") -> JSONResponse:
        body: Json = {"success": status == 200, "error_message": message, "loaded_adapters": updates.names}
        return JSONResponse(body, status)

    @router.post("/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapterBody) -> Response:
        try:
            await updates.load_adapter(body.lora_name, Path(body.lora_path))
        except ModelError as error:
            return adapters(400, str(error))
        return adapters(200)

    @router.post("/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapterBody) -> Response:
        try:
            await updates.unload_adapter(body.lora_name)
        except ModelError as error:
            return adapters(400, str(error))
        return adapters(200)

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: UpdateWeightsBody) -> Response:
        paused = parts.scheduler.load[0] if parts.scheduler.paused else 0
        try:
            await updates.replace_weights(Path(body.model_path), body.weight_version, abort=body.abort_all_requests)
        except ModelError as error:
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        return JSONResponse({"success": True, "message": "weights replaced", "num_paused_requests": paused})

    return router


def _control(parts: Parts) -> APIRouter:
    router = APIRouter()
    scheduler = parts.scheduler

    @router.post("/pause_generation")
    async def pause_generation(body: PauseBody) -> Json:
        await asyncio.wrap_future(scheduler.call(lambda: scheduler.pause(PauseMode(body.mode))))
        return {"message": f"paused ({body.mode})", "status": "ok"}

    @router.post("/continue_generation")
    async def continue_generation() -> Json:
        await asyncio.wrap_future(scheduler.call(scheduler.resume))
        return {"message": "continued", "status": "ok"}

    @router.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Json:
        await asyncio.wrap_future(scheduler.call(scheduler.flush))
        return {"success": True, "message": "kept prefixes dropped"}

    return router


def _status(parts: Parts) -> APIRouter:
    router = APIRouter()
    scheduler = parts.scheduler

    @router.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if scheduler.alive else 503)

    @router.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if scheduler.alive and not scheduler.paused and not scheduler.full else 503)

    @router.get("/health_generate")
    async def health_generate() -> Response:
        if not scheduler.alive:
            return Response(status_code=503)
        if scheduler.paused:
            return Response(status_code=200)
        pending = parts.intake.probe()
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await pending.ended()
        except TimeoutError:
            pending.cancel()
            return Response(status_code=503)
        finish = pending.requests[0].finish
        return Response(status_code=200 if finish is not None and finish.status_code is None else 503)

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> Json:
        return {
            "model_path": parts.model_path,
            "tokenizer_path": parts.model_path,
            "served_model_name": parts.model_path,
            "is_generation": True,
            "model_type": scheduler.spec.architecture,
            "weight_version": scheduler.served.version,
            "loaded_adapters": parts.updates.names,
        }

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Json:
        return _server_info(parts)

    return router


def _server_info(parts: Parts) -> Json:
    scheduler = parts.scheduler
    running, waiting, rows, kept = scheduler.load
    counters = scheduler.counters
    info: Json = {
        "version": CONTRACT,
        "engine": "claw-embedded",
        "engine_version": _own_version(),
        "model_path": parts.model_path,
        "weight_version": scheduler.served.version,
        "loaded_adapters": parts.updates.names,
        "status": "paused" if scheduler.paused else "ready",
        "max_running_requests": scheduler.limits.max_running,
        "max_total_num_tokens": scheduler.limits.max_total_tokens,
        "context_length": scheduler.limits.context,
        "num_running": running,
        "num_waiting": waiting,
        "row_tokens": rows,
        "prefix_tokens": kept,
        "passes": counters.passes,
        "prompt_tokens": counters.prompt_tokens,
        "cached_tokens": counters.cached_tokens,
        "output_tokens": counters.output_tokens,
        "shared_reads": counters.shared_reads,
        "finished": counters.finished,
        "failed_passes": counters.failed_passes,
        "longest_gap_s": counters.longest_gap_s,
    }
    counters.longest_gap_s = 0.0
    return info


def _own_version() -> str:
    try:
        return version("claw-rl")
    except PackageNotFoundError:
        return "unknown"
