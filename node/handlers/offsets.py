"""ListOffsets and OffsetForLeaderEpoch: answered by the partition's leader.

Rules 25 and 38; ``Partition`` decides, this module only groups questions and answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kept.node import error_codes
from kept.node.logging import log
from kept.storage.errors import InvalidRequest, KeptError
from kept.storage.types import IsolationLevel, TopicPartition

if TYPE_CHECKING:
    from kept.node.api import Answer, RequestContext


def isolation_level(number: int) -> IsolationLevel:
    """The level of a request; raises InvalidRequest for a number that is none."""
    try:
        return IsolationLevel(number)
    except ValueError:
        raise InvalidRequest(f"isolation_level is 0 or 1, not {number}") from None


def list_offsets(ctx: RequestContext, request: Any) -> Answer:
    """Offsets by timestamp. Special ones: -1 latest, -2 earliest, -3 of the largest timestamp,
    -4 earliest local, -5 latest tiered.
    """
    isolation = isolation_level(getattr(request, "isolation_level", 0))
    topics = []
    for topic in request.topics:
        answers = []
        for wanted in topic.partitions:
            answer = {"partition_index": wanted.partition_index, "error_code": 0}
            try:
                partition = ctx.node.partition(TopicPartition(topic.name, wanted.partition_index))
                timestamp, offset, leader_epoch = partition.list_offset(
                    int(wanted.timestamp), isolation, getattr(wanted, "current_leader_epoch", -1)
                )
                answer.update(timestamp=timestamp, offset=offset, leader_epoch=leader_epoch)
            except KeptError as error:
                answer["error_code"] = _code(error, topic.name, wanted.partition_index)
            answers.append(answer)
        topics.append({"name": topic.name, "partitions": answers})
    return {"topics": topics}


def offset_for_leader_epoch(ctx: RequestContext, request: Any) -> Answer:
    """Where a leader epoch ends (KIP-101, KIP-320)."""
    topics = []
    for topic in request.topics:
        answers = []
        for wanted in topic.partitions:
            answer = {"partition": wanted.partition, "error_code": 0}
            try:
                partition = ctx.node.partition(TopicPartition(topic.topic, wanted.partition))
                leader_epoch, end_offset = partition.end_offset_for_epoch(
                    getattr(wanted, "current_leader_epoch", -1), wanted.leader_epoch
                )
                answer.update(leader_epoch=leader_epoch, end_offset=end_offset)
            except KeptError as error:
                answer["error_code"] = _code(error, topic.topic, wanted.partition)
            answers.append(answer)
        topics.append({"topic": topic.topic, "partitions": answers})
    return {"topics": topics}


def _code(error: KeptError, topic: str, partition: int) -> int:
    code = error_codes.code_for(error)
    if code == error_codes.UNKNOWN_SERVER_ERROR:
        log.exception("offset look-up failed", error, topic=topic, partition=partition)
    return code
