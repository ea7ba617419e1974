"""Which settings are legal on this node, and how they are described: for the handlers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

from kept.client.protocol.messages import Values
from kept.cluster.controller.config_changes import ConfigSchema
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import ResourceType
from kept.node.config.config_def import ConfigType, Entry, Source, broker_synonyms
from kept.node.config.definitions import BROKER_SETTINGS, TOPIC_SETTINGS
from kept.node.config.topic_config import describe_topic, inherited_entries, validate_topic
from kept.node.metadata import internal_topics
from kept.storage.errors import ConfigurationError, InvalidRequest

if TYPE_CHECKING:
    from kept.node.config.node_config import NodeConfig

ENTRY_POINTS: Final = "kept.compaction.strategies"
"""Entry point group of users' compaction strategies."""


@cache
def installed_strategies() -> frozenset[str]:
    """Names of the compaction strategies that are installed as entry points."""
    from importlib.metadata import entry_points

    return frozenset(point.name for point in entry_points(group=ENTRY_POINTS))


def check_topic(config: NodeConfig, values: Mapping[str, str]) -> None:
    """Raises InvalidConfig when a topic on this node may not have these settings together."""
    strategies = None if "kept.compaction.strategy" not in values else installed_strategies()
    validate_topic(values, config.topic_defaults(), strategies)


def check_broker(config: NodeConfig, image: Image, name: str, values: Mapping[str, str]) -> None:
    """Raises InvalidRequest when a broker (``name``: its id, "" = all) may not have these.

    Kafka answers a broker's wrong setting with INVALID_REQUEST, a topic's with INVALID_CONFIG. It
    accepts broker settings of any name; here an unknown one is refused.
    """
    for key in values:
        BROKER_SETTINGS.find(key)
    fixed = sorted(key for key in values if not BROKER_SETTINGS[key].dynamic)
    if fixed:
        raise InvalidRequest(f"Cannot update these configs dynamically: [{', '.join(fixed)}]")
    own = values if name else image.config(ResourceType.BROKER, str(config.node_id))
    default = image.config(ResourceType.BROKER, "") if name else values
    try:
        config.with_dynamic(own, default)
    except ConfigurationError as error:
        raise InvalidRequest(str(error)) from error


def schema(config: NodeConfig, image: Image) -> ConfigSchema:
    """The controller's view of what settings are legal beside those of the image."""

    def validate(resource_type: int, name: str, values: Mapping[str, str]) -> None:
        if resource_type == ResourceType.TOPIC:
            check_topic(config, values)
            internal_topics.check_change(name, image.config(ResourceType.TOPIC, name), values)
        else:
            check_broker(config, image, name, values)

    def is_list(resource_type: int, name: str) -> bool:
        settings = TOPIC_SETTINGS if resource_type == ResourceType.TOPIC else BROKER_SETTINGS
        return settings.find(name).kind is ConfigType.LIST

    def default(resource_type: int, name: str) -> str | None:
        if resource_type == ResourceType.TOPIC:
            return config.topic_defaults().get(name, TOPIC_SETTINGS[name].default)
        return config.text(name)

    return ConfigSchema(validate, is_list, default)


def topic_entries(config: NodeConfig, overrides: Mapping[str, str]) -> list[Entry]:
    """Every setting of a topic with these explicit ones."""
    return describe_topic(overrides, _inherited(config))


@lru_cache(maxsize=2)
def _inherited(config: NodeConfig) -> dict[str, Entry]:
    """What topics have of the broker; the same for all of them until its settings change."""
    return inherited_entries(BROKER_SETTINGS, config.layers)


def entry_values(entry: Entry) -> Values:
    """The fields that every response has of a setting."""
    return {
        "name": entry.setting.name,
        "value": entry.value,
        "read_only": entry.read_only,
        "config_source": int(entry.source),
        "is_sensitive": entry.setting.sensitive,
    }


def broker_entries(config: NodeConfig) -> list[Entry]:
    """Every setting of this broker."""
    entries = []
    for name in sorted(BROKER_SETTINGS):
        setting = BROKER_SETTINGS[name]
        synonyms = broker_synonyms(
            BROKER_SETTINGS, _BROKER_SYNONYMS.get(name, (name,)), config.layers
        )
        source = next((s.source for s in synonyms if s.name == name), Source.DEFAULT_CONFIG)
        value = None if setting.sensitive else config.text(name)
        entries.append(Entry(setting, value, source, not setting.dynamic, synonyms))
    return entries


def default_broker_entries(image: Image) -> list[Entry]:
    """The settings given to all brokers."""
    given = image.config(ResourceType.BROKER, "")
    layers = ((Source.DYNAMIC_DEFAULT_BROKER_CONFIG, given),)
    entries = []
    for name in sorted(given):
        setting = BROKER_SETTINGS.get(name)
        if setting is not None:
            synonyms = broker_synonyms({name: setting}, (name,), layers)[:1]
            value = None if setting.sensitive else setting.text(setting.parse(given[name]))
            entries.append(Entry(setting, value, layers[0][0], False, synonyms))
    return entries


_BROKER_SYNONYMS: Final = {
    setting.synonyms[0].name: tuple(synonym.name for synonym in setting.synonyms)
    for setting in TOPIC_SETTINGS.values()
    if setting.synonyms
}
"""Broker setting -> itself and the weaker settings that can give it a value."""
