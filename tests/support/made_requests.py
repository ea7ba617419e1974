"""Requests of every API that say something in each field, made from the schemas."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final, get_args, get_origin, get_type_hints

NUMBERS: Final = {
    "replica_id": -1,
    "session_epoch": -1,
    "max_bytes": 1 << 20,
    "partition_max_bytes": 1,
    "current_leader_epoch": -1,
    "committed_leader_epoch": -1,
    "acks": 1,
    "timeout": 1000,
    "max_wait": 0,
    "session_timeout": 10_000,
    "rebalance_timeout": 10_000,
    "resource_type": 2,
    "num_partitions": 1,
    "replication_factor": 1,
    "count": 1,
    "response_partition_limit": 1 << 30,
    "generation_id_or_member_epoch": -1,
    "generation_id": -1,
    "member_epoch": -1,
    "timestamp": -1,
    "last_fetched_epoch": -1,
    "log_start_offset": -1,
    "retention_time": -1,
    "endpoint_type": 1,
    "resource_type_filter": 1,
    "pattern_type_filter": 1,
    "operation": 1,
    "permission_type": 1,
    "producer_id": -1,
    "producer_epoch": -1,
    "transaction_timeout": 1000,
    "broker_id": 77,
    "voter_id": 77,
    "leader_epoch": 0,
    "broker_ids": 0,
    "replicas": 0,
    "port": 1,
}
"""Fields that mean something only with such a value; all others count up."""


def made(cls: Any, name: str) -> dict[str, Any]:
    """Values of a message with one element in each array, whose texts are ``name``."""
    hints = get_type_hints(cls)
    values = {}
    for field in fields(cls):
        kind = str(field.metadata.get("kafka_type", "entity"))
        hint = hints[field.name]
        inner = next((arg for arg in (hint, *get_args(hint)) if get_origin(arg) is tuple), None)
        if inner is not None:
            element = get_args(inner)[0]
            values[field.name] = [
                made(element, name)
                if hasattr(element, "__dataclass_fields__")
                else _value(field.name, kind, name)
            ]
        elif "tag" not in field.metadata and kind != "entity":
            values[field.name] = _value(field.name, kind, name)
    return values


def about_each(values: Any, name: str, names: tuple[str, ...]) -> Any:
    """What was made of ``name``, of each of ``names`` in their order: in each array, alike within
    an element.
    """

    def named(value: Any, other: str) -> Any:
        if isinstance(value, list):
            return about_each(value, name, names)
        return other if value == name else value

    if isinstance(values, list) and "'" + name + "'" in repr(values):
        (one,) = values
        if not isinstance(one, dict):
            return list(names)
        return [{key: named(value, other) for key, value in one.items()} for other in names]
    if isinstance(values, dict):
        return {key: named(value, names[0]) for key, value in values.items()}
    return values


def _value(field: str, kind: str, name: str) -> Any:
    if kind == "string":
        return name
    if kind == "uuid":
        return None
    if kind == "bool":
        return False
    if kind in ("bytes", "records"):
        return b"none"
    return NUMBERS.get(field, 0)
