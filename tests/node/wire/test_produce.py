"""Produce over the wire (rule 37): what is wrong is refused, the log untouched."""

from __future__ import annotations

import random
import struct
import uuid

import pytest

from kept.storage.records import build_batch, compress, crc32c, records
from kept.storage.types import Codec
from kept.testing import Cluster
from tests.support.request_values import now_ms, one_batch, produce_values


@pytest.fixture(scope="module")
def roomy():
    """A node that takes large batches, and inflates 8 MB at most."""
    with Cluster(kept_inflated_max_bytes=8_000_000, message_max_bytes=16_000_000) as cluster:
        yield cluster


def mend(data: bytes | bytearray) -> bytes:
    """The batch with a CRC that fits."""
    data = bytearray(data)
    data[17:21] = struct.pack(">I", crc32c(memoryview(data)[21:]))
    return bytes(data)


def patched(data: bytes, position: int, new: bytes, *, crc: bool = True) -> bytes:
    changed = bytearray(data)
    changed[position : position + len(new)] = new
    return mend(changed) if crc else bytes(changed)


def bad_batches():
    good = one_batch(3)
    now = now_ms()
    yield "crc", patched(good, 40, b"\xff", crc=False), 2
    yield "magic 1", patched(good, 16, b"\x01", crc=False), None
    yield "magic 9", patched(good, 16, b"\x09", crc=False), None
    yield "length too long", patched(good, 8, struct.pack(">i", len(good)), crc=False), 87
    yield "length too short", patched(good, 8, struct.pack(">i", 20), crc=False), 2
    yield "cut", good[:-1], 87
    yield "header only", good[:30], 87
    yield "length alone", good[:12], 87
    yield "empty", b"", None
    yield "two batches", good + good, 87
    yield "trailing bytes", good + b"\0\0\0", None
    yield "count 0", patched(good, 57, struct.pack(">i", 0)), 87
    yield "count too many", patched(good, 57, struct.pack(">i", 4)), 87
    yield "last delta", patched(good, 23, struct.pack(">i", 7)), 87
    yield "control bit", patched(good, 21, b"\x00\x20"), 87
    yield "no bytes", b"", 87
    yield "count -1", patched(good, 57, struct.pack(">i", -1)), 87
    yield "codec 5", patched(good, 21, b"\x00\x05"), 87
    yield "not gzip", patched(good, 21, b"\x00\x01"), None
    yield "varint", patched(good, 61, b"\xff\xff\xff\xff\xff\xff"), 87
    yield "record length", patched(good, 61, b"\x7e"), 87
    late = build_batch([(now + 7_200_000, b"k", b"v", ())])
    yield "future", late, 32
    yield "sequence", build_batch([(now, b"k", b"v", ())], producer_id=5, producer_epoch=0), None
    for codec in (Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD):
        area = good[61:]
        whole = compress(codec, area)
        head = bytearray(good[:61])
        head[21:23] = struct.pack(">h", int(codec))
        for name, body in (("tail", whole + b"tail"), ("cut", whole[:-3]), ("junk", b"\x55" * 40)):
            data = head + body
            data[8:12] = struct.pack(">i", len(data) - 12)
            yield f"{codec.name} {name}", mend(data), None


@pytest.mark.parametrize("version", range(3, 10))
def test_zstd_is_for_clients_that_know_it(wire, kept_broker, version):
    """As in Apache Kafka (KIP-110): those of Produce v6 could not read it."""
    topic = kept_broker.create_topic()
    data = one_batch(2, codec=Codec.ZSTD)
    result = wire.produce(topic, data, version=version)
    assert int(result.error_code) == (0 if version >= 7 else 76)
    assert wire.end_offset(topic) == (2 if version >= 7 else 0)


def test_every_bad_batch_is_refused_and_nothing_is_appended(wire, kept_broker):
    topic = kept_broker.create_topic()
    assert wire.produce(topic, one_batch(2)).base_offset == 0
    for name, data, code in bad_batches():
        result = wire.produce(topic, data)
        error = int(result.error_code)
        assert error in ((code,) if code is not None else (2, 87, 76)), (name, result)
        assert result.base_offset == -1, name
        assert result.error_message, name
        assert wire.end_offset(topic) == 2, name
    assert wire.produce(topic, one_batch(1)).base_offset == 2


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_a_bomb_is_refused(roomy, connect, codec):
    wire = connect(roomy.port())
    topic = roomy.create_topic()
    data = build_batch([(now_ms(), b"k", bytes(12_000_000), ())], codec=codec)
    assert int(wire.produce(topic, data).error_code) in (10, 87)
    assert wire.end_offset(topic) == 0
    assert wire.produce(topic, one_batch(1)).base_offset == 0


