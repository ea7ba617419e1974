"""What this node is to its partitions, as the image says: leader, follower, or neither yet.

Nothing is led or followed before the node may serve (:mod:`kept.node.metadata.broker_lifecycle`):
what an image of before a restart says is over. A suspended node keeps its roles and serves nobody.

Where entries of the metadata were lost, a log may have batches of a later leader epoch than the
image knows. Its leader waits for one above that (:meth:`RoleChanges.apply`): two terms of one epoch
could not be told apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kept.cluster.metadata.records import NO_LEADER
from kept.node.replicas import lost_records_report
from kept.node.runtime.clock import monotonic_ms
from kept.node.runtime.logging import bugs, log
from kept.replication.events import (
    Acknowledge,
    EligibleBrokersChanged,
    HighWatermarkMoved,
    ProposeIsr,
)
from kept.replication.manifests_events import NoteManifest
from kept.replication.replica_effects import AcknowledgementsLeft, LogTruncated, RecordsLost
from kept.storage.errors import MachineError, ResourceExhausted, client_message
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.image import BrokerImage, Image
    from kept.cluster.metadata.records import PartitionRecord
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.alter_partition import AlterPartitionQueue
    from kept.node.replicas.fetch_loop import Fetchers
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.log_dir_failures import LogDirFailureChannel
    from kept.node.replicas.manifests.notify import ManifestNotifier
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.runtime import Runtime
    from kept.replication.partition_core import Effect
    from kept.replication.replica import EpochTicket
    from kept.replication.replica_effects import Report
    from kept.steps import Steps

EXHAUSTED_RETRY_S: Final = 1.0
"""When a leader epoch that found no descriptor is saved again."""


class RoleChanges:
    """Makes each replica here leader or follower, as the image says. ``serving``: roles are taken;
    ``suspended``: but nobody is served.
    """

    def __init__(
        self,
        *,
        runtime: Runtime,
        metadata: MetadataLog,
        identity: NodeIdentity,
        table: ReplicaTable,
        failures: LogDirFailureChannel,
        counters: Counters,
        fetchers: Fetchers,
        alter_partition: AlterPartitionQueue,
        notifier: ManifestNotifier,
    ) -> None:
        self._runtime = runtime
        self._metadata = metadata
        self._identity = identity
        self._table = table
        self._failures = failures
        self._counters = counters
        self._fetchers = fetchers
        self._alter_partition = alter_partition
        self._alter_partition.on_still_lost = self._still_lost
        self._alter_partition.on_later_epoch_answered = self._request_later_epoch
        self._notifier = notifier
        self.on_roles_taken: list[Callable[[Image], None]] = []
        """Called when roles were taken that an earlier image gave."""
        self.serving = False
        self.suspended = False
        self._electing: set[asyncio.Future[Any]] = set()
        self._brokers: Mapping[int, BrokerImage] = {}
        self._brokers_changed = EligibleBrokersChanged(frozenset())
        """What the cores are told of :attr:`_brokers`."""

    def apply(self, hosted: LocalReplica, record: PartitionRecord) -> None:
        """Make this node leader or follower of a partition, as ``record`` says.

        A bug of ours takes this replica offline: what it did before is over, and no other partition
        is to wait for it. It leaves the ISR as often as an image has it there.
        """
        partition = hosted.partition
        tp = partition.topic_partition
        if not self.serving:
            return
        if partition.offline is not None:
            self.replica_offline(tp, record)
            return
        if self.suspended:
            partition.suspend()
        try:
            if record.leader != self._identity.node_id:
                self._follow(hosted, record)
            elif partition.latest_epoch > record.leader_epoch:
                self._await_later_epoch(hosted, record)
            else:
                self._lead(hosted, record)
        except Exception as error:  # noqa: BLE001
            if hosted.partition.offline is not None:  # meanwhile: its disk failed, as is logged
                return
            log.exception("partition offline", error, topic=tp.topic, partition=tp.partition)
            why = f"its role could not be changed: {client_message(error)}"
            self._table.fail(tp, hosted.directory, why)
            hosted.manifests.abandon()
            partition.mark_offline(why)
            self.replica_offline(tp, record)

    def _await_later_epoch(self, hosted: LocalReplica, record: PartitionRecord) -> None:
        """Lead once the controller has given the partition an epoch above that of the log."""
        self._stop_following(hosted)
        tp, last_epoch = hosted.partition.topic_partition, hosted.partition.latest_epoch
        log.error(
            "a log is of a later leader epoch than the metadata, whose newest entries were lost: "
            "another epoch is asked for",
            topic=tp.topic,
            partition=tp.partition,
            leader_epoch=record.leader_epoch,
            last_epoch=last_epoch,
        )
        self._request_later_epoch(tp, record)

    def _request_later_epoch(self, tp: TopicPartition, record: PartitionRecord | None) -> None:
        """Ask for one, unless it was given meanwhile, or another node leads."""
        hosted = self._table.replicas.get(tp)
        if not self.serving or hosted is None or record is None:
            return
        partition, leads = hosted.partition, record.leader == self._identity.node_id
        if leads and partition.latest_epoch > record.leader_epoch and partition.offline is None:
            self._alter_partition.request_later_epoch(tp, record, partition.latest_epoch)

    def _lead(self, hosted: LocalReplica, record: PartitionRecord) -> None:
        """Lead; the epoch becomes durable in a thread before the first append (rule 24)."""
        partition, loop = hosted.partition, self._runtime.loop
        counters = self._counters.cluster
        noticed = counters.failover(self._metadata.image, partition.leader_id, loop.time())
        self._stop_following(hosted)
        ticket = partition.become_leader(
            record.leader_epoch,
            record.partition_epoch,
            record.isr,
            record.replicas,
            monotonic_ms(),
            awaits_offer=True,
        )
        if len(record.replicas) > 1:
            partition.step(self._known_brokers(), monotonic_ms())
        hosted.manifests.lead(record)
        if ticket is None:
            counters.failed_over(noticed, loop.time())
            return

        self._save_epoch(hosted, ticket, noticed)

    def _save_epoch(self, hosted: LocalReplica, ticket: EpochTicket, noticed: float | None) -> None:
        """Nothing is appended in this epoch before it is saved. Where that finds no descriptor it
        is tried again, as nobody else would: neither the disk nor the node has failed.
        """
        loop = self._runtime.loop
        saving = hosted.directory.pool.run(ticket.run)
        self._electing.add(saving)

        def again() -> None:
            if (
                self._table.replicas.get(hosted.partition.topic_partition) is hosted
                and ticket.is_due
            ):
                self._save_epoch(hosted, ticket, noticed)

        def saved(finished: asyncio.Future[Any]) -> None:
            self._electing.discard(saving)
            error = finished.exception()
            if error is None:
                ticket.done()
                self._counters.cluster.failed_over(noticed, loop.time())
            elif isinstance(error, MachineError):
                self._failures.fail(hosted.directory, error)
                if isinstance(error, ResourceExhausted):
                    loop.call_later(EXHAUSTED_RETRY_S, again)
            else:
                log.exception("leader epoch not saved", error)

        saving.add_done_callback(saved)

    def _follow(self, hosted: LocalReplica, record: PartitionRecord) -> None:
        partition = hosted.partition
        unclean = self._metadata.raft_node.history.unclean
        partition.unclean_epoch = unclean.get(record.key, -1)
        news = partition.become_follower(
            record.leader,
            record.leader_epoch,
            record.partition_epoch,
            record.isr,
            record.replicas,
            monotonic_ms(),
        )
        if record.leader == NO_LEADER:
            self._stop_following(hosted)
        elif news:
            self._fetchers.follow(hosted, record.leader, record.leader_epoch)
        hosted.manifests.follow(record)

    def _stop_following(self, hosted: LocalReplica) -> None:
        self._fetchers.stop_following(hosted.partition.topic_partition)

    def throttled(self, hosted: LocalReplica) -> None:
        """Whether it is throttled as a follower may have changed."""
        self._fetchers.throttle(hosted)

    def replica_offline(self, tp: TopicPartition, record: PartitionRecord | None) -> None:
        """A replica here is offline: fetch it no more, leave its ISR, let another one lead."""
        if not self.serving or record is None:
            return
        self._fetchers.stop_following(tp)
        if self._identity.node_id in record.isr and len(record.isr) > 1:
            self._alter_partition.resign(tp, record)

    def _still_lost(self, tp: TopicPartition, record: PartitionRecord | None) -> None:
        """A replica resigned a while ago. One that was opened since stays; one that cannot lead
        resigns again only while it is to lead: as follower it is fetched for.
        """
        hosted = self._table.replicas.get(tp)
        if hosted is None or hosted.partition.offline is not None:
            self.replica_offline(tp, record)
        elif self.serving and record is not None and record.leader == self._identity.node_id:
            hosted.manifests.resign_if_lost(record)

    def leave(self, hosted: LocalReplica) -> None:
        """It is not hosted here any more."""
        self._stop_following(hosted)
        hosted.partition.resign()

    async def await_elections(self) -> None:
        """Wait until the epochs of all partitions are durable."""
        while self._electing:
            await asyncio.wait(set(self._electing))
            await asyncio.sleep(0)

    # All of them.

    def resume(self, image: Image) -> None:
        """The node may serve: take every role of ``image``, or go on with it."""
        first, self.serving, self.suspended = not self.serving, True, False
        for tp, hosted in list(self._table.replicas.items()):
            record = image.partition(tp.topic, tp.partition)
            if record is not None and record.topic_id == hosted.partition.topic_id:
                self.apply(hosted, record)
            if not first:
                hosted.partition.resume()
        for topic in self._table.by_name.values():
            for number in topic.offline:
                self.replica_offline(
                    TopicPartition(topic.name, number), image.partition(topic.name, number)
                )
        self.announce(image)

    def announce(self, image: Image) -> None:
        """Tell who listens that roles were taken which ``image`` gave."""
        for listener in self.on_roles_taken:
            listener(image)

    def suspend(self) -> None:
        """Serve nobody until :meth:`resume`."""
        self.suspended = True
        for hosted in self._table.replicas.values():
            hosted.partition.suspend()

    def brokers_changed(self) -> None:
        """Who may join an ISR has changed, or which process of a broker may fetch."""
        event = self._known_brokers()
        for hosted in list(self._table.replicas.values()):
            partition = hosted.partition
            if partition.is_leader and partition.replicated:
                partition.step(event, monotonic_ms())
        self._notifier.brokers_changed()

    def _known_brokers(self) -> EligibleBrokersChanged:
        """Those of the image, for all partitions; made once, until they change."""
        brokers = self._metadata.image.brokers
        if brokers is not self._brokers:
            self._brokers = brokers
            self._brokers_changed = EligibleBrokersChanged(
                frozenset(broker_id for broker_id, broker in brokers.items() if broker.active),
                tuple((broker_id, broker.broker_epoch) for broker_id, broker in brokers.items()),
            )
        return self._brokers_changed

    # Effects of partitions.

    def perform(self, hosted: LocalReplica, effect: Effect | Report) -> None:
        """Do what a partition's core decided that concerns more than its log."""
        if isinstance(effect, ProposeIsr):
            self._alter_partition.submit(hosted.partition)
        elif isinstance(effect, LogTruncated):
            self._truncated(hosted, effect)
        elif isinstance(effect, RecordsLost):
            node_id = self._identity.node_id
            lost_records_report.report(self._runtime, self._counters, node_id, hosted, effect)
        elif isinstance(effect, AcknowledgementsLeft):
            self._runtime.slices.run(self._acknowledge(hosted))
        elif not isinstance(effect, HighWatermarkMoved | Acknowledge | NoteManifest):
            hosted.manifests.perform(effect)

    @staticmethod
    def _acknowledge(hosted: LocalReplica) -> Steps[None]:
        """One a step, until nobody is left."""
        is_over = False
        while not is_over:
            try:
                is_over = not hosted.partition.acknowledge_next()
            except Exception as error:  # noqa: BLE001 - the others are told
                where = hosted.partition.topic_partition.place
                bugs.report("not acknowledged", error, partition=where)
            yield

    @staticmethod
    def _truncated(hosted: LocalReplica, effect: LogTruncated) -> None:
        tp = hosted.partition.topic_partition
        say = log.warning if hosted.partition.may_lose else log.info
        say("log truncated", topic=tp.topic, partition=tp.partition, end=effect.log_end_offset)
