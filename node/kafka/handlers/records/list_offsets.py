"""ListOffsets and OffsetForLeaderEpoch: answered by the partition's leader.

Rules 25 and 38; ``Partition`` decides, this module only groups questions and answers. For a
timestamp one batch has to be looked into, which may be large or inflate to much: a thread does it
then, as for batches that are produced (``kept.node.kafka.handlers.records.batch_checks``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kept.node.kafka.handlers.records.batch_checks import inflated
from kept.node.runtime import error_codes
from kept.node.runtime.time_slices import LOOP_BYTES
from kept.storage.errors import (
    InflatesBeyondLimit,
    InvalidRequest,
    KeptError,
    MachineError,
    UnsupportedVersion,
)
from kept.storage.log.log_reader import TimestampOffset, find_record
from kept.storage.records import DEFAULT_INFLATE_LIMIT
from kept.storage.types import IsolationLevel, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kept.client.protocol.messages import Values
    from kept.node.kafka.api import HandlerResult, RequestContext
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.memory_budget import BudgetShare
    from kept.node.runtime.runtime import Runtime
    from kept.steps import Steps
    from kept.storage.disk import Disk, FileSlice
    from kept.storage.log.log_reader import FindRecord

    Place = tuple[Disk, FileSlice, int, int]
    """Where a record is looked for: disk, batch, timestamp, first offset."""
    LookUp = Callable[[FindRecord], Values]

_ISOLATION_LEVELS: Final = {level.value: level for level in IsolationLevel}
SPECIAL_SINCE: Final = MappingProxyType({-1: 0, -2: 0, -3: 7, -4: 8, -5: 9, -6: 11})
"""Timestamps that mean something else, and the version of ListOffsets from which they do."""


def isolation_level(number: int) -> IsolationLevel:
    """The level of a request; raises InvalidRequest for a number that is none."""
    level = _ISOLATION_LEVELS.get(number)
    if level is None:
        raise InvalidRequest(f"isolation_level is 0 or 1, not {number}")
    return level


class _LargeBatch(Exception):
    """A thread has to look into a batch."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.place = place


class _Finder:
    """Looks into batches for one partition: on the loop into small ones, and else knows what a
    thread has ``found``, or how that failed.
    """

    def __init__(self) -> None:
        self.found: dict[Place, TimestampOffset | MachineError | None] = {}
        self._inflate_beyond: set[Place] = set()

    def __call__(
        self, disk: Disk, batch: FileSlice, timestamp: int, from_offset: int
    ) -> TimestampOffset | None:
        place = (disk, batch, timestamp, from_offset)
        if place in self.found:
            found = self.found[place]
            if isinstance(found, MachineError):
                raise found
            return found
        if batch.size_bytes <= LOOP_BYTES and place not in self._inflate_beyond:
            try:
                return find_record(disk, batch, timestamp, from_offset, LOOP_BYTES)
            except InflatesBeyondLimit:
                self._inflate_beyond.add(place)
        raise _LargeBatch(place)


@dataclass(slots=True)
class _Large:
    """A partition whose batch at ``place`` is looked into in a thread, and its answer so far."""

    answer: dict[str, Any]
    look_up: LookUp
    find: _Finder
    place: Place


