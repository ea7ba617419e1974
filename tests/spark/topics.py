"""What tests do to topics: fill, compact, cut and read them with our own client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from kept.client.client import Client, OutRecord
from kept.client.core.broker_errors import failure
from kept.client.core.calls import ToLeader
from kept.client.core.metadata import Endpoint
from kept.client.json_api import JsonApi
from kept.storage.types import TopicPartition
from kept.testing import Cluster

DELETE_RECORDS = 21
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "2000", "min.cleanable.dirty.ratio": "1"}
"""Compacted when it is asked for, not in between."""
DEADLINE_S = 150


def fill(client: Client, topic: str, keys: Iterable[int], partition: int | None = None) -> None:
    """One batch a partition: key ``k<n>``, value ``v<n>``."""
    client.produce(topic, [OutRecord(b"k%d" % n, b"v%d" % n, (), None, partition) for n in keys])


def compact(cluster: Cluster, topic: str) -> None:
    """Compact all of a topic's partitions, led by the first node, and wait until it is done."""
    api = JsonApi(Endpoint(cluster.host(), cluster.port()))
    found = api.post("compaction/now", {"topic": topic, "wait": True})["partitions"]
    clean = "everything is clean"
    assert all(one["done"] or one["reason"] == clean for one in found), found


def delete_before(client: Client, tp: TopicPartition, offset: int) -> None:
    """DeleteRecords: the log start moves to ``offset``."""
    partition = {"partition_index": tp.partition, "offset": offset}
    values = {"topics": [{"name": tp.topic, "partitions": [partition]}], "timeout": 10_000}
    client.topic(tp.topic)
    response = client.request(DELETE_RECORDS, values, ToLeader(*tp))
    error = failure(int(response.topics[0].partitions[0].error_code), f"DeleteRecords of {tp}")
    if error is not None:
        raise error


def recreate(client: Client, topic: str, partitions: int = 1) -> None:
    """Delete a topic and create another one under its name."""
    client.delete_topics([topic])
    eventually(lambda: topic not in client.metadata().topics)
    client.create_topic(topic, partitions=partitions)
    client.bounds(topic)


def eventually(there: Callable[[], Any], within_s: float = DEADLINE_S) -> Any:
    """Wait until ``there`` is true, and return it."""
    deadline = time.monotonic() + within_s
    while not (found := there()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


def has_limits() -> bool:
    """Whether streams of this Spark can be limited: 4.1 has no admission control for us."""
    try:
        from kept.pipeline.read.streaming import ADMISSION
    except ImportError:  # no Spark: the tests that ask do not run
        return False
    return ADMISSION
