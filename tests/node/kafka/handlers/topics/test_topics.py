"""CreateTopics, DeleteTopics, CreatePartitions, DeleteRecords: answers as Kafka 4.3 gives them.

The expected codes and messages were taken from a running Kafka 4.3.0.
"""

import time
import uuid

import pytest

from kept.node.metadata.internal_topics import COORDINATED
from kept.node.runtime import fd_quota
from kept.storage.records import build_batch, check
from kept.storage.types import TopicPartition
from tests.support.request_values import topic_values


def creations(lone, *topics, validate_only=False, version=7):
    answer = lone.ask(
        19,
        version,
        topics=[topic_values("t") | topic for topic in topics],
        timeout=1000,
        validate_only=validate_only,
    )
    return {topic.name: topic for topic in answer.topics}


def one(lone, validate_only=False, **topic):
    (result,) = creations(lone, {"name": "t"} | topic, validate_only=validate_only).values()
    return result


def said(result):
    return result.error_code.name, result.error_message


def assigned(*partitions):
    return {
        "num_partitions": -1,
        "replication_factor": -1,
        "assignments": [
            {"partition_index": number, "broker_ids": replicas} for number, replicas in partitions
        ],
    }


def configs(**settings):
    return [{"name": k.replace("_", "."), "value": v} for k, v in settings.items()]


def append(lone, topic, count, partition=0):
    hosted = lone.node.parts.table.partition(TopicPartition(topic, partition))
    rules = lone.node.parts.table.replicas[TopicPartition(topic, partition)].rules
    for number in range(count):
        batch = build_batch([(1000 + number, b"k", b"v", ())])
        hosted.append(check(batch, rules, 1000), 1000)
    hosted.write()
    return hosted


# CreateTopics.


def test_consumer_offsets_is_made_as_the_coordinator_needs_it(lone):
    asked = {"name": "__consumer_offsets", "num_partitions": -1, "replication_factor": -1}
    refused = one(lone, **asked, configs=configs(cleanup_policy="delete"))
    assert refused.error_code.name == "invalid_config"
    assert "must be compact, not delete" in refused.error_message
    made = one(lone, **asked, configs=configs(segment_bytes="1048576"))
    assert said(made) == ("none", None)
    assert (made.num_partitions, made.replication_factor) == (50, 1)
    given = {c.name: c.value for c in made.configs}
    assert given["cleanup.policy"] == "compact"
    assert (given["compression.type"], given["segment.bytes"]) == ("producer", "1048576")


@pytest.mark.parametrize("version", range(2, 8))
def test_create_in_every_version(lone, version):
    result = creations(lone, {"name": "t", "num_partitions": 3}, version=version)["t"]
    assert result.error_code.name == "none"
    assert len(lone.node.parts.metadata.image.topics["t"].partitions) == 3
    assert lone.node.parts.table.partition(TopicPartition("t", 2)).is_leader
    if version >= 5:
        assert (result.num_partitions, result.replication_factor) == (3, 1)
        assert len(result.configs) == 34  # but for those that nobody set and that have no default
        sources = {entry.name: entry.config_source for entry in result.configs}
        assert set(sources.values()) == {5}
    if version >= 7:
        assert result.topic_id == lone.node.parts.metadata.image.topics["t"].topic_id


def test_create_with_defaults_and_settings(lone_node):
    lone = lone_node(num_partitions="4")
    result = one(
        lone, num_partitions=-1, replication_factor=-1, configs=configs(segment_bytes="100000")
    )
    assert (result.num_partitions, result.replication_factor) == (4, 1)
    described = {entry.name: (entry.value, entry.config_source) for entry in result.configs}
    assert described["segment.bytes"] == ("100000", 1)
    assert described["retention.ms"] == ("604800000", 5)
    assert (
        lone.node.parts.table.partition(TopicPartition("t", 3)).log.config.segment_bytes == 100000
    )


