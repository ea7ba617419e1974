"""aiokafka: the asyncio client."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

DEADLINE_S = 60


async def collect(consumer: AIOKafkaConsumer, count: int) -> list:
    got: list = []
    async with asyncio.timeout(DEADLINE_S):
        while len(got) < count:
            for batch in (await consumer.getmany(timeout_ms=300)).values():
                got.extend(batch)
    return got


@pytest.mark.parametrize("codec", [None, "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("idempotent", [False, True], ids=["plain", "idempotent"])
def test_every_codec_round_trips(broker, codec, idempotent):
    topic = broker.name("aio")
    sent = [(b"k%d" % i, b"v%d" % i + b"z" * (i % 200)) for i in range(1000)]

    async def run() -> list:
        producer = AIOKafkaProducer(
            bootstrap_servers=broker.bootstrap,
            compression_type=codec,
            enable_idempotence=idempotent,
            acks="all",
            linger_ms=5,
        )
        await producer.start()
        try:
            waits = [await producer.send(topic, v, k, partition=0) for k, v in sent]
            await asyncio.gather(*waits)
        finally:
            await producer.stop()
        consumer = AIOKafkaConsumer(
            topic, bootstrap_servers=broker.bootstrap, auto_offset_reset="earliest"
        )
        await consumer.start()
        try:
            return await collect(consumer, len(sent))
        finally:
            await consumer.stop()

    assert [(m.key, m.value) for m in asyncio.run(run())] == sent


def test_members_come_and_go(broker):
    topic = broker.name("aio-group")

    async def run() -> tuple[list[int], int]:
        admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
        await admin.start()
        await admin.create_topics([NewTopic(topic, 4, 1)])
        await admin.close()
        producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap)
        await producer.start()

        def member() -> AIOKafkaConsumer:
            return AIOKafkaConsumer(
                topic,
                bootstrap_servers=broker.bootstrap,
                group_id=topic,
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                heartbeat_interval_ms=300,
                session_timeout_ms=30_000,
            )

        got: list[int] = []
        one, two = member(), member()
        await one.start()
        for i in range(100):
            await producer.send_and_wait(topic, b"%d" % i, partition=i % 4)
        got += [int(m.value) for m in await collect(one, 100)]
        await one.commit()
        start_two = asyncio.create_task(two.start())
        async with asyncio.timeout(DEADLINE_S):
            while not (start_two.done() and len(one.assignment()) == len(two.assignment()) == 2):
                await one.getmany(timeout_ms=100)
        for i in range(100, 200):
            await producer.send_and_wait(topic, b"%d" % i, partition=i % 4)
        halves = await asyncio.gather(collect(one, 50), collect(two, 50))
        got += [int(m.value) for half in halves for m in half]
        await one.commit()
        await two.commit()
        await one.stop()
        async with asyncio.timeout(DEADLINE_S):
            while len(two.assignment()) != 4:
                assert not await two.getmany(timeout_ms=100)
        for i in range(200, 300):
            await producer.send_and_wait(topic, b"%d" % i, partition=i % 4)
        got += [int(m.value) for m in await collect(two, 100)]
        await two.stop()
        await producer.stop()
        return got, len(got)

    got, count = asyncio.run(run())
    assert sorted(got) == list(range(300))
    assert count == 300
