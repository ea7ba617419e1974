"""Clients that call themselves a replica, or meddle with a follower's session."""

from __future__ import annotations

import asyncio
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from kept.client.core.metadata import Endpoint
from kept.client.json_api import JsonApi
from kept.cluster.raft.messages import AppendEntries
from kept.node.internode.identity import Hello
from kept.node.kafka.codec.fetch import FetchRequest
from kept.node.kafka.fetch_sessions import FINAL_EPOCH, INITIAL_EPOCH, FetchSessions
from kept.testing import Cluster
from tests.node.internode.raw import send_messages
from tests.support.request_values import fetch_values, one_batch, produce_values

TOPIC_AUTHORIZATION_FAILED = 29
NOT_LEADER_OR_FOLLOWER = 6
FETCH_SESSION_ID_NOT_FOUND = 70
REQUEST_TIMED_OUT = 7
NODE_PORT_OFFSET = 1000
FORGED_EPOCHS = (-1, 0, 2**62, 2**63 - 1)


@pytest.mark.parametrize("version", [11, 12])
@pytest.mark.parametrize("replica_id", [0, 1, 2**31 - 1])
def test_a_client_is_no_replica(kept_broker, wire, version, replica_id) -> None:
    topic = kept_broker.create_topic()
    assert wire.produce(topic, one_batch(3)).base_offset == 0
    refused = wire.fetch(topic, 0, version=version, replica_id=replica_id)
    assert int(refused.error_code) == TOPIC_AUTHORIZATION_FAILED
    assert not bytes(refused.records or b"")
    assert refused.high_watermark == -1, "it is told nothing of the log"
    assert "fetch as a replica refused" in kept_broker.log()


@pytest.mark.parametrize("replica_id", [-1, -2, -3, -(2**31)])
def test_negative_replica_ids_are_consumers(kept_broker, wire, replica_id) -> None:
    topic = kept_broker.create_topic()
    wire.produce(topic, one_batch(3))
    assert bytes(wire.fetch(topic, 0, replica_id=replica_id).records)


def test_a_refused_replica_neither_opens_nor_closes_a_session(kept_broker, wire) -> None:
    topic = kept_broker.create_topic()
    values = fetch_values(topic, 0, session_epoch=INITIAL_EPOCH)
    opened = wire.ask(1, 11, **values).session_id
    assert opened > 0
    forged = {**values, "replica_id": 1, "session_id": opened}
    assert wire.ask(1, 11, **forged).session_id == 0
    answer = wire.ask(1, 11, **{**values, "session_id": opened, "session_epoch": 1, "topics": ()})
    assert int(answer.error_code) == 0, "the consumer's session goes on"


def request(replica_id: int, session_id: int, epoch: int) -> FetchRequest:
    return FetchRequest(replica_id, 0, 1, 1, 0, session_id, epoch, [], [], b"", 7)


def test_a_consumer_has_no_part_in_a_followers_session() -> None:
    sessions = FetchSessions(iter(range(1, 9)).__next__)
    _, followers = sessions.open(request(2, 0, INITIAL_EPOCH), True, 0)
    assert followers is not None
    for epoch in (1, INITIAL_EPOCH, FINAL_EPOCH):
        error, found = sessions.open(request(-1, followers.id, epoch), True, 5)
        assert found is not followers and error == (FETCH_SESSION_ID_NOT_FOUND if epoch == 1 else 0)
    assert (followers.epoch, followers.last_used_ms, followers.closed) == (1, 0, False)
    assert sessions.open(request(2, followers.id, 1), True, 6) == (0, followers)


def forged(topic_id: Any, replica: int, offset: int, epoch: int) -> dict[str, Any]:
    state = {"replica_id": replica, "replica_epoch": epoch}
    return fetch_values("", offset, topic_id=topic_id, replica_state=state)


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(3, default_replication_factor=3, min_insync_replicas=2) as cluster:
        yield cluster


def test_forged_fetches_acknowledge_nothing_and_lock_nobody_out(three, connect) -> None:
    """The leader of three replicas, whose followers are stopped, on its ports for clients and for
    nodes: acks=all waits for the real ones."""
    topic = three.create_topic()
    with three.client() as client:
        leader = client.topic(topic).partitions[0].leader
        topic_id = client.topic(topic).topic_id
    others = [node for node in range(3) if node != leader]
    outside, clients = connect(three.port(leader)), connect(three.port(leader))
    inside = connect(three.port(leader) + NODE_PORT_OFFSET)
    assert outside.produce(topic, one_batch(1), acks=-1).error_code == 0
    end = outside.end_offset(topic)
    for node in others:
        three.pause(node)
    try:
        outside.send(0, 9, **produce_values(topic, one_batch(1), acks=-1, timeout=3_000))
        for replica in others:
            for epoch in FORGED_EPOCHS:
                values = forged(topic_id, replica, end + 1, epoch)
                for asker, code in (
                    (clients, TOPIC_AUTHORIZATION_FAILED),
                    (inside, NOT_LEADER_OR_FOLLOWER),
                ):
                    found = asker.ask(1, 17, **values).responses[0].partitions[0]
                    assert int(found.error_code) == code, (replica, epoch)
        produced = outside.response(0, 9)[1].responses[0].partition_responses[0]
        assert int(produced.error_code) == REQUEST_TIMED_OUT
        assert clients.end_offset(topic) == end, "the high watermark stays"
    finally:
        for node in others:
            three.resume(node)
    # The real followers are not locked out: what is produced now is acknowledged.
    three.wait_until(
        lambda: outside.produce(topic, one_batch(1), acks=-1).error_code == 0,
        "the followers replicate again",
    )


@pytest.mark.parametrize("knows_the_cluster", [True, False])
@pytest.mark.parametrize("node_id", [9, 1])
def test_one_message_of_a_stranger_ends_nobody(three, knows_the_cluster, node_id) -> None:
    """A connection of nobody with the largest term there is; also one that knows the cluster."""
    disk = uuid.UUID(int=99)
    append = AppendEntries(
        term=2**63 - 1, sender=node_id, to=0, directory_id=disk, prev_index=0, prev_term=0
    )
    named = status(three, 0)["cluster_id"] if knows_the_cluster else ""
    hello = Hello(named, node_id, uuid.uuid4(), directory_id=disk)

    async def attack() -> list[str]:
        """Why each node refused the connection, "" where it read the messages."""
        return [
            await send_messages(
                three.port(to) + NODE_PORT_OFFSET, hello, *[replace(append, to=to)] * 3
            )
            for to in {0, 1, 2} - {node_id}
        ]

    refused = asyncio.run(attack())
    assert any(refused) or knows_the_cluster
    assert not any(refused) or (node_id, knows_the_cluster) != (9, True), "or nothing was tried"
    assert three.create_topic(), "the quorum decides"
    assert all(three.running(node) for node in range(3))
    assert max(int(metric(three, node, "kept_raft_term")) for node in range(3)) < 1000


def status(three: Cluster, node: int) -> dict[str, Any]:
    endpoint = Endpoint(three.host(node), three.port(node))
    found: dict[str, Any] = JsonApi(endpoint).get("cluster")
    return found


def metric(three: Cluster, node: int, name: str) -> float:
    with urllib.request.urlopen(f"{three.url(node)}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))
