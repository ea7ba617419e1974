"""DescribeCluster, DescribeTopicPartitions, UnregisterBroker."""

from uuid import UUID

import pytest

from kept.cluster.metadata.records import BrokerChangeRecord, BrokerRecord, Endpoint
from tests.support.decisions import propose


def cluster(lone, version=2, **more):
    return lone.ask(60, version, include_cluster_authorized_operations=False, **more)


@pytest.mark.parametrize("version", range(3))
def test_describe_cluster(lone, version):
    answer = cluster(lone, version)
    assert answer.error_code.name == "none"
    assert answer.cluster_id == lone.node.parts.identity.cluster_id
    assert answer.controller_id == 0
    (broker,) = answer.brokers
    assert (broker.broker_id, broker.host, broker.port) == (0, "localhost", lone.port)
    assert answer.cluster_authorized_operations == -(2**31)


def test_brokers_as_seen_on_the_listener_asked(lone_node):
    lone = lone_node(
        listeners="PLAINTEXT://127.0.0.1:0,OUTSIDE://127.0.0.1:0",
        advertised_listeners="OUTSIDE://kept.example.org:19092",
        listener_security_protocol_map="OUTSIDE:PLAINTEXT",
        broker_rack="r1",
    )
    (broker,) = cluster(lone).brokers
    assert (broker.host, broker.port, broker.rack) == ("127.0.0.1", lone.port, "r1")
    (broker,) = cluster(lone, listener="OUTSIDE").brokers
    assert (broker.host, broker.port) == ("kept.example.org", 19092)


def test_operations_when_asked(lone):
    answer = lone.ask(60, 2, include_cluster_authorized_operations=True)
    assert answer.cluster_authorized_operations == 8096


@pytest.mark.parametrize(
    ("endpoint_type", "code"), [(2, "mismatched_endpoint_type"), (3, "unsupported_endpoint_type")]
)
def test_controllers_are_not_here(lone, endpoint_type, code):
    answer = cluster(lone, endpoint_type=endpoint_type)
    assert answer.error_code.name == code
    assert (answer.cluster_id, answer.brokers) == ("", ())


def pages(lone, names, limit=2000, cursor=None):
    answer = lone.ask(
        75,
        0,
        topics=[{"name": name} for name in names],
        response_partition_limit=limit,
        cursor=cursor and {"topic_name": cursor[0], "partition_index": cursor[1]},
    )
    found = [
        (t.name, t.error_code.name, [p.partition_index for p in t.partitions])
        for t in answer.topics
    ]
    following = answer.next_cursor
    return found, following and (following.topic_name, following.partition_index)


@pytest.fixture
def topics(lone):
    lone.create("comp")
    lone.create("plain", 3)
    return lone


def test_topics_by_name_in_order(topics):
    assert pages(topics, ["plain", "nope", "comp"]) == (
        [
            ("comp", "none", [0]),
            ("nope", "unknown_topic_or_partition", []),
            ("plain", "none", [0, 1, 2]),
        ],
        None,
    )


def test_names_that_no_topic_can_have_and_topics_that_are_yet_to_be(lone):
    names = [{"name": name} for name in ("a b", "__consumer_offsets")]
    answer = lone.ask(75, 0, topics=names, response_partition_limit=9, cursor=None)
    assert [(t.name, t.error_code.name, t.is_internal) for t in answer.topics] == [
        ("__consumer_offsets", "unknown_topic_or_partition", True),
        ("a b", "invalid_topic_exception", False),
    ]


def test_all_topics(topics):
    assert pages(topics, []) == ([("comp", "none", [0]), ("plain", "none", [0, 1, 2])], None)


def test_one_partition(topics):
    (topic,) = topics.ask(75, 0, topics=[{"name": "comp"}], response_partition_limit=1).topics
    assert topic.topic_id == topics.node.parts.metadata.image.topics["comp"].topic_id
    (partition,) = topic.partitions
    assert (partition.leader_id, partition.leader_epoch) == (0, 0)
    assert (partition.replica_nodes, partition.isr_nodes) == ((0,), (0,))
    assert partition.offline_replicas == ()
    assert topic.topic_authorized_operations == 3576


def test_pages(topics):
    """The cursors that Kafka gives, and every partition exactly once."""
    assert pages(topics, ["plain", "comp"], 1) == ([("comp", "none", [0])], ("plain", 0))
    assert pages(topics, ["plain", "comp"], 2)[1] == ("plain", 1)
    seen, cursor = [], None
    while True:
        found, cursor = pages(topics, [], 2, cursor)
        seen += [(name, partition) for name, _, partitions in found for partition in partitions]
        if cursor is None:
            break
    assert seen == [("comp", 0), ("plain", 0), ("plain", 1), ("plain", 2)]


