"""Clients of stage ``groups``: members that commit, an auditor that reads what they committed.

A member lives several times, each time as another client: it joins, gets its part, reads the
committed offsets of it, heartbeats and commits; then it leaves, or dies, or sleeps for longer than
its session and goes on in the generation that it knew. Members with an instance id come back under
it. Each value is sent once, so that whoever reads it knows which commit it was.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.client.admin.groups import decode_assignment, encode_assignment, encode_subscription
from kept.storage.errors import KeptError
from kept.storage.types import TopicPartition
from tests.sim.nodes_clients import REPLY_S, Client

if TYPE_CHECKING:
    from tests.sim.groups_checks import GroupChecks
    from tests.sim.nodes_history import NodesHistory
    from tests.sim.nodes_machine import Machine

    class GroupsHistory(NodesHistory):
        """A history with members of groups: what it must have."""

        group_checks: GroupChecks
        subscribed: tuple[str, int]
        """The topic that groups consume, and how many partitions it has."""
        strikes: float
        nap_share: float
        leave_share: float

        def next_value(self) -> int: ...
        def coordinating(self, group: str) -> tuple[int, int] | None: ...


TOPIC: Final = "t"
SESSION_S: Final = 2.5
REBALANCE_S: Final = 3.0
BEAT_S: Final = 0.25
AGAIN_S: Final = 0.1
UNSTABLE: Final = -2
"""The offset of a partition that a transaction may still move, or that is not told."""
REFUSED: Final = frozenset(
    {
        "illegal_generation",
        "unknown_member_id",
        "fenced_instance_id",
        "rebalance_in_progress",
        "coordinator_load_in_progress",
        "group_id_not_found",
    }
)
"""Commits with these answers were not taken; of others nobody knows."""
LOST: Final = frozenset(
    {"not_coordinator", "coordinator_not_available", "coordinator_load_in_progress", "closed"}
)
"""The coordinator is another one, or is not ready."""


class GroupClient(Client):
    """Finds the coordinator of a group, and speaks to it."""

    history: GroupsHistory

    def __init__(self, history: GroupsHistory, group: str) -> None:
        super().__init__(history)
        self.group = group
        self.coordinator: Machine | None = None

    async def find(self) -> Machine:
        """The coordinator, as it was known last or as somebody says. Raises KeptError."""
        if self.coordinator is None:
            history = self.history
            somebody = history.random.choice(history.machines)
            reply = await self.call(somebody, 10, 3, {"key": self.group, "key_type": 0})
            if reply.error_code.name != "none":
                raise KeptError(reply.error_code.name)
            self.coordinator = history.machines[reply.node_id]
        return self.coordinator

    async def send(self, api: int, version: int, **values: Any) -> Any:
        """A request to the coordinator. Raises KeptError where there is no answer."""
        machine = await self.find()
        try:
            return await self.call(machine, api, version, {"group_id": self.group, **values})
        except KeptError:
            self.coordinator = None
            raise

    async def committed(self, machine: Machine, *, stable: bool) -> dict[int, int] | str:
        """Partition -> offset, as a machine says; or its error. Raises KeptError."""
        topic, count = self.history.subscribed
        wanted = [{"name": topic, "partition_indexes": list(range(count))}]
        group = {"group_id": self.group, "member_id": None, "member_epoch": -1, "topics": wanted}
        reply = await self.call(machine, 9, 9, {"groups": [group], "require_stable": stable})
        found = reply.groups[0]
        if found.error_code.name != "none":
            return str(found.error_code.name)
        return {
            p.partition_index: p.committed_offset if p.error_code.name == "none" else UNSTABLE
            for p in found.topics[0].partitions
        }


class Rejoin(Exception):
    """The member's generation is over."""


@dataclass
class Member:
    """A slot of a group; see the module. ``acknowledged_s``: when it last committed."""

    history: GroupsHistory
    group: str
    name: str
    static: bool
    pause_s: float
    acknowledged_s: float = -1.0
    life: int = 0

    @property
    def live(self) -> type[Life]:
        """What a life of it is."""
        return Life

    async def run(self) -> None:
        """Life after life, until the history ends its clients."""
        random = self.history.random
        while self.history.running:
            self.life += 1
            life = self.live(self, f"{self.name}.{self.life}")
            await life.run(self.history.loop.time() + random.uniform(0.5, 6))
            await asyncio.sleep(random.uniform(0, self.pause_s))


