"""Appends and reads the records of one partition, at its leader.

A fetch returns at most :data:`FETCH_BYTES`, and the next one is sent when its records
have been consumed: a slow consumer holds that much memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kept.client.consume.aborted_filter import aborted_batches
from kept.client.consume.fetch import Fetched, FetchLimits, fetch_partition
from kept.client.consume.leader_offsets import list_offsets
from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.core.metadata import ClusterMetadata
from kept.client.produce import ProduceOptions, produce
from kept.node.kafka.handlers.records.batch_checks import inflated
from kept.storage.errors import (
    InflatesBeyondLimit,
    InvalidRequest,
    OffsetOutOfRange,
    PolicyViolation,
)
from kept.storage.records import BatchHeader, Record, build_batch, headers, read_piece
from kept.storage.types import IsolationLevel

if TYPE_CHECKING:
    from uuid import UUID

    from kept.node.admin.cluster_client import ClusterClient
    from kept.node.admin.topic_lookup import TopicLookup
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.runtime.memory_budget import BudgetShare
    from kept.node.runtime.runtime import Runtime
    from kept.node.security.client_usage import ClientUsage
    from kept.storage.types import TopicPartition

COMMITTED, ABORTED, OPEN = "committed", "aborted", "open"
FETCH_BYTES: Final = 1024 * 1024
"""Of records at once; a first batch that is larger comes whole."""
POLL_MS: Final = 5_000
"""How long a leader keeps a fetch that finds nothing."""
ON_LOOP_BYTES: Final = 64 * 1024
"""Larger batches, and those that inflate to more, are read in a thread."""
PIECE_RECORDS: Final = 1000
PIECE_BYTES: Final = 256 * 1024
"""Records of one batch that are made objects of at a time."""
INFLATE_LIMIT: Final = 1 << 30
"""What one batch may inflate to: more than any node of the cluster let in."""
PATIENCE_S: Final = 30.0
"""How long a reader goes on without a leader before it gives up."""


class NewRecord(NamedTuple):
    """What is to be appended."""

    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class MarkedBatch(NamedTuple):
    """A batch, and what became of the transaction that it was written in: ``committed``,
    ``aborted``, ``open`` (the last stable offset has not passed it), or None outside of one.
    """

    data: bytes
    header: BatchHeader
    transaction: str | None


class AppendResult(NamedTuple):
    """Where a record went; ``timestamp`` is the log's if the topic stamps records itself."""

    offset: int
    timestamp: int


