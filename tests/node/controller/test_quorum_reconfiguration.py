"""Changes of voters at the active controller, with a metadata log that answers when it is told."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import HardState
from kept.cluster.raft.log import RaftLog
from kept.cluster.raft.progress import Progress
from kept.cluster.raft.ready import RaftSettings
from kept.cluster.raft.state import RaftState
from kept.cluster.raft.voter_set import VoterSet
from kept.node.controller.quorum_reconfiguration import QuorumReconfiguration
from kept.node.internode.controller_rpc import ChangeVotersRequest
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.runtime.runtime import Runtime
from kept.storage.errors import InvalidRequest, NotController, VoterNotFound
from tests.support.given import Given
from tests.support.simulated_disk import SimulatedDisk

TICKS = 100


class Metadata:
    """Node 0 leads; nodes 1 and 2 vote, of all others nothing is heard."""

    def __init__(self) -> None:
        self.leads = True
        self.leader_id = 0
        self.proposed: asyncio.Queue[tuple[Voter, ...]] = asyncio.Queue()
        self.commits = asyncio.Semaphore(0)
        voters = tuple(Voter(n, UUID(int=100 + n), f"node-{n}", 10092) for n in range(3))
        self.raft = RaftState(
            node_id=0,
            directory_id=UUID(int=100),
            log=RaftLog(0, 0, ()),
            voter_set=VoterSet(0, voters),
            durable=HardState(),
            random=lambda n: 0,
            settings=RaftSettings(),
        )
        self.raft.ticks = TICKS
        self.raft.progress = {n: Progress(UUID(int=100 + n), 51, TICKS, 50) for n in (1, 2)}
        self.raft_node = Given(
            node_id=0,
            directory_id=self.raft.directory_id,
            voters=voters,
            commit_index=50,
            progress=self.raft.progress,
            is_alive=self.raft.is_alive,
        )

    async def change_voters(self, voters: tuple[Voter, ...]) -> int:
        await self.proposed.put(voters)
        await self.commits.acquire()
        self.raft_node.voters = voters
        return 51


def play(scene) -> None:
    async def whole() -> None:
        metadata = Metadata()
        addresses = Given(node_address={3: ("node-3", 10092)}.get)
        runtime = Runtime(SimulatedDisk(seed=1))
        async with asyncio.timeout(60):
            await scene(
                QuorumReconfiguration(runtime, metadata, NodeIdentity(0), addresses), metadata
            )

    asyncio.run(whole())


def add(node_id: int, **more) -> ChangeVotersRequest:
    return ChangeVotersRequest(True, node_id, **more)


def remove(node_id: int) -> ChangeVotersRequest:
    return ChangeVotersRequest(False, node_id)


def ids(voters: tuple[Voter, ...]) -> list[int]:
    return [voter.node_id for voter in voters]


def test_a_second_change_is_refused_while_the_first_is_under_way():
    async def scene(quorum_reconfiguration, metadata):
        first = asyncio.ensure_future(quorum_reconfiguration.change(remove(2)))
        assert ids(await metadata.proposed.get()) == [0, 1]
        with pytest.raises(InvalidRequest, match="node 2 is being removed; try again"):
            await quorum_reconfiguration.change(remove(1))
        metadata.commits.release()
        assert (await first).index == 51
        metadata.commits.release()
        assert (await quorum_reconfiguration.change(remove(1))).index == 51, (
            "also after one that was refused"
        )

    play(scene)


def test_a_disk_that_was_replaced_leaves_before_the_new_one_joins():
    async def scene(quorum_reconfiguration, metadata):
        new = UUID(int=777)
        metadata.raft.progress[2] = Progress(new, 1, TICKS, 0)
        change = asyncio.ensure_future(quorum_reconfiguration.change(add(2)))
        await asyncio.sleep(0.05)
        assert metadata.proposed.empty(), "it has not caught up"
        metadata.raft.progress[2].match_index = 50
        assert ids(await metadata.proposed.get()) == [0, 1]
        metadata.commits.release()
        joined = await metadata.proposed.get()
        assert joined == (*metadata.raft_node.voters, Voter(2, new, "node-2", 10092))
        metadata.commits.release()
        await change

    play(scene)


def test_what_is_refused_and_what_would_be_right():
    async def scene(quorum_reconfiguration, metadata):
        core = metadata.raft
        core.progress[3] = Progress(UUID(int=103), 51, TICKS, 50)
        core.progress[4] = Progress(UUID(int=104), 51, TICKS, 50)
        for request, words in (
            (remove(9), r"node 9 does not vote; the voters are \[0, 1, 2\]"),
            (add(1), "votes already, from this very disk"),
            (add(0), "votes already"),
            (add(9), "does not follow the metadata log: start it"),
            (add(4), "is not known.*--address"),
            (add(3, directory_id=UUID(int=5)), f"follows from directory {UUID(int=103)}"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await quorum_reconfiguration.change(request)
        core.progress[1].last_contact = TICKS - 11
        core.down.add(2)
        with pytest.raises(InvalidRequest, match=r"\[0, 1\] only \[0\] would be alive"):
            await quorum_reconfiguration.change(remove(2))
        with pytest.raises(InvalidRequest, match=r"\[0, 1, 2, 3\] only \[0, 3\] would be alive"):
            await quorum_reconfiguration.change(add(3))
        metadata.leads, metadata.leader_id = False, 2
        with pytest.raises(NotController) as caught:
            await quorum_reconfiguration.change(add(3))
        assert caught.value.leader_id == 2
        assert metadata.proposed.empty()

    play(scene)


def test_the_last_voter_stays():
    async def scene(quorum_reconfiguration, metadata):
        metadata.raft_node.voters = metadata.raft_node.voters[:1]
        with pytest.raises(InvalidRequest, match="node 0 is the last voter: add another one first"):
            await quorum_reconfiguration.change(remove(0))

    play(scene)


def test_who_is_removed_is_named_by_its_disk_too():
    async def scene(quorum_reconfiguration, metadata):
        wrong = ChangeVotersRequest(False, 2, UUID(int=777))
        with pytest.raises(VoterNotFound, match=f"votes from directory {UUID(int=102)}, not"):
            await quorum_reconfiguration.change(wrong)
        change = asyncio.ensure_future(
            quorum_reconfiguration.change(ChangeVotersRequest(False, 2, UUID(int=102)))
        )
        assert ids(await metadata.proposed.get()) == [0, 1]
        metadata.commits.release()
        await change

    play(scene)
