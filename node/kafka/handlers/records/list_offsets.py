"""ListOffsets and OffsetForLeaderEpoch: answered by the partition's leader.

Rules 25 and 38; ``Partition`` decides, this module only groups questions and answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kept.node.runtime import error_codes
from kept.node.runtime.logging import log
from kept.storage.errors import InvalidRequest, KeptError, UnsupportedVersion
from kept.storage.types import IsolationLevel, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable

    from kept.client.protocol.messages import Values
    from kept.node.kafka.api import Answer, RequestContext
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.steps import Steps

SPECIAL_SINCE: Final = MappingProxyType({-1: 0, -2: 0, -3: 7, -4: 8, -5: 9, -6: 11})
"""Timestamps that mean something else, and the version of ListOffsets from which they do."""


def isolation_level(number: int) -> IsolationLevel:
    """The level of a request; raises InvalidRequest for a number that is none."""
    try:
        return IsolationLevel(number)
    except ValueError:
        raise InvalidRequest(f"isolation_level is 0 or 1, not {number}") from None


@dataclass(frozen=True, slots=True)
class ListOffsetsHandler:
    """Offsets by timestamp and by leader epoch."""

    table: ReplicaTable

    def list_offsets(self, ctx: RequestContext, request: Any) -> Steps[Answer]:
        """Offsets by timestamp. Special ones: -1 latest, -2 earliest, -3 of the largest timestamp,
        -4 earliest local, -5 latest tiered; any other, and one that is younger than the request's
        version, is UNSUPPORTED_VERSION.
        """
        isolation = isolation_level(getattr(request, "isolation_level", 0))

        def offset(topic: str, entry: Any) -> Values:
            timestamp = int(entry.timestamp)
            _check_special(timestamp, ctx.api_version)
            partition = self.table.partition(TopicPartition(topic, entry.partition_index))
            leader_epoch = getattr(entry, "current_leader_epoch", -1)
            values = partition.list_offset(timestamp, isolation, leader_epoch)
            return dict(zip(("timestamp", "offset", "leader_epoch"), values, strict=True))

        return _each(request, "name", "partition_index", offset)

    def offset_for_leader_epoch(self, _ctx: RequestContext, request: Any) -> Steps[Answer]:
        """Where a leader epoch ends (KIP-101, KIP-320)."""

        def end_offset(topic: str, entry: Any) -> Values:
            partition = self.table.partition(TopicPartition(topic, entry.partition))
            values = partition.end_offset_for_epoch(
                getattr(entry, "current_leader_epoch", -1), entry.leader_epoch
            )
            return dict(zip(("leader_epoch", "end_offset"), values, strict=True))

        return _each(request, "topic", "partition", end_offset)


def _each(
    request: Any, name: str, index: str, look_up: Callable[[str, Any], Values]
) -> Steps[Answer]:
    """A response with what ``look_up`` gives for each partition of a request, or the error that it
    raises. ``name`` and ``index`` are the fields that name topics and partitions.
    """
    topics = []
    for topic in request.topics:
        topic_name, partitions = getattr(topic, name), []
        for entry in topic.partitions:
            yield
            number = getattr(entry, index)
            try:
                values = {"error_code": error_codes.NONE, **look_up(topic_name, entry)}
            except KeptError as error:
                values = {"error_code": _code(error, topic_name, number)}
            partitions.append({index: number, **values})
        topics.append({name: topic_name, "partitions": partitions})
        yield
    return {"topics": topics}


def _check_special(timestamp: int, version: int) -> None:
    if timestamp < 0 and version < SPECIAL_SINCE.get(timestamp, version + 1):
        raise UnsupportedVersion(f"ListOffsets v{version} knows no timestamp {timestamp}")


def _code(error: KeptError, topic: str, partition: int) -> int:
    code = error_codes.code_for(error)
    if code == error_codes.UNKNOWN_SERVER_ERROR:
        log.exception("offset look-up failed", error, topic=topic, partition=partition)
    return code
