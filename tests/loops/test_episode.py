"""Episodes: every turn reaches the sink, failures become invalid trajectories, nothing scores 0 by accident."""

import asyncio

import pytest

from claw_train.assembling.guards import FailureGuards
from claw_train.config import GuardConfig, StreamConfig
from claw_train.errors import EngineError, GuardError
from claw_train.hosting.episode import Episode, EpisodeSpec, derive_seed, turn_status
from claw_train.hosting.host import EnvHost
from claw_train.hosting.loop import group_stream, new_groups
from claw_train.types import Completion, RewardStatus, Sampling, TrajectoryStatus, TurnKind, TurnStatus, Version

BASE = Version("main", 0, 0)
END = 2


class SpelledEngine:
    """Replies with the given texts, one id a character and an end token; remembers what it was asked."""

    def __init__(self, *texts, error_at=None, finish="stop"):
        self.texts = list(texts)
        self.requests = []
        self.error_at = error_at
        self.finish = finish

    async def generate(self, request):
        self.requests.append(request)
        if self.error_at == len(self.requests) - 1:
            raise EngineError("down")
        text = self.texts[(len(self.requests) - 1) % len(self.texts)]
        ids = (*(ord(c) for c in text), END)
        return Completion(
            token_ids=ids,
            logprobs=tuple(-1.0 for _ in ids),
            versions=tuple(BASE for _ in ids),
            finish_reason=self.finish,
            sampling=request.sampling,
            text=text,
        )


class LetterRenderer:
    """One id a character; the reply's ids are spliced in as they are."""

    stop_token_ids = (END,)

    def start(self, messages):
        return tuple(ord(c) for m in messages for c in m["content"]) or (1,)

    def extend(self, prompt_ids, reply_ids, messages):
        return (*prompt_ids, *reply_ids, *self.start(messages))

    def decode(self, ids):
        return "".join(chr(i) for i in ids)


class ListSink:
    def __init__(self):
        self.captured_turns, self.bound_turns, self.lost_turns, self.trajectories = [], [], [], []

    async def captured(self, turn):
        self.captured_turns.append(turn)

    async def bound(self, turn):
        self.bound_turns.append(turn)

    async def lost(self, turn):
        self.lost_turns.append(turn)

    async def ended(self, trajectory):
        self.trajectories.append(trajectory)


def spec(**changes):
    fields = {
        "stream": "toy",
        "session": "g0-00",
        "group_id": "g0",
        "attempt": 0,
        "kind": TurnKind.MAIN,
        "policy": "main",
        "split": "train",
        "env_seed": 5,
        "sampling_seed": 9,
        "sampling": Sampling(temperature=0.7, max_new_tokens=8),
        "context": 1000,
    }
    return EpisodeSpec(**{**fields, **changes})


def stream(**kwargs):
    return StreamConfig(name="toy", id="tests.helpers.toy_env:Toy-v0", kwargs=kwargs, max_concurrent=2)


def play(engine, *, env=None, **changes):
    async def main():
        sink, host = ListSink(), EnvHost(stream(**(env or {})))
        try:
            return await Episode(spec(**changes), engine, LetterRenderer(), sink).run(host), sink
        finally:
            await host.close()

    return asyncio.run(main())


def test_turns_are_captured_then_bound_and_the_outcome_is_mapped_to_plus_minus_one():
    trajectory, sink = play(SpelledEngine("ab", "abcd"))
    assert trajectory.status is TrajectoryStatus.TERMINATED
    assert trajectory.outcome.value == 1.0
    assert [t.id for t in sink.captured_turns] == [t.id for t in sink.bound_turns] == list(trajectory.turn_ids)
    assert [t.next_state.length for t in sink.bound_turns] == [2, 4]
    assert play(SpelledEngine("a"))[0].outcome.value == -1.0


def test_the_next_prompt_begins_with_the_sampled_ids():
    engine = SpelledEngine("ab", "cd")
    play(engine)
    first, second = engine.requests
    prefix = (*first.prompt_ids, ord("a"), ord("b"), END)
    assert second.prompt_ids[: len(prefix)] == prefix


def test_a_broken_world_is_an_invalid_outcome_not_a_score():
    trajectory, sink = play(SpelledEngine("ab"), env={"fail_every": 1})
    assert trajectory.status is TrajectoryStatus.INFRA_ERROR
    assert trajectory.outcome.value is None
    assert trajectory.outcome.status is RewardStatus.INFRA_ERROR
    assert sink.trajectories == [trajectory]


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_environment_that_raises_is_an_invalid_outcome_and_its_traceback_is_kept(where, caplog):
    trajectory, sink = play(SpelledEngine("ab"), env={"raise_on": where})
    assert trajectory.status is TrajectoryStatus.INFRA_ERROR
    assert "KeyError" in trajectory.outcome.reason
    assert "toy_env.py" in caplog.text
    assert trajectory.turn_ids == ()
    assert len(sink.lost_turns) == (where == "step")