class Life:
    """One life of a member."""

    def __init__(self, slot: Member, name: str) -> None:
        self.slot, self.name = slot, name
        self.history, self.group = slot.history, slot.group
        self.checks = slot.history.group_checks
        self.client = GroupClient(slot.history, slot.group)
        self.instance = slot.name if slot.static else None
        self.member_id = ""
        self.generation = -1
        self.part: list[int] = []

    async def run(self, until_s: float) -> None:
        """Live, and end somehow."""
        history = self.history
        self.checks.joins(self.group, self.name)
        history.note("member", "begins", self.name)
        while history.running:
            try:
                await self._join()
                await self._work(until_s)
                break
            except Rejoin:
                continue
            except KeptError as error:
                history.note("member", f"{self.name}: {error}")
                await asyncio.sleep(AGAIN_S)
        await self._end()
        self.client.close()

    # A generation.

    async def _join(self) -> None:
        """Become a member of a generation, with a part of it."""
        topic, count = self.history.subscribed
        joined = await self.client.send(
            11,
            9,
            session_timeout=int(SESSION_S * 1000),
            rebalance_timeout=int(REBALANCE_S * 1000),
            member_id=self.member_id,
            group_instance_id=self.instance,
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": encode_subscription([topic])}],
            reason=None,
        )
        error = joined.error_code.name
        if error == "member_id_required" or (error == "none" and joined.member_id):
            self.member_id = joined.member_id
            self.checks.member(self.group, self.name, self.member_id)
        self._refused(error)
        self.generation = joined.generation_id
        members = [m.member_id for m in joined.members]
        parts = {
            m: [TopicPartition(topic, p) for p in range(count) if p % len(members) == at]
            for at, m in enumerate(sorted(members))
        }
        leads = joined.leader == self.member_id and not joined.skip_assignment
        synced = await self.client.send(
            14,
            5,
            generation_id=self.generation,
            member_id=self.member_id,
            group_instance_id=self.instance,
            protocol_type="consumer",
            protocol_name="range",
            assignments=[
                {"member_id": m, "assignment": encode_assignment(part)}
                for m, part in parts.items()
                if leads
            ],
        )
        self._refused(synced.error_code.name)
        self.part = [tp.partition for tp in decode_assignment(synced.assignment)]
        owner = self.instance or self.member_id
        self.checks.assigned(self.group, self.generation, owner, self.part)
        if leads:
            self.checks.members(self.group, members)
        self.history.note("member", "has", self.name, self.generation, self.part)
        self.history.told("generations", self.client.coordinator, self.history.strikes)

    def _refused(self, error: str) -> None:
        """Raises Rejoin, KeptError for an error."""
        if error == "none":
            return
        self.history.world.counts[f"members told {error}"] += 1
        if error in LOST:
            self.client.coordinator = None
            raise KeptError(error)
        if error in {"unknown_member_id", "fenced_instance_id"}:
            self.member_id = ""
        raise Rejoin

    async def _work(self, until_s: float) -> None:
        """Read what is committed, then heartbeat and commit, till this life is over."""
        history = self.history
        await self._read()
        while history.running and history.loop.time() < until_s:
            await asyncio.sleep(history.random.uniform(0, 2 * BEAT_S))
            if history.random.random() < history.nap_share:
                await self._nap()
            if self.part and history.random.random() < 0.7:
                await self._commit()
            beat = await self.client.send(
                12,
                4,
                generation_id=self.generation,
                member_id=self.member_id,
                group_instance_id=self.instance,
            )
            self._refused(beat.error_code.name)

    async def _read(self) -> None:
        while self.part:
            since_s = self.history.loop.time()
            found = await self.client.committed(await self.client.find(), stable=True)
            if isinstance(found, dict):
                mine = {partition: found[partition] for partition in self.part}
                self.checks.read(self.group, self.name, since_s, mine)
                return
            if found in LOST:
                self.client.coordinator = None
            await asyncio.sleep(AGAIN_S)

    async def _nap(self) -> None:
        """Longer than the session: others get its part, and it does not know."""
        self.history.world.counts["members that slept"] += 1
        await asyncio.sleep(SESSION_S * self.history.random.uniform(1.1, 2))

    async def _commit(self) -> None:
        history = self.history
        values = {partition: history.next_value() for partition in self.part}
        commits = self.checks.commit_begins(self.group, self.generation, values)
        partitions = [
            {
                "partition_index": partition,
                "committed_offset": value,
                "committed_leader_epoch": -1,
                "committed_metadata": "",
            }
            for partition, value in values.items()
        ]
        reply = await self.client.send(
            8,
            8,
            generation_id_or_member_epoch=self.generation,
            member_id=self.member_id,
            group_instance_id=self.instance,
            topics=[{"name": TOPIC, "partitions": partitions}],
        )
        (error,) = {p.error_code.name for p in reply.topics[0].partitions}
        history.note("member", f"commit: {error}", self.name, self.generation, values)
        if error == "none":
            self.slot.acknowledged_s = history.loop.time()
            history.world.counts["commits acknowledged"] += 1
            self.checks.commit_acknowledged(self.group, commits)
            history.told("commits", self.client.coordinator, history.strikes)
            return
        self.checks.commit_failed(commits, refused=error in REFUSED)
        self._refused(error)

    # The end of a life.

    async def _end(self) -> None:
        """Leave, or say nothing any more."""
        history = self.history
        if self.instance is None and history.random.random() < history.leave_share:
            while history.running:
                try:
                    if await self._leave():
                        return
                except KeptError:
                    await asyncio.sleep(AGAIN_S)
        self.checks.died(self.group, self.name)
        history.world.counts["members that died"] += 1

    async def _leave(self) -> bool:
        """Whether it is out; False: ask again. Raises KeptError."""
        if not self.member_id:
            return False
        who = {"member_id": self.member_id, "group_instance_id": None, "reason": None}
        reply = await self.client.send(13, 5, members=[who])
        error = reply.error_code.name
        if error == "none":
            error = reply.members[0].error_code.name
        if error in LOST:
            self.client.coordinator = None
            await asyncio.sleep(AGAIN_S)
            return False
        self.history.note("member", f"leaves: {error}", self.name)
        if error == "none":
            self.history.world.counts["members that left"] += 1
            self.checks.left(self.group, self.name)
            self.history.told("leaves", self.client.coordinator, 5 * self.history.strikes)
        else:
            self.checks.died(self.group, self.name)
        return True