def test_records_errors_name_the_records(wire, kept_broker):
    topic = kept_broker.create_topic(config={"cleanup.policy": "compact"})
    now = now_ms()
    data = build_batch([(now, b"a", b"1", ()), (now, None, b"2", ()), (now, None, b"3", ())])
    result = wire.produce(topic, data)
    assert int(result.error_code) == 87
    assert [e.batch_index for e in result.record_errors] == [1, 2]
    assert wire.end_offset(topic) == 0


def test_a_batch_larger_than_the_topic_allows(wire, kept_broker):
    topic = kept_broker.create_topic(config={"max.message.bytes": "1000"})
    assert int(wire.produce(topic, one_batch(1, 2000)).error_code) == 10
    assert wire.end_offset(topic) == 0


@pytest.mark.parametrize("version", range(3, 14))
@pytest.mark.parametrize("acks", [1, -1])
def test_every_version(wire, kept_broker, version, acks):
    topic = kept_broker.create_topic()
    topic_id = wire.ask(3, 12, topics=[{"name": topic, "topic_id": None}]).topics[0].topic_id
    for offset in range(3):
        found = wire.produce(topic, one_batch(1), version=version, acks=acks, topic_id=topic_id)
        assert (int(found.error_code), found.base_offset) == (0, offset)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("size", [10, 400_000])
def test_every_codec_also_when_checked_in_a_thread(roomy, connect, codec, size):
    wire = connect(roomy.port())
    topic = roomy.create_topic()
    values = [random.Random(i).randbytes(size) for i in range(3)]
    stamp = now_ms()
    data = build_batch([(stamp, b"k", value, ()) for value in values], codec=codec)
    assert wire.produce(topic, data).base_offset == 0
    found = wire.fetch(topic, 0, partition_max_bytes=8_000_000)
    assert [r.value for r in records(bytes(found.records))] == values


def test_unknown_topic_partition_and_id(wire, kept_broker):
    topic = kept_broker.create_topic()
    assert int(wire.produce("nobody-made-it", one_batch(1)).error_code) == 3
    assert int(wire.produce(topic, one_batch(1), partition=7).error_code) == 3
    found = wire.produce("", one_batch(1), version=13, topic_id=uuid.uuid4())
    assert int(found.error_code) == 100


def test_null_records(wire, kept_broker):
    topic = kept_broker.create_topic()
    assert int(wire.produce(topic, None).error_code) == 87


@pytest.mark.parametrize("acks", [2, -2, 100])
def test_acks_that_do_not_exist(wire, kept_broker, acks):
    topic = kept_broker.create_topic()
    assert int(wire.produce(topic, one_batch(1), acks=acks).error_code) == 21
    assert wire.end_offset(topic) == 0


def test_transactional_batches_need_a_transaction(wire, kept_broker):
    topic = kept_broker.create_topic()
    data = one_batch(1, producer_id=1, producer_epoch=0, base_sequence=0, is_transactional=True)
    assert int(wire.ask(10, 6, coordinator_keys=["tx"], key_type=1).coordinators[0].error_code) == 0
    assert int(wire.produce(topic, data, transactional_id="tx").error_code) == 49
    assert int(wire.produce(topic, data).error_code) == 53
    assert wire.end_offset(topic) == 0
    assert int(wire.produce(topic, one_batch(1), transactional_id="tx").error_code) == 0
    response = wire.ask(
        22, 4, transactional_id=None, transaction_timeout=1000, producer_id=7, producer_epoch=-1
    )
    assert int(response.error_code) == 42


