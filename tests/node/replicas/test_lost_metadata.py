"""The end of the metadata log is lost, and with it what the logs of partitions know already."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kept.client.client import Client, OutRecord
from kept.cluster.metadata.replica_history import FILE
from kept.cluster.metadata.wal import WAL_NAME
from kept.storage.errors import DamagedData
from kept.storage.records import CheckRules, build_batch, check
from kept.storage.types import TopicPartition
from kept.testing import Cluster
from kept.testing.cluster import NodeFailed

TP = TopicPartition("t", 0)
GO_ON_WITHOUT = "replica-history to go on without those entries"


def append(lone) -> None:
    lone.run(lone.node.parts.replicas.roles.await_elections())
    partition = lone.node.parts.table.partition(TP)
    partition.append(check(build_batch([(1000, b"k", b"v", ())]), CheckRules(), 1000), 1000)
    partition.write()


def test_a_lone_node_goes_on_without_them_and_leads_in_a_later_epoch_than_its_logs(
    lone_node, tmp_path, capfd
) -> None:
    """As docs/operations.md says. Each start gives the logs a later leader epoch."""
    settings = {"log_dirs": str(tmp_path / "log"), "metadata_log_dir": str(tmp_path / "meta")}
    wal = tmp_path / "meta" / WAL_NAME
    lone = lone_node(**settings)
    lone.create("t")
    append(lone)
    lone.stop()
    before = wal.read_bytes()
    for _ in range(2):
        lone = lone_node(**settings)
        append(lone)
        lone.stop()
    last_epoch = lone.node.parts.table.partition(TP).leader_epoch
    wal.write_bytes(before)
    with pytest.raises(DamagedData, match=GO_ON_WITHOUT):
        lone_node(**settings)

    (tmp_path / "meta" / FILE).unlink()
    capfd.readouterr()
    lone = lone_node(**settings)
    partition = lone.node.parts.table.partition(TP)

    async def led() -> None:
        async with asyncio.timeout(60):
            while not partition.is_leader:
                await asyncio.sleep(0.001)

    lone.run(led())
    assert partition.leader_epoch == last_epoch + 1
    assert f"last_epoch={last_epoch}" in capfd.readouterr().err
    append(lone)
    assert partition.high_watermark == partition.log_end_offset == 4
    lone.stop()
    again = lone_node(**settings)
    append(again)
    assert again.node.parts.table.partition(TP).high_watermark == 5


# Three nodes.


def meta(cluster: Cluster, node: int) -> Path:
    return Path(cluster.data_dir(node), "meta")


def put(client: Client, topic: str, value: bytes) -> None:
    client.produce(topic, [OutRecord(key=b"k", value=value)])


def values(client: Client, topic: str) -> list[bytes | None]:
    return [record.value for record in client.read(topic)]


def until_in_sync(cluster: Cluster, client: Client, topic: str) -> None:
    def in_sync() -> bool:
        (partition,) = client.metadata([topic]).topics[topic].partitions.values()
        return len(partition.isr) == 3 and partition.leader >= 0

    cluster.wait_until(in_sync, f"{topic} has three replicas in sync", 60)


def start(cluster: Cluster, nodes: Sequence[int]) -> None:
    for node in nodes:
        cluster.start(node, wait=False)
    cluster.await_ready()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_nodes_go_on_without_them_and_lead_in_later_epochs() -> None:
    """All three files were put back to what they were."""
    with Cluster(nodes=3) as cluster, cluster.client() as client:
        topic = cluster.create_topic()
        put(client, topic, b"before")
        nodes = range(3)
        for node in nodes:
            cluster.kill(node)
        before = [(meta(cluster, node) / WAL_NAME).read_bytes() for node in nodes]
        start(cluster, nodes)
        for _ in range(4):  # leader epochs that those files know nothing of
            until_in_sync(cluster, client, topic)
            leader = client.metadata([topic]).topics[topic].partitions[0].leader
            cluster.stop(leader)
            cluster.start(leader)
        for node in nodes:  # each has noted what it knows, as it does when it stops
            until_in_sync(cluster, client, topic)
            cluster.stop(node)
            cluster.start(node)
        until_in_sync(cluster, client, topic)
        put(client, topic, b"unknown")
        for node in nodes:
            cluster.kill(node)
        for node in nodes:
            (meta(cluster, node) / WAL_NAME).write_bytes(before[node])
            with pytest.raises(NodeFailed, match=GO_ON_WITHOUT):
                cluster.start(node)
            (meta(cluster, node) / FILE).unlink()
        start(cluster, nodes)
        until_in_sync(cluster, client, topic)
        assert any("later leader epoch than the metadata" in cluster.log(node) for node in nodes)
        put(client, topic, b"after")
        assert values(client, topic) == [b"before", b"unknown", b"after"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_of_three_whose_leader_knows_better_follows_the_others() -> None:
    """To go on without what it has acknowledged is refused: it is emptied instead."""
    with Cluster(nodes=3) as cluster, cluster.client() as client:
        topic = cluster.create_topic()
        put(client, topic, b"before")
        cluster.stop(2)
        before = (meta(cluster, 2) / WAL_NAME).read_bytes()
        cluster.start(2)
        until_in_sync(cluster, client, topic)
        put(client, topic, b"unknown")
        cluster.stop(2)
        (meta(cluster, 2) / WAL_NAME).write_bytes(before)
        with pytest.raises(NodeFailed, match=GO_ON_WITHOUT):
            cluster.start(2)
        (meta(cluster, 2) / FILE).unlink()
        with pytest.raises(NodeFailed, match="has acknowledged entry"):
            cluster.start(2)
        shutil.rmtree(meta(cluster, 2))
        cluster.start(2)
        until_in_sync(cluster, client, topic)
        put(client, topic, b"after")
        assert values(client, topic) == [b"before", b"unknown", b"after"]
