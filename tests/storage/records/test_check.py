"""Rule 37, over both kernels."""

from __future__ import annotations

import struct
import threading
from dataclasses import replace
from types import ModuleType

import pytest

from kept.storage.errors import CorruptMessage, InvalidRecord, InvalidTimestamp, MessageTooLarge
from kept.storage.records import (
    CheckRules,
    build_batch,
    compress,
    crc32c,
    decompress,
    patch,
    read_header,
    records,
    seal,
)
from kept.storage.records.columns import MAX_RECORD_ERRORS
from kept.storage.types import MAX_INT64, Codec, TimestampType

NOW = 1_700_000_000_000
HOUR = 3_600_000
RULES = CheckRules()
HEADER_FIELDS = {  # name: (position, struct format)
    "base_offset": (0, ">q"),
    "batch_length": (8, ">i"),
    "magic": (16, ">b"),
    "attributes": (21, ">h"),
    "last_offset_delta": (23, ">i"),
    "base_timestamp": (27, ">q"),
    "max_timestamp": (35, ">q"),
    "producer_id": (43, ">q"),
    "base_sequence": (53, ">i"),
    "record_count": (57, ">i"),
}


def simple(count: int = 3, **kwargs: object) -> bytes:
    return build_batch(
        [(NOW + i, b"key-%d" % i, b"value-%d" % i, [("h", b"x")]) for i in range(count)],
        **kwargs,  # type: ignore[arg-type]
    )


def altered(batch: bytes, **fields: int) -> bytearray:
    """The batch with other header fields and a right CRC."""
    out = bytearray(batch)
    for name, value in fields.items():
        position, form = HEADER_FIELDS[name]
        struct.pack_into(form, out, position, value)
    struct.pack_into(">I", out, 17, crc32c(memoryview(out)[21:]))
    return out


def with_area(batch: bytes, area: bytes, codec: Codec = Codec.NONE) -> bytes:
    """The header of ``batch`` over another record area."""
    header = read_header(batch)
    header.attributes = header.attributes & ~7 | codec
    return bytes(seal(header, area))


def errors_of(kernel: ModuleType, batch: bytes, rules: CheckRules = RULES) -> tuple:
    with pytest.raises(InvalidRecord) as caught:
        kernel.check(batch, rules, NOW)
    return caught.value.record_errors


@pytest.mark.parametrize("codec", list(Codec))
def test_a_good_batch_passes_as_it_is(kernel: ModuleType, codec: Codec) -> None:
    batch = bytearray(simple(codec=codec, producer_id=9, producer_epoch=2, base_sequence=5))
    checked = kernel.check(batch, RULES, NOW)
    assert checked.data == batch
    assert not checked.rewritten
    assert checked.codec is codec
    assert (checked.size_bytes, checked.record_count) == (len(batch), 3)
    assert checked.max_timestamp == NOW + 2
    assert (checked.producer_id, checked.producer_epoch, checked.base_sequence) == (9, 2, 5)
    assert checked.is_transactional is False


def test_the_data_is_the_buffer_itself(kernel: ModuleType) -> None:
    batch = bytearray(simple())
    patch(kernel.check(batch, RULES, NOW).data, 0, 42, 7)
    assert read_header(batch).base_offset == 42
    part = memoryview(bytes(10) + simple() + bytes(3))[10:-3]
    assert kernel.check(part, RULES, NOW).data == part


def test_a_checked_batch_cannot_be_changed(kernel: ModuleType) -> None:
    with pytest.raises(AttributeError):
        kernel.check(simple(), RULES, NOW).size_bytes = 3


def test_a_transactional_batch_says_so(kernel: ModuleType) -> None:
    batch = simple(is_transactional=True, producer_id=1, producer_epoch=0, base_sequence=0)
    assert kernel.check(batch, RULES, NOW).is_transactional is True


# Framing.


def test_every_cut_is_refused(kernel: ModuleType) -> None:
    batch = simple()
    for cut in range(len(batch)):
        with pytest.raises(InvalidRecord):
            kernel.check(batch[:cut], RULES, NOW)


