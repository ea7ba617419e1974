"""Settings that bound what anybody may make a node hold reach what they bound (SECURITY.md): a node
with small ones, over its sockets. Those that have tests with the part that they bound are not here.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from kept.storage.records import build_batch
from tests.support.raw_client import RawClient

PRODUCE, FETCH, FIND_COORDINATOR, INIT_PRODUCER_ID = 0, 1, 10, 22
COORDINATOR_NOT_AVAILABLE = 15
MIB = 1 << 20


def test_what_is_in_flight_is_shared_out_as_settings_say(lone_node: Any) -> None:
    parts = lone_node(
        kept_inflight_max_bytes="8000000",
        kept_inflight_max_bytes_per_ip="3000000",
        kept_inflating_max_bytes="2000000",
        kept_waiting_max_bytes="1000000",
        kept_responses_max_bytes="500000",
    ).node.parts
    assert (
        parts.memory.in_flight.limit_bytes,
        parts.memory.in_flight.account("h").limit_bytes,
    ) == (
        8_000_000,
        3_000_000,
    )
    assert parts.memory.inflating.limit_bytes == 2_000_000
    assert (parts.memory.waiting.limit_bytes, parts.memory.waiting.account("h").limit_bytes) == (
        1_000_000,
        250_000,
    )
    assert parts.memory.responses.limit_bytes == 500_000


def test_all_logs_remember_so_many_producers_together(lone_node: Any) -> None:
    """They invent their ids. A log that has but one keeps it."""
    limit, partitions = 1000, 4
    lone = lone_node(kept_producers_max=str(limit))
    lone.create("t", partitions)

    async def produce() -> None:
        client = await RawClient.connect(lone.port)
        for producer_id in range(500):
            made = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": 0}
            batch = build_batch([(0, None, b"v", ())], **made)
            each = [{"index": number, "records": batch} for number in range(partitions)]
            answer = await client.ask(
                PRODUCE,
                8,
                transactional_id=None,
                acks=-1,
                timeout=9000,
                topic_data=[{"name": "t", "partition_data": each}],
            )
            found = answer.responses[0].partition_responses
            assert [int(one.error_code) for one in found] == [0] * partitions
        client.close()

    lone.run(asyncio.wait_for(produce(), 60))
    logs = [one.partition.log for one in lone.node.parts.table.replicas.values()]
    used = sum(len(log.producers) for log in logs)
    assert limit - partitions <= used <= limit + partitions


def test_transactional_ids_take_so_much_together(lone_node: Any) -> None:
    lone = lone_node(kept_transactional_ids_max_bytes=str(MIB))

    def name(number: int) -> str:
        return hashlib.sha256(b"%d" % number).hexdigest() * 256

    async def begin(client: RawClient, number: int) -> int:
        answer = await client.ask(
            INIT_PRODUCER_ID,
            4,
            transactional_id=name(number),
            transaction_timeout=60_000,
            producer_id=-1,
            producer_epoch=-1,
        )
        return int(answer.error_code)

    async def go() -> list[int]:
        client = await RawClient.connect(lone.port)
        await client.ask(FIND_COORDINATOR, 4, key_type=1, coordinator_keys=[name(0)])
        while await begin(client, 0) == COORDINATOR_NOT_AVAILABLE:
            pass  # its log is being made
        codes = [await begin(client, number) for number in range(1, 40)]
        codes.append(await begin(client, 0))  # it is there already
        client.close()
        return codes

    *new, again = lone.run(asyncio.wait_for(go(), 60))
    first_bytes = 2 * len(name(0))
    taken = new.index(COORDINATOR_NOT_AVAILABLE)
    assert 0.8 * MIB < (taken + 1) * first_bytes < MIB
    assert set(new[taken:]) == {COORDINATOR_NOT_AVAILABLE} and not again


def test_fetch_sessions_have_so_many_places(lone_node: Any) -> None:
    lone = lone_node(max_incremental_fetch_session_cache_slots="2")
    lone.create("t")
    partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}

    async def go() -> list[int]:
        sessions = []
        for _ in range(3):
            client = await RawClient.connect(lone.port)
            answer = await client.ask(
                FETCH,
                12,
                replica_id=-1,
                max_wait=0,
                min_bytes=0,
                max_bytes=1000,
                isolation_level=0,
                session_id=0,
                session_epoch=0,
                forgotten_topics_data=(),
                rack_id="",
                topics=[{"topic": "t", "partitions": [partition]}],
            )
            sessions.append(answer.session_id)
            client.close()
        return sessions

    first, second, third = lone.run(asyncio.wait_for(go(), 60))
    assert first and second and first != second and not third
