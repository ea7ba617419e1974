"""A group's coordinator is cut off, and clients still reach it: it must not tell of the past."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kio.schema.errors import ErrorCode

from tests.failover.network import ApartCluster
from tests.failover.nodes import CATCH_UP_S, Nodes
from tests.failover.test_cuts import SHORT
from tests.node.groups.wire import COMMIT, FETCH, FIND, Connection

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(600)]

GROUP = "g"
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


def coordinator(cluster: ApartCluster, asked: int) -> int:
    with connected(cluster, asked) as connection:
        answer = connection.ask(FIND, 2, key=GROUP, key_type=0)
    return int(answer.node_id)


def commit(cluster: ApartCluster, node: int, topic: str, offset: int) -> ErrorCode:
    partition = {
        "partition_index": 0, "committed_offset": offset, "committed_leader_epoch": -1,
        "committed_metadata": "",
    }  # fmt: skip
    with connected(cluster, node) as connection:
        answer = connection.ask(
            COMMIT, 7, group_id=GROUP, generation_id_or_member_epoch=-1, member_id="",
            group_instance_id=None, topics=[{"name": topic, "partitions": [partition]}],
        )  # fmt: skip
    return answer.topics[0].partitions[0].error_code


def committed(cluster: ApartCluster, node: int, topic: str) -> int | ErrorCode:
    """The offset that a node says is committed, or why it does not say."""
    topics = [{"name": topic, "partition_indexes": [0]}]
    with connected(cluster, node) as connection:
        answer = connection.ask(FETCH, 7, group_id=GROUP, topics=topics, require_stable=False)
    if answer.error_code is not ErrorCode.none:
        return answer.error_code
    return int(answer.topics[0].partitions[0].committed_offset)


def commit_somewhere(cluster: ApartCluster, nodes: list[int], topic: str, offset: int) -> int:
    """Commit through whoever coordinates; returns that node."""
    found: list[int] = []

    def done() -> bool:
        node = coordinator(cluster, nodes[0])
        if node in nodes and commit(cluster, node, topic, offset) is ErrorCode.none:
            found.append(node)
        return bool(found)

    cluster.wait_until(done, f"offset {offset} is committed", CATCH_UP_S)
    return found[0]


@pytest.fixture
def apart():
    with ApartCluster(**SHORT) as cluster:
        yield cluster


def test_a_coordinator_that_is_cut_off_answers_nothing_older(apart):
    topic = apart.create_topic(partitions=1)
    nodes = Nodes(apart)
    first = commit_somewhere(apart, [0, 1, 2], topic, 1)
    rest = [node for node in nodes.numbers if node != first]
    assert committed(apart, first, topic) == 1
    apart.cut([first], rest)
    successor = commit_somewhere(apart, rest, topic, 2)
    assert successor != first and committed(apart, successor, topic) == 2
    for _ in range(5):
        assert committed(apart, first, topic) in RETRIED
    apart.heal()
    apart.wait_until(lambda: coordinator(apart, first) == successor, "it hears of its successor")
    assert committed(apart, first, topic) is ErrorCode.not_coordinator
    assert committed(apart, successor, topic) == 2
