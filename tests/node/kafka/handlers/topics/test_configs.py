"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs, beside what Kafka 4.3.0 answered."""

import json
from pathlib import Path

import pytest

from kept.node.config.definitions import BROKER_SETTINGS, TOPIC_SETTINGS
from kept.node.metadata.internal_topics import COORDINATED
from kept.storage.types import TopicPartition

GOLDEN = json.loads((Path(__file__).parents[4] / "golden" / "kafka_4_3_settings.json").read_text())
TOPIC, BROKER = 2, 4
SET, DELETE, APPEND, SUBTRACT = range(4)


def describe(lone, kind, name, *keys, version=4, synonyms=True, docs=False):
    answer = lone.ask(
        32,
        version,
        resources=[
            {"resource_type": kind, "resource_name": name, "configuration_keys": keys or None}
        ],
        include_synonyms=synonyms,
        include_documentation=docs,
    )
    (result,) = answer.results
    assert (result.resource_type, result.resource_name) == (kind, name)
    return result


def entries(result):
    assert result.error_code.name == "none", result.error_message
    return {entry.name: entry for entry in result.configs}


def value(lone, kind, name, key):
    entry = entries(describe(lone, kind, name, key))[key]
    return entry.value, entry.config_source


def alter(lone, kind, name, *changes, validate_only=False, version=1):
    """IncrementalAlterConfigs of one resource: (code, message)."""
    answer = lone.ask(
        44,
        version,
        resources=[
            {
                "resource_type": kind,
                "resource_name": name,
                "configs": [
                    {"name": key, "config_operation": operation, "value": text}
                    for key, operation, text in changes
                ],
            }
        ],
        validate_only=validate_only,
    )
    (result,) = answer.responses
    assert (result.resource_type, result.resource_name) == (kind, name)
    return result.error_code.name, result.error_message


def replace(lone, kind, name, version=2, **settings):
    """AlterConfigs of one resource: (code, message)."""
    answer = lone.ask(
        33,
        version,
        resources=[
            {
                "resource_type": kind,
                "resource_name": name,
                "configs": [{"name": k.replace("_", "."), "value": v} for k, v in settings.items()],
            }
        ],
        validate_only=False,
    )
    (result,) = answer.responses
    return result.error_code.name, result.error_message


# DescribeConfigs.

GIVEN = {name for name, setting in TOPIC_SETTINGS.items() if setting.default is not None}
"""Settings of a topic that says nothing; optional ones are not described before they are set."""


@pytest.mark.parametrize("version", range(1, 5))
def test_a_topic_is_described_as_kafka_does(lone, version):
    lone.create("comp", cleanup_policy="compact", segment_ms="1000000")
    described = entries(describe(lone, TOPIC, "comp", version=version))
    assert set(described) == GIVEN
    for name, theirs in GOLDEN["described"]["comp"].items():
        ours = described[name]
        assert ours.value == theirs["value"]
        synonyms = [[s.name, s.value, s.source] for s in ours.synonyms]
        assert synonyms == theirs["synonyms"], name
        if name != "min.insync.replicas":
            assert ours.config_source == theirs["source"]
        if version >= 3:
            assert ours.config_type == TOPIC_SETTINGS[name].kind
        assert not ours.read_only
        assert not ours.is_sensitive


def test_only_the_settings_asked_for(lone):
    lone.create("t")
    assert list(entries(describe(lone, TOPIC, "t", "segment.bytes", "nope"))) == ["segment.bytes"]


def test_documentation_only_when_asked(lone):
    lone.create("t")
    entry = entries(describe(lone, TOPIC, "t", "preallocate", docs=True))["preallocate"]
    assert "Accepted, no effect" in entry.documentation
    entry = entries(describe(lone, TOPIC, "t", "preallocate", synonyms=False))["preallocate"]
    assert entry.documentation is None
    assert entry.synonyms == ()


