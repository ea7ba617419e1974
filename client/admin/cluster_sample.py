"""Where partitions end and how large they are, at one moment: operations without I/O (see
:mod:`kept.client.admin.topics`). A leader that does not answer in time is done without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kept.client.admin.topics import Operation, run_concurrently
from kept.client.consume.leader_offsets import known_ends
from kept.client.core.calls import Call, ToNode
from kept.client.core.metadata import ClusterMetadata
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import KeptError
from kept.storage.types import TopicPartition


class PartitionSample(NamedTuple):
    """High watermarks, and bytes on the disks of the leaders; without what is not known."""

    ends: dict[TopicPartition, int]
    sizes: dict[TopicPartition, int]


def sample_partitions(
    view: ClusterMetadata, partitions: Sequence[TopicPartition], patience_ms: int
) -> Operation[PartitionSample]:
    """Where partitions with a leader end, and how large they are there. Each leader gets one
    request for the sizes, and one for each 500 ends.
    """
    ends, sizes = yield from run_concurrently(
        known_ends(view, partitions, patience_ms), _sizes(view, partitions, patience_ms)
    )
    return PartitionSample(ends, sizes)


def _sizes(
    view: ClusterMetadata, partitions: Sequence[TopicPartition], patience_ms: int
) -> Operation[dict[TopicPartition, int]]:
    by_leader: dict[int, dict[str, list[int]]] = {}
    for topic, number in partitions:
        leader = view.topics[topic].partitions[number].leader
        by_leader.setdefault(leader, {}).setdefault(topic, []).append(number)
    calls = [
        Call(
            ApiKey.DESCRIBE_LOG_DIRS,
            {"topics": [{"topic": name, "partitions": numbers} for name, numbers in its.items()]},
            ToNode(leader),
            optional=True,
            timeout_ms=patience_ms,
        )
        for leader, its in by_leader.items()
    ]
    responses = yield calls
    return {
        TopicPartition(str(topic.name), int(partition.partition_index)): int(
            partition.partition_size
        )
        for response in responses
        if not isinstance(response, KeptError)
        for directory in response.results
        for topic in directory.topics
        for partition in topic.partitions
        if not partition.is_future_key
    }
