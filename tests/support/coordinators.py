"""Shells of coordinators over logs in memory: one shard, or a node with an image."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import PartitionRecord, TopicRecord
from kept.node.coordinator.common.events import EndMarker, TransactionalProducer
from kept.node.coordinator.common.partitioner import partition_for
from kept.node.coordinator.common.shard import Shard
from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.coordinator import GroupCoordinator
from kept.node.kafka.api import RequestContext
from kept.node.kafka.handlers.groups.describe_groups import DescribeGroupsHandler
from kept.node.kafka.handlers.groups.group_membership import GroupMembershipHandler
from kept.node.metadata.internal_topics import CONSUMER_OFFSETS
from kept.node.metadata.leadership_barrier import LeadershipBarrier
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.replicas.replica_table import ReplicaTable
from kept.node.runtime.runtime import Runtime
from kept.node.security.session import Session
from kept.storage.disk import Disk
from kept.storage.errors import KeptError, NotLeaderOrFollower
from kept.storage.records import CheckRules, EndTxnMarker, build_control_batch, headers, patch
from kept.storage.types import AppendOrigin, TopicPartition
from tests.support.metadata import KnownMetadata
from tests.support.replicas import live_config

TOPIC_ID = uuid.UUID(int=5)


class Appended(NamedTuple):
    """What an append tells."""

    base_offset: int
    last_offset: int


class FakePartition:
    """A log in memory. ``refuse`` fails appends, ``broken`` the write; ``hold`` delays commits."""

    def __init__(self) -> None:
        self.log = bytearray()
        self.staged: list[bytes] = []
        self.log_start_offset = self.log_end_offset = self.high_watermark = 0
        self.refuse: KeptError | None = None
        self.broken: KeptError | None = None
        self.hold = False
        self.writes = 0
        self.is_leader, self.leader_epoch, self.epoch_start_offset = True, 0, 0
        self.waiting: list[tuple[int, Callable[[Any], None]]] = []

    def append(self, checked: Any, now_ms: int, acks: int, guard: Any, origin: AppendOrigin) -> Any:
        assert acks == -1 and origin is AppendOrigin.COORDINATOR
        if self.refuse is not None:
            raise self.refuse
        return self.stage(bytearray(checked.data), checked.record_count)

    def append_marker(
        self, marker: EndTxnMarker, producer_id: int, epoch: int, now_ms: int, *, is_tv2: bool
    ) -> Any:
        if self.refuse is not None:
            raise self.refuse
        return self.stage(build_control_batch(marker, producer_id, epoch, now_ms), 1)

    def stage(self, batch: bytearray, records: int) -> Appended:
        patch(batch, 0, self.log_end_offset, 0)
        self.staged.append(bytes(batch))
        self.log_end_offset += records
        return Appended(self.log_end_offset - records, self.log_end_offset - 1)

    def write(self) -> None:
        if self.broken is not None:
            raise self.broken
        self.writes += 1
        self.log += b"".join(self.staged)
        self.staged.clear()
        if not self.hold:
            self.commit()

    def commit(self, error: KeptError | None = None) -> None:
        self.high_watermark = self.log_end_offset
        waiting, self.waiting = self.waiting, []
        for end_offset, callback in waiting:
            self.when_committed(end_offset, callback, error)

    def resign(self) -> None:
        self.is_leader = False
        waiting, self.waiting = self.waiting, []
        for _, callback in waiting:
            callback(NotLeaderOrFollower("this node does not lead any more"))

    def when_committed(
        self, end_offset: int, callback: Callable[[Any], None], error: KeptError | None = None
    ) -> None:
        if self.high_watermark >= end_offset:
            callback(error)
        else:
            self.waiting.append((end_offset, callback))

    def read_batches(self, offset: int, max_bytes: int) -> bytes:
        """Committed ones, as the real one."""
        found = b""
        for position, header in headers(self.log):
            committed = header.base_offset < self.high_watermark
            if committed and header.next_offset > offset and len(found) < max_bytes:
                found += self.log[position : position + header.size_bytes]
        return found


@dataclass
class FakeReplica:
    """A replica around such a partition; ``flushes`` are the callers that wait for an fsync."""

    partition: FakePartition
    flushes: list[Callable[[Any], None]] = field(default_factory=list)
    sync: bool = False
    rules: CheckRules = field(default_factory=CheckRules)

    def flush(self, end_offset: int, callback: Callable[[Any], None]) -> None:
        self.flushes.append(callback)


def confirming(runtime: Runtime, metadata: KnownMetadata) -> LeadershipBarrier:
    """The barrier of a lone node."""
    known: Any = metadata
    nobody: Any = None
    return LeadershipBarrier(
        runtime=runtime, metadata=known, identity=NodeIdentity(0), peers=nobody, alone=True
    )


def offsets(fetched: ev.FetchResult) -> list[int]:
    return [f.offset for _, _, found in fetched.topics for f in found]


async def filled(count: int) -> FakePartition:
    f = ShardFixture()
    waiting = [f.commit(f"group-{i % 50}", i, i) for i in range(count)]
    await asyncio.gather(*waiting)
    f.shard.unload()
    return f.partition


def image_of(topic_id: uuid.UUID) -> Image:
    """Metadata in which topic ``orders`` has that id."""
    return Image().apply([TopicRecord("orders", topic_id)])[0]


class ShardFixture:
    """A shard, and what is around it."""

    def __init__(
        self,
        partition: FakePartition | None = None,
        leader_epoch: int = 0,
        barrier: Any = None,
        **config: str,
    ) -> None:
        self.partition = partition or FakePartition()
        self.flushes: list[Callable[[Any], None]] = []
        self.hosted = FakeReplica(self.partition, self.flushes)
        self.runtime = Runtime(Disk())
        self.metadata = KnownMetadata(image_of(TOPIC_ID))
        settings = {
            "offsets_commit_timeout_ms": "60000",
            "group_initial_rebalance_delay_ms": "0",
            **config,
        }
        self.groups = GroupCoordinator(
            runtime=self.runtime,
            config=live_config(**settings),
            metadata=cast("Any", self.metadata),
            identity=NodeIdentity(0),
            table=ReplicaTable(),
            barrier=barrier or confirming(self.runtime, self.metadata),
        )
        tp = TopicPartition(self.groups.topic, 0)
        hosted = cast("Any", self.hosted)
        self.shard = Shard(self.runtime, self.groups, tp, hosted, leader_epoch)
        self.read = False
        self.shard.load(lambda: setattr(self, "read", True))

    def commit(
        self,
        group: str = "g",
        offset: int = 1,
        partition: int = 0,
        producer: TransactionalProducer | None = None,
    ) -> asyncio.Future[Any]:
        topic = ev.CommitTopic("orders", TOPIC_ID, (ev.CommitPartition(partition, offset),))
        return self.shard.submit(lambda n: ev.CommitOffsets(n, group, (topic,), producer=producer))

    def end(self, producer_id: int, *, is_commit: bool) -> asyncio.Future[Any]:
        marker = EndMarker(producer_id, 3, 0, is_commit)
        return self.shard.submit(lambda n: ev.WriteTxnMarker(n, marker))

    def fetch(self, group: str = "g", *, stable: bool = False) -> asyncio.Future[Any]:
        return self.shard.submit(lambda n: ev.FetchOffsets(n, group, None, stable))

    def join(self, group: str = "g", session_ms: int = 6_000) -> asyncio.Future[Any]:
        return self.shard.submit(
            lambda n: ev.Join(
                n,
                group,
                "",
                "app",
                "/::1",
                session_ms,
                60_000,
                "consumer",
                (("range", b""),),
                str(n),
                requires_known_member_id=False,
            )
        )


TOPIC = uuid.UUID(int=1)


PARTITIONS = 4


ME = 0


class FakeNode:
    """An image, and partitions that are hosted when the test says so. ``runtime``: of another one
    that it shares.
    """

    def __init__(self, runtime: Runtime | None = None) -> None:
        self.runtime = runtime or Runtime(Disk())
        self.metadata = KnownMetadata()
        self.table = ReplicaTable()
        self.groups = GroupCoordinator(
            runtime=self.runtime,
            config=live_config(offsets_commit_timeout_ms="60000"),
            metadata=cast("Any", self.metadata),
            identity=NodeIdentity(ME),
            table=self.table,
            barrier=confirming(self.runtime, self.metadata),
        )
        self.groups.shards.start()

    @property
    def image(self) -> Image:
        return self.metadata.image

    def apply(self, *records: Any) -> None:
        self.metadata.image, delta = self.image.apply(records)
        for change in delta.partitions:
            hosted: Any = self.table.replicas.get(change.topic_partition)
            if hosted is not None:
                self.lead(hosted.partition, change.after)
        self.groups.metadata_changed(self.image, delta)

    def lead(self, partition: FakePartition, record: PartitionRecord) -> None:
        """As roles do."""
        partition.leader_epoch = record.leader_epoch
        if record.leader != ME and partition.is_leader:
            partition.resign()
        partition.is_leader = record.leader == ME

    def created(self, leader: int = ME) -> list[Any]:
        partitions = [partition_record(number, leader, 0) for number in range(PARTITIONS)]
        return [TopicRecord(CONSUMER_OFFSETS, TOPIC), *partitions]

    def host(self, number: int, partition: FakePartition | None = None) -> FakePartition:
        found = partition or FakePartition()
        hosted: Any = FakeReplica(found)
        self.table.replicas[TopicPartition(CONSUMER_OFFSETS, number)] = hosted
        return found

    def described(self, version: int, api_name: str, request: Any) -> Any:
        """What a handler of the groups as a whole answers."""
        context = RequestContext(0, version, "c", Session(host="h", listener="P"))
        handler = DescribeGroupsHandler(self.groups)
        answer = getattr(handler, api_name)(context, request)
        return answer if isinstance(answer, dict) else self.runtime.slices.run(answer)

    def heartbeat(self, request: Any) -> Any:
        nothing: Any = None
        handler = GroupMembershipHandler(nothing, nothing, nothing, self.groups, nothing, nothing)
        return handler.heartbeat(
            RequestContext(12, 0, "c", Session(host="h", listener="P")), request
        )


def partition_record(number: int, leader: int, epoch: int) -> PartitionRecord:
    return PartitionRecord(
        topic_id=TOPIC,
        partition=number,
        replicas=(0, 1),
        isr=(0, 1),
        leader=leader,
        leader_epoch=epoch,
        partition_epoch=epoch,
    )


def group_in(number: int) -> str:
    return next(f"g{i}" for i in range(999) if partition_for(f"g{i}", PARTITIONS) == number)
