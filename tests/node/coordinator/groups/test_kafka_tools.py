"""Apache Kafka's own tools on our groups: its decoder reads our files, its commands work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kept.node.coordinator.common.partitioner import partition_for
from kept.testing import Cluster
from tests.tools import kafka_dist

pytestmark = [pytest.mark.java, pytest.mark.slow]

GROUPS = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"


def stable_consumer(bootstrap: str, group: str, topic: str) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "group.instance.id": "one",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "client.id": "reader",
        }
    )
    consumer.subscribe([topic])
    for _ in range(400):
        if consumer.assignment():
            return consumer
        consumer.poll(0.05)
    raise AssertionError("no assignment")


def test_kafkas_decoder_reads_our_records() -> None:
    with Cluster() as cluster:
        topic = cluster.create_topic(partitions=2)
        consumer = stable_consumer(cluster.bootstrap, "readers", topic)
        where = [TopicPartition(topic, 1, 7, "a note é")]
        consumer.commit(offsets=where, asynchronous=False)
        consumer.close()
        with cluster.client() as client:
            client.delete_topics([topic])
        number = partition_for("readers", 50)
        directory = Path(cluster.log_dir()) / f"__consumer_offsets-{number}"
        cluster.stop()
        dumped = kafka_dist.dump(sorted(directory.glob("*.log")), "--offsets-decoder")
    records = re.findall(r"key: (\{.*?\}) payload: (.*)", dumped)
    decoded = [(json.loads(k), json.loads(v) if v.startswith("{") else v) for k, v in records]
    groups = [v["data"] for k, v in decoded if k["type"] == "2"]
    stable = groups[1]
    assert (stable["generation"], stable["protocolType"], stable["protocol"]) == (
        1,
        "consumer",
        "range",
    )
    (member,) = stable["members"]
    assert (member["groupInstanceId"], member["clientId"]) == ("one", "reader")
    assert member["subscription"]["topics"] == [topic]
    assert member["assignment"]["assignedPartitions"] == [{"topic": topic, "partitions": [0, 1]}]
    offset, tombstone = (v for k, v in decoded if k["type"] == "1")
    assert (offset["version"], offset["data"]["offset"]) == ("4", 7)
    assert offset["data"]["metadata"].rstrip("\0") == "a note é"
    assert tombstone == "<DELETE>"
    assert "isvalid: false" not in dumped


def test_kafka_consumer_groups_command(kept_broker: Cluster) -> None:
    topic, bootstrap = kept_broker.create_topic(partitions=2), kept_broker.bootstrap
    producer = Producer({"bootstrap.servers": bootstrap})
    for i in range(20):
        producer.produce(topic, b"x", partition=i % 2)
    producer.flush()

    def command(*args: str) -> str:
        return kafka_dist.run(GROUPS, "--bootstrap-server", bootstrap, *args)

    consumer = stable_consumer(bootstrap, topic, topic)
    consumer.commit(offsets=[TopicPartition(topic, 0, 4)], asynchronous=False)
    listed = command("--list", "--state")
    assert re.search(rf"{topic}\s+Stable", listed)
    described = command("--describe", "--group", topic)
    assert re.search(rf"{topic}\s+{topic}\s+0\s+4\s+10\s+6\s+\S+\s+/127.0.0.1\s+reader", described)
    members = command("--describe", "--group", topic, "--members", "--verbose")
    assert re.search(rf"one\s+/127.0.0.1\s+reader\s+2\s.*{topic}:0,1", members)
    reset = ("--reset-offsets", "--group", topic, "--topic", topic, "--to-latest", "--execute")
    assert "inactive" in command(*reset)
    # A static member stays when its consumer is closed; this takes it out.
    consumer.close()
    leave(kept_broker, topic)
    assert re.search(rf"{topic}\s+{topic}\s+1\s+10", command(*reset))
    deleted = command("--delete-offsets", "--group", topic, "--topic", topic)
    assert "Successful" in deleted
    assert f"'{topic}'" in command("--delete", "--group", topic)
    assert topic not in command("--list")


def leave(cluster: Cluster, group: str) -> None:
    """Take the static member out of a group."""
    from tests.support.kafka_connection import FIND, LEAVE, Connection

    connection = Connection(cluster.bootstrap)
    connection.ask(FIND, 2, key=group, key_type=0)
    members = [{"member_id": "", "group_instance_id": "one", "reason": None}]
    connection.ask(LEAVE, 5, group_id=group, members=members)
    connection.close()