def test_idempotent_producers(wire, kept_broker):
    topic = kept_broker.create_topic()

    def new_id():
        found = wire.ask(
            22, 4, transactional_id=None, transaction_timeout=0, producer_id=-1, producer_epoch=-1
        )
        assert (int(found.error_code), found.producer_epoch) == (0, 0)
        return found.producer_id

    producer = new_id()
    assert new_id() != producer

    def batch(sequence, epoch=0, count=1):
        return one_batch(count, producer_id=producer, producer_epoch=epoch, base_sequence=sequence)

    first, second = batch(0, count=2), batch(2)
    assert wire.produce(topic, first).base_offset == 0
    assert wire.produce(topic, second).base_offset == 2
    assert wire.produce(topic, first).base_offset == 0  # a duplicate: where it was
    assert int(wire.produce(topic, batch(9)).error_code) == 45
    assert wire.produce(topic, batch(3, epoch=1)).error_code != 0  # a new epoch begins at 0
    assert wire.produce(topic, batch(0, epoch=1)).base_offset == 3
    assert int(wire.produce(topic, batch(3)).error_code) == 47
    assert wire.end_offset(topic) == 4


def test_log_append_time(wire, kept_broker):
    topic = kept_broker.create_topic(config={"message.timestamp.type": "LogAppendTime"})
    before = now_ms()
    result = wire.produce(topic, one_batch(1, timestamp=1000))
    stamp = round(result.log_append_time.timestamp() * 1000)
    assert before <= stamp <= now_ms()
    (found,) = records(bytes(wire.fetch(topic, 0).records))
    assert found.timestamp == stamp


def test_compression_type_of_the_topic(wire, kept_broker):
    topic = kept_broker.create_topic(config={"compression.type": "zstd"})
    wire.produce(topic, one_batch(100, 100))
    data = bytes(wire.fetch(topic, 0).records)
    assert data[22] & 7 == Codec.ZSTD
    assert len(list(records(data))) == 100


def test_acks_0_has_no_answer_and_an_error_closes(wire, kept_broker, connect):
    topic = kept_broker.create_topic()
    wire.send(0, 9, **produce_values(topic, one_batch(2), acks=0))
    assert wire.ask(18, 0).error_code == 0  # the next answer is the next request's
    assert wire.end_offset(topic) == 2
    wire.send(0, 9, **produce_values(topic, b"rubbish", acks=0))
    assert wire.is_closed()
    assert connect(kept_broker.port()).end_offset(topic) == 2


def test_one_request_with_good_and_bad_partitions(wire, kept_broker):
    topic = kept_broker.create_topic(partitions=3)
    good = one_batch(1)
    data = [{"index": i, "records": good if i != 1 else good[:-1]} for i in range(4)]
    response = wire.ask(
        0,
        9,
        transactional_id=None,
        acks=-1,
        timeout=1000,
        topic_data=[
            {"name": topic, "topic_id": None, "partition_data": data},
            {"name": "missing", "topic_id": None, "partition_data": data[:1]},
        ],
    )
    first, second = response.responses
    codes = [int(p.error_code) for p in first.partition_responses]
    assert codes == [0, 87, 0, 3]
    assert [int(p.error_code) for p in second.partition_responses] == [3]


def test_a_topic_with_a_long_name(wire, kept_broker):
    topic = kept_broker.topic() + "n" * 200
    with kept_broker.client() as client:
        client.create_topic(topic[:249], partitions=1)
    for version in (8, 9, 12):
        assert int(wire.produce(topic[:249], one_batch(1), version=version).error_code) == 0


def test_a_refusal_says_where_the_log_starts(wire, kept_broker):
    """As Apache Kafka 4.3 does where the log was asked, and not where it was not."""
    topic = kept_broker.create_topic(config={"max.message.bytes": "1000"})
    for _ in range(5):
        assert wire.produce(topic, one_batch()).error_code == 0
    deletion = {"name": topic, "partitions": [{"partition_index": 0, "offset": 4}]}
    wire.ask(21, 2, topics=[deletion], timeout=1000)

    def start(data, name=topic, **more):
        answer = wire.produce(name, data, **more)
        return int(answer.error_code), answer.log_start_offset

    numbered = {"producer_id": 4000, "producer_epoch": 1}
    assert start(one_batch(base_sequence=0, **numbered)) == (0, 4)
    assert start(one_batch(base_sequence=9, **numbered)) == (45, 4)
    old = {"producer_id": 4000, "producer_epoch": 0}
    assert start(one_batch(base_sequence=0, **old)) == (47, 4)
    assert start(one_batch(timestamp=now_ms() + 10**9)) == (32, 4)
    assert start(one_batch(1, 2000)) == (10, -1)
    damaged = bytearray(one_batch())
    damaged[-1] ^= 1
    assert start(bytes(damaged)) == (2, -1)
    assert start(one_batch(), partition=7) == (3, -1)
