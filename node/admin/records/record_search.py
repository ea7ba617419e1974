"""Searches the records of all partitions of a topic, the newest or the oldest first.

Each partition is read in chunks from the end that is wanted first, by its leader, whichever node
that is; what fits is merged by timestamp. To read backwards, a chunk begins some offsets lower than
the last one; how many adapts to what the log holds there. A request ends when it has found what it
may show, or has looked at :data:`MAX_SCANNED_BYTES`, :data:`MAX_SCANNED_RECORDS` or for
:data:`MAX_SCAN_S`, or is over the quota of whose it is: its cursor says where to go on. Then it
gives what it has found, and a partition that it did not come to may hold newer records. A partition
whose leader does not answer ends for the request alone: the next one goes on with it where it
stood.

Where clients put a key (murmur2) is searched first, to its end: only then the other partitions,
which have it if some client chooses otherwise.

Batches are looked through in a thread, within what is drawn for them on the node's memory budget
(``batch_checks.inflated``). So many searches at a time run as
:data:`SEARCHES_AT_ONCE`; others wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, ClassVar, Final

from msgspec import Struct

from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.partitioner import partition_for_key
from kept.node.admin.records.partition_offsets import LeaderOffsets, offsets_from_leaders
from kept.node.admin.records.partition_records import FETCH_BYTES, MarkedBatch, Reader, Readers
from kept.node.admin.records.record_browser import (
    MAX_BYTES,
    MAX_RECORDS,
    ShownRecord,
    shown_bytes,
)
from kept.node.admin.records.record_filter import (
    RecordFilter,
    ScanRange,
    ScanResult,
    scan_in_thread,
)
from kept.node.admin.records.search_cursor import (
    MAX_SPAN,
    LanePosition,
    decode_cursor,
    encode_cursor,
    fingerprint,
)
from kept.node.runtime.tasks import gather_or_cancel
from kept.storage.errors import InvalidRequest, KeptError, RetriableError
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.admin.cluster_client import ClusterClient
    from kept.node.security.client_usage import ClientUsage

MAX_PARTITIONS: Final = 1000
"""Of one search; of a topic with more one partition has to be named."""
MAX_SCANNED_BYTES: Final = 16 * 1024 * 1024
MAX_SCANNED_RECORDS: Final = 100_000
MAX_SCAN_S: Final = 1.0
PATIENCE_S: Final = 5.0
"""How long a leader is waited for."""
SEARCHES_AT_ONCE: Final = 2
SEARCHES_WAITING: Final = 32
"""One more is refused."""
FIRST_SPAN: Final = 128
"""Offsets of a partition's first chunk."""
DENSE: Final = 32
"""Records of a chunk that fit; with fewer the next one is made larger."""
QUEUED_BYTES: Final = 8 * 1024 * 1024
"""Of records that fit and wait for their turn, over all partitions."""
LEAST_QUEUED_BYTES: Final = 64 * 1024
"""Of one partition."""


class TooManySearches(RetriableError):
    """As many searches wait as may."""


class FoundRecord(Struct, frozen=True):
    """A record and the partition that it is in."""

    INLINED: ClassVar = frozenset({"record"})

    partition: int
    record: ShownRecord


class Scanned(Struct, frozen=True):
    """What a request looked at. ``bytes`` are those of batches as they are in the log."""

    records: int
    bytes: int
    batches_skipped: int


class SearchedPartition(Struct, frozen=True):
    """How far the search of a partition is: below ``position`` (newest first), or from it on,
    nothing has been looked at; None: it has not begun. ``error``: why this request could not go on
    with it; the next one tries again.
    """

    partition: int
    log_start_offset: int | None
    high_watermark: int | None
    position: int | None
    done: bool
    error: str | None


class SearchResult(Struct, frozen=True):
    """What was found, and the ``cursor`` to go on with; None when every partition is done."""

    topic: str
    partition_of_key: int | None
    records: list[FoundRecord]
    scanned: Scanned
    cursor: str | None
    ends: list[SearchedPartition]


