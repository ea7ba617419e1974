"""Follows a topic: the records that came since the last poll, for people to watch.

It begins at the end. Each poll asks the leaders how far their logs are stable (records above an
open transaction come once that has ended), and reads of those that moved at most
:data:`MAX_READ_BYTES` together. A partition with more begins nearer to its end; what is passed over
and what does not fit into an event is counted, so whoever polls seldom or reads slowly gets the
newest, and is told how many he missed. Nothing is held between two polls but the positions.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kept.client.consume.positions import EARLIEST, LATEST
from kept.node.admin.records.partition_offsets import offsets_from_leaders
from kept.node.admin.records.partition_records import FETCH_BYTES, MarkedBatch, Reader, Readers
from kept.node.admin.records.record_browser import shown_bytes
from kept.node.admin.records.record_filter import RecordFilter, ScanRange, scan_in_thread
from kept.node.admin.records.record_search import MAX_PARTITIONS, PATIENCE_S, FoundRecord
from kept.storage.errors import InvalidRequest, KeptError, OffsetOutOfRange, RetriableError
from kept.storage.types import IsolationLevel, TopicPartition

if TYPE_CHECKING:
    from kept.node.security.client_usage import ClientUsage

POLL_S: Final = 1.0
"""Between two polls of one tail."""
MAX_EVENT_RECORDS: Final = 100
MAX_EVENT_BYTES: Final = 512 * 1024
"""Of the records of one event, as they are in an answer."""
LEAST_BYTES: Final = 32 * 1024
"""Of one partition's, where many moved."""
MAX_HELD_BYTES: Final = 2 * 1024 * 1024
"""Of records of one poll, of which an event gets the newest."""
MAX_READ_BYTES: Final = 4 * 1024 * 1024
"""Of batches that one poll reads; those of one partition more at most."""
LEAST_READ_BYTES: Final = 2 * FETCH_BYTES
"""Of one partition: a fetch shows how much lies before its end, another one comes nearer to it."""


class SkippedOffsets(Struct, frozen=True):
    """Offsets from ``begin`` up to ``end`` that could not be read, and why."""

    partition: int
    begin: int
    end: int
    why: str


class TailEvent(Struct, frozen=True):
    """Records by timestamp, and how many were ``left_out`` since the event before: those that fit
    and had no room, and offsets that were passed over unread. Of these ``skipped`` could not be
    read: their log begins later now, or is damaged.
    """

    partitions: int
    records: list[FoundRecord]
    left_out: int
    skipped: list[SkippedOffsets] = []


@dataclass(slots=True)
class _Read:
    """What was read of a partition up to ``reached``, and how many offsets were ``passed_over``."""

    reached: int
    passed_over: int = 0
    size_bytes: int = 0
    batches: list[MarkedBatch] = field(default_factory=list)
    skipped: list[SkippedOffsets] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RecordTails:
    """Makes the tails of one node."""

    readers: Readers

    def tail(
        self,
        usage: ClientUsage,
        topic: str,
        wanted: RecordFilter,
        partition: int | None = None,
    ) -> RecordTail:
        """A tail of a topic or of one partition, for whose ``usage`` it is; whoever has it closes
        it. Raises InvalidRequest, UnknownTopicOrPartition.
        """
        wanted.check()
        if partition is not None:
            self.readers.lookup.partition(topic, partition)
        elif len(self.readers.lookup.topic(topic).partitions) > MAX_PARTITIONS:
            raise InvalidRequest(
                f"{topic} has more than {MAX_PARTITIONS} partitions; name one to follow"
            )
        return RecordTail(self.readers, usage, topic, wanted, partition)


