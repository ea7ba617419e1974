"""Client libraries in Python, as :mod:`.scenario` wants them: create, send, and read in a group.

Each is given how it connects as the properties of a Kafka client in Java (empty: PLAINTEXT), which
it is told in its own words. Access tokens are in a file, which is read whenever one is wanted.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import kafka
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.abc import AbstractTokenProvider as AioTokens
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as AioTopic
from aiokafka.errors import KafkaError as AioError
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kafka.admin import NewTopic as PythonTopic
from kafka.errors import KafkaError as PythonError
from kafka.net.sasl.oauth import AbstractTokenProvider as PythonTokens

from kept.client.security.jaas import parse_jaas
from tests.compat.scenario import DEADLINE_S, PARTITIONS
from tests.support.joining import knows

PLAINTEXT: Mapping[str, str] = {}


def copies(bootstrap: str) -> int:
    """How many replicas a topic has on so many nodes."""
    return min(3, bootstrap.count(",") + 1)


def user_and_password(security: Mapping[str, str]) -> tuple[str, str]:
    """Who logs in by SASL."""
    options = parse_jaas(security["sasl.jaas.config"]).options
    return options["username"], options["password"]


def token_file(security: Mapping[str, str]) -> Path | None:
    """The file with the access token that logs in by OAUTHBEARER; None: something else does."""
    url = security.get("sasl.oauthbearer.token.endpoint.url")
    return None if url is None else Path(unquote(urlsplit(url).path))


def for_librdkafka(security: Mapping[str, str]) -> dict[str, Any]:
    """What librdkafka is told."""
    told: dict[str, Any] = {"security.protocol": security.get("security.protocol", "PLAINTEXT")}
    tokens = token_file(security)
    if tokens is not None:

        def token(_: str) -> tuple[str, float]:
            """It, and until when it is valid."""
            text = tokens.read_text()
            claims = base64.urlsafe_b64decode(text.split(".")[1] + "==")
            return text, float(json.loads(claims)["exp"])

        told |= {"sasl.mechanism": "OAUTHBEARER", "oauth_cb": token}
    elif "sasl.jaas.config" in security:
        told["sasl.mechanism"] = security["sasl.mechanism"]
        told["sasl.username"], told["sasl.password"] = user_and_password(security)
    if "ssl.truststore.location" in security:
        told["ssl.ca.location"] = security["ssl.truststore.location"]
    if "ssl.keystore.location" in security:  # one file with both
        told["ssl.certificate.location"] = security["ssl.keystore.location"]
        told["ssl.key.location"] = security["ssl.keystore.location"]
    return told


def for_python(
    security: Mapping[str, str], tokens_of: type[TokensForPython | TokensForAio]
) -> dict[str, Any]:
    """What kafka-python and aiokafka are told, which have ``tokens_of`` a file."""
    told: dict[str, Any] = {"security_protocol": security.get("security.protocol", "PLAINTEXT")}
    tokens = token_file(security)
    if tokens is not None:
        told |= {"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_provider": tokens_of(tokens)}
    elif "sasl.jaas.config" in security:
        told["sasl_mechanism"] = security["sasl.mechanism"]
        user, password = user_and_password(security)
        told |= {"sasl_plain_username": user, "sasl_plain_password": password}
    if "ssl.truststore.location" in security:
        context = ssl.create_default_context(cafile=security["ssl.truststore.location"])
        if "ssl.keystore.location" in security:
            context.load_cert_chain(security["ssl.keystore.location"])
        told["ssl_context"] = context
    return told


class TokensForPython(PythonTokens):
    """Those of a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def token(self) -> str:
        return self._file.read_text()


