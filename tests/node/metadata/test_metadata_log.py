"""The metadata log on the loop: three voters that speak with each other without a network."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from kept.cluster.metadata.records import ConfigRecord
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import NO_DIRECTORY, WAL_NAME
from kept.cluster.raft.ready import RaftSettings
from kept.node.metadata.metadata_log import MetadataLog
from kept.node.runtime.counters import Counters
from kept.storage.errors import DamagedData, InvariantViolation, MachineError, NotController
from tests.support.simulated_disk import SimulatedDisk

SETTING = [ConfigRecord(4, "", "k", "v")]


class Three:
    """Voters 0 to 2; what those in ``cut`` send and are sent is lost."""

    def __init__(self, election_ticks: int) -> None:
        loop = asyncio.get_running_loop()
        self.disks = [SimulatedDisk(seed=n) for n in range(3)]
        self.nodes = [MetadataLog(loop, Counters()) for _ in range(3)]
        self.failures: dict[int, str] = {}
        self.cut: set[int] = set()
        listed = tuple(Voter(n, NO_DIRECTORY, f"node-{n}", 1) for n in range(3))
        for number, node in enumerate(self.nodes):
            node.open(
                "/meta",
                self.disks[number],
                node_id=number,
                directory_id=UUID(int=number + 1),
                voters=listed,
                observer=False,
                settings=RaftSettings(election_ticks=election_ticks),
            )
            node.send = self.deliver
            node.on_failure = lambda why, number=number: self.failures.update({number: why})
            node.start_ticking()
            node.pump()

    def deliver(self, message) -> None:
        if not {message.sender, message.to} & self.cut:
            asyncio.get_running_loop().call_soon(self.nodes[message.to].receive, message)

    async def leader(self, *, without: int | None = None) -> int:
        while True:
            for number, node in enumerate(self.nodes):
                if node.leads and number != without:
                    return number
            await asyncio.sleep(0.005)


def play(scene, election_ticks: int) -> None:
    async def whole() -> None:
        three = Three(election_ticks)
        try:
            async with asyncio.timeout(60):
                await scene(three)
        finally:
            for node in three.nodes:
                await node.close()

    asyncio.run(whole())


def test_a_leader_whose_disk_fails_hands_over_without_a_time_out():
    async def scene(three):
        sick = await three.leader()
        three.disks[sick].fail("write", WAL_NAME)
        with pytest.raises(MachineError):
            await three.nodes[sick].propose(SETTING)
        assert "the metadata log failed: /meta/metadata.wal" in three.failures[sick]
        well = await three.leader(without=sick)
        await three.nodes[well].propose(SETTING)

    play(scene, election_ticks=1_000_000)


def test_a_follower_applies_an_entry_of_many_records_in_slices():
    async def scene(three):
        leading = await three.leader()
        many = [ConfigRecord(4, "", f"k{number}", "v") for number in range(5_000)]
        await three.nodes[leading].propose(many)
        following = [node for number, node in enumerate(three.nodes) if number != leading]
        while not all("k4999" in node.image.config(4, "") for node in following):
            assert not three.failures
            await asyncio.sleep(0.005)

    play(scene, election_ticks=6)


def test_who_waits_for_a_leader_that_steps_down_hears_of_it():
    async def scene(three):
        old = await three.leader()
        three.cut.add(old)
        with pytest.raises(NotController, match="nobody knows yet"):
            await three.nodes[old].propose(SETTING)
        await three.nodes[await three.leader(without=old)].propose(SETTING)

    play(scene, election_ticks=6)


def test_a_reader_at_a_leader_that_steps_down_hears_of_it():
    async def scene(three):
        old = await three.leader()
        node, roles = three.nodes[old], []
        await node.propose(SETTING)
        node.on_applied = lambda: roles.append(node.leads)
        three.cut.add(old)
        with pytest.raises(NotController, match="this node leads no more"):
            await node.read_barrier()
        while not roles:
            await asyncio.sleep(0.005)
        assert roles[0] is False, "nothing was applied, and it leads no more"
        assert not node._barriers

    play(scene, election_ticks=6)


def test_a_log_that_contradicts_itself_ends_the_node(monkeypatch):
    async def scene(three):
        leader = await three.leader()
        node = three.nodes[leader]

        def contradicts(_):
            raise DamagedData("/meta/metadata.wal", 7, -1, "entry 9: no broker 1 with epoch 3")

        monkeypatch.setattr(node.raft_node, "done_in_steps", contradicts)
        waiting = asyncio.ensure_future(node.propose(SETTING))
        while leader not in three.failures:
            await asyncio.sleep(0.005)
        assert "entry 9: no broker 1" in three.failures[leader]
        waiting.cancel()
        await three.leader(without=leader)

    play(scene, election_ticks=6)


@pytest.mark.parametrize("error", [InvariantViolation("entry 9 is committed"), KeyError(9)])
@pytest.mark.parametrize("event", ["receive", "tick", "peer_down", "work"])
def test_a_bug_that_an_event_shows_ends_the_node(monkeypatch, capsys, event, error):
    """Its member may be half changed: nothing that it says from then on can be relied on."""

    async def scene(three):
        broken = await three.leader()
        node = three.nodes[broken]

        def fail(*_):
            raise error

        monkeypatch.setattr(node.raft_node, event, fail)
        if event == "peer_down":
            node.peer_down((broken + 1) % 3)
        while broken not in three.failures:
            await asyncio.sleep(0.005)
        assert three.failures.keys() == {broken}
        assert str(error) in three.failures[broken]
        said = capsys.readouterr().err
        assert said.count("the metadata log failed") == 1
        assert "Traceback" in said
        well = await three.leader(without=broken)
        await three.nodes[well].propose(SETTING)

    play(scene, election_ticks=6)


def test_whoever_follows_the_metadata_may_fail(capsys):
    async def scene(three):
        leader = await three.leader()

        def fail():
            raise KeyError("a bug of ours")

        three.nodes[leader].on_applied = fail
        await three.nodes[leader].propose(SETTING)
        await three.nodes[leader].propose(SETTING)
        assert not three.failures
        assert "following the metadata failed" in capsys.readouterr().err

    play(scene, election_ticks=1_000_000)


@pytest.mark.parametrize("broken", ["send", "probe"])
def test_a_bug_of_the_transport_does_not_end_the_node(capsys, broken):
    """What it fails at is lost, as on the network; the log goes on when it works again."""

    async def scene(three):
        leader = await three.leader()
        node, failed = three.nodes[leader], []
        works = getattr(node, broken)

        def fail(given):
            failed.append(given)
            raise KeyError("a bug of ours")

        setattr(node, broken, fail)
        if broken == "probe":
            node.raft_node.drain_probes = lambda: [(leader + 1) % 3]
        while len(failed) < 3:
            await asyncio.sleep(0.005)
        setattr(node, broken, works)
        await node.propose(SETTING)
        assert not three.failures
        said = capsys.readouterr().err
        assert said.count("level=error") == 1 and "Traceback" in said

    play(scene, election_ticks=1_000_000)


def test_nobody_is_remembered_who_asked_a_follower_whether_it_leads():
    async def scene(three: Three) -> None:
        leader = await three.leader()
        follower = three.nodes[(leader + 1) % 3]
        for _ in range(3):
            with pytest.raises(NotController):
                await follower.read_barrier()
        assert not follower._barriers

    play(scene, 20)