def test_validate_only_creates_nothing(lone):
    result = one(lone, validate_only=True)
    assert said(result) == ("none", None)
    assert result.topic_id is not None
    assert "t" not in lone.node.parts.metadata.image.topics
    code, message = said(one(lone, validate_only=True, configs=configs(nope="1")))
    assert (code, message) == ("invalid_config", "Unknown topic config name: nope")


def test_the_rest_of_a_request_is_done_when_one_topic_fails(lone):
    results = creations(lone, {"name": "a"}, {"name": "b c"}, {"name": "a.b"}, {"name": "a_b"})
    assert {name: result.error_code.name for name, result in results.items()} == {
        "a": "none",
        "b c": "invalid_topic_exception",
        "a.b": "none",
        "a_b": "invalid_topic_exception",
    }
    assert results["a_b"].error_message == "Topic 'a_b' collides with existing topic: a.b"
    assert set(lone.node.parts.metadata.image.topics) == {"a", "a.b"}


def test_a_topic_twice_in_a_request(lone):
    results = creations(lone, {"name": "twice"}, {"name": "twice"}, {"name": "once"})
    assert said(results["twice"]) == ("invalid_request", "Duplicate topic name.")
    assert said(results["once"]) == ("none", None)


def test_a_request_that_is_tried_again_finds_the_topic_that_it_made(lone):
    one, other = uuid.uuid4(), uuid.uuid4()
    wanted = {
        "name": "t",
        "num_partitions": 3,
        "replication_factor": -1,
        "assignments": (),
        "configs": configs(retention_ms="7"),
    }
    asked = {
        "topics": [wanted],
        "timeout": 1000,
        "validate_only": False,
    }
    (first,) = lone.ask(19, 7, tries=(one,), **asked).topics
    (again,) = lone.ask(19, 7, tries=(one, other), **asked).topics
    assert again == first and again.error_code.name == "none"
    (stranger,) = lone.ask(19, 7, tries=(other,), **asked).topics
    assert stranger.error_code.name == "topic_already_exists"
    lone.ask(20, 6, topics=[{"name": "t", "topic_id": None}], timeout=1000)
    (anew,) = lone.ask(19, 7, tries=(one, other), **asked).topics
    assert anew.error_code.name == "none" and anew.topic_id != first.topic_id, "never used twice"


def test_create_an_existing_topic(lone):
    one(lone)
    result = one(lone)
    assert said(result) == ("topic_already_exists", "Topic 't' already exists.")
    assert (result.topic_id, result.num_partitions, result.configs) == (None, -1, ())


@pytest.mark.parametrize(
    ("topic", "code", "message"),
    [
        ({"name": ""}, "invalid_topic_exception", "the empty string is not allowed"),
        ({"name": ".."}, "invalid_topic_exception", "'..' is not allowed"),
        ({"name": "x" * 250}, "invalid_topic_exception", "longer than the max allowed length 249"),
        ({"num_partitions": 0}, "invalid_partitions", "invalid non-positive value"),
        ({"replication_factor": 0}, "invalid_replication_factor", "must be larger than 0, or -1"),
        (
            {"replication_factor": 3},
            "invalid_replication_factor",
            "only 1 broker(s) are registered",
        ),
        (assigned((0, [0]), (2, [0])), "invalid_replica_assignment", "consecutive 0-based"),
        (assigned((0, [5])), "invalid_replica_assignment", "broker 5, but no such broker"),
        (assigned((0, [0, 0])), "invalid_replica_assignment", "the broker 0 more than once"),
        (assigned((0, [])), "invalid_replica_assignment", "an empty replica list"),
        (assigned((0, [0]), (0, [0])), "invalid_replica_assignment", "multiple manual partition"),
        (
            assigned((0, [0])) | {"num_partitions": 2},
            "invalid_request",
            "numPartitions was not set",
        ),
        (
            assigned((0, [0])) | {"replication_factor": 1},
            "invalid_request",
            "replication factor was not set to -1",
        ),
        ({"num_partitions": 10_001}, "policy_violation", "Excessively large number of partitions"),
        ({"configs": configs(retention_ms=None)}, "invalid_config", "Null value not supported"),
        ({"configs": configs(segment_bytes="1")}, "invalid_config", "must be at least 1024"),
        (
            {"configs": configs(kept_compaction_strategy="latst")},
            "invalid_config",
            "did you mean latest?",
        ),
        ({"name": "__cluster_metadata"}, "invalid_request", "internal topic"),
    ],
)
def test_refused(lone, topic, code, message):
    result = one(lone, **topic)
    assert result.error_code.name == code
    assert message in result.error_message
    assert lone.node.parts.metadata.image.topics == {}


