"""What a request costs, in calls of this package's functions: processor time on a busy machine says
little of a percent, and of the work that Python does for a request each step is a call.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

import pytest

from kept.client.protocol import messages as protocol
from kept.storage.records import build_batch
from tests.node.conftest import Lone
from tests.support.request_values import produce_values

PRODUCE = 0
FETCH = 1
REQUESTS = 50
RECORDS = 63
"""Of about a KiB each in a batch of 64 KiB, which has an index entry of its own."""


def produce(records: int) -> bytes:
    batch = build_batch([(1, None, bytes(1000), ())] * records)
    return protocol.encode_request(PRODUCE, 7, 7, "a client", produce_values("t", batch))


def fetch(offset: int, most: int) -> bytes:
    partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": most}
    return protocol.encode_request(
        FETCH,
        4,
        7,
        "a client",
        {
            "replica_id": -1,
            "max_wait": 500,
            "min_bytes": 1,
            "max_bytes": most,
            "isolation_level": 0,
            "topics": [{"topic": "t", "partitions": [partition]}],
        },
    )


async def response(reader: asyncio.StreamReader) -> None:
    await reader.readexactly(int.from_bytes(await reader.readexactly(4)))


async def calls(lone: Lone, frames: list[bytes]) -> float:
    """Calls for each of these requests, which come in together, on a connection that has asked
    before.
    """
    await lone.created("t")
    counted: Counter[str] = Counter()

    def count(frame: Any, event: str, called: Any) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith(("kept.", "namedtuple_")):
            counted[f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"] += 1

    reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
    for _ in range(12):
        writer.write(produce(RECORDS))
        await response(reader)
    (connection,) = lone.node.parts.listeners[0].connections
    together = b"".join(frames)
    for _ in range(REQUESTS):
        connection.get_buffer(-1)[: len(together)] = together
        sys.setprofile(count)
        try:
            connection.buffer_updated(len(together))
        finally:
            sys.setprofile(None)
        for _ in frames:
            await response(reader)
    writer.close()
    each = REQUESTS * len(frames)
    print(*(f"{count / each:6.2f} {name}" for name, count in counted.most_common()), sep="\n")
    return counted.total() / each


@pytest.mark.parametrize(
    ("frames", "most"),
    [
        pytest.param([fetch(3 * RECORDS, 67_000)], 72, id="fetch"),
        pytest.param([produce(15)], 55, id="produce"),
        pytest.param([produce(1)] * 8, 13, id="produce, eight at once"),
    ],
)
async def test_a_request_takes_few_calls(lone: Lone, frames: list[bytes], most: int) -> None:
    """A few more are a few percent: what is asked of every request is worth a second look."""
    assert await calls(lone, frames) <= most
