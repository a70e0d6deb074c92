"""A group closes once, when everything it sent out has come back."""

import itertools

import pytest

from claw_train.assembling.groups import GroupBook
from claw_train.errors import LedgerError

from .values import record, scored, trajectory, turn


def items():
    return [
        scored(turn("g0-0")),
        scored(turn("g0-1")),
        trajectory("g0-0"),
        trajectory("g0-1", outcome=-1.0),
    ]


def add(book, item):
    return book.add_turn(item) if hasattr(item, "turn") else book.add_trajectory(item)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_complete_with_the_last_item_in_any_order(order):
    book, all_items = GroupBook(), items()
    book.open(record(size=2))
    results = [add(book, all_items[i]) for i in order]
    assert results[:3] == [None] * 3
    assert results[3] is not None
    assert [t.id for t in results[3].trajectories] == ["g0-0", "g0-1"]
    assert len(results[3].scored) == 2
    assert book.waiting == {}


def test_a_turn_that_comes_back_twice_is_an_error():
    book = GroupBook()
    book.open(record(size=2))
    book.add_turn(scored(turn("g0-0")))
    with pytest.raises(LedgerError, match="twice"):
        book.add_turn(scored(turn("g0-0")))


def test_a_trajectory_that_ends_twice_is_an_error():
    book = GroupBook()
    book.open(record(size=2))
    book.add_trajectory(trajectory("g0-0"))
    with pytest.raises(LedgerError, match="twice"):
        book.add_trajectory(trajectory("g0-0"))


def test_a_turn_of_an_unknown_group_is_an_error():
    with pytest.raises(LedgerError, match="not open"):
        GroupBook().add_turn(scored(turn("g0-0")))


def test_waiting_names_what_is_missing():
    book = GroupBook()
    book.open(record(size=2))
    book.add_trajectory(trajectory("g0-0"))
    assert book.waiting == {"g0": "1/2 trajectories, 0 turns judged"}