def test_manual_assignment(lone):
    result = one(lone, **assigned((1, [0]), (0, [0])))
    assert (result.num_partitions, result.replication_factor) == (2, 1)


def test_legal_though_odd(lone):
    for number, settings in enumerate(
        (
            {"cleanup_policy": ""},
            {"min_insync_replicas": "9"},
            {"cleanup_policy": "delete,delete"},
        )
    ):
        assert said(one(lone, name=f"t{number}", configs=configs(**settings))) == ("none", None)


# DeleteTopics.


def test_delete_by_name_and_by_id(lone):
    lone.create("a")
    b = lone.create("b")
    answer = lone.ask(
        20,
        6,
        topics=[{"name": "a", "topic_id": None}, {"name": None, "topic_id": b.topic_id}],
        timeout=1000,
    )
    assert {(r.name, r.error_code.name) for r in answer.responses} == {("a", "none"), ("b", "none")}
    assert lone.node.parts.metadata.image.topics == {}
    assert lone.node.parts.table.partitions == {}


@pytest.mark.parametrize("version", range(1, 6))
def test_delete_by_name_in_older_versions(lone, version):
    lone.create("a")
    answer = lone.ask(20, version, topic_names=["a", "nope"], timeout=1000)
    assert {r.name: r.error_code.name for r in answer.responses} == {
        "a": "none",
        "nope": "unknown_topic_or_partition",
    }


def test_deletions_refused(lone):
    kept = lone.create("kept").topic_id
    twin = lone.create("twin").topic_id
    unknown = uuid.uuid4()
    answer = lone.ask(
        20,
        6,
        topics=[
            {"name": name, "topic_id": topic_id}
            for name, topic_id in (
                ("nope", None),
                (None, unknown),
                (None, None),
                ("kept", kept),
                ("twice", None),
                ("twice", None),
                ("twin", None),
                (None, twin),
                ("", None),
            )
        ],
        timeout=1000,
    )
    assert {
        (r.name, r.topic_id): (r.error_code.name, r.error_message) for r in answer.responses
    } == {
        ("nope", None): (
            "unknown_topic_or_partition",
            "This server does not host this topic-partition.",
        ),
        (None, unknown): ("unknown_topic_id", "This server does not host this topic ID."),
        (None, None): ("invalid_request", "Neither topic name nor id were specified."),
        ("kept", kept): ("invalid_request", "You may not specify both topic name and topic id."),
        ("twice", None): ("invalid_request", "Duplicate topic name."),
        ("twin", None): (
            "invalid_request",
            "The same topic was specified by name and by id.",
        ),
        ("", None): (
            "unknown_topic_or_partition",
            "This server does not host this topic-partition.",
        ),
    }
    assert set(lone.node.parts.metadata.image.topics) == {"kept", "twin"}


@pytest.mark.parametrize(
    ("version", "code"), [(2, "invalid_request"), (6, "topic_deletion_disabled")]
)
def test_deletion_disabled(lone_node, version, code):
    lone = lone_node(delete_topic_enable="false")
    lone.create("a")
    names = {"topics": [{"name": "a", "topic_id": None}]} if version == 6 else {"topic_names": "a"}
    (result,) = lone.ask(20, version, timeout=1000, **names).responses
    assert result.error_code.name == code
    assert "a" in lone.node.parts.metadata.image.topics


# CreatePartitions.


def add(lone, *topics, validate_only=False, version=3):
    answer = lone.ask(
        37,
        version,
        topics=[{"assignments": None} | topic for topic in topics],
        timeout=1000,
        validate_only=validate_only,
    )
    return [(r.name, r.error_code.name, r.error_message) for r in answer.results]


