"""A topic's settings: Apache Kafka 4.3's 33 public ones, and those of compaction that are ours.

:func:`validate_topic` says what may be set, :func:`log_config` turns settings into what a log
uses, :func:`describe_topic` shows each with its source and synonyms. Where we differ from Kafka:
``segment.bytes`` from 1024 instead of 1 MiB; a ``local.retention.*`` above ``retention.*`` is
refused also without tiered storage, and tiered storage itself is not there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Final

from kept.node.config.config_def import (
    ConfigDef,
    Entry,
    Kind,
    Layers,
    Settings,
    Source,
    Synonym,
    SynonymEntry,
    Update,
    broker_synonyms,
    nearest,
    unknown_name,
)
from kept.storage.errors import InvalidConfig
from kept.storage.types import MAX_INT64, LogConfig, TimestampType

__all__ = [
    "BUILT_IN_STRATEGIES",
    "TOPIC_SETTINGS",
    "ConfigDef",
    "Entry",
    "Kind",
    "Layers",
    "Settings",
    "Source",
    "Synonym",
    "SynonymEntry",
    "Update",
    "broker_synonyms",
    "default_from_broker",
    "describe_topic",
    "inherited_entries",
    "log_config",
    "nearest",
    "parse_prefixes",
    "unknown_name",
    "validate_topic",
]

BUILT_IN_STRATEGIES: Final = ("latest", "latest-n", "highest-version", "by-key-prefix")
"""Compaction strategies that need no entry point."""

MIN_SEGMENT_BYTES: Final = 1024
"""Kafka refuses below 1 MiB; small segments are how one watches the cleaner at work."""

_HOUR: Final = 3_600_000
_MINUTE: Final = 60_000
_NO_TIERS: Final = "kept has no tiered storage; the whole log is local."
_THROTTLE: Final = re.compile(r"[0-9]+:[0-9]+")
_PREFIX_ITEM: Final = re.compile(r"[^=,]+=(latest|latest-n:[1-9][0-9]*|highest-version(:[^,:=]+)?)")


def _throttled(value: tuple[str, ...]) -> None:
    if value != ("*",) and any(not _THROTTLE.fullmatch(item) for item in value):
        raise ValueError("Must be the literal '*' or a list of replicas [partitionId]:[brokerId]")


def parse_prefixes(text: str) -> tuple[tuple[str, str], ...]:
    """``"user.=latest-n:3,cfg.=latest"`` as ((prefix, strategy), ...). Raises ValueError."""
    items = [item.strip() for item in text.split(",")]
    for item in items:
        if not _PREFIX_ITEM.fullmatch(item):
            raise ValueError(
                f"{item!r} is not PREFIX=STRATEGY with a strategy of latest, latest-n:N, "
                "highest-version or highest-version:HEADER"
            )
    pairs = tuple((item[: item.index("=")], item[item.index("=") + 1 :]) for item in items)
    if len({prefix for prefix, _ in pairs}) != len(pairs):
        raise ValueError("a prefix is given twice")
    return pairs


def _prefixes(value: str) -> None:
    parse_prefixes(value)


def _strategy(value: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_.\-]+", value):
        raise ValueError(f"not a strategy's name; built in: {', '.join(BUILT_IN_STRATEGIES)}")


def _not_blank(value: str) -> None:
    if not value:
        raise ValueError("must not be empty")


def _log(name: str, *more: tuple[str, int]) -> tuple[Synonym, ...]:
    return (Synonym(f"log.{name}"), *(Synonym(f"log.{n}", factor) for n, factor in more))


_MAX: Final = str(MAX_INT64)

TOPIC_SETTINGS: Final = Settings(
    "topic",
    (
        ConfigDef(
            "cleanup.policy", Kind.LIST, "delete",
            "What happens to old segments: delete by time and size, compact to the latest record "
            "of every key, both, or nothing (an empty list).",
            choices=("compact", "delete"), synonyms=_log("cleanup.policy"),
        ),
        ConfigDef(
            "compression.gzip.level", Kind.INT, "-1",
            "Level with which the broker compresses gzip; -1 is the codec's default.",
            low=1, high=9, also=(-1,), synonyms=(Synonym("compression.gzip.level"),),
        ),
        ConfigDef(
            "compression.lz4.level", Kind.INT, "9",
            "Level with which the broker compresses lz4.",
            low=1, high=17, synonyms=(Synonym("compression.lz4.level"),),
        ),
        ConfigDef(
            "compression.type", Kind.STRING, "producer",
            "Codec of the batches in the log; 'producer' keeps the producer's.",
            choices=("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
            synonyms=(Synonym("compression.type"),),
        ),
        ConfigDef(
            "compression.zstd.level", Kind.INT, "3",
            "Level with which the broker compresses zstd.",
            low=-131072, high=22, synonyms=(Synonym("compression.zstd.level"),),
        ),
        ConfigDef(
            "delete.retention.ms", Kind.LONG, "86400000",
            "How long a tombstone stays after the first pass that kept it: the time in which a "
            "consumer that reads from the start must be done to see every deletion.",
            low=0, synonyms=(Synonym("log.cleaner.delete.retention.ms"),),
        ),
        ConfigDef(
            "file.delete.delay.ms", Kind.LONG, "60000",
            "How long the files of a removed segment stay on disk.",
            low=0, synonyms=_log("segment.delete.delay.ms"),
        ),
        ConfigDef(
            "flush.messages", Kind.LONG, _MAX,
            "fsync after so many records; 1 makes every acknowledged record survive power loss.",
            low=1, synonyms=_log("flush.interval.messages"),
        ),
        ConfigDef(
            "flush.ms", Kind.LONG, _MAX,
            "fsync records that are older than this.",
            low=0, synonyms=_log("flush.interval.ms", ("flush.scheduler.interval.ms", 1)),
        ),
        ConfigDef(
            "follower.replication.throttled.replicas", Kind.LIST, "",
            "Replicas whose replication is throttled at the follower, as partition:broker, or '*'.",
            check=_throttled,
        ),
        ConfigDef(
            "index.interval.bytes", Kind.INT, "4096",
            "Bytes of log between two entries of the offset index.",
            low=0, synonyms=_log("index.interval.bytes"),
        ),
        ConfigDef(
            "leader.replication.throttled.replicas", Kind.LIST, "",
            "Replicas whose replication is throttled at the leader, as partition:broker, or '*'.",
            check=_throttled,
        ),
        ConfigDef(
            "local.retention.bytes", Kind.LONG, "-2",
            "Bytes kept locally of a topic with tiered storage; -2 follows retention.bytes.",
            low=-2, synonyms=_log("local.retention.bytes"), no_effect=_NO_TIERS,
        ),
        ConfigDef(
            "local.retention.ms", Kind.LONG, "-2",
            "Milliseconds kept locally of a topic with tiered storage; -2 follows retention.ms.",
            low=-2, synonyms=_log("local.retention.ms"), no_effect=_NO_TIERS,
        ),
        ConfigDef(
            "max.compaction.lag.ms", Kind.LONG, _MAX,
            "A record is compacted at the latest after this, whatever the dirty ratio.",
            low=1, synonyms=(Synonym("log.cleaner.max.compaction.lag.ms"),),
        ),
        ConfigDef(
            "max.message.bytes", Kind.INT, "1048588",
            "Largest record batch, compressed, with its header.",
            low=0, synonyms=(Synonym("message.max.bytes"),),
        ),
        ConfigDef(
            "message.timestamp.after.max.ms", Kind.LONG, "3600000",
            "How far in the future a record's timestamp may lie (CreateTime only).",
            low=0, synonyms=_log("message.timestamp.after.max.ms"),
        ),
        ConfigDef(
            "message.timestamp.before.max.ms", Kind.LONG, _MAX,
            "How far in the past a record's timestamp may lie (CreateTime only).",
            low=0, synonyms=_log("message.timestamp.before.max.ms"),
        ),
        ConfigDef(
            "message.timestamp.type", Kind.STRING, "CreateTime",
            "Whether records carry the producer's time or the broker's.",
            choices=("CreateTime", "LogAppendTime"), synonyms=_log("message.timestamp.type"),
        ),
        ConfigDef(
            "min.cleanable.dirty.ratio", Kind.DOUBLE, "0.5",
            "A log is compacted when the dirty share of its cleanable bytes is above this.",
            low=0, high=1, synonyms=(Synonym("log.cleaner.min.cleanable.ratio"),),
        ),
        ConfigDef(
            "min.compaction.lag.ms", Kind.LONG, "0",
            "A record stays uncompacted at least this long.",
            low=0, synonyms=(Synonym("log.cleaner.min.compaction.lag.ms"),),
        ),
        ConfigDef(
            "min.insync.replicas", Kind.INT, "1",
            "In-sync replicas that a produce with acks=all needs; capped by the replica count.",
            low=1, synonyms=(Synonym("min.insync.replicas"),),
        ),
        ConfigDef(
            "preallocate", Kind.BOOLEAN, "false",
            "Whether a new segment's file gets its full size at once.",
            synonyms=_log("preallocate"),
            no_effect="segments grow as they are written; file systems on Linux need no help.",
        ),
        ConfigDef(
            "remote.log.copy.disable", Kind.BOOLEAN, "false",
            "Whether a tiered topic stops copying segments away.", no_effect=_NO_TIERS,
        ),
        ConfigDef(
            "remote.log.delete.on.disable", Kind.BOOLEAN, "false",
            "Whether remote segments are deleted when tiering is turned off.", no_effect=_NO_TIERS,
        ),
        ConfigDef(
            "remote.storage.enable", Kind.BOOLEAN, "false",
            "Tiered storage for this topic.",
            refused="Tiered Storage functionality is disabled in the broker. "
            "Topic cannot be configured with remote log storage.",
        ),
        ConfigDef(
            "retention.bytes", Kind.LONG, "-1",
            "Bytes of a partition beyond which its oldest segments are deleted; -1: no limit.",
            synonyms=_log("retention.bytes"),
        ),
        ConfigDef(
            "retention.ms", Kind.LONG, "604800000",
            "Age at which segments are deleted; -1: no limit.",
            low=-1,
            synonyms=_log(
                "retention.ms", ("retention.minutes", _MINUTE), ("retention.hours", _HOUR)
            ),
        ),
        ConfigDef(
            "segment.bytes", Kind.INT, "1073741824",
            "Size at which a segment is closed and a new one begun.",
            low=MIN_SEGMENT_BYTES, synonyms=_log("segment.bytes"),
        ),
        ConfigDef(
            "segment.index.bytes", Kind.INT, "10485760",
            "Largest size of an index file; a full index closes the segment.",
            low=4, synonyms=_log("index.size.max.bytes"),
        ),
        ConfigDef(
            "segment.jitter.ms", Kind.LONG, "0",
            "Largest random time taken off segment.ms, so that segments do not all roll at once.",
            low=0, synonyms=_log("roll.jitter.ms", ("roll.jitter.hours", _HOUR)),
        ),
        ConfigDef(
            "segment.ms", Kind.LONG, "604800000",
            "Age at which a segment is closed even if it is not full.",
            low=1, synonyms=_log("roll.ms", ("roll.hours", _HOUR)),
        ),
        ConfigDef(
            "unclean.leader.election.enable", Kind.BOOLEAN, "false",
            "Whether a replica outside the ISR may lead when no other is left, losing records.",
            synonyms=(Synonym("unclean.leader.election.enable"),),
        ),
        ConfigDef(
            "kept.compaction.strategy", Kind.STRING, "latest",
            "Which records of a key survive compaction: latest, latest-n "
            "(kept.compaction.latest.n), highest-version (kept.compaction.version.header, "
            "else the timestamp), by-key-prefix (kept.compaction.prefixes), or the name "
            "of an entry point in the group kept.compaction.strategies.",
            check=_strategy,
        ),
        ConfigDef(
            "kept.compaction.latest.n", Kind.INT, None,
            "Records kept of each key by the strategy latest-n.",
            low=1, high=10_000,
        ),
        ConfigDef(
            "kept.compaction.version.header", Kind.STRING, None,
            "Header that holds a record's version for the strategy highest-version.",
            check=_not_blank,
        ),
        ConfigDef(
            "kept.compaction.prefixes", Kind.STRING, None,
            "Strategy by prefix of the key, the longest match wins, for the strategy "
            "by-key-prefix: user.=latest-n:3,cfg.=latest. Keys without a match keep their latest "
            "record.",
            check=_prefixes,
        ),
    ),
)  # fmt: skip
"""Every topic setting by name."""

_FIELDS: Final = {
    f"kept.{name}" if f"kept.{name}" in TOPIC_SETTINGS else name: f.name
    for f in fields(LogConfig)
    if (name := f.name.replace("_", ".")) != "raw"
}
"""Topic setting -> field of LogConfig."""


def validate_topic(
    overrides: Mapping[str, str],
    defaults: Mapping[str, str] | None = None,
    strategies: Collection[str] | None = None,
) -> dict[str, Any]:
    """Check a topic's own settings, alone and against each other and the broker's defaults.

    ``defaults`` are topic settings as the broker has them (``NodeConfig.topic_defaults``);
    ``strategies`` the names of installed strategies, None = any name goes. Returns all settings
    typed. Raises InvalidConfig.
    """
    for name in overrides:
        TOPIC_SETTINGS.find(name)
    given = TOPIC_SETTINGS.parse(overrides)
    values = _with_defaults(given, defaults)
    _check_lags(values)
    _check_local_retention(given, values)
    _check_strategy(given, values, strategies)
    return values


def _with_defaults(given: Mapping[str, Any], defaults: Mapping[str, str] | None) -> dict[str, Any]:
    values = {name: setting.parse_default() for name, setting in TOPIC_SETTINGS.items()}
    values.update(TOPIC_SETTINGS.parse(defaults or {}))
    values.update(given)
    return values


def _check_lags(values: Mapping[str, Any]) -> None:
    low, high = values["min.compaction.lag.ms"], values["max.compaction.lag.ms"]
    if low > high:
        raise InvalidConfig(
            "conflict topic config setting "
            f"min.compaction.lag.ms ({low}) > max.compaction.lag.ms ({high})"
        )


def _check_local_retention(given: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for unit in ("bytes", "ms"):
        local, whole = given.get(f"local.retention.{unit}", -2), values[f"retention.{unit}"]
        if whole < 0 or local == -2:
            continue
        if local == -1 or local > whole:
            why = (
                f"Value must not be -1 as retention.{unit} value is set as {whole}."
                if local == -1
                else f"Value must not be more than retention.{unit} property value: {whole}"
            )
            raise InvalidConfig(
                f"Invalid value {local} for configuration local.retention.{unit}: {why}"
            )


_STRATEGY_OPTIONS: Final = {
    "kept.compaction.latest.n": ("latest-n", True),
    "kept.compaction.version.header": ("highest-version", False),
    "kept.compaction.prefixes": ("by-key-prefix", True),
}
"""Option -> (the strategy that it belongs to, whether that strategy needs it)."""


def _check_strategy(
    given: Mapping[str, Any], values: Mapping[str, Any], strategies: Collection[str] | None
) -> None:
    strategy = values["kept.compaction.strategy"]
    known = {*BUILT_IN_STRATEGIES, *(strategies or ())}
    if strategies is not None and strategy not in known:
        near = nearest(strategy, known)
        raise InvalidConfig(
            f"Invalid value {strategy} for configuration kept.compaction.strategy: not built in "
            "and no entry point kept.compaction.strategies of that name is installed; there are "
            f"{', '.join(sorted(known))}" + (f" (did you mean {near}?)" if near else "")
        )
    for option, (owner, needed) in _STRATEGY_OPTIONS.items():
        if option in given and strategy != owner and strategy in BUILT_IN_STRATEGIES:
            raise InvalidConfig(
                f"conflict topic config setting {option} is for kept.compaction.strategy={owner}, "
                f"but the strategy is {strategy}"
            )
        if needed and strategy == owner and values[option] is None:
            raise InvalidConfig(f"kept.compaction.strategy={owner} needs {option}")


def log_config(
    topic_overrides: Mapping[str, str], broker_defaults: Mapping[str, str] | None = None
) -> LogConfig:
    """What a log of the topic uses. Raises InvalidConfig for a wrong value.

    ``raw`` of the result holds every other setting that has a value, as text. A name that does not
    exist is passed over: a newer version may have let it in, and the log must open all the same.
    """
    given = {name: text for name, text in topic_overrides.items() if name in TOPIC_SETTINGS}
    values = _with_defaults(TOPIC_SETTINGS.parse(given), broker_defaults)
    known = {field: values[name] for name, field in _FIELDS.items()}
    known["cleanup_policy"] = frozenset(known["cleanup_policy"])
    known["message_timestamp_type"] = (
        TimestampType.LOG_APPEND_TIME
        if known["message_timestamp_type"] == "LogAppendTime"
        else TimestampType.CREATE_TIME
    )
    raw = {
        name: text
        for name, value in values.items()
        if name not in _FIELDS and (text := TOPIC_SETTINGS[name].text(value)) is not None
    }
    return LogConfig(**known, raw=raw)


def default_from_broker(
    setting: ConfigDef, broker_settings: Mapping[str, ConfigDef], layers: Layers
) -> str | None:
    """The default that a broker's settings give a topic setting; None where they say nothing."""
    for _, given in layers:
        for synonym in setting.synonyms:
            if synonym.name in given and synonym.name in broker_settings:
                definition = broker_settings[synonym.name]
                value = definition.parse(given[synonym.name])
                return definition.text(_scaled(value, synonym.factor))
    return None