def test_every_flipped_bit_under_the_crc_is_refused(kernel: ModuleType) -> None:
    batch = bytearray(simple())
    for position in range(16, len(batch)):
        batch[position] ^= 0x10
        with pytest.raises((CorruptMessage, InvalidRecord)):
            kernel.check(batch, RULES, NOW)
        batch[position] ^= 0x10


def test_exactly_one_batch(kernel: ModuleType) -> None:
    for tail in (simple(), b"\x00"):
        with pytest.raises(InvalidRecord, match="exactly one batch"):
            kernel.check(simple() + tail, RULES, NOW)


@pytest.mark.parametrize("magic", [0, 1])
def test_old_formats_are_refused_as_kafka_does(kernel: ModuleType, magic: int) -> None:
    with pytest.raises(InvalidRecord, match="version 2"):
        kernel.check(altered(simple(), magic=magic), RULES, NOW)


@pytest.mark.parametrize("magic", [3, 127, -1])
def test_other_magic_is_damage(kernel: ModuleType, magic: int) -> None:
    with pytest.raises(CorruptMessage, match="magic"):
        kernel.check(altered(simple(), magic=magic), RULES, NOW)


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 14, 48, 10_000, 2**31 - 1])
def test_impossible_lengths(kernel: ModuleType, length: int) -> None:
    """As in Apache Kafka: to be sent again, unless it was sent cut off."""
    with pytest.raises(InvalidRecord if length > 48 else CorruptMessage):
        kernel.check(altered(simple(), batch_length=length), RULES, NOW)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"record_count": 0}, "no records"),
        ({"record_count": 0, "last_offset_delta": 0}, "no records"),
        ({"base_offset": 5}, "base offset 0, not 5"),
        ({"base_offset": -1}, "base offset 0, not -1"),
        ({"record_count": 2}, "do not match"),
        ({"last_offset_delta": 3}, "do not match"),
        ({"record_count": 2**31 - 1, "last_offset_delta": 2**31 - 1}, "do not match"),
        ({"attributes": 0x20}, "control"),
        ({"attributes": 0x08}, "LogAppendTime"),
        ({"attributes": 0x40}, "delete horizon"),
        ({"record_count": -1}, "negative record count -1"),
        ({"last_offset_delta": -1}, "last offset delta -1"),
        ({"producer_id": 1}, "sequence -1"),
        ({"producer_id": 1, "base_sequence": -5}, "sequence -5"),
        ({"producer_id": -2}, "sequence -1"),
    ],
)
def test_headers_that_no_producer_may_send(
    kernel: ModuleType, fields: dict[str, int], why: str
) -> None:
    with pytest.raises(InvalidRecord, match=why):
        kernel.check(altered(simple(), **fields), RULES, NOW)


@pytest.mark.parametrize("codec", [5, 6, 7])
def test_a_codec_that_does_not_exist(kernel: ModuleType, codec: int) -> None:
    with pytest.raises(InvalidRecord, match=f"compression type {codec}"):
        kernel.check(altered(simple(), attributes=codec), RULES, NOW)


def test_too_large(kernel: ModuleType) -> None:
    batch = simple()
    kernel.check(batch, replace(RULES, max_batch_bytes=len(batch)), NOW)
    with pytest.raises(MessageTooLarge, match=r"max\.message\.bytes"):
        kernel.check(batch, replace(RULES, max_batch_bytes=len(batch) - 1), NOW)


def test_too_large_after_recompression(kernel: ModuleType) -> None:
    batch = build_batch([(NOW, b"k", bytes(10_000), ())], codec=Codec.ZSTD)
    rules = replace(RULES, compression_type="uncompressed", max_batch_bytes=5_000)
    with pytest.raises(MessageTooLarge):
        kernel.check(batch, rules, NOW)


