"""A segment that was cut below the recovery point: readers are told, and the node says it."""

from __future__ import annotations

import os

import pytest

from tests.support.request_values import one_batch
from tests.support.slow import rest_slow


@pytest.mark.parametrize("clean", rest_slow([True, False], 1))
def test_a_consumer_of_a_segment_that_was_cut_is_told(kept_cluster, connect, clean):
    cluster = kept_cluster(log_flush_offset_checkpoint_interval_ms=50)
    topic = cluster.create_topic(config={"segment.bytes": "4096", "flush.messages": "1"})
    wire = connect(cluster.port())
    for number in range(20):
        assert wire.produce(topic, one_batch(1, 600)).base_offset == number
    directory = os.path.join(cluster.data_dir(), "log", f"{topic}-0")
    cluster.wait_until(lambda: _recovery_point(cluster, topic) == 20, "all is durable")
    cluster.stop() if clean else cluster.kill()
    path = os.path.join(directory, f"{0:020d}.log")
    os.truncate(path, os.path.getsize(path) - 10)
    cluster.start()
    wire = connect(cluster.port())
    got = wire.fetch(topic, 0)
    assert (got.error_code.name, got.records is not None) == ("none", True)
    (last,) = [
        offset for offset in range(20) if wire.fetch(topic, offset).error_code.name != "none"
    ]
    told = wire.fetch(topic, last)
    assert told.error_code.name == "corrupt_message", "Kafka's consumers stop with it"
    assert not told.records
    assert 'event="a log is damaged"' in cluster.log() and path in cluster.log()
    assert cluster.log().count('event="a log is damaged"') == 1, "and not at each fetch"
    assert wire.fetch(topic, last + 1).error_code.name == "none", "what is whole is served"
    assert wire.produce(topic, one_batch(1)).base_offset == 20


def _recovery_point(cluster, topic) -> int:
    path = os.path.join(cluster.data_dir(), "log", "recovery-point-offset-checkpoint")
    with open(path) as file:
        lines = [line.split() for line in file.read().splitlines()[2:]]
    return next((int(offset) for name, _, offset in lines if name == topic), -1)
