"""Requests about quotas of clients, and what their responses say of waiting."""

from __future__ import annotations

from typing import Any

from kept.client.protocol.api_keys import ApiKey
from kept.storage.records import build_batch
from tests.support.kafka_connection import Connection


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
    partition = {"index": 0, "records": records}
    connection.send(
        ApiKey.PRODUCE, version, transactional_id=None, acks=acks, timeout=30_000,
        topic_data=[{"name": topic, "partition_data": [partition]}],
    )  # fmt: skip


def throttle_ms(response: Any) -> int:
    return int(response.throttle_time.total_seconds() * 1000)


def fetch(connection: Connection, topic: str, offset: int = 0, version: int = 11) -> Any:
    wanted = {
        "partition": 0, "current_leader_epoch": -1, "fetch_offset": offset,
        "log_start_offset": -1, "partition_max_bytes": 1 << 30,
    }  # fmt: skip
    return connection.ask(
        ApiKey.FETCH, version, replica_id=-1, max_wait=0, min_bytes=1, max_bytes=1 << 30,
        isolation_level=0, session_id=0, session_epoch=0,
        topics=[{"topic": topic, "partitions": [wanted]}], forgotten_topics_data=[], rack_id="",
    )  # fmt: skip


def create(connection: Connection, version: int, name: str, partitions: int) -> Any:
    topic = {
        "name": name, "num_partitions": partitions, "replication_factor": 1, "assignments": [],
        "configs": [],
    }  # fmt: skip
    return connection.ask(
        ApiKey.CREATE_TOPICS, version, topics=[topic], timeout=30_000, validate_only=False
    )
