"""Rows share every prefix, stay within their bound and let a token see its own past only."""

import tracemalloc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_train.training.packing import Row, Strand, flatten, pack, split, strands
from claw_train.types import Version


def dense_mask(row: Row) -> torch.Tensor:
    size = len(row.ids)
    mask = torch.zeros(size, size, dtype=torch.bool)
    for block in row.blocks:
        columns = torch.cat([torch.arange(a, b) for a, b in block.keys])
        mask[block.start : block.end, columns] = block.bias(torch.float32) == 0
    return mask


def strand(ids, temperature: float = 1.0) -> Strand:
    return Strand(ids=tuple(ids), trained=(len(ids),), targets=(1,), tokens=(0,), temperature=temperature)


def test_a_shared_prefix_is_computed_once(samples):
    (row,) = pack([s for s in strands(samples, zero_advantage=True) if s], 1000)
    # system 5, prompt one 2, shared reply 40 41 and 50, then 51 60 61 and 52; prompt two 30, then 70, 71 73
    assert sorted(row.ids.tolist()) == sorted([5, 6, 7, 8, 9, 20, 21, 40, 41, 50, 51, 60, 61, 52, 30, 70, 71, 73])


def test_tokens_after_the_last_trained_one_are_not_computed(sample):
    (row,) = pack([s for s in strands([sample([1, 2, 3, 4, 5, 6], [(2, 4)])], zero_advantage=True) if s], 1000)
    assert row.ids.tolist() == [1, 2, 3]


def test_only_predecessors_of_trained_tokens_get_logits(sample):
    (row,) = pack([s for s in strands([sample([1, 2, 3, 4, 5, 6], [(2, 3), (5, 6)])], zero_advantage=True) if s], 1000)
    assert row.ids[row.sources].tolist() == [2, 5]
    assert row.item_target.tolist() == [3, 6]


def test_equal_replies_share_their_logits_but_not_their_items(samples):
    (row,) = pack([s for s in strands(samples[:2], zero_advantage=True) if s], 1000)
    assert len(row.sources) == 3
    assert sorted(row.item_token.tolist()) == [0, 1, 2, 3, 4, 5]


def test_the_same_place_at_two_temperatures_has_two_logits(sample):
    two = [sample([1, 2, 3], [(2, 3)], temperature=t) for t in (1.0, 0.5)]
    (row,) = pack([s for s in strands(two, zero_advantage=True) if s], 1000)
    assert row.sources.tolist() == [1, 1]
    assert sorted(row.temperatures.tolist()) == [0.5, 1.0]


def test_rows_stay_within_their_bound_and_lose_no_token(samples):
    parts = [s for s in strands(samples, zero_advantage=True) if s]
    rows = pack(parts, 13)
    assert len(rows) > 1
    assert all(len(row.ids) <= 13 for row in rows)
    assert sorted(torch.cat([row.item_token for row in rows]).tolist()) == list(
        range(sum(len(p.trained) for p in parts))
    )


def test_a_sample_longer_than_the_bound_gets_a_row_of_its_own():
    rows = pack([strand(range(50)), strand([99, 98])], 10)
    assert [len(row.ids) for row in rows] == [50, 2]


def test_a_long_row_takes_memory_in_proportion_to_its_length():
    parts = [strand(range(12_000)), strand([*range(11_000), 5, 6])]
    tracemalloc.start()
    (row,) = pack(parts, 20_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    stored = sum(block.until.nbytes for block in row.blocks)
    # a byte for each pair would be 144 MB
    assert peak + stored < 12e6


def test_tokens_without_advantage_are_left_out_when_they_need_no_pass(samples):
    parts = strands(samples, zero_advantage=False)
    assert parts[5] is None
    assert sum(p is not None for p in parts) == len(samples) - 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12), st.integers(4, 40))
def test_a_token_sees_exactly_its_own_past(sequences: list[list[int]], bound: int):
    for row in pack([strand(ids) for ids in sequences], bound):
        mask = dense_mask(row)
        for place in range(len(row.ids)):
            past = mask[place].nonzero().flatten()
            assert past[-1] == place
            assert row.positions[past].tolist() == list(range(int(row.positions[place]) + 1))
            assert row.ids[past].tolist() in [s[: len(past)] for s in sequences]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12), st.integers(1, 4))
def test_every_strand_goes_to_one_rank(sequences: list[list[int]], count: int):
    parts = [strand(ids) for ids in sequences]
    shares = split(parts, count)
    assert len(shares) == count
    assert sorted(id(p) for share in shares for p in share) == sorted(id(p) for p in parts)


def test_large_batches_are_shared_about_equally():
    parts = [strand([1, 2, 3, g, g, i, i, i, i, i]) for g in range(10) for i in range(10)]
    sizes = [sum(len(row.ids) for row in pack(share, 10_000)) for share in split(parts, 2)]
    assert max(sizes) < 1.2 * min(sizes)


def test_fresh_means_sampled_by_these_very_weights(sample):
    def lags(version: Version):
        tokens = flatten([sample([1, 2], [(1, 2)], version=version)], Version("main", 1, 5))
        return tokens.fresh.tolist(), tokens.lag.tolist()

    assert lags(Version("main", 1, 5)) == ([True], [0.0])
    assert lags(Version("main", 0, 5)) == ([False], [0.0])
    assert lags(Version("main", 1, 3)) == ([False], [2.0])


def test_the_base_is_the_base_in_every_lineage(sample):
    tokens = flatten([sample([1, 2], [(1, 2)], version=Version("main", 0, 0))], Version("main", 3, 0))
    assert tokens.fresh.tolist() == [True]
