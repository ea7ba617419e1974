"""The shards of one internal topic that this node has: one for each partition that it leads.

A shard is loaded when this node leads its partition; meanwhile requests get
COORDINATOR_LOAD_IN_PROGRESS. It is unloaded when the partition or its leadership goes: requests get
NOT_COORDINATOR then, and also while this node may not act on what it leads (rule 35: the process
did not run for a while, and others may lead by now).

Kafka reads to the log end at once and answers from what it believes committed, so that for a
moment after a failover a group may see offsets older than it was told were committed.

Source: Kafka's ``CoordinatorRuntime``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from kept.node.coordinator.common.partitioner import partition_for
from kept.node.coordinator.common.shard import CoordinatorKind, Core, MakeEvent, Shard
from kept.node.runtime.logging import log
from kept.node.runtime.time_slices import ITEMS_PER_SLICE, Pace
from kept.steps import Steps
from kept.storage.errors import CoordinatorLoadInProgress, NotCoordinator
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Delta, Image
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.completable_future import CompletableFuture
    from kept.node.runtime.runtime import Runtime
    from kept.replication.partition import Partition

T = TypeVar("T")

FIND_WAIT_S: Final = 3.0
"""How long FindCoordinator waits for a partition that is being created or read: clients take
seconds to come back after a refusal, and this is mostly a matter of milliseconds."""


@dataclass(eq=False, repr=False, kw_only=True)
class Shards(Generic[Core]):
    """The shards of ``kind``; a *key* is what a partition keeps: a group, a transactional id."""

    runtime: Runtime
    metadata: MetadataLog
    identity: NodeIdentity
    table: ReplicaTable
    kind: CoordinatorKind[Core]

    def __post_init__(self) -> None:
        self._topic = self.kind.topic
        self._shards: dict[int, Shard[Core]] = {}
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
        """Load and unload with leadership."""
        touched = any(p.topic_partition.topic == self._topic for p in delta.partitions)
        if touched or any(t.name == self._topic for t in delta.topics_deleted):
            self._follow(image)

    def partition_gone(self, tp: TopicPartition, _: BaseException | None = None) -> None:
        """A partition was deleted or its directory failed."""
        if tp.topic == self._topic:
            self._drop(tp.partition)

    def notify(self, event: Any) -> None:
        """Have every core step an event of the node."""
        for shard in self._shards.values():
            shard.notify(event)

    def step(self, partition: int, event: Any) -> None:
        """Have the core of a partition step an event of the node, if it is led here: once it is
        loaded.
        """
        shard = self._shards.get(partition)
        if shard is not None:
            shard.notify(event)

    def _follow(self, image: Image) -> None:
        topic = image.topics.get(self._topic)
        records = () if topic is None else topic.partitions
        mine = {r.partition: r for r in records if r.leader == self.identity.node_id}
        for number in list(self._shards):
            epoch = self._shards[number].leader_epoch
            if number not in mine or mine[number].leader_epoch != epoch:
                self._drop(number)
        for number, record in mine.items():
            tp = TopicPartition(self._topic, number)
            hosted = self.table.replicas.get(tp)
            if hosted is None or number in self._shards:
                continue
            if not _leads(hosted.partition, record.leader_epoch):
                continue
            shard = Shard(self.runtime, self.kind, tp, hosted, record.leader_epoch)
            self._shards[number] = shard
            shard.load(self._wake)
        self._wake()

    def _drop(self, number: int) -> None:
        shard = self._shards.pop(number, None)
        if shard is not None:
            shard.unload()

    # What handlers call.

    def shard(self, key: str) -> Shard[Core]:
        """The shard of a key. Raises NotCoordinator, CoordinatorLoadInProgress."""
        number = self.partition_of(key)
        if number is None:
            raise NotCoordinator(f"there is no {self._topic} yet, so nobody coordinates {key!r}")
        return self.shard_of_partition(number)

    def shard_of_partition(self, number: int) -> Shard[Core]:
        """The shard of a partition. Raises NotCoordinator, CoordinatorLoadInProgress."""
        shard = self._shards.get(number)
        tp = TopicPartition(self._topic, number)
        if shard is None:
            if not self._needs_no_wait(number):
                raise CoordinatorLoadInProgress(f"{tp.place} is being opened")
            raise NotCoordinator(f"this node does not coordinate what is kept in {tp.place}")
        if shard.failed is not None:
            raise NotCoordinator(f"{tp.place}: {shard.failed}")
        if not shard.leads:
            raise NotCoordinator(f"{tp.place} may be led by another node")
        if not shard.is_active:
            raise CoordinatorLoadInProgress(f"{tp.place} is being read")
        return shard

    def submit(self, key: str, make_event: MakeEvent) -> asyncio.Future[Any]:
        """A key's core steps an event. Raises NotCoordinator, CoordinatorLoadInProgress."""
        return self.shard(key).submit(make_event)

    def submit_completable(self, key: str, make_event: MakeEvent) -> CompletableFuture[Any]:
        """As :meth:`submit`; see :meth:`.shard.Shard.submit_completable`."""
        return self.shard(key).submit_completable(make_event)

    def follow_up(self, key: str, result: asyncio.Future[Any], make_event: MakeEvent) -> None:
        """A key's core steps an event about the request that waits for ``result``, if one does."""
        number = self.partition_of(key)
        shard = None if number is None else self._shards.get(number)
        if shard is not None:
            shard.follow_up(result, make_event)

    def partition_of(self, key: str) -> int | None:
        """The partition that keeps a key; None while there is no topic."""
        topic = self.metadata.image.topics.get(self._topic)
        if topic is None or not topic.partitions:
            return None
        return partition_for(key, len(topic.partitions))

    def leader_of(self, key: str) -> int | None:
        """The broker that coordinates a key; None while there is none."""
        number = self.partition_of(key)
        return None if number is None else self._leader(number)

    def _leader(self, number: int) -> int | None:
        record = self.metadata.image.partition(self._topic, number)
        return None if record is None or record.leader < 0 else record.leader

    async def wait_for(self, keys: Iterable[str]) -> None:
        """Wait until keys that this node is to coordinate are served, but not for long."""
        loop = self.runtime.loop
        deadline = loop.time() + FIND_WAIT_S
        partitions: set[int] = set()
        pace = Pace()
        for key in keys:
            number = self.partition_of(key)
            if number is not None:
                partitions.add(number)
            await pace.checkpoint()
        while not all(map(self._needs_no_wait, partitions)):
            waiting = loop.create_future()
            self._waiting.append(waiting)
            try:
                async with asyncio.timeout_at(deadline):
                    await waiting
            except TimeoutError:
                return

    def _needs_no_wait(self, number: int) -> bool:
        """Whether waiting would change nothing: it is served, or failed, or is another node's."""
        if self._leader(number) != self.identity.node_id:
            return True
        shard = self._shards.get(number)
        if shard is not None:
            return shard.is_active or shard.failed is not None
        topic = self.table.by_name.get(self._topic.encode())
        return topic is not None and number in topic.offline

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def __iter__(self) -> Iterator[Shard[Core]]:
        """All of them, also those that are being loaded."""
        return iter(tuple(self._shards.values()))

    def serving(self) -> Iterator[Shard[Core]]:
        """Shards that are loaded."""
        return (shard for shard in self if shard.is_active)

    def collect(self, listed: Callable[[Core], Iterator[T | None]]) -> Steps[list[T]]:
        """What the cores list of all partitions that this node leads, in slices; what is None they
        left out. Raises CoordinatorLoadInProgress while one is being read.
        """
        items: list[T] = []
        for shard in tuple(self._leading()):
            rest = listed(shard.core)
            while part := tuple(islice(rest, ITEMS_PER_SLICE)):
                items += [item for item in part if item is not None]
                yield
        return items

    def _leading(self) -> Iterator[Shard[Core]]:
        """All but those that could not be read."""
        for shard in tuple(self._shards.values()):
            if shard.failed is not None:
                log.warning("no coordinator", partition=shard.tp.place, why=shard.failed)
            elif not shard.leads:
                continue
            elif not shard.is_active:
                raise CoordinatorLoadInProgress(f"{shard.tp.place} is being read")
            else:
                yield shard


def _leads(partition: Partition, leader_epoch: int) -> bool:
    """Whether a partition is led here, as the image says, and not about to be."""
    return partition.is_leader and partition.leader_epoch == leader_epoch
