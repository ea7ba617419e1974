from __future__ import annotations

from types import ModuleType

import pytest

from kept.storage.errors import CorruptMessage, InvalidRecord
from kept.storage.records import build_batch, compress, read_header, records, seal
from kept.storage.records.build import iterate
from kept.storage.types import Codec, TimestampType

NOW = 1_700_000_000_000
ROWS = [
    (NOW + 5, b"a", b"1", [("h", b"x"), ("n", None)]),
    (NOW, None, b"2", []),
    (NOW + 9, b"", None, [("", b"")]),
    (NOW + 2, b"b" * 200, b"", []),
]


def test_columns(kernel: ModuleType) -> None:
    batch = build_batch(ROWS, base_offset=100)
    found = kernel.scan(batch)
    assert found.count == 4
    assert found.data == batch, "nothing is copied"
    assert list(found.offsets) == [100, 101, 102, 103]
    assert list(found.timestamps) == [NOW + 5, NOW, NOW + 9, NOW + 2]
    assert [found.key(i) for i in range(4)] == [b"a", None, b"", b"b" * 200]
    assert [found.value(i) for i in range(4)] == [b"1", b"2", None, b""]
    assert list(found.key_length) == [1, -1, 0, 200]
    assert list(found.value_length) == [1, 1, -1, 0]
    assert list(found.batch_index) == [0] * 4
    areas = [
        bytes(found.data[start : start + length])
        for start, length in zip(found.headers_start, found.headers_length, strict=True)
    ]
    assert areas == [b"\x04\x02h\x02x\x02n\x01", b"\x00", b"\x02\x00\x00", b"\x00"]
    for name in ("offsets", "timestamps", "key_start", "value_start", "headers_start"):
        assert getattr(found, name).format == "q"
    for name in ("key_length", "value_length", "headers_length", "batch_index"):
        assert getattr(found, name).format == "i"
    assert found.batches == [read_header(batch)]


def test_nothing(kernel: ModuleType) -> None:
    for buf in (b"", bytearray(), memoryview(b"")):
        found = kernel.scan(buf)
        assert (found.count, found.batches, list(found.offsets)) == (0, [], [])


def test_many_batches_of_all_codecs(kernel: ModuleType) -> None:
    buf, expected = b"", []
    for i in range(20):
        codec = Codec(i % 5)
        buf += build_batch(ROWS, base_offset=10 * i, codec=codec)
        expected += [
            (10 * i + j, timestamp, key, value, tuple(headers))
            for j, (timestamp, key, value, headers) in enumerate(ROWS)
        ]
    found = kernel.scan(buf)
    assert list(iterate(found)) == expected
    assert [found.batches[i].codec for i in found.batch_index] == [
        Codec(i % 5) for i in range(20) for _ in ROWS
    ]


def test_a_compacted_batch_has_gaps(kernel: ModuleType) -> None:
    batch = build_batch(ROWS, base_offset=5, offsets=[7, 9, 1_000, 70_000], last_offset=2**31 + 4)
    found = kernel.scan(batch)
    assert list(found.offsets) == [7, 9, 1_000, 70_000]
    assert found.batches[0].next_offset == 2**31 + 5


def test_an_emptied_batch(kernel: ModuleType) -> None:
    buf = (
        build_batch(ROWS)
        + build_batch([], base_offset=10, last_offset=19)
        + build_batch(ROWS, base_offset=20)
    )
    found = kernel.scan(buf)
    assert found.count == 8
    assert list(found.batch_index) == [0] * 4 + [2] * 4
    assert found.batches[1].next_offset == 20


def test_append_time_counts_for_every_record(kernel: ModuleType) -> None:
    batch = build_batch(ROWS, timestamp_type=TimestampType.LOG_APPEND_TIME)
    assert list(kernel.scan(batch).timestamps) == [NOW + 9] * 4


def test_deltas_stay_relative_to_a_delete_horizon(kernel: ModuleType) -> None:
    batch = build_batch(ROWS, delete_horizon_ms=NOW + 10**9)
    found = kernel.scan(batch)
    assert list(found.timestamps) == [NOW + 5, NOW, NOW + 9, NOW + 2]
    assert found.batches[0].delete_horizon_ms == NOW + 10**9


