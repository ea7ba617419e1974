"""The shell of the group coordinator: one :class:`Shard` per partition of ``__consumer_offsets``.

A shard is loaded when this node leads its partition. It waits until the high watermark reaches the
log end offset of the election: what an earlier leader acknowledged is below that, and may be above
the high watermark of a follower. Then it reads the log in slices, so that the node goes on serving;
meanwhile requests for its groups get COORDINATOR_LOAD_IN_PROGRESS. Afterwards each request is an
event. Records are appended with acks=all, those of one turn of the loop with one write, and
responses are sent when the high watermark passes their records (and the fsync, with
``flush.messages``). The shard is unloaded when the partition or its leadership goes; requests get
NOT_COORDINATOR then, and also while this node may not act on what it leads (rule 35: the process
did not run for a while, and others may lead by now).

Kafka reads to the log end at once and answers from what it believes committed, so that for a
moment after a failover a group may see offsets older than it was told were committed.

Source: Kafka's ``GroupCoordinatorService`` and ``CoordinatorRuntime``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.memory_limit import GroupMemory
from kept.node.coordinator.groups.records import partition_for
from kept.node.coordinator.sharding.shard import Shard
from kept.node.metadata.internal_topics import CONSUMER_OFFSETS
from kept.node.runtime.logging import log
from kept.node.runtime.time_slices import ITEMS_PER_SLICE, Pace
from kept.steps import Steps
from kept.storage.errors import CoordinatorLoadInProgress, NotCoordinator
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Delta, Image
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.leadership_barrier import LeadershipBarrier
    from kept.node.metadata.metadata_log import Metadata
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.runtime import Runtime
    from kept.replication.partition import Partition

FIND_WAIT_S: Final = 3.0
"""How long FindCoordinator waits for a partition that is being created or read: clients take
seconds to come back after a refusal, and this is mostly a matter of milliseconds."""

MakeEvent = Callable[[int], ev.Event]
"""Makes the event of a request from the number that the shard gives it."""


@dataclass(eq=False, repr=False, kw_only=True)
class Coordinator:
    """The group coordinator of a node."""

    runtime: Runtime
    config: LiveConfig
    metadata: Metadata
    identity: NodeIdentity
    table: ReplicaTable
    barrier: LeadershipBarrier

    def __post_init__(self) -> None:
        self._shards: dict[int, Shard] = {}
        self._waiting: list[asyncio.Future[None]] = []

    # What the node calls.

    def start(self) -> None:
        """Load the partitions that this node leads."""
        self._follow(self.metadata.image)

    async def stop(self) -> None:
        """Write what is staged; pending requests get NOT_COORDINATOR."""
        for shard in list(self._shards.values()):
            shard.unload()
        self._shards.clear()
        await asyncio.sleep(0)

    def roles_taken(self, image: Image) -> None:
        """This node may serve what ``image`` says it leads, perhaps after it could not."""
        self._follow(image)

    def metadata_changed(self, image: Image, delta: Delta) -> None:
        """Load and unload with leadership; forget the offsets of topics that are gone."""
        touched = any(p.topic_partition.topic == CONSUMER_OFFSETS for p in delta.partitions)
        gone = [(t.name, t.topic_id) for t in delta.topics_deleted]
        if touched or any(name == CONSUMER_OFFSETS for name, _ in gone):
            self._follow(image)
        if gone:
            for shard in self._shards.values():
                shard.topics_deleted(gone)

    def partition_gone(self, tp: TopicPartition, _: BaseException | None = None) -> None:
        """A partition was deleted or its directory failed."""
        if tp.topic == CONSUMER_OFFSETS:
            self._drop(tp.partition)

    def _follow(self, image: Image) -> None:
        topic = image.topics.get(CONSUMER_OFFSETS)
        records = () if topic is None else topic.partitions
        mine = {r.partition: r for r in records if r.leader == self.identity.node_id}
        for number in list(self._shards):
            epoch = self._shards[number].leader_epoch
            if number not in mine or mine[number].leader_epoch != epoch:
                self._drop(number)
        for number, record in mine.items():
            hosted = self.table.hosted.get(TopicPartition(CONSUMER_OFFSETS, number))
            if hosted is None or number in self._shards:
                continue
            if not _leads(hosted.partition, record.leader_epoch):
                continue
            shard = self._shard(number, hosted, record.leader_epoch)
            self._shards[number] = shard
            shard.load(self._wake)
        self._wake()

    @cached_property
    def memory(self) -> GroupMemory:
        """What the groups of all shards hold."""
        return GroupMemory(self.settings().groups_max_bytes)

    def _shard(self, number: int, hosted: LocalReplica, leader_epoch: int) -> Shard:
        return Shard(
            runtime=self.runtime,
            config=self.config,
            metadata=self.metadata,
            barrier=self.barrier,
            number=number,
            hosted=hosted,
            leader_epoch=leader_epoch,
            settings=self.settings(),
            memory=self.memory,
        )

    def _drop(self, number: int) -> None:
        shard = self._shards.pop(number, None)
        if shard is not None:
            shard.unload()

    def settings(self) -> ev.GroupSettings:
        """The node's settings for groups."""
        config = self.config.current
        return ev.GroupSettings(
            group_min_session_timeout_ms=config.group_min_session_timeout_ms,
            group_max_session_timeout_ms=config.group_max_session_timeout_ms,
            group_initial_rebalance_delay_ms=config.group_initial_rebalance_delay_ms,
            group_max_size=config.group_max_size,
            group_max_bytes=config.group_max_bytes,
            groups_max_bytes=config.groups_max_bytes,
            offset_metadata_max_bytes=config.offset_metadata_max_bytes,
            offsets_retention_minutes=config.offsets_retention_minutes,
            offsets_retention_check_interval_ms=config.offsets_retention_check_interval_ms,
        )

    # What handlers call.

    def shard(self, group: str) -> Shard:
        """The shard of a group. Raises NotCoordinator, CoordinatorLoadInProgress."""
        number = self.partition_of(group)
        shard = None if number is None else self._shards.get(number)
        if shard is None:
            if not self._needs_no_wait(group):
                raise CoordinatorLoadInProgress(f"{CONSUMER_OFFSETS}-{number} is being opened")
            raise NotCoordinator(f"this node does not coordinate group {group!r}")
        if shard.failed is not None:
            raise NotCoordinator(f"{CONSUMER_OFFSETS}-{number}: {shard.failed}")
        if not shard.leads:
            raise NotCoordinator(f"{CONSUMER_OFFSETS}-{number} may be led by another node")
        if not shard.is_active:
            raise CoordinatorLoadInProgress(f"{CONSUMER_OFFSETS}-{number} is being read")
        return shard

    def submit(self, group: str, make_event: MakeEvent) -> asyncio.Future[Any]:
        """A group's core steps an event. Raises NotCoordinator, CoordinatorLoadInProgress."""
        return self.shard(group).submit(make_event)

    def join_abandoned(self, group: str, result: asyncio.Future[Any]) -> None:
        """The connection is gone of a JoinGroup that waits for ``result``."""
        number = self.partition_of(group)
        shard = None if number is None else self._shards.get(number)
        if shard is not None:
            shard.join_abandoned(group, result)

    def partition_of(self, group: str) -> int | None:
        """The partition that a group lives in; None while there is no ``__consumer_offsets``."""
        topic = self.metadata.image.topics.get(CONSUMER_OFFSETS)
        if topic is None or not topic.partitions:
            return None
        return partition_for(group, len(topic.partitions))

    def leader_of(self, group: str) -> int | None:
        """The broker that coordinates a group; None while there is none."""
        number = self.partition_of(group)
        if number is None:
            return None
        record = self.metadata.image.partition(CONSUMER_OFFSETS, number)
        return None if record is None or record.leader < 0 else record.leader

    async def wait_for(self, groups: Iterable[str]) -> None:
        """Wait until groups that this node is to coordinate are served, but not for long."""
        loop = self.runtime.loop
        deadline = loop.time() + FIND_WAIT_S
        by_partition: dict[int | None, str] = {}
        pace = Pace()
        for group in groups:
            by_partition.setdefault(self.partition_of(group), group)
            await pace.checkpoint()
        while not all(map(self._needs_no_wait, by_partition.values())):
            waiting = loop.create_future()
            self._waiting.append(waiting)
            try:
                async with asyncio.timeout_at(deadline):
                    await waiting
            except TimeoutError:
                return

    def _needs_no_wait(self, group: str) -> bool:
        """Whether waiting would change nothing: it is served, or failed, or is another node's."""
        number = self.partition_of(group)
        if number is None or self.leader_of(group) != self.identity.node_id:
            return True
        shard = self._shards.get(number)
        if shard is not None:
            return shard.is_active or shard.failed is not None
        topic = self.table.by_name.get(CONSUMER_OFFSETS.encode())
        return topic is not None and number in topic.offline

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def list_groups(
        self, states: Collection[str] = (), types: Collection[str] = ()
    ) -> Steps[list[ev.ListedGroup]]:
        """Groups that this node coordinates, in one of the states and of one of the types, both in
        lower case; none given: of all. Raises CoordinatorLoadInProgress.
        """
        groups: list[ev.ListedGroup] = []
        for shard in tuple(self._active_shards()):
            listed = shard.core.list_groups(states, types)
            while part := tuple(islice(listed, ITEMS_PER_SLICE)):
                groups += part
                yield
        return groups

    def describe(self, group: str) -> ev.DescribedGroup:
        """A group in full. Raises NotCoordinator, CoordinatorLoadInProgress."""
        return self.shard(group).core.describe(group)

    def committed(self) -> Iterator[tuple[str, str, int, int]]:
        """(group, topic, partition, offset) of every committed offset here: for metrics."""
        for shard in self._shards.values():
            if shard.is_active:
                for key, stored in shard.core.committed:
                    yield key.group, key.topic, key.partition, stored.value.offset

    def _active_shards(self) -> Iterator[Shard]:
        for number, shard in self._shards.items():
            if shard.failed is not None:
                log.warning("groups of a partition are missing", partition=number, why=shard.failed)
            elif not shard.leads:
                continue
            elif not shard.is_active:
                raise CoordinatorLoadInProgress(f"{CONSUMER_OFFSETS}-{number} is being read")
            else:
                yield shard

    @staticmethod
    def new_uuid() -> str:
        """Fresh text for a member id."""
        return str(uuid.uuid4())


def _leads(partition: Partition, leader_epoch: int) -> bool:
    """Whether a partition is led here, as the image says, and not about to be."""
    return partition.is_leader and partition.leader_epoch == leader_epoch