class RecordTail:
    """Reads the records that came to a topic since the last poll."""

    def __init__(
        self,
        readers: Readers,
        usage: ClientUsage,
        topic: str,
        wanted: RecordFilter,
        partition: int | None,
    ) -> None:
        self._readers = readers
        self._usage = usage
        self._topic = topic
        self._topic_id = readers.lookup.topic(topic).topic_id
        self._wanted = wanted
        self._partition = partition
        self._client = readers.new_client()
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

    async def poll(self) -> TailEvent | None:
        """What came since the last poll, perhaps nothing; None: the topic is there no more. While
        whoever follows is over his quota, nothing is read.
        """
        image = self._readers.metadata.image.topics.get(self._topic)
        if image is None or image.topic_id != self._topic_id:
            return None
        if self._usage.holds_back("fetch", POLL_S):
            return TailEvent(self._count, [], 0)
        ends = await self._ends()
        for tp, end in ends.items():
            begun = end if tp.partition < self._count else 0  # a new one: from its first record on
            self._positions[tp] = min(self._positions.get(tp, begun), end)
        moved = [tp for tp, end in ends.items() if end > self._positions[tp]]
        self._turn += 1
        first = self._turn % max(len(moved), 1)  # so that no partition is always the last
        records: list[FoundRecord] = []
        skipped: list[SkippedOffsets] = []
        left_out = read_bytes = held_bytes = 0
        for tp in moved[first:] + moved[:first]:
            if read_bytes >= MAX_READ_BYTES or held_bytes >= MAX_HELD_BYTES:
                left_out += ends[tp] - self._positions[tp]
                self._positions[tp] = ends[tp]
                continue
            begin, end = self._positions[tp], ends[tp]
            if self._wanted == RecordFilter():
                begin = max(begin, end - MAX_EVENT_RECORDS)
            read = await self._read(tp, begin, end, MAX_READ_BYTES // len(moved))
            self._positions[tp] = read.reached
            most_bytes = max(MAX_EVENT_BYTES // len(moved), LEAST_BYTES)
            of = ScanRange(begin, end, MAX_EVENT_RECORDS, most_bytes, newest=True)
            result = await scan_in_thread(self._readers, read.batches, self._wanted, of)
            records += [FoundRecord(tp.partition, one) for one in result.records]
            left_out += read.passed_over + result.matching - len(result.records)
            skipped += read.skipped
            read_bytes += read.size_bytes
            held_bytes += result.size_bytes
        newest = _newest(records)
        left_out += len(records) - len(newest)
        return TailEvent(len(self._followed()), newest, left_out, skipped)

    async def _read(self, tp: TopicPartition, begin: int, end: int, most_bytes: int) -> _Read:
        """The batches from ``begin`` up to ``end``; where those are more than ``most_bytes``, later
        ones after some of the first. What is not reached is left to the next poll.
        """
        most_bytes = max(most_bytes, LEAST_READ_BYTES)
        reader = self._readers.reader(self._client, tp, self._usage, PATIENCE_S)
        read, wanted = _Read(self._positions[tp]), begin
        try:
            await reader.seek(begin)
            while wanted < end and read.size_bytes < most_bytes:
                reader.position = wanted
                fetched = await reader.fetch_marked()
                if not fetched:  # nothing is left below the end
                    wanted = end
                    break
                first = min(wanted, fetched[0].header.base_offset)
                size_bytes = sum(len(batch.data) for batch in fetched)
                read.passed_over += max(0, max(first, begin) - read.reached)
                read.batches += fetched
                read.size_bytes += size_bytes
                read.reached = min(fetched[-1].header.next_offset, end)
                room_bytes = max(most_bytes - read.size_bytes, FETCH_BYTES // 2)
                room = max(1, room_bytes * (read.reached - first) // size_bytes)
                wanted = max(read.reached, end - room)
        except RetriableError:  # its leader has just gone: the next poll goes on
            return read
        except KeptError as error:  # its log begins later now, or cannot be read
            wanted = await self._next_readable(reader, error, end)
            read.skipped.append(
                SkippedOffsets(tp.partition, read.reached, wanted, error.client_message)
            )
        read.passed_over += wanted - read.reached
        read.reached = wanted
        return read

    @staticmethod
    async def _next_readable(reader: Reader, error: KeptError, end: int) -> int:
        """Where to go on after an error: at the log's start, or at ``end``."""
        if isinstance(error, OffsetOutOfRange):
            with suppress(KeptError):
                return min(max(await reader.offset_at(EARLIEST), reader.position), end)
        return end

    def _followed(self) -> list[TopicPartition]:
        if self._partition is not None:
            return [TopicPartition(self._topic, self._partition)]
        topic = self._readers.metadata.image.topics.get(self._topic)
        count = 0 if topic is None else len(topic.partitions)
        return [TopicPartition(self._topic, number) for number in range(count)]

    async def _ends(self) -> dict[TopicPartition, int]:
        """How far the logs are stable whose leaders say it."""
        wanted = dict.fromkeys(self._followed(), LATEST)
        image = self._readers.metadata.image
        committed = IsolationLevel.READ_COMMITTED
        return (await offsets_from_leaders(self._client, image, wanted, committed)).offsets


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
