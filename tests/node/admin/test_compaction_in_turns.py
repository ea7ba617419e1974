"""Compaction of a topic with very many partitions is asked for in turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

from kept.node.admin.leader_router import LeaderRouter
from kept.node.runtime.time_slices import ITEMS_PER_SLICE
from kept.storage.types import TopicPartition
from tests.support.given import Given

PARTITIONS = 5 * ITEMS_PER_SLICE


def test_passes_of_many_partitions_are_started_in_turns() -> None:
    turn, started = 0, Counter[int]()

    async def compacted() -> Any:
        nonlocal turn

        def start(_: TopicPartition) -> asyncio.Future[None]:
            started[turn] += 1
            return asyncio.get_running_loop().create_future()

        hosted = Given(partition__is_leader=True)
        replicas = {TopicPartition("t", number): hosted for number in range(PARTITIONS)}
        router = LeaderRouter(
            metadata=cast("Any", None),
            lookup=cast("Any", Given(node_id=0, leader=lambda _: 0)),
            table=cast("Any", Given(replicas=replicas)),
            view=cast("Any", Given(start_pass=start)),
            peer_http=cast("Any", None),
        )
        compacting = router.compact("t", range(PARTITIONS), wait=False, here=True)
        asked = asyncio.ensure_future(compacting)
        while not asked.done():
            turn += 1
            await asyncio.sleep(0)
        return await asked

    passes = asyncio.run(compacted())
    assert [one.partition for one in passes.started] == list(range(PARTITIONS))
    assert started.total() == PARTITIONS
    assert max(started.values()) <= ITEMS_PER_SLICE
