"""Operations beyond Kafka: where partitions stand, compaction on demand, and what it does and why.

What HTTP serves under ``/api/v1/`` (``docs/openapi.yaml``). Where nothing else is said it answers
for the partitions that this node holds; in a cluster of one these are all. Numbers come from the
partitions and the cleaner as they are now; long lists are made in slices, so that thousands of
partitions delay nobody.
"""

from __future__ import annotations

import base64
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import kept
from kept.cluster.controller.decisions import INTERNAL_TOPICS, settings_given
from kept.cluster.metadata.records import PartitionRecord, ResourceType
from kept.node.admin import cluster_view, compaction_status, leader_routing
from kept.node.admin.compaction_status import CompactionStatus
from kept.node.compaction import replica_digests
from kept.node.compaction.replica_digests import Wanted
from kept.node.replicas import lost_records_report
from kept.node.runtime.yielding import Pace, checkpoint
from kept.storage.errors import (
    InvalidRequest,
    KeptError,
    PolicyViolation,
    UnknownTopicOrPartition,
)
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.image import TopicImage
    from kept.node.admin.context import AdminContext
    from kept.node.replicas.local_replica import LocalReplica
    from kept.storage.log import Log

MAX_SEGMENTS: Final = 1000
"""Segments listed of one partition; the oldest are left out beyond, and that is said."""

