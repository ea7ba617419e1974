"""Long lines, a clock that jumps, an fsync that hangs or lied, nodes that wake up late, and topics
that are made and deleted while nodes are killed, under the checked load of ``tests/failover``.
"""

from __future__ import annotations

import os
import random
import socket
import time

import pytest

from kept.client.client import OutRecord
from kept.client.protocol import messages as protocol
from kept.storage.records import build_batch
from tests.extremes.links import FarCluster
from tests.failover.load import PARTITIONS, Load, Reader, check, under_load
from tests.failover.nodes import Nodes
from tests.support.request_values import produce_values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SOON = {
    "broker_session_timeout_ms": 4000,
    "broker_heartbeat_interval_ms": 500,
    "kept_stall_ms": 2000,
    "replica_lag_time_max_ms": 3000,
    "replica_fetch_wait_max_ms": 200,
}
YEAR_S = 365 * 86_400
CLOCK = os.path.join(os.path.dirname(os.path.dirname(__file__)), "chaos", "clock")
NOT_LEADER = 6


@pytest.mark.parametrize(("delay_s", "jitter_s"), [(0.05, 0.05), (0.2, 0.2), (0.9, 0.0)])
def test_long_lines_depose_nobody(delay_s, jitter_s):
    with FarCluster() as cluster:
        nodes = Nodes(cluster)
        topic = cluster.create_topic(partitions=PARTITIONS)
        controller, before = nodes.controller(), nodes.fences()

        def events(load):
            cluster.lines.delay_s, cluster.lines.jitter_s = delay_s, jitter_s
            for _ in range(3):
                load.goes_on(cluster)

        under_load(cluster, topic, events)
        assert nodes.controller() == controller
        assert nodes.fences() == before
        nodes.check_replicas(topic, PARTITIONS)


def test_a_clock_that_jumps_deposes_nobody_and_loses_nothing(kept_cluster):
    """Wall clocks of all nodes, or of one; what is measured goes by another clock."""
    cluster = kept_cluster(
        nodes=3,
        environ={"PYTHONPATH": CLOCK, "KEPT_TEST_CLOCK": "clock"},
        log_retention_check_interval_ms=500,
        log_message_timestamp_after_max_ms=2**63 - 1,
    )
    nodes = Nodes(cluster)
    topic = cluster.create_topic(partitions=PARTITIONS, config={"retention.ms": "-1"})
    leaders = [nodes.leader(topic, number) for number in range(PARTITIONS)]
    controller = nodes.controller()

    def jump(seconds, *chosen):
        for node in chosen:
            path = os.path.join(cluster.data_dir(node), os.pardir, "clock")
            with open(path + ".new", "w", encoding="ascii") as file:
                file.write(str(seconds))
            os.rename(path + ".new", path)

    def events(load):
        for seconds in (3600, -3600, 10 * YEAR_S, -10 * YEAR_S, 0):
            for chosen in ((1,), (0, 1, 2)):
                jump(seconds, *chosen)
                until = time.monotonic() + 2  # the clock is looked at once a second
                while time.monotonic() < until:
                    load.goes_on(cluster)

    under_load(cluster, topic, events)
    assert nodes.fences() == []
    assert nodes.controller() == controller
    assert [nodes.leader(topic, number) for number in range(PARTITIONS)] == leaders
    nodes.check_replicas(topic, PARTITIONS)


def produce_frame(topic: str, partition: int, value: bytes, correlation_id: int) -> bytes:
    """A Produce with acks=all."""
    batch = build_batch([(int(time.time() * 1000), None, value, ())])
    values = produce_values(topic, batch, partition=partition, acks=-1, timeout=30_000)
    return protocol.encode_request(0, 9, correlation_id, "pinned", values)


def test_a_leader_that_wakes_up_late_acknowledges_nothing(kept_cluster):
    """Requests lie in its sockets while it stands still for longer than its session, and than
    replica.lag.time.max.ms. It reads them before it can have heard of its successor.
    """
    cluster = kept_cluster(nodes=3, **SOON)
    nodes = Nodes(cluster)
    topic = cluster.create_topic(partitions=PARTITIONS)

    def events(load):
        leader = nodes.leader(topic)
        with socket.create_connection((cluster.host(leader), cluster.port(leader))) as pinned:
            pinned.settimeout(60)
            with nodes.stalled(leader):
                for number in range(20):
                    pinned.sendall(produce_frame(topic, 0, b"%d" % -number, number))
                nodes.elsewhere(topic, PARTITIONS, leader)
                load.goes_on(cluster)
            for _ in range(20):
                size = int.from_bytes(pinned.recv(4, socket.MSG_WAITALL), "big")
                answer = protocol.decode_response(0, 9, pinned.recv(size, socket.MSG_WAITALL))[1]
                found = answer.responses[0].partition_responses[0]
                assert found.error_code == NOT_LEADER
        nodes.await_isr(topic)

    under_load(cluster, topic, events)
    nodes.check_replicas(topic, PARTITIONS)
    assert nodes.false_fences() == []


