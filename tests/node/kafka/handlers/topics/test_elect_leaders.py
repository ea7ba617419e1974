"""ElectLeaders over Kafka's protocol while a replica's node is dead: refused, and said why."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from kio.schema.errors import ErrorCode

from kept.client.client import OutRecord
from kept.testing import Cluster
from tests.support.kafka_connection import Connection

ELECT = 43
PREFERRED, UNCLEAN = 0, 1
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def three():
    with Cluster(nodes=3) as cluster:
        yield cluster


def elect(cluster: Cluster, kind: int, topic: str) -> tuple[ErrorCode, str | None]:
    connection = Connection(cluster.bootstrap.split(",")[1])
    try:
        answer = connection.ask(
            ELECT,
            2,
            election_type=kind,
            timeout=20_000,
            topic_partitions=[{"topic": topic, "partitions": [0]}],
        )
    finally:
        connection.close()
    assert answer.error_code is ErrorCode.none
    (result,) = answer.replica_election_results[0].partition_result
    return result.error_code, result.error_message


def leader(cluster: Cluster, topic: str) -> int | None:
    with cluster.client() as client:
        return client.metadata([topic]).topics[topic].partitions[0].leader


def test_a_dead_replica_is_not_elected(three):
    admin = AdminClient({"bootstrap.servers": three.bootstrap, "log_level": 0})
    for name, replicas in (("t", [0, 1, 2]), ("alone", [0])):
        (made,) = admin.create_topics([NewTopic(name, 1, replica_assignment=[replicas])]).values()
        made.result()
    three.wait_until(lambda: leader(three, "t") == leader(three, "alone") == 0, "node 0 leads")
    with three.client() as client:
        client.produce("t", [OutRecord(key=b"k", value=b"1")])
    assert elect(three, PREFERRED, "t")[0] is ErrorCode.election_not_needed
    three.kill(0)
    three.wait_until(lambda: leader(three, "t") in (1, 2), "another one leads")
    code, why = elect(three, PREFERRED, "t")
    assert code is ErrorCode.preferred_leader_not_available
    assert "replica 0 is not alive and in the ISR" in why
    assert elect(three, UNCLEAN, "t")[0] is ErrorCode.election_not_needed, "it has a leader"
    code, why = elect(three, UNCLEAN, "alone")
    assert code is ErrorCode.eligible_leaders_not_available
    assert "none of the replicas (0,) is alive" in why
    assert leader(three, "t") in (1, 2)
    three.start(0)
    done = (ErrorCode.none, ErrorCode.election_not_needed)
    three.wait_until(lambda: elect(three, PREFERRED, "t")[0] in done, "it is back in the ISR")
    # Whichever node is asked hears of it a moment later.
    three.wait_until(lambda: leader(three, "t") == leader(three, "alone") == 0, "node 0 leads")
