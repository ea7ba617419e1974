"""What is in a log directory and no topic's: left alone, and never taken for a topic's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kept.client.client import OutRecord
from kept.testing import Cluster
from kept.testing.cluster import NodeFailed


def log_dir(cluster: Cluster) -> Path:
    return Path(cluster.data_dir(0)) / "log"


def test_a_directory_that_is_no_log_stops_no_start() -> None:
    with Cluster() as cluster:
        with cluster.client() as client:
            client.create_topic("t", partitions=1)
        cluster.stop(0)
        ghost = log_dir(cluster) / "ghost-0"
        ghost.mkdir()
        (ghost / "mine.txt").write_text("mine")
        cluster.start(0)
        with cluster.client() as client:
            assert list(client.metadata().topics) == ["t"]
        assert (ghost / "mine.txt").read_text() == "mine"
        assert "left alone" in cluster.log(0)


def test_a_topic_created_again_is_not_cut_where_its_namesake_began() -> None:
    settings = {"log.flush.start.offset.checkpoint.interval.ms": "50"}
    with Cluster(**settings) as cluster:
        with cluster.client() as client:
            client.create_topic("t", partitions=1)
            client.produce("t", [OutRecord(b"k", b"%d" % i) for i in range(600)])
            client.request(
                21,
                {
                    "topics": [
                        {"name": "t", "partitions": [{"partition_index": 0, "offset": 500}]}
                    ],
                    "timeout": 5000,
                },
            )
            checkpoint = log_dir(cluster) / "log-start-offset-checkpoint"
            cluster.wait_until(
                lambda: checkpoint.exists() and "t 0 500" in checkpoint.read_text(),
                "the log start on disk",
            )
            client.delete_topics(["t"])
            client.create_topic("t", partitions=1)
            client.produce("t", [OutRecord(b"k", b"again %d" % i) for i in range(10)])
        cluster.kill(0)
        cluster.start(0)
        with cluster.client() as client:
            assert client.bounds("t")[0] == (0, 10)


@pytest.mark.slow
def test_a_log_directory_that_is_not_there_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    here, there, meta = tmp_path / "here", tmp_path / "there", tmp_path / "meta"
    settings = {"log.dirs": f"{here},{there}", "metadata.log.dir": str(meta)}
    with Cluster(**settings) as cluster:
        with cluster.client() as client:
            client.create_topic("t", partitions=2)
            client.produce("t", [OutRecord(b"k%d" % i, b"v") for i in range(50)])
            before = client.bounds("t")
        cluster.stop(0)
        there.rename(tmp_path / "unmounted")
        for missing in (lambda: None, there.mkdir):
            missing()
            with pytest.raises(NodeFailed, match=rf"last seen at {there}.*log-directories"):
                cluster.start(0)
        there.rmdir()
        (tmp_path / "unmounted").rename(there)
        cluster.start(0)
        with cluster.client() as client:
            assert client.bounds("t") == before
