"""Three nodes: any of them takes any request, and goes on when a leader dies."""

from __future__ import annotations

import threading
import time

import grpc
import pytest

from kept.client.admin.quotas import alter_quotas
from kept.client.core.metadata import Endpoint
from kept.client.json_api import JsonApi
from kept.testing import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Code = grpc.StatusCode
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def trio(dial):
    """One cluster for all tests, in each of which all of its nodes live at first."""
    with Cluster(3) as cluster:
        yield cluster, [dial(cluster.port(n)) for n in range(3)]


@pytest.fixture
def topic(trio):
    """The name of a topic that no other test has."""
    return trio[0].topic()


def leaders_of(cluster, node, topic):
    """The leader of each partition as a node sees it; none before it knows the topic."""
    api = JsonApi(Endpoint("127.0.0.1", cluster.port(node)))
    if topic not in {one["name"] for one in api.get("topics")["topics"]}:
        return []
    return [partition["leader"] for partition in api.get(f"topics/{topic}")["partitions"]]


def test_a_topic_of_a_moment_ago_is_known_everywhere(trio):
    _, rpcs = trio
    for n in range(30):
        rpcs[n % 3].call("broker.Broker/CreateTopic", topic=f"t{n}", partitions=1)
        assert rpcs[(n + 1) % 3].produce(f"t{n}", payload=b"v").offset == 0
        assert len(list(rpcs[(n + 2) % 3].consume(f"t{n}"))) == 1
    assert rpcs[0].refusal("broker.Broker/Consume", topic="none")[0] is Code.NOT_FOUND


def test_any_node_takes_any_request(trio, topic):
    cluster, rpcs = trio
    made = rpcs[0].call("broker.Broker/CreateTopic", topic=topic, partitions=6)
    assert (made.partitions, made.replication_factor) == (6, 3)
    assert set(leaders_of(cluster, 0, topic)) == {0, 1, 2}
    for partition in range(6):
        for n, rpc in enumerate(rpcs):
            done = rpc.produce(topic, partition=partition, payload=b"%d" % n)
            assert done.offset == n
    for rpc in rpcs:
        for partition in range(6):
            found = [record.payload for record in rpc.consume(topic, partition=partition)]
            assert found == [b"0", b"1", b"2"]
    with cluster.client() as client:
        assert sum(1 for _ in client.read(topic)) == 18
    for n, rpc in enumerate(rpcs):
        code, why = rpc.refusal("broker.Broker/CreateTopic", topic=topic)
        assert code is Code.ALREADY_EXISTS, (n, why)


def test_topics_count_for_one_quota_whichever_node_makes_them(trio):
    """At the controller, as Kafka's: not for one at each node."""
    cluster, rpcs = trio
    entity = (("client-id", "kept-grpc"),)
    with cluster.client() as client:
        client.run(alter_quotas(entity, {"controller_mutation_rate": 0.001}))
        try:
            first = rpcs[0].call("broker.Broker/CreateTopic", topic=cluster.topic(), partitions=3)
            assert first.partitions == 3, "it may be overdrawn once"
            for rpc in rpcs:
                code, why = rpc.refusal("broker.Broker/CreateTopic", topic=cluster.topic())
                assert code is Code.RESOURCE_EXHAUSTED and "quota" in why
        finally:
            client.run(alter_quotas(entity, {"controller_mutation_rate": None}))


def test_a_leader_dies(trio, topic, wait_until):
    """What was acknowledged is read; a stream through another node goes on."""
    cluster, rpcs = trio
    rpcs[0].call("broker.Broker/CreateTopic", topic=topic, partitions=1)
    wait_until(lambda: leaders_of(cluster, 2, topic), "the topic's spread")
    (leader,) = leaders_of(cluster, 0, topic)
    front = rpcs[(leader + 1) % 3]
    followed, acknowledged, failed = [], {}, []

    def follow():
        for record in front.consume(topic, follow=True, timeout=DEADLINE_S):
            followed.append((record.offset, record.payload))
            if record.payload == b"end":
                return

    following = threading.Thread(target=follow)
    following.start()

    def produce(payload):
        try:
            acknowledged[front.produce(topic, payload=payload).offset] = payload
        except grpc.RpcError as error:
            failed.append((error.code(), error.details()))
            assert error.code() is Code.UNAVAILABLE, error

    for n in range(20):
        produce(b"before-%d" % n)
    cluster.kill(leader)
    killed = time.monotonic()
    for n in range(20):
        produce(b"after-%d" % n)
    took_s = time.monotonic() - killed
    assert leaders_of(cluster, (leader + 1) % 3, topic) != [leader]
    assert len(failed) <= 1, failed  # the one under way, if there was one
    produce(b"end")
    following.join(DEADLINE_S)
    assert not following.is_alive()
    read = {record.offset: record.payload for record in front.consume(topic)}
    assert acknowledged.items() <= read.items()
    assert [offset for offset, _ in followed] == sorted(read)
    assert dict(followed) == read
    print(f"20 records after the leader's death: {took_s:.2f} s, {len(failed)} refused")
    cluster.start(leader)
    wait_until(lambda: leaders_of(cluster, leader, topic), "its return")


def test_too_few_replicas_are_told(trio, topic, wait_until):
    cluster, rpcs = trio
    rpcs[0].call("broker.Broker/CreateTopic", topic=topic, partitions=1)
    wait_until(lambda: leaders_of(cluster, 2, topic), "the topic's spread")
    (leader,) = leaders_of(cluster, 0, topic)
    rpcs[leader].produce(topic, payload=b"v")
    others = [n for n in range(3) if n != leader]
    for n in others:
        cluster.kill(n)

    def refused():
        code, why = rpcs[leader].refusal(
            "broker.Broker/Produce", topic=topic, payload=b"w", timeout=5
        )
        # The deadline is the client's too, which has no reason to give if it is first.
        return f"{topic}:0" in why if code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED) else None

    wait_until(refused, "a refusal that names the partition")
    for n in others:
        cluster.start(n)

    def again():
        try:
            return rpcs[leader].produce(topic, payload=b"x", timeout=10)
        except grpc.RpcError:
            return None

    wait_until(again, "a record that is taken again")
