"""Topic settings: Kafka's own table is the judge (golden, from Apache Kafka 4.3.0)."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.node.config.checks import parse_prefixes
from kept.node.config.config_def import ConfigDef, ConfigType, Source, nearest
from kept.node.config.definitions import BROKER_SETTINGS, TOPIC_SETTINGS
from kept.node.config.topic_config import (
    describe_topic,
    inherited_entries,
    log_config,
    validate_topic,
)
from kept.storage.errors import InvalidConfig
from kept.storage.types import LogConfig, TimestampType

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "kafka_4_3_settings.json").read_text())
KAFKA = GOLDEN["topics"]
OURS = {
    "kept.compaction.strategy",
    "kept.compaction.latest.n",
    "kept.compaction.version.header",
    "kept.compaction.prefixes",
}


def test_all_of_kafkas_topic_settings_and_ours():
    assert len(KAFKA) == 33
    assert set(TOPIC_SETTINGS) == set(KAFKA) | OURS


@pytest.mark.parametrize("name", sorted(KAFKA))
def test_type_default_range_and_synonym_are_kafkas(name):
    setting, theirs = TOPIC_SETTINGS[name], KAFKA[name]
    assert setting.kind.name.lower() == theirs["type"]
    assert setting.default == theirs["default"]
    synonym = setting.synonyms[0].name if setting.synonyms else None
    assert synonym == theirs.get("synonym")
    if name == "segment.bytes":
        assert (setting.low, theirs["valid"]) == (1024, "[1048576,...]")
        return
    bounds = re.fullmatch(r"\[(-?\d+),\.\.\.,?(\d*)\](?: or (-?\d+))?", theirs["valid"])
    if bounds:
        low, high, also = bounds.groups()
        assert setting.low == int(low)
        assert setting.high == (int(high) if high else None)
        assert setting.also == ((int(also),) if also else ())
    elif theirs["valid"].startswith("[") and ":" not in theirs["valid"]:
        assert set(setting.choices) == set(theirs["valid"][1:-1].split(", "))
    else:
        assert setting.low is None
        assert not setting.choices


def test_every_default_is_legal():
    values = validate_topic({})
    assert set(values) == set(TOPIC_SETTINGS)


def test_log_config_without_settings_is_kafkas_default():
    config = log_config({})
    assert config == LogConfig(raw=config.raw)
    assert config.raw["compression.zstd.level"] == "3"
    assert "retention.ms" not in config.raw


def test_log_config_lays_the_topic_over_the_broker():
    config = log_config(
        {
            "cleanup.policy": "compact,delete",
            "message.timestamp.type": "LogAppendTime",
            "kept.compaction.strategy": "latest-n",
            "kept.compaction.latest.n": "3",
        },
        {"retention.ms": "77", "cleanup.policy": "delete", "min.cleanable.dirty.ratio": "0.1"},
    )
    assert config.cleanup_policy == {"compact", "delete"}
    assert config.message_timestamp_type is TimestampType.LOG_APPEND_TIME
    assert (config.retention_ms, config.min_cleanable_dirty_ratio) == (77, 0.1)
    assert config.compaction_strategy == "latest-n"
    assert config.raw["kept.compaction.latest.n"] == "3"


def test_a_log_opens_though_a_newer_version_set_something():
    config = log_config({"kept.of.tomorrow": "1", "retention.ms": "5"})
    assert config.retention_ms == 5
    with pytest.raises(InvalidConfig):
        validate_topic({"kept.of.tomorrow": "1"})


def test_an_empty_cleanup_policy_is_legal():
    config = log_config({"cleanup.policy": ""})
    assert not config.compact
    assert not config.delete


def test_a_policy_named_twice_counts_once():
    assert TOPIC_SETTINGS["cleanup.policy"].parse("compact,compact") == ("compact",)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("segment.bytes", "12", "Value must be at least 1024"),
        ("segment.bytes", "99999999999", "Not a number of type INT"),
        ("retention.ms", "1_000", "Not a number of type LONG"),
        ("retention.ms", "\uff11", "Not a number of type LONG"),
        ("min.cleanable.dirty.ratio", "\uff11", "Not a number of type DOUBLE"),
        ("min.cleanable.dirty.ratio", "nan", "Not a number of type DOUBLE"),
        ("min.cleanable.dirty.ratio", "1.5", "Value must be no more than 1 (allowed: 0 to 1)"),
        ("compression.gzip.level", "0", "Value must be between 1 and 9 or equal to -1"),
        (
            "cleanup.policy",
            "compat",
            "String must be one of: compact, delete (did you mean compact?)",
        ),
        ("preallocate", "maybe", "Expected value to be either true or false"),
        (
            "remote.storage.enable",
            "true",
            "Tiered Storage functionality is disabled in the broker. "
            "Topic cannot be configured with remote log storage.",
        ),
        (
            "leader.replication.throttled.replicas",
            "1",
            "Must be the literal '*' or a list of replicas [partitionId]:[brokerId]",
        ),
        (
            "kept.compaction.strategy",
            "newest first",
            "not a strategy's name; built in: latest, latest-n, highest-version, by-key-prefix",
        ),
        ("kept.compaction.version.header", " ", "must not be empty"),
        ("cleanup.policy", "compact,,delete", "a list must not have empty entries"),
    ],
)
def test_an_invalid_value_is_refused_with_what_is_allowed(name, value, why):
    with pytest.raises(InvalidConfig) as caught:
        validate_topic({name: value})
    assert str(caught.value) == f"Invalid value {value} for configuration {name}: {why}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"retenton.ms": "1"},
            "Unknown topic config name: retenton.ms; did you mean retention.ms?",
        ),
        ({"zzzzzzzz": "1"}, "Unknown topic config name: zzzzzzzz"),
        (
            {"min.compaction.lag.ms": "9", "max.compaction.lag.ms": "3"},
            "conflict topic config setting min.compaction.lag.ms (9) > max.compaction.lag.ms (3)",
        ),
        (
            {"local.retention.ms": "9", "retention.ms": "8"},
            "Invalid value 9 for configuration local.retention.ms: "
            "Value must not be more than retention.ms property value: 8",
        ),
        (
            {"local.retention.ms": "1", "retention.ms": "0"},
            "Invalid value 1 for configuration local.retention.ms: "
            "Value must not be more than retention.ms property value: 0",
        ),
        (
            {"local.retention.bytes": "-1", "retention.bytes": "8"},
            "Invalid value -1 for configuration local.retention.bytes: "
            "Value must not be -1 as retention.bytes value is set as 8.",
        ),
        (
            {"kept.compaction.latest.n": "3"},
            "conflict topic config setting kept.compaction.latest.n is for "
            "kept.compaction.strategy=latest-n, but the strategy is latest",
        ),
        (
            {"kept.compaction.strategy": "latest-n"},
            "kept.compaction.strategy=latest-n needs kept.compaction.latest.n",
        ),
        (
            {"kept.compaction.strategy": "by-key-prefix"},
            "kept.compaction.strategy=by-key-prefix needs kept.compaction.prefixes",
        ),
        (
            {
                "kept.compaction.strategy": "by-key-prefix",
                "kept.compaction.prefixes": "a=latest,b=first",
            },
            "Invalid value a=latest,b=first for configuration kept.compaction.prefixes: "
            "'b=first' is not PREFIX=STRATEGY with a strategy of latest, latest-n:N, "
            "highest-version or highest-version:HEADER",
        ),
    ],
)
def test_refused_by_name_with_what_would_be_right(overrides, message):
    with pytest.raises(InvalidConfig) as caught:
        validate_topic(overrides)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "overrides",
    [
        {"segment.bytes": "1024"},
        {"local.retention.ms": "-2", "retention.ms": "1"},
        {"local.retention.ms": "-1", "retention.ms": "-1"},
        {"local.retention.ms": "8", "retention.ms": "8"},
        {"min.compaction.lag.ms": "3", "max.compaction.lag.ms": "3"},
        {"retention.ms": "-1"},
        {"min.insync.replicas": "9"},
        {"leader.replication.throttled.replicas": "*"},
        {"follower.replication.throttled.replicas": "0:1,1:2"},
        {"kept.compaction.strategy": "highest-version"},
        {"kept.compaction.strategy": "highest-version", "kept.compaction.version.header": "v"},
        {"kept.compaction.strategy": "of-a-user", "kept.compaction.latest.n": "2"},
    ],
)
def test_accepted(overrides):
    validate_topic(overrides)


def test_a_strategy_must_be_built_in_or_installed():
    validate_topic({"kept.compaction.strategy": "mine"}, strategies=["mine"])
    with pytest.raises(InvalidConfig, match=r"kept\.compaction\.strategy.*did you mean latest-n"):
        validate_topic({"kept.compaction.strategy": "latest-m"}, strategies=["mine"])


def test_defaults_of_the_broker_count_in_contradictions():
    with pytest.raises(InvalidConfig, match="conflict"):
        validate_topic({"min.compaction.lag.ms": "9"}, {"max.compaction.lag.ms": "3"})


def test_prefixes():
    assert parse_prefixes("user.=latest-n:3, cfg.=latest,v=highest-version:ver") == (
        ("user.", "latest-n:3"),
        ("cfg.", "latest"),
        ("v", "highest-version:ver"),
    )
    with pytest.raises(ValueError, match="twice"):
        parse_prefixes("a=latest,a=latest")


@pytest.mark.parametrize("topic", ["plain", "comp"])
def test_described_as_kafka_describes(topic):
    """Values, sources and synonyms of a topic without broker settings."""
    overrides = {"cleanup.policy": "compact", "segment.ms": "1000000"} if topic == "comp" else {}
    described = {
        e.setting.name: e for e in describe_topic(overrides, inherited_entries(BROKER_SETTINGS, ()))
    }
    given = {name for name, setting in TOPIC_SETTINGS.items() if setting.default is not None}
    assert list(described) == sorted(given)
    for name, theirs in GOLDEN["described"][topic].items():
        ours = described[name]
        assert ours.value == theirs["value"], name
        synonyms = [[s.name, s.value, int(s.source)] for s in ours.synonyms]
        assert synonyms == theirs["synonyms"], name
        assert not ours.read_only, name
        if name != "min.insync.replicas":  # Kafka sets that one for all brokers (ELR)
            assert ours.source == theirs["source"], name


def test_sources_strongest_first():
    layers = (
        (Source.DYNAMIC_BROKER_CONFIG, {"log.segment.bytes": "2000000"}),
        (Source.DYNAMIC_DEFAULT_BROKER_CONFIG, {"log.segment.bytes": "3000000"}),
        (Source.STATIC_BROKER_CONFIG, {"log.retention.hours": "2", "log.roll.ms": "5"}),
    )
    described = {
        e.setting.name: e
        for e in describe_topic({"segment.ms": "7"}, inherited_entries(BROKER_SETTINGS, layers))
    }
    size = described["segment.bytes"]
    assert (size.value, size.source) == ("2000000", Source.DYNAMIC_BROKER_CONFIG)
    assert [(s.value, int(s.source)) for s in size.synonyms] == [
        ("2000000", 2),
        ("3000000", 3),
        ("1073741824", 5),
    ]
    age = described["segment.ms"]
    assert (age.value, age.source) == ("7", Source.DYNAMIC_TOPIC_CONFIG)
    assert [(s.name, s.value, int(s.source)) for s in age.synonyms][:2] == [
        ("segment.ms", "7", 1),
        ("log.roll.ms", "5", 4),
    ]
    kept = described["retention.ms"]
    assert (kept.value, kept.source) == ("7200000", Source.STATIC_BROKER_CONFIG)
    assert kept.synonyms[0].name == "log.retention.hours"


@pytest.mark.parametrize(
    ("given", "retention_ms"),
    [
        ({"log.retention.hours": "-1"}, "-1"),
        ({"log.retention.minutes": "0"}, "0"),
        ({"log.retention.minutes": "3"}, "180000"),
        ({"log.retention.ms": "7", "log.retention.hours": "-1"}, "7"),
    ],
)
def test_another_unit_is_converted_and_no_limit_stays_none(given, retention_ms):
    entries = inherited_entries(BROKER_SETTINGS, ((Source.STATIC_BROKER_CONFIG, given),))
    assert entries["retention.ms"].value == retention_ms


def test_another_name_of_the_same_unit_is_taken_as_it_is():
    given = {"log.flush.scheduler.interval.ms": "7"}
    entries = inherited_entries(BROKER_SETTINGS, ((Source.STATIC_BROKER_CONFIG, given),))
    assert entries["flush.ms"].value == "7"


def test_kinds_and_sources_have_the_numbers_of_describe_configs():
    assert {kind.name: int(kind) for kind in ConfigType} == {
        "BOOLEAN": 1,
        "STRING": 2,
        "INT": 3,
        "SHORT": 4,
        "LONG": 5,
        "DOUBLE": 6,
        "LIST": 7,
        "CLASS": 8,
        "PASSWORD": 9,
    }
    assert {source.name: int(source) for source in Source} == {
        "DYNAMIC_TOPIC_CONFIG": 1,
        "DYNAMIC_BROKER_CONFIG": 2,
        "DYNAMIC_DEFAULT_BROKER_CONFIG": 3,
        "STATIC_BROKER_CONFIG": 4,
        "DEFAULT_CONFIG": 5,
    }


@pytest.mark.parametrize(
    ("kind", "bits"), [(ConfigType.SHORT, 16), (ConfigType.INT, 32), (ConfigType.LONG, 64)]
)
def test_a_number_has_the_bits_of_its_type(kind, bits):
    setting = ConfigDef("s", kind, "1", "a number")
    most = 2 ** (bits - 1)
    for number in (most - 1, -most):
        assert setting.parse(str(number)) == number
    for number in (most, -most - 1):
        with pytest.raises(InvalidConfig, match=f"Not a number of type {kind.name}"):
            setting.parse(str(number))


@pytest.mark.parametrize(
    ("limits", "legal", "illegal"),
    [
        ({"low": 2, "high": 5}, ("2", "5"), ("1", "6")),
        ({"low": 2, "high": 5, "also": (-1,)}, ("2", "5", "-1"), ("1", "6", "-2")),
        ({"high": 5}, ("-9", "5"), ("6",)),
    ],
)
def test_limits_are_inclusive(limits, legal, illegal):
    setting = ConfigDef("s", ConfigType.INT, "3", "a number", **limits)
    for text in legal:
        assert setting.parse(text) == int(text)
    for text in illegal:
        with pytest.raises(InvalidConfig):
            setting.parse(text)


def test_what_has_no_effect_says_so():
    entry = next(
        e
        for e in describe_topic({}, inherited_entries(BROKER_SETTINGS, ()))
        if e.setting.name == "preallocate"
    )
    assert "Accepted, no effect: " in entry.documentation


def test_a_sensitive_value_is_not_shown():
    setting = BROKER_SETTINGS["delegation.token.secret.key"]
    with pytest.raises(InvalidConfig) as caught:
        setting.parse("hush")
    assert "hush" not in str(caught.value)


@given(st.sampled_from(sorted(TOPIC_SETTINGS)), st.text(max_size=30))
def test_parsing_gives_a_value_or_invalid_config(name, text):
    setting = TOPIC_SETTINGS[name]
    try:
        value = setting.parse(text)
    except InvalidConfig as error:
        assert name in str(error)
    else:
        assert setting.parse(setting.text(value)) == value


@given(
    st.sampled_from(
        [s for s in TOPIC_SETTINGS.values() if s.kind in (ConfigType.INT, ConfigType.LONG)]
    ),
    st.integers(-(2**70), 2**70),
)
def test_numbers_are_checked_against_type_and_range(setting, number):
    width = 31 if setting.kind is ConfigType.INT else 63
    legal = -(2**width) <= number < 2**width and (
        number in setting.also
        or (
            (setting.low is None or number >= setting.low)
            and (setting.high is None or number <= setting.high)
        )
    )
    if legal:
        assert setting.parse(str(number)) == number
    else:
        with pytest.raises(InvalidConfig):
            setting.parse(str(number))


def test_nearest():
    assert nearest("cleanup.polcy", TOPIC_SETTINGS) == "cleanup.policy"
    assert nearest("x", TOPIC_SETTINGS) is None