@pytest.mark.parametrize("codec", list(Codec))
def test_inflated_size_is_bounded(kernel: ModuleType, codec: Codec) -> None:
    batch = build_batch([(NOW, b"k", bytes(10_000), ())], codec=codec)
    kernel.check(batch, replace(RULES, max_inflated_bytes=10_100), NOW)
    with pytest.raises(InvalidRecord, match="limit"):
        kernel.check(batch, replace(RULES, max_inflated_bytes=10_000), NOW)


# Records.


def area_of(batch: bytes) -> bytes:
    return decompress(read_header(batch).codec, batch[61:], 1 << 20)


CASES = {
    # name: (a record area that should hold one record, the reason)
    "nothing": ("", "ends before"),
    "length cut": ("80", "variable-length"),
    "length too long": ("808080808001", "variable-length"),
    "length above 32 bits": ("ffffffff1f", "variable-length"),
    "length negative": ("01", "length is impossible"),
    "length too small": ("0a0000000101", "length is impossible"),
    "length past the end": ("10000000010100", "length is impossible"),
    "timestamp never ends": ("18" + "00" + "ff" * 11, "variable-length"),
    "timestamp above 64 bits": ("24" + "00" + "ff" * 9 + "02" + "00" * 7, "variable-length"),
    "key length past the end": ("0c0000000a0100", "key or value"),
    "key length of minus two": ("0c000000030100", "key or value"),
    "value length past the end": ("0c000000010a00", "key or value"),
    "value length of minus two": ("0c000000010300", "key or value"),
    "header count negative": ("0c000000010101", "headers"),
    "header count past the end": ("0c000000010102", "headers"),
    "header key null": ("10000000010102" + "0101", "headers"),
    "header key past the end": ("10000000010102" + "0401", "headers"),
    "header value past the end": ("10000000010102" + "0004", "headers"),
    "header value of minus two": ("10000000010102" + "0003", "headers"),
    "bytes after the headers": ("0e00000001010000", "do not fill"),
    "bytes after the last record": ("0c00000001010000", "bytes follow"),
    "a second record": ("0c000000010100" + "0c000002010100", "bytes follow"),
}


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
@pytest.mark.parametrize("name", CASES)
def test_bad_framing_of_a_record(kernel: ModuleType, name: str, codec: Codec) -> None:
    content, why = CASES[name]
    area = bytes.fromhex(content)
    batch = with_area(simple(1), compress(codec, area), codec)
    if why == "headers" and "count" not in name:
        assert len(area) == 9
    ((index, reason),) = errors_of(kernel, batch)
    assert index == 0
    assert why in reason


def test_the_smallest_record_passes(kernel: ModuleType) -> None:
    batch = with_area(simple(1), bytes.fromhex("0c000000010100"))
    assert kernel.check(batch, RULES, NOW).record_count == 1


def test_the_faulty_record_is_named(kernel: ModuleType) -> None:
    one, two = area_of(simple(1)), bytearray(area_of(simple(2)))
    two[len(one)] ^= 0x40
    errors = errors_of(kernel, with_area(simple(2), two))
    assert errors == ((1, "its length is impossible"),)


def test_offset_deltas_count_from_zero(kernel: ModuleType) -> None:
    batch = build_batch([(NOW, b"k", b"v", ())] * 4, offsets=[0, 2, 2, 1], last_offset=3)
    errors = errors_of(kernel, batch)
    assert [index for index, _ in errors] == [1, 3]
    assert "offset delta" in errors[0][1]


def test_a_compacted_topic_wants_keys(kernel: ModuleType) -> None:
    batch = build_batch(
        [(NOW, None, b"a", ()), (NOW, b"", b"b", ()), (NOW, b"k", None, ()), (NOW, None, b"d", ())]
    )
    assert kernel.check(batch, RULES, NOW).record_count == 4
    errors = errors_of(kernel, batch, replace(RULES, compacted=True))
    assert [index for index, _ in errors] == [0, 3]
    assert "without a key" in errors[0][1]


