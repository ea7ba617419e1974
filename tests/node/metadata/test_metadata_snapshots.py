"""The metadata log is cut by snapshots, and a node that was away for longer gets one."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from kept.client.client import OutRecord
from kept.testing import Cluster

LIMIT = "metadata.log.max.record.bytes.between.snapshots"
TOPICS = 40


def meta(cluster: Cluster, node: int) -> Path:
    return Path(cluster.data_dir(node)) / "meta"


def hosted(cluster: Cluster, node: int) -> set[str]:
    return {path.name for path in Path(cluster.log_dir(node)).glob("*-0")}


@pytest.mark.slow
def test_a_node_that_was_away_for_long_gets_a_snapshot():
    with Cluster(nodes=3, **{LIMIT: 3000}) as cluster:
        first = cluster.create_topic("first")
        gone = cluster.create_topic("gone")
        cluster.stop(2)
        with cluster.client() as client:
            client.delete_topics([gone])
            made = [f"t{number}" for number in range(TOPICS)]
            for name in made:
                client.create_topic(name, partitions=1)
            client.produce(first, [OutRecord(key=b"k", value=b"v")])
        for node in (0, 1):
            assert list(meta(cluster, node).glob("snapshot-*"))
            assert (meta(cluster, node) / "metadata.wal").stat().st_size < 60_000
        assert not list(meta(cluster, 2).glob("snapshot-*"))
        cluster.start(2)
        cluster.await_ready()
        assert list(meta(cluster, 2).glob("snapshot-*")), "not entry by entry"
        wanted = {f"{name}-0" for name in (first, *made)}
        cluster.wait_until(lambda: hosted(cluster, 2) == wanted, "it holds what it should")
        with cluster.client() as client:
            cluster.wait_until(
                lambda: all(
                    2 in topic.partitions[0].isr for topic in client.metadata().topics.values()
                ),
                "it is in sync",
            )
        for node in range(3):
            cluster.kill(node)
        for node in range(3):
            cluster.start(node, wait=False)
        cluster.await_ready()
        with urllib.request.urlopen(f"{cluster.url(2)}/api/v1/cluster") as answer:
            assert json.load(answer)["topics"] == TOPICS + 1
        assert "Traceback" not in "".join(cluster.log(node) for node in range(3))
