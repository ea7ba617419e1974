from __future__ import annotations

import pytest

from kept.storage.errors import CorruptMessage
from kept.storage.records import HEADER_BYTES, build_batch, headers, patch, read_header, records
from kept.storage.types import Codec, TimestampType

ONE = [(1_000, b"k", b"v", ())]


def batch_of(count: int, base_offset: int = 0) -> bytes:
    return build_batch([(1_000 + i, b"k", b"v", ()) for i in range(count)], base_offset=base_offset)


def test_fields_of_a_header() -> None:
    batch = build_batch(
        [(1_000, b"k", b"v", ()), (900, b"k", None, ())],
        base_offset=2**40,
        codec=Codec.LZ4,
        producer_id=2**50,
        producer_epoch=7,
        base_sequence=2**31 - 1,
        timestamp_type=TimestampType.LOG_APPEND_TIME,
        is_transactional=True,
        leader_epoch=3,
    )
    header = read_header(batch)
    assert header.size_bytes == len(batch)
    assert (header.base_offset, header.last_offset, header.next_offset) == (
        2**40,
        2**40 + 1,
        2**40 + 2,
    )
    assert (header.base_timestamp, header.max_timestamp) == (1_000, 1_000)
    assert (header.producer_id, header.producer_epoch) == (2**50, 7)
    assert header.codec is Codec.LZ4
    assert header.timestamp_type is TimestampType.LOG_APPEND_TIME
    assert header.is_transactional
    assert not header.is_control
    assert header.partition_leader_epoch == 3
    assert header.record_count == 2


def test_sequences_wrap_to_zero() -> None:
    header = read_header(
        build_batch([*ONE, *ONE, *ONE], producer_id=1, producer_epoch=0, base_sequence=2**31 - 2)
    )
    assert header.last_sequence == 0


def test_without_a_producer_there_is_no_last_sequence() -> None:
    assert read_header(batch_of(3)).last_sequence == -1


def test_delete_horizon() -> None:
    plain, dated = build_batch(ONE), build_batch(ONE, delete_horizon_ms=5_000)
    assert read_header(plain).delete_horizon_ms == -1
    assert read_header(dated).has_delete_horizon
    assert read_header(dated).delete_horizon_ms == 5_000
    assert next(records(dated)).timestamp == 1_000


def test_headers_stop_before_a_partial_batch() -> None:
    first, second = batch_of(2), batch_of(3, 2)
    whole = first + second
    assert [position for position, _ in headers(whole)] == [0, len(first)]
    for cut in range(len(first), len(whole)):
        assert [position for position, _ in headers(whole[:cut])] == [0]
    assert [position for position, _ in headers(whole, len(first))] == [len(first)]
    assert [position for position, _ in headers(whole, 0, len(first))] == [0]


@pytest.mark.parametrize(
    ("position", "content", "why"),
    [
        (16, b"\x01", "magic is 1"),
        (16, b"\xff", "magic is -1"),
        (8, b"\x00\x00\x00\x30", "batch length 48"),
        (8, b"\xff\xff\xff\xff", "batch length -1"),
        (57, b"\xff\xff\xff\xff", "negative record count"),
        (23, b"\x80\x00\x00\x00", "negative"),
    ],
)
def test_an_impossible_header_is_refused(position: int, content: bytes, why: str) -> None:
    batch = bytearray(batch_of(1))
    batch[position : position + len(content)] = content
    with pytest.raises(CorruptMessage, match=why):
        read_header(batch)
    with pytest.raises(CorruptMessage, match=why):
        list(headers(batch))


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1])
def test_a_cut_header_is_refused(size: int) -> None:
    with pytest.raises(CorruptMessage, match="too few"):
        read_header(batch_of(1)[:size])
    with pytest.raises(CorruptMessage, match="too few"):
        read_header(batch_of(1), -1)


def test_a_codec_that_does_not_exist() -> None:
    batch = bytearray(batch_of(1))
    batch[22] |= 5
    with pytest.raises(CorruptMessage, match="compression type 5"):
        _ = read_header(batch).codec


def test_patch_writes_outside_the_crc() -> None:
    first = batch_of(2)
    both = bytearray(first + batch_of(3))
    patch(both, len(first), 77, 5)
    header = read_header(both, len(first))
    assert (header.base_offset, header.partition_leader_epoch) == (77, 5)
    assert bytes(both[: len(first)]) == first
    assert [record.offset for record in records(both)] == [0, 1, 77, 78, 79]