def test_an_engine_failure_ends_the_episode_and_keeps_the_earlier_turns():
    trajectory, sink = play(SpelledEngine("ab", error_at=1))
    assert trajectory.status is TrajectoryStatus.ENGINE_ERROR
    assert trajectory.outcome.value is None
    assert [t.index for t in trajectory.turn_ids] == [0]
    assert [t.status for t in sink.lost_turns] == [TurnStatus.ENGINE_ERROR]


@pytest.mark.parametrize(("room", "turns"), [(0, 1), (-1, 0), (10**6, 2)])
def test_an_episode_that_outgrows_the_context_is_truncated_and_ungraded(room, turns):
    first = len("Say something.Task 000: go on.")
    trajectory, sink = play(SpelledEngine("ab"), context=first + 8 + room)
    assert len(sink.bound_turns) == len(trajectory.turn_ids) == turns
    assert sink.lost_turns == []
    if turns < 2:
        assert trajectory.status is TrajectoryStatus.TRUNCATED
        assert trajectory.outcome.status is RewardStatus.UNGRADED
        assert f"of {first + 8 + room}" in trajectory.outcome.reason
    else:
        assert trajectory.outcome.value == 1.0


def test_an_episode_out_of_context_is_no_failure_of_the_engine():
    guards = FailureGuards(GuardConfig(engine_failures=1))
    cut, _ = play(SpelledEngine("ab"), context=10)
    failed, _ = play(SpelledEngine("ab", error_at=0))
    for trajectory in (cut, cut, failed):
        guards.see_trajectory(trajectory)
    with pytest.raises(GuardError, match="engine failed"):
        guards.see_trajectory(failed)


def test_an_aborted_reply_is_lost():
    trajectory, sink = play(SpelledEngine("ab", finish="abort"))
    assert trajectory.turn_ids == ()
    assert [t.status for t in sink.lost_turns] == [TurnStatus.ABORTED]


def test_members_of_a_group_share_the_task_and_differ_in_sampling():
    first, second = SpelledEngine("ab"), SpelledEngine("ab")
    play(first, sampling_seed=1)
    play(second, sampling_seed=2)
    assert first.requests[0].prompt_ids == second.requests[0].prompt_ids
    assert first.requests[0].sampling.seed != second.requests[0].sampling.seed


def test_every_setting_of_the_sampling_reaches_the_engine():
    engine = SpelledEngine("ab")
    play(engine, sampling=Sampling(temperature=0.5, top_p=0.9, top_k=7, max_new_tokens=8, stop=("END",)))
    asked = engine.requests[0].sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.stop) == (0.5, 0.9, 7, ("END",))
    assert asked.stop_token_ids == (END,)


def completion(text, ids, finish="stop"):
    return Completion(
        token_ids=tuple(ids),
        logprobs=tuple(0.0 for _ in ids),
        versions=tuple(BASE for _ in ids),
        finish_reason=finish,
        sampling=Sampling(),
        text=text,
    )


@pytest.mark.parametrize(
    ("text", "ids", "finish", "status"),
    [
        ("ls", [7, END], "stop", TurnStatus.OK),
        ("ls", [7, 8], "length", TurnStatus.CUT),
        ("ls", [7], "abort", TurnStatus.ABORTED),
        ("", [END], "stop", TurnStatus.DEGENERATE),
        ("  \n", [9, END], "stop", TurnStatus.DEGENERATE),
        ("xxx", [5] * 20, "length", TurnStatus.DEGENERATE),
        ("ababab", [5, 6] * 9, "length", TurnStatus.DEGENERATE),
        ("abcabc", [5, 6, 7] * 6, "stop", TurnStatus.DEGENERATE),
        ("abcd", [5, 6, 7, 8] * 6, "stop", TurnStatus.OK),
        ("short", [5, 5, 5], "stop", TurnStatus.OK),
    ],
)
def test_status_of_a_reply(text, ids, finish, status):
    assert turn_status(completion(text, ids, finish), (END,)) is status


def test_groups_depend_on_seed_and_index_alone():
    streams = [stream()]
    from itertools import islice

    whole = list(islice(new_groups(streams, seed=1, size=4, first=0), 6))
    assert list(islice(new_groups(streams, seed=1, size=4, first=3), 3)) == whole[3:]
    assert [g.seed for g in islice(new_groups(streams, seed=2, size=4, first=0), 6)] != [g.seed for g in whole]
    assert len({g.seed for g in whole}) == 6


def test_streams_are_drawn_by_share():
    streams = [
        StreamConfig(name="a", id="tests.helpers.toy_env:Toy-v0", share=3.0),
        StreamConfig(name="b", id="tests.helpers.toy_env:Toy-v0", share=1.0),
    ]
    names = [group_stream(streams, seed=0, index=i).name for i in range(2000)]
    assert 0.70 < names.count("a") / 2000 < 0.80


def test_seeds_fit_31_bits_and_differ():
    seeds = {derive_seed("x", i) for i in range(1000)}
    assert len(seeds) == 1000
    assert max(seeds) < 2**31