def test_control_batches_are_scanned_but_are_no_records(kernel: ModuleType) -> None:
    marker = build_batch(
        [(NOW, b"\x00\x00\x00\x01", b"\x00\x00\x00\x00\x00\x00", ())],
        base_offset=4,
        is_control=True,
        is_transactional=True,
        producer_id=1,
        producer_epoch=0,
    )
    found = kernel.scan(build_batch(ROWS) + marker)
    assert found.count == 5
    assert found.batches[found.batch_index[4]].is_control
    assert [record.offset for record in iterate(found)] == [0, 1, 2, 3]


def test_the_first_damage_is_refused(kernel: ModuleType) -> None:
    first = build_batch(ROWS)
    damaged = bytearray(build_batch(ROWS, base_offset=4))
    damaged[-1] ^= 1
    with pytest.raises(CorruptMessage, match="CRC"):
        kernel.scan(first + damaged)
    for cut in range(1, len(first)):
        with pytest.raises(CorruptMessage):
            kernel.scan(first + first[:cut])


def test_without_the_crc_the_records_are_still_bounded(kernel: ModuleType) -> None:
    batch = bytearray(build_batch(ROWS))
    batch[-1] ^= 1
    with pytest.raises(InvalidRecord):
        kernel.scan(batch, check_crc=False)
    batch[-1] ^= 1
    batch[-250] ^= 1
    assert kernel.scan(batch, check_crc=False).count == 4
    for cut in range(1, len(batch)):
        with pytest.raises(CorruptMessage):
            kernel.scan(batch[:cut], check_crc=False)


def test_the_faulty_record_is_named(kernel: ModuleType) -> None:
    header = read_header(build_batch(ROWS))
    for codec in (Codec.NONE, Codec.LZ4):
        header.attributes = codec
        area = build_batch(ROWS)[61:] + b"\x00"
        stored = compress(codec, area)
        with pytest.raises(InvalidRecord) as caught:
            kernel.scan(bytes(seal(header, stored)))
        assert caught.value.record_errors == ((3, "bytes follow the last record"),)


def test_a_count_that_lies_allocates_nothing(kernel: ModuleType) -> None:
    header = read_header(build_batch(ROWS))
    header.record_count = 2**31 - 1
    with pytest.raises(InvalidRecord, match="record 4: the batch ends"):
        kernel.scan(bytes(seal(header, build_batch(ROWS)[61:])))


def test_reading_takes_any_negative_length_for_null(kernel: ModuleType) -> None:
    header = read_header(build_batch(ROWS[:1]))
    found = kernel.scan(bytes(seal(header, bytes.fromhex("0c000000030500"))))
    assert (found.key(0), found.value(0)) == (None, None)
    assert (found.key_length[0], found.value_length[0]) == (-1, -1)


def test_the_inflate_limit_is_for_the_whole_scan(kernel: ModuleType) -> None:
    batch = build_batch([(NOW, b"k", bytes(10_000), ())], codec=Codec.ZSTD)
    kernel.scan(batch * 3, inflate_limit=3 * 10_020)
    with pytest.raises(InvalidRecord, match="limit"):
        kernel.scan(batch * 3, inflate_limit=3 * 10_000)


def test_header_keys_that_are_not_utf8() -> None:
    header = read_header(build_batch(ROWS[:1]))
    area = bytes.fromhex("12000000010102" + "02ff" + "01")
    area = bytes([2 * (len(area) - 1)]) + area[1:]
    assert next(records(bytes(seal(header, area)))).headers == (("\ufffd", None),)


def test_columns_outlive_the_scan(kernel: ModuleType) -> None:
    found = kernel.scan(build_batch(ROWS * 500, codec=Codec.GZIP))
    offsets = found.offsets
    del found
    assert list(offsets) == list(range(2_000))


def test_a_scanned_bytearray_may_grow_again_once_the_columns_are_gone(kernel: ModuleType) -> None:
    buf = bytearray(build_batch(ROWS))
    kernel.scan(buf)
    kernel.check_replica(buf)
    kernel.crc32c(buf)
    buf += b"x"
