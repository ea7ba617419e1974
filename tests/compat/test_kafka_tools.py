"""Apache Kafka's own command-line tools, unchanged, against kept."""

from __future__ import annotations

import json
import re

import pytest

from tests.compat.scenario import console_round_trip
from tests.tools.kafka_dist import tool

pytestmark = [pytest.mark.java, pytest.mark.slow]


def at(broker) -> tuple[str, str]:
    return "--bootstrap-server", broker.bootstrap


def test_topics(broker):
    name = broker.name("tools")
    topics = "org.apache.kafka.tools.TopicCommand"
    created = tool(
        topics,
        *at(broker),
        "--create",
        "--topic",
        name,
        "--partitions",
        "3",
        "--replication-factor",
        "1",
        "--config",
        "cleanup.policy=compact",
    )
    assert f"Created topic {name}." in created
    assert name in tool(topics, *at(broker), "--list").splitlines()
    described = tool(topics, *at(broker), "--describe", "--topic", name)
    assert "PartitionCount: 3" in described and "cleanup.policy=compact" in described
    assert len(re.findall(r"Leader: 0\s+Replicas: 0\s+Isr: 0", described)) == 3
    tool(topics, *at(broker), "--alter", "--topic", name, "--partitions", "5")
    assert "PartitionCount: 5" in tool(topics, *at(broker), "--describe", "--topic", name)
    tool(topics, *at(broker), "--delete", "--topic", name)
    assert name not in tool(topics, *at(broker), "--list").splitlines()


def test_configs(broker):
    name = broker.name("configs")
    tool("org.apache.kafka.tools.TopicCommand", *at(broker), "--create", "--topic", name)
    configs = "kafka.admin.ConfigCommand"
    entity = ("--entity-type", "topics", "--entity-name", name)
    tool(configs, *at(broker), *entity, "--alter", "--add-config", "retention.ms=1234567")
    shown = tool(configs, *at(broker), *entity, "--describe", "--all")
    assert re.search(r"retention.ms=1234567 .*DYNAMIC_TOPIC_CONFIG", shown)
    assert re.search(r"segment.bytes=1073741824 .*DEFAULT_CONFIG", shown)
    tool(configs, *at(broker), *entity, "--alter", "--delete-config", "retention.ms")
    shown = tool(configs, *at(broker), *entity, "--describe")
    assert "retention.ms" not in shown
    brokers = tool(
        configs,
        *at(broker),
        "--entity-type",
        "brokers",
        "--entity-name",
        "0",
        "--describe",
        "--all",
    )
    assert "log.segment.bytes=" in brokers


def test_console_producer_and_consumer(broker):
    name = broker.name("console")
    tool("org.apache.kafka.tools.TopicCommand", *at(broker), "--create", "--topic", name)
    read = console_round_trip(broker.bootstrap, name, 50)
    assert read == [f"k{i}:v{i}" for i in range(50)]
    groups = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
    assert name in tool(groups, *at(broker), "--list")
    described = tool(groups, *at(broker), "--describe", "--group", name)
    assert re.search(rf"{name}\s+{name}\s+0\s+50\s+50\s+0\s", described)
    tool(
        groups,
        *at(broker),
        "--group",
        name,
        "--reset-offsets",
        "--to-offset",
        "10",
        "--topic",
        name,
        "--execute",
    )
    described = tool(groups, *at(broker), "--describe", "--group", name)
    assert re.search(rf"{name}\s+{name}\s+0\s+10\s+50\s+40\s", described)
    tool(groups, *at(broker), "--delete", "--group", name)
    assert name not in tool(groups, *at(broker), "--list")


def test_offsets_delete_records_and_log_dirs(broker, tmp_path):
    name = broker.name("offsets")
    perf = "org.apache.kafka.tools.ProducerPerformance"
    done = tool(
        perf,
        "--topic",
        name,
        "--num-records",
        "5000",
        "--record-size",
        "100",
        "--throughput",
        "-1",
        "--producer-props",
        f"bootstrap.servers={broker.bootstrap}",
        "acks=all",
        "linger.ms=5",
    )
    assert "5000 records sent" in done
    offsets = "org.apache.kafka.tools.GetOffsetShell"
    assert f"{name}:0:5000" in tool(offsets, *at(broker), "--topic", name)
    assert f"{name}:0:0" in tool(offsets, *at(broker), "--topic", name, "--time", "earliest")
    assert f"{name}:0:" in tool(offsets, *at(broker), "--topic", name, "--time", "max-timestamp")
    order = tmp_path / "delete.json"
    order.write_text(
        json.dumps({"partitions": [{"topic": name, "partition": 0, "offset": 1234}], "version": 1})
    )
    done = tool(
        "org.apache.kafka.tools.DeleteRecordsCommand", *at(broker), "--offset-json-file", str(order)
    )
    assert "low_watermark: 1234" in done
    assert f"{name}:0:1234" in tool(offsets, *at(broker), "--topic", name, "--time", "earliest")
    done = tool(
        "org.apache.kafka.tools.ConsumerPerformance",
        *at(broker),
        "--topic",
        name,
        "--num-records",
        "3766",
        "--timeout",
        "30000",
    )
    assert re.search(r"\b3766\b", done)
    dirs = tool(
        "org.apache.kafka.tools.LogDirsCommand", *at(broker), "--describe", "--topic-list", name
    )
    assert f'"partition":"{name}-0"' in dirs


def test_api_versions(broker):
    shown = tool("org.apache.kafka.tools.BrokerApiVersionsCommand", *at(broker))
    assert "Produce(0): 0 to 13" in shown
    assert "UNSUPPORTED" in shown  # transactions: not served, not advertised