DEFAULT_RECORDS: Final = 50
"""Records that are shown where nobody says how many."""


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidRequest(f"address {address!r} is not HOST:PORT, such as node-3:10092")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Admin:
    """The operations, on one node."""

    def __init__(self, context: AdminContext) -> None:
        self._context = context

    # Health.

    def unready(self) -> str | None:
        """Why clients should not come here now; None when they may."""
        context = self._context
        if not context.readiness.started:
            return "starting or stopping"
        if not context.config.current.is_broker:
            return None if context.metadata.leader_id is not None else "no controller is elected"
        offline = {d.name: d.offline for d in context.table.directories if d.offline is not None}
        return context.readiness.unready(
            context.metadata.image,
            context.identity.broker_epoch,
            offline,
            len(context.replicas.left_closed),
        )

    # The cluster and its topics.

    async def cluster(self) -> dict[str, Any]:
        """Brokers, this node's directories, and totals."""
        context = self._context
        image = context.metadata.image
        spaces = await context.runtime.in_thread(self._spaces)
        leads: Counter[int] = Counter()
        replicas: Counter[int] = Counter()
        offline = under_replicated = 0
        pace = Pace()
        for topic in list(image.topics.values()):
            for record in topic.partitions:
                leads[record.leader] += 1
                replicas.update(record.replicas)
                under_replicated += record.is_under_replicated
                offline += self._offline(topic.name, record) is not None
                await pace.checkpoint()
        return {
            "cluster_id": context.identity.cluster_id,
            "version": kept.__version__,
            "node_id": context.identity.node_id,
            "controller_id": -1
            if context.metadata.leader_id is None
            else context.metadata.leader_id,
            "term": context.metadata.member.term,
            "voters": [voter.node_id for voter in context.metadata.member.voters],
            "metadata_index": image.index,
            "ready": self.unready() is None,
            "reason": self.unready(),
            "actions": context.config.current.console_actions,
            "brokers": [
                {
                    "node_id": broker_id,
                    "epoch": broker.broker_epoch,
                    "rack": broker.rack,
                    "fenced": broker.fenced,
                    "leads": leads[broker_id],
                    "replicas": replicas[broker_id],
                    "endpoints": [f"{e.name}://{e.host}:{e.port}" for e in broker.endpoints],
                }
                for broker_id, broker in sorted(image.brokers.items())
            ],
            "log_directories": spaces,
            "topics": len(image.topics),
            "partitions": sum(len(topic.partitions) for topic in image.topics.values()),
            "offline_partitions": offline,
            "under_replicated_partitions": under_replicated,
        }

    async def add_voter(
        self, node_id: int, address: str | None = None, *, allowed: bool
    ) -> dict[str, Any]:
        """Let an observer vote; ``address`` of its node listener where that is not known.
        ``allowed``: the request came from where that may be asked (``kept.node.kafka.listener``).

        Raises InvalidRequest, PolicyViolation, ClusterAuthorizationFailed with what would be right.
        """
        host, port = ("", 0) if address is None else _host_and_port(address)
        return await self._change_voters(True, node_id, host, port, allowed=allowed)

    async def remove_voter(self, node_id: int, *, allowed: bool) -> dict[str, Any]:
        """Let a node vote no longer. Raises as :meth:`add_voter`."""
        return await self._change_voters(False, node_id, allowed=allowed)

    async def _change_voters(
        self, add: bool, node_id: int, host: str = "", port: int = 0, *, allowed: bool
    ) -> dict[str, Any]:
        from kept.node.controller.quorum_reconfiguration import refuse_alone, refuse_strangers
        from kept.node.internode.controller_rpc import ChangeVotersRequest

        refuse_alone(self._context.config.current)
        if not allowed:
            refuse_strangers(self._context.addresses)
        request = ChangeVotersRequest(add, node_id, host=host, port=port)
        await self._context.forwarding.change_voters(request)
        return {"voters": [voter.node_id for voter in self._context.metadata.image.voters]}

    def _spaces(self) -> list[dict[str, Any]]:
        found = []
        for directory in self._context.table.directories:
            path = os.path.abspath(directory.name)
            total = usable = None
            try:
                space = os.statvfs(path)
                total, usable = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
            except OSError:
                pass  # an offline disk: its reason is in the answer
            found.append(
                {
                    "path": path,
                    "offline": directory.offline,
                    "total_bytes": total,
                    "usable_bytes": usable,
                }
            )
        return found

    async def topics(self) -> dict[str, Any]:
        """Every topic in a line: ``{"topics": [...]}``."""
        found = []
        for number, topic in enumerate(
            sorted(self._context.metadata.image.topics.values(), key=_name)
        ):
            found.append(await self._summary(topic))
            await checkpoint(number)
        return {"topics": found}

    async def _summary(self, topic: TopicImage) -> dict[str, Any]:
        size_bytes = offline = 0
        policy: list[str] = []
        for number, record in enumerate(topic.partitions):
            partition = self._context.table.partitions.get(
                TopicPartition(topic.name, record.partition)
            )
            if partition is not None:
                size_bytes += partition.log.size_bytes
                policy = policy or sorted(partition.log.config.cleanup_policy)
            offline += self._offline(topic.name, record) is not None
            await checkpoint(number)
        return {
            "name": topic.name,
            "topic_id": str(topic.topic_id),
            "internal": topic.name in INTERNAL_TOPICS,
            "partition_count": len(topic.partitions),
            "replication_factor": len(topic.partitions[0].replicas) if topic.partitions else 0,
            "size_bytes": size_bytes,
            "cleanup_policy": policy,
            "offline_partitions": offline,
            "under_replicated_partitions": sum(one.is_under_replicated for one in topic.partitions),
        }

    async def topic(
        self,
        name: str,
        *,
        leaders: bool = False,
        partition: int | None = None,
        limit: int | None = None,
        segments: int = MAX_SEGMENTS,
    ) -> dict[str, Any]:
        """One topic: settings in force, and each partition (or one, or the first ``limit``) with
        its newest segments.

        With ``leaders`` partitions that other nodes lead are described by them; one that does not
        answer says so in ``unanswered``, and what is here stands for it. Raises
        UnknownTopicOrPartition.
        """
        topic = self._topic(name)
        wanted: Iterable[PartitionRecord] = topic.partitions[:limit]
        if partition is not None:
            wanted = [topic.partitions[self._known(name, partition).partition]]
        partitions = []
        for number, record in enumerate(wanted):
            partitions.append(self._partition(name, record, segments))
            await checkpoint(number)
        found = {
            **await self._summary(topic),
            "config": settings_given(self._context.metadata.image, ResourceType.TOPIC, name),
            "broker_defaults": self._context.config.current.topic_defaults(),
            "partitions": partitions,
        }
        if not leaders:
            return found
        query = {"segments": str(segments)}
        for parameter, value in (("partition", partition), ("limit", limit)):
            if value is not None:
                query[parameter] = str(value)
        path = f"/api/v1/topics/{name}"
        return await cluster_view.from_leaders(self._context, found, path, query)

    def _topic(self, name: str) -> TopicImage:
        topic = self._context.metadata.image.topics.get(name)
        if topic is None:
            raise UnknownTopicOrPartition(f"there is no topic {name}")
        return topic

    def _offline(self, topic: str, record: PartitionRecord) -> str | None:
        """Why a partition is not served, as far as this node knows; None when it is."""
        tp = TopicPartition(topic, record.partition)
        if tp in self._context.table.partitions:
            return None
        if self._context.identity.node_id not in record.replicas:
            return None if record.leader >= 0 else f"{tp} has no leader"
        try:
            self._context.table.partition(tp)
        except KeptError as error:
            return str(error)
        return None

    def _partition(self, topic: str, record: PartitionRecord, segments: int) -> dict[str, Any]:
        tp = TopicPartition(topic, record.partition)
        described: dict[str, Any] = {
            "partition": record.partition,
            "leader": record.leader,
            "leader_epoch": record.leader_epoch,
            "replicas": list(record.replicas),
            "isr": list(record.isr),
            "offline": self._offline(topic, record),
        }
        partition = self._context.table.partitions.get(tp)
        if partition is None:
            return described
        log = partition.log
        status = self.compaction_status(tp)
        described |= {
            "log_start_offset": log.log_start_offset,
            "high_watermark": partition.high_watermark,
            "last_stable_offset": partition.last_stable_offset,
            "log_end_offset": log.log_end_offset,
            "size_bytes": log.size_bytes,
            "directory": log.directory,
            "followers": cluster_view.followers(partition),
            "segments": _segments(
                log, None if status is None else status.first_dirty_offset, segments
            ),
            "segments_left_out": max(0, len(log.segments) - segments),
            "compaction": None if status is None else asdict(status),
        }
        return described

    async def quorum(self, local: bool = False) -> dict[str, Any]:
        """The metadata log: its leader, and how far each copy is, as the controller knows."""
        return await cluster_view.quorum(self._context, local)

    async def elect(self, topic: str, partition: int) -> dict[str, Any]:
        """Have the preferred replica of a partition lead it.

        Raises UnknownTopicOrPartition, ElectionNotNeeded, PreferredLeaderNotAvailable.
        """
        tp = self._known(topic, partition)
        await cluster_view.elect_preferred(self._context, tp)
        return {**_named(tp), "elected": True}

    # Records and their readers.

    async def groups(self, wanted: str = "") -> dict[str, Any]:
        """Consumer groups of the cluster with their lag, those whose name contains ``wanted``."""
        from kept.node.admin import consumer_lag

        return await consumer_lag.overview(self._context, wanted)

    async def group(self, name: str) -> dict[str, Any]:
        """One group, by partition. Raises GroupIdNotFound."""
        from kept.node.admin import consumer_lag

        return await consumer_lag.detail(self._context, name)

    async def records(
        self,
        topic: str,
        partition: int,
        *,
        offset: int | None = None,
        timestamp: int | None = None,
        limit: int = DEFAULT_RECORDS,
    ) -> dict[str, Any]:
        """Records of any partition: see :func:`kept.node.admin.record_browser.browse`."""
        from kept.node.admin import record_browser

        tp = self._known(topic, partition)
        return await record_browser.browse(
            self._context, tp, offset=offset, timestamp=timestamp, limit=limit
        )

    async def key(
        self, topic: str, partition: int | None, key: bytes, *, here: bool = False
    ) -> dict[str, Any]:
        """The life of a key: its records in the log, and how far back removals are known.

        Without a partition the one that clients choose for the key. Its leader says it, or with
        ``here`` this node's replica. Raises UnknownTopicOrPartition, DryRunFailed.
        """
        from kept.client.partitioner import partition_for_key

        if partition is None:
            partition = partition_for_key(key, len(self._topic(topic).partitions))
        tp = self._known(topic, partition)
        said = await leader_routing.ask_leader(
            self._context, tp, "/api/v1/records/key", _asked_key(key), here=here
        )
        if said is not None:
            return said
        hosted = self._hosted(tp)
        found = await compaction_status.life_of_key(self._context, hosted, key)
        told = await compaction_status.passes(self._context, hosted)
        return {**_named(tp), "records": list(found), "passes": told["passes"]}

    # Compaction.

    def cleaner(self) -> dict[str, Any]:
        """The cleaner of this node: passes that run, logs that failed, what it did since start."""
        return {"node": self._context.identity.node_id, **compaction_status.cleaner(self._context)}

    async def passes(self, topic: str, partition: int) -> dict[str, Any]:
        """What the last passes did here: ``last``, ``passes``. Raises UnknownTopicOrPartition,
        PolicyViolation.
        """
        (tp,) = self._compacted(topic, partition)
        return {**_named(tp), **await compaction_status.passes(self._context, self._hosted(tp))}

    def history(self, topic: str, partition: int) -> dict[str, Any]:
        """Dirty ratios of a partition led here over the last hour: ``samples``.

        Raises UnknownTopicOrPartition.
        """
        tp = self._known(topic, partition)
        samples = [
            {"at_ms": at_ms, "dirty_ratio": ratio} for at_ms, ratio in self._context.history.of(tp)
        ]
        return {**_named(tp), "samples": samples}

    def compaction_status(self, tp: TopicPartition) -> CompactionStatus | None:
        """Where a partition stands; None when it is not here or not compacted."""
        hosted = self._context.table.hosted.get(tp)
        if hosted is None or not hosted.partition.log.config.compact:
            return None
        return compaction_status.status(self._context, hosted)

    async def compaction(self, topic: str | None = None) -> dict[str, Any]:
        """Where every compacted partition (of a topic) stands: ``{"partitions": [...]}``.

        Raises UnknownTopicOrPartition, PolicyViolation for a topic that is not compacted.
        """
        if topic is not None:
            self._compacted(topic)
        found: list[dict[str, Any]] = []
        for number, tp in enumerate(sorted(self._context.table.partitions)):
            await checkpoint(number)
            status = None if topic not in (None, tp.topic) else self.compaction_status(tp)
            if status is not None:
                found.append({**_named(tp), **asdict(status)})
        return {"partitions": found}

    def _compacted(self, topic: str, partition: int | None = None) -> list[TopicPartition]:
        """The partitions of a compacted topic, or the one asked for."""
        known = len(self._topic(topic).partitions)
        if partition is not None:
            self._known(topic, partition)
        if not self._context.replicas.config_for(self._context.metadata.image, topic).compact:
            raise PolicyViolation(f"{topic} is not compacted: its cleanup.policy has no compact")
        numbers = range(known) if partition is None else (partition,)
        return [TopicPartition(topic, number) for number in numbers]

    async def compact_now(
        self, topic: str, partition: int | None, wait: bool, *, here: bool = False
    ) -> dict[str, Any]:
        """Have the leaders compact a topic or partition, whatever its dirty ratio; with ``wait``
        until it is done, with ``here`` only what this node leads.

        Raises UnknownTopicOrPartition, PolicyViolation, RequestTimedOut.
        """
        numbers = [tp.partition for tp in self._compacted(topic, partition)]
        if here and partition is None:
            led = self._topic(topic).partitions
            numbers = [n for n in numbers if led[n].leader == self._context.identity.node_id]
        return await leader_routing.compact(self._context, topic, numbers, wait=wait, here=here)

    async def explain(
        self, topic: str, partition: int | None, key: bytes | None, *, here: bool = False
    ) -> dict[str, Any]:
        """What a pass of its leader would do now, per partition; with ``key`` the life of that key.

        With ``here`` as this node's replicas stand. Raises UnknownTopicOrPartition,
        PolicyViolation, DryRunFailed.
        """
        path, given = "/api/v1/compaction/explain", _asked_key(key)
        found: list[dict[str, Any]] = []
        for tp in self._compacted(topic, partition):
            if here and partition is None and tp not in self._context.table.partitions:
                continue
            said = await leader_routing.ask_leader(self._context, tp, path, given, here=here)
            if said is not None:
                found += said["partitions"]
                continue
            mine = await compaction_status.explain(self._context, self._hosted(tp), key)
            found.append({**_named(tp), **mine})
        return {"partitions": found}

    def _hosted(self, tp: TopicPartition) -> LocalReplica:
        self._context.table.partition(tp)
        return self._context.table.hosted[tp]

    async def why_missing(
        self, topic: str, partition: int, offset: int, key: bytes | None, *, here: bool = False
    ) -> dict[str, Any]:
        """Why no record is at an offset: ``fate``, a sentence, and for ``key`` its present winner.

        The leader says it, and of what it does not know the replica that does; with ``here`` this
        node's replica alone. Raises UnknownTopicOrPartition, DryRunFailed.
        """
        tp, context = self._known(topic, partition), self._context
        asked = {"offset": str(offset), **_asked_key(key)}
        answer = await leader_routing.ask_leader(
            context, tp, leader_routing.WHY_MISSING, asked, here=here
        )
        if answer is None:
            mine = await compaction_status.why_missing(context, self._hosted(tp), offset, key)
            answer = {**_named(tp), "offset": offset, **mine}
        return (
            answer
            if here
            else {**answer, **await leader_routing.better_journal(context, tp, answer)}
        )

    async def lost(
        self, topic: str | None = None, partition: int | None = None, offset: int | None = None
    ) -> dict[str, Any]:
        """Committed records that were cut away on this node: ``{"reports": [...]}``.

        Raises UnknownTopicOrPartition.
        """
        if topic is not None:
            self._known(topic, partition or 0)
        wanted = [
            hosted.partition.log.directory
            for tp, hosted in sorted(self._context.table.hosted.items())
            if topic in (None, tp.topic) and partition in (None, tp.partition)
        ]

        def read() -> list[dict[str, Any]]:
            return [
                one
                for path in wanted
                for one in lost_records_report.reports(path, self._context.runtime.disk)
            ]

        found = await self._context.runtime.in_thread(read)
        if offset is not None:
            found = [
                r for r in found if r.get("first_offset", 0) <= offset < r.get("end_offset", 0)
            ]
        return {"reports": found}

    def replica(self, topic: str, partition: int) -> dict[str, Any]:
        """How far this node's replica is. Raises UnknownTopicOrPartition, NotLeaderOrFollower."""
        hosted = self._hosted(self._known(topic, partition))
        return {
            **_named(hosted.partition.topic_partition),
            **asdict(replica_digests.state(self._context.identity.node_id, hosted)),
        }

    async def digests(self, topic: str, partition: int, wanted: Wanted) -> dict[str, Any]:
        """What this node's replica has on disk, as
        :func:`kept.node.compaction.replica_digests.digests` says it.

        Raises UnknownTopicOrPartition, InvalidRequest, MovedMeanwhile, DryRunFailed.
        """
        hosted = self._hosted(self._known(topic, partition))
        return await replica_digests.digests(
            self._context.dry_runs, self._context.identity.node_id, hosted, wanted
        )

    def _known(self, topic: str, partition: int) -> TopicPartition:
        known = len(self._topic(topic).partitions)
        if partition >= known:
            there = f"it has 0 to {known - 1}"
            raise UnknownTopicOrPartition(f"{topic} has no partition {partition}; {there}")
        return TopicPartition(topic, partition)

    async def retry(self, topic: str, partition: int, *, here: bool = False) -> dict[str, Any]:
        """Have its leader, or with ``here`` this node, try an uncleanable partition again at once.

        Raises UnknownTopicOrPartition, PolicyViolation, InvalidRequest when it is not uncleanable.
        """
        (tp,) = self._compacted(topic, partition)
        said = await leader_routing.ask_leader(
            self._context, tp, "/api/v1/compaction/retry", here=here, post=True
        )
        if said is not None:
            return said
        if not self._context.cleaner.started.retry(tp):
            raise InvalidRequest(f"{tp} is not uncleanable: there is nothing to try again")
        return {**_named(tp), "retrying": True}


def _name(topic: TopicImage) -> str:
    return topic.name


def _named(tp: TopicPartition) -> dict[str, Any]:
    return {"topic": tp.topic, "partition": tp.partition}


def _asked_key(key: bytes | None) -> dict[str, str]:
    """A key as another node is asked about it."""
    return {} if key is None else {"key_base64": base64.b64encode(key).decode()}


def _segments(log: Log, first_dirty: int | None, most: int) -> list[dict[str, Any]]:
    """The newest segments, oldest first: clean, dirty or active; ``closed`` in a log that is not
    compacted.
    """
    segments: Iterable[Any] = list(log.segments)[-most:]
    active = log.active_segment
    described = []
    for segment in segments:
        if segment is active:
            kind = "active"
        elif first_dirty is None:
            kind = "closed"
        else:
            kind = "clean" if segment.next_offset <= first_dirty else "dirty"
        described.append(
            {
                "base_offset": segment.base_offset,
                "next_offset": segment.next_offset,
                "size_bytes": segment.size_bytes,
                "kind": kind,
            }
        )
    return described