@dataclass(slots=True)
class _Lane:
    """One partition of a search: offsets ``low..high`` are wanted.

    ``position``: exclusive end of what is left (newest first), or its beginning. ``queue`` holds
    what fits of the last chunk, the next first; ``loaded_to`` is ``position`` once that is empty.
    ``is_sparse``: little of the last chunk fit, so that the next one takes whole batches.
    ``bound`` is the timestamp that nothing beyond the chunk is on the wrong side of. ``error`` ends
    it for this request: it is not done.
    """

    tp: TopicPartition
    reader: Reader
    start: int | None = None
    end: int | None = None
    low: int = 0
    high: int = 0
    position: int | None = None
    span: int = FIRST_SPAN
    is_sparse: bool = False
    loaded_to: int = 0
    bound: int | None = None
    queue: deque[ShownRecord] = field(default_factory=deque)
    done: bool = False
    error: str | None = None

    @property
    def bound_of_rest(self) -> int | None:
        """The bound of what was not given yet, what waits included."""
        return self.queue[0].timestamp if self.queue else self.bound

    @property
    def has_ended(self) -> bool:
        """Whether this request can get no more of it."""
        return self.done or self.error is not None


@dataclass(slots=True)
class _Work:
    """What a request has done so far."""

    until: float
    usage: ClientUsage
    records: int = 0
    bytes: int = 0
    batches_skipped: int = 0

    @property
    def is_over(self) -> bool:
        """Whether it has done enough."""
        return (
            self.records >= MAX_SCANNED_RECORDS
            or self.bytes >= MAX_SCANNED_BYTES
            or monotonic() >= self.until
            or self.usage.is_over("fetch")
        )


