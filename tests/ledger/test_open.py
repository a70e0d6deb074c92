"""Opening: one process a run folder, and files that cannot be used are refused with the fix."""

import asyncio
import os
import signal
import sqlite3

import pytest

from claw_train.errors import DiskError, LedgerError, RunInUseError
from claw_train.ledger import Ledger
from claw_train.ledger.schema import FILE_NAME, SCHEMA_VERSION
from tests.ledger.values import group, turn


def opened(folder, *, create: bool) -> None:
    asyncio.run(Ledger.open(folder, create=create).aclose())


def test_a_second_process_is_told_who_holds_the_folder(workload, run_dir):
    pid = workload.start(run_dir, work="hold", kill_after=1)["pid"]
    with pytest.raises(RunInUseError, match=f"process {pid}"):
        Ledger.open(run_dir, create=False)
    assert workload.say("")["exit"] == -signal.SIGKILL
    opened(run_dir, create=False)  # kill -9 released it


def test_a_second_ledger_in_one_process_is_refused(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True):
            with pytest.raises(RunInUseError, match=str(os.getpid())):
                Ledger.open(run_dir, create=False)

    asyncio.run(go())


def test_a_folder_with_a_run_is_not_created_again(run_dir):
    opened(run_dir, create=True)
    with pytest.raises(LedgerError, match="resume="):
        Ledger.open(run_dir, create=True)
    opened(run_dir, create=False)


def test_a_folder_without_a_run_is_not_resumed(run_dir):
    run_dir.mkdir()
    with pytest.raises(LedgerError, match="no ledger"):
        Ledger.open(run_dir, create=False)


def test_a_newer_ledger_is_refused(run_dir):
    opened(run_dir, create=True)
    connection = sqlite3.connect(run_dir / FILE_NAME)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(LedgerError, match="update claw-rl"):
        Ledger.open(run_dir, create=False)


@pytest.mark.parametrize("content", [b"", b"not a database at all, whatever it was" * 40])
def test_a_foreign_file_is_refused(run_dir, content):
    run_dir.mkdir()
    (run_dir / FILE_NAME).write_bytes(content)
    with pytest.raises(LedgerError, match=FILE_NAME) as caught:
        Ledger.open(run_dir, create=False)
    assert not isinstance(caught.value, DiskError)
    assert (run_dir / FILE_NAME).read_bytes() == content


def test_a_refused_opening_releases_the_folder(run_dir):
    run_dir.mkdir()
    for _ in range(2):
        with pytest.raises(LedgerError, match="no ledger"):
            Ledger.open(run_dir, create=False)
    opened(run_dir, create=True)


def test_a_run_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(DiskError, match="run"):
        Ledger.open(tmp_path / "run", create=True)


def test_an_opening_is_counted(run_dir):
    async def go(create: bool) -> int:
        async with Ledger.open(run_dir, create=create) as ledger:
            return ledger.incarnation

    assert [asyncio.run(go(create)) for create in (True, False, False)] == [1, 2, 3]


def test_sums_survive_a_reopening(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            await ledger.capture(turn())
            before = ledger.counts()
        async with Ledger.open(run_dir, create=False) as ledger:
            assert ledger.counts() == before

    asyncio.run(go())


def test_a_tampered_state_fails_the_audit(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            await ledger.capture(turn())
        with sqlite3.connect(run_dir / FILE_NAME) as connection:
            connection.execute("UPDATE turns SET state = 'bound'")
        connection.close()
        async with Ledger.open(run_dir, create=False) as ledger:
            with pytest.raises(LedgerError, match="last event is captured"):
                await ledger.audit()

    asyncio.run(go())


def test_a_row_that_vanished_breaks_the_sum(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            await ledger.capture(turn())
        with sqlite3.connect(run_dir / FILE_NAME) as connection:
            connection.execute("DELETE FROM turns")
        connection.close()
        with pytest.raises(LedgerError, match="sum"):
            Ledger.open(run_dir, create=False)

    asyncio.run(go())
