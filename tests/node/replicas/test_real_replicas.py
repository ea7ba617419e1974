"""Real nodes: what followers do with the leader's records, seen from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kept.client.client import Client, OutRecord
from kept.storage import types
from kept.storage.checkpoints import read_offsets
from kept.storage.directory import Checkpoint
from kept.storage.disk import Disk
from kept.storage.records import headers
from kept.testing import Cluster
from tests.support.slow import rest_slow


def at(cluster, node: int) -> str:
    return f"localhost:{cluster.port(node)}"


def described(cluster, topic: str, *, ask: int = 0):
    """Partition 0 as a node tells it."""
    with Client(at(cluster, ask)) as client:
        return client.metadata([topic]).topics[topic].partitions[0]


def isr(cluster, topic: str, *, ask: int = 0) -> set[int]:
    return set(described(cluster, topic, ask=ask).isr)


def produced(
    cluster, topic: str, count: int, *, to: str = "", partition: int = 0, timeout_ms: int = 60_000
) -> int:
    """Produce with acks=all, one after another; how many were acknowledged."""
    producer = Producer(
        {
            "bootstrap.servers": to or cluster.bootstrap,
            "acks": "all",
            "linger.ms": 0,
            "message.timeout.ms": timeout_ms,
            "log_level": 0,
        }
    )
    errors: list[object] = []
    for number in range(count):
        producer.produce(
            topic, str(number), partition=partition, on_delivery=lambda e, _: errors.append(e)
        )
        producer.flush()
        if errors != [None] * (number + 1):
            break
    return errors.count(None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes; each test has topics of its own and leaves all of them running."""
    with Cluster(
        nodes=3,
        auto_create_topics_enable="false",
        log_flush_offset_checkpoint_interval_ms=200,
    ) as three:
        yield three


def recovery_points(cluster, topic: str) -> list[int]:
    """Up to where each node's log is durable, as its checkpoint says, which is seldom written: -1
    before it knows of the topic.
    """
    tp = types.TopicPartition(topic, 0)
    paths = [
        f"{cluster.log_dir(node)}/{Checkpoint.RECOVERY_POINTS.value}"
        for node in range(len(cluster))
    ]
    return [read_offsets(Disk({}), path).get(tp, -1) for path in paths]


def test_a_follower_flushes_what_flush_messages_asks_for(cluster) -> None:
    topic = cluster.create_topic(config={"flush.messages": "1", "min.insync.replicas": "3"})
    assert produced(cluster, topic, 20) == 20
    cluster.wait_until(lambda: recovery_points(cluster, topic) == [20] * 3, "20 are durable")
    # Restarted with a tail that its recovery point does not cover: it goes on, too.
    cluster.kill(1)
    cluster.start(1)
    assert produced(cluster, topic, 5) == 5
    cluster.wait_until(lambda: recovery_points(cluster, topic) == [25] * 3, "25 are durable")


@pytest.mark.slow
def test_a_follower_that_lags_leaves_the_isr_and_comes_back(kept_cluster) -> None:
    """It is registered all the time: nothing but its lag tells."""
    cluster = kept_cluster(
        nodes=3,
        broker_session_timeout_ms=200_000,
        replica_lag_time_max_ms=3000,
        replica_fetch_wait_max_ms=200,
    )
    topic = cluster.create_topic()
    leader = described(cluster, topic).leader
    lagging = (leader + 1) % 3
    assert produced(cluster, topic, 1) == 1
    cluster.pause(lagging)
    try:
        assert produced(cluster, topic, 3, to=at(cluster, leader)) == 3
        cluster.wait_until(
            lambda: isr(cluster, topic, ask=leader) == {0, 1, 2} - {lagging}, "it has left the ISR"
        )
    finally:
        cluster.resume(lagging)
    cluster.wait_until(lambda: isr(cluster, topic) == {0, 1, 2}, "back in the ISR")


@pytest.mark.slow
def test_a_new_partition_does_not_wait_behind_idle_ones(kept_cluster) -> None:
    """Their request is held by the leader for longer than a producer waits."""
    cluster = kept_cluster(
        nodes=3, replica_fetch_wait_max_ms=150_000, replica_lag_time_max_ms=300_000
    )
    all_in_sync = {"min.insync.replicas": "3"}
    idle = cluster.create_topic(partitions=3, config=all_in_sync)
    for partition in range(3):
        assert produced(cluster, idle, 1, partition=partition) == 1
    new = cluster.create_topic(partitions=3, config=all_in_sync)
    for partition in range(3):
        assert produced(cluster, new, 2, partition=partition) == 2


@pytest.mark.slow
def test_an_unclean_leader_takes_the_other_replica_back(cluster) -> None:
    """Once it has published that all it has counts, its ISR may grow again (rule 19)."""
    unclean = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
    topic = cluster.create_topic(replication_factor=2, config=unclean)
    partition = described(cluster, topic)
    first = partition.leader
    (second,) = set(partition.replicas) - {first}
    (third,) = {0, 1, 2} - {first, second}
    assert produced(cluster, topic, 3) == 3
    cluster.kill(second)
    assert produced(cluster, topic, 4, to=at(cluster, first)) == 4, "only the first has these"
    assert isr(cluster, topic, ask=first) == {first}
    cluster.kill(first)
    cluster.start(second)
    cluster.wait_until(
        lambda: described(cluster, topic, ask=third).leader == second, "an unclean leader"
    )
    assert produced(cluster, topic, 5, to=at(cluster, second)) == 5
    cluster.start(first)
    cluster.wait_until(
        lambda: isr(cluster, topic, ask=second) == {first, second}, "the old leader in the ISR"
    )
    with Client(at(cluster, second)) as client:
        client.alter_topic(topic, {"min.insync.replicas": "2"})
    assert produced(cluster, topic, 1) == 1
    assert log_bytes(cluster, first, topic) == log_bytes(cluster, second, topic)


