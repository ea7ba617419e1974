"""Quotas of clients, by Kafka's protocol: set, described, and what over them happens."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.request import urlopen

import pytest

from kept.client.protocol.api_keys import ApiKey
from kept.testing import Cluster
from tests.support.kafka_connection import Connection
from tests.support.quota_requests import alter, create, fetch, produce, throttle_ms
from tests.support.request_values import fetch_values

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def connection(node: Cluster) -> Iterator[Connection]:
    made = Connection(node.bootstrap)
    yield made
    clear(node)
    made.close()


def described(connection: Connection, *components: tuple[str, int, str | None]) -> Any:
    answer = connection.ask(
        ApiKey.DESCRIBE_CLIENT_QUOTAS,
        1,
        components=[
            {"entity_type": kind, "match_type": match_type, "match": match}
            for kind, match_type, match in components
        ],
        strict=False,
    )
    return int(answer.error_code), {
        tuple((part.entity_type, part.entity_name) for part in entry.entity): {
            value.key: value.value for value in entry.values
        }
        for entry in answer.entries or ()
    }


def has(connection: Connection, *entities: Any) -> bool:
    """Whether the node that it reaches has quotas of these entities and no others."""
    return set(described(connection)[1]) == set(entities)


def clear(node: Cluster) -> None:
    connection = Connection(node.bootstrap)
    for of, values in described(connection)[1].items():
        assert alter(connection, dict(of), **dict.fromkeys(values)) == (0, None)
    connection.close()


def test_quotas_are_set_described_and_taken_back(connection: Connection) -> None:
    assert described(connection) == (0, {})
    assert alter(connection, {"user": "ada", "client-id": None}, producer_byte_rate=1024) == (
        0,
        None,
    )
    assert alter(connection, {"ip": "127.0.0.9"}, connection_creation_rate=5) == (0, None)
    both = (("client-id", None), ("user", "ada"))
    assert described(connection, ("user", 0, "ada")) == (0, {both: {"producer_byte_rate": 1024.0}})
    assert described(connection, ("ip", 2, None))[1] == {
        (("ip", "127.0.0.9"),): {"connection_creation_rate": 5.0}
    }
    assert alter(connection, {"user": "ada"}, producer_byte_rate=-1) == (
        42,
        "Quota producer_byte_rate must be greater than 0",
    )
    assert described(connection, ("group", 0, "x")) == (35, {})
    assert described(connection, ("user", 0, None)) == (42, {})
    assert alter(connection, {"user": "ada", "client-id": None}, producer_byte_rate=None) == (
        0,
        None,
    )
    assert described(connection, ("user", 2, None)) == (0, {})


@pytest.mark.parametrize(
    ("version", "names"),
    [(7, {"client-id": "scenario"}), (9, {"client-id": "scenario", "user": "ANONYMOUS"})],
)
def test_producers_are_told_to_wait_and_then_are_not_read(
    node: Cluster, connection: Connection, version: int, names: dict[str, str | None]
) -> None:
    topic = node.create_topic()
    assert alter(connection, names, producer_byte_rate=10_000) == (0, None)
    produce(connection, topic, 60_000, version=version)
    assert throttle_ms(connection.receive()) == 0
    produce(connection, topic, 50_000, version=version)
    produce(connection, topic, 10, version=version)
    first = connection.receive()
    assert first.responses[0].partition_responses[0].base_offset == 1, "it was appended"
    assert 500 < throttle_ms(first) < 2500
    before = time.monotonic()
    second = connection.receive()
    assert time.monotonic() - before > throttle_ms(first) / 1000 - 0.2
    assert second.responses[0].partition_responses[0].base_offset == 2
    assert throttled(node)["produce"] > 0.5


def test_acks_0_is_held_back_too(node: Cluster, connection: Connection) -> None:
    topic = node.create_topic()
    assert alter(connection, {"user": "ANONYMOUS"}, producer_byte_rate=10_000) == (0, None)
    produce(connection, topic, 150_000, acks=0)
    connection.send(ApiKey.API_VERSIONS, 0)
    assert not connection.is_answered(1.0), "muted: nothing is read"
    other = Connection(node.bootstrap)
    assert other.ask(ApiKey.API_VERSIONS, 0).error_code == 0, "another connection goes on"
    other.close()
    assert connection.is_answered(30)
    connection.response(ApiKey.API_VERSIONS, 0)


def test_fetches_beyond_the_rate_are_empty(node: Cluster, connection: Connection) -> None:
    topic = node.create_topic()
    for _ in range(4):
        produce(connection, topic, 40_000)
        connection.receive()
    assert alter(connection, {"user": None}, consumer_byte_rate=10_000) == (0, None)
    first = fetch(connection, topic)
    records = first.responses[0].partitions[0].records
    assert throttle_ms(first) == 0 and 40_000 < len(records) <= 100_000, "ten seconds' worth"
    empty = fetch(connection, topic, 2)
    assert throttle_ms(empty) > 500 and not empty.responses and empty.session_id == 0
    before = time.monotonic()
    clear_other = Connection(node.bootstrap)
    assert alter(clear_other, {"user": None}, consumer_byte_rate=None) == (0, None)
    clear_other.close()
    assert len(fetch(connection, topic, 2).responses[0].partitions[0].records) > 40_000
    assert time.monotonic() - before > throttle_ms(empty) / 1000 - 0.2


def test_a_muted_connection_gets_the_answer_of_its_parked_fetch(
    node: Cluster, connection: Connection
) -> None:
    topic = node.create_topic()
    assert alter(connection, {"client-id": "scenario"}, producer_byte_rate=1000) == (0, None)
    connection.send(ApiKey.FETCH, 11, **fetch_values(topic, session_epoch=0, max_wait=30_000))
    produce(connection, topic, 100_000)
    assert connection.receive().responses[0].partitions[0].records
    assert throttle_ms(connection.receive()) > 30_000
    connection.send(ApiKey.API_VERSIONS, 0)
    assert not connection.is_answered(0.5)


def test_changes_of_metadata_are_refused_beyond_the_rate(
    node: Cluster, connection: Connection
) -> None:
    assert alter(connection, {"client-id": "scenario"}, controller_mutation_rate=0.5) == (0, None)
    made = create(connection, 7, "burst", 8)
    assert int(made.topics[0].error_code) == 0 and throttle_ms(made) == 0
    refused = create(connection, 7, "more", 1)
    assert int(refused.topics[0].error_code) == 89 and 1000 < throttle_ms(refused) <= 5000
    later = create(connection, 7, "more", 1)
    assert int(later.topics[0].error_code) == 0, "it was read after the time that was told"
    told = create(connection, 5, "old", 3)
    assert int(told.topics[0].error_code) == 0 and throttle_ms(told) > 2000
    assert throttled(node)["controller_mutation"] > 3


def test_time_of_the_loop_is_counted(node: Cluster, connection: Connection) -> None:
    assert alter(connection, {"client-id": "scenario"}, request_percentage=0.0001) == (0, None)
    for _ in range(50):
        answer = connection.ask(ApiKey.METADATA, 9, topics=None)
        if throttle_ms(answer):
            break
    assert 0 < throttle_ms(answer) <= 1000


def test_any_of_three_nodes_takes_quotas_and_all_hold_clients_to_them() -> None:
    with Cluster(3) as nodes:
        topic = nodes.create_topic(partitions=1, replication_factor=3)
        several = [Connection(nodes.bootstrap.split(",")[i]) for i in range(3)]
        for number, connection in enumerate(several):
            of: dict[str, str | None] = {"user": f"user-{number}"}
            assert alter(connection, of, producer_byte_rate=1000 + number) == (0, None)
            refused = alter(connection, of, producer_byte_rate=-1)
            assert refused == (42, "Quota producer_byte_rate must be greater than 0")
        wanted: dict[Any, Any] = {
            (("user", f"user-{number}"),): {"producer_byte_rate": 1000.0 + number}
            for number in range(3)
        }
        for connection in several:
            nodes.wait_until(partial(has, connection, *wanted), "quotas on every node")
        of = {"client-id": "scenario"}
        assert alter(several[0], of, producer_byte_rate=1000) == (0, None)
        wanted[tuple(of.items())] = {"producer_byte_rate": 1000.0}
        for connection in several:
            nodes.wait_until(partial(has, connection, *wanted), "its image has it")
            produce(connection, topic, 30_000)
            assert throttle_ms(connection.receive()) > 1000, "leader or not"
        for connection in several:
            connection.close()


def throttled(node: Cluster) -> dict[str, float]:
    """Seconds that clients were told to wait, by kind."""
    with urlopen(f"http://{node.bootstrap}/metrics") as response:
        text = response.read().decode()
    rows = re.findall(r'kept_throttled_seconds_total\{kind="(\w+)"\} (\S+)', text)
    return {kind: float(value) for kind, value in rows}
