from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.pipeline.read.admission import (
    available,
    from_json,
    leader_epochs_in,
    limited,
    to_json,
    topic_ids_in,
)
from kept.pipeline.read.plan import MIN_INT64, Range, ReadBounds, cut, plan, split, split_by_bytes
from kept.pipeline.read.pushdown import milliseconds, push
from kept.storage.types import MAX_INT64, TopicPartition

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
IDS: dict[str, str | None] = {"a": "aa", "b": None}

offsets_of = st.fixed_dictionaries({tp: st.integers(0, 1000) for tp in (A0, A1, B0)})


def test_one_range_for_each_partition_with_offsets() -> None:
    found = plan({A0: 3, A1: 5, B0: 0}, {A0: 9, A1: 5, B0: 2}, IDS, ReadBounds())
    assert found == [Range("a", 0, 3, 9, "aa"), Range("b", 0, 0, 2, None)]


ranges = st.lists(
    st.builds(
        lambda i, start, size: Range("t", i, start, start + size),
        st.integers(0, 50),
        st.integers(0, 10**9),
        st.integers(1, 9) | st.integers(1, 10**6),
    ),
    max_size=6,
    unique_by=lambda r: r.partition,
)


@given(ranges, st.none() | st.integers(1, 40), st.none() | st.integers(1000, 10**6))
def test_pieces_cover_the_ranges_and_are_as_many_as_asked_for(
    whole: list[Range], least: int | None, most: int | None
) -> None:
    pieces = split(whole, least, most)
    assert all(p.size > 0 for p in pieces)
    assert all(p.size <= most for p in pieces) if most else True
    assert len(pieces) >= min(least or 0, sum(r.size for r in whole))
    joined: list[Range] = []
    for piece in pieces:
        if joined and joined[-1].partition == piece.partition and joined[-1].end == piece.start:
            joined[-1] = joined[-1]._replace(end=piece.end)
        else:
            joined.append(piece)
    assert joined == whole


def test_large_ranges_are_cut_first() -> None:
    pieces = split([Range("t", 0, 0, 10), Range("t", 1, 0, 1000)], 4, None)
    assert [p.partition for p in pieces] == [0, 1, 1, 1]
    assert cut(Range("t", 0, 0, 10), 3) == [
        Range("t", 0, 0, 3),
        Range("t", 0, 3, 6),
        Range("t", 0, 6, 10),
    ]


@given(offsets_of, offsets_of, st.integers(1, 2500))
def test_a_trigger_takes_no_more_than_its_limit_and_goes_on(
    start: dict[TopicPartition, int], more: dict[TopicPartition, int], most: int
) -> None:
    end = {tp: start[tp] + more[tp] for tp in start}
    found = limited(start, end, most)
    assert all(start[tp] <= found[tp] <= end[tp] for tp in end)
    assert available(start, found) == min(most, available(start, end))
    if most >= len(end):
        assert all(found[tp] > start[tp] for tp in end if end[tp] > start[tp])


def test_no_partition_starves_under_a_limit_below_their_number() -> None:
    tps = [TopicPartition("a", n) for n in range(5)]
    start, end = dict.fromkeys(tps, 7), dict.fromkeys(tps, 100)
    for quiet in tps:
        at, newest = dict(start), {**end, quiet: start[quiet] + 1}
        for _ in range(3):
            at = limited(at, newest, 2)
            newest = {tp: last + (100 if tp != quiet else 0) for tp, last in newest.items()}
        assert at[quiet] == newest[quiet], f"{quiet} has not had its turn"


def test_a_checkpoint_is_the_connectors() -> None:
    assert to_json({A1: 5, A0: 3, B0: 0}) == {"a": {"0": 3, "1": 5}, "b": {"0": 0}}
    assert from_json({"a": {"0": 3, "1": 5}}) == {A0: 3, A1: 5}
    with_ids = to_json({A1: 5, B0: 0}, {"a": "f00d", "b": None, "c": "beef"})
    assert with_ids == {"a": {"1": 5, "topicId": "f00d"}, "b": {"0": 0}}
    assert from_json(with_ids) == {A1: 5, B0: 0}
    assert topic_ids_in(with_ids) == {"a": "f00d"}
    with_epochs = to_json({A1: 5, B0: 0}, {"a": "f00d"}, {A0: 7, A1: 2, B0: -1})
    assert with_epochs == {
        "a": {"1": 5, "topicId": "f00d", "leaderEpochs": {"1": 2}},
        "b": {"0": 0},
    }
    assert from_json(with_epochs) == {A1: 5, B0: 0}
    assert leader_epochs_in(with_epochs) == {A1: 2}
    assert leader_epochs_in(with_ids) == {}


