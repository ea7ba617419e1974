"""How long a start waits: not for ever, and not where everybody else refuses it."""

from __future__ import annotations

import asyncio

import pytest

from kept.node.config.listeners import ConfiguredVoter
from kept.node.config.node_config import NodeConfig
from kept.node.internode.identity import node_id_taken
from kept.node.metadata.join_timeout import POLL_S, REFUSED_S, Joining
from kept.storage.errors import ConfigurationError, RequestTimedOut
from kept.testing import Cluster
from tests.support.given import Given

VOTERS = tuple(ConfiguredVoter(n, "localhost", 1000 + n) for n in range(3))


class Start:
    """Node 0 of three that waits; every look takes POLL_S of a clock that nobody sleeps for."""

    def __init__(self, voters: tuple[ConfiguredVoter, ...] = VOTERS, broker: bool = True) -> None:
        self.now = 50.0
        self.refusals: dict[int, str] = {}
        settings = {
            "node.id": "0",
            "process.roles": "broker,controller" if broker else "controller",
            "controller.quorum.voters": ",".join(map(str, voters)),
            "listeners": "CONTROLLER://localhost:1000",
            "controller.listener.names": "CONTROLLER",
            "initial.broker.registration.timeout.ms": "60000",
        }
        if broker:
            settings["listeners"] += ",PLAINTEXT://localhost:2000"
        self.metadata = Given(leader_id=None)
        self.joining = Joining(
            Given(loop__time=lambda: self.now),
            NodeConfig.load(None, settings, {}),
            self.metadata,
            Given(refusals=self.refusals),
        )

    def look(self, seconds: float) -> None:
        for _ in range(round(seconds / POLL_S)):
            self.joining._check_patience()
            self.now += POLL_S


def test_an_event_ends_the_wait():
    async def scene() -> None:
        event = asyncio.Event()
        waiting = asyncio.ensure_future(Start().joining.until(event))
        await asyncio.sleep(0)
        assert not waiting.done()
        event.set()
        await asyncio.wait_for(waiting, 60)

    asyncio.run(scene())


def test_the_wait_ends_with_the_patience():
    async def scene() -> None:
        start = Start()
        start.now += 61
        async with asyncio.timeout(60):
            with pytest.raises(RequestTimedOut):
                await start.joining.until(asyncio.Event())

    asyncio.run(scene())


def test_all_others_refuse():
    start = Start()
    start.refusals.update({1: "another cluster", 2: "that too"})
    start.look(REFUSED_S)
    with pytest.raises(ConfigurationError, match="node 1: another cluster; node 2: that too"):
        start.look(2 * POLL_S)


def test_one_that_refuses_may_be_the_one_that_is_wrong():
    start = Start()
    start.refusals[1] = "another cluster"
    start.look(10 * REFUSED_S)
    start.refusals[2] = "used twice"
    start.look(REFUSED_S / 2)
    del start.refusals[1]
    start.look(REFUSED_S / 2)
    start.refusals[1] = "another cluster"
    start.look(REFUSED_S)


def test_a_node_id_that_is_taken_is_told_by_whoever_knows():
    start = Start()
    start.refusals[2] = node_id_taken(1)
    start.look(10 * REFUSED_S)  # of another node's id
    start.refusals[2] = node_id_taken(0)
    start.look(REFUSED_S)
    del start.refusals[2]  # the process before this one has ended
    start.look(2 * POLL_S)
    start.refusals[2] = node_id_taken(0)
    start.look(REFUSED_S)
    with pytest.raises(ConfigurationError, match="node id 0 belongs to another process"):
        start.look(2 * POLL_S)
    start.refusals[1] = "another cluster"  # which may be so, and is not what has to be mended
    with pytest.raises(ConfigurationError) as ended:
        start.look(POLL_S)
    assert str(ended.value) == node_id_taken(0)


def test_a_broker_that_is_not_registered_in_time_ends():
    start = Start()
    start.look(60)
    with pytest.raises(RequestTimedOut, match=r"timeout\.ms \(60 s\): no controller is heard: are"):
        start.look(2 * POLL_S)
    start.refusals[1] = "another cluster"
    with pytest.raises(RequestTimedOut, match="is heard; node 1: another cluster"):
        start.look(POLL_S)
    start.metadata.leader_id = 2
    with pytest.raises(RequestTimedOut, match="node 2, the active controller, did not let it in"):
        start.look(POLL_S)


def test_a_controller_waits_for_the_others():
    Start(broker=False).look(600)
    alone = Start(voters=VOTERS[:1], broker=False)
    alone.refusals[7] = "a broker of another cluster"
    alone.look(600)


@pytest.mark.slow
def test_a_node_that_nobody_registers_ends():
    with Cluster(nodes=3) as cluster:
        for node in range(3):
            cluster.stop(node)
        cluster.start(0, wait=False, initial_broker_registration_timeout_ms=1500)
        assert cluster.wait(0) == 1
        told = cluster.log(0).splitlines()[-1]
        assert "not registered within initial.broker.registration.timeout.ms (1.5 s)" in told
