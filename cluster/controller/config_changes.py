"""Decisions on settings: the full and the incremental way to alter them. Pure functions.

Rules as in ``ConfigurationControlManager``: an incremental change starts from the value in force
(for APPEND and SUBTRACT the default, when nothing was set), a full one forgets what it does not
name. What names and values are legal is the caller's knowledge (``kept.node.config.topic_config``),
given as a :class:`ConfigSchema`.

One fact is noted beside the settings: that a topic was compacted and is not any more
(:func:`was_compacted`). It is no setting: nobody can alter it, and it goes with the topic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Final

from msgspec import Struct

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import ConfigRecord, MetadataRecord, ResourceType
from kept.storage.errors import (
    BrokerIdNotRegistered,
    InvalidConfig,
    InvalidRequest,
    UnknownTopicOrPartition,
)
from kept.storage.types import decimal_number

MAX_VALUE_BYTES: Final = 32_767
"""Kafka's limit for a value, here in bytes of UTF-8: a STRING of its protocol holds no more."""

POLICY: Final = "cleanup.policy"
COMPACT: Final = "compact"
COMPACTED: Final = "kept.compacted.before"
"""What the fact is called among the records of a topic's settings."""


class AlterOp(IntEnum):
    """What an incremental change does to a setting; Kafka's numbers."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class AlterConfig(Struct, frozen=True):
    """One setting's incremental change."""

    name: str
    op: AlterOp
    value: str | None = None


class ConfigSchema(Struct, frozen=True):
    """What the decisions must know of settings.

    ``validate(resource_type, resource_name, values)`` raises InvalidConfig when those values, which
    are all explicit ones after the change, may not be in force together. ``is_list`` says whether
    APPEND and SUBTRACT make sense, ``default`` gives the value in force when none is set.
    """

    validate: Callable[[int, str, Mapping[str, str]], None]
    is_list: Callable[[int, str], bool]
    default: Callable[[int, str], str | None]


def incremental_alter_configs(
    image: Image,
    resource_type: int,
    resource_name: str,
    changes: Sequence[AlterConfig],
    schema: ConfigSchema,
) -> list[MetadataRecord]:
    """Records for SET, DELETE, APPEND and SUBTRACT on one resource.

    Raises InvalidRequest for a setting named twice, InvalidConfig, UnknownTopicOrPartition,
    BrokerIdNotRegistered.
    """
    check_resource(image, resource_type, resource_name)
    counts = Counter(change.name for change in changes)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise InvalidRequest(
            f"Error due to duplicate config keys for {resource_name!r}: {', '.join(twice)}"
        )
    current = settings_given(image, resource_type, resource_name)
    values = dict(current)
    for change in changes:
        value = _changed(resource_type, change, values.get(change.name), schema)
        if value is None:
            values.pop(change.name, None)
        else:
            values[change.name] = value
    schema.validate(resource_type, resource_name, values)
    return [
        *_difference(resource_type, resource_name, current, values),
        *_compacted_before(image, resource_type, resource_name, values, schema),
    ]


def alter_configs(
    image: Image,
    resource_type: int,
    resource_name: str,
    configs: Mapping[str, str | None],
    schema: ConfigSchema,
) -> list[MetadataRecord]:
    """Leave one resource with exactly these settings, null ones unset (the legacy AlterConfigs)."""
    check_resource(image, resource_type, resource_name)
    values = {name: value for name, value in configs.items() if value is not None}
    for name, value in values.items():
        check_value(name, value)
    schema.validate(resource_type, resource_name, values)
    current = settings_given(image, resource_type, resource_name)
    return [
        *_difference(resource_type, resource_name, current, values),
        *_compacted_before(image, resource_type, resource_name, values, schema),
    ]


def was_compacted(image: Image, topic: str) -> bool:
    """Whether the topic was compacted, and then its policy was altered: replicas of it that are
    away may have been compacted, though nothing says so here.
    """
    return COMPACTED in image.config(ResourceType.TOPIC, topic)


def settings_given(image: Image, resource_type: int, resource_name: str) -> dict[str, str]:
    """The settings given explicitly, without :data:`COMPACTED`, which is none."""
    given = image.config(resource_type, resource_name)
    return {name: value for name, value in given.items() if name != COMPACTED}


def check_resource(image: Image, resource_type: int, resource_name: str) -> None:
    """Whether the resource exists: a topic, a broker by its id, or "" for all brokers. Raises
    UnknownTopicOrPartition, BrokerIdNotRegistered, InvalidRequest.
    """
    if resource_type == ResourceType.TOPIC:
        if resource_name not in image.topics:
            raise UnknownTopicOrPartition(f"Topic '{resource_name}' does not exist.")
    elif resource_type == ResourceType.BROKER:
        if not resource_name:
            return
        broker_id = decimal_number(resource_name)
        if broker_id is None:
            raise InvalidRequest(f"Broker id '{resource_name}' is not a number.")
        if broker_id not in image.brokers:
            raise BrokerIdNotRegistered(f"Broker {resource_name} is not registered.")
    else:
        raise InvalidRequest(f"Resource type {resource_type} has no settings here.")


def _compacted_before(
    image: Image, resource_type: int, topic: str, after: Mapping[str, str], schema: ConfigSchema
) -> list[MetadataRecord]:
    """The fact, when the topic is compacted until now."""
    if resource_type != ResourceType.TOPIC or was_compacted(image, topic):
        return []
    default = schema.default(resource_type, POLICY)
    policies = (
        _parts(values.get(POLICY) or default or "")
        for values in (image.config(resource_type, topic), after)
    )
    if [COMPACT in policy for policy in policies] != [True, False]:
        return []
    return [ConfigRecord(ResourceType.TOPIC, topic, COMPACTED, "true")]


def _changed(
    resource_type: int, change: AlterConfig, current: str | None, schema: ConfigSchema
) -> str | None:
    if change.op is AlterOp.DELETE:
        return None
    if change.value is None:
        raise InvalidRequest(f"Null value not supported for {change.op.name} of {change.name}.")
    if change.op is AlterOp.SET:
        value = change.value
    else:
        if not schema.is_list(resource_type, change.name):
            raise InvalidConfig(
                f"Can't {change.op.name} to key {change.name} because its type is not LIST."
            )
        if current is None:
            current = schema.default(resource_type, change.name)
        check_value(change.name, change.value)
        parts, given = _parts(current or ""), _parts(change.value)
        if change.op is AlterOp.SUBTRACT:
            gone = set(given)
            parts = [part for part in parts if part not in gone]
        else:
            present = set(parts)
            parts += [part for part in dict.fromkeys(given) if part not in present]
        value = ",".join(parts)
    check_value(change.name, value)
    return value


def _parts(value: str) -> list[str]:
    return [part for part in map(str.strip, value.split(",")) if part]


def check_value(name: str, value: str) -> None:
    """Raises InvalidConfig for a value that is too long to be recorded and answered."""
    if len(value) > MAX_VALUE_BYTES or len(value.encode()) > MAX_VALUE_BYTES:
        raise InvalidConfig(
            f"The value of {name} exceeds the maximum size of {MAX_VALUE_BYTES} bytes."
        )


def _difference(
    resource_type: int, resource_name: str, before: Mapping[str, str], after: Mapping[str, str]
) -> list[MetadataRecord]:
    return [
        ConfigRecord(resource_type, resource_name, name, after.get(name))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
