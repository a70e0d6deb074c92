"""The records are written behind the ledger by one thread at a time, to the last event."""

import asyncio
import threading

import pytest

from claw_train.run import follow


class Writer:
    """Counts the threads inside `catch_up`; the first call waits to be let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.inside = 0
        self.most = 0
        self.calls: list[str] = []

    def catch_up(self) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        if not self.entered.is_set():
            self.entered.set()
            assert self.let_go.wait(20)
        self.calls.append("catch_up")
        self.inside -= 1
        return 0

    def close(self) -> None:
        self.calls.append("close")


def test_a_cancelled_round_ends_before_the_last_one():
    async def run() -> Writer:
        writer = Writer()
        task = asyncio.create_task(follow(writer, every_s=0.01))  # type: ignore[arg-type]
        await asyncio.to_thread(writer.entered.wait, 20)
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, writer.let_go.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        return writer

    writer = asyncio.run(run())
    assert writer.most == 1
    assert writer.calls == ["catch_up", "catch_up", "close"]