def test_a_cursor_at_a_topic_that_is_gone(topics):
    assert pages(topics, [], 9, ("cop", 0))[0] == [("plain", "none", [0, 1, 2])]
    assert pages(topics, [], 9, ("zzz", 0)) == ([], None)


def test_cursors_refused(topics):
    """A cursor stands at a topic of the request, which need not exist."""
    assert pages(topics, ["nope", "plain"], 9, ("nope", 0))[0][0][0] == "nope"
    for cursor in (("zzz", 0), ("plain", -1), ("a", 0), ("comp", 0)):
        found, following = pages(topics, ["plain"], 9, cursor)
        assert found == [("plain", "invalid_request", [])]
        assert following is None


def test_limits(lone_node):
    lone = lone_node(max_request_partition_size_limit="2")
    lone.create("t", 5)
    assert pages(lone, ["t"]) == ([("t", "none", [0, 1])], ("t", 2))
    assert pages(lone, ["t"], 0) == ([("t", "none", [0])], ("t", 1))


def registered(lone, broker_id, *, fenced=False):
    """Another broker in the metadata log; nobody is there."""
    endpoints = (Endpoint(lone.node.parts.listeners[0].name, "PLAINTEXT", "nowhere", 9000),)

    def register(image):
        return [
            BrokerRecord(broker_id, image.index + 1, UUID(int=broker_id), endpoints, None, fenced)
        ]

    lone.run(propose(lone.node, register(lone.node.parts.metadata.image)))


def fence(lone, broker_id):
    epoch = lone.node.parts.metadata.image.brokers[broker_id].broker_epoch
    lone.run(propose(lone.node, [BrokerChangeRecord(broker_id, epoch, True)]))


def unregister(lone, broker_id):
    answer = lone.ask(64, 0, broker_id=broker_id)
    return answer.error_code.name, answer.error_message


def test_a_broker_is_forgotten(lone):
    registered(lone, 1)
    assert unregister(lone, 1) == ("invalid_request", "Broker 1 is alive: stop it first")
    assert unregister(lone, 0)[0] == "invalid_request"
    fence(lone, 1)
    assert unregister(lone, 1) == ("none", None)
    assert list(lone.node.parts.metadata.image.brokers) == [0]
    assert unregister(lone, 1) == (
        "broker_id_not_registered",
        "Broker ID 1 is not currently registered",
    )


def test_offline_replicas(lone):
    """Those whose broker is fenced or unknown, in both answers; without a leader an error."""
    for broker_id in (1, 2):
        registered(lone, broker_id)
    assignments = [
        {"partition_index": 0, "broker_ids": (0, 1)},
        {"partition_index": 1, "broker_ids": (1, 2)},
    ]
    topic = {"name": "t", "num_partitions": -1, "replication_factor": -1, "configs": ()}
    topics = [topic | {"assignments": assignments}]
    lone.ask(19, 7, topics=topics, timeout=1000, validate_only=False)
    assert offline(lone) == {0: ("none", 0, ()), 1: ("none", 1, ())}
    fence(lone, 1)
    assert offline(lone) == {0: ("none", 0, (1,)), 1: ("leader_not_available", -1, (1,))}
    assert unregister(lone, 1)[0] == "none"
    fence(lone, 2)
    assert offline(lone) == {0: ("none", 0, (1,)), 1: ("leader_not_available", -1, (1, 2))}


def offline(lone):
    """Partition -> (error, leader, offline replicas), as Metadata says; the other API agrees."""
    asked = [{"topic_id": None, "name": "t"}]
    (one,) = lone.ask(3, 13, topics=asked, allow_auto_topic_creation=False).topics
    (other,) = lone.ask(75, 0, topics=[{"name": "t"}], response_partition_limit=9).topics
    found = {}
    for topic in (one, other):
        told = {
            p.partition_index: (p.error_code.name, int(p.leader_id), p.offline_replicas)
            for p in topic.partitions
        }
        assert found in ({}, told)
        found = told
    return found


def test_a_lone_node_has_one_voter(lone):
    for key, more in ((80, {"timeout": 1000, "listeners": ()}), (81, {})):
        asked = {"voter_id": 1, "voter_directory_id": None, **more}
        answer = lone.ask(key, 0, cluster_id=lone.node.parts.identity.cluster_id, **asked)
        assert answer.error_code.name == "policy_violation"
        assert "runs alone" in answer.error_message
        answer = lone.ask(key, 0, cluster_id="x" * 22, **asked)
        assert answer.error_code.name == "inconsistent_cluster_id"
