"""What this node is to its partitions, as the image says: leader, follower, or neither yet.

Nothing is led or followed before the node may serve (:mod:`kept.node.metadata.broker_lifecycle`):
what an image of before a restart says is over. A suspended node keeps its roles and serves nobody.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kept.cluster.metadata.records import NO_LEADER
from kept.node.runtime.clock import monotonic_ms
from kept.node.runtime.logging import log
from kept.replication.effects import Losing, Truncated
from kept.replication.events import BrokersChanged, ManifestPublished, ProposeIsr
from kept.replication.manifests_events import Cut
from kept.storage.errors import MachineError, ResourceExhausted
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image
    from kept.cluster.metadata.records import PartitionRecord
    from kept.node.node import Node
    from kept.node.replicas.replica_manager import LocalReplica


class RoleChanges:
    """See the module. ``serving``: roles are taken; ``suspended``: but nobody is served."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.serving = False
        self.suspended = False
        self._electing: set[asyncio.Future[Any]] = set()

    def take(self, hosted: LocalReplica, record: PartitionRecord) -> None:
        """Become to a partition what ``record`` says."""
        if not self.serving or hosted.partition.offline is not None:
            return
        if self.suspended:
            hosted.partition.suspend()
        if record.leader == self._node.node_id:
            self._lead(hosted, record)
        else:
            self._follow(hosted, record)

    def _lead(self, hosted: LocalReplica, record: PartitionRecord) -> None:
        """Lead; the epoch becomes durable in a thread before the first append (rule 24)."""
        partition, node = hosted.partition, self._node
        metrics = node.metrics.cluster
        noticed = metrics.failover(node.image, partition.leader_id, node.loop.time())
        self._stop_following(hosted)
        ticket = partition.become_leader(
            record.leader_epoch,
            record.partition_epoch,
            record.isr,
            record.replicas,
            monotonic_ms(),
            settling=True,
        )
        if len(record.replicas) > 1:
            partition.step(self._brokers(self._node.image))
        hosted.manifests.lead(record)
        if ticket is None:
            metrics.failed_over(noticed, node.loop.time())
            return

        def save() -> None:
            """Without it nothing is appended in this epoch: nobody would try it again."""
            try:
                ticket.run()
            except ResourceExhausted as error:
                raise error.as_failure() from error

        saving = hosted.directory.pool.run(save)
        self._electing.add(saving)

        def saved(finished: asyncio.Future[Any]) -> None:
            self._electing.discard(saving)
            error = finished.exception()
            if error is None:
                ticket.done()
                metrics.failed_over(noticed, node.loop.time())
            elif isinstance(error, MachineError):
                self._node.replica_manager.fail(hosted.directory, error)
            else:
                log.exception("leader epoch not saved", error)

        saving.add_done_callback(saved)

    def _follow(self, hosted: LocalReplica, record: PartitionRecord) -> None:
        partition = hosted.partition
        unclean = self._node.metadata.member.history.unclean
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
        elif news and (cluster_link := self._node.cluster_link) is not None:
            cluster_link.fetchers.follow(hosted, record.leader, record.leader_epoch)
        hosted.manifests.follow(record)

    def _stop_following(self, hosted: LocalReplica) -> None:
        cluster_link = self._node.cluster_link
        if cluster_link is not None:
            cluster_link.fetchers.stop_following(hosted.partition.topic_partition)

    def throttled(self, hosted: LocalReplica) -> None:
        """Whether it is throttled as a follower may have changed."""
        cluster_link = self._node.cluster_link
        if cluster_link is not None:
            cluster_link.fetchers.throttle(hosted)

    def lost(self, tp: TopicPartition, record: PartitionRecord | None) -> None:
        """A replica here is offline: fetch it no more, leave its ISR, let another one lead."""
        cluster_link = self._node.cluster_link
        if cluster_link is None or not self.serving or record is None:
            return
        cluster_link.fetchers.stop_following(tp)
        if self._node.node_id in record.isr and len(record.isr) > 1:
            cluster_link.alter_partition.resign(tp, record)

    def leave(self, hosted: LocalReplica) -> None:
        """It is not hosted here any more."""
        self._stop_following(hosted)
        hosted.partition.resign()

    async def elected(self) -> None:
        """Wait until the epochs of all partitions are durable."""
        while self._electing:
            await asyncio.wait(set(self._electing))
            await asyncio.sleep(0)

    # All of them.

    def resume(self, image: Image) -> None:
        """The node may serve: take every role of ``image``, or go on with it."""
        first, self.serving, self.suspended = not self.serving, True, False
        for tp, hosted in list(self._node.replica_manager.hosted.items()):
            record = image.partition(tp.topic, tp.partition)
            if record is not None and record.topic_id == hosted.partition.topic_id:
                self.take(hosted, record)
            if not first:
                hosted.partition.resume()
        for topic in self._node.replica_manager.by_name.values():
            for number in topic.offline:
                self.lost(TopicPartition(topic.name, number), image.partition(topic.name, number))
        self._node.groups.roles_taken(image)

    def suspend(self) -> None:
        """Serve nobody until :meth:`resume`."""
        self.suspended = True
        for hosted in self._node.replica_manager.hosted.values():
            hosted.partition.suspend()

    def brokers_changed(self) -> None:
        """Who may join an ISR has changed, or which process of a broker may fetch."""
        event = self._brokers(self._node.image)
        for hosted in list(self._node.replica_manager.hosted.values()):
            partition = hosted.partition
            if partition.is_leader and partition.replicated:
                partition.step(event)
        if self._node.cluster_link is not None:
            self._node.cluster_link.news.brokers_changed()

    @staticmethod
    def _brokers(image: Image) -> BrokersChanged:
        return BrokersChanged(
            frozenset(broker_id for broker_id, broker in image.brokers.items() if broker.active),
            tuple((broker_id, broker.broker_epoch) for broker_id, broker in image.brokers.items()),
        )

    # What partitions tell.

    def heard(self, hosted: LocalReplica, effect: Any) -> None:
        """An effect of a partition that concerns others."""
        cluster_link = self._node.cluster_link
        if isinstance(effect, ProposeIsr) and cluster_link is not None:
            cluster_link.alter_partition.ask(hosted.partition)
        elif isinstance(effect, ManifestPublished):
            hosted.manifests.published(effect.identity)
        elif isinstance(effect, Truncated):
            self._truncated(hosted, effect)
        elif isinstance(effect, Losing):
            from kept.node.replicas import lost_records_report

            lost_records_report.report(self._node, hosted, effect)

    def _truncated(self, hosted: LocalReplica, effect: Truncated) -> None:
        """Recovery points are durable before a truncated log takes appends."""
        tp = hosted.partition.topic_partition
        say = log.warning if hosted.partition.may_lose else log.info
        say("log truncated", topic=tp.topic, partition=tp.partition, end=effect.log_end_offset)
        try:
            hosted.directory.directory.state_recovery_point(tp, effect.recovery_point)
        except MachineError as error:
            self._node.replica_manager.fail(hosted.directory, error.as_failure())
        hosted.manifests.tell(Cut(effect.log_end_offset))