class TokensForAio(AioTokens):
    """Those of a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def token(self) -> str:
        return await asyncio.to_thread(self._file.read_text)


class Librdkafka:
    """confluent-kafka."""

    def __init__(self, security: Mapping[str, str] = PLAINTEXT) -> None:
        self.common = {"log_level": 0, "reconnect.backoff.max.ms": 500, **for_librdkafka(security)}

    def create(self, bootstrap: str, topic: str) -> None:
        admin = AdminClient({"bootstrap.servers": bootstrap, **self.common})
        topics = [NewTopic(topic, PARTITIONS, copies(bootstrap))]
        admin.create_topics(topics)[topic].result(timeout=60)

    def sender(self, bootstrap: str, topic: str, codec: str) -> Any:
        return _RdSender(self.common, bootstrap, topic, codec)

    def member(self, bootstrap: str, topic: str, group: str) -> Any:
        return _RdMember(self.common, bootstrap, topic, group)


class _RdSender:
    def __init__(self, common: Mapping[str, Any], bootstrap: str, topic: str, codec: str) -> None:
        self._topic = topic
        self._errors: list[Any] = []
        self._producer = Producer(
            {
                **common,
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "compression.type": codec,
                "linger.ms": 2,
            }
        )

    def send(self, values: Sequence[bytes]) -> None:
        for number, value in enumerate(values):
            self._producer.produce(
                self._topic, value, partition=number % PARTITIONS, on_delivery=self._delivered
            )
        assert self._producer.flush(DEADLINE_S) == 0
        assert not self._errors

    def _delivered(self, error: Any, _: Any) -> None:
        if error is not None:
            self._errors.append(error)

    def close(self) -> None:
        self._producer.flush(1)


class _RdMember:
    def __init__(self, common: Mapping[str, Any], bootstrap: str, topic: str, group: str) -> None:
        self._consumer = Consumer(
            {
                **common,
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 6000,
                "heartbeat.interval.ms": 300,
                "partition.assignment.strategy": "cooperative-sticky",
            }
        )
        self._consumer.subscribe([topic])

    def poll(self) -> list[bytes]:
        return [m.value() for m in self._consumer.consume(200, 0.05) if m.error() is None]

    def commit(self) -> None:
        try:
            self._consumer.commit(asynchronous=False)
        except KafkaException as error:
            assert error.args[0].name() in {
                "REBALANCE_IN_PROGRESS",
                "ILLEGAL_GENERATION",
                "UNKNOWN_MEMBER_ID",
                "_NO_OFFSET",
                "NOT_COORDINATOR",
                "_ASSIGNMENT_LOST",
            }, error

    def close(self) -> None:
        self._consumer.close()


class KafkaPython:
    """kafka-python."""

    def __init__(self, security: Mapping[str, str] = PLAINTEXT) -> None:
        self.common = for_python(security, TokensForPython)

    def create(self, bootstrap: str, topic: str) -> None:
        admin = kafka.KafkaAdminClient(bootstrap_servers=bootstrap, **self.common)
        admin.create_topics([PythonTopic(topic, PARTITIONS, copies(bootstrap))])
        admin.close()

    def sender(self, bootstrap: str, topic: str, codec: str) -> Any:
        return _PythonSender(self.common, bootstrap, topic, codec)

    def member(self, bootstrap: str, topic: str, group: str) -> Any:
        return _PythonMember(self.common, bootstrap, topic, group)


class _PythonSender:
    def __init__(self, common: Mapping[str, Any], bootstrap: str, topic: str, codec: str) -> None:
        self._topic = topic
        self._producer = kafka.KafkaProducer(
            bootstrap_servers=bootstrap.split(","),
            **common,
            enable_idempotence=True,
            compression_type=None if codec == "none" else codec,
            linger_ms=2,
        )

    def send(self, values: Sequence[bytes]) -> None:
        waiting = [
            self._producer.send(self._topic, value, partition=number % PARTITIONS)
            for number, value in enumerate(values)
        ]
        for one in waiting:
            one.get(timeout=DEADLINE_S)

    def close(self) -> None:
        self._producer.close()


class _PythonMember:
    def __init__(self, common: Mapping[str, Any], bootstrap: str, topic: str, group: str) -> None:
        self._consumer = kafka.KafkaConsumer(
            topic,
            bootstrap_servers=bootstrap.split(","),
            **common,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=6000,
            heartbeat_interval_ms=300,
        )
        knows(self._consumer, topic)

    def poll(self) -> list[bytes]:
        found = self._consumer.poll(timeout_ms=50)
        return [record.value for records in found.values() for record in records]

    def commit(self) -> None:
        try:
            self._consumer.commit()
        except PythonError as error:
            assert error.retriable or type(error).__name__ == "CommitFailedError", error

    def close(self) -> None:
        self._consumer.close()


class Aiokafka:
    """aiokafka, with its loop in a thread."""

    def __init__(self, security: Mapping[str, str] = PLAINTEXT) -> None:
        self.common = for_python(security, TokensForAio)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE_S)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def create(self, bootstrap: str, topic: str) -> None:
        async def create() -> None:
            admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, **self.common)
            await admin.start()
            await admin.create_topics([AioTopic(topic, PARTITIONS, copies(bootstrap))])
            await admin.close()

        self.run(create())

    def sender(self, bootstrap: str, topic: str, codec: str) -> Any:
        return _AioSender(self, bootstrap, topic, codec)

    def member(self, bootstrap: str, topic: str, group: str) -> Any:
        return _AioMember(self, bootstrap, topic, group)


class _AioSender:
    def __init__(self, client: Aiokafka, bootstrap: str, topic: str, codec: str) -> None:
        self._client, self._topic = client, topic
        self._producer: AIOKafkaProducer = client.run(self._start(bootstrap, codec))

    async def _start(self, bootstrap: str, codec: str) -> AIOKafkaProducer:
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            **self._client.common,
            enable_idempotence=True,
            compression_type=None if codec == "none" else codec,
            linger_ms=2,
        )
        await producer.start()
        return producer

    def send(self, values: Sequence[bytes]) -> None:
        async def send() -> None:
            waiting = [
                await self._producer.send(self._topic, value, partition=number % PARTITIONS)
                for number, value in enumerate(values)
            ]
            await asyncio.gather(*waiting)

        self._client.run(send())

    def close(self) -> None:
        self._client.run(self._producer.stop())


class _AioMember:
    def __init__(self, client: Aiokafka, bootstrap: str, topic: str, group: str) -> None:
        self._client = client
        self._consumer: AIOKafkaConsumer = client.run(self._start(bootstrap, topic, group))

    async def _start(self, bootstrap: str, topic: str, group: str) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            **self._client.common,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=6000,
            heartbeat_interval_ms=300,
        )
        await consumer.start()
        return consumer

    def poll(self) -> list[bytes]:
        found = self._client.run(self._consumer.getmany(timeout_ms=50))
        return [record.value for records in found.values() for record in records]

    def commit(self) -> None:
        try:
            self._client.run(self._consumer.commit())
        except AioError as error:
            assert error.retriable or type(error).__name__ == "CommitFailedError", error

    def close(self) -> None:
        self._client.run(self._consumer.stop())
