"""ElectLeaders, AlterPartitionReassignments, ListPartitionReassignments, against a real node.

The node is alone; brokers 1 to 3 are registered in its metadata log and nobody is there.
"""

from __future__ import annotations

from uuid import UUID

import pytest
from msgspec.structs import replace

from kept.cluster.metadata.records import BrokerChangeRecord, BrokerRecord, Endpoint
from kept.node.kafka.handlers.topics import reassignments
from kept.storage.errors import KeptError
from tests.support.decisions import propose


@pytest.fixture
def several(lone):
    """A node that takes three others for alive."""
    for broker_id in (1, 2, 3):
        endpoints = (
            Endpoint(lone.node.parts.listeners[0].name, "PLAINTEXT", "nowhere", 9000 + broker_id),
        )

        def register(image, broker_id=broker_id, endpoints=endpoints):
            return [
                BrokerRecord(
                    broker_id, image.index + 1, UUID(int=broker_id), endpoints, None, False
                )
            ]

        lone.run(propose(lone.node, register(lone.node.parts.metadata.image)))
    return lone


def create(lone, name, *assignments):
    topic = {
        "name": name,
        "num_partitions": -1,
        "replication_factor": -1,
        "assignments": [
            {"partition_index": n, "broker_ids": ids} for n, ids in enumerate(assignments)
        ],
        "configs": (),
    }
    (result,) = lone.ask(19, 7, topics=[topic], timeout=1000, validate_only=False).topics
    assert result.error_code.name == "none", result


def state(lone, name, number=0):
    return lone.node.parts.metadata.image.partition(name, number)


def change(lone, name, number=0, **fields):
    """The partition's next record, with these fields."""
    before = state(lone, name, number)
    after = replace(
        before,
        leader_epoch=before.leader_epoch + 1,
        partition_epoch=before.partition_epoch + 1,
        **fields,
    )
    lone.run(propose(lone.node, [after]))


def fence(lone, broker_id):
    epoch = lone.node.parts.metadata.image.brokers[broker_id].broker_epoch
    lone.run(propose(lone.node, [BrokerChangeRecord(broker_id, epoch, True)]))


def elect(lone, wanted, kind=0, version=2):
    more = {} if version == 0 else {"election_type": kind}
    asked = wanted and [{"topic": t, "partitions": tuple(ns)} for t, ns in wanted.items()]
    answer = lone.ask(43, version, topic_partitions=asked, timeout=1000, **more)
    results = {
        (result.topic, one.partition_id): one.error_code.name
        for result in answer.replica_election_results
        for one in result.partition_result
    }
    return answer, results


@pytest.mark.parametrize("version", range(3))
def test_the_preferred_replica_leads(several, version):
    create(several, "t", (1, 0), (0, 1), (2, 0))
    change(several, "t", 0, leader=0)
    change(several, "t", 2, leader=0, isr=(0,))
    epoch = state(several, "t").leader_epoch
    answer, results = elect(several, {"t": (0, 1, 2, 9), "nope": (0,)}, version=version)
    assert results == {
        ("t", 0): "none",
        ("t", 1): "election_not_needed",
        ("t", 2): "preferred_leader_not_available",
        ("t", 9): "unknown_topic_or_partition",
        ("nope", 0): "unknown_topic_or_partition",
    }
    assert version == 0 or answer.error_code.name == "none"
    assert (state(several, "t").leader, state(several, "t").leader_epoch) == (1, epoch + 1)
    assert state(several, "t", 2).leader == 0
    refused = answer.replica_election_results[0].partition_result[2]
    assert refused.error_message == "t:2: replica 2 is not alive and in the ISR (0,)"


def test_all_partitions_that_need_it(several):
    """Without names: those that have their preferred leader are left out."""
    create(several, "a", (1, 0), (0, 1))
    create(several, "b", (0, 1))
    create(several, "c", (2, 0))
    change(several, "a", 0, leader=0)
    change(several, "c", 0, leader=0, isr=(0,))
    _, results = elect(several, None)
    assert results == {("a", 0): "none", ("c", 0): "preferred_leader_not_available"}
    assert elect(several, None)[1] == {("c", 0): "preferred_leader_not_available"}


def test_an_unclean_leader(several, capsys):
    create(several, "t", (1, 2), (3, 0), (1, 0))
    fence(several, 3)
    change(several, "t", 0, leader=-1, isr=(1,))
    fence(several, 1)
    change(several, "t", 1, leader=-1, isr=(3,), replicas=(3,))
    _, results = elect(several, {"t": (0, 1, 2)}, kind=1)
    assert results == {
        ("t", 0): "none",
        ("t", 1): "eligible_leaders_not_available",
        ("t", 2): "election_not_needed",
    }
    found = state(several, "t")
    assert (found.leader, found.isr, found.unclean) == (2, (2,), True)
    assert state(several, "t", 1).leader == -1
    told = capsys.readouterr().err
    assert "unclean election" in told
    assert "t-0: elected 2" in told


