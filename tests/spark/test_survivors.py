"""Spark's own strategies against the cleaner's engine, over random histories, each a topic."""

from __future__ import annotations

import random
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from kept.compaction.strategy import (
    From,
    HighestVersion,
    Latest,
    LatestN,
    Only,
    Strategy,
    parse_prefixes,
)
from kept.pipeline.jobs.exports import compacted
from kept.pipeline.jobs.survivors import strategy_of
from kept.storage.errors import InvalidConfig
from kept.storage.records import Record
from kept.testing.strategies import clean

HISTORIES = 60
VERSIONS = (
    b"0",
    b"7",
    b"007",
    b"12",
    b"9" * 40,
    b"9" * 41,
    b"1\n",
    b"-1",
    b"",
    b"\x00\x00\x00\x05",
    b"\xff\xff\xff\xff",
    b"\x80" + b"\x00" * 7,
    b"\x7f" + b"\xff" * 7,
    b"\x00" * 7 + b"\x05",
    None,
)
SCHEMA = (
    "topic string, partition int, offset bigint, key binary, value binary, ms bigint,"
    " headers array<struct<key:string,value:binary>>"
)


class FirstAndLast(Latest):
    """Not built in: the first record of a key and everything from the newest on."""

    def collect(self, state: Any) -> Any:
        return {key: From(offset) for key, offset in state.keys.items()}


def histories(seed: int) -> dict[str, list[Record]]:
    draw = random.Random(seed)
    made = {}
    for number in range(HISTORIES):
        log, offset = [], 0
        for _ in range(draw.randrange(1, 30)):
            key = draw.choice((b"a", b"", b"user.1", b"user.2", b"cfg.\xff"))
            value = None if draw.random() < 0.2 else b"v%d" % offset
            headers: list[tuple[str, bytes | None]] = [
                (draw.choice(("version", "other")), draw.choice(VERSIONS))
                for _ in range(draw.randrange(3))
            ]
            log.append(Record(offset, 1000 + draw.randrange(-1002, 5), key, value, tuple(headers)))
            offset += draw.choice((1, 1, 3))
        made[f"h{number}"] = log
    return made


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "strategy",
    [
        Latest(),
        LatestN(2),
        HighestVersion(),
        HighestVersion("version"),
        parse_prefixes("user.=latest-n:3,cfg.=highest-version:version"),
        FirstAndLast(),
    ],
    ids=["latest", "latest-n", "by-timestamp", "by-header", "by-prefix", "not-built-in"],
)
def test_spark_keeps_what_the_cleaner_keeps(spark: Any, strategy: Strategy) -> None:
    logs = histories(7)
    rows = [
        (topic, 0, r.offset, r.key, r.value, r.timestamp, list(r.headers) or None)
        for topic, log in logs.items()
        for r in log
    ]
    frame = spark.createDataFrame(rows, SCHEMA).selectExpr("*", "timestamp_millis(ms) timestamp")
    end = 20 if isinstance(strategy, LatestN) else 1 << 40
    left = compacted(frame.drop("ms"), strategy, {0: end}).select("topic", "offset").collect()
    found: dict[str, list[int]] = {topic: [] for topic in logs}
    for row in left:
        found[row.topic].append(row.offset)
    for topic, log in logs.items():
        below, above = [r for r in log if r.offset < end], [r for r in log if r.offset >= end]
        expected = [r.offset for r in (*clean(strategy, below), *above)]
        assert sorted(found[topic]) == expected, log


def test_a_strategy_that_is_not_here_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidConfig, match="no compaction strategy 'mine'; there are by-key-pre"):
        strategy_of({"kept.compaction.strategy": "mine"})
    known = tmp_path / "broken-1.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (known / "entry_points.txt").write_text(
        f"[kept.compaction.strategies]\nnowhere = no_such_module:X\nmine = {__name__}:Mine\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, why in (("nowhere", "No module named 'no_such_module'"), ("mine", "no attribute")):
        with pytest.raises(InvalidConfig, match=f"strategy '{name}' cannot be made: .*{why}"):
            strategy_of({"kept.compaction.strategy": name})


class Says(Latest):
    """Not built in: a verdict about every key, or none."""

    def __init__(self, verdict: Any) -> None:
        self.verdict = verdict

    def collect(self, state: Any) -> Any:
        return dict.fromkeys(state.keys, self.verdict)


class Says31(Latest):
    """Not built in: does not take a record."""

    def reduce(self, state: Any, key: bytes, record: Record) -> bool:
        if record.offset == 31:
            raise ZeroDivisionError("of no use")
        return super().reduce(state, key, record)


class Keyless(Latest):
    """Not built in: has no subject for a record."""

    def key(self, record: Record) -> Any:
        return None


def elsewhere() -> Any:
    """A strategy whose module only this process has."""
    module = types.ModuleType("only_on_the_driver")
    found = type("Elsewhere", (Latest,), {"__module__": module.__name__})
    module.Elsewhere = found  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return found()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_strategy_that_breaks_its_contract_is_told_and_nothing_is_lost(spark: Any) -> None:
    rows = [("t", 0, n, b"k%d" % (n % 2), b"v", 0, None) for n in range(40)]
    frame = spark.createDataFrame(rows, SCHEMA).selectExpr("*", "timestamp_millis(ms) timestamp")
    frame = frame.drop("ms").coalesce(1)
    none = "keeps no record of key b'k0', whose newest is at t-0, offset 38: of every key one must"
    for strategy, why in (
        (Says(From(40)), f"Says {none}"),
        (Says(Only(frozenset((50,)))), f"Says {none}"),
        (Says(None), "Says failed at t-0, offset 38: AttributeError"),
        (Says(Only(frozenset("a"))), f"Says {none}"),
        (Says(From("x")), "Says failed at t-0, offset 38: TypeError"),  # type: ignore[arg-type]
        (Says31(), "Says31 failed at t-0, offset 31: ZeroDivisionError: of no use"),
        (Keyless(), "Keyless failed at t-0, offset 0: TypeError: its key of that record is None"),
        (elsewhere(), "Elsewhere is not where Spark's executors run, .*: No module named 'only_on"),
    ):
        with pytest.raises(Exception, match=f"the strategy {why}"):
            compacted(frame, strategy, {0: 100}).collect()
    with pytest.raises(InvalidConfig, match="Says cannot be sent to Spark's executors: TypeError"):
        compacted(frame, Says(threading.Lock()), {0: 100})
    left = compacted(frame, Says(Only([38, 39])), {0: 100})  # type: ignore[arg-type]
    assert sorted(row.offset for row in left.collect()) == [38, 39]