def test_the_list_of_faults_is_bounded(kernel: ModuleType) -> None:
    batch = build_batch([(NOW, None, b"a", ())] * (MAX_RECORD_ERRORS + 50))
    errors = errors_of(kernel, batch, replace(RULES, compacted=True))
    assert [index for index, _ in errors] == list(range(MAX_RECORD_ERRORS))


@pytest.mark.parametrize("faulty", [MAX_RECORD_ERRORS - 1, MAX_RECORD_ERRORS])
def test_trailing_bytes_beside_many_faults(kernel: ModuleType, faulty: int) -> None:
    batch = build_batch([(NOW, None, b"a", ())] * faulty)
    batch = with_area(batch, batch[61:] + b"\x00")
    errors = errors_of(kernel, batch, replace(RULES, compacted=True))
    assert len(errors) == MAX_RECORD_ERRORS
    assert ("bytes follow" in errors[-1][1]) == (faulty < MAX_RECORD_ERRORS)


# Timestamps.


def at(*timestamps: int) -> bytes:
    return build_batch([(timestamp, b"k", b"v", ()) for timestamp in timestamps])


@pytest.mark.parametrize(
    ("timestamp", "passes"),
    [
        (NOW + HOUR, True),
        (NOW + HOUR + 1, False),
        (NOW - 1_000, True),
        (NOW - 1_001, False),
        (-1, True),  # no timestamp
        (-2, False),
    ],
)
def test_the_window_of_timestamps(kernel: ModuleType, timestamp: int, passes: bool) -> None:
    rules = replace(RULES, timestamp_before_max_ms=1_000)
    batch = at(NOW, timestamp, NOW)
    if passes:
        kernel.check(batch, rules, NOW)
        return
    with pytest.raises(InvalidTimestamp) as caught:
        kernel.check(batch, rules, NOW)
    assert caught.value.record_errors == (
        (1, f"timestamp {timestamp} is outside {NOW - 1_000}..{NOW + HOUR}"),
    )


def test_one_bad_timestamp_among_other_faults_decides_the_error(kernel: ModuleType) -> None:
    batch = build_batch([(NOW, None, b"v", ()), (NOW + 2 * HOUR, b"k", b"v", ())])
    with pytest.raises(InvalidTimestamp) as caught:
        kernel.check(batch, replace(RULES, compacted=True), NOW)
    assert [index for index, _ in caught.value.record_errors] == [0, 1]


def test_windows_without_end(kernel: ModuleType) -> None:
    rules = replace(RULES, timestamp_after_max_ms=MAX_INT64, timestamp_before_max_ms=MAX_INT64)
    kernel.check(at(MAX_INT64, 0, -(2**62)), rules, NOW)
    kernel.check(at(0), RULES, 0)


def test_deltas_that_overflow_wrap_and_then_meet_the_window(kernel: ModuleType) -> None:
    batch = altered(at(0, 10), base_timestamp=MAX_INT64, max_timestamp=MAX_INT64)
    rules = replace(RULES, timestamp_after_max_ms=MAX_INT64, timestamp_before_max_ms=10)
    with pytest.raises(InvalidTimestamp, match=str(-(2**63) + 9)):
        kernel.check(batch, rules, NOW)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("wrong", [-1, 0, NOW + 1, MAX_INT64])
def test_a_wrong_max_timestamp_is_put_right(kernel: ModuleType, codec: Codec, wrong: int) -> None:
    batch = simple(codec=codec)
    sent = altered(batch, max_timestamp=wrong)
    checked = kernel.check(sent, RULES, NOW)
    assert checked.rewritten
    assert checked.max_timestamp == NOW + 2
    assert checked.data == batch
    assert kernel.check(checked.data, RULES, NOW).rewritten is False


def test_no_timestamps_at_all(kernel: ModuleType) -> None:
    checked = kernel.check(at(-1, -1), RULES, NOW)
    assert checked.max_timestamp == -1
    assert not checked.rewritten


