"""A bounded set of environment hosts for one stream. A host that never answered is replaced, not reused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from claw_train.config import StreamConfig
from claw_train.hosting.host import EnvHost
from claw_train.hosting.thread import LostThreads


class HostPool:
    """At most `max_concurrent` hosts, made when first needed."""

    def __init__(self, stream: StreamConfig) -> None:
        self._stream = stream
        self._lost_threads = LostThreads(stream.name)
        self._places = asyncio.Semaphore(stream.max_concurrent)
        self._idle: list[EnvHost] = []
        self._busy: set[EnvHost] = set()
        self._clearing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def host(self) -> AsyncIterator[EnvHost]:
        """Waits for a place, lends a host, takes it back."""
        async with self._places:
            host = self._idle.pop() if self._idle else EnvHost(self._stream, self._lost_threads)
            self._busy.add(host)
            interrupted = True
            try:
                yield host
                interrupted = False
            finally:
                self._busy.discard(host)
                if host.lost or interrupted:  # its thread may still be inside a call: clear it away beside us
                    task = asyncio.create_task(host.close())
                    self._clearing.add(task)
                    task.add_done_callback(self._clearing.discard)
                else:
                    self._idle.append(host)

    async def close(self) -> None:
        """Closes every host. Call after the episodes have ended or were cancelled."""
        hosts, self._idle = [*self._idle, *self._busy], []
        await asyncio.gather(*self._clearing, *(host.close() for host in hosts))
