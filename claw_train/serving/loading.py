"""Gives an engine server new weights without losing a request, and makes sure it took them.

In: a `WeightRef`. Out: the server answers with these weights, or an `EngineError`. An adapter is added under a
name of its own, so running requests end on theirs; full weights replace the old ones between two decode steps. Knows
neither requests nor who uses which version.
"""

import asyncio
import hashlib
import logging
from pathlib import Path
from typing import Any

from claw_train.errors import EngineError
from claw_train.serving.transport import Lost, Refused, Transient, Transport
from claw_train.serving.versions import served_name
from claw_train.serving.wire import weight_name
from claw_train.types import WeightKind, WeightRef

logger = logging.getLogger(__name__)

_CONTROL_TIMEOUT_S = 30.0
_LOAD_TIMEOUT_S = 600.0
_CONTINUE_ATTEMPTS = 6
_CONTINUE_WAIT_S = 0.5
_PROBE_IDS = (1,)


class Loader:
    """Loads into one server.

    Args:
        transport: to the server.
        pause: freeze running requests while full weights are read; stock servers would otherwise wait for their end.
        stock: the server names no adapters in its replies.
    """

    def __init__(self, transport: Transport, *, pause: bool, stock: bool) -> None:
        self._transport = transport
        self._pause = pause
        self._stock = stock
        self._probes = 0
        self._resuming: set[asyncio.Task[None]] = set()

    async def load(self, ref: WeightRef) -> None:
        """Loads and verifies; loading what is loaded already changes nothing.

        Raises:
            EngineError: refused, damaged on disk, or other weights answer; `Transient` when it may be tried again.
        """
        if ref.kind is WeightKind.LORA:
            await asyncio.to_thread(_verify_checksum, ref)
            await self._load_adapter(ref)
        else:
            await self._replace_weights(ref)
        if not await self.holds(ref):
            raise EngineError(f"the engine was given {ref.version} and answers with other weights")

    async def holds(self, ref: WeightRef) -> bool:
        """Whether one sampled token comes from these weights.

        Raises:
            Transient: no answer.
        """
        self._probes += 1
        adapter = served_name(ref) if ref.kind is WeightKind.LORA else None
        body: dict[str, Any] = {
            "rid": f"probe/{ref.version}/{self._probes};",
            "input_ids": list(_PROBE_IDS),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "stream": False,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        try:
            reply = await self._post("/generate", body)
        except Refused:
            return False
        return weight_name(reply) == served_name(ref) or (adapter is not None and self._stock)

    async def unload(self, name: str) -> None:
        """Takes an adapter away; a failure costs the server some memory and is logged."""
        try:
            await self._post("/unload_lora_adapter", {"lora_name": name})
        except EngineError as error:
            logger.warning("adapter %s stays loaded: %s", name, error)

    async def _load_adapter(self, ref: WeightRef) -> None:
        name = served_name(ref)
        body = {"lora_name": name, "lora_path": ref.path, "pinned": False}
        try:
            reply = await self._post("/load_lora_adapter", body, timeout_s=_LOAD_TIMEOUT_S)
        except Refused as error:
            # an earlier attempt whose answer was lost, or an earlier process of this run: no name means two weights
            if "already" not in str(error):
                raise
            return
        message = str(reply.get("error_message") or reply.get("message") or "no reason given")
        if reply.get("success") is not True and "already" not in message:
            raise EngineError(f"the engine refused adapter {name}: {message}")

    async def _replace_weights(self, ref: WeightRef) -> None:
        body = {
            "model_path": ref.path,
            "weight_version": served_name(ref),
            "flush_cache": False,
            "abort_all_requests": False,
        }
        try:
            if self._pause:
                await self._post("/pause_generation", {"mode": "in_place"})
            reply = await self._post("/update_weights_from_disk", body, timeout_s=_LOAD_TIMEOUT_S)
        finally:
            if self._pause:
                # our own cancellation must not leave the server frozen
                resuming = asyncio.create_task(self._continue())
                self._resuming.add(resuming)
                resuming.add_done_callback(self._resuming.discard)
                await asyncio.shield(resuming)
        if reply.get("success") is not True:
            raise EngineError(f"the engine refused weights {ref.version}: {reply.get('message')}")

    async def _continue(self) -> None:
        for attempt in range(_CONTINUE_ATTEMPTS):
            try:
                await self._post("/continue_generation", {})
                return
            except Lost as error:
                if error.down:
                    return  # a server that is gone is not frozen
            except Transient as error:
                logger.warning("engine does not continue: %s", error)
            await asyncio.sleep(_CONTINUE_WAIT_S * 2**attempt)
        raise EngineError("the engine was paused for new weights and does not continue: restart it")

    async def _post(self, path: str, body: dict[str, Any], *, timeout_s: float = _CONTROL_TIMEOUT_S) -> dict[str, Any]:
        return await self._transport.call("POST", path, body, timeout_s=timeout_s)


def _verify_checksum(ref: WeightRef) -> None:
    """Full weights are left to the safetensors reader: hashing gigabytes would delay every swap."""
    files = sorted(Path(ref.path).glob("*.safetensors"))
    if not files:
        raise EngineError(f"{ref.path} holds no safetensors: {ref.version} cannot be loaded")
    with files[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != ref.checksum:
        raise EngineError(f"{files[0]} has sha256 {found}, {ref.version} was published with {ref.checksum}")