class RecordSearch:
    """The searches of one node."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._lookup = readers.lookup
        self._turns = asyncio.Semaphore(SEARCHES_AT_ONCE)
        self._waiting = 0

    async def search(
        self,
        usage: ClientUsage,
        topic: str,
        wanted: RecordFilter,
        *,
        partition: int | None = None,
        newest: bool = True,
        limit: int,
        cursor: str | None = None,
    ) -> SearchResult:
        """Up to ``limit`` records that fit, for whose ``usage`` it is. Raises InvalidRequest,
        UnknownTopicOrPartition, TooManySearches.
        """
        if not 0 < limit <= MAX_RECORDS:
            raise InvalidRequest(f"limit must be 1 to {MAX_RECORDS}, not {limit}")
        wanted.check()
        count = len(self._lookup.topic(topic).partitions)
        if partition is not None:
            tps = [self._lookup.partition(topic, partition)]
        elif count > MAX_PARTITIONS:
            raise InvalidRequest(
                f"{topic} has {count} partitions; name one: {MAX_PARTITIONS} are searched at once"
            )
        else:
            tps = [TopicPartition(topic, number) for number in range(count)]
        if self._waiting >= SEARCHES_WAITING:
            raise TooManySearches(f"{SEARCHES_WAITING} searches wait already; try again")
        self._waiting += 1
        try:
            async with self._turns:
                client = self._readers.new_client()
                try:
                    search = _Search(self._readers, client, usage, wanted, newest)
                    return await search.run(topic, tps, count, limit, cursor)
                finally:
                    client.close()
        finally:
            self._waiting -= 1


@dataclass(slots=True)
class _Search:
    """One request."""

    readers: Readers
    client: ClusterClient
    usage: ClientUsage
    wanted: RecordFilter
    newest: bool

    async def run(
        self,
        topic: str,
        tps: Sequence[TopicPartition],
        count: int,
        limit: int,
        cursor: str | None,
    ) -> SearchResult:
        key, topic_id = self.wanted.key, self.readers.metadata.image.topics[topic].topic_id
        mark = fingerprint(topic_id, tps[0], len(tps), self.wanted, self.newest)
        lanes = [self._lane(tp) for tp in tps]
        if cursor is not None:
            _restore(lanes, decode_cursor(cursor, mark, len(lanes)))
        work = _Work(monotonic() + MAX_SCAN_S, self.usage)
        await self._find_ends(lanes)
        by_key = None if key is None else partition_for_key(key, count)
        found = await self._merge(_stages(lanes, by_key), limit, work)
        positions = [
            LanePosition(lane.position, lane.span, lane.done, lane.bound_of_rest) for lane in lanes
        ]
        at_end = all(given.done for given in positions)
        return SearchResult(
            topic=topic,
            partition_of_key=by_key,
            records=found,
            scanned=Scanned(work.records, work.bytes, work.batches_skipped),
            cursor=None if at_end else encode_cursor(mark, positions),
            ends=[
                SearchedPartition(
                    lane.tp.partition, lane.start, lane.end, lane.position, lane.done, lane.error
                )
                for lane in lanes
            ],
        )

    def _lane(self, tp: TopicPartition) -> _Lane:
        return _Lane(tp, self.readers.reader(self.client, tp, self.usage, PATIENCE_S))

    async def _find_ends(self, lanes: Sequence[_Lane]) -> None:
        """What of each partition is searched."""
        tps = [lane.tp for lane in lanes if not lane.done]
        times = (EARLIEST, LATEST, self.wanted.from_ms, self.wanted.to_ms)
        starts, ends, lows, highs = await gather_or_cancel(
            self._offsets(tps, when) for when in times
        )
        for lane in lanes:
            lane.start, lane.end = starts.offsets.get(lane.tp), ends.offsets.get(lane.tp)
            if lane.done:
                continue
            if lane.start is None or lane.end is None:
                lane.error = self._why_unknown(lane.tp, starts, ends)
                continue
            low, high = lows.offsets.get(lane.tp), highs.offsets.get(lane.tp, -1)
            lane.low = lane.start if low is None else lane.end if low < 0 else low
            lane.high = lane.end if high < 0 else min(high, lane.end)
            begin = lane.high if self.newest else lane.low
            at = begin if lane.position is None else lane.position
            lane.position = lane.loaded_to = min(max(at, lane.low), max(lane.high, lane.low))
            lane.done = self._is_at_end(lane)

    async def _offsets(self, tps: Sequence[TopicPartition], when: int | None) -> LeaderOffsets:
        if when is None:
            return LeaderOffsets()
        wanted = dict.fromkeys(tps, when)
        return await offsets_from_leaders(self.client, self.readers.metadata.image, wanted)

    def _why_unknown(self, tp: TopicPartition, *asked: LeaderOffsets) -> str:
        topic = self.readers.metadata.image.topics.get(tp.topic)
        leader = -1 if topic is None else topic.partitions[tp.partition].leader
        if leader < 0:
            return f"{tp.place} has no leader now: its replicas are not available"
        why = next((one.errors[leader] for one in asked if leader in one.errors), None)
        of_leader = f"its leader, node {leader}, does not say what it has"
        return of_leader if why is None else f"{of_leader}: {why}"

    def _is_at_end(self, lane: _Lane) -> bool:
        at = lane.position
        return at is not None and (at <= lane.low if self.newest else at >= lane.high)

    # Merging.

    async def _merge(
        self, stages: Sequence[Sequence[_Lane]], limit: int, work: _Work
    ) -> list[FoundRecord]:
        found: list[FoundRecord] = []
        size_bytes, loads = 0, 0
        for lanes in stages:
            most_bytes = max(QUEUED_BYTES // len(lanes), LEAST_QUEUED_BYTES)
            while len(found) < limit and size_bytes < MAX_BYTES:
                lane = self._next_lane(lanes, only_queued=loads > 0 and work.is_over)
                if lane is None:
                    break
                if not lane.queue:
                    loads += 1
                    await self._load(lane, limit, most_bytes, work)
                    continue
                record = lane.queue.popleft()
                found.append(FoundRecord(lane.tp.partition, record))
                size_bytes += shown_bytes(record)
                lane.position = record.offset if self.newest else record.offset + 1
                self._settle_position(lane)
            if not all(lane.has_ended for lane in lanes):
                break
        return found

    def _next_lane(self, lanes: Sequence[_Lane], *, only_queued: bool) -> _Lane | None:
        """Whose next record, or whose next chunk, is the first by time."""
        open_lanes = [
            lane for lane in lanes if not lane.has_ended and (lane.queue or not only_queued)
        ]
        if not open_lanes:
            return None
        unknown = float("inf") if self.newest else float("-inf")

        def head(lane: _Lane) -> float:
            bound = lane.bound_of_rest
            return unknown if bound is None else bound

        return max(open_lanes, key=head) if self.newest else min(open_lanes, key=head)

    def _settle_position(self, lane: _Lane) -> None:
        """Once nothing waits any more, the whole chunk is behind."""
        if not lane.queue:
            lane.position = lane.loaded_to
            lane.done = self._is_at_end(lane)

    # Chunks.

    async def _load(self, lane: _Lane, most: int, most_bytes: int, work: _Work) -> None:
        try:
            load = self._load_below if self.newest else self._load_above
            result = await load(lane, most, most_bytes, work)
        except KeptError as error:
            lane.error = error.client_message
            return
        work.records += result.records_scanned
        work.batches_skipped += result.batches_skipped
        lane.queue = result.records
        if self.newest:
            lane.queue = deque(reversed(result.records))
            lane.bound = lane.bound if result.oldest_ms is None else result.oldest_ms
        else:
            lane.bound = lane.bound if result.newest_ms is None else result.newest_ms
        self._settle_position(lane)

    async def _load_below(self, lane: _Lane, most: int, most_bytes: int, work: _Work) -> ScanResult:
        """The chunk that ends at the lane's position."""
        end = lane.position or 0
        while True:
            first = max(lane.low, end - lane.span)
            batches, reached, size_bytes = await self._fetch_to(lane, first, end, work)
            if reached >= end or lane.span == 1:
                break
            lane.span = max(1, min(lane.span // 2, (reached - first) // 2))
        if batches and lane.is_sparse:  # the first batch is there as a whole
            first = max(lane.low, min(first, batches[0].header.base_offset))
        result = await self._scan(batches, ScanRange(first, end, most, most_bytes, newest=True))
        lane.loaded_to = result.records[0].offset if result.is_truncated else first
        lane.is_sparse = len(result.records) < DENSE
        if lane.is_sparse and size_bytes < FETCH_BYTES // 4:
            lane.span = min(lane.span * 2, MAX_SPAN)
        return result

    async def _fetch_to(
        self, lane: _Lane, first: int, end: int, work: _Work
    ) -> tuple[list[MarkedBatch], int, int]:
        """Batches from ``first`` on up to ``end``, how far they reach, and their bytes: those of
        one fetch, or of as many as it takes where a chunk is one offset.
        """
        batches: list[MarkedBatch] = []
        size_bytes, reached = 0, first
        await lane.reader.seek(first)
        while reached < end:
            fetched = await lane.reader.fetch_marked()
            if not fetched:
                reached = end  # nothing is left below
                break
            batches += fetched
            fetched_bytes = sum(len(batch.data) for batch in fetched)
            size_bytes, work.bytes = size_bytes + fetched_bytes, work.bytes + fetched_bytes
            reached = lane.reader.position = fetched[-1].header.next_offset
            if size_bytes >= FETCH_BYTES // 2 or self.usage.is_over("fetch"):
                break
        return batches, reached, size_bytes

    async def _load_above(self, lane: _Lane, most: int, most_bytes: int, work: _Work) -> ScanResult:
        """The chunk that begins at the lane's position."""
        first = lane.position or 0
        await lane.reader.seek(first)
        batches = await lane.reader.fetch_marked()
        work.bytes += sum(len(batch.data) for batch in batches)
        end = min(batches[-1].header.next_offset, lane.high) if batches else lane.high
        result = await self._scan(batches, ScanRange(first, end, most, most_bytes, newest=False))
        lane.loaded_to = result.next_offset if result.is_truncated else end
        return result

    async def _scan(self, batches: Sequence[MarkedBatch], of: ScanRange) -> ScanResult:
        return await scan_in_thread(self.readers, batches, self.wanted, of)


def _restore(lanes: Sequence[_Lane], positions: Sequence[LanePosition]) -> None:
    for lane, given in zip(lanes, positions, strict=True):
        lane.done, lane.position = given.done, given.position
        if given.position is not None:
            lane.span = given.span
        lane.bound = given.bound_ms


def _stages(lanes: Sequence[_Lane], by_key: int | None) -> list[list[_Lane]]:
    """Where the key is expected, then the rest; without a key all at once."""
    first = [lane for lane in lanes if lane.tp.partition == by_key]
    rest = [lane for lane in lanes if lane.tp.partition != by_key]
    return [stage for stage in (first, rest) if stage]
