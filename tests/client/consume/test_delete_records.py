"""DeleteRecords: what some partitions refuse is told beside what is done."""

from __future__ import annotations

from typing import Any

import pytest
from kio.static.constants import EntityType

from kept.client.consume.leader_offsets import delete_records
from kept.client.core.metadata import ClusterMetadata, Endpoint, PartitionMetadata, TopicMetadata
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import build, message_type
from kept.storage.errors import KeptError
from kept.storage.types import TopicPartition

T0, T1, T2 = (TopicPartition("t", number) for number in range(3))
POLICY_VIOLATION, NOT_LEADER = 44, 6


def answer(results: dict[int, tuple[int, int]]) -> Any:
    """By partition: low watermark and error code."""
    partitions = [
        {"partition_index": number, "low_watermark": low, "error_code": code}
        for number, (low, code) in results.items()
    ]
    cls = message_type(ApiKey.DELETE_RECORDS, 2, EntityType.response)
    return build(cls, {"topics": [{"name": "t", "partitions": partitions}]})


def test_what_is_refused_is_told_and_what_moved_is_asked_again():
    partitions = {n: PartitionMetadata(n, 1, 1, (1,), (1,)) for n in range(3)}
    view = ClusterMetadata(
        nodes={1: Endpoint("h", 1)}, topics={"t": TopicMetadata("t", None, False, partitions)}
    )
    operation = delete_records(view, {T0: 5, T1: 6, T2: 7}, 1_000)
    (call,) = next(operation)
    assert isinstance(call.values, dict)
    assert [p["offset"] for p in call.values["topics"][0]["partitions"]] == [5, 6, 7]
    first = answer({0: (5, 0), 1: (-1, POLICY_VIOLATION), 2: (-1, NOT_LEADER)})
    assert call.check is not None and call.check(first) is None
    (second,) = operation.send([first])
    assert isinstance(second.values, dict)
    assert [p["partition_index"] for p in second.values["topics"][0]["partitions"]] == [2]
    assert second.check(answer({2: (-1, NOT_LEADER)})) is not None, "nothing came of it: again"
    with pytest.raises(StopIteration) as end:
        operation.send([answer({2: (7, 0)})])
    results = end.value.value
    assert (results[T0], results[T2]) == (5, 7)
    assert isinstance(results[T1], KeptError) and "POLICY_VIOLATION" in str(results[T1])
