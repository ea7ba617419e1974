"""The stream of fetches to one leader: how long it waits behind a request."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from kept.client.node_connection import NodeConnection
from kept.node.replicas import fetch_loop
from kept.node.replicas.fetch_loop import FetchContext, Fetchers
from kept.node.replicas.local_replica import LocalReplica
from kept.replication.fetcher import PATIENCE_MS
from kept.replication.partition import Partition
from kept.replication.quota import ReplicationQuota
from kept.storage.log.log import Log
from kept.storage.types import LogConfig, TopicPartition
from kept.testing.simulated_disk import SimulatedDisk
from tests.support.logs import NOW, TOPIC_ID
from tests.support.parts import Given
from tests.support.replicas import ManualLoop, live_config

LEADER = 2


class TimedLoop(ManualLoop):
    """Tasks run, timers are the test's."""

    def create_task(self, work: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)


def follower(disk: SimulatedDisk, number: int) -> LocalReplica:
    tp = TopicPartition("t", number)
    log = Log.open(f"/t-{number}", tp, TOPIC_ID, LogConfig(), disk, now_ms=NOW)
    partition = Partition(log, 1)
    partition.become_follower(LEADER, 3, 1, (2,), (1, 2), NOW)
    return LocalReplica(partition, Given(), Given())  # type: ignore[arg-type]


def test_a_request_whose_connection_is_being_made_is_given_up_later_not_at_once(monkeypatch):
    """The wait for it ended at once, again and again: the follower kept a processor busy."""

    async def scene() -> None:
        now_ms = 1_000
        monkeypatch.setattr(fetch_loop, "monotonic_ms", lambda: now_ms)
        opening, never = asyncio.Event(), asyncio.Event()

        async def opened(*_: Any, **__: Any) -> None:
            opening.set()
            await never.wait()

        monkeypatch.setattr(NodeConnection, "open", opened)
        loop = TimedLoop()
        context = FetchContext(
            runtime=cast("Any", Given(loop=loop, now_ms=lambda: NOW)),
            config=live_config(),
            identity=cast("Any", Given(node_id=1, broker_epoch=1)),
            addresses=cast("Any", Given(node_address=lambda _: ("h", 1), node_tls=lambda: None)),
            detector=cast("Any", Given()),
            quota=ReplicationQuota(),
        )
        fetchers, disk = Fetchers(context), SimulatedDisk()
        fetchers.follow(follower(disk, 0), LEADER, 3)
        async with asyncio.timeout(60):
            await opening.wait()
        fetchers.follow(follower(disk, 1), LEADER, 3)
        assert loop.waits == [PATIENCE_MS / 1000]
        for tries in range(2, 5):
            now_ms += PATIENCE_MS
            loop.timers[-1].function()
            assert loop.waits == [PATIENCE_MS / 1000] * tries
        await fetchers.stop()

    asyncio.run(scene())