def test_a_broker_is_described_with_all_its_settings(lone_node):
    lone = lone_node(log_retention_hours="5", num_partitions="3")
    described = entries(describe(lone, BROKER, "0"))
    assert set(described) == set(BROKER_SETTINGS)
    entry = described["num.partitions"]
    assert (entry.value, entry.config_source, entry.read_only) == ("3", 4, True)
    assert [(s.value, s.source) for s in entry.synonyms] == [("3", 4), ("1", 5)]
    entry = described["log.segment.bytes"]
    assert (entry.value, entry.config_source, entry.read_only) == ("1073741824", 5, False)
    entry = described["log.retention.ms"]
    assert (entry.value, entry.config_source) == (None, 5)
    assert described["delegation.token.secret.key"].is_sensitive


@pytest.mark.parametrize("name", sorted(set(GOLDEN["brokers"]) & set(BROKER_SETTINGS)))
def test_types_of_broker_settings(name):
    theirs = GOLDEN["brokers"][name]["type"]
    if name != "listener.security.protocol.map":
        assert BROKER_SETTINGS[name].kind.name.lower() == theirs


@pytest.mark.parametrize(
    ("kind", "name", "code", "message"),
    [
        (TOPIC, "nope", "unknown_topic_or_partition", ""),
        (TOPIC, "", "invalid_topic_exception", "Topic name is invalid: the empty string is not"),
        (TOPIC, "a b", "invalid_topic_exception", "Topic name is invalid: 'a b' contains"),
        (BROKER, "7", "invalid_request", "Unexpected broker id, expected 0 or empty string, but"),
        (BROKER, "x", "invalid_request", "Broker id must be an integer, but it is: x"),
        (BROKER, " 0", "invalid_request", "Broker id must be an integer, but it is:  0"),
        (3, "x", "invalid_request", "Unknown resource type 3"),
        (8, "0", "invalid_request", "BROKER_LOGGER has no settings here"),
        (32, "g", "invalid_request", "GROUP has no settings here"),
    ],
)
def test_not_described(lone, kind, name, code, message):
    result = describe(lone, kind, name)
    assert result.error_code.name == code
    assert message in result.error_message
    assert result.configs == ()


# IncrementalAlterConfigs.


@pytest.mark.parametrize("version", range(2))
def test_a_change_is_in_force_when_it_is_answered(lone, version):
    lone.create("t", 2)
    assert alter(lone, TOPIC, "t", ("retention.ms", SET, "5000"), version=version) == ("none", None)
    for number in range(2):
        config = lone.node.parts.table.partition(TopicPartition("t", number)).log.config
        assert config.retention_ms == 5000
    assert value(lone, TOPIC, "t", "retention.ms") == ("5000", 1)
    assert alter(lone, TOPIC, "t", ("retention.ms", DELETE, None)) == ("none", None)
    assert value(lone, TOPIC, "t", "retention.ms") == ("604800000", 5)
    assert (
        lone.node.parts.table.partition(TopicPartition("t", 0)).log.config.retention_ms
        == 604_800_000
    )


def test_append_and_subtract_start_from_the_default(lone):
    lone.create("t")
    assert alter(lone, TOPIC, "t", ("cleanup.policy", APPEND, "compact")) == ("none", None)
    assert value(lone, TOPIC, "t", "cleanup.policy") == ("delete,compact", 1)
    assert alter(lone, TOPIC, "t", ("cleanup.policy", SUBTRACT, "delete")) == ("none", None)
    assert value(lone, TOPIC, "t", "cleanup.policy") == ("compact", 1)
    assert alter(lone, TOPIC, "t", ("cleanup.policy", SUBTRACT, "compact")) == ("none", None)
    assert value(lone, TOPIC, "t", "cleanup.policy") == ("", 1)


