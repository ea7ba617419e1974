"""Follows a topic: the records that came since the last look, for people to watch.

It begins at the end. Each look asks the leaders how far their logs are, and reads of those that
moved at most :data:`MAX_READ_BYTES` together; what does not fit into an event is passed over and
counted, so whoever looks seldom or reads slowly gets the newest, and is told how many he missed.
Nothing is held between two looks but the positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kept.client.consume.positions import LATEST
from kept.node.admin.partition_offsets import offsets_from_leaders
from kept.node.admin.partition_records import Reader
from kept.node.admin.record_browser import shown_bytes
from kept.node.admin.record_filter import (
    MAX_INFLATED_BYTES,
    RecordFilter,
    ScanRange,
    ScanResult,
    scan_all,
)
from kept.node.admin.record_search import MAX_PARTITIONS, PATIENCE_S, FoundRecord
from kept.node.kafka.handlers.batch_checks import inflated
from kept.storage.errors import InvalidRequest, KeptError
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.admin.cluster_client import ClusterClient
    from kept.node.admin.topic_lookup import TopicLookup
    from kept.node.metadata.metadata_log import Metadata
    from kept.node.runtime.memory_budget import BudgetShare
    from kept.node.runtime.runtime import Runtime

MAX_EVENT_RECORDS: Final = 100
MAX_EVENT_BYTES: Final = 512 * 1024
"""Of the records of one event, as they are in an answer."""
LEAST_BYTES: Final = 32 * 1024
"""Of one partition's, where many moved."""
MAX_HELD_BYTES: Final = 2 * 1024 * 1024
"""Of records of one look, of which an event gets the newest."""
MAX_READ_BYTES: Final = 4 * 1024 * 1024
"""Of batches that one look reads; a fetch more at most."""


class TailEvent(Struct, frozen=True):
    """Records by timestamp, and how many were ``left_out`` since the event before: those that fit
    and had no room, and offsets that were passed over unread.
    """

    partitions: int
    records: list[FoundRecord]
    left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTails:
    """Makes the tails of one node."""

    runtime: Runtime
    metadata: Metadata
    inflating: BudgetShare
    lookup: TopicLookup
    new_client: Callable[[], ClusterClient]

    def tail(self, topic: str, wanted: RecordFilter, partition: int | None = None) -> Tail:
        """A tail of a topic or of one partition; whoever has it closes it. Raises InvalidRequest,
        UnknownTopicOrPartition.
        """
        wanted.check()
        if partition is not None:
            self.lookup.partition(topic, partition)
        elif len(self.lookup.topic(topic).partitions) > MAX_PARTITIONS:
            raise InvalidRequest(
                f"{topic} has more than {MAX_PARTITIONS} partitions; name one to follow"
            )
        return Tail(self, topic, wanted, partition)


class Tail:
    """See the module."""

    def __init__(
        self, tails: RecordTails, topic: str, wanted: RecordFilter, partition: int | None
    ) -> None:
        self._tails = tails
        self._topic = topic
        self._topic_id = tails.lookup.topic(topic).topic_id
        self._wanted = wanted
        self._partition = partition
        self._client = tails.new_client()
        self._positions: dict[TopicPartition, int] = {}
        self._count = 0
        """Partitions that there were when it began."""
        self._turn = 0

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    async def begin(self) -> TailEvent:
        """Begin at the ends; an event without records."""
        self._positions, self._count = await self._ends(), len(self._followed())
        return TailEvent(self._count, [], 0)

    async def look(self) -> TailEvent | None:
        """What came since the last look, perhaps nothing; None: the topic is there no more."""
        image = self._tails.metadata.image.topics.get(self._topic)
        if image is None or image.topic_id != self._topic_id:
            return None
        ends = await self._ends()
        for tp, end in ends.items():
            begun = end if tp.partition < self._count else 0  # a new one: from its first record on
            self._positions[tp] = min(self._positions.get(tp, begun), end)
        moved = [tp for tp, end in ends.items() if end > self._positions[tp]]
        self._turn += 1
        first = self._turn % max(len(moved), 1)  # so that no partition is always the last
        records: list[FoundRecord] = []
        left_out = read_bytes = held_bytes = 0
        for tp in moved[first:] + moved[:first]:
            share = max(MAX_EVENT_BYTES // len(moved), LEAST_BYTES)
            if read_bytes >= MAX_READ_BYTES or held_bytes >= MAX_HELD_BYTES:
                left_out += ends[tp] - self._positions[tp]
            else:
                result, passed_over, size_bytes = await self._read(tp, ends[tp], share)
                records += [FoundRecord(tp.partition, one) for one in result.records]
                left_out += passed_over
                read_bytes += size_bytes
                held_bytes += result.size_bytes
            self._positions[tp] = ends[tp]
        newest = _newest(records)
        return TailEvent(len(self._followed()), newest, left_out + len(records) - len(newest))

    async def _read(
        self, tp: TopicPartition, end: int, most_bytes: int
    ) -> tuple[ScanResult, int, int]:
        """The newest records that fit of a partition up to ``end``, how many offsets and records
        were left out, and the bytes that were read.
        """
        tails = self._tails
        position, first = self._positions[tp], self._positions[tp]
        if self._wanted == RecordFilter():
            first = max(first, end - MAX_EVENT_RECORDS)
        reader = Reader(
            tails.runtime, tails.metadata, tails.inflating, self._client, tp, patience_s=PATIENCE_S
        )
        try:
            await reader.seek(first)
            batches = await reader.fetch_marked()
        except KeptError:  # its leader has just gone; what came is passed over, and counted
            return ScanResult(), end - position, 0
        if not batches:
            return ScanResult(), first - position, 0
        of = ScanRange(first, end, MAX_EVENT_RECORDS, most_bytes, newest=True)
        read = partial(scan_all, batches, self._wanted, of)
        results: list[ScanResult] = await inflated(
            tails.runtime, tails.inflating, read, limit=MAX_INFLATED_BYTES
        )
        reached = min(batches[-1].header.next_offset, end)
        left_out = first - position + end - reached + results[0].fitting - len(results[0].records)
        return results[0], left_out, sum(len(batch.data) for batch in batches)

    def _followed(self) -> list[TopicPartition]:
        if self._partition is not None:
            return [TopicPartition(self._topic, self._partition)]
        topic = self._tails.metadata.image.topics.get(self._topic)
        count = 0 if topic is None else len(topic.partitions)
        return [TopicPartition(self._topic, number) for number in range(count)]

    async def _ends(self) -> dict[TopicPartition, int]:
        """How far the logs are whose leaders say it."""
        wanted = dict.fromkeys(self._followed(), LATEST)
        image = self._tails.metadata.image
        return (await offsets_from_leaders(self._client, image, wanted)).offsets


def _newest(records: list[FoundRecord]) -> list[FoundRecord]:
    """Those that an event has room for, by timestamp; one at least."""
    newest: list[FoundRecord] = []
    size_bytes = 0
    for found in sorted(records, key=lambda found: found.record.timestamp, reverse=True):
        size_bytes += shown_bytes(found.record)
        if newest and (size_bytes > MAX_EVENT_BYTES or len(newest) >= MAX_EVENT_RECORDS):
            break
        newest.append(found)
    return newest[::-1]
