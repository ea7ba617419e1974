"""Timestamps that no clock shows: 0, -1, negative ones, the largest there is, falling and leaping,
under limits, retention, rolls by time and compaction; and a clock that leaps an hour meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kept.client.client import OutRecord
from kept.storage.records import build_batch
from kept.storage.types import Codec, TopicPartition
from tests.support.kafka_connection import Connection
from tests.support.request_values import list_offsets_values, topic_values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX, MIN, HOUR_MS, DAY_MS = 2**63 - 1, -(2**63), 3_600_000, 86_400_000
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "any": {"message.timestamp.after.max.ms": str(MAX), "segment.ms": str(DAY_MS)},
    "recent": {"message.timestamp.before.max.ms": str(DAY_MS)},
    "append-time": {"message.timestamp.type": "LogAppendTime"},
    "zstd": {"compression.type": "zstd", "message.timestamp.after.max.ms": str(MAX)},
}


NEGATIVE: list[tuple[int, ...]] = [(-2,), (MIN,), (MIN + 1,), (MIN, MAX)]
"""No clock shows them, and Java's clients send none. Kafka's numbers overflow there: MIN is too
young unless message.timestamp.after.max.ms is MAX, and then not too old; where a batch is
compressed anew each of them is an UNKNOWN_SERVER_ERROR. Here MIN is too old, and -2 is taken."""


def extremes(now_ms: int) -> list[tuple[int, ...]]:
    """Timestamps of batches, in the order in which they are produced."""
    return [
        (now_ms,),
        (0,),
        (1,),
        (-1,),
        (now_ms - 1000, 0, now_ms - 2000),
        (MAX,),
        (MAX - 1,),
        (now_ms + 2 * HOUR_MS,),
        (now_ms - 2 * DAY_MS,),
        (-1, 5),
        (5, -1),
        (-1, -1),
        (0, MAX),
        (-1, MAX),
        (2**62, 7),
        (now_ms, now_ms - 1, now_ms - 2),
    ]


class Judged:
    """What one broker does with batches of such timestamps."""

    def __init__(self, bootstrap: str, now_ms: int) -> None:
        self.wire = Connection(bootstrap.partition(",")[0])
        self.now_ms = now_ms
        self.codes: dict[tuple[str, int], int] = {}

    def create(self, name: str, configs: dict[str, str]) -> None:
        topic = topic_values(name, **configs)
        created = self.wire.ask(19, 5, topics=[topic], timeout=30_000, validate_only=False)
        assert created.topics[0].error_code.name == "none", created
        end = time.monotonic() + 30
        while self.listed(name, -1)[0] != "none":
            assert time.monotonic() < end

    def listed(self, name: str, timestamp: int) -> tuple[str, int, int]:
        """(error, offset, timestamp)"""
        answer = self.wire.ask(2, 7, **list_offsets_values(name, timestamp))
        (found,) = answer.topics[0].partitions
        return found.error_code.name, found.offset, found.timestamp

    def produced(self, name: str, timestamps: tuple[int, ...]) -> tuple[str, int]:
        """(error, base offset)"""
        rows = [(timestamp, b"k", b"v", ()) for timestamp in timestamps]
        found = self.wire.produce(name, build_batch(rows), version=8, acks=-1)
        return found.error_code.name, found.base_offset

    def tried(self, name: str, configs: dict[str, str]) -> Iterator[tuple[Any, Any]]:
        """Each question with its answer."""
        self.create(name, configs)
        batches = extremes(self.now_ms)
        for timestamps in batches:
            yield ("produce", *timestamps), self.produced(name, timestamps)
        asked = {t for timestamps in batches for t in timestamps if t >= 0}
        for timestamp in sorted(asked | {t + 1 for t in asked if t < MAX}):
            error, offset, at = self.listed(name, timestamp)
            # What the log has stamped is when it came.
            yield ("list", timestamp), (error, offset, at if name != "append-time" else 0)
        if name != "append-time":  # two batches may come in one millisecond
            yield ("list", -3), self.listed(name, -3)


@pytest.mark.java
@pytest.mark.parametrize("name", SETTINGS)
def test_extreme_timestamps_are_treated_as_by_kafka(apache_kafka, kept_broker, name):
    now_ms = int(time.time() * 1000)
    answers = []
    for bootstrap in (apache_kafka, kept_broker.bootstrap):
        judged = Judged(bootstrap, now_ms)
        with contextlib.closing(judged.wire):
            answers.append(dict(judged.tried(name, SETTINGS[name])))
    theirs, ours = answers
    differ = {what: (theirs[what], ours[what]) for what in theirs if theirs[what] != ours[what]}
    assert not differ, f"(Kafka's, ours): {differ}"


def test_negative_timestamps_are_refused_or_harmless(kept_broker):
    now_ms = int(time.time() * 1000)
    judged = Judged(kept_broker.bootstrap, now_ms)
    with contextlib.closing(judged.wire):
        for name in ("any", "zstd"):
            topic = f"negative-{name}"
            judged.create(topic, SETTINGS[name])
            found = [judged.produced(topic, timestamps)[0] for timestamps in NEGATIVE]
            assert found == ["none", *["invalid_timestamp"] * 3]
            assert judged.listed(topic, 0) == ("none", -1, -1)
            assert judged.produced(topic, (5,)) == ("none", 1)
            assert judged.listed(topic, 0) == judged.listed(topic, -3) == ("none", 1, 5)


CLOCK = os.path.join(os.path.dirname(os.path.dirname(__file__)), "chaos", "clock")
RETENTION_MS = 3 * HOUR_MS
PARTITIONS = 2
KEYS = 40
ROUNDS = 120


class Model:
    """What was acknowledged, by topic and partition: offset to (timestamp, key, value)."""

    def __init__(self) -> None:
        self.written: dict[tuple[str, int], dict[int, tuple[int, bytes, bytes]]] = {}

    def note(self, topic: str, partition: int, base: int, rows: list[Any]) -> None:
        known = self.written.setdefault((topic, partition), {})
        for number, row in enumerate(rows):
            assert base + number not in known, "an offset is used once"
            known[base + number] = row


def drawn_timestamp(draw: random.Random, now_ms: int) -> int:
    """Of now, of long ago, of a far future; falling and leaping."""
    return draw.choice(
        (
            now_ms,
            now_ms,
            now_ms,
            now_ms - draw.randrange(DAY_MS),
            0,
            1,
            -1,
            now_ms + draw.randrange(HOUR_MS),
            2**62,
            MAX,
        )
    )


SMALL = {
    "segment.bytes": "20000",
    "segment.ms": str(HOUR_MS),
    "retention.ms": "-1",
    "message.timestamp.after.max.ms": str(MAX),
}
COMPACTED = SMALL | {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"}
TOPICS = {
    "kept": SMALL,
    "retained": SMALL | {"retention.ms": str(RETENTION_MS)},
    "compacted": COMPACTED,
    "lagging": COMPACTED | {"min.compaction.lag.ms": "1000", "max.compaction.lag.ms": "3000"},
    "stamped": SMALL | {"message.timestamp.type": "LogAppendTime"},
}


def test_leaping_timestamps_and_clocks_lose_nothing_under_load(kept_cluster):
    """Compaction keeps the newest of each key by offset, whatever its timestamp is; retention takes
    what is old by the clock at its furthest, and nothing else; times lead to the right offsets.
    """
    cluster = kept_cluster(
        environ={"PYTHONPATH": CLOCK, "KEPT_TEST_CLOCK": "clock"},
        log_retention_check_interval_ms=300,
        log_cleaner_backoff_ms=100,
        log_segment_delete_delay_ms=200,
    )
    draw, model = random.Random(18), Model()
    clock = os.path.join(cluster.data_dir(), os.pardir, "clock")
    began_ms = int(time.time() * 1000)

    def jump(seconds: int) -> None:
        with open(clock + ".new", "w", encoding="ascii") as file:
            file.write(str(seconds))
        os.rename(clock + ".new", clock)

    with cluster.client() as client:
        for name, config in TOPICS.items():
            client.create_topic(name, partitions=PARTITIONS, config=config)
        for number in range(ROUNDS):
            if number % 10 == 0:
                jump((0, 3600, -3600, 7200, 0)[number // 10 % 5])
            for name in TOPICS:
                partition = draw.randrange(PARTITIONS)
                rows = [
                    (
                        drawn_timestamp(draw, began_ms),
                        b"%d" % draw.randrange(KEYS),
                        b"%d-%d" % (number, at) + bytes(draw.randrange(200)),
                    )
                    for at in range(draw.randrange(1, 30))
                ]
                records = [OutRecord(key, value, (), at, partition) for at, key, value in rows]
                codec = draw.choice(tuple(Codec))
                (done,) = client.produce(name, records, codec=codec)
                model.note(name, partition, done.base_offset, rows)
                if draw.random() < 0.3:
                    look_up(client, name, partition, draw, began_ms)
            time.sleep(0.1)  # clock and cleaner go on; nothing is waited for
        jump(0)
        for name in TOPICS:
            client.produce(name, [OutRecord(b"last", b"last", (), None, p) for p in range(2)])
        cluster.wait_until(
            lambda: all(is_compacted(client, model, p) for p in range(PARTITIONS)),
            "the cleaner has been there",
            120,
        )
        for name in TOPICS:
            for partition in range(PARTITIONS):
                check(client, model, name, partition, began_ms)
    assert "Traceback" not in cluster.log()
    assert "level=error" not in cluster.log()
    cluster.kill()
    cluster.start()
    with cluster.client() as client:
        for name in TOPICS:
            for partition in range(PARTITIONS):
                check(client, model, name, partition, began_ms)


def is_compacted(client: Any, model: Model, partition: int) -> bool:
    left = sum(1 for _ in client.read("compacted", [partition]))
    return left < len(model.written["compacted", partition]) // 2


def look_up(client: Any, name: str, partition: int, draw: random.Random, now_ms: int) -> None:
    """A time leads to a record that is not older, while others are written and cleaned."""
    at = max(0, drawn_timestamp(draw, now_ms))
    tp = TopicPartition(name, partition)
    found = client.list_offsets({tp: at})[tp]
    assert found.offset == -1 or found.timestamp >= at


def check(client: Any, model: Model, name: str, partition: int, began_ms: int) -> None:
    """What is in a log, and what times lead to."""
    written = model.written[name, partition]
    read = [r for r in client.read(name, [partition]) if r.value != b"last"]
    offsets = [r.offset for r in read]
    assert offsets == sorted(set(offsets))
    for r in read:
        at, key, value = written[r.offset]
        assert (r.key, r.value) == (key, value)
        assert name == "stamped" or r.timestamp == at
    if name in ("kept", "stamped"):
        assert offsets == sorted(written)
    elif name == "retained":
        # At its furthest the clock was two hours ahead, and the test took less than half an hour.
        young = began_ms + 2 * HOUR_MS + HOUR_MS // 2 - RETENTION_MS
        first = offsets[0] if offsets else max(written) + 1
        assert offsets == [o for o in written if o >= first], "only its beginning is old"
        assert not [o for o, row in written.items() if row[0] > young and o not in set(offsets)]
    else:
        newest = {key: offset for offset, (_, key, _) in sorted(written.items())}
        assert set(newest.values()) <= set(offsets)
    for at in {0, 1, 5, began_ms, began_ms + 1, 2**62, 2**62 + 1, MAX}:
        expected = next((r.offset for r in read if r.timestamp >= at), -1)
        tp = TopicPartition(name, partition)
        found = client.list_offsets({tp: at})[tp]
        last = client.bounds(name, [partition])[partition][1] - 1
        assert found.offset == expected or (expected == -1 and found.offset <= last), (name, at)
