"""Packing rows into record areas: the specification of ``_batch_builder.pyx``."""

from __future__ import annotations

from collections.abc import Iterator

from kept.storage.errors import InvalidRecord
from kept.storage.records import Area, Binary, HeaderLists, Rows
from kept.storage.records.batch_builder import murmur2
from kept.storage.records.build import append_record, wrap64


class _Growing:
    """An Area in the making."""

    def __init__(self, timestamp: int) -> None:
        self.records = bytearray()
        self.count = 0
        self.base_timestamp = self.max_timestamp = timestamp


class BatchBuilder:
    """Areas of ``partitions`` partitions, each of ``limit_bytes`` at most: a record larger than
    that has an area of its own. What is in an area depends on the rows alone, not on how they come.
    """

    def __init__(self, partitions: int, limit_bytes: int) -> None:
        self.partitions = partitions
        self.limit_bytes = limit_bytes
        self._areas: dict[int, _Growing] = {}

    def append(self, rows: Rows, start: int, sticky: int) -> int:
        """Append rows from ``start`` on; where it stopped: at the end, or at a row that no longer
        fits into its area.

        Raises InvalidRecord for a partition that is not there or a header without a name.
        """
        timestamps = memoryview(rows.timestamps).cast("B").cast("q")
        keys, values = _strings(rows.key, rows.total), _strings(rows.value, rows.total)
        partitions = memoryview(rows.partitions or b"").cast("B").cast("i")
        for row in range(start, rows.total):
            where = partitions[row] if rows.partitions is not None else -1
            key = keys[row]
            if where == -1:
                hashed = sticky if key is None else murmur2(key)
                where = (hashed & 0x7FFFFFFF) % self.partitions
            elif not 0 <= where < self.partitions:
                raise InvalidRecord(f"partition {where}: the topic has {self.partitions}")
            headers = () if rows.headers is None else tuple(_headers(rows.headers, row))
            area = self._areas.setdefault(where, _Growing(timestamps[row]))
            delta = wrap64(timestamps[row] - area.base_timestamp)
            record = bytearray()
            append_record(record, (delta, key, values[row], headers), area.count)
            if area.count and len(area.records) + len(record) > self.limit_bytes:
                return row
            area.records += record
            area.count += 1
            area.max_timestamp = max(area.max_timestamp, timestamps[row])
        return rows.total

    def drain(self) -> dict[int, Area]:
        """The areas with records, by partition; the builder is empty then."""
        found = {
            where: Area(bytes(a.records), a.count, a.base_timestamp, a.max_timestamp)
            for where, a in sorted(self._areas.items())
        }
        self._areas.clear()
        return found


def _strings(binary: Binary | None, count: int) -> list[bytes | None]:
    if binary is None:
        return [None] * count
    at = memoryview(binary.offsets).cast("B").cast("i")
    data, valid = memoryview(binary.data), binary.validity
    return [
        bytes(data[at[i] : at[i + 1]]) if valid is None or valid[i >> 3] >> (i & 7) & 1 else None
        for i in range(count)
    ]


def _headers(headers: HeaderLists, row: int) -> Iterator[tuple[str, bytes | None]]:
    at = memoryview(headers.offsets).cast("B").cast("i")
    if headers.validity is not None and not headers.validity[row >> 3] >> (row & 7) & 1:
        return
    names, values = _strings(headers.names, headers.total), _strings(headers.values, headers.total)
    for i in range(at[row], at[row + 1]):
        name = names[i]
        if name is None:
            raise InvalidRecord(f"row {row}: a header without a name")
        yield name.decode(), values[i]
