"""Values of the requests that tests send most: fields that a test does not name say nothing."""

from __future__ import annotations

import time
from typing import Any

from kept.storage.records import build_batch


def now_ms() -> int:
    """What a client stamps its records with."""
    return int(time.time() * 1000)


def one_batch(count: int = 1, size: int = 10, **more: Any) -> bytes:
    """A batch of ``count`` records with keys."""
    stamp = more.pop("timestamp", None) or now_ms()
    records = [(stamp, b"k%d" % i, b"v" * size, ()) for i in range(count)]
    return build_batch(records, **more)


def produce_values(
    topic: str, *batches: bytes | None, partition: int = 0, topic_id: Any = None, **more: Any
) -> dict[str, Any]:
    """A batch for each partition from ``partition`` on."""
    data = [{"index": index, "records": batch} for index, batch in enumerate(batches, partition)]
    topics = [{"name": topic, "topic_id": topic_id, "partition_data": data}]
    return {"transactional_id": None, "acks": 1, "timeout": 60_000, "topic_data": topics, **more}


def fetch_values(
    topic: str,
    offset: int = 0,
    *,
    partition: int = 0,
    count: int = 1,
    topic_id: Any = None,
    partition_max_bytes: int = 1 << 20,
    current_leader_epoch: int = -1,
    **more: Any,
) -> dict[str, Any]:
    """The same offset of ``count`` partitions, from ``partition`` on."""
    partitions = [
        {
            "partition": number,
            "fetch_offset": offset,
            "partition_max_bytes": partition_max_bytes,
            "current_leader_epoch": current_leader_epoch,
        }
        for number in range(partition, partition + count)
    ]
    return {
        "replica_id": -1,
        "max_wait": 0,
        "min_bytes": 1,
        "max_bytes": 1 << 24,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": topic, "topic_id": topic_id, "partitions": partitions}],
        "forgotten_topics_data": (),
        "rack_id": "",
        **more,
    }


def list_offsets_values(topic: str, timestamp: int = -1) -> dict[str, Any]:
    """Of partition 0; a timestamp of -1 is its end."""
    partition = {"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": -1}
    topics = [{"name": topic, "partitions": [partition]}]
    return {"replica_id": -1, "isolation_level": 0, "topics": topics, "timeout": 1000}


def topic_values(name: str, partitions: int = 1, **configs: str) -> dict[str, Any]:
    """A topic of a CreateTopics, with one replica; ``configs`` with underscores for dots."""
    named = [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()]
    return {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": 1,
        "assignments": (),
        "configs": named,
    }
