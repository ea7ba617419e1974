"""Segments that Apache Kafka 4.3 wrote for its own, librdkafka's and kafka-python's producers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kept.storage.records import CheckRules, build_batch, headers, patch, read_header
from kept.storage.records.build import iterate
from kept.storage.types import Codec, TimestampType

GOLDEN = Path(__file__).parents[2] / "golden" / "records"
CODECS = {"none": Codec.NONE, **{codec.name.lower(): codec for codec in Codec if codec}}
NOW = 1_700_000_000_000


def load_capture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_records", GOLDEN / "capture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record = load_capture().record


def segment(name: str) -> bytes:
    return (GOLDEN / f"{name}.log").read_bytes()


def expected(i: int, offset: int, nulls: bool = True) -> tuple:
    timestamp, key, value, fields = record(i)
    return offset, timestamp, key, value, tuple(fields if nulls else fields[:1])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("who", ["java", "librdkafka", "kafka-python"])
def test_every_producer_and_codec_is_read(kernel: ModuleType, who: str, codec: str) -> None:
    found = kernel.scan(segment(f"{who}-{codec}"))
    assert {batch.codec for batch in found.batches} == {CODECS[codec]}
    assert list(iterate(found)) == [expected(i, i, who != "kafka-python") for i in range(100)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("who", ["java", "librdkafka", "kafka-python"])
def test_every_producer_and_codec_passes_the_check(
    kernel: ModuleType, who: str, codec: str
) -> None:
    buf = segment(f"{who}-{codec}")
    for position, header in headers(buf):
        batch = bytearray(buf[position : position + header.size_bytes])
        patch(batch, 0, 0, header.partition_leader_epoch)  # as its producer sent it
        checked = kernel.check(batch, CheckRules(compacted=True), NOW)
        assert not checked.rewritten, "what Kafka left as it was, so do we"
        assert checked.data == batch
        assert (checked.record_count, checked.codec) == (header.record_count, CODECS[codec])


@pytest.mark.parametrize("who", ["java", "librdkafka"])
def test_batches_are_built_byte_for_byte_as_producers_do(who: str) -> None:
    buf = segment(f"{who}-none")
    for position, header in headers(buf):
        built = build_batch(
            [record(i) for i in range(header.base_offset, header.next_offset)],
            base_offset=header.base_offset,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
            leader_epoch=header.partition_leader_epoch,
        )
        assert built == buf[position : position + header.size_bytes]


def test_append_time(kernel: ModuleType) -> None:
    found = kernel.scan(segment("append-time"))
    assert {batch.timestamp_type for batch in found.batches} == {TimestampType.LOG_APPEND_TIME}
    assert [found.timestamps[i] for i in range(100)] == [
        found.batches[found.batch_index[i]].max_timestamp for i in range(100)
    ]
    assert min(found.timestamps) > NOW


def test_append_time_is_stamped_as_kafka_does(kernel: ModuleType) -> None:
    """Taking Kafka's stamp off and setting it again gives Kafka's bytes."""
    buf = segment("append-time")
    header = read_header(buf)
    plain = bytearray(buf[: header.size_bytes])
    plain[22] &= ~0x08
    plain[17:21] = kernel.crc32c(memoryview(plain)[21:]).to_bytes(4, "big")
    rules = CheckRules(timestamp_type=TimestampType.LOG_APPEND_TIME)
    checked = kernel.check(plain, rules, header.max_timestamp)
    assert checked.data == buf[: header.size_bytes]


def test_transactions(kernel: ModuleType) -> None:
    found = kernel.scan(segment("transactional"))
    markers = [batch for batch in found.batches if batch.is_control]
    assert len(markers) == 5
    assert all(batch.is_transactional for batch in found.batches)
    assert [r.value for r in iterate(found)] == [record(i)[2] for i in range(100)]
    kinds = [
        bytes(found.key(i) or b"")[2:]
        for i in range(found.count)
        if found.batches[found.batch_index[i]].is_control
    ]
    assert kinds == [b"\x00\x01", b"\x00\x01", b"\x00\x00", b"\x00\x01", b"\x00\x01"]


def test_what_the_cleaner_left(kernel: ModuleType) -> None:
    found = kernel.scan(segment("compacted"))
    (batch,) = found.batches
    assert (batch.base_offset, batch.last_offset, batch.record_count) == (60, 79, 7)
    assert batch.has_delete_horizon
    assert batch.delete_horizon_ms == 2_795_254_241_433
    assert list(iterate(found)) == [expected(i, i) for i in range(73, 80)]