# Filters are known by the names of their classes.


@dataclass(frozen=True)
class EqualTo:
    attribute: tuple[str, ...]
    value: Any


@dataclass(frozen=True)
class In:
    attribute: tuple[str, ...]
    value: Any


@dataclass(frozen=True)
class GreaterThan:
    attribute: tuple[str, ...]
    value: Any


@dataclass(frozen=True)
class GreaterThanOrEqual:
    attribute: tuple[str, ...]
    value: Any


@dataclass(frozen=True)
class LessThan:
    attribute: tuple[str, ...]
    value: Any


@dataclass(frozen=True)
class LessThanOrEqual:
    attribute: tuple[str, ...]
    value: Any


@dataclass(frozen=True)
class Not:
    child: Any


NOON = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC)
NOON_MS = 1_795_262_400_000


@pytest.mark.parametrize(
    ("filters", "bounds"),
    [
        ([EqualTo(("partition",), 1)], ReadBounds(partitions=frozenset({1}))),
        (
            [In(("partition",), (1, 2)), In(("partition",), (2, 3))],
            ReadBounds(None, frozenset({2})),
        ),
        ([EqualTo(("topic",), "a")], ReadBounds(topics=frozenset({"a"}))),
        ([GreaterThan(("offset",), 4), LessThan(("offset",), 9)], ReadBounds(first=5, end=9)),
        (
            [GreaterThanOrEqual(("offset",), 4), LessThanOrEqual(("offset",), 9)],
            ReadBounds(first=4, end=10),
        ),
        ([EqualTo(("offset",), 7)], ReadBounds(first=7, end=8)),
    ],
)
def test_filters_that_are_met_exactly(filters: list[Any], bounds: ReadBounds) -> None:
    assert push(ReadBounds(), filters) == (bounds, [])


def test_a_time_narrows_and_spark_still_looks() -> None:
    since = GreaterThan(("timestamp",), NOON + datetime.timedelta(microseconds=1))
    assert push(ReadBounds(), [since]) == (ReadBounds(min_timestamp=NOON_MS), [since])
    assert milliseconds(NOON.replace(tzinfo=None)) == NOON_MS


@pytest.mark.parametrize(
    "one",
    [
        LessThan(("timestamp",), NOON),
        EqualTo(("key",), b"k"),
        Not(EqualTo(("partition",), 1)),
        GreaterThan(("partition",), 1),
        EqualTo(("headers", "key"), "x"),
    ],
)
def test_the_rest_is_left_to_spark(one: Any) -> None:
    assert push(ReadBounds(), [one]) == (ReadBounds(), [one])


def test_splitting_by_bytes_makes_no_task_much_larger_than_asked_for() -> None:
    small, large = Range("a", 0, 0, 10), Range("a", 1, 100, 200)
    pieces = split_by_bytes([small, large], {A0: 1.0, A1: 50.0}, 1000)
    assert pieces == [small, *(Range("a", 1, n, n + 20) for n in range(100, 200, 20))]
    assert split_by_bytes([large], {A1: 1e9}, 1) == [
        Range("a", 1, n, n + 1) for n in range(100, 200)
    ]
    assert split_by_bytes([large], {A1: 0.0}, 1) == [large]


def test_bounds_narrow_ranges() -> None:
    bounds = ReadBounds(partitions=frozenset({0}), first=4, end=6)
    assert plan({A0: 0, A1: 0, B0: 5}, {A0: 9, A1: 9, B0: 6}, IDS, bounds) == [
        Range("a", 0, 4, 6, "aa"),
        Range("b", 0, 5, 6, None),
    ]
    assert ReadBounds() == ReadBounds(None, None, 0, MAX_INT64, MIN_INT64)
