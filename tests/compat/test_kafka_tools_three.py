"""Apache Kafka's own command-line tools against three nodes, one killed and back meanwhile."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

import pytest

from kept.testing import Cluster
from tests.compat.scenario import console_round_trip, leader
from tests.tools import kafka_dist
from tests.tools.kafka_dist import tool

pytestmark = [pytest.mark.java, pytest.mark.slow, pytest.mark.timeout(600)]

TOPICS = "org.apache.kafka.tools.TopicCommand"
OFFSETS = "org.apache.kafka.tools.GetOffsetShell"
GROUPS = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
RECORDS = 6000


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(nodes=3) as cluster:
        yield cluster


def at(cluster: Cluster) -> tuple[str, str]:
    return "--bootstrap-server", cluster.bootstrap


def create(cluster: Cluster, prefix: str, partitions: int = 3) -> str:
    name = cluster.topic(prefix)
    tool(
        TOPICS,
        *at(cluster),
        "--create",
        "--topic",
        name,
        "--partitions",
        str(partitions),
        "--replication-factor",
        "3",
        "--config",
        "min.insync.replicas=2",
    )
    return name


def written(cluster: Cluster, name: str) -> int:
    found = re.findall(rf"{name}:\d+:(\d+)", tool(OFFSETS, *at(cluster), "--topic", name))
    return sum(map(int, found))


def run_over_a_kill(cluster: Cluster, victim: int, name: str, *args: str) -> str:
    """A tool's output; the node dies when it has done something, and comes back."""
    process = subprocess.Popen(
        kafka_dist.command(name, *args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        head = process.stdout.readline()
        cluster.kill(victim)
        cluster.start(victim)
        cluster.await_ready()
        output, _ = process.communicate(timeout=180)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, head + output
    return head + output


def test_the_perf_tools_lose_nothing_when_a_leader_dies(three):
    name = create(three, "perf")
    done = run_over_a_kill(
        three,
        leader(three, name),
        "org.apache.kafka.tools.ProducerPerformance",
        "--topic",
        name,
        "--num-records",
        str(RECORDS),
        "--record-size",
        "100",
        "--throughput",
        "500",
        "--reporting-interval",
        "1000",
        "--bootstrap-server",
        three.bootstrap,
        "--command-property",
        "acks=all",
        "enable.idempotence=true",
        "compression.type=lz4",
    )
    assert f"{RECORDS} records sent" in done, done
    assert not re.search(r"^org\.apache\.kafka\.common\.errors", done, re.MULTILINE), done
    assert written(three, name) == RECORDS
    read = tool(
        "org.apache.kafka.tools.ConsumerPerformance",
        *at(three),
        "--topic",
        name,
        "--num-records",
        str(RECORDS),
        "--timeout",
        "60000",
        "--group",
        name,
    )
    assert re.search(rf"\b{RECORDS}\b", read), read


def test_a_group_s_offsets_outlive_its_coordinator(three):
    name = create(three, "console")
    read = console_round_trip(three.bootstrap, name, 50)
    assert sorted(read) == sorted(f"k{i}:v{i}" for i in range(50))
    state = tool(GROUPS, *at(three), "--describe", "--group", name, "--state")
    (coordinator,) = re.findall(r"localhost:\d+\s+\((\d)\)", state)
    three.kill(int(coordinator))
    described = tool(GROUPS, *at(three), "--describe", "--group", name)
    found = re.findall(rf"{name}\s+{name}\s+\d\s+(\d+)\s+(\d+)\s+(\d+)\s", described)
    assert sum(int(committed) for committed, _, _ in found) == 50, described
    tool(
        GROUPS,
        *at(three),
        "--group",
        name,
        "--reset-offsets",
        "--to-earliest",
        "--topic",
        name,
        "--execute",
    )
    three.start(int(coordinator))
    three.await_ready()
    described = tool(GROUPS, *at(three), "--describe", "--group", name)
    found = re.findall(rf"{name}\s+{name}\s+\d\s+(\d+)\s+(\d+)\s+(\d+)\s", described)
    assert sum(int(lag) for _, _, lag in found) == 50, described
    tool(GROUPS, *at(three), "--delete", "--group", name)
    assert name not in tool(GROUPS, *at(three), "--list")


def test_replicas_are_moved_and_leaders_elected(three, tmp_path):
    name = create(three, "moved", partitions=1)
    victim = leader(three, name)
    three.kill(victim)
    three.wait_until(lambda: leader(three, name) != victim, "another leader")
    three.start(victim)
    three.await_ready()
    others = [node for node in range(3) if node != victim]
    elect = "org.apache.kafka.tools.LeaderElectionCommand"
    place = ("--topic", name, "--partition", "0")
    three.wait_until(lambda: isr(three, name) == {0, 1, 2}, "all in sync")
    tool(elect, *at(three), "--election-type", "preferred", *place)
    assert leader(three, name) == victim
    plan = tmp_path / "plan.json"
    moves = [{"topic": name, "partition": 0, "replicas": others}]
    plan.write_text(json.dumps({"version": 1, "partitions": moves}))
    reassign = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"
    started = tool(
        reassign,
        *at(three),
        "--reassignment-json-file",
        str(plan),
        "--execute",
        "--throttle",
        "50000000",
    )
    assert "Successfully started partition reassignment" in started
    three.wait_until(lambda: isr(three, name) == set(others), "moved")
    verified = tool(reassign, *at(three), "--reassignment-json-file", str(plan), "--verify")
    assert f"Reassignment of partition {name}-0 is completed." in verified
    described = tool(TOPICS, *at(three), "--describe", "--topic", name)
    assert re.search(rf"Leader: {others[0]}\s+Replicas: {others[0]},{others[1]}\s", described)


def isr(cluster: Cluster, topic: str) -> set[int]:
    with cluster.client() as client:
        return set(client.topic(topic).partitions[0].isr)


def test_the_quorum_is_described(three):
    quorum = "org.apache.kafka.tools.MetadataQuorumCommand"
    status = tool(quorum, *at(three), "describe", "--status")
    assert re.search(r"LeaderId:\s+[012]\b", status)
    assert sorted(map(int, re.findall(r'"id": (\d)', status.split("CurrentVoters")[1]))) == [
        0,
        1,
        2,
    ]
    replication = tool(quorum, *at(three), "describe", "--replication")
    assert len(re.findall(r"^[012]\s", replication, re.MULTILINE)) == 3
    assert len(re.findall(r"Leader\s*$", replication, re.MULTILINE)) == 1


def test_settings_and_records_are_changed_through_any_node(three, tmp_path):
    name = create(three, "settings")
    configs = "kafka.admin.ConfigCommand"
    for node in range(3):
        server = ("--bootstrap-server", f"localhost:{three.port(node)}")
        tool(
            configs,
            *server,
            "--entity-type",
            "topics",
            "--entity-name",
            name,
            "--alter",
            "--add-config",
            f"retention.ms={node + 1}00000000",
        )
        shown = tool(
            configs, *server, "--entity-type", "topics", "--entity-name", name, "--describe"
        )
        assert f"retention.ms={node + 1}00000000" in shown
    tool(
        "org.apache.kafka.tools.ProducerPerformance",
        "--topic",
        name,
        "--num-records",
        "900",
        "--record-size",
        "10",
        "--throughput",
        "-1",
        "--bootstrap-server",
        three.bootstrap,
    )
    order = tmp_path / "delete.json"
    wanted = [{"topic": name, "partition": number, "offset": -1} for number in range(3)]
    order.write_text(json.dumps({"version": 1, "partitions": wanted}))
    done = tool(
        "org.apache.kafka.tools.DeleteRecordsCommand", *at(three), "--offset-json-file", str(order)
    )
    marks = re.findall(r"low_watermark: (\d+)", done)
    assert sum(map(int, marks)) == 900, done
