"""murmur2 and the partition of a key, as Java's client has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.client.partitioner import murmur2, partition_for, partition_for_key

# Apache Kafka's own vectors: clients/src/test/java/org/apache/kafka/common/utils/UtilsTest.java
VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("key", VECTORS)
def test_murmur2_is_javas(key):
    assert murmur2(key) == VECTORS[key] & 0xFFFFFFFF


def test_an_empty_key_is_a_key_and_no_key_sticks():
    assert partition_for_key(b"", 7) == (murmur2(b"") & 0x7FFFFFFF) % 7
    assert partition_for(b"", 7, sticky=3) == partition_for(b"", 7, sticky=4)
    assert partition_for(None, 7, sticky=10) == 3


@given(st.binary(max_size=40), st.integers(1, 5000), st.integers(0, 2**31 - 1))
def test_a_partition_exists_and_depends_on_the_key_alone(key, partitions, sticky):
    where = partition_for(key, partitions, sticky)
    assert 0 <= where < partitions
    assert where == partition_for_key(key, partitions)


def test_librdkafkas_murmur2_agrees(kept_broker):
    """The partitions that an ordinary client chooses are ours."""
    from confluent_kafka import Producer

    topic = kept_broker.create_topic(partitions=16)
    placed = {}
    producer = Producer(
        {"bootstrap.servers": kept_broker.bootstrap, "partitioner": "murmur2", "log_level": 3}
    )
    for n in range(200):
        key = b"k" * (n % 9) + str(n * 7919).encode()
        producer.produce(
            topic, b"", key, on_delivery=lambda e, m: placed.__setitem__(m.key(), m.partition())
        )
    assert producer.flush(30) == 0
    assert len(placed) == 200
    assert {k: partition_for_key(k, 16) for k in placed} == placed
