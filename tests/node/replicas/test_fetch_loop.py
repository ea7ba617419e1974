"""The stream of fetches to one leader: how long it waits behind a request."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any, cast

import pytest

from kept.client.node_connection import NodeConnection
from kept.node.replicas import fetch_loop
from kept.node.replicas.fetch_loop import FetchContext, Fetchers
from kept.node.replicas.local_replica import LocalReplica
from kept.replication.fetcher import PATIENCE_MS
from kept.replication.partition import Partition
from kept.replication.quota import ReplicationQuota
from kept.storage.errors import InvariantViolation
from kept.storage.log.log import Log
from kept.storage.types import LogConfig, TopicPartition
from tests.support.given import Given
from tests.support.logs import NOW, TOPIC_ID
from tests.support.replicas import ManualLoop, live_config
from tests.support.simulated_disk import SimulatedDisk

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


def fetch_context(loop: ManualLoop) -> FetchContext:
    return FetchContext(
        runtime=cast("Any", Given(loop=loop, now_ms=lambda: NOW)),
        config=live_config(),
        identity=cast("Any", Given(node_id=1, broker_epoch=1)),
        addresses=cast("Any", Given(node_address=lambda _: ("h", 1), node_tls=lambda: None)),
        detector=cast("Any", Given(connection_broke=lambda _: None)),
        quota=ReplicationQuota(),
    )


@pytest.mark.parametrize("part", ["next_request", "_exchange"])
@pytest.mark.parametrize("error", [KeyError("x"), InvariantViolation("HW 9 of a log of 7")])
def test_a_bug_of_ours_ends_no_stream_and_is_in_the_log(monkeypatch, capsys, part, error):
    """It was taken for a leader that does not answer, or nobody fetched from that one any more."""

    async def scene() -> None:
        monkeypatch.setattr(fetch_loop, "RESTART_S", 0.001)
        monkeypatch.setattr(fetch_loop, "monotonic_ms", count(1_000, 10_000).__next__)
        went_on = asyncio.Event()
        calls = 0

        def fail(*_: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 2:
                went_on.set()
            raise error

        of = fetch_loop.FetcherCore if part == "next_request" else fetch_loop._Stream
        monkeypatch.setattr(of, part, fail)
        fetchers = Fetchers(fetch_context(TimedLoop()))
        fetchers.follow(follower(SimulatedDisk(), 0), LEADER, 3)
        async with asyncio.timeout(60):
            await went_on.wait()
        await fetchers.stop()
        assert capsys.readouterr().err.count("fetching failed") >= 2

    asyncio.run(scene())


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
        fetchers, disk = Fetchers(fetch_context(loop)), SimulatedDisk()
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
