"""Responses of many items draw on one budget while they are made; nobody waits for ever."""

from __future__ import annotations

import asyncio
import io
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from kept.client.protocol import messages as protocol
from kept.node.kafka.response_memory import DRAW_BYTES, ITEM_BYTES, ResponseMemory
from kept.node.runtime.memory_budget import MemoryBudget
from tests.node.conftest import Lone
from tests.support.raw_client import RawClient
from tests.support.request_values import one_batch, produce_values

PARTITIONS = 3000
RESPONSES_BYTES = 4 << 20
BEHIND_BYTES = 200_000
PATIENCE_S = 60


class Waiting:
    """Counts how often it may go on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def drawn(memory: ResponseMemory, items: int, resume: Any) -> int:
    """How many of so many items it may make now."""
    return next((done for done in range(items) if not memory.draw(resume)), items)


def test_items_and_what_is_encoded_are_drawn_and_given_back() -> None:
    budget = MemoryBudget(1 << 20)
    memory = ResponseMemory(budget, held_bytes=100_000)
    assert drawn(memory, 1000, Waiting()) == 1000
    held = 100_000 + 1000 * ITEM_BYTES
    assert held <= budget.used_bytes <= held + DRAW_BYTES
    output = io.BytesIO()
    memory.drawn(output)
    output.write(bytes(300_000))
    assert drawn(memory, 1000, Waiting()) == 1000, "those are made already"
    assert held + 300_000 <= budget.used_bytes <= held + 300_000 + DRAW_BYTES
    memory.give_back()
    memory.give_back()
    assert budget.used_bytes == 0


def test_one_passes_the_limit_at_a_time_and_the_others_follow() -> None:
    budget = MemoryBudget(2 * DRAW_BYTES)
    memories = [ResponseMemory(budget) for _ in range(4)]
    waiting = [Waiting() for _ in memories]
    left = [1000] * 4
    for _ in range(60):
        for place, memory in enumerate(memories):
            done = drawn(memory, min(left[place], 100), waiting[place])
            left[place] -= done
            if not left[place]:
                memory.give_back()
                assert budget.used_bytes <= 2 * DRAW_BYTES + 1000 * ITEM_BYTES
    assert left == [0] * 4 and budget.used_bytes == 0
    assert any(one.calls for one in waiting)


def test_nodes_do_not_wait_for_clients() -> None:
    assert drawn(ResponseMemory(None), 1000, Waiting()) == 1000


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lone]:
    """A node with many partitions and little memory for its responses."""
    settings = {
        "kept_responses_max_bytes": str(RESPONSES_BYTES),
        "kept_connection_inflight_max_bytes": str(BEHIND_BYTES),
    }
    with asyncio.Runner() as runner:
        lone = Lone(runner, str(tmp_path_factory.mktemp("responses")), **settings)
        lone.create("many", PARTITIONS)
        yield lone
        lone.stop()


async def all_gone(lone: Lone) -> None:
    """No client is connected any more, and no memory is out."""
    parts = lone.node.parts
    while (
        parts.listeners[0].connections
        or parts.memory.responses.used_bytes
        or parts.memory.in_flight.used_bytes
    ):
        await asyncio.sleep(0.001)


def everything(correlation_id: int = 7) -> bytes:
    values = {"topics": None, "allow_auto_topic_creation": False}
    return protocol.encode_request(3, 5, correlation_id, "test", values)


async def watch(lone: Any, most: list[int]) -> None:
    """Keep the most that the budget had out, at the end of the list."""
    while True:
        most.append(max(most.pop(), lone.node.parts.memory.responses.used_bytes))
        await asyncio.sleep(0)


def test_many_who_ask_for_everything_are_answered_within_the_budget(node) -> None:
    async def go() -> int:
        most = [0]
        several = [await RawClient.connect(node.port) for _ in range(16)]
        watching = asyncio.create_task(watch(node, most))
        for client in several:
            client.writer.write(everything())
        sizes = {len(await client.frame()) for client in several}
        assert len(sizes) == 1 and sizes.pop() > 20 * PARTITIONS
        several[0].writer.write(everything())
        several[0].writer.close()
        watching.cancel()
        for client in several:
            client.writer.close()
        await all_gone(node)
        return most.pop()

    one = PARTITIONS * (ITEM_BYTES + 100) + DRAW_BYTES
    assert one < node.run(go()) <= RESPONSES_BYTES + one


@pytest.mark.parametrize("leaves", [False, True])
def test_responses_behind_one_that_waits_are_bounded(node, leaves) -> None:
    """A fetch waits for records; what was asked behind it is made, and must not pile up."""
    topic = f"quiet-{leaves}"
    node.create(topic)
    partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}
    values = {
        "max_wait": 600_000,
        "min_bytes": 1,
        "max_bytes": 1000,
        "isolation_level": 0,
        "topics": [{"topic": topic, "partitions": [partition]}],
    }
    waits = protocol.encode_request(1, 4, 1, "test", values)

    async def go() -> None:
        client = await RawClient.connect(node.port)
        client.writer.write(waits + b"".join(map(everything, range(20))))
        (mine,) = node.node.parts.listeners[0].connections
        async with asyncio.timeout(PATIENCE_S):
            while mine._behind_bytes < BEHIND_BYTES:
                await asyncio.sleep(0.001)
        for _ in range(200):  # time for more of them, were there no limit
            await asyncio.sleep(0.001)
        size = node.node.parts.memory.in_flight.used_bytes
        assert BEHIND_BYTES <= mine._behind_bytes <= size < 3 * BEHIND_BYTES
        assert mine.has_unsent, "it is closed when it stays so"
        if leaves:
            mine.abort()
        else:
            async with await RawClient.connect(node.port) as producer:
                await producer.ask(0, 9, **produce_values(topic, one_batch()))
            await client.frame()
            for number in range(20):
                answer = await client.frame()
                assert struct.unpack_from(">i", answer) == (number,)
        while node.node.parts.memory.in_flight.used_bytes or mine._behind_bytes:
            await asyncio.sleep(0.001)
        client.writer.close()
        await all_gone(node)

    node.run(go())
