"""Transactional producers of real clients: refused at once, with a message that says why.

The code is TRANSACTIONAL_ID_AUTHORIZATION_FAILED. After INVALID_REQUEST librdkafka asked again
until its own timeout, and its users never saw the message.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import TransactionalIdAuthorizationFailed
from confluent_kafka import KafkaError, KafkaException, Producer
from kafka import KafkaProducer
from kafka.errors import KafkaError as PythonKafkaError
from kafka.errors import TransactionalIdAuthorizationFailedError

pytestmark = pytest.mark.slow

PATIENCE_S = 60
"""What the clients would wait for."""
AT_ONCE_S = 20


def test_librdkafka(broker):
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "tx"})
    started = time.monotonic()
    with pytest.raises(KafkaException) as refused:
        producer.init_transactions(PATIENCE_S)
    error = refused.value.args[0]
    assert error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert "no transaction coordinator" in error.str()
    assert error.fatal() and not error.retriable()
    assert time.monotonic() - started < AT_ONCE_S


def test_kafka_python(broker):
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap, transactional_id="tx")
    try:
        started = time.monotonic()
        with pytest.raises(PythonKafkaError) as refused:
            producer.init_transactions()
        assert isinstance(refused.value, TransactionalIdAuthorizationFailedError)
        assert time.monotonic() - started < AT_ONCE_S
    finally:
        producer.close(timeout=1)


def test_aiokafka(broker):
    async def run() -> None:
        producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap, transactional_id="tx")
        try:
            async with asyncio.timeout(AT_ONCE_S):
                with pytest.raises(TransactionalIdAuthorizationFailed):
                    await producer.start()
        finally:
            await producer.stop()

    asyncio.run(run())
