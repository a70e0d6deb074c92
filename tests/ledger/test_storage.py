"""What is read back equals what was captured, shared prefixes are stored once, and erased content is gone."""

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from claw_envs.types import FailureKind, NextState, Role
from claw_train.errors import LedgerError
from claw_train.ledger import Ledger
from claw_train.ledger.export import iter_turns, reader
from claw_train.ledger.rows import shared_length
from claw_train.types import Completion, Reward, RewardStatus, ScoredTurn, Turn, TurnKind, Version
from tests.ledger.values import group, scored, state, turn

IDS = st.lists(st.integers(0, 3), max_size=6).map(tuple)


async def store(folder: Path, turns: list[Turn]) -> None:
    async with Ledger.open(folder, create=True) as ledger:
        await ledger.add_group(group())
        for one in turns:
            await ledger.capture(one)


def stored(folder: Path) -> list[Turn | None]:
    return [t.turn for t in iter_turns(folder)]


@st.composite
def sessions(draw: st.DrawFn) -> list[Turn]:
    """Sessions whose prompts extend, cut or edit what came before, from a shared start."""
    turns: list[Turn] = []
    for session in ("a", "b"):
        context = draw(IDS)
        for index in range(draw(st.integers(1, 4))):
            kept = context[: draw(st.integers(0, len(context)))] if draw(st.booleans()) else context
            one = turn(session, index, prompt=(9, *kept, *draw(IDS)), reply=draw(IDS))
            context = one.prompt_ids[1:] + one.completion.token_ids
            turns.append(one)
    return turns


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=sessions())
def test_turns_come_back_as_they_were(run_dir, turns):
    folder = Path(tempfile.mkdtemp(dir=run_dir.parent))
    asyncio.run(store(folder, turns))
    assert stored(folder) == turns


def test_every_field_comes_back(run_dir):
    odd = NextState(
        role=Role.USER, text="naïve \x00 \u2028 🦀", valid=False, failure_kind=FailureKind.DEADLINE, newly_passed=()
    )
    completion = Completion(
        token_ids=(0, 2**32 - 1, 7),
        logprobs=(0.1 + 0.2, -1.7976931348623157e308, -5e-324),
        versions=(Version("a-b", 1, 2), Version("a-b", 1, 2), Version("a-b", 1, 3)),
        finish_reason="length",
        sampling=turn().completion.sampling,
        text="half a character \ud83e",
    )
    one = replace(turn(), completion=completion, kind=TurnKind.EVAL, group_id="unknown")
    verdict = Reward(
        value=None, status=RewardStatus.ABSTAIN, source="llm", votes=(1, -1), judge_version="7", reason="é"
    )

    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.capture(one)
            await ledger.bind(one.id, odd)
            await ledger.judge(ScoredTurn(turn=one, reward=verdict, hints=("a", "", "ü")))

    asyncio.run(go())
    (back,) = iter_turns(run_dir)
    assert back.turn == replace(one, next_state=odd)
    assert (back.reward, back.hints) == (verdict, ("a", "", "ü"))


def test_a_turn_with_its_next_state_is_bound_at_once(run_dir):
    one = replace(turn(), next_state=state())
    asyncio.run(store(run_dir, [one]))
    assert stored(run_dir) == [one]
    assert next(iter_turns(run_dir)).state == "bound"


@pytest.mark.parametrize("ids", [(-1,), (2**32,)])
def test_ids_that_cannot_be_stored_are_refused(run_dir, ids):
    with pytest.raises(LedgerError, match="cannot be stored"):
        asyncio.run(store(run_dir, [turn(reply=ids)]))


def test_a_next_state_that_is_not_unicode_is_refused(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            await ledger.capture(turn())
            with pytest.raises(LedgerError, match="cannot be stored"):
                await ledger.bind(turn().id, state("\ud83e"))
            assert (await ledger.audit()).captured == 1

    asyncio.run(go())


def stored_ids(folder: Path) -> int:
    connection = reader(folder)
    query = "SELECT (SELECT sum(length(ids)) FROM prompts), (SELECT sum(length(suffix) + length(reply)) FROM turns)"
    prompts, rest = connection.execute(query).fetchone()
    connection.close()
    return (prompts + rest) // 4


def test_a_growing_session_is_stored_once(run_dir):
    turns: list[Turn] = []
    prompt = tuple(range(100))
    for index in range(20):
        turns.append(turn("a", index, prompt=prompt, reply=(1,) * 10))
        prompt = prompt + (1,) * 10 + (2,) * 5
    asyncio.run(store(run_dir, turns))
    assert stored_ids(run_dir) == 100 + 20 * 10 + 19 * 5
    assert stored(run_dir) == turns


def test_a_group_stores_its_first_prompt_once(run_dir):
    turns = [turn(f"s{i}", prompt=tuple(range(500)), reply=(i,)) for i in range(8)]
    asyncio.run(store(run_dir, turns))
    assert stored_ids(run_dir) == 500 + 8


def test_a_long_session_is_read_without_deep_recursion(run_dir):
    turns = [turn("a", index, prompt=(5,) * (1 + 2 * index), reply=(5,)) for index in range(1500)]

    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            await asyncio.gather(*(ledger.capture(one) for one in turns))

    asyncio.run(go())
    last = list(iter_turns(run_dir))[-1].turn
    assert last == turns[-1]


@given(a=IDS, b=IDS)
def test_shared_length_is_the_longest_common_prefix(a, b):
    n = shared_length(a, b)
    assert a[:n] == b[:n]
    assert a[n : n + 1] != b[n : n + 1] or n == min(len(a), len(b))


def test_erased_content_is_in_no_file(run_dir):
    secret = "correct horse battery"
    ids = (77001, 77002, 77003)
    needles = [secret.encode(), b"".join(i.to_bytes(4, "little") for i in ids)]

    def found() -> list[bytes]:
        content = b"".join(path.read_bytes() for path in run_dir.iterdir() if path.is_file())
        return [needle for needle in needles if needle in content]

    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            for index in range(2):
                one = turn("private", index, prompt=(1, *ids, *range(index)), reply=ids, text=secret)
                await ledger.capture(one)
                await ledger.bind(one.id, state(secret))
                await ledger.judge(scored(one))
            kept = turn("public", prompt=(1, 2))
            await ledger.capture(kept)
            assert found() == needles
            await ledger.erase("private")
            counts = await ledger.audit()
            assert (counts.total, counts.erased, counts.captured) == (1, 2, 1)
            assert found() == []

    asyncio.run(go())
    assert [t.turn is None for t in iter_turns(run_dir)] == [True, True, False]


def test_an_erased_key_is_not_used_again(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            await ledger.capture(turn())
            await ledger.erase("g0-0")
            with pytest.raises(LedgerError, match="already in the ledger"):
                await ledger.capture(turn())

    asyncio.run(go())


def test_files_are_for_the_owner_only(run_dir):
    async def go() -> None:
        async with Ledger.open(run_dir, create=True) as ledger:
            await ledger.add_group(group())
            assert {path.stat().st_mode & 0o777 for path in run_dir.iterdir()} == {0o600}
            assert run_dir.stat().st_mode & 0o777 == 0o700

    asyncio.run(go())
