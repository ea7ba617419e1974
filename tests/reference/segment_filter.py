"""The filter of a segment's batches: the specification of ``_filter.pyx``.

``kept.storage.records.filter`` says what it must do.
"""

from __future__ import annotations

import struct
from array import array
from typing import Final

from crc32c import crc32c

from kept.storage.records.build import append_varint, read_varint, seal, wrap64
from kept.storage.records.filter import COMPRESSED, DAMAGED, DONE, FULL
from kept.storage.records.header import (
    CODEC_MASK,
    CRC_START,
    DELETE_HORIZON_BIT,
    HEADER_BYTES,
    LENGTH_PREFIX_BYTES,
    TIMESTAMP_TYPE_BIT,
    BatchHeader,
    Buffer,
    read_header,
)

_INDEX: Final = struct.Struct(">ii")
_TIME_INDEX: Final = struct.Struct(">qi")
_MAX_RELATIVE: Final = 0x7FFFFFFF


class SegmentFilter:
    """The filter in plain Python. ``limit_bytes`` and ``index_limit_bytes`` bound one output.

    ``check_crc``: batches with survivors are checked; a digest takes their CRC as it stands.
    """

    def __init__(
        self,
        *,
        interval_bytes: int,
        limit_bytes: int,
        index_limit_bytes: int,
        check_crc: bool = False,
    ) -> None:
        self._check_crc = check_crc
        self._interval = interval_bytes
        self._limit = limit_bytes
        self._index_limit = index_limit_bytes
        self.next_base = -1
        self.stop = DONE
        self.fault: str | None = None

    def open_output(self, base_offset: int) -> None:
        """Begin an output segment."""
        self.output_base = base_offset
        self._out, self._digest = bytearray(), bytearray()
        self._index, self._time_index = bytearray(), bytearray()
        self.position = self.batches = self.records = 0
        self._since_index = 0
        self.max_timestamp = self.max_timestamp_offset = self.last_offset = -1
        self._last_time_entry = -1

    def open_source(
        self,
        base_offset: int,
        survivors: array[int],
        empties: array[int],
        horizon_firsts: array[int],
        horizon_values: array[int],
    ) -> None:
        """Begin a source segment. All but the values are relative to ``base_offset``, ascending;
        ``empties`` and ``horizon_firsts`` name batches by their base offset.
        """
        self._base = base_offset
        self._survivors, self._empties = survivors, empties
        self._horizon_firsts, self._horizon_values = horizon_firsts, horizon_values
        self._at = (0, 0, 0)

    def mark(self) -> tuple[int, int, int]:
        """Where in survivors, empties and horizons the filter is; ``back`` returns there."""
        return self._at

    def back(self, survivor: int, empty: int, horizon: int) -> None:
        """Return to a mark."""
        self._at = (survivor, empty, horizon)

    def feed(self, data: Buffer) -> int:
        """Filter whole batches from the start of ``data``; returns how many bytes, sets
        ``stop``.
        """
        view = memoryview(data)
        at = 0
        self.stop = DONE
        while len(view) - at >= HEADER_BYTES:
            (length,) = struct.unpack_from(">i", view, at + 8)
            if view[at + 16] != 2 or length + LENGTH_PREFIX_BYTES < HEADER_BYTES:
                self.stop, self.fault = DAMAGED, "not a batch header"
                break
            if length + LENGTH_PREFIX_BYTES > len(view) - at:
                break
            header = read_header(view, at)
            self.stop = self._batch(header, view[at : at + header.size_bytes])
            if self.stop != DONE:
                break
            at += header.size_bytes
        return at

    def _batch(self, header: BatchHeader, batch: memoryview) -> int:
        first = header.base_offset - self._base
        last = first + header.last_offset_delta
        if first < 0 or last > _MAX_RELATIVE or header.record_count > header.last_offset_delta + 1:
            self.fault = "offsets do not fit the segment"
            return DAMAGED
        self._pass_by(first)
        s, e, _ = self._at
        if s >= len(self._survivors) or self._survivors[s] > last:
            if e < len(self._empties) and self._empties[e] == first:
                emptied = _emptied(header)
                kept = _sealed(emptied, b"")
                emptied.max_timestamp = -1
                return self._append(kept, header, _sealed(emptied, b""))
            return DONE
        if self._check_crc and crc32c(batch[CRC_START:]) != header.crc:
            self.fault = "wrong CRC"
            return DAMAGED
        if header.attributes & CODEC_MASK:
            return COMPRESSED
        mark = self._at
        try:
            changed, head, area = self._copy(header, batch[HEADER_BYTES:])
        except ValueError as error:
            self.fault = str(error)
            return DAMAGED
        kept = _sealed(head, area) if changed else bytes(batch)
        stop = self._append(kept, header, kept[:HEADER_BYTES])
        if stop == FULL:
            self._at = mark
        return stop

    def _append(self, batch: bytes, header: BatchHeader, canonical: bytes) -> int:
        if self.add(batch, canonical):
            return DONE
        self.next_base = header.base_offset
        return FULL

    def _pass_by(self, first: int) -> None:
        s, e, h = self._at
        while s < len(self._survivors) and self._survivors[s] < first:
            s += 1
        while e < len(self._empties) and self._empties[e] < first:
            e += 1
        while h < len(self._horizon_firsts) and self._horizon_firsts[h] < first:
            h += 1
        self._at = (s, e, h)

    def rewrite(self, header: Buffer, area: Buffer) -> tuple[bool, bytes, bytes]:
        """(changed, header, area) of the compressed batch at which ``feed`` stopped, inflated.

        Length and CRC of the header are not set. The survivors of the batch are used up.
        """
        try:
            changed, head, new_area = self._copy(read_header(header), memoryview(area))
        except ValueError as error:
            self.stop, self.fault = DAMAGED, str(error)
            return False, b"", b""
        return changed, bytes(_sealed(head, b"")), bytes(new_area)

    def _copy(self, header: BatchHeader, area: memoryview) -> tuple[bool, BatchHeader, Buffer]:
        first = header.base_offset - self._base
        s, e, h = self._at
        count, old_horizon = header.record_count, header.delete_horizon_ms
        horizon = old_horizon
        if h < len(self._horizon_firsts) and self._horizon_firsts[h] == first:
            horizon = self._horizon_values[h]
        there = self._survivors[s : s + count + 1]
        last = first + header.last_offset_delta
        alive = sum(1 for offset in there if offset <= last)
        if horizon == old_horizon and alive == count > 0:
            self._at = (s + count, e, h)
            return False, header, area
        new_horizon = horizon if horizon != old_horizon else -1
        return True, *self._pick(header, area, first, new_horizon)

    def _pick(
        self, header: BatchHeader, area: memoryview, first: int, horizon: int
    ) -> tuple[BatchHeader, Buffer]:
        s, e, h = self._at
        out = bytearray()
        at, end, kept, largest = 0, len(area), 0, -1
        while at < end:
            start = at
            length, body = _varint(area, at, end, 32)
            at = body + length
            if length < 6 or at > end:
                raise ValueError("a record's length is wrong")
            delta, rest = _varint(area, body + 1, at, 64)
            offset_delta, _ = _varint(area, rest, at, 32)
            while s < len(self._survivors) and self._survivors[s] < first + offset_delta:
                s += 1
            if s >= len(self._survivors) or self._survivors[s] != first + offset_delta:
                continue
            s += 1
            kept += 1
            timestamp = wrap64(header.base_timestamp + delta)
            largest = max(largest, timestamp)
            if horizon < 0:
                out += area[start:at]
            else:
                moved = bytearray(area[body : body + 1])
                append_varint(moved, wrap64(timestamp - horizon))
                append_varint(out, len(moved) + at - rest)
                out += moved
                out += area[rest:at]
        self._at = (s, e, h)
        if horizon >= 0:
            header.attributes |= DELETE_HORIZON_BIT
            header.base_timestamp = horizon
        if not header.attributes & TIMESTAMP_TYPE_BIT:
            header.max_timestamp = largest
        header.record_count = kept
        return header, out

    def add(self, batch: Buffer, canonical: Buffer) -> bool:
        """Append a whole batch made by the caller; False when the output is full."""
        header = read_header(batch)
        size = len(batch)
        if self.position > 0 and (
            self.position + size > self._limit
            or len(self._index) + 8 > self._index_limit
            or len(self._time_index) + 24 > self._index_limit
        ):
            self.next_base = header.base_offset
            return False
        if header.max_timestamp > self.max_timestamp:
            self.max_timestamp = header.max_timestamp
            self.max_timestamp_offset = header.last_offset
        if self._since_index > self._interval:
            self._index += _INDEX.pack(header.last_offset - self.output_base, self.position)
            if self.max_timestamp > self._last_time_entry:
                self._time_index += self._time_entry()
                self._last_time_entry = self.max_timestamp
            self._since_index = 0
        self._out += batch
        self._digest += canonical
        self._since_index += size
        self.position += size
        self.batches += 1
        self.records += header.record_count
        self.last_offset = header.last_offset
        return True

    def _time_entry(self) -> bytes:
        return _TIME_INDEX.pack(self.max_timestamp, self.max_timestamp_offset - self.output_base)

    def drain(self) -> bytes:
        """The bytes written since the last call."""
        found, self._out = bytes(self._out), bytearray()
        return found

    def drain_headers(self) -> bytes:
        """The canonical headers since the last call."""
        found, self._digest = bytes(self._digest), bytearray()
        return found

    def index(self) -> bytes:
        """Content of the offset index."""
        return bytes(self._index)

    def time_index(self) -> bytes:
        """Content of the time index, with the segment's maximum last."""
        last = self._time_entry() if self.max_timestamp > self._last_time_entry else b""
        return bytes(self._time_index) + last


def _varint(data: memoryview, position: int, end: int, bits: int) -> tuple[int, int]:
    try:
        return read_varint(data, position, end, bits)
    except Exception as error:
        raise ValueError("a record is cut off") from error


def _emptied(header: BatchHeader) -> BatchHeader:
    return BatchHeader(
        header.base_offset,
        0,
        header.partition_leader_epoch,
        2,
        0,
        header.attributes & 0x38,
        header.last_offset_delta,
        -1,
        header.max_timestamp,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        0,
    )


def _sealed(header: BatchHeader, body: Buffer) -> bytes:
    return bytes(seal(header, body))
