"""DescribeConfigs, AlterConfigs and IncrementalAlterConfigs, for topics and brokers.

A change is in force when it is answered: the metadata log's subscribers have applied it. Broker
settings are asked of the broker by its id; "" stands for all brokers. Other resource types (client
metrics, groups, loggers) have no settings here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.client.protocol.messages import LazyArray, Values
from kept.cluster.controller import config_changes
from kept.cluster.controller.config_changes import AlterConfig, AlterOp
from kept.cluster.controller.topics import check_topic_name
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import MetadataRecord, ResourceType
from kept.node.config.config_def import Entry
from kept.node.config.definitions import BROKER_SETTINGS, TOPIC_SETTINGS
from kept.node.kafka.handlers.topics.config_schema import (
    broker_entries,
    default_broker_entries,
    entry_values,
    schema,
    topic_entries,
)
from kept.node.kafka.metadata_changes import Decided
from kept.node.runtime.error_codes import code_for, error_values, message_for
from kept.steps import Steps
from kept.storage.errors import InvalidRequest, KeptError, UnknownTopicOrPartition
from kept.storage.types import decimal_number

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.kafka.api import RequestContext
    from kept.node.kafka.metadata_changes import MetadataChanges
    from kept.node.metadata.metadata_log import MetadataLog

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,10}")
_OTHER_TYPES: Final = {8: "BROKER_LOGGER", 16: "CLIENT_METRICS", 32: "GROUP"}

Decision = Callable[[Image, Any], Sequence[MetadataRecord]]


@dataclass(frozen=True, slots=True)
class ConfigHandler:
    """The settings of topics and brokers."""

    config: LiveConfig
    metadata: MetadataLog
    metadata_changes: MetadataChanges

    def describe_configs(self, ctx: RequestContext, request: Any) -> Values:
        """DescribeConfigs v1-4, with sources, synonyms, types and documentation."""

        def described(resource: Any) -> Values:
            return self._describe(resource, request, ctx.api_version)

        # What is named twice is answered once: else a small request has an answer without bound.
        return {"results": LazyArray(_once(request.resources), described)}

    def _describe(self, resource: Any, request: Any, version: int) -> Values:
        code, message, entries = 0, "", []
        try:
            entries = self._entries(resource.resource_type, resource.resource_name)
        except KeptError as error:
            code, message = code_for(error), message_for(error)
            if isinstance(error, UnknownTopicOrPartition):
                message = ""
        # v1-3 say null for all settings, v4's default is the empty list, and Java sends null.
        keys = set(resource.configuration_keys or ())
        with_docs = version >= 3 and request.include_documentation

        def described(entry: Entry) -> Values:
            return _config(entry, request.include_synonyms, with_docs)

        wanted = [entry for entry in entries if not keys or entry.setting.name in keys]
        return {
            "error_code": code,
            "error_message": message,
            "resource_type": resource.resource_type,
            "resource_name": resource.resource_name,
            "configs": LazyArray(wanted, described),
        }

    def _entries(self, resource_type: int, name: str) -> list[Entry]:
        if resource_type == ResourceType.TOPIC:
            check_topic_name(name)
            if name not in self.metadata.image.topics:
                raise UnknownTopicOrPartition(f"Topic '{name}' does not exist.")
            return topic_entries(
                self.config.current, self.metadata.image.config(ResourceType.TOPIC, name)
            )
        if resource_type == ResourceType.BROKER:
            if not name:
                return default_broker_entries(self.metadata.image)
            self._check_broker_id(name, "Broker id", " or empty string")
            return broker_entries(self.config.current)
        raise _no_such_type(resource_type)

    def _check_broker_id(self, name: str, what: str, otherwise: str = "") -> None:
        if not _INTEGER.fullmatch(name):
            raise InvalidRequest(f"{what} must be an integer, but it is: {name}")
        if int(name) != self.config.current.node_id:
            raise InvalidRequest(
                f"Unexpected broker id, expected {self.config.current.node_id}{otherwise}, "
                f"but received {name}"
            )

    async def alter_configs(self, _ctx: RequestContext, request: Any) -> Values:
        """AlterConfigs v0-2: replace all settings of a resource."""

        def decision(image: Image, resource: Any) -> Sequence[MetadataRecord]:
            self._check_settings(image, resource)
            values = {entry.name: entry.value for entry in resource.configs}
            name = resource.resource_name
            return config_changes.alter_configs(
                image, resource.resource_type, name, values, schema(self.config.current, image)
            )

        return {"responses": await self._alter(request, decision)}

    async def incremental_alter_configs(self, _ctx: RequestContext, request: Any) -> Values:
        """IncrementalAlterConfigs v0-1: set, delete, append to or subtract from single settings."""

        def decision(image: Image, resource: Any) -> Sequence[MetadataRecord]:
            self._check_settings(image, resource, AlterOp.DELETE)
            changes = [
                AlterConfig(entry.name, _operation(entry.config_operation), entry.value)
                for entry in resource.configs
            ]
            name = resource.resource_name
            return config_changes.incremental_alter_configs(
                image, resource.resource_type, name, changes, schema(self.config.current, image)
            )

        return {"responses": await self._alter(request, decision)}

    def _check_settings(self, image: Image, resource: Any, nullable: AlterOp | None = None) -> None:
        """What comes before any decision: the resource exists, no setting twice, no null value."""
        resource_type, name = resource.resource_type, resource.resource_name
        if resource_type == ResourceType.TOPIC:
            if not name:
                raise InvalidRequest("Default topic resources are not allowed.")
            if name not in image.topics:
                raise UnknownTopicOrPartition(f"The topic '{name}' does not exist.")
        elif resource_type == ResourceType.BROKER:
            if name and decimal_number(name) not in image.brokers:
                self._check_broker_id(name, "Node id")
        else:
            raise _no_such_type(resource_type)
        if len(resource.configs) > len(TOPIC_SETTINGS) + len(BROKER_SETTINGS):
            raise InvalidRequest(
                f"{len(resource.configs)} config keys are more than there are settings"
            )
        if len({entry.name for entry in resource.configs}) != len(resource.configs):
            raise InvalidRequest("Error due to duplicate config keys")
        null = [
            entry.name
            for entry in resource.configs
            if entry.value is None and (nullable is None or entry.config_operation != nullable)
        ]
        if null:
            raise InvalidRequest(f"Null value not supported for : {','.join(sorted(null))}")

    async def _alter(self, request: Any, decision: Decision) -> list[Values]:
        """Decide for each resource; all changes that are legal become one entry."""
        counts = Counter((r.resource_type, r.resource_name) for r in request.resources)

        def decisions(image: Image) -> Steps[Decided[list[Values]]]:
            answers: list[Values] = []
            records: list[MetadataRecord] = []
            for resource in _once(request.resources):
                yield
                key = (resource.resource_type, resource.resource_name)
                answer = {"resource_type": key[0], "resource_name": key[1]}
                try:
                    if counts[key] > 1:
                        raise InvalidRequest("Each resource must appear at most once.")
                    more = decision(image, resource)
                    image, _ = image.apply(more)
                    records.extend(more)
                except KeptError as error:
                    answer |= error_values(error)
                else:
                    answer |= error_values(None)
                answers.append(answer)
            return answers, [] if request.validate_only else records

        return await self.metadata_changes.decide(decisions)


def _config(entry: Entry, with_synonyms: bool, with_docs: bool) -> Values:
    return {
        **entry_values(entry),
        "synonyms": [
            {"name": synonym.name, "value": synonym.value, "source": int(synonym.source)}
            for synonym in (entry.synonyms if with_synonyms else ())
        ],
        "config_type": int(entry.setting.kind),
        "documentation": entry.documentation if with_docs else None,
    }


def _no_such_type(resource_type: int) -> InvalidRequest:
    name = _OTHER_TYPES.get(resource_type)
    if name is None:
        return InvalidRequest(f"Unknown resource type {resource_type}")
    return InvalidRequest(f"Resource type {name} has no settings here; topics and brokers have.")


def _operation(number: int) -> AlterOp:
    try:
        return AlterOp(number)
    except ValueError:
        raise InvalidRequest(f"Unknown config operation {number}") from None


def _once(resources: Iterable[Any]) -> list[Any]:
    return list({(r.resource_type, r.resource_name): r for r in resources}.values())
