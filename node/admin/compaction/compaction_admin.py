"""Compaction for operators: where it stands, on demand, and what it does and why.

An operation about one partition is answered by the partition's leader, with ``here`` by this node's
replica (:mod:`kept.node.admin.leader_router`).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from kept.client.partitioner import partition_for_key
from kept.node.admin import leader_router
from kept.node.admin.compaction.compaction_status import (
    Explanation,
    JournalledPass,
    MissingRecord,
    NothingCleanable,
    PartitionStatus,
    PassHistory,
)
from kept.node.admin.results import PartitionResult, Remote
from kept.node.compaction import dry_run
from kept.node.runtime.tasks import gather_or_cancel
from kept.node.runtime.time_slices import checkpoint
from kept.storage.errors import InvalidRequest, PolicyViolation
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.admin.compaction.compaction_status import CompactionView
    from kept.node.admin.history.dirty_history import DirtyHistory
    from kept.node.admin.leader_router import LeaderRouter, Passes
    from kept.node.admin.topic_lookup import TopicLookup
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.replicas.replica_manager import ReplicaManager

EXPLAINED_TOGETHER: Final = dry_run.MAX_WAITING // 2
"""Partitions of one request that are explained at the same time; others may want a turn, too."""


class Statuses(Struct, frozen=True):
    """Where compacted partitions stand."""

    partitions: list[PartitionStatus]


class Explanations(Struct, frozen=True):
    """What passes would do."""

    partitions: list[NothingCleanable | Explanation | Remote]


class DirtySample(Struct, frozen=True):
    """A dirty ratio at a time in milliseconds; None where it is not known."""

    at_ms: int
    dirty_ratio: float | None


class DirtySamples(PartitionResult, frozen=True):
    """Dirty ratios over the last hour, the oldest first."""

    samples: list[DirtySample]


class LifeOfKey(PartitionResult, frozen=True):
    """A key's records in the log, and how far back removals are known."""

    records: Sequence[Mapping[str, Any]]
    passes: list[JournalledPass]


