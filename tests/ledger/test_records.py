"""The JSON lines: all that happened, once, in the file of the version that sampled the reply."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from claw_train.errors import DiskError
from claw_train.ledger import DropReason, Ledger
from claw_train.ledger.records import RecordWriter
from claw_train.types import TurnKind, Version
from tests.ledger.test_disk import file_size_limit
from tests.ledger.values import FAILED, group, scored, state, trajectory, turn

OLD, NEW = Version("main", 0, 3), Version("main", 0, 4)


def decode(ids: tuple[int, ...]) -> str:
    return " ".join(map(str, ids))


def lines(run_dir: Path) -> dict[str, list[dict]]:
    files = sorted((run_dir / "records").glob("*.jsonl"))
    return {path.name: [json.loads(line) for line in path.read_bytes().splitlines()] for path in files}


def content(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run_dir / "records").glob("*.jsonl")}


def catch_up(run_dir: Path) -> None:
    writer = RecordWriter(run_dir, decode)
    writer.catch_up()
    writer.close()


async def episode(ledger: Ledger, session: str, version: Version) -> None:
    first = turn(session, prompt=(1, 2), reply=(3,), version=version)
    second = turn(session, 1, prompt=(1, 2, 3, 4), reply=(5,), version=version)
    for one in (first, second):
        await ledger.capture(one)
        await ledger.bind(one.id, state(f"next {one.id.index}"))
        await ledger.judge(scored(one, FAILED))
    await ledger.end_trajectory(trajectory(session, (first.id, second.id)))
    await ledger.drop([second.id], DropReason.JUDGE_FAILED)


def play(run_dir: Path) -> None:
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group(size=3))
            for session, version in (("a", OLD), ("b", NEW), ("c", OLD)):
                await episode(ledger, session, version)

    asyncio.run(go())


@pytest.fixture
def played(run_dir: Path) -> Path:
    play(run_dir)
    return run_dir


def test_an_event_goes_to_the_version_that_sampled(played):
    catch_up(played)
    sessions = {name: {line["session"] for line in rows} for name, rows in lines(played).items()}
    assert sessions == {"main-0-3.jsonl": {"a", "c"}, "main-0-4.jsonl": {"b"}}


def test_a_file_tells_the_whole_story(played):
    catch_up(played)
    story = lines(played)["main-0-4.jsonl"]
    assert [line["event"] for line in story] == [
        *("captured", "bound", "judged") * 2,
        "trajectory",
        "dropped",
    ]
    first, second = story[0], story[3]
    assert (first["prompt"], first["reply"], first["continues"]) == ("1 2", "ls -la", None)
    assert (second["prompt"], second["continues"]) == ("4", first["turn"])
    assert story[1]["next_state"]["text"] == "next 0"
    assert story[1]["next_state"]["class"] == "TerminalState"
    assert (story[2]["reward"]["status"], story[2]["hints"]) == ("infra_error", ["look first"])
    assert story[6]["turns"] == [first["turn"], second["turn"]]
    assert (story[7]["turn"], story[7]["reason"]) == (second["turn"], "judge_failed")


def test_a_prompt_that_is_no_continuation_is_written_whole(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            await ledger.capture(turn(prompt=(1, 2), reply=(3,)))
            await ledger.capture(turn(index=1, prompt=(1, 2, 9), reply=(5,)))

    asyncio.run(go())
    catch_up(run_dir)
    assert [line["prompt"] for line in lines(run_dir)["main-0-3.jsonl"]] == ["1 2", "1 2 9"]


def test_turns_without_a_token_and_empty_episodes_are_recorded_too(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            await ledger.capture(turn(reply=()))
            await ledger.capture(turn("e", kind=TurnKind.EVAL))
            await ledger.end_trajectory(trajectory("g0-1", (), failed=True))

    asyncio.run(go())
    catch_up(run_dir)
    assert {name: [line["event"] for line in rows] for name, rows in lines(run_dir).items()} == {
        "main-0-3.jsonl": ["eval"],
        "unversioned.jsonl": ["captured", "trajectory"],
    }


def test_catching_up_while_the_run_goes_on_equals_once_at_the_end(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            writer = RecordWriter(run_dir, decode)
            await ledger.add_group(group(size=2))
            for session, version in (("a", OLD), ("b", NEW)):
                await episode(ledger, session, version)
                assert writer.catch_up() > 0
                assert writer.catch_up() == 0
            writer.close()

    asyncio.run(go())
    live = content(run_dir)
    shutil.rmtree(run_dir / "records")
    catch_up(run_dir)
    assert content(run_dir) == live


@pytest.mark.parametrize("torn", [1, 40, 400, 900])
def test_a_torn_file_is_mended(played, torn):
    """Kill between the write of one file and the next, and in the middle of a line, with the cursor not yet moved."""
    catch_up(played)
    whole = content(played)
    (played / "records" / "cursor").write_text("2\n")
    path = played / "records" / "main-0-3.jsonl"
    path.write_bytes(whole[path.name][:-torn])
    catch_up(played)
    assert content(played) == whole


@pytest.mark.parametrize("cursor", ["", "0\n", "rubbish"])
def test_a_lost_cursor_repeats_nothing(played, cursor):
    catch_up(played)
    whole = content(played)
    (played / "records" / "cursor").write_text(cursor)
    catch_up(played)
    assert content(played) == whole


def test_a_full_disk_costs_no_line(played):
    writer = RecordWriter(played, decode)
    with file_size_limit(700), pytest.raises(DiskError, match="records"):
        writer.catch_up()
    writer.catch_up()
    writer.close()
    mended = content(played)
    for path in (played / "records").iterdir():
        path.unlink()
    catch_up(played)
    assert mended == content(played)


def test_erased_sessions_leave_the_files(played):
    catch_up(played)

    async def go() -> None:
        async with Ledger.open(played, create=False) as ledger:
            await ledger.erase("a")

    before = lines(played)["main-0-3.jsonl"]
    asyncio.run(go())
    catch_up(played)
    after = lines(played)["main-0-3.jsonl"]
    assert [line["seq"] for line in after[: len(before)]] == [line["seq"] for line in before]
    gone = [line for line in after if line["session"] == "a"]
    assert all(set(line) == {"seq", "at", "event", "turn", "session", "erased"} for line in gone)
    assert [line for line in after if line["session"] == "c"] == [line for line in before if line["session"] == "c"]


def test_files_are_for_the_owner_only(played):
    catch_up(played)
    assert {path.stat().st_mode & 0o777 for path in (played / "records").iterdir()} == {0o600}


def test_a_version_cannot_leave_the_folder(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            await ledger.capture(turn(version=Version("../../evil", 0, 1)))

    asyncio.run(go())
    catch_up(run_dir)
    assert list(lines(run_dir)) == ["..%2F..%2Fevil-0-1.jsonl"]