def log_bytes(cluster, node: int, topic: str, partition: int = 0) -> bytes:
    """A replica's only segment; nothing where the log is not there now."""
    path = Path(cluster.log_dir(node), f"{topic}-{partition}", "00000000000000000000.log")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def test_topics_that_go_and_come_again_disturb_nobody(cluster) -> None:
    """An answer about a partition that was just left is no reason to begin anew with all others."""
    staying = cluster.create_topic(partitions=3)
    before = [len(cluster.log(node)) for node in range(3)]
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": 1, "log_level": 0})
    with cluster.client() as client:
        for _ in range(8):
            client.create_topic("again", partitions=3, replication_factor=3, config={})
            for number in range(600):
                producer.produce("again", bytes(5000), partition=number % 3)
            producer.poll(0.02)
            client.delete_topics(["again"])
            assert produced(cluster, staying, 3) == 3
            producer.purge()
    for node in range(3):
        said = cluster.log(node)[before[node] :]
        assert "leader does not answer" not in said
        assert "level=error" not in said


def test_a_topic_that_is_created_again_has_only_the_records_of_its_life(cluster) -> None:
    """Also on a node that was killed before the deletion: it has its namesake's logs at the start,
    and more in them than the new leaders have.
    """
    name, partitions, nodes = cluster.topic(), range(2), range(3)
    away: int | None = None

    def copies(partition: int) -> set[bytes]:
        return {log_bytes(cluster, node, name, partition) for node in nodes}

    with cluster.client() as client:
        for life in range(3):
            client.create_topic(
                name,
                partitions=len(partitions),
                replication_factor=3,
                config={"min.insync.replicas": "2"},
            )
            values = [b"%d of life %d" % (number, life) for number in range(30 - 10 * life)]
            records = [OutRecord(None, value, partition=n % 2) for n, value in enumerate(values)]
            client.produce(name, records)
            if away is not None:
                cluster.start(away)
            cluster.wait_until(
                lambda: all(len(copies(partition)) == 1 for partition in partitions),
                "all replicas are the same",
            )
            assert sorted(record.value for record in client.read(name)) == sorted(values)
            for partition in partitions:
                (copy,) = copies(partition)
                assert b"of life %d" % life in copy
                assert not any(b"of life %d" % before in copy for before in range(life))
            away = described(cluster, name).leader
            cluster.kill(away)
            client.delete_topics([name])
    cluster.start(away)
    left = {f"{name}-{partition}" for partition in partitions}
    cluster.wait_until(
        lambda: not any(left & set(os.listdir(cluster.log_dir(node))) for node in nodes),
        "no log of the name is left",
    )


def test_a_follower_that_is_below_the_log_start_begins_there(cluster) -> None:
    topic = cluster.create_topic()
    assert produced(cluster, topic, 10) == 10
    away = (described(cluster, topic).leader + 1) % 3
    cluster.kill(away)
    assert produced(cluster, topic, 10) == 10
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    start = TopicPartition(topic, 0, 15)
    assert admin.delete_records([start])[start].result(60).low_watermark == 15
    cluster.start(away)
    cluster.wait_until(lambda: isr(cluster, topic) == {0, 1, 2}, "back in the ISR")
    assert produced(cluster, topic, 1) == 1
    assert Path(cluster.log_dir(away), f"{topic}-0", f"{15:020}.log").stat().st_size > 0


@pytest.mark.parametrize("torn", rest_slow([0, 20], 1))
def test_a_follower_whose_closed_segment_was_cut_fetches_the_rest_again(cluster, torn) -> None:
    """Cut at the end of a batch, too: it has all that its leader has before it is in the ISR."""
    config = {"segment.bytes": "1024", "index.interval.bytes": "200", "min.insync.replicas": "2"}
    topic = cluster.create_topic(config=config)
    assert produced(cluster, topic, 50) == 50
    leader = described(cluster, topic).leader
    away = (leader + 1) % 3
    cluster.stop(away)
    cluster.wait_until(lambda: away not in isr(cluster, topic, ask=leader), "it has left the ISR")
    segments = sorted(Path(cluster.log_dir(away), f"{topic}-0").glob("*.log"))
    assert len(segments) > 2
    (_, first), (end, _), *more = headers(segments[1].read_bytes())
    assert more and end == first.size_bytes
    os.truncate(segments[1], end + torn)
    cluster.start(away)
    cluster.wait_until(lambda: isr(cluster, topic, ask=leader) == {0, 1, 2}, "back in the ISR")
    assert produced(cluster, topic, 1, to=at(cluster, leader)) == 1
    cluster.wait_until(
        lambda: all_log_bytes(cluster, away, topic) == all_log_bytes(cluster, leader, topic),
        "both have the same",
    )


def all_log_bytes(cluster, node: int, topic: str) -> bytes:
    paths = sorted(Path(cluster.log_dir(node), f"{topic}-0").glob("*.log"))
    return b"".join(path.read_bytes() for path in paths)
