"""Clients that log in by SASL, and stay in while their sessions are renewed; Kafka's own tools."""

from __future__ import annotations

import asyncio
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import kafka
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from kept.client.admin.users import describe_users, set_password
from kept.client.client import Client
from tests.support.sasl_site import Secured, librdkafka_goes_on, properties_file, secured
from tests.tools import kafka_dist

pytestmark = [pytest.mark.slow]

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
PASSWORD = "a pass=word, that is odd"
LIFETIME_MS = 1500


@pytest.fixture(scope="module")
def site() -> Iterator[Secured]:
    with secured(connections_max_reauth_ms=LIFETIME_MS) as site:
        with Client(site.open) as client:
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
                client.run(set_password("ada", mechanism, PASSWORD, 4096))
        yield site


def librdkafka(site: Secured, mechanism: str, password: str = PASSWORD) -> dict[str, str]:
    return {
        "bootstrap.servers": site.bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": "ada",
        "sasl.password": password,
        "log_level": "0",
    }


def python(site: Secured, mechanism: str) -> dict[str, str]:
    return {
        "bootstrap_servers": site.bootstrap,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism,
        "sasl_plain_username": "ada",
        "sasl_plain_password": PASSWORD,
    }


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_librdkafka_goes_on_while_its_sessions_are_renewed(site: Secured, mechanism: str) -> None:
    librdkafka_goes_on(librdkafka(site, mechanism), 3 * LIFETIME_MS / 1000)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_librdkafka_hears_that_it_is_refused(site: Secured, mechanism: str) -> None:
    with pytest.raises(KafkaException):
        AdminClient(librdkafka(site, mechanism, "wrong")).list_topics(timeout=2)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_kafka_python(site: Secured, mechanism: str) -> None:
    topic = f"kp-{uuid.uuid4().hex[:8]}"
    producer = kafka.KafkaProducer(**python(site, mechanism))
    producer.send(topic, b"v").get(30)
    producer.close()
    consumer = kafka.KafkaConsumer(
        topic, auto_offset_reset="earliest", consumer_timeout_ms=30_000, **python(site, mechanism)
    )
    assert next(consumer).value == b"v"
    consumer.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_aiokafka(site: Secured, mechanism: str) -> None:
    topic = f"aio-{uuid.uuid4().hex[:8]}"

    async def go() -> bytes:
        producer = AIOKafkaProducer(**python(site, mechanism))
        await producer.start()
        await producer.send_and_wait(topic, b"v")
        await producer.stop()
        consumer = AIOKafkaConsumer(topic, auto_offset_reset="earliest", **python(site, mechanism))
        await consumer.start()
        record = await asyncio.wait_for(consumer.getone(), 30)
        await consumer.stop()
        return bytes(record.value)

    assert asyncio.run(go()) == b"v"


def tool(name: str, *args: object, stdin: str | None = None, status: int | None = 0) -> str:
    """Run a tool of Kafka's; its output and errors together."""
    done = subprocess.run(
        kafka_dist.command(name, *map(str, args)),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = done.stdout + done.stderr
    assert status is None or done.returncode == status, said
    return said


def described(site: Secured, user: str) -> list[tuple[str, int]]:
    with Client(site.open) as client:
        return sorted((c.mechanism, c.iterations) for c in client.run(describe_users([user])))


@pytest.mark.java
def test_kafka_configs_makes_users_who_log_in_with_kafkas_console(
    site: Secured, tmp_path: Path
) -> None:
    config, topic = "kafka.admin.ConfigCommand", f"java-{uuid.uuid4().hex[:8]}"
    users = (config, "--bootstrap-server", site.open, "--entity-type", "users")
    bob = (*users, "--entity-name", "bob")
    for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
        made = f"{mechanism}=[iterations=8192,password=secret-of-bob]"
        assert "Completed updating" in tool(*bob, "--alter", "--add-config", made)
    assert described(site, "bob") == [("SCRAM-SHA-256", 8192), ("SCRAM-SHA-512", 8192)]
    for mechanism in MECHANISMS:
        file = properties_file(tmp_path / mechanism, mechanism, "bob", "secret-of-bob")
        common = ("--bootstrap-server", site.bootstrap, "--topic", topic)
        tool(
            "org.apache.kafka.tools.ConsoleProducer",
            *common,
            "--command-config",
            file,
            stdin=f"by {mechanism}\n",
        )
        read = tool(
            "org.apache.kafka.tools.consumer.ConsoleConsumer",
            *common,
            "--command-config",
            file,
            "--from-beginning",
            "--max-messages",
            1,
            "--timeout-ms",
            60_000,
        )
        assert f"by {MECHANISMS[0]}" in read
    wrong = properties_file(tmp_path / "wrong", "SCRAM-SHA-256", "bob", "another")
    listed = tool(
        "org.apache.kafka.tools.TopicCommand",
        "--bootstrap-server",
        site.bootstrap,
        "--list",
        "--command-config",
        wrong,
        status=None,
    )
    assert "SaslAuthenticationException" in listed
    assert "invalid credentials with SASL mechanism SCRAM-SHA-256" in listed
    for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
        tool(*bob, "--alter", "--delete-config", mechanism)
    assert described(site, "bob") == []