def test_validate_only_changes_nothing(lone):
    lone.create("t")
    change = ("retention.ms", SET, "7")
    assert alter(lone, TOPIC, "t", change, validate_only=True) == ("none", None)
    assert value(lone, TOPIC, "t", "retention.ms") == ("604800000", 5)
    code, _ = alter(lone, TOPIC, "t", ("nope", SET, "7"), validate_only=True)
    assert code == "invalid_config"


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ([("nope", SET, "1")], "invalid_config", "Unknown topic config name: nope"),
        ([("retenton.ms", SET, "1")], "invalid_config", "did you mean retention.ms?"),
        (
            [("retention.ms", SET, "x")],
            "invalid_config",
            "Invalid value x for configuration retention.ms: Not a number of type LONG",
        ),
        (
            [("retention.ms", SET, None)],
            "invalid_request",
            "Null value not supported for : retention.ms",
        ),
        ([("retention.ms", 9, "1")], "invalid_request", "Unknown config operation 9"),
        (
            [("retention.ms", APPEND, "1")],
            "invalid_config",
            "Can't APPEND to key retention.ms because its type is not LIST.",
        ),
        (
            [("retention.ms", SET, "1"), ("retention.ms", SET, "2")],
            "invalid_request",
            "Error due to duplicate config keys",
        ),
        (
            [("kept.compaction.latest.n", SET, "2")],
            "invalid_config",
            "is for kept.compaction.strategy=latest-n",
        ),
        (
            [("segment.bytes", SET, "1" * 40_000)],
            "invalid_config",
            "exceeds the maximum size",
        ),
    ],
)
def test_changes_refused(lone, changes, code, message):
    lone.create("t")
    error, text = alter(lone, TOPIC, "t", *changes)
    assert error == code
    assert message in text
    assert lone.node.parts.metadata.image.config(TOPIC, "t") == {}


@pytest.mark.parametrize(
    ("kind", "name", "code", "message"),
    [
        (TOPIC, "zap", "unknown_topic_or_partition", "The topic 'zap' does not exist."),
        (TOPIC, "", "invalid_request", "Default topic resources are not allowed."),
        (BROKER, "9", "invalid_request", "Unexpected broker id, expected 0, but received 9"),
        (BROKER, "x", "invalid_request", "Node id must be an integer, but it is: x"),
        (BROKER, "\uff10", "invalid_request", "Node id must be an integer, but it is: \uff10"),
        (
            BROKER,
            "0" * 5000,
            "invalid_request",
            f"{'Node id must be an integer, but it is: ':0<2000}... (5039 characters)",
        ),
        (3, "x", "invalid_request", "Unknown resource type 3"),
    ],
)
def test_nothing_to_change(lone, kind, name, code, message):
    assert alter(lone, kind, name, ("retention.ms", SET, "1")) == (code, message)


def test_a_resource_named_twice(lone):
    lone.create("t")
    once = {"resource_type": TOPIC, "resource_name": "t", "configs": ()}
    answer = lone.ask(44, 1, resources=[once, once], validate_only=False)
    assert [(r.error_code.name, r.error_message) for r in answer.responses] == [
        ("invalid_request", "Each resource must appear at most once.")
    ]


# Brokers.


def test_broker_settings_change_at_run_time_and_reach_topics(lone):
    lone.create("t")
    assert alter(lone, BROKER, "0", ("log.segment.bytes", SET, "2000000")) == ("none", None)
    change = [("log.segment.bytes", SET, "3000000"), ("log.retention.ms", SET, "77")]
    assert alter(lone, BROKER, "", *change) == ("none", None)
    assert lone.node.config.log_segment_bytes == 2_000_000
    config = lone.node.parts.table.partition(TopicPartition("t", 0)).log.config
    assert (config.segment_bytes, config.retention_ms) == (2_000_000, 77)
    entry = entries(describe(lone, TOPIC, "t", "segment.bytes"))["segment.bytes"]
    assert [(s.name, s.value, s.source) for s in entry.synonyms] == [
        ("log.segment.bytes", "2000000", 2),
        ("log.segment.bytes", "3000000", 3),
        ("log.segment.bytes", "1073741824", 5),
    ]
    assert entry.config_source == 2
    assert set(entries(describe(lone, BROKER, ""))) == {"log.segment.bytes", "log.retention.ms"}
    assert value(lone, BROKER, "0", "log.segment.bytes") == ("2000000", 2)
    assert alter(lone, BROKER, "0", ("log.segment.bytes", DELETE, None)) == ("none", None)
    assert value(lone, TOPIC, "t", "segment.bytes") == ("3000000", 3)


