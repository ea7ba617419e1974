"""``kafka-acls`` does with a node of ours what it does with Apache Kafka, and says the same."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from kept.testing import Cluster
from kept.testing.ports import free_port

AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
}
STEPS = (
    "--add --allow-principal User:ada --producer --topic orders --transactional-id bank",
    "--add --allow-principal User:bob --consumer --topic orders --group reports",
    "--add --deny-principal User:eve --deny-host 10.0.0.1 --operation Read --topic or"
    " --resource-pattern-type prefixed",
    "--add --allow-principal User:* --operation Describe --cluster",
    "--list",
    "--list --topic orders --resource-pattern-type match",
    "--list --principal User:bob",
    "--remove --force --allow-principal User:bob --consumer --topic orders --group reports",
    "--remove --force --topic orders --resource-pattern-type match",
    "--list",
)


def _played(kafka_dist: ModuleType, bootstrap: str) -> list[list[str]]:
    """The lines of each step, sorted: the order is that of a hash table."""
    return [
        sorted(
            kafka_dist.run(
                "org.apache.kafka.tools.AclCommand", "--bootstrap-server", bootstrap, *step.split()
            ).splitlines()
        )
        for step in STEPS
    ]


@pytest.mark.java
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_says_the_same(kafka_dist: ModuleType, tmp_path: Path) -> None:
    with Cluster(**AUTHORIZER) as cluster:
        ours = _played(kafka_dist, cluster.bootstrap)
    with kafka_dist.Broker(tmp_path, free_port(above=[1]), **AUTHORIZER) as broker:
        theirs = _played(kafka_dist, broker.bootstrap)
    assert ours == theirs
    assert any("DENY" in line and "User:eve" in line for line in ours[4])
    assert any("kafka-cluster" in line for line in ours[9]) and "orders" not in str(ours[9])
