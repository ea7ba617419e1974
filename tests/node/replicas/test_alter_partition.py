"""ISR changes are asked for until somebody answers, whatever goes wrong in between."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from kept.cluster.metadata.records import PartitionRecord
from kept.node.internode import controller_rpc
from kept.node.internode.rpc_errors import failure_of
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.replicas import alter_partition
from kept.node.replicas.alter_partition import AlterPartitionQueue
from kept.replication.isr import AlterIsrItem
from kept.storage.errors import NetworkException, StaleBrokerEpoch
from kept.storage.types import TopicPartition
from tests.support.replicas import FixedMetadata, InlineRuntime, RecordedPeers, live_config

TOPIC_ID = uuid.UUID(int=5)


class Asking:
    """A partition that wants an ISR of 0 and 1 until it is answered."""

    topic_partition = TopicPartition("t", 0)

    def __init__(self) -> None:
        self.item: AlterIsrItem | None = AlterIsrItem(TOPIC_ID, 0, 3, 7, ((0, -1), (1, -1)), True)

    def alter_isr_request(self) -> AlterIsrItem | None:
        return self.item

    def alter_isr_completed(self, _asked: AlterIsrItem, _error: Any) -> None:
        self.item = None


def queue(call: Callable[..., Any], record: PartitionRecord | None = None) -> AlterPartitionQueue:
    """That of node 0, whose controller (node 1) is ``call``."""
    metadata: Any = FixedMetadata(record, leader_id=1)
    runtime: Any = InlineRuntime()
    peers: Any = RecordedPeers(call)
    return AlterPartitionQueue(
        runtime=runtime,
        config=live_config(replica_fetch_wait_max_ms="100"),
        metadata=metadata,
        identity=NodeIdentity(0, "cluster", 9),
        peers=peers,
    )


@pytest.mark.parametrize("trouble", [NetworkException("gone"), ValueError("a bug")])
def test_trouble_ends_nothing(trouble) -> None:
    heard = []

    async def call(controller: int, method: str, request: Any, _timeout: float) -> Any:
        heard.append((controller, method, request.changes))
        if len(heard) < 3:
            raise trouble
        return controller_rpc.AlterPartitionsReply(
            (controller_rpc.IsrResult(TOPIC_ID, 0, None, 0, 3, 8, (0, 1), 0),)
        )

    async def main() -> None:
        changes = queue(call)
        for _ in range(2):
            partition = Asking()
            changes.submit(partition)  # type: ignore[arg-type]
            async with asyncio.timeout(60):
                while partition.item is not None:
                    await asyncio.sleep(0.01)
        await changes.close()

    asyncio.run(main())
    assert len(heard) == 4 and len(set(heard)) == 1


def test_what_is_not_decided_is_asked_again_after_a_while(monkeypatch) -> None:
    """A broker epoch of before, say: until the image moves every answer is the same."""
    asked, pauses = [], []

    class Undecided(Asking):
        def alter_isr_completed(self, _asked: AlterIsrItem, error: Any) -> None:
            if error is None:
                self.item = None

    async def call(_controller: int, _method: str, _request: Any, _timeout: float) -> Any:
        asked.append(len(pauses))
        failure = failure_of(StaleBrokerEpoch("8 < 9")) if len(asked) < 4 else None
        return controller_rpc.AlterPartitionsReply(
            (controller_rpc.IsrResult(TOPIC_ID, 0, failure, 0, 3, 8, (0, 1), 0),)
        )

    async def main() -> None:
        changes = queue(call)
        partition = Undecided()
        changes.submit(partition)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while partition.item is not None:
                await real_sleep(0.001)
        await changes.close()

    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr(alter_partition.asyncio, "sleep", sleep)
    asyncio.run(main())
    assert asked == [0, 1, 2, 3]


def test_a_lost_replica_that_is_taken_back_leaves_again_after_a_while() -> None:
    """The leader may not know yet that nobody follows here: not an entry for each round trip."""
    asked: list[int] = []
    tp = TopicPartition("t", 0)
    record = PartitionRecord(TOPIC_ID, 0, (0, 1), (0, 1), 1, 3, 7)

    async def call(_controller: int, _method: str, request: Any, _timeout: float) -> Any:
        asked.append(request.changes[0].isr[0].broker_id)
        result = controller_rpc.IsrResult(TOPIC_ID, 0, None, 1, 3, 8, (1,), 0)
        asyncio.get_running_loop().call_soon(changes.resign, tp, record)  # it is taken back
        return controller_rpc.AlterPartitionsReply((result,))

    async def main() -> None:
        nonlocal changes
        loop = asyncio.get_running_loop()
        changes = queue(call, record)
        changes.on_still_lost = changes.resign
        began = loop.time()
        changes.resign(tp, record)
        async with asyncio.timeout(60):
            while len(asked) < 4:
                await asyncio.sleep(0.001)
        assert loop.time() - began > 0.29
        await changes.close()

    changes: Any = None
    asyncio.run(main())
    assert set(asked) == {1}, "the ISR without this node"


@pytest.mark.parametrize("refusal", [failure_of(StaleBrokerEpoch("older")), None])
def test_a_later_epoch_is_asked_for_again_after_a_while(refusal) -> None:
    """None: a controller of an older version, which does not know what was asked."""
    asked: list[int] = []
    tp = TopicPartition("t", 0)
    record = PartitionRecord(TOPIC_ID, 0, (0,), (0,), 0, 3, 7)

    async def call(_controller: int, _method: str, request: Any, _timeout: float) -> Any:
        asked.append(request.changes[0].last_epoch)
        return controller_rpc.AlterPartitionsReply(
            (controller_rpc.IsrResult(TOPIC_ID, 0, refusal, 0, 3, 7, (0,), 0),)
        )

    async def main() -> None:
        loop = asyncio.get_running_loop()
        changes = queue(call, record)

        def again(found: TopicPartition, known: PartitionRecord | None) -> None:
            assert (found, known) == (tp, record)
            if len(asked) < 3:
                changes.request_later_epoch(tp, record, 9)
            else:
                done.set()

        done = asyncio.Event()
        changes.on_later_epoch_answered = again
        began = loop.time()
        changes.request_later_epoch(tp, record, 9)
        async with asyncio.timeout(60):
            await done.wait()
        assert loop.time() - began > 0.29
        await changes.close()

    asyncio.run(main())
    assert asked == [9, 9, 9]
