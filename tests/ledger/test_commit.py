"""Group commit: callers share commits, fail alone, and what returned is on disk."""

import asyncio

import pytest

from claw_train.errors import LedgerError
from claw_train.ledger import Ledger
from claw_train.ledger.export import iter_turns
from tests.ledger.values import group, state, turn


def test_concurrent_captures_share_commits(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            before = ledger.commits
            await asyncio.gather(*(ledger.capture(turn(f"s{i}")) for i in range(64)))
            assert 1 <= ledger.commits - before <= 16
            assert (await ledger.audit()).captured == 64

    asyncio.run(go())


def test_a_returned_capture_is_visible_outside(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            for i in range(5):
                await ledger.capture(turn(f"s{i}"))
                assert len(list(iter_turns(run_dir))) == i + 1

    asyncio.run(go())


def test_one_bad_call_fails_alone(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            calls = [ledger.capture(turn(f"s{i // 2}")) for i in range(20)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(r) for r in results] == [type(None), LedgerError] * 10
            assert (await ledger.audit()).captured == 10

    asyncio.run(go())


def test_a_cancelled_call_still_happens(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            call = asyncio.create_task(ledger.capture(turn()))
            await asyncio.sleep(0)  # the call has been submitted
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await ledger.bind(turn().id, state())
            assert (await ledger.audit()).bound == 1

    asyncio.run(go())


def test_closing_commits_what_was_submitted(run_dir):
    async def go() -> None:
        ledger = Ledger.open(run_dir, create=True)
        await ledger.add_group(group())
        calls = [asyncio.create_task(ledger.capture(turn(f"s{i}"))) for i in range(10)]
        await asyncio.sleep(0)
        await ledger.aclose()
        await asyncio.gather(*calls)
        with pytest.raises(LedgerError, match="closed"):
            await ledger.capture(turn("late"))
        assert ledger.counts().captured == 10

    asyncio.run(go())
    assert len(list(iter_turns(run_dir))) == 10


def test_a_defect_inside_does_not_hang_the_callers(run_dir, monkeypatch):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            monkeypatch.setenv("CLAW_CRASH_AT", "no.such.point")  # makes the writer raise between write and commit
            with pytest.raises(LedgerError, match="no crash point"):
                await ledger.capture(turn())
            monkeypatch.delenv("CLAW_CRASH_AT")
            assert ledger.counts().total == 0
            await ledger.capture(turn())
            assert (await ledger.audit()).total == 1

    asyncio.run(go())
