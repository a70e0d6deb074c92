"""A thread that one environment lives on, and a count of those that never came back.

In: blocking calls. Out: asyncio futures. The threads are daemons: an environment that hangs for ever must not keep the
process alive. Knows nothing of Gymnasium.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from claw_envs.errors import ClawEnvError, SandboxError
from claw_train.errors import ClawTrainError

T = TypeVar("T")

_MAX_CALLS = 4
"""A call that was given up, the one after it, closing and the end: more than one host ever has open."""


class TooManyStuck(SandboxError):
    """So many environments of a stream hang that no further one is started."""


class EnvThread:
    """Carries out calls one after another. The thread starts with the first one."""

    def __init__(self, name: str) -> None:
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_CALLS)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._ended = False

    @property
    def usable(self) -> bool:
        """True from the first call until `end`."""
        return self.alive and not self._ended

    @property
    def alive(self) -> bool:
        """True from the first call until the thread has ended."""
        return self._thread.is_alive()

    def submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """The future result of `work`; cancelling it leaves the thread as it is.

        Raises:
            SandboxError: too many calls wait already, or the thread was ended.
        """
        if self._ended:
            raise SandboxError(f"{self._thread.name}: closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._put(lambda: _carry_out(work, future, loop))
        if self._thread.ident is None:
            self._thread.start()
        return future

    def end(self, last: Callable[[], object] | None = None) -> None:
        """Ends the thread after the calls that wait and `last`; returns at once."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(SandboxError):
            if last is not None:
                self._put(lambda: _ignore(last))
            self._put(None)

    def _put(self, call: Callable[[], None] | None) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise SandboxError(f"{self._thread.name}: {_MAX_CALLS} calls wait already") from None

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _ignore(last: Callable[[], object]) -> None:
    with contextlib.suppress(ClawEnvError, ClawTrainError):
        last()


def _carry_out(work: Callable[[], T], future: "asyncio.Future[T]", loop: asyncio.AbstractEventLoop) -> None:
    """Runs on the thread. `work` raises our own errors only; anything else ends the thread."""
    settle: Callable[[Any], None]
    answer: Any
    try:
        settle, answer = future.set_result, work()
    except (ClawEnvError, ClawTrainError) as error:
        settle, answer = future.set_exception, error

    def deliver() -> None:
        if not future.done():  # cancelled: the caller has given up
            settle(answer)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(deliver)


class LostThreads:
    """Threads of one stream whose call never came back."""

    def __init__(self, stream: str, limit: int = 8) -> None:
        self._stream = stream
        self._limit = limit
        self._threads: list[EnvThread] = []

    def add(self, thread: EnvThread) -> None:
        """Counts a thread until it ends."""
        self._threads.append(thread)

    def check(self) -> None:
        """Refuses to go on when too many are stuck at once.

        Raises:
            TooManyStuck: `limit` threads have not ended.
        """
        self._threads = [thread for thread in self._threads if thread.alive]
        if len(self._threads) >= self._limit:
            raise TooManyStuck(
                f"streams.{self._stream}: {len(self._threads)} environments hang and cannot be ended; no more are made"
            )
