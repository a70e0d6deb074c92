"""The scripted engine's server state: replies on their way, adapters, pauses. No HTTP, no torch.

In: decoded bodies of the contract's routes. Out: decoded answers, or `BadRequestError`.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from claw_train.crash import crash_point
from claw_train.engine.scripted_replies import FaultKind, Script

Json = dict[str, Any]

_KNOWN_FIELDS = {
    *("input_ids", "text", "rid", "sampling_params", "stream", "lora_path", "priority"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"),
    *("return_prompt_token_ids", "session_id", "routing_key", "log_metrics"),
}
_WRONG_VERSION = "nobody-99-99"
_ABORTED: Json = {"type": "abort", "message": "aborted by request", "status_code": None, "err_type": None}


class BadRequestError(ValueError):
    """Something the caller can mend: answered with 400."""


@dataclass(slots=True, kw_only=True)
class Running:
    """One reply on its way."""

    rid: str
    prompt: list[int]
    planned: tuple[int, ...]
    finish: Json
    """How it ends, if nobody aborts it."""
    adapter: str | None
    fault: FaultKind | None
    body: Mapping[str, Any]
    ids: list[int] = field(default_factory=list[int])
    spans: list[Json] = field(default_factory=list[Json])
    aborted: bool = False

    def add(self, version: str) -> None:
        """The next planned token, from these weights."""
        self.ids.append(self.planned[len(self.ids)])
        if self.spans and self.spans[-1]["version"] == version:
            self.spans[-1]["end"] += 1
        else:
            self.spans.append({"version": version, "start": len(self.ids) - 1, "end": len(self.ids)})

    def abort(self) -> None:
        """Ends it with what there is."""
        self.aborted = True
        self.finish = _ABORTED


class ScriptedEngine:
    """The state of one server.

    Args:
        script: what is said.
        weight_version: name of the weights at the start.
        seed: of requests that bring none.
        token_delay_s: time before each token.
        slow_s: how late a reply is that is slow by fault.
        context: prompt and reply together, in tokens.
        max_running: replies on their way at once; others wait.
    """

    def __init__(
        self,
        script: Script,
        *,
        weight_version: str,
        seed: int = 0,
        token_delay_s: float = 0.0,
        slow_s: float = 1.0,
        context: int = 1 << 20,
        max_running: int = 1 << 20,
    ) -> None:
        self.script = script
        self.weight_version = weight_version
        self.adapters: dict[str, str] = {}
        self.running: dict[str, Running] = {}
        self.served = 0
        self.context = context
        self._seed = seed
        self._token_delay_s = token_delay_s
        self._slow_s = slow_s
        self._places = asyncio.Semaphore(max_running)
        self._going = asyncio.Event()
        self._going.set()

    @property
    def paused(self) -> bool:
        """Whether replies are frozen."""
        return not self._going.is_set()

    async def generate(self, body: Mapping[str, Any], fault: FaultKind | None) -> AsyncGenerator[Json, None]:
        """Yields the reply after each token that took time, and at last the whole one.

        Raises:
            BadRequestError: the request is not of the contract's form.
        """
        request = self._admit(body, fault)
        self.running[request.rid] = request
        try:
            async with self._places:
                if fault is FaultKind.SLOW:
                    await asyncio.sleep(self._slow_s)
                while len(request.ids) < len(request.planned) and not request.aborted:
                    await self._going.wait()
                    if self._token_delay_s:
                        await asyncio.sleep(self._token_delay_s)
                        await self._going.wait()
                    if request.aborted:
                        break
                    request.add(self._name(request))
                    if self._token_delay_s and len(request.ids) < len(request.planned):
                        yield self._reply(request, None)
            yield self._reply(request, request.finish)
        finally:
            if self.running.get(request.rid) is request:
                del self.running[request.rid]
            self.served += 1

    def abort(self, body: Mapping[str, Any]) -> Json:
        """Ends one request, by a prefix of its id, or all."""
        rid, everything = str(body.get("rid") or ""), bool(body.get("abort_all"))
        if not rid and not everything:
            raise BadRequestError("send a rid or abort_all")
        hit = [r for r in self.running.values() if everything or r.rid.startswith(rid)]
        for request in hit:
            request.abort()
            del self.running[request.rid]
        return {"success": True, "aborted": len(hit)}

    def load_adapter(self, body: Mapping[str, Any]) -> Json:
        """Serves a PEFT folder under a fresh name."""
        name, folder = str(body.get("lora_name") or ""), Path(str(body.get("lora_path") or ""))
        if not name or name in self.adapters:
            raise BadRequestError(f"adapter {name!r} is already loaded: give each version a fresh name")
        if not (folder / "adapter_config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise BadRequestError(f"{folder} is no adapter folder")
        crash_point("engine.load.before")
        self.adapters[name] = str(folder)
        crash_point("engine.load.after")
        return {"success": True, "error_message": "", "loaded_adapters": sorted(self.adapters)}

    def unload_adapter(self, body: Mapping[str, Any]) -> Json:
        """Stops serving an adapter to new requests; those running end with it."""
        name = str(body.get("lora_name") or "")
        if self.adapters.pop(name, None) is None:
            raise BadRequestError(f"adapter {name!r} is not loaded")
        return {"success": True, "error_message": "", "loaded_adapters": sorted(self.adapters)}

    def update_weights(self, body: Mapping[str, Any]) -> Json:
        """Replaces the server's own weights."""
        folder = Path(str(body.get("model_path") or ""))
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise BadRequestError(f"{folder} is no model folder")
        crash_point("engine.load.before")
        if body.get("abort_all_requests"):
            self.abort({"abort_all": True})
        self.weight_version = str(body.get("weight_version") or self.weight_version)
        crash_point("engine.load.after")
        return {"success": True, "message": "weights replaced", "num_paused_requests": len(self.running)}

    def pause(self, body: Mapping[str, Any]) -> Json:
        """Freezes replies; mode `abort`, the default, ends them first."""
        mode = str(body.get("mode") or "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise BadRequestError(f"mode {mode!r} is unknown: abort, retract or in_place")
        if mode == "abort":
            self.abort({"abort_all": True})
        self._going.clear()
        return {"status": "ok", "message": f"paused ({mode})"}

    def resume(self) -> Json:
        """Goes on."""
        self._going.set()
        return {"status": "ok", "message": "continued"}

    def _admit(self, body: Mapping[str, Any], fault: FaultKind | None) -> Running:
        unknown = sorted(set(body) - _KNOWN_FIELDS)
        if unknown:
            raise BadRequestError(f"{unknown[0]}: no such field")
        prompt, params = body.get("input_ids"), cast(Mapping[str, Any], body.get("sampling_params") or {})
        if not isinstance(prompt, list) or not prompt or not all(isinstance(i, int) for i in cast(list[Any], prompt)):
            raise BadRequestError("input_ids: send the ids of one prompt")
        ids = cast(list[int], prompt)
        limit = int(params.get("max_new_tokens", 128))
        if len(ids) + limit > self.context:
            raise BadRequestError(f"{len(ids)} prompt tokens and {limit} new ones exceed the context of {self.context}")
        rid = str(body.get("rid") or f"request-{self.served}-{len(self.running)}")
        if rid in self.running:
            raise BadRequestError(f"request id {rid} is in use")
        adapter = body.get("lora_path")
        if adapter is not None and adapter not in self.adapters:
            raise BadRequestError(f"adapter {adapter!r} is not loaded")
        planned, finish = self._plan(ids, params, limit, fault)
        return Running(
            rid=rid, prompt=ids, planned=planned, finish=finish, adapter=adapter, fault=fault, body=dict(body)
        )

    def _plan(
        self, prompt: list[int], params: Mapping[str, Any], limit: int, fault: FaultKind | None
    ) -> tuple[tuple[int, ...], Json]:
        """The whole reply and how it ends."""
        if limit == 0:
            return (), {"type": "length", "length": 0}
        seed = params.get("sampling_seed")
        planned = self.script.reply(prompt, self._seed if seed is None else int(seed))
        stops = set(cast(list[int], params.get("stop_token_ids") or []))
        stops |= set(self.script.stop_token_ids)
        matched = next((i for i, token in enumerate(planned) if token in stops), None)
        finish: Json = {"type": "stop", "matched": None if matched is None else planned[matched]}
        if matched is not None:
            planned = planned[: matched + 1]
        if len(planned) > limit:
            planned, finish = planned[:limit], {"type": "length", "length": limit}
        half = planned[: len(planned) // 2]
        match fault:
            case FaultKind.CUT:
                return half, {"type": "length", "length": len(half)}
            case FaultKind.ABORT:
                return half, _ABORTED
            case FaultKind.EMPTY:
                return (), finish
            case _:
                return planned, finish

    def _name(self, request: Running) -> str:
        if request.fault is FaultKind.WRONG_VERSION:
            return _WRONG_VERSION
        return request.adapter or self.weight_version

    def _reply(self, request: Running, finish: Json | None) -> Json:
        body = request.body
        meta: Json = {
            "id": request.rid,
            "finish_reason": finish,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.ids),
            "cached_tokens": 0,
            "weight_version": self._name(request),
            "weight_versions": [dict(span) for span in request.spans],
        }
        if body.get("return_logprob"):
            meta |= self._logprobs(request)
        matched = finish is not None and finish.get("matched") is not None
        text = self.script.text(request.ids[:-1] if matched else request.ids)
        return {"text": text, "output_ids": list(request.ids), "meta_info": meta}

    def _logprobs(self, request: Running) -> Json:
        whole = [*request.prompt, *request.ids]
        values: list[float] = self.script.logprobs(whole, len(request.prompt))
        if request.fault is FaultKind.NAN_LOGPROBS and values:
            values[len(values) // 2] = float("nan")
        start, top = int(request.body.get("logprob_start_len", -1)), int(request.body.get("top_logprobs_num") or 0)
        start = len(request.prompt) - 1 if start < 0 else start
        scores = self.script.logprobs(request.prompt, start + 1)
        scored = request.prompt[start + 1 :]
        fields: Json = {
            "output_token_logprobs": [[v, t, None] for v, t in zip(values, request.ids, strict=True)],
            "input_token_logprobs": [
                [None, request.prompt[start], None],
                *([v, t, None] for v, t in zip(scores, scored, strict=True)),
            ],
        }
        if top:
            fields["input_top_logprobs"] = [None, *(_top(v, t, top) for v, t in zip(scores, scored, strict=True))]
            fields["output_top_logprobs"] = [_top(v, t, top) for v, t in zip(values, request.ids, strict=True)]
        return fields


def _top(value: float, token: int, k: int) -> list[list[object]]:
    """The token first, then its neighbours, each half as likely as the one before."""
    return [[value - 0.7 * i, token + i, None] for i in range(k)]
