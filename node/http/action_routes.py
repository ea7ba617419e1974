"""Routes that change topics, records, offsets and settings, where ``kept.console.actions`` is true.

Each does what a Kafka request does, with that request's rights, and answers with the command line
that does the same.
"""

from __future__ import annotations

from typing import Any, Final

from kept.node.admin.actions.cluster_actions import Caller, ResetTarget
from kept.node.admin.records.partition_records import NewRecord
from kept.node.admin.records.record_browser import MAX_HEADERS
from kept.node.http.parameters import Parameters
from kept.node.http.route_access import (
    ALTER_CLUSTER_CONFIGS,
    COMMIT_OFFSETS,
    CREATE_TOPIC,
    DELETE_TOPIC,
    WRITE_TOPIC,
    partitions_and_configs,
)
from kept.node.http.route_table import RouteContext, route
from kept.storage.errors import InvalidRequest
from kept.storage.types import MAX_INT32

MAX_INT16: Final = 2**15 - 1
"""Kafka's replication factor is an int16."""


def _topic_name(p: Parameters) -> list[str]:
    return [p.text("topic")]


def _reset_names(p: Parameters) -> list[str]:
    return [] if p.flag("dry_run") else [f"{p.text('group')} {p.text('topic')}"]


@route(
    "POST",
    "/api/v1/topics/create",
    "topic",
    "partitions",
    "replication_factor",
    "config",
    "validate_only",
    access=CREATE_TOPIC,
    needs_actions=True,
    travels=False,
)
async def _create_topic(node: RouteContext, p: Parameters) -> Any:
    return await node.services.actions.create_topic(
        _caller(p),
        p.text("topic"),
        partitions=_positive(p, "partitions", MAX_INT32),
        replication_factor=_positive(p, "replication_factor", MAX_INT16),
        config=p.settings("config"),
        validate_only=p.flag("validate_only"),
    )


@route(
    "POST",
    "/api/v1/topics/alter",
    "topic",
    "partitions",
    "set",
    "delete",
    access=partitions_and_configs,
    needs_actions=True,
    travels=False,
)
async def _alter_topic(node: RouteContext, p: Parameters) -> Any:
    return await node.services.actions.alter_topic(
        _caller(p),
        p.text("topic"),
        partitions=_positive(p, "partitions", MAX_INT32),
        changes=p.settings("set"),
        delete=p.texts("delete"),
    )


@route(
    "POST",
    "/api/v1/topics/delete",
    "topic",
    access=DELETE_TOPIC,
    needs_actions=True,
    travels=False,
)
async def _delete_topic(node: RouteContext, p: Parameters) -> Any:
    return await node.services.actions.delete_topic(_caller(p), p.text("topic"))


@route(
    "POST",
    "/api/v1/produce",
    "topic",
    "partition",
    "key",
    "key_base64",
    "value",
    "value_base64",
    "headers",
    "timestamp",
    access=WRITE_TOPIC,
    changes=_topic_name,
    needs_actions=True,
    travels=False,
    draws_on="produce",
)
async def _produce(node: RouteContext, p: Parameters) -> Any:
    timestamp = p.optional_number("timestamp")
    record = NewRecord(
        node.services.runtime.now_ms() if timestamp is None else timestamp,
        p.key(),
        p.data("value"),
        p.headers("headers", MAX_HEADERS),
    )
    return await node.services.actions.produce(
        _caller(p),
        p.text("topic"),
        record,
        partition=p.optional_number("partition"),
        stamped=timestamp is not None,
    )


@route(
    "POST",
    "/api/v1/groups/reset-offsets",
    "group",
    "topic",
    "partition",
    "to",
    "offset",
    "timestamp",
    "dry_run",
    large=True,
    access=COMMIT_OFFSETS,
    changes=_reset_names,
    needs_actions=True,
    travels=False,
)
async def _reset_offsets(node: RouteContext, p: Parameters) -> Any:
    target = ResetTarget(
        to=p.text("to") if "to" in p.given else None,
        offset=p.optional_number("offset"),
        timestamp=p.optional_number("timestamp"),
    )
    return await node.services.actions.reset_offsets(
        _caller(p),
        p.text("group"),
        p.text("topic"),
        partition=p.optional_number("partition"),
        target=target,
        dry_run=p.flag("dry_run"),
    )


@route(
    "POST",
    "/api/v1/brokers/config",
    "broker",
    "set",
    "delete",
    access=ALTER_CLUSTER_CONFIGS,
    needs_actions=True,
    travels=False,
)
async def _alter_broker(node: RouteContext, p: Parameters) -> Any:
    return await node.services.actions.alter_broker(
        _caller(p),
        p.optional_number("broker"),
        changes=p.settings("set"),
        delete=p.texts("delete"),
    )


def _positive(p: Parameters, name: str, most: int) -> int | None:
    """A number from 1 on, if it is there. Raises InvalidRequest."""
    value = p.optional_number(name)
    if value is not None and not 1 <= value <= most:
        raise InvalidRequest(f"{name} must be 1 to {most}, not {value}")
    return value


def _caller(p: Parameters) -> Caller:
    return Caller(p.request.session, p.request.address, p.request.usage)
