"""Records as the checkers see them: decoded here from the bytes on disk, by no code of ``kept``.

Transactions, too: which record a reader of committed data sees follows from the markers that were
committed; what a replica shows it, from the index of aborted transactions that it answers with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tests.sim.batches import CONTROL, TRANSACTIONAL, Batch

HEADER_BYTES = 61
ABORT, COMMIT = 0, 1


class Rec(NamedTuple):
    """A record; ``value`` None: a tombstone. ``producer``: of its transaction, -1: it is in none.
    ``marker``: it is no record, but ends one.
    """

    offset: int
    key: bytes
    value: bytes | None
    producer: int = -1
    marker: int | None = None


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


def rows(data: bytes, position: int, batch: Batch) -> list[Rec]:
    """The records of an uncompressed batch that begins at ``position`` of ``data`` (KIP-98)."""
    at, found = position + HEADER_BYTES, []
    producer = batch.producer_id if batch.attributes & TRANSACTIONAL else -1
    for _ in range(batch.count):
        length, body = _varint(data, at)
        at = body + length
        _, body = _varint(data, body + 1)
        delta, body = _varint(data, body)
        key, body = _bytes(data, body)
        if batch.attributes & CONTROL:
            kind = ABORT if key is None else key[3]
            found.append(Rec(batch.base + delta, b"", None, producer, kind))
            continue
        value, _ = _bytes(data, body)
        found.append(Rec(batch.base + delta, key or b"", value, producer))
    return found


def committed(found: Iterable[Rec]) -> tuple[dict[bytes, Rec], set[int]]:
    """The latest record of every key by the markers among them, and the offsets of those whose
    transactions are open.
    """
    seen: list[Rec] = []
    waiting: dict[int, list[Rec]] = {}
    for rec in found:
        if rec.marker is not None:
            ended = waiting.pop(rec.producer, [])
            seen += ended if rec.marker == COMMIT else ()
        elif rec.producer < 0:
            seen.append(rec)
        else:
            waiting.setdefault(rec.producer, []).append(rec)
    seen.sort(key=lambda rec: rec.offset)
    still = {rec.offset for open_ones in waiting.values() for rec in open_ones}
    return {rec.key: rec for rec in seen}, still


def shown(found: Iterable[Rec], hidden: Callable[[Rec], bool]) -> dict[bytes, Rec]:
    """The latest record of every key, of those that are not ``hidden`` from a reader."""
    return {
        rec.key: rec
        for rec in found
        if rec.marker is None and not (rec.producer >= 0 and hidden(rec))
    }