@dataclass
class Auditor:
    """Reads the committed offsets of a group from whoever answers, and describes the group."""

    client: GroupClient

    async def run(self) -> None:
        """Until the history ends its clients."""
        client = self.client
        history, group = client.history, client.group
        while history.running:
            await asyncio.sleep(history.random.uniform(0.02, 0.3))
            machine = history.random.choice(history.machines)
            since_s = history.loop.time()
            try:
                async with asyncio.timeout(REPLY_S):
                    if history.random.random() < 0.3:
                        await self._describe()
                        continue
                    stable = history.random.random() < 0.5
                    found = await client.committed(machine, stable=stable)
            except (KeptError, TimeoutError):
                continue
            if isinstance(found, dict):
                history.world.counts["offsets read"] += 1
                history.group_checks.read(group, f"n{machine.node_id}", since_s, found)
                history.told("reads", machine, history.strikes)
        client.close()

    async def _describe(self) -> None:
        """Ask who coordinates, by what is decided; who does no more by then is not judged."""
        client = self.client
        history, since_s = client.history, client.history.loop.time()
        before = history.coordinating(client.group)
        if before is None or before[0] < 0:
            return
        machine = history.machines[before[0]]
        values = {"groups": [client.group], "include_authorized_operations": False}
        found = (await client.call(machine, 15, 5, values)).groups[0]
        if history.coordinating(client.group) == before and not found.error_code:
            members = [m.member_id for m in found.members]
            history.world.counts["groups described"] += 1
            history.group_checks.described(client.group, f"n{machine.node_id}", since_s, members)
