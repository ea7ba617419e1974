"""Stage ``groups``: the stage ``nodes`` with consumer groups in the place of producers.

Members join, get their part, commit, leave, die, and sleep for longer than their sessions
(:mod:`tests.sim.groups_clients`); an auditor reads what they committed from every node, and
:mod:`tests.sim.groups_checks` judges what clients are told. The replicas of
``__consumer_offsets`` are judged as those of any topic.

Beside the faults of ``nodes`` a coordinator is struck at the moment at which a client reads its
answer: it dies, and nothing leaves it any more. What was acknowledged must be elsewhere by then.
The last trial of some histories cuts a coordinator off from all other nodes, but not from its
clients, until a successor acknowledges commits (``depose``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kept.node.coordinator.common.partitioner import partition_for
from kept.node.metadata.internal_topics import CONSUMER_OFFSETS
from kept.storage.types import TopicPartition
from tests.sim.groups_checks import GroupChecks
from tests.sim.groups_clients import TOPIC, Auditor, GroupClient, Member
from tests.sim.nodes_clients import Topic
from tests.sim.nodes_history import PARTITIONS, NodesHistory
from tests.sim.passes import passes_run_here

if TYPE_CHECKING:
    pass

GROUPS: Final = 3
DEPOSED_S: Final = 3.0
"""How long a deposed coordinator is still read from."""


class GroupsHistory(NodesHistory):
    """One seed of stage ``groups``."""

    writers: list[Member]  # type: ignore[assignment]
    topic = CONSUMER_OFFSETS
    subscribed = (TOPIC, 3)
    trials = ("depose", "return", "")
    changes_voters = False
    again_s = 15.0

    def __init__(self, seed: int, *, strikes: float | None = None, **options: Any) -> None:
        """``strikes``: how often a coordinator is struck at an answer; drawn if None."""
        super().__init__(seed, **options)
        random = self.random
        self.strikes = random.choice((0.0, 0.03, 0.1)) if strikes is None else strikes
        self.nap_share = random.choice((0.0, 0.02))
        self.leave_share = random.choice((0.5, 0.9))
        self.topic_configs.pop("retention.bytes", None)
        self.settings |= {
            "log.cleaner.enable": "false",  # the checkers of replicas know of no passes here
            "offsets.topic.num.partitions": str(PARTITIONS),
            "group.min.session.timeout.ms": "1000",
            "group.initial.rebalance.delay.ms": random.choice(("0", "300")),
        }
        self.operator.kinds = [kind for kind in self.operator.kinds if kind != "delete records"]
        self.group_checks = GroupChecks(
            lambda group: self.checks.register(self.partition_of(group)).give_ups, self.loop.time
        )
        self._values = 0

    def partition_of(self, group: str) -> TopicPartition:
        """Where a group lives."""
        return TopicPartition(CONSUMER_OFFSETS, partition_for(group, PARTITIONS))

    def coordinating(self, group: str) -> tuple[int, int] | None:
        """The node that coordinates a group, and its epoch, as the metadata has it."""
        state = self.checks.register(self.partition_of(group)).state
        return None if state is None else (state.leader, state.leader_epoch)

    def next_value(self) -> int:
        """An offset that nobody committed."""
        self._values += 1
        return self._values

    async def create_topics(self) -> None:
        """See :meth:`NodesHistory.create_topics`."""
        if self.random.random() < 0.7:  # else whoever looks for a coordinator first makes it
            await super().create_topics()
        await self.operator.create(Topic(*self.subscribed))

    def make_clients(self) -> list[Any]:
        """See :meth:`NodesHistory.make_clients`."""
        random, clients = self.random, []
        for number in range(GROUPS):
            group = f"group-{number}"
            static_share = random.choice((0.0, 0.0, 0.5))
            for slot in range(1 if number == 0 else random.randint(2, 3)):
                static = random.random() < static_share
                pause_s = random.choice((0.2, 1.5))
                self.writers.append(Member(self, group, f"{group}.{slot}", static, pause_s))
            clients.append(Auditor(GroupClient(self, group)))
        return [*self.writers, *clients]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See :meth:`NodesHistory.watched`: replicas of the internal topic make manifests."""
        with super().watched(), passes_run_here(self):
            yield

    # Faults.

    async def try_last(self) -> None:
        """See :meth:`NodesHistory.try_last`."""
        if self.faults.trial != "depose":
            await super().try_last()
            return
        deposed = self.coordinating("group-0")
        assert deposed is not None
        machine = self.machines[deposed[0]]
        self.faults.isolate(machine)
        await self.until(lambda: self.coordinating("group-0") != deposed, "a successor")
        self.world.counts["coordinators deposed"] += 1
        since, members = self.loop.time(), [m for m in self.writers if m.group == "group-0"]
        await self.until(
            lambda: any(m.acknowledged_s > since for m in members), "a commit at the successor"
        )
        await asyncio.sleep(DEPOSED_S)
        self.check()
        self.faults.heal()

    # What must be true.

    async def verify(self) -> None:
        """Everybody who may answer has the last offsets."""
        since_s = self.loop.time()
        for number in range(GROUPS):
            group = f"group-{number}"
            client = GroupClient(self, group)
            found: dict[int, int] | str = ""
            while not isinstance(found, dict):
                found = await client.committed(await client.find(), stable=True)
            self.group_checks.read(group, "the end", since_s, found)
            client.close()