def test_all_that_have_no_leader(several):
    create(several, "t", (1, 2), (0, 1))
    change(several, "t", 0, leader=-1)
    assert elect(several, None, kind=1)[1] == {("t", 0): "none"}
    found = state(several, "t")
    assert (found.leader, found.isr, found.unclean) == (1, (1, 2), False)


def test_an_unknown_kind_of_election(several):
    create(several, "t", (0, 1))
    answer, results = elect(several, {"t": (0,)}, kind=7)
    assert (answer.error_code.name, results) == ("invalid_request", {("t", 0): "invalid_request"})


def test_a_partition_that_is_named_twice(several):
    create(several, "t", (1, 0))
    change(several, "t", 0, leader=0)
    results = elect(several, {"t": (0, 0)})[0].replica_election_results[0].partition_result
    assert [one.error_code.name for one in results] == ["none", "election_not_needed"]


def move(lone, targets, version=1, **more):
    answer = lone.ask(
        45,
        version,
        timeout=1000,
        topics=[
            {
                "name": name,
                "partitions": [{"partition_index": n, "replicas": ids} for n, ids in several],
            }
            for name, several in targets.items()
        ],
        **more,
    )
    results = {
        (topic.name, one.partition_index): (one.error_code.name, one.error_message)
        for topic in answer.responses
        for one in topic.partitions
    }
    return answer, results


def moving(lone, topics=None):
    asked = topics and [{"name": t, "partition_indexes": tuple(ns)} for t, ns in topics.items()]
    answer = lone.ask(46, 0, timeout=1000, topics=asked)
    assert answer.error_code.name == "none"
    return {
        (t.name, p.partition_index): (p.replicas, p.adding_replicas, p.removing_replicas)
        for t in answer.topics
        for p in t.partitions
    }


@pytest.mark.parametrize("version", range(2))
def test_a_move_begins_and_is_cancelled(several, version):
    create(several, "t", (0, 1), (1, 2))
    answer, results = move(several, {"t": [(0, (2, 1)), (1, (2, 1))]}, version)
    assert (answer.error_code.name, answer.error_message) == ("none", None)
    assert results == {("t", 0): ("none", None), ("t", 1): ("none", None)}
    assert state(several, "t", 1).replicas == (2, 1)  # nothing to copy: done at once
    expected = {("t", 0): ((2, 1, 0), (2,), (0,))}
    assert moving(several) == moving(several, {"t": (0, 1, 9), "nope": (0,)}) == expected
    assert moving(several, {"t": (1,)}) == {}
    _, results = move(several, {"t": [(0, None), (1, None)]}, version)
    assert results["t", 0] == ("none", None)
    assert results["t", 1] == ("no_reassignment_in_progress", "t:1 is not being reassigned")
    assert moving(several) == {}
    assert set(state(several, "t").replicas) == {0, 1}


def test_moves_refused_each_on_its_own(several):
    create(several, "t", *[(0, 1)] * 5)
    targets = [(0, (0, 9)), (1, (2, 2)), (2, ()), (3, (2, 3)), (7, (2, 3))]
    _, results = move(several, {"t": targets, "nope": [(0, (1, 2))]})
    assert [code for code, _ in results.values()] == [
        "invalid_replica_assignment",
        "invalid_replica_assignment",
        "invalid_replica_assignment",
        "none",
        "unknown_topic_or_partition",
        "unknown_topic_or_partition",
    ]
    assert "no such broker is registered (registered: 0, 1, 2, 3)" in results["t", 0][1]
    assert moving(several).keys() == {("t", 3)}


def test_the_replication_factor_stays_where_it_must(several):
    create(several, "t", (0, 1))
    answer, results = move(several, {"t": [(0, (0,))]}, allow_replication_factor_change=False)
    assert results["t", 0][0] == "invalid_replication_factor"
    assert answer.allow_replication_factor_change is False
    assert state(several, "t").replicas == (0, 1)


def test_too_many_at_once(several, monkeypatch):
    """Nothing is done then, and every partition is told so."""
    create(several, "t", *[(0, 1)] * 3)
    monkeypatch.setattr(reassignments, "MAX_PARTITIONS_PER_REQUEST", 2)
    answer, results = move(several, {"t": [(n, (2, 3)) for n in range(3)]})
    assert answer.error_code.name == "policy_violation"
    assert {code for code, _ in results.values()} == {"policy_violation"}
    assert len(results) == 3
    assert moving(several) == {}


def test_nothing_moves_in_a_cluster_of_one(lone):
    lone.create("t")
    assert moving(lone) == {}
    assert elect(lone, {"t": (0,)})[1] == {("t", 0): "election_not_needed"}


def test_without_a_controller_nothing_is_decided(several, monkeypatch):
    create(several, "t", (0, 1))
    monkeypatch.setattr(type(several.node.parts.metadata.raft_node), "controller_ready", False)
    with pytest.raises(KeptError, match="not the active controller"):
        move(several, {"t": [(0, (2, 3))]})
