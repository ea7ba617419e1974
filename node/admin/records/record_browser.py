"""Records of any partition, for people to look at: some from an offset, a time or the end on.

They come from the partition's leader, this node or another, as to any consumer. A record's key and
value are base64, since they are anybody's bytes; long ones are cut, and say how long they are.
Those of aborted and open transactions are shown, too, and marked.
What lies between two offsets was compacted away, unless a transaction's marker was there; why,
``/api/v1/compaction/why-missing`` says, as far as the removal journal reaches.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kept.client.consume.positions import EARLIEST
from kept.node.admin.results import PartitionResult
from kept.storage.errors import InvalidRequest

if TYPE_CHECKING:
    from kept.node.admin.records.partition_records import Reader, Readers
    from kept.node.security.client_usage import ClientUsage
    from kept.storage.records import Record

DEFAULT_RECORDS: Final = 50
"""Records that are shown where no limit is given."""
MAX_RECORDS: Final = 200
SHORT_BYTES: Final = 4096
"""What is shown of a key, a value or a header among others."""
LONG_BYTES: Final = 1024 * 1024
"""And of the value of a record that is requested alone."""
MAX_HEADERS: Final = 50
MAX_BYTES: Final = 2 * 1024 * 1024
"""Of one answer."""


class ShownHeader(Struct, frozen=True):
    """A header of a record; its value is cut at :data:`SHORT_BYTES`."""

    name: str
    value_base64: str | None


class ShownRecord(Struct, frozen=True):
    """A record; ``key_bytes`` and ``value_bytes`` are its whole lengths. ``transaction`` is what
    became of the one that it was in (``partition_records.MarkedBatch``).
    """

    offset: int
    timestamp: int
    key_base64: str | None
    key_bytes: int
    value_base64: str | None
    value_bytes: int
    is_tombstone: bool
    transaction: str | None
    headers: list[ShownHeader]
    headers_left_out: int


class RecordPage(PartitionResult, frozen=True):
    """Some records. ``log_start_offset`` and ``high_watermark`` say what there is, ``next_offset``
    where to go on.
    """

    log_start_offset: int
    high_watermark: int
    first_offset: int
    next_offset: int
    records: list[ShownRecord]


@dataclass(frozen=True, slots=True)
class RecordBrowser:
    """Reads some records of a partition."""

    readers: Readers

    async def browse(
        self,
        usage: ClientUsage,
        topic: str,
        partition: int,
        *,
        offset: int | None = None,
        timestamp: int | None = None,
        limit: int = DEFAULT_RECORDS,
    ) -> RecordPage:
        """Up to ``limit`` records from an offset or time on; with neither the last ones. Fewer
        where the ``usage`` of whose request it is does not allow more.

        An offset that is not there any more begins with the next one. Raises InvalidRequest,
        UnknownTopicOrPartition and what Fetch answers.
        """
        tp = self.readers.lookup.partition(topic, partition)
        if not 0 < limit <= MAX_RECORDS:
            raise InvalidRequest(f"limit must be 1 to {MAX_RECORDS}, not {limit}")
        if offset is not None and timestamp is not None:
            raise InvalidRequest("offset and timestamp are both given; use one of them")
        client = self.readers.new_client()
        reader = self.readers.reader(client, tp, usage)
        try:
            await reader.seek(EARLIEST)
            start, end = reader.position, await reader.end()
            first = max(start, end - limit)
            if timestamp is not None:
                at = await reader.offset_at(timestamp)
                first = end if at < 0 else at
            elif offset is not None:
                first = max(offset, start)
            reader.position = first
            records = await _read(reader, end, limit)
        finally:
            client.close()
        return RecordPage(
            *tp,
            log_start_offset=start,
            high_watermark=end,
            first_offset=first,
            next_offset=reader.position,
            records=records,
        )


async def _read(reader: Reader, end: int, limit: int) -> list[ShownRecord]:
    shown: list[ShownRecord] = []
    size, longest = 0, LONG_BYTES if limit == 1 else SHORT_BYTES
    while reader.position < end and not (shown and reader.usage.is_over("fetch")):
        batches = await reader.fetch_marked()
        if not batches:
            break
        for batch in batches:
            async for record in reader.records_of(batch.data, limit - len(shown)):
                if record.offset >= end:
                    return shown
                shown.append(shown_record(record, longest, batch.transaction))
                size += shown_bytes(shown[-1])
                if len(shown) >= limit or size >= MAX_BYTES:
                    reader.position = record.offset + 1
                    return shown
    return shown


def shown_record(record: Record, longest: int, transaction: str | None) -> ShownRecord:
    """A record with up to ``longest`` bytes of its value."""
    headers = record.headers[:MAX_HEADERS]
    return ShownRecord(
        offset=record.offset,
        timestamp=record.timestamp,
        key_base64=_base64(record.key, SHORT_BYTES),
        key_bytes=len(record.key or b""),
        value_base64=_base64(record.value, longest),
        value_bytes=len(record.value or b""),
        is_tombstone=record.value is None,
        transaction=transaction,
        headers=[
            ShownHeader(name[:SHORT_BYTES], _base64(value, SHORT_BYTES)) for name, value in headers
        ],
        headers_left_out=len(record.headers) - len(headers),
    )


def shown_bytes(record: ShownRecord) -> int:
    """About what a record holds in memory and takes in an answer."""
    size = 200 + len(record.key_base64 or "") + len(record.value_base64 or "")
    return size + sum(
        50 + len(header.name) + len(header.value_base64 or "") for header in record.headers
    )


def _base64(data: bytes | None, longest: int) -> str | None:
    return None if data is None else base64.b64encode(bytes(data[:longest])).decode()
