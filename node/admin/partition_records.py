"""Appends and reads the records of one partition, at its leader.

A :class:`Reader` keeps one connection while it reads from one leader, so that its long polls delay
nobody else. A fetch returns at most :data:`FETCH_BYTES`, and the next one is sent when its records
have been consumed: a slow consumer holds that much memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.core.broker_errors import failure
from kept.client.protocol.api_keys import ApiKey
from kept.node.admin.cluster_client import NotReached
from kept.node.kafka.handlers.batch_checks import inflated
from kept.storage.errors import (
    InflatesBeyondLimit,
    InvalidRequest,
    NetworkException,
    OffsetOutOfRange,
    PolicyViolation,
    RequestTimedOut,
)
from kept.storage.records import Record, build_batch, headers, read_piece

if TYPE_CHECKING:
    from uuid import UUID

    from kept.client.node_connection import NodeConnection
    from kept.node.admin.cluster_client import ClusterClient
    from kept.node.metadata.metadata_log import Metadata
    from kept.node.runtime.memory_budget import BudgetShare
    from kept.node.runtime.runtime import Runtime
    from kept.storage.types import TopicPartition

PRODUCE_VERSION: Final = 9
FETCH_VERSION: Final = 12
LIST_OFFSETS_VERSION: Final = 6
"""The last ones that name topics: any kept of the cluster serves them."""

ALL_IN_SYNC: Final = -1
FETCH_BYTES: Final = 1024 * 1024
"""Of records at once; a first batch that is larger comes whole."""
POLL_MS: Final = 5_000
"""How long a leader keeps a fetch that finds nothing."""
SLACK_S: Final = 5.0
"""For the answer itself, on top of what the leader may wait."""
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


class Appended(NamedTuple):
    """Where a record went; ``timestamp`` is the log's if the topic stamps records itself."""

    offset: int
    timestamp: int


async def append(
    gateway: ClusterClient, tp: TopicPartition, record: NewRecord, patience_s: float
) -> Appended:
    """Append a record; done when every replica in sync has it.

    Raises what Produce answers, UnknownTopicOrPartition, RequestTimedOut, NetworkException.
    """
    batch = build_batch([record])
    values = {
        "acks": ALL_IN_SYNC,
        "timeout": max(1, int(patience_s * 1000)),
        "topic_data": [
            {"name": tp.topic, "partition_data": [{"index": tp.partition, "records": batch}]}
        ],
    }

    async def call(leader: int) -> Appended:
        async with gateway.lease(leader) as connection:
            try:
                response = await connection.call(
                    ApiKey.PRODUCE, PRODUCE_VERSION, values, patience_s + SLACK_S
                )
            except NetworkException as broken:
                raise NetworkException(
                    f"Produce to {tp}: the connection to its leader, node {leader}, broke after "
                    "the record was sent: it may have been appended, and be there twice if it is "
                    "produced again"
                ) from broken
        one = response.responses[0].partition_responses[0]
        details = [e.batch_index_error_message for e in one.record_errors]
        message = ": ".join(dict.fromkeys(filter(None, (one.error_message, *details)))) or None
        error = failure(int(one.error_code), f"Produce to {tp}", message)
        if isinstance(error, RequestTimedOut):
            raise RequestTimedOut(
                f"{error}: the leader has the record, not every replica in sync has; it is "
                "committed later unless the leader is lost"
            )
        if error is not None:
            raise error
        stamped = one.log_append_time
        return Appended(int(one.base_offset), record.timestamp if stamped is None else _ms(stamped))

    return await gateway.at_leader(tp, call, patience_s)


def _ms(moment: Any) -> int:
    return int(moment.timestamp() * 1000) if hasattr(moment, "timestamp") else int(moment)