@dataclass(frozen=True, slots=True)
class ListOffsetsHandler:
    """Offsets by timestamp and by leader epoch."""

    runtime: Runtime
    table: ReplicaTable
    inflating: BudgetShare

    def list_offsets(self, ctx: RequestContext, request: Any) -> Steps[HandlerResult]:
        """Offsets by timestamp. Special ones: -1 latest, -2 earliest, -3 of the largest timestamp
        (none while that lies below the log start, where Apache Kafka names an offset that nobody
        can read), -4 earliest local, -5 latest tiered; any other, and one that is younger than the
        request's version, is UNSUPPORTED_VERSION.

        Where a thread looks, a partition that is named twice is INVALID_REQUEST the second time;
        in Kafka it always is.
        """
        isolation = isolation_level(getattr(request, "isolation_level", 0))
        large: dict[TopicPartition, _Large] = {}

        def offset(topic: str, entry: Any, find: FindRecord) -> Values:
            timestamp = int(entry.timestamp)
            _check_special(timestamp, ctx.api_version)
            partition = self.table.partition(TopicPartition(topic, entry.partition_index))
            leader_epoch = getattr(entry, "current_leader_epoch", -1)
            values = partition.list_offset(timestamp, isolation, leader_epoch, find)
            return dict(zip(("timestamp", "offset", "leader_epoch"), values, strict=True))

        def look_up(topic: str, entry: Any, answer: dict[str, Any]) -> None:
            find = _Finder()
            try:
                answer |= offset(topic, entry, find)
            except _LargeBatch as batch:
                tp = TopicPartition(topic, entry.partition_index)
                if tp in large:
                    raise InvalidRequest(f"{tp.place} is named twice") from None
                large[tp] = _Large(answer, partial(offset, topic, entry), find, batch.place)

        answer = yield from _each(request, "name", "partition_index", look_up)
        return self._complete(answer, large) if large else answer

    async def _complete(self, answer: Values, large: Mapping[TopicPartition, _Large]) -> Values:
        """The answer, once threads have looked into the ``large`` batches."""
        for tp, one in large.items():
            try:
                one.answer |= await self._looked_up(one)
            except KeptError as error:
                one.answer["error_code"] = _code(error, *tp)
        return answer

    async def _looked_up(self, large: _Large) -> Values:
        place = large.place
        while True:
            try:
                (found,) = await inflated(
                    self.runtime,
                    self.inflating,
                    partial(_found, *place),
                    limit=DEFAULT_INFLATE_LIMIT,
                )
            except MachineError as error:
                found = error.without_frames()
            large.find.found[place] = found
            try:
                return large.look_up(large.find)
            except _LargeBatch as next_one:
                place = next_one.place

    def offset_for_leader_epoch(self, _ctx: RequestContext, request: Any) -> Steps[HandlerResult]:
        """Where a leader epoch ends (KIP-101, KIP-320)."""

        def look_up(topic: str, entry: Any, answer: dict[str, Any]) -> None:
            partition = self.table.partition(TopicPartition(topic, entry.partition))
            values = partition.end_offset_for_epoch(
                getattr(entry, "current_leader_epoch", -1), entry.leader_epoch
            )
            answer |= zip(("leader_epoch", "end_offset"), values, strict=True)

        return _each(request, "topic", "partition", look_up)


def _found(
    disk: Disk, batch: FileSlice, timestamp: int, from_offset: int, *, inflate_limit: int
) -> list[TimestampOffset | None]:
    return [find_record(disk, batch, timestamp, from_offset, inflate_limit)]


def _each(
    request: Any, name: str, index: str, look_up: Callable[[str, Any, dict[str, Any]], None]
) -> Steps[Values]:
    """A response with what ``look_up`` adds to the answer of each partition of a request, or the
    error that it raises. ``name`` and ``index`` are the fields that name topics and partitions.
    """
    topics = []
    for topic in request.topics:
        topic_name, partitions = getattr(topic, name), []
        for entry in topic.partitions:
            yield
            answer = {index: getattr(entry, index), "error_code": error_codes.NONE}
            try:
                look_up(topic_name, entry, answer)
            except KeptError as error:
                answer["error_code"] = _code(error, topic_name, answer[index])
            partitions.append(answer)
        topics.append({name: topic_name, "partitions": partitions})
        yield
    return {"topics": topics}


def _check_special(timestamp: int, version: int) -> None:
    if timestamp < 0 and version < SPECIAL_SINCE.get(timestamp, version + 1):
        raise UnsupportedVersion(f"ListOffsets v{version} knows no timestamp {timestamp}")


def _code(error: KeptError, topic: str, partition: int) -> int:
    return error_codes.code_for(error, "offset look-up failed", topic=topic, partition=partition)
