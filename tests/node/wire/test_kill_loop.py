"""kill -9 at random moments, round after round, with a verifier that forgets nothing.

An idempotent producer writes while a node compacts, rolls and checkpoints; it retries whatever was
not acknowledged, as clients do. Everything acknowledged is in the log once, in order; the compacted
topic reads as the model says. ``SEEDS`` in the environment runs more of the long ones.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from kept.storage.records import build_batch, headers, records
from tests.support.request_values import now_ms, produce_values

KEYS = 30
ROUNDS = 2
LONG_ROUNDS = 25
SEEDS = int(os.environ.get("SEEDS", "1"))


class Producer:
    """One idempotent producer of a topic: at most one batch is unanswered."""

    def __init__(self, topic, producer_id, draw):
        self.topic = topic
        self.producer_id = producer_id
        self.draw = draw
        self.sequence = 0
        self.written = []
        """(key, value) of what was acknowledged, in order."""
        self.offsets = []
        self.pending = None

    def next_batch(self, now_ms):
        if self.pending is None:
            rows = []
            for n in range(self.draw.randrange(1, 6)):
                key = b"k%d" % self.draw.randrange(KEYS)
                value = b"%d.%d" % (self.sequence + n, self.producer_id)
                rows.append((now_ms, key, value if self.draw.random() > 0.1 else None, ()))
            self.pending = rows
        return build_batch(
            self.pending,
            producer_id=self.producer_id,
            producer_epoch=0,
            base_sequence=self.sequence,
        )

    def acknowledged(self, base_offset):
        self.written += [(key, value) for _, key, value, _ in self.pending]
        self.offsets += range(base_offset, base_offset + len(self.pending))
        self.sequence += len(self.pending)
        self.pending = None


def produce_until(wire, producers, deadline, cluster):
    """Write until the deadline, then kill while a batch of each is under way."""
    while time.monotonic() < deadline:
        for producer in producers:
            batch = producer.next_batch(now_ms())
            found = wire.produce(producer.topic, batch, acks=-1)
            assert int(found.error_code) == 0, found
            producer.acknowledged(found.base_offset)
    for producer in producers:
        batch = producer.next_batch(now_ms())
        wire.send(0, 9, **produce_values(producer.topic, batch, acks=-1))
    cluster.kill()


def everything(wire, topic):
    """Records by offset, read as a consumer reads."""
    found, offset, end = {}, 0, wire.end_offset(topic)
    while offset < end:
        data = bytes(wire.fetch(topic, offset).records or b"")
        if not data:
            break
        for record in records(data):
            if record.offset >= offset:
                assert record.offset not in found
                found[record.offset] = (record.key, record.value)
        offset = max(header.next_offset for _, header in headers(data))
    return found


def verify(wire, plain, table):
    found = everything(wire, plain.topic)
    assert [found.pop(offset) for offset in plain.offsets] == plain.written
    # What was sent and not answered may be there, once.
    assert list(found.values()) in ([], [(k, v) for _, k, v, _ in plain.pending or ()])
    found = everything(wire, table.topic)
    told = dict(zip(table.offsets, table.written, strict=True))
    end = wire.end_offset(table.topic)
    extra = [(k, v) for _, k, v, _ in table.pending or ()]
    if end > len(told):
        told |= {len(told) + n: record for n, record in enumerate(extra)}
    assert end == len(told) and all(told[offset] == found[offset] for offset in found)
    newest = {key: offset for offset, (key, _) in sorted(told.items())}
    view = {key: value for _, (key, value) in sorted(found.items()) if value is not None}
    for key, offset in newest.items():
        if told[offset][1] is None:
            assert offset in found or key not in {k for k, _ in found.values()}
        else:
            assert found[offset] == told[offset] and view[key] == told[offset][1]
    return len(found), len(told)


def run(kept_cluster, connect, rounds, seed, longest_s):
    draw = random.Random(seed)
    cluster = kept_cluster(
        log_cleaner_backoff_ms=20,
        log_flush_offset_checkpoint_interval_ms=50,
        replica_high_watermark_checkpoint_interval_ms=50,
        log_flush_start_offset_checkpoint_interval_ms=50,
    )
    small = {"segment.bytes": "3000", "index.interval.bytes": "300", "file.delete.delay.ms": "100"}
    table = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", **small}
    producers = [
        Producer(cluster.create_topic(config=small), 1, draw),
        Producer(cluster.create_topic(config=table), 2, draw),
    ]
    for _ in range(rounds):
        wire = connect(cluster.port())
        deadline = time.monotonic() + draw.uniform(0.05, longest_s)
        produce_until(wire, producers, deadline, cluster)
        cluster.start()
        wire = connect(cluster.port())
        verify(wire, *producers)
        for producer in producers:  # the retry: a duplicate is answered with its first offset
            found = wire.produce(producer.topic, producer.next_batch(now_ms()), acks=-1)
            assert int(found.error_code) == 0
            producer.acknowledged(found.base_offset)
            assert producer.offsets == list(range(len(producer.offsets))), "once each"
        verify(wire, *producers)
    table_writer = producers[1]

    def cleaned() -> bool:  # on a slow machine each worker may have been killed before its end
        found = wire.produce(table_writer.topic, table_writer.next_batch(now_ms()), acks=-1)
        assert int(found.error_code) == 0
        table_writer.acknowledged(found.base_offset)
        return 'event="log cleaned"' in cluster.log() and len(
            everything(wire, table_writer.topic)
        ) < len(table_writer.written)

    cluster.wait_until(cleaned, "a log is cleaned")
    left, written = verify(wire, *producers)
    assert cluster.log().count("Traceback") == 0
    return cluster, left, written


@pytest.mark.slow
def test_kill_9_round_after_round(kept_cluster, connect):
    cluster, left, written = run(kept_cluster, connect, ROUNDS, 23, 1.2)
    assert 'event="log cleaned"' in cluster.log() and left < written


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_kill_9_many_rounds(kept_cluster, connect, seed):
    cluster, left, written = run(kept_cluster, connect, LONG_ROUNDS, seed, 1.5)
    assert 'event="log cleaned"' in cluster.log() and left < written