class Retrying(PartitionResult, frozen=True):
    """An uncleanable partition is tried again."""

    retrying: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionAdmin:
    """The operations of ``/api/v1/compaction`` and the life of a key."""

    metadata: MetadataLog
    lookup: TopicLookup
    replicas: ReplicaManager
    view: CompactionView
    leaders: LeaderRouter
    history: DirtyHistory

    def _compacted(self, topic: str, partition: int | None = None) -> list[TopicPartition]:
        """The partitions of a compacted topic, or the one that is named."""
        count = len(self.lookup.topic(topic).partitions)
        if partition is not None:
            self.lookup.partition(topic, partition)
        if not self.replicas.settings.config_for(self.metadata.image, topic).compact:
            raise PolicyViolation(f"{topic} is not compacted: its cleanup.policy has no compact")
        numbers = range(count) if partition is None else (partition,)
        return [TopicPartition(topic, number) for number in numbers]

    async def statuses(self, topic: str | None = None) -> Statuses:
        """Where every compacted partition (of a topic) here stands.

        Raises UnknownTopicOrPartition, PolicyViolation for a topic that is not compacted.
        """
        if topic is not None:
            self._compacted(topic)
        partitions = []
        for number, tp in enumerate(self.lookup.local_partitions()):
            await checkpoint(number)
            status = None if topic not in (None, tp.topic) else self.view.status_of(tp)
            if status is not None:
                partitions.append(PartitionStatus(*tp, status=status))
        return Statuses(partitions)

    async def passes(self, topic: str, partition: int) -> PassHistory:
        """What the last passes did here. Raises UnknownTopicOrPartition, PolicyViolation."""
        (tp,) = self._compacted(topic, partition)
        return await self.view.passes(self.lookup.replica(tp))

    def dirty_samples(self, topic: str, partition: int) -> DirtySamples:
        """Dirty ratios of a partition led here in the last hour. Raises UnknownTopicOrPartition."""
        tp = self.lookup.partition(topic, partition)
        return DirtySamples(
            *tp, samples=[DirtySample(*sample) for sample in self.history.samples(tp)]
        )

    async def compact_now(
        self, topic: str, partition: int | None, wait: bool, *, here: bool = False
    ) -> Passes:
        """Have the leaders compact a topic or partition, whatever its dirty ratio; with ``wait``
        until it is done, with ``here`` only what this node leads.

        Raises UnknownTopicOrPartition, PolicyViolation, RequestTimedOut.
        """
        tps = self._compacted(topic, partition)
        if here and partition is None:
            tps = [tp for tp in tps if self.lookup.leader(tp) == self.lookup.node_id]
        numbers = [tp.partition for tp in tps]
        return await self.leaders.compact(topic, numbers, wait=wait, here=here)

    async def explain(
        self, topic: str, partition: int | None, key: bytes | None, *, here: bool = False
    ) -> Explanations:
        """What a pass of its leader would do now, per partition; with ``key`` the life of that key.

        With ``here`` as this node's replicas stand. Raises UnknownTopicOrPartition,
        PolicyViolation, DryRunFailed.
        """
        path, query = "/api/v1/compaction/explain", _key_query(key)
        limit = asyncio.Semaphore(EXPLAINED_TOGETHER)

        async def explain(tp: TopicPartition) -> list[NothingCleanable | Explanation | Remote]:
            async with limit:
                remote = await self.leaders.from_leader(
                    tp, path, query, here=here, timeout_s=dry_run.TIMEOUT_S
                )
                if remote is not None:
                    return [Remote(one) for one in remote["partitions"]]
                return [await self.view.explain(self.lookup.replica(tp), key)]

        tps = self._compacted(topic, partition)
        if here and partition is None:
            tps = [tp for tp in tps if self.lookup.is_here(tp)]
        explained = await gather_or_cancel(map(explain, tps))
        return Explanations([one for of_partition in explained for one in of_partition])

    async def why_missing(
        self, topic: str, partition: int, offset: int, key: bytes | None, *, here: bool = False
    ) -> MissingRecord | Remote:
        """Why no record is at an offset, and for ``key`` its newest record.

        The leader says it, and of what it does not know the replica that does; with ``here`` this
        node's replica alone. Raises UnknownTopicOrPartition, DryRunFailed.
        """
        tp = self.lookup.partition(topic, partition)
        query = {"offset": str(offset), **_key_query(key)}
        remote = await self.leaders.from_leader(
            tp, leader_router.WHY_MISSING, query, here=here, timeout_s=dry_run.TIMEOUT_S
        )
        if remote is None:
            missing = await self.view.why_missing(self.lookup.replica(tp), offset, key)
            return missing if here else await self.leaders.better_journal(tp, missing)
        return await self.leaders.better_remote_journal(tp, remote)

    async def life_of_key(
        self, topic: str, partition: int | None, key: bytes, *, here: bool = False
    ) -> LifeOfKey | Remote:
        """The life of a key: its records in the log, and how far back removals are known.

        Without a partition the one that clients choose for the key. Its leader says it, or with
        ``here`` this node's replica. Raises UnknownTopicOrPartition, DryRunFailed.
        """
        if partition is None:
            partition = partition_for_key(key, len(self.lookup.topic(topic).partitions))
        tp = self.lookup.partition(topic, partition)
        path, query = "/api/v1/records/key", _key_query(key)
        remote = await self.leaders.from_leader(
            tp, path, query, here=here, timeout_s=dry_run.TIMEOUT_S
        )
        if remote is not None:
            return Remote(remote)
        hosted = self.lookup.replica(tp)
        records = await self.view.life_of_key(hosted, key)
        return LifeOfKey(*tp, records=records, passes=(await self.view.passes(hosted)).passes)

    async def retry(self, topic: str, partition: int, *, here: bool = False) -> Retrying | Remote:
        """Have its leader, or with ``here`` this node, try an uncleanable partition again at once.

        Raises UnknownTopicOrPartition, PolicyViolation, InvalidRequest when it is not uncleanable.
        """
        (tp,) = self._compacted(topic, partition)
        path = "/api/v1/compaction/retry"
        remote = await self.leaders.from_leader(tp, path, here=here, post=True)
        if remote is not None:
            return Remote(remote)
        if not self.view.retry(tp):
            raise InvalidRequest(f"{tp.place} is not uncleanable: there is nothing to try again")
        return Retrying(*tp, retrying=True)


def _key_query(key: bytes | None) -> dict[str, str]:
    """A key as a query of another node names it."""
    return {} if key is None else {"key_base64": base64.b64encode(key).decode()}
