"""Takes over weights and adapters while the engine serves.

In: a folder. Out: the scheduler serves what it holds. Files are read and arranged beside the running passes; only the
exchange itself happens between two of them. One change at a time.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from claw_train.crash import crash_point
from claw_train.engine.checkpoint import Adapter, Weights, load_adapter, load_weights
from claw_train.engine.scheduler import Scheduler
from claw_train.errors import EngineError, ModelError, boundary

T = TypeVar("T")

_MAX_ADAPTERS = 64
_NICE = 5


def _yield_to_passes() -> None:
    """Makes the reading thread modest: one core at most, and less of it than a thread that computes a pass."""
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):  # a thread's own priority is a Linux notion
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class Updates:
    """Changes of what `scheduler` serves."""

    def __init__(self, scheduler: Scheduler, *, dtype: torch.dtype, device: torch.device, max_rank: int) -> None:
        self._scheduler, self._dtype, self._device, self._max_rank = scheduler, dtype, device, max_rank
        self._lock = asyncio.Lock()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader", initializer=_yield_to_passes)

    async def _read(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, function)

    @property
    def names(self) -> list[str]:
        """Of the adapters served."""
        return sorted(self._scheduler.served.adapters)

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serves a PEFT folder under `name`.

        Raises:
            ModelError: the name is taken, too many adapters are served, or the folder is unfit.
            EngineError: reading failed in an unforeseen way.
        """
        async with self._lock:
            if name in self._scheduler.served.adapters:
                raise ModelError(f"adapter {name!r} is already loaded: give each version a fresh name")
            if len(self.names) >= _MAX_ADAPTERS:
                raise ModelError(f"{_MAX_ADAPTERS} adapters are loaded: unload one first")
            adapter = await self._read(lambda: self._read_adapter(name, folder))

            def exchange() -> None:
                crash_point("engine.load.before")
                self._scheduler.add_adapter(adapter)
                crash_point("engine.load.after")

            await asyncio.wrap_future(self._scheduler.call(exchange))

    def _read_adapter(self, name: str, folder: Path) -> Adapter:
        with boundary(EngineError, f"{folder} cannot be loaded"), torch.inference_mode():
            return load_adapter(
                name,
                folder,
                self._scheduler.spec,
                max_rank=self._max_rank,
                dtype=self._dtype,
                device=self._device,
            )

    async def unload_adapter(self, name: str) -> None:
        """Stops serving an adapter to new requests; running ones end with it.

        Raises:
            ModelError: no such adapter.
        """
        async with self._lock:
            if name not in self._scheduler.served.adapters:
                raise ModelError(f"adapter {name!r} is not loaded")
            await asyncio.wrap_future(self._scheduler.call(lambda: self._scheduler.remove_adapter(name)))

    async def replace_weights(self, folder: Path, version: str | None, *, abort: bool) -> None:
        """Serves the model in `folder` from the next pass on; None keeps the version's name.

        Raises:
            ModelError: the folder is of another model or damaged; the old weights stay.
            EngineError: reading failed in an unforeseen way.
        """
        async with self._lock:
            weights = await self._read(lambda: self._read_weights(folder))

            def exchange() -> None:
                crash_point("engine.load.before")
                if abort:
                    self._scheduler.abort(lambda _: True, "aborted by update_weights_from_disk")
                self._scheduler.replace_weights(weights, version or self._scheduler.served.version)
                crash_point("engine.load.after")

            await asyncio.wrap_future(self._scheduler.call(exchange))

    def _read_weights(self, folder: Path) -> Weights:
        with boundary(EngineError, f"{folder} cannot be loaded"), torch.inference_mode():
            return load_weights(folder, self._scheduler.spec, self._dtype, self._device)
