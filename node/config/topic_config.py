"""A topic's settings together: what may be set, what a log uses of it, and where it comes from.

:func:`validate_topic` says what may be set, :func:`log_config` turns settings into what a log
uses, :func:`describe_topic` shows each with its source and synonyms. The settings themselves are in
``kept.node.config.definitions``. Where we differ from Kafka: ``segment.bytes`` from 1024 instead of
1 MiB; a ``local.retention.*`` above ``retention.*`` is refused also without tiered storage, and
tiered storage itself is not there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Final

from kept.node.config.checks import BUILT_IN_STRATEGIES
from kept.node.config.config_def import (
    ConfigDef,
    Entry,
    Layers,
    Source,
    SynonymEntry,
    broker_synonyms,
    nearest,
)
from kept.node.config.definitions import TOPIC_SETTINGS
from kept.storage.errors import InvalidConfig
from kept.storage.types import LogConfig, TimestampType

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
    entries = {}
    for name in sorted(TOPIC_SETTINGS):
        setting = TOPIC_SETTINGS[name]
        synonyms = broker_synonyms(broker_settings, [s.name for s in setting.synonyms], layers)
        given = default_from_broker(setting, broker_settings, layers)
        value = setting.text(setting.parse_default()) if given is None else given
        source = synonyms[0].source if synonyms else Source.DEFAULT_CONFIG
        entries[name] = Entry(setting, value, source, False, synonyms)
    return entries


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
