"""Quotas beside Apache Kafka: the same throttle times, and the same answers to its own tools."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from kept.client.protocol import messages as protocol
from kept.client.protocol.api_keys import ApiKey
from kept.testing import Cluster
from kept.testing.ports import free_port
from tests.support.kafka_connection import Connection
from tests.support.quota_requests import alter, create, produce, throttle_ms

pytestmark = [pytest.mark.java, pytest.mark.slow, pytest.mark.timeout(900)]
CONFIGS = "kafka.admin.ConfigCommand"
PERF = "org.apache.kafka.tools.ProducerPerformance"
WINDOW_S = 10
"""The shortest time that a rate is taken over: what is younger counts in full."""
ATTEMPTS = 4


@contextmanager
def both(kafka_dist: ModuleType, directory: Path) -> Iterator[tuple[str, str]]:
    """Where a node of kept and one of Apache Kafka are reached."""
    with (
        Cluster() as cluster,
        kafka_dist.Broker(directory, free_port(above=[1])) as broker,
    ):
        yield cluster.bootstrap, broker.bootstrap


class Told(NamedTuple):
    """The throttle times that a client was told, in ms, and whether all that they count came within
    one window: where a broker took seconds for something, they say how slow it was.
    """

    throttle_ms: list[int]
    in_window: bool


def produced(bootstrap: str) -> Told:
    """What a producer is told at 20 kB a second. It goes over the rate twice; then the window has
    passed.
    """
    connection = Connection(bootstrap)
    # Kafka's broker follows its controller: what knows the topic knows the quota that came before.
    assert alter(connection, {"client-id": "scenario"}, producer_byte_rate=20_000) == (0, None)
    create(connection, 7, "produced", 1)
    told, answered = [], []
    began = time.monotonic()
    for size in (90_000, 90_000, 130_000, 90_000, 90_000):
        produce(connection, "produced", size, version=9)
        told.append(throttle_ms(connection.receive()))
        answered.append(time.monotonic() - began)
    assert alter(connection, {"client-id": "scenario"}, producer_byte_rate=None) == (0, None)
    connection.close()
    return Told(told, answered[3] < WINDOW_S)


def changed(bootstrap: str) -> Told:
    """What a client is told that makes topics of four partitions at a quarter of one a second."""
    connection = Connection(bootstrap)
    rate = {"client-id": "scenario"}
    assert alter(connection, rate, controller_mutation_rate=0.25) == (0, None)
    told = [throttle_ms(create(connection, 7, f"changed-{number}", 4)) for number in range(3)]
    told.append(throttle_ms(create(connection, 5, "changed-old", 4)))
    assert alter(connection, rate, controller_mutation_rate=None) == (0, None)
    connection.close()
    return Told(told, True)


def told_by_kafka(load: Callable[[str], Told], bootstrap: str) -> list[int]:
    """What Kafka says where its JVM, which has just started, was fast enough to say it."""
    for _ in range(ATTEMPTS):
        told = load(bootstrap)
        if told.in_window:
            return told.throttle_ms
        print("Kafka missed the window:", told.throttle_ms)
        time.sleep(WINDOW_S + 1)  # the window of what was just sent
    pytest.fail(f"Kafka missed the window {ATTEMPTS} times: this machine is too slow to compare")


@pytest.mark.parametrize("load", [produced, changed])
def test_throttle_times_are_kafkas(
    kafka_dist: ModuleType, tmp_path: Path, load: Callable[[str], Told]
) -> None:
    with both(kafka_dist, tmp_path) as (ours, kafkas):
        told, expected = load(ours).throttle_ms, told_by_kafka(load, kafkas)
    print(load.__name__, told, expected)
    assert any(expected), "Kafka held nobody back: the load says nothing"
    assert [ms > 0 for ms in told] == [ms > 0 for ms in expected]
    for mine, other in zip(told, expected, strict=True):
        assert abs(mine - other) <= max(0.2 * other, 150), (told, expected)


RATE = 5
AT_ONCE = 10 * RATE
"""Connections that the window of ten samples allows."""


def connected(bootstrap: str, count: int, host: str) -> list[float | None]:
    """When each of ``count`` connections from ``host``, all opened at once, is answered, in s;
    None: it is closed.
    """
    port = int(bootstrap.rpartition(":")[2])
    started = time.monotonic()
    several = [socket.create_connection(("127.0.0.1", port), 60, (host, 0)) for _ in range(count)]
    told: list[float | None] = []
    with ExitStack() as opened:
        for sock in several:
            opened.enter_context(sock)
            sock.sendall(protocol.encode_request(ApiKey.API_VERSIONS, 0, 1, "rates", {}))
        for sock in several:
            try:
                told.append(time.monotonic() - started if sock.recv(1) else None)
            except ConnectionError:
                told.append(None)
    return told


def test_an_address_connects_as_often_as_to_kafka(kafka_dist: ModuleType, tmp_path: Path) -> None:
    refused = []
    with both(kafka_dist, tmp_path) as nodes:
        for bootstrap in nodes:
            connection = Connection(bootstrap)
            assert alter(connection, {"ip": "127.0.0.9"}, connection_creation_rate=RATE) == (
                0,
                None,
            )
            told = connected(bootstrap, AT_ONCE + 10, "127.0.0.9")
            refused.append([answer is None for answer in told])
            assert connected(bootstrap, 5, "127.0.0.8").count(None) == 0
            connection.close()
    print("closed:", [told.count(True) for told in refused])
    for told in refused:
        assert told[:AT_ONCE] == [False] * AT_ONCE
        assert told.count(True) >= 6, "what the window grows by meanwhile is accepted"


def test_a_listener_accepts_as_often_as_kafkas(kafka_dist: ModuleType, tmp_path: Path) -> None:
    last = []
    with (
        Cluster(max_connection_creation_rate=RATE, socket_listen_backlog_size=200) as cluster,
        kafka_dist.Broker(
            tmp_path,
            free_port(above=[1]),
            **{
                "listener.name.plaintext.max.connection.creation.rate": RATE,
                # What nodes speak over goes by its listener's own rate alone.
                "inter.broker.listener.name": "PLAINTEXT",
                "socket.listen.backlog.size": 200,
            },
        ) as broker,
    ):
        time.sleep(11)  # the window of what the start itself connected
        for bootstrap in (cluster.bootstrap, broker.bootstrap):
            told = connected(bootstrap, AT_ONCE + 2 * RATE, "127.0.0.1")
            assert None not in told
            last.append(told[-1])
    print("the last was answered after", last)
    assert last[0] and last[1] and last[1] > 1.0
    assert abs(last[0] - last[1]) < 0.7, last


SETS = (
    ("users", "ada", "producer_byte_rate=1024,request_percentage=50.5"),
    ("users", None, "consumer_byte_rate=2048"),
    ("clients", "app", "controller_mutation_rate=10"),
    ("clients", None, "producer_byte_rate=4096"),
    ("ips", "127.0.0.1", "connection_creation_rate=100"),
    ("ips", None, "connection_creation_rate=200"),
    ("users", "ada", "producer_byte_rate=1.5"),
    ("ips", "127.0.0.1", "connection_creation_rate=-1"),
)


def configured(kafka_dist: ModuleType, bootstrap: str) -> list[str]:
    """What ``kafka-configs`` says to a list of changes, and then of what is there."""
    runs: list[tuple[str, ...]] = []
    for kind, name, values in SETS:
        who = ("--entity-default",) if name is None else ("--entity-name", name)
        runs.append(("--alter", "--entity-type", kind, *who, "--add-config", values))
    runs += [("--describe", "--entity-type", kind) for kind in ("users", "clients", "ips")]
    gone = ("--delete-config", "producer_byte_rate,request_percentage")
    runs.append(("--alter", "--entity-type", "users", "--entity-name", "ada", *gone))
    runs.append(("--describe", "--entity-type", "users"))
    told = kafka_dist.run_each(CONFIGS, [("--bootstrap-server", bootstrap, *run) for run in runs])
    return [
        "\n".join(
            sorted(
                line for line in said.replace(bootstrap, "HERE").splitlines() if "\tat " not in line
            )
        )
        for said in told
    ]


@pytest.mark.timeout(400)
def test_kafka_configs_hears_the_same(kafka_dist: ModuleType, tmp_path: Path) -> None:
    with both(kafka_dist, tmp_path) as (ours, kafkas):
        told = configured(kafka_dist, ours)
        assert told == configured(kafka_dist, kafkas)
    assert "Completed updating config for user ada" in told[0]
    assert "producer_byte_rate=1024.0" in told[len(SETS)], "the changes are there"


def test_a_producer_keeps_to_its_rate(kafka_dist: ModuleType) -> None:
    """``kafka-producer-perf-test`` under a quota is held to it."""
    with Cluster() as cluster:
        connection = Connection(cluster.bootstrap)
        create(connection, 7, "perf", 1)
        assert alter(connection, {"client-id": "perf"}, producer_byte_rate=200_000) == (0, None)
        said = kafka_dist.run(
            PERF,
            "--topic",
            "perf",
            "--num-records",
            "5000",
            "--record-size",
            "1000",
            "--throughput",
            "-1",
            "--producer-props",
            f"bootstrap.servers={cluster.bootstrap}",
            "client.id=perf",
        )
        connection.close()
    rates = re.findall(r"5000 records sent, (\d+(?:\.\d+)?) records/sec", said)
    assert rates and 150 < float(rates[-1]) < 450, said
