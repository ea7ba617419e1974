"""A segment that was cut below the recovery point: readers are told, and the node says it."""

from __future__ import annotations

import os

import pytest

from tests.support.request_values import one_batch
from tests.support.slow import rest_slow


@pytest.mark.parametrize("clean", rest_slow([True, False], 1))
@pytest.mark.parametrize(("bytes_gone", "batches"), [(10, 1), (1500, 3)])
def test_a_consumer_of_a_segment_that_was_cut_is_told(
    kept_cluster, connect, bytes_gone, batches, clean
):
    """Behind the last entry of its index, and before: what was flushed behind it is served."""
    cluster = kept_cluster(log_flush_offset_checkpoint_interval_ms=50)
    config = {"segment.bytes": "4096", "index.interval.bytes": "1000", "flush.messages": "1"}
    topic = cluster.create_topic(config=config)
    wire = connect(cluster.port())
    for number in range(20):
        assert wire.produce(topic, one_batch(1, 600)).base_offset == number
    directory = os.path.join(cluster.data_dir(), "log", f"{topic}-0")
    cluster.wait_until(lambda: _recovery_point(cluster, topic) == 20, "all is durable")
    cluster.stop() if clean else cluster.kill()
    path = os.path.join(directory, f"{0:020d}.log")
    os.truncate(path, os.path.getsize(path) - bytes_gone)
    cluster.start()
    wire = connect(cluster.port())
    got = wire.fetch(topic, 0)
    assert (got.error_code.name, got.records is not None) == ("none", True)
    refused = [
        offset for offset in range(20) if wire.fetch(topic, offset).error_code.name != "none"
    ]
    first, last = refused[0], refused[-1]
    assert refused == list(range(first, last + 1)) and len(refused) == batches
    for offset in refused:
        told = wire.fetch(topic, offset)
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
