"""The group coordinator of a node: what its shards do that not every coordinator's do.

Source: Kafka's ``GroupCoordinatorService``, ``GroupCoordinatorShard``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kept.node.coordinator.common.shard import Shard, coordinator_error
from kept.node.coordinator.common.shards import Shards
from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.core import GroupCore
from kept.node.coordinator.groups.memory_limit import GroupMemory
from kept.node.coordinator.groups.records import NO_TOPIC_ID, decode_record, is_other_topic
from kept.node.metadata.internal_topics import CONSUMER_OFFSETS
from kept.node.runtime.logging import bugs, log
from kept.node.runtime.time_slices import Pace
from kept.steps import Steps
from kept.storage.errors import KeptError
from kept.storage.records import read_marker

if TYPE_CHECKING:
    from kio.schema.errors import ErrorCode

    from kept.cluster.metadata.image import Delta, Image
    from kept.node.config.live_config import LiveConfig
    from kept.node.coordinator.common.events import EndMarker
    from kept.node.coordinator.groups.offsets import StoredOffset
    from kept.node.metadata.leadership_barrier import LeadershipBarrier
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.runtime import Runtime
    from kept.storage.records import BatchHeader
    from kept.storage.types import TopicPartition

NOISE_INTERVAL_MS: Final = 10_000
"""At most one line about requests refused for memory in this time."""


@dataclass(eq=False, repr=False, kw_only=True)
class GroupCoordinator:
    """The groups of a node; a :class:`~..common.shard.CoordinatorKind` to its ``shards``."""

    topic: ClassVar[str] = CONSUMER_OFFSETS

    runtime: Runtime
    config: LiveConfig
    metadata: MetadataLog
    identity: NodeIdentity
    table: ReplicaTable
    barrier: LeadershipBarrier

    def __post_init__(self) -> None:
        self._quiet_until_ms = 0
        self._to_sweep: dict[Shard[GroupCore], None] = {}
        """Shards that have more to sweep, in their order."""
        self._is_sweeping = False
        self.shards: Shards[GroupCore] = Shards(
            runtime=self.runtime,
            metadata=self.metadata,
            identity=self.identity,
            table=self.table,
            kind=self,
        )

    def metadata_changed(self, image: Image, delta: Delta) -> None:
        """Load and unload with leadership; forget the offsets of topics that are gone."""
        self.shards.metadata_changed(image, delta)
        if delta.topics_deleted:
            gone = tuple((t.name, t.topic_id) for t in delta.topics_deleted)
            self.shards.notify(ev.TopicsDeleted(gone))

    @cached_property
    def memory(self) -> GroupMemory:
        """What the groups of all shards hold."""
        return GroupMemory(self.settings().groups_max_bytes)

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

    # What shards call.

    def new_core(self, tp: TopicPartition, leader_epoch: int) -> GroupCore:  # noqa: ARG002
        """A core without groups, whose memory counts with that of the others."""
        return GroupCore(self.settings(), self.memory)

    def commit_timeout_ms(self) -> int:
        """``offsets.commit.timeout.ms``."""
        return self.config.current.offsets_commit_timeout_ms

    @staticmethod
    def replay(
        core: GroupCore,
        batch: BatchHeader,
        offset: int,
        key: memoryview | None,
        value: memoryview | None,
    ) -> None:
        """Apply one record of the log. Raises CorruptMessage."""
        if batch.is_control:
            marker = read_marker(key, value)
            if marker is not None:
                core.end_transaction(batch.producer_id, is_commit=marker.is_commit)
        elif key is not None:
            record = decode_record(key, value)
            if record is not None:
                core.replay(record, offset, batch.producer_id if batch.is_transactional else -1)

    async def prepare(self, shard: Shard[GroupCore]) -> None:
        """Have offsets forgotten of topics that were deleted while nobody led the partition, behind
        a read barrier: once this node has acted on all that was decided by now.

        A topic that an older image lacks may have been made, or made again, since, and offsets of
        it committed: they must not go. The groups serve before the sweep is through; a fetch hides
        by its topic's id what is still there of a namesake.
        """
        known: dict[tuple[str, uuid.UUID], None] = {}
        pace = Pace()
        for key, stored in chain(shard.core.appended, shard.core.transactions):
            known[key.topic, stored.value.topic_id] = None
            await pace.checkpoint()
        if self._deleted(known):
            await self.barrier.wait()
        gone = self._deleted(known)
        if gone:
            shard.notify(ev.TopicsDeleted(tuple(gone)))

    def _deleted(self, known: Iterable[tuple[str, uuid.UUID]]) -> list[tuple[str, uuid.UUID]]:
        """Those of the topics that the image does not have, or has by another id."""
        topics = self.metadata.image.topics
        return [
            (name, topic_id)
            for name, topic_id in known
            if name not in topics or topic_id not in (NO_TOPIC_ID, topics[name].topic_id)
        ]

    def perform(self, shard: Shard[GroupCore], effect: Any) -> None:
        """Log it: what is routine at debug, requests refused for memory at most once in
        :data:`NOISE_INTERVAL_MS`. Sweeps go on in slices, those of all shards in turn.
        """
        if isinstance(effect, ev.MoreToSweep):
            self._to_sweep[shard] = None
            if not self._is_sweeping:
                self._is_sweeping = True
                self.runtime.loop.call_soon(self._start_sweeping)
            return
        if isinstance(effect, ev.NoteGroup):
            write = log.debug if effect.routine else log.info
            write("group", group=effect.group, what=effect.text)
            return
        now_ms = int(self.runtime.loop.time() * 1000)
        if now_ms >= self._quiet_until_ms:
            self._quiet_until_ms = now_ms + NOISE_INTERVAL_MS
            used = shard.core.memory.used_bytes
            log.warning(
                "group request refused", group=effect.group, setting=effect.setting, used_bytes=used
            )

    def _start_sweeping(self) -> None:
        self.runtime.slices.run(self._sweep())

    def _sweep(self) -> Steps[None]:
        """A slice of one shard's sweeps a step, until no shard has more."""
        while self._to_sweep:
            shard = next(iter(self._to_sweep))
            del self._to_sweep[shard]  # behind the others if there is more
            try:
                shard.step(ev.SweepOn())
            except Exception as error:  # noqa: BLE001 - the others go on
                bugs.report("offsets not deleted", error, partition=str(shard.tp))
            yield
        self._is_sweeping = False

    def unloaded(self, shard: Shard[GroupCore]) -> None:
        """Nothing outside of the shard is to be told."""

    # What handlers call.

    def join_abandoned(self, group: str, result: asyncio.Future[Any]) -> None:
        """The connection is gone of a JoinGroup that waits for ``result``."""
        self.shards.follow_up(group, result, partial(ev.JoinAbandoned, group))

    def end_transaction(self, number: int, marker: EndMarker) -> asyncio.Future[ErrorCode]:
        """Write the end of a transaction into partition ``number`` of ``__consumer_offsets``, and
        let the offsets that it committed count, or not: the error, once it is committed.
        """
        ended: asyncio.Future[ErrorCode] = self.runtime.loop.create_future()
        try:
            shard = self.shards.shard_of_partition(number)
            result = shard.submit(lambda request: ev.WriteTxnMarker(request, marker))
        except KeptError as error:
            ended.set_result(coordinator_error(error))
        else:
            result.add_done_callback(lambda done: ended.set_result(done.result().error))
        return ended

    def list_groups(
        self, states: Collection[str] = (), types: Collection[str] = ()
    ) -> Steps[list[ev.ListedGroup]]:
        """Groups that this node coordinates, in one of the states and of one of the types, both in
        lower case; none given: of all. Raises CoordinatorLoadInProgress.
        """
        return self.shards.collect(lambda core: core.list_groups(states, types))

    def describe(self, group: str) -> ev.DescribedGroup:
        """A group in full. Raises NotCoordinator, CoordinatorLoadInProgress."""
        return self.shards.shard(group).core.describe(group)

    def committed_by_group(
        self,
    ) -> Iterator[tuple[str, Mapping[str, Mapping[int, StoredOffset]]]]:
        """(group, topic to partition to offset) of every group with committed offsets here; not to
        be changed, and read before anything else runs.
        """
        for shard in self.shards.serving():
            yield from shard.core.committed.by_group()

    def committed(self) -> Iterator[tuple[str, str, int, int]]:
        """(group, topic, partition, offset) of every committed offset here, but those of a topic
        that had the name before: for metrics, which may let others run meanwhile.
        """
        for shard in self.shards.serving():
            for key, stored in shard.core.committed.walk():
                if not self.is_of_namesake(key.topic, stored):
                    yield key.group, key.topic, key.partition, stored.value.offset

    def is_of_namesake(self, topic: str, stored: StoredOffset) -> bool:
        """Whether an offset is of a topic that had the name before, and is about to be deleted."""
        present = self.metadata.image.topics.get(topic)
        return present is not None and is_other_topic(stored.value.topic_id, present.topic_id)
