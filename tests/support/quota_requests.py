"""Requests about quotas of clients, and what their responses say of waiting."""

from __future__ import annotations

from typing import Any

from kept.client.protocol.api_keys import ApiKey
from kept.storage.records import build_batch
from tests.support.kafka_connection import Connection
from tests.support.request_values import fetch_values, produce_values, topic_values


def alter(connection: Connection, names: dict[str, str | None], **ops: float | None) -> Any:
    entity = [{"entity_type": kind, "entity_name": name} for kind, name in names.items()]
    changes = [
        {"key": key, "value": value or 0.0, "remove": value is None} for key, value in ops.items()
    ]
    entry = {"entity": entity, "ops": changes}
    answer = connection.ask(
        ApiKey.ALTER_CLIENT_QUOTAS, 1, entries=[entry], validate_only=False
    ).entries[0]
    return int(answer.error_code), answer.error_message


def produce(connection: Connection, topic: str, size: int, acks: int = 1, version: int = 9) -> None:
    """Send a batch of ``size`` bytes of value; its response is read later."""
    records = build_batch([(1, b"k", bytes(size), ())])
    connection.send(ApiKey.PRODUCE, version, **produce_values(topic, records, acks=acks))


def throttle_ms(response: Any) -> int:
    return int(response.throttle_time.total_seconds() * 1000)


def fetch(connection: Connection, topic: str, offset: int = 0, version: int = 11) -> Any:
    values = fetch_values(
        topic, offset, partition_max_bytes=1 << 30, max_bytes=1 << 30, session_epoch=0
    )
    return connection.ask(ApiKey.FETCH, version, **values)


def create(connection: Connection, version: int, name: str, partitions: int) -> Any:
    topics = [topic_values(name, partitions)]
    return connection.ask(
        ApiKey.CREATE_TOPICS, version, topics=topics, timeout=30_000, validate_only=False
    )
