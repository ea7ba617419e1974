"""Records of any partition, for people to look at: some from an offset, a time or the end on.

They come from the partition's leader, this node or another, as to any consumer. A record's key and
value are base64, since they are anybody's bytes; long ones are cut, and say how long they are.
What lies between two offsets was compacted away, unless a transaction's marker was there; why,
``/api/v1/compaction/why-missing`` says, as far as the removal journal reaches.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final

from kept.client.records import EARLIEST
from kept.node.admin.cluster_client import ClusterClient
from kept.node.admin.partition_records import Reader
from kept.storage.errors import InvalidRequest

if TYPE_CHECKING:
    from kept.node.admin.context import AdminContext
    from kept.storage.records import Record
    from kept.storage.types import TopicPartition

MAX_RECORDS: Final = 200
SHORT_BYTES: Final = 4096
"""What is shown of a key, a value or a header among others."""
LONG_BYTES: Final = 1024 * 1024
"""And of the value of a record that is asked for alone."""
MAX_HEADERS: Final = 50
MAX_BYTES: Final = 2 * 1024 * 1024
"""Of one answer."""


async def browse(
    context: AdminContext,
    tp: TopicPartition,
    *,
    offset: int | None = None,
    timestamp: int | None = None,
    limit: int,
) -> dict[str, Any]:
    """Up to ``limit`` records from an offset or time on; with neither the last ones.

    ``log_start_offset`` and ``high_watermark`` say what there is, ``next_offset`` where to go on.
    An offset that is not there any more begins with the next one. Raises InvalidRequest and what
    Fetch answers.
    """
    if not 0 < limit <= MAX_RECORDS:
        raise InvalidRequest(f"limit must be 1 to {MAX_RECORDS}, not {limit}")
    if offset is not None and timestamp is not None:
        raise InvalidRequest("offset and timestamp are both given; use one of them")
    gateway = ClusterClient(context)
    reader = Reader(context, gateway, tp)
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
        await reader.close()
        gateway.close()
    return {
        "topic": tp.topic,
        "partition": tp.partition,
        "log_start_offset": start,
        "high_watermark": end,
        "first_offset": first,
        "next_offset": reader.position,
        "records": records,
    }


async def _read(reader: Reader, end: int, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    size, longest = 0, LONG_BYTES if limit == 1 else SHORT_BYTES
    while reader.position < end:
        batches = await reader.fetch(wait=False)
        if not batches:
            break
        for batch in batches:
            async for record in reader.taken(batch, limit - len(found)):
                if record.offset >= end:
                    return found
                found.append(_shown(record, longest))
                size += min(len(record.value or b""), longest) + len(record.key or b"")
                if len(found) >= limit or size >= MAX_BYTES:
                    reader.position = record.offset + 1
                    return found
    return found


def _shown(record: Record, longest: int) -> dict[str, Any]:
    headers = record.headers[:MAX_HEADERS]
    return {
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key_base64": _base64(record.key, SHORT_BYTES),
        "key_bytes": len(record.key or b""),
        "value_base64": _base64(record.value, longest),
        "value_bytes": len(record.value or b""),
        "is_tombstone": record.value is None,
        "headers": [
            {"name": name[:SHORT_BYTES], "value_base64": _base64(value, SHORT_BYTES)}
            for name, value in headers
        ],
        "headers_left_out": len(record.headers) - len(headers),
    }


def _base64(data: bytes | None, longest: int) -> str | None:
    return None if data is None else base64.b64encode(bytes(data[:longest])).decode()