def _scaled(value: Any, factor: int) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and factor != 1 and value >= 0:
        return value * factor
    return value


def inherited_entries(broker_settings: Mapping[str, ConfigDef], layers: Layers) -> dict[str, Entry]:
    """Every topic setting, by name, of a topic that sets none itself.

    ``layers`` are the broker's settings, dynamic ones first.
    """
    found = {}
    for name in sorted(TOPIC_SETTINGS):
        setting = TOPIC_SETTINGS[name]
        synonyms = broker_synonyms(broker_settings, [s.name for s in setting.synonyms], layers)
        given = default_from_broker(setting, broker_settings, layers)
        value = setting.text(setting.parse_default()) if given is None else given
        source = synonyms[0].source if synonyms else Source.DEFAULT_CONFIG
        found[name] = Entry(setting, value, source, False, synonyms)
    return found


def describe_topic(overrides: Mapping[str, str], inherited: Mapping[str, Entry]) -> list[Entry]:
    """Every topic setting that has a value, with it, its source and synonyms, by name.

    ``overrides`` are the topic's own, ``inherited`` what it has without them. An optional setting
    that nobody set is left out: no setting of Apache Kafka's topics is null, and clients send what
    they were told back with AlterConfigs, which takes no null.
    """
    return [
        _overridden(entry, overrides[name]) if name in overrides else entry
        for name, entry in inherited.items()
        if name in overrides or entry.value is not None
    ]


def _overridden(entry: Entry, text: str) -> Entry:
    setting = entry.setting
    value = setting.text(setting.parse(text))
    own = SynonymEntry(setting.name, value, Source.DYNAMIC_TOPIC_CONFIG)
    return Entry(setting, value, own.source, False, (own, *entry.synonyms))