@pytest.mark.parametrize("version", range(4))
def test_add_partitions(lone, version):
    lone.create("t")
    assert add(lone, {"name": "t", "count": 3}, version=version) == [("t", "none", None)]
    assert lone.node.parts.table.partition(TopicPartition("t", 2)).is_leader


def test_add_partitions_only_validated(lone):
    lone.create("t")
    assert add(lone, {"name": "t", "count": 3}, validate_only=True) == [("t", "none", None)]
    assert len(lone.node.parts.metadata.image.topics["t"].partitions) == 1


def test_add_partitions_by_assignment(lone):
    lone.create("t")
    manual = [{"broker_ids": [0]}, {"broker_ids": [0]}]
    assert add(lone, {"name": "t", "count": 3, "assignments": manual}) == [("t", "none", None)]


@pytest.mark.parametrize(
    ("topic", "code", "message"),
    [
        ({"name": "nope", "count": 3}, "unknown_topic_or_partition", "does not host"),
        ({"name": "", "count": 3}, "unknown_topic_or_partition", "does not host"),
        ({"count": 2}, "invalid_partitions", "Topic already has 2 partition(s)."),
        ({"count": 1}, "invalid_partitions", "currently has 2 partition(s); 1 would not be an"),
        ({"count": -1}, "invalid_partitions", "-1 would not be an increase"),
        (
            {"count": 4, "assignments": [{"broker_ids": [0]}]},
            "invalid_replica_assignment",
            "Attempted to add 2 additional partition(s), but only 1 assignment(s)",
        ),
        (
            {"count": 3, "assignments": [{"broker_ids": [7]}]},
            "invalid_replica_assignment",
            "broker 7, but no such broker is registered",
        ),
        ({"count": 20_000}, "policy_violation", "Excessively large"),
    ],
)
def test_partitions_refused(lone, topic, code, message):
    lone.create("t", 2)
    ((_, error, text),) = add(lone, {"name": "t"} | topic)
    assert error == code
    assert message in text
    assert len(lone.node.parts.metadata.image.topics["t"].partitions) == 2


@pytest.mark.parametrize("name", sorted(COORDINATED))
def test_topics_of_coordinators_do_not_grow(lone, name):
    """Groups would lose their offsets, and producers that are fenced would write again."""
    lone.create(name, 2)
    for manual in (None, [{"broker_ids": [0]}]):
        ((_, error, text),) = add(lone, {"name": name, "count": 3, "assignments": manual})
        assert (error, text.partition(" ")[0]) == ("invalid_partitions", name)
    assert len(lone.node.parts.metadata.image.topics[name].partitions) == 2


def test_no_more_replicas_than_open_files_allow(lone, monkeypatch):
    files = len(lone.node.parts.table.replicas) + 20
    monkeypatch.setattr(fd_quota.resource, "getrlimit", lambda _: (files, files))
    room = files - files // 4 - len(lone.node.parts.table.replicas)
    lone.create("t", 3)
    ((_, error, text),) = add(lone, {"name": "t", "count": room + 1})
    assert error == "policy_violation" and f"may open {files} files" in text
    ((_, error, _),) = add(lone, {"name": "t", "count": room})
    assert error == "none"
    assert one(lone, name="more").error_code.name == "policy_violation"
    assert set(lone.node.parts.metadata.image.topics) == {"t"}


def test_partitions_of_a_topic_named_twice(lone):
    lone.create("t")
    assert add(lone, {"name": "t", "count": 2}, {"name": "t", "count": 3}) == [
        ("t", "invalid_request", "Duplicate topic name.")
    ]


# DeleteRecords.


def cut(lone, topic, *offsets, version=2):
    answer = lone.ask(
        21,
        version,
        topics=[
            {
                "name": topic,
                "partitions": [{"partition_index": p, "offset": o} for p, o in offsets],
            }
        ],
        timeout=1000,
    )
    (result,) = answer.topics
    return [(p.partition_index, p.low_watermark, p.error_code.name) for p in result.partitions]


