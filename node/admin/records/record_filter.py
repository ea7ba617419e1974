"""Which records a search or a tail shows, and looking through batches for them.

A filter is plain text or bytes, compared byte by byte; all that are given have to fit. A batch
without the bytes of the key, the text or the header anywhere in it is read as a whole and passed
over: that is one pass of ``memmem`` over it. Batches are looked through in a thread, one chunk at a
time, and what one inflates to is held no longer than its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kept.node.admin.records.record_browser import (
    SHORT_BYTES,
    ShownRecord,
    shown_bytes,
    shown_record,
)
from kept.storage.errors import InflatesBeyondLimit, InvalidRequest
from kept.storage.records import HEADER_BYTES, check_replica, decompress, find_records
from kept.storage.records.python import iterate_area

if TYPE_CHECKING:
    from kept.node.admin.records.partition_records import MarkedBatch, Readers
    from kept.storage.records import Record

MAX_FILTER_BYTES: Final = 4096
"""Of a text, a key or a header that is searched for."""
MAX_INFLATED_BYTES: Final = 64 * 1024 * 1024
"""A batch that inflates to more is passed over, and counted."""


class RecordFilter(Struct, frozen=True):
    """What records have to be: with this ``key``, with ``contains`` in the value, with a ``header``
    of a name (and a value, where one is given), of ``from_ms`` or later, before ``to_ms``.
    """

    key: bytes | None = None
    contains: bytes | None = None
    header: tuple[str, bytes | None] | None = None
    from_ms: int | None = None
    to_ms: int | None = None

    def check(self) -> None:
        """Raises InvalidRequest for what is too long or empty."""
        texts = {"key": self.key, "contains": self.contains}
        if self.header is not None:
            texts["header"] = self.header[0].encode() + (self.header[1] or b"")
            if not self.header[0]:
                raise InvalidRequest("header is NAME or NAME=TEXT, and the name is missing")
        for name, text in texts.items():
            if text is not None and len(text) > MAX_FILTER_BYTES:
                raise InvalidRequest(
                    f"{name} has {len(text)} bytes; {MAX_FILTER_BYTES} are the most"
                )
        if self.from_ms is not None and self.to_ms is not None and self.from_ms >= self.to_ms:
            raise InvalidRequest(f"from ({self.from_ms}) is not before to ({self.to_ms})")

    def needles(self) -> list[bytes]:
        """Bytes that the area of a batch has in it if one of its records fits."""
        needles = [text for text in (self.key, self.contains) if text]
        if self.header is not None:
            name, value = self.header
            if "\ufffd" not in name:  # it stands for bytes that are no text
                needles.append(name.encode())
            if value:
                needles.append(value)
        return needles

    def matches(self, record: Record) -> bool:
        """Whether a record matches all that is given."""
        if self.key is not None and record.key != self.key:
            return False
        if self.contains is not None and self.contains not in (record.value or b""):
            return False
        if self.from_ms is not None and record.timestamp < self.from_ms:
            return False
        if self.to_ms is not None and record.timestamp >= self.to_ms:
            return False
        if self.header is None:
            return True
        name, value = self.header
        return any(
            name == found and (value is None or value == data) for found, data in record.headers
        )


class ScanRange(Struct, frozen=True):
    """The offsets ``first..end`` of a scan, how many records and bytes of them it may keep, and
    whether these are the last that fit, or the first.
    """

    first: int
    end: int
    max_records: int
    max_bytes: int
    newest: bool


@dataclass(slots=True)
class ScanResult:
    """What a scan has found, by offset. ``next_offset`` is where a scan of the first ones goes on.

    ``is_truncated``: more match than are kept; ``matching`` counts those that were seen.
    """

    records: deque[ShownRecord] = field(default_factory=deque)
    size_bytes: int = 0
    is_truncated: bool = False
    matching: int = 0
    next_offset: int = 0
    records_scanned: int = 0
    batches_skipped: int = 0
    oldest_ms: int | None = None
    """Nothing before what was looked through is later, and nothing after it earlier than
    ``newest_ms``, as far as the log is in the order of time; None where nothing was there.
    """
    newest_ms: int | None = None


def scan_all(
    batches: Sequence[MarkedBatch], wanted: RecordFilter, of: ScanRange, *, inflate_limit: int
) -> list[ScanResult]:
    """Look through batches in a thread; one result. Raises CorruptMessage, InvalidRecord, and
    InflatesBeyondLimit above ``inflate_limit`` where :data:`MAX_INFLATED_BYTES` is more.
    """
    result, needles = ScanResult(next_offset=of.first), wanted.needles()
    for batch in batches:
        header = batch.header
        if header.last_offset < of.first or header.base_offset >= of.end:
            continue
        if not (header.is_control or not header.record_count):
            if result.oldest_ms is None:
                is_whole = header.base_offset >= of.first
                result.oldest_ms = header.base_timestamp if is_whole else header.max_timestamp
            result.newest_ms = header.max_timestamp
            if not _scan_batch(batch, wanted, needles, of, inflate_limit, result):
                break
        result.next_offset = min(header.next_offset, of.end)
    if result.is_truncated and result.records:  # what was left out lies next to what is kept
        result.oldest_ms = result.records[0].timestamp
        result.newest_ms = result.records[-1].timestamp
    return [result]


async def scan_in_thread(
    readers: Readers, batches: Sequence[MarkedBatch], wanted: RecordFilter, of: ScanRange
) -> ScanResult:
    """:func:`scan_all` within what is drawn for it. Raises CorruptMessage, InvalidRecord."""
    if not batches:
        return ScanResult()
    scan = partial(scan_all, batches, wanted, of)
    results: list[ScanResult] = await readers.inflated(scan, limit=MAX_INFLATED_BYTES)
    return results[0]


def _scan_batch(  # noqa: PLR0917
    batch: MarkedBatch,
    wanted: RecordFilter,
    needles: Sequence[bytes],
    of: ScanRange,
    inflate_limit: int,
    result: ScanResult,
) -> bool:
    """Whether to go on with the next batch."""
    header = check_replica(batch.data)
    result.records_scanned += header.record_count
    if wanted.from_ms is not None and header.max_timestamp < wanted.from_ms:
        return True
    area = batch.data[HEADER_BYTES:]
    if header.codec:
        try:
            area = decompress(header.codec, area, inflate_limit)
        except InflatesBeyondLimit:
            if inflate_limit < MAX_INFLATED_BYTES:
                raise
            result.batches_skipped += 1
            return True
    if any(needle not in area for needle in needles):
        return True
    if header.base_offset < of.first:  # go to where it begins, without an object for each before
        begin, end, _ = find_records(
            area, header.record_count, header.base_offset, of.first, header.record_count, len(area)
        )
        area = area[begin:end]
        first = next(iterate_area(area, header), None)
        if first is not None and header.max_timestamp == result.oldest_ms:
            result.oldest_ms = first.timestamp
    for record in iterate_area(area, header):
        if record.offset >= of.end:
            break
        if wanted.matches(record) and not _keep(record, batch.transaction, of, result):
            return False
    return True


def _keep(record: Record, transaction: str | None, of: ScanRange, result: ScanResult) -> bool:
    """Keep a record that fits; False: there is no room for it, and the first ones are wanted."""
    result.matching += 1
    shown = shown_record(record, SHORT_BYTES, transaction)
    size_bytes = shown_bytes(shown)
    kept = result.records
    full = len(kept) >= of.max_records or (kept and result.size_bytes + size_bytes > of.max_bytes)
    if full and not of.newest:
        result.is_truncated = True
        return False
    kept.append(shown)
    result.size_bytes += size_bytes
    while len(kept) > of.max_records or (len(kept) > 1 and result.size_bytes > of.max_bytes):
        result.size_bytes -= shown_bytes(kept.popleft())
        result.is_truncated = True
    if not of.newest:
        result.next_offset = record.offset + 1
    return True
