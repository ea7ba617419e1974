"""Every kind of fault, among records that three replicas and a reference hold."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest

from kept.compaction.strategy import Latest, Strategy
from kept.pipeline.jobs.audit_faults import NEWER, REFERENCE, Expected, find, held, overtaken
from kept.pipeline.jobs.survivors import strategy_of

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1800)]

SCHEMA = (
    "topic string, partition int, offset bigint, key binary, value binary, ms bigint,"
    " headers array<struct<key:string,value:binary>>"
)
SOUND = {1: (b"b", b"1"), 2: (b"a", b"2"), 3: (b"c", b"1"), 5: (b"d", None), 6: (b"e", b"1")}
FAULTY = {0: (b"a", b"1"), 1: (b"b", b"X"), 2: (b"a", b"2"), 4: (b"d", b"1"), 6: (b"e", b"1")}
OF_ONE = {("superseded", 0, 2), ("divergent", 1, -1), ("missing", 3, 2), ("resurrected", 4, 2)}
LOST = {("missing", 7, n) for n in range(3)}


class OfOnesOwn(Latest):
    """Not built in, though it does the same."""


PREFIXES = {
    "kept.compaction.strategy": "by-key-prefix",
    "kept.compaction.prefixes": "a=latest-n:1,d=highest-version",
}


@pytest.mark.parametrize(
    "strategy",
    [strategy_of({}), strategy_of(PREFIXES), OfOnesOwn()],
    ids=["latest", "latest-n and highest-version by key prefix", "of-ones-own"],
)
def test_faults_by_kind_offset_and_replica(spark: Any, strategy: Strategy) -> None:
    def holds(replica: int, records: dict[int, tuple[bytes, bytes | None]]) -> Any:
        rows = [("t", 0, offset, key, value, 5, None) for offset, (key, value) in records.items()]
        frame = spark.createDataFrame(rows, SCHEMA)
        frame = frame.selectExpr("*", "timestamp_millis(ms) timestamp")
        return held(frame, replica, strategy)

    def found(frame: Any, covered: Any = None) -> set[tuple[str, int, int]]:
        expected = Expected({0: (0, 1, 2)}, {0: 0}, covered)
        rows = find(frame, strategy, expected, compacted=True).collect()
        return {(row.kind, row.offset, row.replica) for row in rows}

    three = holds(0, SOUND).unionByName(holds(1, SOUND)).unionByName(holds(2, FAULTY))
    assert found(three) == OF_ONE
    known = three.unionByName(holds(REFERENCE, {**SOUND, 7: (b"z", b"lost everywhere")}))
    assert found(known, {0: (0, 8)}) == OF_ONE | LOST


def test_what_is_written_after_a_tombstone_of_the_reference_is_no_fault(spark: Any) -> None:
    strategy = strategy_of({"kept.compaction.strategy": "highest-version"})

    def holds(replica: int, *rows: tuple[int, bytes | None, int]) -> Any:
        records = [("t", 0, offset, b"k", value, ms, None) for offset, value, ms in rows]
        frame = spark.createDataFrame(records, SCHEMA)
        return held(frame.selectExpr("*", "timestamp_millis(ms) timestamp"), replica, strategy)

    def found(*frames: Any) -> set[tuple[str, int, int]]:
        expected = Expected({0: (0, 1)}, {0: 0}, {0: (0, 3)})
        rows = find(
            reduce(lambda a, b: a.unionByName(b), frames), strategy, expected, compacted=True
        ).collect()
        return {(row.kind, row.offset, row.replica) for row in rows}

    lower, deleted = (5, b"new", 500), (0, None, 1000)
    reference = holds(REFERENCE, deleted)
    assert not found(holds(0, lower), holds(1, lower), reference), "the tombstone has expired"
    again = found(holds(0, lower, deleted), holds(1, lower), reference)
    assert again == {("resurrected", 5, 1)}, "one replica lacks a tombstone that another one has"


def test_what_only_the_reference_has_may_be_superseded_by_what_is_written_meanwhile(
    spark: Any,
) -> None:
    two = {"kept.compaction.strategy": "latest-n", "kept.compaction.latest.n": "2"}
    older, newer = (b"a", b"0"), (b"a", b"2")

    def holds(strategy: Strategy, replica: int, *records: tuple[int, tuple[bytes, bytes]]) -> Any:
        rows = [("t", 0, offset, key, value, 5, None) for offset, (key, value) in records]
        frame = spark.createDataFrame(rows, SCHEMA).selectExpr(
            "*", "timestamp_millis(ms) timestamp"
        )
        return held(frame, replica, strategy)

    def found(config: dict[str, str], live: Any, since: Any) -> list[tuple[int, bool]]:
        strategy = strategy_of(config)
        reference = holds(strategy, REFERENCE, (3, (b"a", b"1")), (4, (b"z", b"lost")))
        every = holds(strategy, 0, *live).unionByName(reference)
        expected = Expected({0: (0,)}, {0: 0}, {0: (3, 5)})
        faults = find(every, strategy, expected, compacted=True)
        left = overtaken(faults, every, holds(strategy, NEWER, *since), strategy, expected)
        return sorted((row.offset, row.forgotten) for row in left.collect())

    lost = (4, True)
    assert found({}, [], []) == [(3, True), lost]
    assert found({}, [(1, older)], []) == [(3, False), lost], "its tombstone takes older ones, too"
    assert found({}, [(1, older)], [(9, newer)]) == [lost]
    assert found(two, [(8, newer)], []) == [(3, True), lost]
    assert found(two, [(8, newer)], [(9, newer)]) == [lost]


def test_where_nothing_is_compacted_a_record_without_a_value_is_missing_too(spark: Any) -> None:
    three = {0: (b"a", None), 1: (None, None), 2: (b"a", b"1")}
    frames = [
        spark.createDataFrame([("t", 0, o, k, v, 5, None) for o, (k, v) in held_.items()], SCHEMA)
        for held_ in (three, {2: three[2]})
    ]
    both = [
        held(frame.selectExpr("*", "timestamp_millis(ms) timestamp"), replica, Latest())
        for replica, frame in enumerate(frames)
    ]
    expected = Expected({0: (0, 1)}, {0: 0})
    rows = find(both[0].unionByName(both[1]), Latest(), expected, compacted=False).collect()
    assert {(row.kind, row.offset, row.replica) for row in rows} == {
        ("missing", 0, 1),
        ("missing", 1, 1),
    }