def test_they_survive_a_restart(lone_node):
    lone = lone_node()
    alter(lone, BROKER, "", ("max.connections", SET, "77"))
    lone.create("t", retention_ms="9")
    lone.stop()
    again = type(lone)(lone._runner, lone.node.config.log_dirs[0].removesuffix("/log"))
    try:
        assert again.node.config.max_connections == 77
        assert value(again, TOPIC, "t", "retention.ms") == ("9", 1)
    finally:
        again.stop()
    lone.stop = lambda: None


@pytest.mark.parametrize("name", ["0", ""])
@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (("node.id", SET, "4"), "invalid_request", "Cannot update these configs dynamically: [no"),
        (("listeners", SET, "PLAINTEXT://x:1"), "invalid_request", "Cannot update these configs"),
        (("log.segment.byte", SET, "4"), "invalid_config", "did you mean log.segment.bytes?"),
        (
            ("log.segment.bytes", SET, "x"),
            "invalid_request",
            "Invalid value x for configuration log.segment.bytes: Not a number of type INT",
        ),
        (("log.segment.bytes", SET, None), "invalid_request", "Null value not supported for"),
    ],
)
def test_broker_changes_refused(lone, name, change, code, message):
    error, text = alter(lone, BROKER, name, change)
    assert error == code
    assert message in text
    assert lone.node.parts.metadata.image.config(BROKER, name) == {}


def test_changes_of_one_request_are_checked_together(lone):
    """Each is legal alone; together they contradict each other."""
    answer = lone.ask(
        44,
        1,
        resources=[
            {
                "resource_type": BROKER,
                "resource_name": name,
                "configs": [{"name": key, "config_operation": SET, "value": text}],
            }
            for name, key, text in (
                ("", "log.cleaner.max.compaction.lag.ms", "8"),
                ("0", "log.cleaner.min.compaction.lag.ms", "9"),
            )
        ],
        validate_only=False,
    )
    assert [r.error_code.name for r in answer.responses] == ["none", "invalid_request"]
    assert lone.node.config.log_cleaner_max_compaction_lag_ms == 8


# AlterConfigs.


@pytest.mark.parametrize("version", range(3))
def test_replace_forgets_what_is_not_named(lone, version):
    lone.create("t")
    assert replace(lone, TOPIC, "t", version, retention_ms="5", segment_ms="7") == ("none", None)
    assert replace(lone, TOPIC, "t", version, retention_ms="6") == ("none", None)
    assert lone.node.parts.metadata.image.config(TOPIC, "t") == {"retention.ms": "6"}
    assert replace(lone, TOPIC, "t", version) == ("none", None)
    assert lone.node.parts.metadata.image.config(TOPIC, "t") == {}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"kept_compaction_strategy": "latest-n", "kept_compaction_latest_n": "3"},
        {"kept_compaction_strategy": "highest-version", "kept_compaction_version_header": "v"},
        {"kept_compaction_strategy": "by-key-prefix", "kept_compaction_prefixes": "a=latest"},
    ],
    ids=["defaults", "latest-n", "highest-version", "by-key-prefix"],
)
def test_what_is_described_may_be_given_back(lone, given):
    """What tools without IncrementalAlterConfigs do: describe, change one, send all."""
    lone.create("t", cleanup_policy="compact", **given)
    described = {name: e.value for name, e in entries(describe(lone, TOPIC, "t")).items()}
    assert None not in described.values()
    for name, value in given.items():
        assert described[name.replace("_", ".")] == value
    back = {name.replace(".", "_"): value for name, value in described.items()}
    back["retention_ms"] = "12345"
    assert replace(lone, TOPIC, "t", **back) == ("none", None)
    again = {name: e.value for name, e in entries(describe(lone, TOPIC, "t")).items()}
    assert again == described | {"retention.ms": "12345"}


def test_replace_refused(lone):
    lone.create("t", retention_ms="5")
    assert replace(lone, TOPIC, "t", nope="6")[0] == "invalid_config"
    assert replace(lone, TOPIC, "t", retention_ms=None) == (
        "invalid_request",
        "Null value not supported for : retention.ms",
    )
    assert replace(lone, TOPIC, "zzz", retention_ms="1")[0] == "unknown_topic_or_partition"
    assert replace(lone, BROKER, "0", node_id="2")[0] == "invalid_request"
    assert lone.node.parts.metadata.image.config(TOPIC, "t") == {"retention.ms": "5"}