@pytest.mark.parametrize("which", ["leader", "other"])
def test_an_fsync_that_hangs(kept_cluster, which):
    """With flush.messages=1 each acknowledgement of a leader waits for its disk; nobody else does,
    and the node goes on answering.
    """
    cluster = kept_cluster(nodes=3, **SOON)
    nodes = Nodes(cluster)
    topic = cluster.create_topic(partitions=PARTITIONS, config={"flush.messages": "1"})
    for node in nodes.numbers:  # one after the other, each with a disk that can hang
        nodes.stop(node)
        hang = os.path.join(cluster.directory, f"hang-{node}")
        cluster.start(node, fail_point=f"flush.synced=slow:8000@{hang}")
        nodes.back(node)
        nodes.await_isr(topic)

    load, reader = Load(cluster.bootstrap, topic), Reader(cluster.bootstrap, topic)
    try:
        load.goes_on(cluster)
        leader = nodes.leader(topic)
        chosen = leader if which == "leader" else (leader + 1) % 3
        hang = os.path.join(cluster.directory, f"hang-{chosen}")
        with open(hang, "w", encoding="ascii"):
            pass
        load.goes_quiet(1.0)
        assert nodes.ask(chosen, "cluster")["node_id"] == chosen, "its loop does not hang"
        os.unlink(hang)
        load.goes_on(cluster)
        load.stop()
        reader.until(load.sent)
    finally:
        load.stop()
        reader.stop()
    check(cluster, load, reader)
    nodes.check_replicas(topic, PARTITIONS)
    assert nodes.false_fences() == []


def test_a_name_that_is_used_again_while_nodes_are_killed(kept_cluster):
    """Each topic has what was written to it, and nothing of those that had its name before."""
    cluster = kept_cluster(nodes=3)
    nodes, draw = Nodes(cluster), random.Random(18)
    topic = cluster.create_topic(partitions=PARTITIONS)
    rounds = 6

    def events(load):
        for number in range(rounds):
            with cluster.client() as client:
                client.create_topic("again", partitions=PARTITIONS, replication_factor=3)
                for partition in range(PARTITIONS):
                    record = OutRecord(None, b"%d-%d" % (number, partition), partition=partition)
                    client.produce("again", [record] * (number + 1))
            victim = draw.choice([nodes.leader("again"), nodes.controller()])
            nodes.kill(victim)
            load.goes_on(cluster)
            with cluster.client() as client:
                parts = range(PARTITIONS)
                read = {p: [r.value for r in client.read("again", [p])] for p in parts}
                assert read == {p: [b"%d-%d" % (number, p)] * (number + 1) for p in parts}
                if number < rounds - 1:
                    client.delete_topics(["again"])
            if draw.random() < 0.5:
                load.goes_on(cluster)
            nodes.start(victim)
        nodes.await_isr("again")

    under_load(cluster, topic, events)
    nodes.check_replicas("again", PARTITIONS)
    assert nodes.false_fences() == []
    for node in nodes.numbers:
        assert nodes.ask(node, "cluster")["stray_logs"] == []
        logs = [name for name in os.listdir(cluster.log_dir(node)) if name.startswith("again")]
        assert len([name for name in logs if "-delete" not in name]) == PARTITIONS


def test_an_fsync_that_lied(kept_cluster):
    """What a disk had promised is gone after a power cut of its machine: half of each log. Whoever
    lost it neither leads nor takes what it lacks for acknowledged, also when all go down at once.
    """
    cluster = kept_cluster(nodes=3)
    nodes = Nodes(cluster)
    topic = cluster.create_topic(partitions=PARTITIONS, config={"flush.messages": "1"})

    def forget(node):
        for partition in range(PARTITIONS):
            newest = nodes.segments(node, topic, partition)[-1]
            os.truncate(newest, os.path.getsize(newest) // 2)

    def events(load):
        for victim in (nodes.leader(topic), (nodes.leader(topic) + 1) % 3):
            nodes.kill(victim)
            forget(victim)
            load.goes_on(cluster)
            nodes.start(victim)
            nodes.await_isr(topic)
        victim = nodes.leader(topic)
        nodes.kill(*nodes.numbers)
        forget(victim)
        nodes.start(*nodes.numbers)
        load.goes_on(cluster)
        nodes.await_isr(topic)

    under_load(cluster, topic, events)
    nodes.check_replicas(topic, PARTITIONS)
