"""broker.Broker beside Kafka's protocol: the same topics, the same records, the same rules."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, cast

import grpc
import pytest

from kept.client.client import OutRecord
from kept.client.core.calls import ToLeader
from kept.client.partitioner import partition_for_key
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import PartitionRecord, TopicRecord
from kept.node.admin.cluster_client import ClusterClient
from kept.node.admin.records.partition_records import Reader
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.runtime.runtime import Runtime
from kept.node.security.client_usage import UNMETERED
from kept.storage.disk import Disk
from kept.storage.errors import PolicyViolation
from kept.storage.types import TopicPartition
from tests.support.replicas import FixedMetadata, live_config

Code = grpc.StatusCode
PRODUCE, CONSUME = "broker.Broker/Produce", "broker.Broker/Consume"


@pytest.fixture
def client(kept_broker):
    with kept_broker.client() as client:
        yield client


def delete_below(client, topic, offset):
    partitions = [{"partition_index": 0, "offset": offset}]
    values = {"topics": [{"name": topic, "partitions": partitions}], "timeout_ms": 10_000}
    answer = client.request(21, {**values, "timeout": 10_000}, ToLeader(topic, 0))
    assert int(answer.topics[0].partitions[0].error_code) == 0


def test_what_the_seed_does(kept_broker, rpc):
    topic = kept_broker.topic()
    made = rpc.call("broker.Broker/CreateTopic", topic=topic, partitions=3)
    assert (made.topic, made.partitions, made.replication_factor) == (topic, 3, 1)
    done = rpc.produce(topic, partition=0, payload=b"Hello World")
    assert (done.offset, done.partition, done.HasField("offset")) == (0, 0, True)
    (record,) = rpc.consume(topic, partition=0, offset=0)
    assert (record.offset, record.payload, record.HasField("key")) == (0, b"Hello World", False)
    assert abs(record.timestamp - time.time() * 1000) < 60_000


def test_grpc_to_kafka(kept_broker, rpc, client):
    topic = kept_broker.create_topic()
    rpc.produce(
        topic,
        key=b"k",
        payload=b"v",
        timestamp=1_700_000_000_123,
        headers=[{"key": "a", "value": b"1"}, {"key": "null"}],
    )
    rpc.produce(topic, key=b"", payload=b"")
    rpc.produce(topic, key=b"k")
    first, second, third = client.read(topic)
    assert (first.offset, first.timestamp) == (0, 1_700_000_000_123)
    assert (first.key, first.value, first.headers) == (b"k", b"v", (("a", b"1"), ("null", None)))
    assert (second.key, second.value) == (b"", b"")
    assert (third.key, third.value) == (b"k", None)


def test_kafka_to_grpc(kept_broker, rpc, client):
    topic = kept_broker.create_topic()
    client.produce(
        topic,
        [
            OutRecord(b"k", b"v", (("a", b"1"), ("null", None)), 1_700_000_000_123),
            OutRecord(None, b"x" * 200_000),
            OutRecord(b"k", None),
        ],
    )
    first, second, third = rpc.consume(topic)
    assert (first.offset, first.key, first.payload) == (0, b"k", b"v")
    assert first.timestamp == 1_700_000_000_123
    headers = [(h.key, h.value if h.HasField("value") else None) for h in first.headers]
    assert headers == [("a", b"1"), ("null", None)]
    assert (second.HasField("key"), len(second.payload)) == (False, 200_000)
    assert (third.offset, third.key, third.HasField("payload")) == (2, b"k", False)


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_batches_are_read(kept_broker, rpc, client, codec):
    topic = kept_broker.create_topic(config={"compression.type": codec})
    values = [bytes([n]) * 100_000 for n in range(5)]
    for value in values:
        rpc.produce(topic, payload=value)
    assert [record.payload for record in rpc.consume(topic)] == values


def test_a_key_chooses_its_partition_as_in_java(kept_broker, rpc):
    topic = kept_broker.create_topic(partitions=7)
    for key in (b"", b"a", b"alice", b"\xff\0" * 9):
        assert rpc.produce(topic, key=key, payload=b"v").partition == partition_for_key(key, 7)
    without = {rpc.produce(topic, payload=b"v").partition for _ in range(7)}
    assert len(without) == 7


def test_offsets_to_begin_at(kept_broker, rpc, client):
    topic = kept_broker.create_topic()
    client.produce(topic, [OutRecord(None, b"%d" % n) for n in range(10)])
    delete_below(client, topic, 4)

    def read(**fields):
        return [int(record.payload) for record in rpc.consume(topic, **fields)]

    assert read() == read(offset=-2) == [4, 5, 6, 7, 8, 9]
    assert read(offset=7) == [7, 8, 9]
    assert read(offset=10) == read(offset=-1) == []
    code, why = rpc.refusal(CONSUME, topic=topic, offset=3)
    assert code is Code.OUT_OF_RANGE
    assert f"{topic}:0 has no offset 3" in why and "begins at 4" in why
    code, why = rpc.refusal(CONSUME, topic=topic, offset=11)
    assert code is Code.OUT_OF_RANGE and "its next one is 10" in why
    code, why = rpc.refusal(CONSUME, topic=topic, offset=-3)
    assert code is Code.INVALID_ARGUMENT and "-1 for the end" in why


def test_what_is_refused_says_what_would_be_right(kept_broker, rpc):
    topic = kept_broker.create_topic(partitions=2, config={"cleanup.policy": "compact"})
    for name, fields, status, said in (
        (PRODUCE, {"payload": b"v"}, Code.INVALID_ARGUMENT, "topic is missing"),
        (PRODUCE, {"topic": topic}, Code.INVALID_ARGUMENT, "payload is missing"),
        (PRODUCE, {"topic": topic, "payload": b"v"}, Code.INVALID_ARGUMENT, "key"),
        (PRODUCE, {"topic": "none", "payload": b"v"}, Code.NOT_FOUND, "CreateTopic makes one"),
        (PRODUCE, {"topic": topic, "key": b"k", "partition": 2}, Code.NOT_FOUND, "it has 0 to 1"),
        (PRODUCE, {"topic": topic, "key": b"k", "partition": -1}, Code.NOT_FOUND, "it has 0 to 1"),
        (PRODUCE, {"topic": topic, "key": b"k", "timestamp": -5}, Code.INVALID_ARGUMENT, "1970"),
        (CONSUME, {"topic": "none"}, Code.NOT_FOUND, "there is no topic 'none'"),
        (CONSUME, {"topic": topic, "partition": 9}, Code.NOT_FOUND, "it has 0 to 1"),
        (CONSUME, {}, Code.INVALID_ARGUMENT, "topic is missing"),
    ):
        code, why = rpc.refusal(name, **fields)
        assert (code, said in why) == (status, True), (name, fields, code, why)
    create = "broker.Broker/CreateTopic"
    for fields, status, said in (
        ({"topic": topic}, Code.ALREADY_EXISTS, topic),
        ({"topic": "a/b"}, Code.INVALID_ARGUMENT, "a/b"),
        ({"topic": "x", "partitions": -1}, Code.INVALID_ARGUMENT, "partitions is -1"),
        ({"topic": "x", "replication_factor": 3}, Code.INVALID_ARGUMENT, "3"),
        ({"topic": "x", "replication_factor": 40000}, Code.INVALID_ARGUMENT, "1 to 32767"),
        ({"topic": "x", "config": {"cleanup.polic": "compact"}}, Code.INVALID_ARGUMENT, "cleanup"),
    ):
        code, why = rpc.refusal(create, **fields)
        assert (code, said in why) == (status, True), (fields, code, why)


def test_garbage_is_no_request(kept_broker, rpc):
    for path in ("broker.Broker/Produce", "broker.Broker/Consume"):
        with pytest.raises(grpc.RpcError) as caught:
            rpc.channel.unary_unary(f"/{path}")(b"\xff\xff", timeout=20)
        assert caught.value.code() is Code.INVALID_ARGUMENT
        assert "this is no " in caught.value.details()


def test_a_record_too_large_for_the_topic_is_refused(kept_broker, rpc):
    topic = kept_broker.create_topic(config={"max.message.bytes": "2000"})
    code, why = rpc.refusal(PRODUCE, topic=topic, payload=b"x" * 3000)
    assert code is Code.INVALID_ARGUMENT and "max.message.bytes" in why


def test_a_topic_is_configured(kept_broker, rpc, client):
    topic = kept_broker.topic()
    rpc.call("broker.Broker/CreateTopic", topic=topic, config={"cleanup.policy": "compact"})
    entries = client.topic_configs([topic])[topic]
    assert {e.name: e.value for e in entries}["cleanup.policy"] == "compact"


def test_following_a_log(kept_broker, rpc, client):
    topic = kept_broker.create_topic()
    client.produce(topic, [OutRecord(None, b"before")])
    stream = rpc.consume(topic, follow=True)
    assert next(stream).payload == b"before"
    for n in range(5):
        rpc.produce(topic, payload=b"%d" % n)
        assert next(stream).payload == b"%d" % n
    stream.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is Code.CANCELLED


def test_a_deadline_ends_a_stream(kept_broker, rpc):
    topic = kept_broker.create_topic()
    stream = rpc.call(CONSUME, topic=topic, follow=True, timeout=0.3)
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is Code.DEADLINE_EXCEEDED


def test_a_followed_topic_that_is_deleted(kept_broker, rpc, client):
    topic = kept_broker.create_topic()
    rpc.produce(topic, payload=b"v")
    stream = rpc.consume(topic, follow=True)
    assert next(stream).payload == b"v"
    client.delete_topics([topic])
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is Code.NOT_FOUND


def image_of(topic_id):
    partition = PartitionRecord(topic_id, 0, (0,), (0,), 0, 0, 0)
    return Image().apply([TopicRecord("t", topic_id), partition])[0]


def test_a_topic_of_another_node_is_waited_for():
    async def wait(**settings):
        runtime, metadata = Runtime(Disk()), FixedMetadata()
        metadata.image = Image()
        made = image_of(uuid.UUID(int=1))
        runtime.loop.call_later(0.05, setattr, metadata, "image", made)
        identity, addresses = NodeIdentity(0), cast("Any", None)
        config, known = live_config(**settings), cast("Any", metadata)
        gateway = ClusterClient(
            runtime,
            config,
            identity=identity,
            metadata=known,
            addresses=addresses,
            client_id="a-test",
            connect_here=cast("Any", None),
        )
        await gateway.await_topic("t")
        return "t" in metadata.image.topics

    voters = "0@localhost:10092,1@localhost:10093"
    assert asyncio.run(wait(node_id="0", controller_quorum_voters=voters))
    assert not asyncio.run(wait()), "a lone node knows all there is"


def test_a_topic_made_anew_is_another_one():
    async def read():
        metadata: Any = FixedMetadata()
        metadata.image = image_of(uuid.UUID(int=1))
        nobody = cast("Any", None)
        client = ClusterClient(
            Runtime(Disk()),
            live_config(),
            NodeIdentity(0),
            metadata,
            addresses=nobody,
            client_id="a-test",
            connect_here=nobody,
        )
        reader = Reader(nobody, metadata, nobody, client, TopicPartition("t", 0), UNMETERED)
        await reader.seek(5)
        metadata.image = image_of(uuid.UUID(int=2))
        await reader.fetch(wait=False)

    with pytest.raises(PolicyViolation, match="created anew"):
        asyncio.run(read())


def test_a_stream_ends_at_the_high_watermark_though_records_come(kept_broker, rpc, client):
    topic = kept_broker.create_topic()
    for _ in range(12):
        client.produce(topic, [OutRecord(None, bytes(100_000)) for _ in range(5)])
    stream = rpc.consume(topic)
    next(stream)
    client.produce(topic, [OutRecord(None, b"later")])
    rest = [record.offset for record in stream]
    assert rest == list(range(1, 60))