@pytest.mark.parametrize("name", sorted(COORDINATED))
def test_what_coordinators_wrote_stays_compacted(lone, name):
    """Otherwise a week later offsets and transactional ids are gone."""
    lone.create(name)
    given = dict(lone.node.parts.metadata.image.config(TOPIC, name))
    assert given["cleanup.policy"] == "compact"
    for change in (
        ("cleanup.policy", SET, "delete"),
        ("cleanup.policy", APPEND, "delete"),
        ("cleanup.policy", DELETE, None),
    ):
        code, message = alter(lone, TOPIC, name, change)
        assert code == "invalid_config"
        assert message.startswith(f"{name} holds what coordinators must not lose")
    assert replace(lone, TOPIC, name, segment_bytes="2048")[0] == "invalid_config"
    assert lone.node.parts.metadata.image.config(TOPIC, name) == given
    assert alter(lone, TOPIC, name, ("segment.bytes", SET, "2048")) == ("none", None)


def test_replace_for_a_broker(lone):
    assert replace(lone, BROKER, "0", log_cleaner_threads="2") == ("none", None)
    assert lone.node.config.log_cleaner_threads == 2
    assert replace(lone, BROKER, "0") == ("none", None)
    assert lone.node.config.log_cleaner_threads == 1


# A fact that is kept among a topic's settings, and is none.

FACT = "kept.compacted.before"


def test_that_a_topic_was_compacted_is_no_setting(lone):
    """Nobody sees it among the settings, and nobody sets, alters or takes it away."""
    lone.create("t", cleanup_policy="compact", segment_ms="1000000")
    assert alter(lone, TOPIC, "t", ("cleanup.policy", SET, "delete")) == ("none", None)

    def noted():
        return lone.node.parts.metadata.image.config(TOPIC, "t").get(FACT)

    assert noted() == "true"
    for version in range(1, 5):
        described = describe(lone, TOPIC, "t", version=version)
        assert set(entries(described)) == GIVEN
        assert entries(describe(lone, TOPIC, "t", FACT, version=version)) == {}
    assert FACT not in str(lone.get("/api/v1/topics/t")) + str(lone.get("/api/v1/topics"))

    for change in ((FACT, SET, "false"), (FACT, APPEND, "x"), (FACT, SUBTRACT, "true")):
        code, message = alter(lone, TOPIC, "t", change)
        assert code == "invalid_config" and FACT in message
    assert alter(lone, TOPIC, "t", (FACT, DELETE, None)) == ("none", None)
    assert replace(lone, TOPIC, "t", **{FACT: "false"})[0] == "invalid_config"
    assert replace(lone, TOPIC, "t") == ("none", None)
    assert alter(lone, TOPIC, "t", ("cleanup.policy", SET, "compact")) == ("none", None)
    assert noted() == "true"
    assert alter(lone, BROKER, "", (FACT, SET, "true"))[0] != "none"


def test_no_topic_is_created_as_one_that_was_compacted(lone):
    topic = {
        "name": "t",
        "num_partitions": 1,
        "replication_factor": -1,
        "assignments": (),
        "configs": [{"name": FACT, "value": "true"}],
    }
    (result,) = lone.ask(19, 7, topics=[topic], timeout=1000, validate_only=False).topics
    assert result.error_code.name == "invalid_config" and FACT in result.error_message
    assert "t" not in lone.node.parts.metadata.image.topics


def test_another_topic_of_that_name_was_never_compacted(lone):
    lone.create("t", cleanup_policy="compact")
    assert alter(lone, TOPIC, "t", ("cleanup.policy", SET, "delete")) == ("none", None)
    wanted = [{"name": "t", "topic_id": None}]
    (gone,) = lone.ask(20, 6, topics=wanted, timeout=60_000).responses
    assert gone.error_code.name == "none"
    lone.create("t")
    assert FACT not in lone.node.parts.metadata.image.config(TOPIC, "t")