@dataclass(eq=False, repr=False)
class Reader:
    """Reads one partition. ``position`` is the next offset."""

    runtime: Runtime
    metadata: Metadata
    inflating: BudgetShare
    gateway: ClusterClient
    tp: TopicPartition

    def __post_init__(self) -> None:
        self._topic_id: UUID | None = None
        self._stack = AsyncExitStack()
        self._connection: NodeConnection | None = None
        self._leader = -1
        self.position = 0

    async def close(self) -> None:
        """Give the connection back; a fetch that waits is given up."""
        self._leader, self._connection = -1, None
        await self._stack.aclose()

    async def seek(self, offset: int) -> None:
        """Begin at an offset, or at EARLIEST or LATEST. Raises InvalidRequest."""
        self.gateway.leader(self.tp)
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
        tp = self.tp
        partition = {"partition_index": tp.partition, "timestamp": which}
        values = {
            "replica_id": -1,
            "isolation_level": 0,
            "topics": [{"name": tp.topic, "partitions": [partition]}],
        }

        async def call(leader: int) -> int:
            async with self.gateway.lease(leader) as connection:
                response = await _repeatable(
                    connection.call(ApiKey.LIST_OFFSETS, LIST_OFFSETS_VERSION, values, SLACK_S)
                )
            one = response.topics[0].partitions[0]
            error = failure(int(one.error_code), f"ListOffsets of {tp}")
            if error is not None:
                raise error
            return int(one.offset)

        return await self.gateway.at_leader(tp, call, PATIENCE_S)

    async def fetch(self, wait: bool) -> list[bytes]:
        """Batches from ``position`` on, perhaps none; ``wait`` for the first for a while.

        Raises OffsetOutOfRange with what there is, what Fetch answers, UnknownTopicOrPartition,
        PolicyViolation when the topic is another one by now.
        """

        async def call(leader: int) -> Any:
            return await self._fetch_from(leader, POLL_MS if wait else 0)

        try:
            one = await self.gateway.at_leader(self.tp, call, PATIENCE_S)
        except OffsetOutOfRange as error:
            start, end = await self.offset_at(EARLIEST), await self.offset_at(LATEST)
            raise OffsetOutOfRange(
                f"{self.tp} has no offset {self.position} now: it begins at {start} and its next "
                f"one is {end}; {EARLIEST} begins with the first record there is"
            ) from error
        data = bytes(one.records or b"")
        return [data[at : at + header.size_bytes] for at, header in headers(data)]

    async def _fetch_from(self, leader: int, max_wait_ms: int) -> Any:
        tp = self.tp
        topic = self.metadata.image.topics.get(tp.topic)
        if topic is not None and topic.topic_id != self._topic_id:
            raise PolicyViolation(
                f"topic {tp.topic!r} was deleted and created anew: consume it from its beginning"
            )
        partition = {
            "partition": tp.partition,
            "fetch_offset": self.position,
            "partition_max_bytes": FETCH_BYTES,
        }
        values = {
            "replica_id": -1,
            "max_wait": max_wait_ms,
            "min_bytes": 1,
            "max_bytes": FETCH_BYTES,
            "isolation_level": 0,
            "topics": [{"topic": tp.topic, "partitions": [partition]}],
            "forgotten_topics_data": (),
            "rack_id": "",
        }
        connection = await self._connect(leader)
        try:
            response = await _repeatable(
                connection.call(ApiKey.FETCH, FETCH_VERSION, values, max_wait_ms / 1000 + SLACK_S)
            )
        except BaseException:
            connection.close()  # its answer would come to whoever has it next
            raise
        one = response.responses[0].partitions[0]
        error = failure(int(one.error_code), f"Fetch of {tp}")
        if error is not None:
            raise error
        return one

    async def _connect(self, leader: int) -> NodeConnection:
        if self._leader != leader or self._connection is None or self._connection.closed:
            await self.close()
            self._connection = await self._stack.enter_async_context(self.gateway.lease(leader))
            self._leader = leader
        return self._connection

    async def records_of(self, batch: bytes, at_once: int = PIECE_RECORDS) -> AsyncIterator[Record]:
        """The records of a batch from ``position`` on; it moves past each that is taken.

        ``at_once``: how many to make objects of, at most, before the first of them is taken.
        """
        ((_, header),) = headers(batch)
        while not header.is_control and self.position < header.next_offset:
            found = await self._piece(batch, at_once)
            if not found:
                break
            for record in found:
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


async def _repeatable(answer: Awaitable[Any]) -> Any:
    """The answer to a request that may be repeated, whatever became of it."""
    try:
        return await answer
    except (NetworkException, RequestTimedOut) as error:
        raise NotReached(str(error)) from error
