"""``<end offset>.snapshot``: producer state, Apache Kafka's binary format.

int16 version 1, uint32 CRC-32C over everything after it, int32 count, then 46 bytes a producer: id
int64, epoch int16, last sequence int32, last offset int64, offset delta int32, timestamp int64,
coordinator epoch int32, first offset of the open transaction int64 (-1: none). One batch a
producer: after a restart the batches of the active segment are read again to know five.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from kept.storage.errors import DamagedData
from kept.storage.producers.producer_states import ProducerBatch, ProducerState, ProducerStates
from kept.storage.records.checksum import crc32c
from kept.storage.types import NO_OFFSET, NO_SEQUENCE

VERSION: Final = 1
_HEAD: Final = Struct(">hIi")
_CRC_END: Final = 6
_ENTRY: Final = Struct(">qhiqiqiq")


def encode(states: ProducerStates) -> bytes:
    """The file's bytes."""
    entries = []
    for producer_id, state in states.items():
        delta = state.batches[-1].offset_delta if state.batches else 0
        first = state.txn_first_offset
        entries.append(
            _ENTRY.pack(
                producer_id,
                state.epoch,
                state.last_sequence,
                state.last_offset,
                delta,
                state.last_timestamp,
                state.coordinator_epoch,
                NO_OFFSET if first is None else first,
            )
        )
    body = b"".join([len(entries).to_bytes(4, "big"), *entries])
    return _HEAD.pack(VERSION, crc32c(body), len(entries)) + body[4:]


def decode(path: str, data: bytes) -> list[tuple[int, ProducerState]]:
    """(producer id, state) of a file. Raises DamagedData."""
    if len(data) < _HEAD.size:
        raise DamagedData(path, 0, -1, f"{len(data)} bytes are no snapshot")
    version, crc, count = _HEAD.unpack_from(data)
    if version != VERSION:
        raise DamagedData(path, 0, -1, f"snapshot version {version}, expected {VERSION}")
    if crc32c(data[_CRC_END:]) != crc:
        raise DamagedData(path, 2, -1, "the CRC does not match")
    if len(data) != _HEAD.size + count * _ENTRY.size:
        raise DamagedData(path, 6, -1, f"{len(data)} bytes do not hold {count} producers")
    producers = []
    for values in _ENTRY.iter_unpack(data[_HEAD.size :]):
        producer_id, epoch, sequence, offset, delta, timestamp, coordinator, first = values
        state = ProducerState(epoch, timestamp)
        state.coordinator_epoch = coordinator
        if sequence != NO_SEQUENCE:
            state.batches.append(ProducerBatch(sequence, offset, delta, timestamp))
        if first != NO_OFFSET:
            state.txn_first_offset = first
        producers.append((producer_id, state))
    return producers