async def append(
    client: ClusterClient,
    tp: TopicPartition,
    record: NewRecord,
    patience_s: float,
    usage: ClientUsage,
) -> AppendResult:
    """Append a record; done when every replica in sync has it. ``usage`` is of whose it is.

    Raises what Produce answers, UnknownTopicOrPartition; RequestTimedOut, NetworkException and
    AppendUncertain where it may have been appended, and is not sent again.
    """
    batch = build_batch([record])
    usage.produced(len(batch))
    options = ProduceOptions(timeout_ms=max(1, int(patience_s * 1000)), at_most_once=True)
    operation = produce(ClusterMetadata(), tp.topic, {tp.partition: batch}, options)
    (done,) = await client.run(operation, patience_s=patience_s)
    stamped = done.log_append_ms
    return AppendResult(done.base_offset, record.timestamp if stamped is None else stamped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """What browsing, searching and following share: readers of any partition of the cluster."""

    runtime: Runtime
    metadata: MetadataLog
    inflating: BudgetShare
    lookup: TopicLookup
    new_client: Callable[[], ClusterClient]

    def reader(
        self,
        client: ClusterClient,
        tp: TopicPartition,
        usage: ClientUsage,
        patience_s: float = PATIENCE_S,
    ) -> Reader:
        """A reader of a partition for whose ``usage`` it is; ``client`` stays the caller's, who
        closes it.
        """
        return Reader(self.runtime, self.metadata, self.inflating, client, tp, usage, patience_s)

    async def inflated(self, read: Callable[..., list[Any]], *, limit: int) -> list[Any]:
        """What ``read`` gives in a thread; see ``batch_checks.inflated``."""
        return await inflated(self.runtime, self.inflating, read, limit=limit)


@dataclass(eq=False, repr=False)
class Reader:
    """Reads one partition for whose ``usage`` it is. ``position`` is the next offset."""

    runtime: Runtime
    metadata: MetadataLog
    inflating: BudgetShare
    client: ClusterClient
    tp: TopicPartition
    usage: ClientUsage
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        self._topic_id: UUID | None = None
        self.position = 0

    async def seek(self, offset: int) -> None:
        """Begin at an offset, or at EARLIEST or LATEST. Raises InvalidRequest."""
        self.client.check_partition(*self.tp)
        self._topic_id = self.metadata.image.topics[self.tp.topic].topic_id
        if offset >= 0:
            self.position = offset
        elif offset in (EARLIEST, LATEST):
            self.position = await self.offset_at(offset)
        else:
            raise InvalidRequest(
                f"offset {offset} is none: 0 or more, {EARLIEST} for the first record there is, "
                f"{LATEST} for the end"
            )

    async def end(self) -> int:
        """The high watermark. Raises as :meth:`fetch`."""
        return await self.offset_at(LATEST)

    async def offset_at(self, which: int) -> int:
        """The first offset of a time (milliseconds) or later, -1 without one; EARLIEST, LATEST.

        Raises as :meth:`fetch`.
        """
        operation = list_offsets(
            ClusterMetadata(), {self.tp: which}, IsolationLevel.READ_UNCOMMITTED, POLL_MS
        )
        return (await self.client.run(operation, patience_s=self.patience_s))[self.tp].offset

    async def fetch(self, wait: bool) -> list[bytes]:
        """Batches from ``position`` on, perhaps none; ``wait`` for the first for a while.

        Raises OffsetOutOfRange with what there is, what Fetch answers, UnknownTopicOrPartition,
        PolicyViolation when the topic is another one by now.
        """
        data = (await self._fetch(wait, IsolationLevel.READ_UNCOMMITTED)).records
        return [data[at : at + header.size_bytes] for at, header in headers(data)]

    async def fetch_marked(self) -> list[MarkedBatch]:
        """Batches from ``position`` on, perhaps none, also those of aborted and open transactions.

        Raises as :meth:`fetch`.
        """
        fetched, mark = await self._fetch(False, IsolationLevel.READ_COMMITTED), None
        if not fetched.records:
            if self.position >= fetched.high_watermark:
                return []
            fetched, mark = await self._fetch(False, IsolationLevel.READ_UNCOMMITTED), OPEN
        split = partial(_marked_batches, fetched.records, fetched.aborted, mark)
        if len(fetched.records) <= ON_LOOP_BYTES:
            return split()
        batches: list[MarkedBatch] = await self.runtime.in_thread(split)  # perhaps ten thousand
        return batches

    async def _fetch(self, wait: bool, isolation: IsolationLevel) -> Fetched:
        self._check_topic()
        most_bytes = self.usage.most_fetched(FETCH_BYTES)
        limits = FetchLimits(POLL_MS if wait else 0, 1, most_bytes, most_bytes, isolation)
        operation = fetch_partition(ClusterMetadata(), self.tp, self.position, limits, POLL_MS)
        try:
            fetched = await self.client.run(operation, patience_s=self.patience_s)
        except OffsetOutOfRange as error:
            start, end = await self.offset_at(EARLIEST), await self.offset_at(LATEST)
            raise OffsetOutOfRange(
                f"{self.tp.place} has no offset {self.position} now: it begins at {start} and its "
                f"next one is {end}; {EARLIEST} begins with the first record there is"
            ) from error
        self.usage.consumed(len(fetched.records))
        self._check_topic()
        return fetched

    def _check_topic(self) -> None:
        topic = self.metadata.image.topics.get(self.tp.topic)
        if topic is not None and topic.topic_id != self._topic_id:
            raise PolicyViolation(
                f"topic {self.tp.topic!r} was deleted and created anew: consume it from its "
                "beginning"
            )

    async def records_of(self, batch: bytes, at_once: int = PIECE_RECORDS) -> AsyncIterator[Record]:
        """The records of a batch from ``position`` on; it moves past each that is taken.

        ``at_once``: how many to make objects of, at most, before the first of them is taken.
        """
        ((_, header),) = headers(batch)
        while not header.is_control and self.position < header.next_offset:
            piece = await self._piece(batch, at_once)
            if not piece:
                break
            for record in piece:
                yield record
                self.position = record.offset + 1
        self.position = max(self.position, header.next_offset)

    async def _piece(self, batch: bytes, at_once: int) -> list[Record]:
        """The next records of a batch. It is inflated anew for each piece: who takes records
        slowly, or not at all, holds a piece, and not what the batch inflates to.
        """
        piece = partial(
            read_piece, batch, self.position, max_records=at_once, max_bytes=PIECE_BYTES
        )
        if len(batch) <= ON_LOOP_BYTES:
            try:
                return piece(inflate_limit=ON_LOOP_BYTES)
            except InflatesBeyondLimit:
                pass
        return await inflated(self.runtime, self.inflating, piece, limit=INFLATE_LIMIT)


def _marked_batches(
    data: bytes, aborted: Sequence[tuple[int, int]], mark: str | None
) -> list[MarkedBatch]:
    """The batches in ``data``, those in transactions with their ``mark``; None: as ``aborted`` says
    which were.
    """
    without = aborted_batches(data, aborted)
    batches = []
    for at, header in headers(data):
        transaction = None
        if header.is_transactional:
            transaction = mark or (ABORTED if at in without else COMMITTED)
        batches.append(MarkedBatch(data[at : at + header.size_bytes], header, transaction))
    return batches
