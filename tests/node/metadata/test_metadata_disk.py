"""The disk under the metadata log fails: the node ends with a reason, and the others go on."""

from __future__ import annotations

import pytest

from kept.client.admin import cluster as operations
from kept.client.client import OutRecord
from kept.storage.errors import KeptError
from kept.testing import Cluster

CREATIONS = 200


def controller(cluster: Cluster) -> int:
    with cluster.client() as client:
        return client.run(operations.describe_cluster()).controller_id


def lead(cluster: Cluster, wanted: int) -> None:
    """Stop whoever leads until it is ``wanted``."""
    while (leader := controller(cluster)) != wanted:
        cluster.stop(leader)
        cluster.start(leader)


@pytest.mark.parametrize("fault", ["enospc", "eio"])
@pytest.mark.parametrize("leads", [False, True], ids=["voter", "controller"])
@pytest.mark.slow
def test_a_node_whose_metadata_disk_fails_ends_and_the_others_go_on(fault, leads):
    with Cluster(nodes=3) as cluster:
        topic = cluster.create_topic(partitions=3)
        sick = 1
        cluster.stop(sick)
        cluster.start(sick, fail_point=f"metadata.append={fault}:70")
        if leads:
            lead(cluster, sick)
        created = []
        with cluster.client() as client:
            for number in range(CREATIONS):
                try:
                    client.create_topic(f"t{number}", partitions=1)
                except KeptError:
                    continue  # it was asked of the one that died; nobody says what became of it
                created.append(f"t{number}")
                client.produce(topic, [OutRecord(key=b"k", value=b"v")])
                if not cluster.running(sick):
                    break
            assert cluster.wait(sick) == 1
            assert "node stops reason=" in cluster.log(sick).replace("event=", "").replace('"', "")
            last = cluster.log(sick).splitlines()[-1]
            assert last.startswith("kept: the metadata log failed: metadata.append"), last
            assert "Traceback" not in cluster.log(sick)
            cluster.start(sick)
            cluster.await_ready()
            with pytest.raises(KeptError, match="exists"):
                client.create_topic(created[-1], partitions=1)
            described = client.run(operations.describe_cluster())
            assert described.quorum is not None and described.quorum.lag(sick) is not None
