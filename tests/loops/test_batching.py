"""Groups to batches: what trains, what is dropped and why, and that every trained token was sampled."""

from dataclasses import replace

import pytest

from claw_train.assembling.batching import assemble, is_stale, usable
from claw_train.config import MethodConfig
from claw_train.ledger import CompleteGroup, DropReason
from claw_train.types import RewardStatus, Sampling, TurnStatus, Version

from .values import group, record, reward, scored, trajectory, turn

METHOD = MethodConfig()


def test_every_turn_is_either_trained_or_dropped_with_a_reason():
    groups = [
        group("g0", outcomes=(1.0, -1.0, None), index=0),
        group("g1", outcomes=(1.0, 1.0), index=1),
        group("g2", outcomes=(1.0, -1.0), votes=(None, RewardStatus.INFRA_ERROR), index=2),
        group("g3", outcomes=(1.0, -1.0, 1.0), statuses=(TurnStatus.OK, TurnStatus.OK, TurnStatus.CUT), index=3),
    ]
    result = assemble(groups, step=1, method=METHOD)
    trained = {span.turn_id for s in result.batch.samples for span in s.spans}
    everything = {s.turn.id for g in groups for s in g.scored}
    assert trained | set(result.dropped) == everything
    assert not trained & set(result.dropped)
    by_session = {turn_id.session: reason for turn_id, reason in result.dropped.items()}
    assert by_session == {
        "g0-2": DropReason.INFRA_ERROR,
        "g1-0": DropReason.NO_SIGNAL,
        "g1-1": DropReason.NO_SIGNAL,
        "g2-1": DropReason.JUDGE_FAILED,
        "g3-2": DropReason.CUT,
    }


def test_turns_of_an_ungraded_episode_say_so():
    whole = group("g0", outcomes=(1.0, -1.0, None))
    ungraded = replace(whole.trajectories[2], outcome=reward(status=RewardStatus.UNGRADED))
    result = assemble([replace(whole, trajectories=(*whole.trajectories[:2], ungraded))], step=1, method=METHOD)
    assert set(result.dropped.values()) == {DropReason.NO_REWARD}


def test_an_invalid_member_changes_nobodys_advantage():
    alone = assemble([group("g0", outcomes=(1.0, -1.0))], step=1, method=METHOD)
    beside = assemble([group("g0", outcomes=(1.0, -1.0, None))], step=1, method=METHOD)
    assert [s.advantages for s in alone.batch.samples] == [s.advantages for s in beside.batch.samples]


def test_the_sample_is_what_was_served():
    result = assemble([group("g0")], step=1, method=METHOD)
    sample = result.batch.samples[0]
    assert sample.token_ids == (1, 2, 3, 10, 2)
    assert sample.loss_mask == (False, False, False, True, True)
    assert sample.behaviour_logprobs == (0.0, 0.0, 0.0, -0.5, -0.5)
    assert sample.advantages[:3] == (0.0, 0.0, 0.0)
    assert sample.advantages[3] == pytest.approx(1.0, abs=1e-4)
    assert result.batch.num_loss_tokens == 4


def two_turn_group(second_prompt):
    first = turn("g0-0", 0, reply=(4, 5))
    second = turn("g0-0", 1, prompt=second_prompt, reply=(7, 2))
    other = turn("g0-1", 0, reply=(6, 5))
    return CompleteGroup(
        record=record(),
        trajectories=(trajectory("g0-0", turns=2), trajectory("g0-1", outcome=-1.0)),
        scored=(scored(first), scored(second), scored(other)),
    )


def test_turns_on_one_prefix_train_as_one_sequence():
    result = assemble([two_turn_group((1, 2, 3, 4, 5, 9))], step=1, method=METHOD)
    longest = max(result.batch.samples, key=lambda s: len(s.token_ids))
    assert longest.token_ids == (1, 2, 3, 4, 5, 9, 7, 2)
    assert [(s.start, s.end) for s in longest.spans] == [(3, 5), (6, 8)]
    assert longest.loss_mask == (False, False, False, True, True, False, True, True)


def test_a_broken_prefix_starts_a_new_sequence():
    result = assemble([two_turn_group((1, 2, 3, 4, 99, 9))], step=1, method=METHOD)
    assert sorted(s.token_ids for s in result.batch.samples if s.spans[0].turn_id.session == "g0-0") == [
        (1, 2, 3, 4, 5),
        (1, 2, 3, 4, 99, 9, 7, 2),
    ]


def test_penalise_trains_a_cut_reply_downwards_only():
    method = MethodConfig(cut_reply="penalise")
    cut = group("g0", outcomes=(1.0, 1.0, -1.0), statuses=(TurnStatus.CUT, TurnStatus.OK, TurnStatus.OK))
    result = assemble([cut], step=1, method=method)
    sample = next(s for s in result.batch.samples if s.spans[0].turn_id.session == "g0-0")
    assert max(sample.advantages) <= 0.0
    assert min(sample.advantages) < 0.0


def test_an_empty_reply_never_trains():
    empty = turn("g0-0", reply=(), status=TurnStatus.DEGENERATE)
    g = CompleteGroup(
        record=record(),
        trajectories=(trajectory("g0-0"), trajectory("g0-1", outcome=-1.0)),
        scored=(scored(empty), scored(turn("g0-1"))),
    )
    result = assemble([g], step=1, method=MethodConfig(cut_reply="penalise"))
    assert result.dropped[empty.id] is DropReason.DEGENERATE


def test_reward_curve_is_not_shuffled():
    groups = [group(f"g{i}", index=i, outcomes=(1.0, -1.0)) for i in range(8)]
    plain = assemble(groups, step=1, method=METHOD)
    mixed = assemble(groups, step=1, method=METHOD, shuffle_seed=3)
    assert mixed.mean_outcome == plain.mean_outcome == 0.0
    assert [s.advantages for s in mixed.batch.samples] != [s.advantages for s in plain.batch.samples]


def test_order_of_arrival_does_not_matter():
    groups = [group(f"g{i}", index=i) for i in range(4)]
    assert assemble(groups, step=1, method=METHOD) == assemble(groups[::-1], step=1, method=METHOD)


@pytest.mark.parametrize(
    ("token_step", "limit", "stale"), [(4, 0, False), (3, 0, True), (3, 1, False), (2, 1, True), (5, 9, True)]
)
def test_age_counts_versions_between_the_oldest_token_and_the_step(token_step, limit, stale):
    g = group("g0", version=Version("main", 0, token_step))
    assert is_stale(g, step=5, max_staleness=limit) is stale


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 20}, {"temperature": 0.0}])
def test_a_reply_of_a_truncated_distribution_never_trains(sampling):
    whole = group("g0", outcomes=(1.0, -1.0, 1.0))
    first = whole.scored[0].turn
    narrow = replace(first, completion=replace(first.completion, sampling=Sampling(**sampling)))
    mixed = replace(whole, scored=(scored(narrow), *whole.scored[1:]))
    assert assemble([mixed], step=1, method=METHOD).dropped[first.id] is DropReason.PARTIAL_SUPPORT


def test_a_group_needs_two_valid_members():
    assert usable(group(outcomes=(1.0, -1.0, None)))
    assert not usable(group(outcomes=(1.0, None, None)))
