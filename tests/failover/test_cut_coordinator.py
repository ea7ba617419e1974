"""A group's coordinator is cut off, and clients still reach it: it must not tell of the past."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kio.schema.errors import ErrorCode

from tests.failover.network import SHORT, ApartCluster
from tests.failover.nodes import CATCH_UP_S, Nodes
from tests.support.kafka_connection import COMMIT, FETCH, FIND, Connection

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(600)]

RETRIED = (
    ErrorCode.not_coordinator,
    ErrorCode.coordinator_not_available,
    ErrorCode.coordinator_load_in_progress,
)


@contextmanager
def connected(cluster: ApartCluster, node: int) -> Iterator[Connection]:
    connection = Connection(f"{cluster.host(node)}:{cluster.port(node)}")
    try:
        yield connection
    finally:
        connection.close()


def coordinator(cluster: ApartCluster, group: str, asked: int) -> int:
    with connected(cluster, asked) as connection:
        answer = connection.ask(FIND, 2, key=group, key_type=0)
    return int(answer.node_id)


def commit(cluster: ApartCluster, group: str, node: int, topic: str, offset: int) -> ErrorCode:
    partition = {
        "partition_index": 0,
        "committed_offset": offset,
        "committed_leader_epoch": -1,
        "committed_metadata": "",
    }
    with connected(cluster, node) as connection:
        answer = connection.ask(
            COMMIT,
            7,
            group_id=group,
            generation_id_or_member_epoch=-1,
            member_id="",
            group_instance_id=None,
            topics=[{"name": topic, "partitions": [partition]}],
        )
    return answer.topics[0].partitions[0].error_code


def committed(cluster: ApartCluster, group: str, node: int, topic: str) -> int | ErrorCode:
    """The offset that a node says is committed, or why it does not say."""
    topics = [{"name": topic, "partition_indexes": [0]}]
    with connected(cluster, node) as connection:
        answer = connection.ask(FETCH, 7, group_id=group, topics=topics, require_stable=False)
    if answer.error_code is not ErrorCode.none:
        return answer.error_code
    return int(answer.topics[0].partitions[0].committed_offset)


def commit_somewhere(
    cluster: ApartCluster, group: str, nodes: list[int], topic: str, offset: int
) -> int:
    """Commit through whoever coordinates; returns that node."""
    found: list[int] = []

    def done() -> bool:
        node = coordinator(cluster, group, nodes[0])
        if node in nodes and commit(cluster, group, node, topic, offset) is ErrorCode.none:
            found.append(node)
        return bool(found)

    cluster.wait_until(done, f"offset {offset} is committed", CATCH_UP_S)
    return found[0]


@pytest.fixture
def apart():
    with ApartCluster(**SHORT) as cluster:
        yield cluster


@pytest.mark.parametrize("is_controller", [True, False])
def test_a_coordinator_that_is_cut_off_answers_nothing_older(apart, is_controller):
    """One that is the active controller as well has answered its own heartbeats to the last."""
    topic = apart.create_topic(partitions=1)
    nodes = Nodes(apart)
    commit_somewhere(apart, "warm", nodes.numbers, topic, 1)
    controller = nodes.controller()
    group = next(
        group
        for group in (f"g{number}" for number in range(1000))
        if (coordinator(apart, group, 0) == controller) is is_controller
    )
    first = commit_somewhere(apart, group, nodes.numbers, topic, 1)
    rest = [node for node in nodes.numbers if node != first]
    assert committed(apart, group, first, topic) == 1
    apart.cut([first], rest)
    successor = commit_somewhere(apart, group, rest, topic, 2)
    assert successor != first
    for _ in range(5):
        assert committed(apart, group, first, topic) in RETRIED
    assert committed(apart, group, successor, topic) == 2
    apart.heal()
    apart.wait_until(
        lambda: coordinator(apart, group, first) == successor, "it hears of its successor"
    )
    assert committed(apart, group, first, topic) is ErrorCode.not_coordinator
    assert committed(apart, group, successor, topic) == 2
