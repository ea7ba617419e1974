"""Routes that change topics, records, offsets and settings, where ``kept.console.actions`` is true.

Each does what a Kafka request does, with that request's rights, and answers with the command line
that does the same.
"""

from __future__ import annotations

from typing import Any

from kept.node.http.messages import failure
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
async def _create_topic(_node: RouteContext, p: Parameters) -> Any:
    p.text("topic")
    return failure(501, "not there yet")


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
async def _alter_topic(_node: RouteContext, p: Parameters) -> Any:
    p.text("topic")
    return failure(501, "not there yet")


@route(
    "POST",
    "/api/v1/topics/delete",
    "topic",
    access=DELETE_TOPIC,
    needs_actions=True,
    travels=False,
)
async def _delete_topic(_node: RouteContext, p: Parameters) -> Any:
    p.text("topic")
    return failure(501, "not there yet")


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
    needs_actions=True,
    travels=False,
)
async def _produce(_node: RouteContext, p: Parameters) -> Any:
    p.text("topic")
    return failure(501, "not there yet")


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
    access=COMMIT_OFFSETS,
    needs_actions=True,
    travels=False,
)
async def _reset_offsets(_node: RouteContext, p: Parameters) -> Any:
    p.text("group")
    p.text("topic")
    return failure(501, "not there yet")


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
async def _alter_broker(_node: RouteContext, _p: Parameters) -> Any:
    return failure(501, "not there yet")