@pytest.mark.parametrize("codec", list(Codec))
def test_log_append_time(kernel: ModuleType, codec: Codec) -> None:
    rules = replace(RULES, timestamp_type=TimestampType.LOG_APPEND_TIME)
    batch = bytearray(
        build_batch(
            [(5, b"k", b"v", ()), (NOW * 2, None, b"w", ())],
            codec=codec,
            producer_id=3,
            producer_epoch=1,
            base_sequence=0,
        )
    )
    before = bytes(batch)
    checked = kernel.check(batch, rules, NOW)
    assert batch == before, "what the client sent is not touched"
    assert checked.rewritten
    assert checked.max_timestamp == NOW
    header = kernel.check_replica(checked.data)
    assert header.timestamp_type is TimestampType.LOG_APPEND_TIME
    assert (header.max_timestamp, header.base_timestamp) == (NOW, 5)
    assert (header.producer_id, header.codec) == (3, codec)
    assert [record.timestamp for record in records(checked.data)] == [NOW, NOW]
    patch(checked.data, 0, 10, 1)


# Codecs.


@pytest.mark.parametrize("wanted", ["producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("sent", list(Codec))
def test_compression_type(kernel: ModuleType, sent: Codec, wanted: str) -> None:
    batch = simple(50, codec=sent, producer_id=4, producer_epoch=0, base_sequence=8)
    checked = kernel.check(batch, replace(RULES, compression_type=wanted), NOW)
    named = {"producer": sent, "uncompressed": Codec.NONE}
    expected = named.get(wanted) if wanted in named else Codec[wanted.upper()]
    assert checked.codec is expected
    assert checked.rewritten == (expected is not sent)
    assert checked.size_bytes == len(checked.data)
    header = kernel.check_replica(checked.data)
    assert header.codec is expected
    assert (header.producer_id, header.base_sequence) == (4, 8)
    assert list(records(checked.data)) == list(records(batch))


def test_compression_type_and_append_time_at_once(kernel: ModuleType) -> None:
    rules = replace(RULES, compression_type="zstd", timestamp_type=TimestampType.LOG_APPEND_TIME)
    checked = kernel.check(simple(), rules, NOW)
    header = kernel.check_replica(checked.data)
    assert (header.codec, header.timestamp_type, header.max_timestamp) == (
        Codec.ZSTD,
        TimestampType.LOG_APPEND_TIME,
        NOW,
    )


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec])
def test_compressed_streams_are_whole_and_alone(kernel: ModuleType, codec: Codec) -> None:
    area = area_of(simple())
    packed = compress(codec, area)
    for stored in (packed + b"\x00", packed + packed, packed[:-1], b"", b"garbage"):
        with pytest.raises(InvalidRecord):
            kernel.check(with_area(simple(), stored, codec), RULES, NOW)
    assert kernel.check(with_area(simple(), packed, codec), RULES, NOW).record_count == 3


def test_a_large_batch_is_checked_without_the_gil_by_many_threads(kernel: ModuleType) -> None:
    batches = [
        build_batch([(NOW, b"k" * 16, bytes(1_000), ())] * 400, codec=codec) for codec in Codec
    ]
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            for batch in batches * 3:
                assert kernel.check(batch, RULES, NOW).record_count == 400
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_check_replica(kernel: ModuleType) -> None:
    batch = build_batch([(NOW, None, b"v", ())], offsets=[9], base_offset=5, last_offset=12)
    both = simple() + batch
    assert kernel.check_replica(both, len(both) - len(batch)) == read_header(batch)
    empty = build_batch([], base_offset=7, last_offset=20)
    assert kernel.check_replica(empty).next_offset == 21
    for position in (-1, 1, len(both) - 5, len(both), len(both) + 1):
        with pytest.raises(CorruptMessage):
            kernel.check_replica(both, position)
    damaged = bytearray(batch)
    damaged[-1] ^= 1
    with pytest.raises(CorruptMessage, match="CRC"):
        kernel.check_replica(damaged)
    with pytest.raises(CorruptMessage, match="cut off"):
        kernel.check_replica(batch[:-1])