@pytest.mark.parametrize("version", range(3))
def test_delete_records(lone, version):
    lone.create("t")
    hosted = append(lone, "t", 5)
    assert cut(lone, "t", (0, 2), version=version) == [(0, 2, "none")]
    assert hosted.log.log_start_offset == 2
    assert cut(lone, "t", (0, 1), version=version) == [(0, 2, "none")]
    assert cut(lone, "t", (0, -1), version=version) == [(0, 5, "none")]


def test_delete_records_refused(lone):
    lone.create("t")
    lone.create("compacted", cleanup_policy="compact")
    lone.create("__consumer_offsets")
    append(lone, "t", 3)
    assert cut(lone, "t", (0, 4), (0, -2), (9, 0)) == [
        (0, -1, "offset_out_of_range"),
        (0, -1, "offset_out_of_range"),
        (9, -1, "unknown_topic_or_partition"),
    ]
    assert cut(lone, "compacted", (0, 0)) == [(0, -1, "policy_violation")]
    assert cut(lone, "nope", (0, 0)) == [(0, -1, "unknown_topic_or_partition")]
    assert cut(lone, "__consumer_offsets", (0, 0)) == [(0, -1, "invalid_topic_exception")]


@pytest.mark.parametrize("value", ["x" * 32_768, "\u20ac" * 11_000, "y" * 80_000])
def test_a_value_that_no_string_holds_is_refused(lone, value):
    """It would become a record and an answer that cannot be written."""
    topic = topic_values("long-value", kept_compaction_strategy=value)
    values = {"topics": [topic], "timeout": 1000, "validate_only": False}
    (result,) = lone.ask(19, 7, **values).topics
    assert int(result.error_code) == 40
    assert "exceeds the maximum size" in result.error_message
    change = {"name": "kept.compaction.strategy", "config_operation": 0, "value": value}
    resource = {"resource_type": 4, "resource_name": "", "configs": [change]}
    (result,) = lone.ask(44, 1, resources=[resource], validate_only=False).responses
    assert int(result.error_code) == 40
    assert "exceeds the maximum size" in result.error_message


def test_a_message_of_an_error_is_cut(lone):
    values = {"topics": [topic_values("n" * 32_767)], "timeout": 1000, "validate_only": False}
    for version in (2, 7):
        (result,) = lone.ask(19, version, **values).topics
        assert int(result.error_code) == 17
    (found,) = lone.ask(10, 4, key_type=0, coordinator_keys=["g" * 32_767]).coordinators
    assert found.key == "g" * 32_767
    joined = lone.ask(
        11,
        5,
        group_id="g",
        session_timeout=10_000,
        rebalance_timeout=10_000,
        member_id="",
        group_instance_id=None,
        protocol_type="consumer",
        protocols=[{"name": "range", "metadata": b""}],
    )
    assert int(joined.error_code) == 79


def test_one_metadata_request_creates_so_many_topics(lone_node):
    lone = lone_node(kept_auto_create_max_topics="3", auto_create_topics_enable="true")
    names = [f"auto-{number}" for number in range(5)]
    asked = {
        "topics": [{"name": name, "topic_id": None} for name in names],
        "allow_auto_topic_creation": True,
        "include_topic_authorized_operations": False,
    }
    found = lone.ask(3, 12, **asked).topics
    assert [int(topic.error_code) for topic in found] == [0, 0, 0, 5, 5]
    found = lone.ask(3, 12, **asked).topics
    assert [int(topic.error_code) for topic in found] == [0] * 5


def test_lists_of_many_parts_are_altered_quickly(lone):
    """Sixteen thousand parts that are compared each with each take seconds."""
    parts = ",".join(f"{number:x}" for number in range(6_500))
    lone.create("many-parts")
    for operation in (2, 3):
        change = {"name": "cleanup.policy", "config_operation": operation, "value": parts}
        resource = {"resource_type": 2, "resource_name": "many-parts", "configs": [change]}
        before = time.process_time()
        lone.ask(44, 1, resources=[resource], validate_only=True)
        assert time.process_time() - before < 0.3
