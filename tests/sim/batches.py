"""Batches and records as the checkers see them: decoded here from the bytes on disk, by no code of
``kept``.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from kept.storage.log.log import Log

_HEADER = Struct(">qiibIhiqqqhii")
"""KIP-98: base offset, length, leader epoch, magic, CRC, attributes, last offset delta, first and
largest timestamp, producer id, producer epoch, base sequence, count."""
HEADER_BYTES = 61
CONTROL = 0x20
_SEQUENCES = 2**31


class Batch(NamedTuple):
    """One batch of a replica. ``crc`` covers everything but offset, length and leader epoch."""

    base: int
    last: int
    epoch: int
    crc: int
    producer_id: int
    producer_epoch: int
    sequence: int
    count: int
    attributes: int
    marker: tuple[int, int] | None = None
    """Of a transaction's marker: its type, 0 an abort and 1 a commit, and the coordinator epoch. A
    pass may have left its batch without it."""

    @property
    def identity(self) -> tuple[int, int, int]:
        """What is unique to a producer's batch: its id, its epoch, the first sequence."""
        return self.producer_id, self.producer_epoch, self.sequence

    @property
    def last_sequence(self) -> int:
        """Of its last record as it was sent: a pass lowers ``count``, never the offsets."""
        return (self.sequence + self.last - self.base) % _SEQUENCES

    @property
    def next_sequence(self) -> int:
        """With which its producer goes on; behind the largest comes 0."""
        return (self.last_sequence + 1) % _SEQUENCES

    def __repr__(self) -> str:
        who = "" if self.producer_id < 0 else f" by {self.producer_id} #{self.sequence}"
        return f"{self.base}..{self.last} of epoch {self.epoch}{who}"


def decode(data: bytes) -> list[Batch]:
    """The batches in a run of bytes; the bytes must end with one."""
    found = []
    position = 0
    while position < len(data):
        (
            base,
            length,
            epoch,
            _,
            crc,
            bits,
            delta,
            _,
            _,
            producer,
            producer_epoch,
            sequence,
            count,
        ) = _HEADER.unpack_from(data, position)
        marker = _marker(data, position) if bits & CONTROL and count else None
        found.append(
            Batch(
                base,
                base + delta,
                epoch,
                crc,
                producer,
                producer_epoch,
                sequence,
                count,
                bits,
                marker,
            )
        )
        position += length + 12
    assert position == len(data)
    return found


def _marker(data: bytes, position: int) -> tuple[int, int] | None:
    at = position + HEADER_BYTES
    _, body = _varint(data, at)
    _, body = _varint(data, body + 1)
    _, body = _varint(data, body)
    key, body = _bytes(data, body)
    value, _ = _bytes(data, body)
    if key is None or value is None or len(value) < 6:
        return None
    return int.from_bytes(key[2:4], "big"), int.from_bytes(value[2:6], "big", signed=True)


def read(log: Log, start: int) -> list[Batch]:
    """What a log holds from ``start`` on: its files' written bytes, segment after segment."""
    found: list[Batch] = []
    for segment in log.segments:
        if segment.next_offset > start and segment.size_bytes:
            data = log.disk.pread(segment.file, 0, segment.size_bytes)
            found += (batch for batch in decode(data) if batch.last >= start)
    return found


def records(log: Log) -> list[Rec]:
    """The records of a log whose batches are not compressed, those of markers left out."""
    found: list[Rec] = []
    for segment in log.segments:
        data, position = log.disk.pread(segment.file, 0, segment.size_bytes), 0
        for batch in decode(data):
            if not batch.attributes & CONTROL:
                found += rows(data, position, batch)
            position += int.from_bytes(data[position + 8 : position + 12], "big") + 12
    return found


class Rec(NamedTuple):
    """A record; ``value`` None: a tombstone."""

    offset: int
    key: bytes
    value: bytes | None


def rows(data: bytes, position: int, batch: Batch) -> list[Rec]:
    """The records of an uncompressed batch that begins at ``position`` of ``data`` (KIP-98)."""
    at, found = position + HEADER_BYTES, []
    for _ in range(batch.count):
        length, body = _varint(data, at)
        at = body + length
        _, body = _varint(data, body + 1)
        delta, body = _varint(data, body)
        key, body = _bytes(data, body)
        value, _ = _bytes(data, body)
        found.append(Rec(batch.base + delta, key or b"", value))
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    shift = value = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7


def _bytes(data: bytes, at: int) -> tuple[bytes | None, int]:
    size, at = _varint(data, at)
    if size < 0:
        return None, at
    return data[at : at + size], at + size
