"""A topic of a real node that is filled with updates for its cleaner."""

from __future__ import annotations

from kept.storage.records import build_batch
from tests.support.request_values import now_ms

CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": "4000",
    "min.cleanable.dirty.ratio": "0.01",
}


def fill(wire, topic, rounds=40, keys=20):
    """Rounds of updates; the last value of each key."""
    expected = {}
    for number in range(rounds):
        batch = []
        for key in range(keys):
            name, value = b"k%d" % key, b"%d" % number * 5
            batch.append((now_ms(), name, value, ()))
            expected[name] = value
        assert int(wire.produce(topic, build_batch(batch), acks=-1).error_code) == 0
    return expected
