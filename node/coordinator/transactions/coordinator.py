"""The transaction coordinator of a node: what its shards do that not every coordinator's do.

Source: Kafka's ``TransactionCoordinator``, ``TransactionStateManager``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kept.cluster.controller.features import TRANSACTION_VERSION
from kept.node.coordinator.common.events import Response
from kept.node.coordinator.common.shard import Shard, coordinator_error
from kept.node.coordinator.common.shards import Shards
from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions.connection_order import ConnectionOrder, ConnectionOrdinals
from kept.node.coordinator.transactions.core import TransactionCore
from kept.node.coordinator.transactions.records import TransactionState, decode_record
from kept.node.coordinator.transactions.transaction import TV2
from kept.node.coordinator.transactions.transactional_id import IdMemory
from kept.node.metadata.internal_topics import TRANSACTION_STATE
from kept.node.runtime.counters import REQUEST_BUCKETS
from kept.node.runtime.histogram import Histogram
from kept.node.runtime.logging import log
from kept.node.runtime.tasks import TaskOwner
from kept.node.runtime.time_slices import Pace
from kept.steps import Steps
from kept.storage.errors import CoordinatorNotAvailable, KeptError
from kept.storage.types import NO_LEADER_EPOCH

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Delta, Image
    from kept.node.config.live_config import LiveConfig
    from kept.node.coordinator.producer_ids import ProducerIds
    from kept.node.coordinator.transactions.marker_channel import MarkerChannel
    from kept.node.metadata.cluster_link import ClusterLink
    from kept.node.metadata.leadership_barrier import LeadershipBarrier
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.completable_future import CompletableFuture
    from kept.node.runtime.runtime import Runtime
    from kept.storage.records import BatchHeader
    from kept.storage.types import TopicPartition

COMMIT_TIMEOUT_MS: Final = 5000
"""How long a client waits for a transition to be committed; it comes again."""
FIRST_LEADER_EPOCH: Final = 0
"""Nobody has led a partition before."""


@dataclass(eq=False, repr=False, kw_only=True)
class TransactionCoordinator:
    """The transactional ids of a node; a :class:`~..common.shard.CoordinatorKind`."""

    topic: ClassVar[str] = TRANSACTION_STATE

    runtime: Runtime
    config: LiveConfig
    metadata: MetadataLog
    identity: NodeIdentity
    table: ReplicaTable
    barrier: LeadershipBarrier
    cluster_link: ClusterLink
    producer_ids: ProducerIds
    markers: MarkerChannel
    ordinals: ConnectionOrdinals

    def __post_init__(self) -> None:
        self._tasks = TaskOwner(self.runtime.loop)
        self.shards: Shards[TransactionCore] = Shards(
            runtime=self.runtime,
            metadata=self.metadata,
            identity=self.identity,
            table=self.table,
            kind=self,
        )
        self._connections: dict[int, ConnectionOrder] = {}
        self.end_seconds = Histogram(REQUEST_BUCKETS)
        """From a decision to the end: all markers written, and that committed."""
        self.load_seconds = Histogram(REQUEST_BUCKETS)
        """Of partitions with records."""
        self._id_memory = IdMemory()
        self._counted: Counter[str] = Counter()
        """By cores that are unloaded."""
        self.markers.on_written = self._markers_written

    # What the node calls.

    def start(self) -> None:
        """Load the partitions that this node leads."""
        self.markers.image_changed(self.metadata.image)
        self.shards.start()

    async def stop(self) -> None:
        """Write what is staged; pending requests get NOT_COORDINATOR."""
        await self.shards.stop()
        await self.markers.close()
        await self._tasks.close()

    def metadata_changed(self, image: Image, delta: Delta) -> None:
        """Load and unload with leadership; markers follow their partitions' leaders."""
        self.markers.image_changed(image)
        self.shards.metadata_changed(image, delta)
        settings = self.settings()
        for shard in self.shards:
            shard.core.settings = settings

    @property
    def is_served(self) -> bool:
        """Whether all brokers can take part in transactions."""
        return self.transaction_version >= TV2

    @property
    def transaction_version(self) -> int:
        """The finalized level of the feature."""
        return self.metadata.image.features.get(TRANSACTION_VERSION, 0)

    def settings(self) -> ev.TransactionSettings:
        """The node's settings for transactions."""
        config = self.config.current
        return ev.TransactionSettings(
            transaction_max_timeout_ms=config.transaction_max_timeout_ms,
            abort_timed_out_interval_ms=(
                config.transaction_abort_timed_out_transaction_cleanup_interval_ms
            ),
            remove_expired_interval_ms=(
                config.transaction_remove_expired_transaction_cleanup_interval_ms
            ),
            transactional_id_expiration_ms=config.transactional_id_expiration_ms,
            add_partitions_retry_backoff_max_ms=config.add_partitions_to_txn_retry_backoff_max_ms,
            transaction_version=self.transaction_version,
            ids_max_bytes=config.transactional_ids_max_bytes,
            closes_stale_connections=config.transaction_stale_connections == "close",
        )

    # What shards call.

    def new_core(self, tp: TopicPartition, leader_epoch: int) -> TransactionCore:
        """A core without transactional ids."""
        order = self._connections.setdefault(tp.partition, ConnectionOrder())
        if leader_epoch > FIRST_LEADER_EPOCH:
            order.lead_again(self.ordinals.newest)
        return TransactionCore(
            self.settings(),
            tp.partition,
            leader_epoch,
            order,
            self.end_seconds,
            memory=self._id_memory,
        )

    @staticmethod
    def commit_timeout_ms() -> int:
        """:data:`COMMIT_TIMEOUT_MS`."""
        return COMMIT_TIMEOUT_MS

    @staticmethod
    def replay(
        core: TransactionCore,
        batch: BatchHeader,
        offset: int,  # noqa: ARG004
        key: memoryview | None,
        value: memoryview | None,
    ) -> None:
        """Apply one record of the log. Raises CorruptMessage."""
        if key is not None and not batch.is_control:
            record = decode_record(key, value)
            if record is not None:
                core.replay(record)

    async def prepare(self, shard: Shard[TransactionCore]) -> None:
        """Where transactions have partitions that the image lacks, a read barrier: an image that is
        older than they are must not have them taken for deleted, and left without a marker.
        """
        pace = Pace()
        for tp in shard.core.partitions():
            if self.metadata.image.partition(*tp) is None:
                await self.barrier.wait()
                break
            await pace.checkpoint()
        self.load_seconds.observe(self.runtime.loop.time() - shard.load_started_s)

    def perform(self, shard: Shard[TransactionCore], effect: Any) -> None:
        """Prove a response, have markers written, draw a producer id, log."""
        match effect:
            case Response():
                self._prove(shard, effect)
            case ev.WriteMarkers():
                self.markers.write(effect)
            case ev.AllocateProducerId():
                self._tasks.spawn(self._draw(shard))
            case ev.NoteTransaction():
                log.info("transaction", subject=effect.subject, what=effect.text)

    def unloaded(self, shard: Shard[TransactionCore]) -> None:
        """Another node sends its markers now."""
        self._counted.update(shard.core.counts)
        self.markers.unloaded(shard.tp.partition)

    def _prove(self, shard: Shard[TransactionCore], effect: Response) -> None:
        """Say what is known from memory alone only where nobody has led since the shard does: a
        successor may have ended that transaction, and begun others.
        """

        def confirmed(is_current: bool) -> None:
            is_proven = is_current and shard.leads
            shard.respond(effect.request, effect.result if is_proven else effect.unproven)

        self.barrier.confirm(confirmed)

    async def _draw(self, shard: Shard[TransactionCore]) -> None:
        try:
            drawn = await self.producer_ids.next()
        except KeptError as error:
            shard.step(ev.ProducerIdAllocationFailed(coordinator_error(error)))
        else:
            shard.step(ev.ProducerIdAllocated(drawn))

    def _markers_written(self, event: ev.MarkersWritten) -> None:
        self.shards.step(event.state_partition, event)

    # What handlers call.

    def verify(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: frozenset[TopicPartition],
    ) -> CompletableFuture[ev.VerifyPartitionsResult]:
        """Whether partitions are in the open transaction. Raises NotCoordinator,
        CoordinatorLoadInProgress, and CoordinatorNotAvailable while another node may coordinate: a
        "yes" from memory that came behind its marker would leave a transaction that nobody ends.
        """
        if self.cluster_link.may_be_fenced:
            raise CoordinatorNotAvailable("no controller has answered this node for a while")
        return self.shards.submit_completable(
            transactional_id,
            lambda number: ev.VerifyPartitions(
                number, transactional_id, producer_id, epoch, partitions
            ),
        )

    def add(  # noqa: PLR0917
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: frozenset[TopicPartition],
        client_version: int,
        connection: ev.ClientConnection | None = None,
    ) -> CompletableFuture[ev.AddPartitionsResult]:
        """Have partitions, all of which exist, join the transaction; the fields are those of
        :class:`.events.AddPartitions`. Raises NotCoordinator, CoordinatorLoadInProgress.
        """
        return self.shards.submit_completable(
            transactional_id,
            lambda number: ev.AddPartitions(
                number,
                transactional_id,
                producer_id,
                epoch,
                partitions,
                client_version,
                connection,
            ),
        )

    def coordinator_epoch(self, transactional_id: str) -> int:
        """In which leader epoch its coordinator leads, here or elsewhere, as this node's image has
        it; -1: nobody does.
        """
        number = self.shards.partition_of(transactional_id)
        known = None if number is None else self.metadata.image.partition(self.topic, number)
        return NO_LEADER_EPOCH if known is None else known.leader_epoch

    def list_transactions(self, wanted: ev.TransactionFilter) -> Steps[list[ev.ListedTransaction]]:
        """Transactional ids that this node coordinates. Raises CoordinatorLoadInProgress."""
        now_ms = self.runtime.now_ms()
        return self.shards.collect(lambda core: core.list_transactions(wanted, now_ms))

    def describe(self, transactional_id: str) -> ev.DescribedTransaction | None:
        """An id in full; None: there is none. Raises NotCoordinator, CoordinatorLoadInProgress."""
        return self.shards.shard(transactional_id).core.describe(transactional_id)

    def states(self) -> Iterator[TransactionState]:
        """That of each transactional id: for metrics. Cores may step meanwhile."""
        for core in self.cores():
            yield from core.ids.states()

    def counts(self) -> Counter[str]:
        """Transactions ``started``, ``committed``, ``aborted``, ``timed_out`` here."""
        return sum((core.counts for core in self.cores()), Counter(self._counted))

    def cores(self) -> Iterator[TransactionCore]:
        """Those that are loaded: for metrics."""
        return (shard.core for shard in self.shards.serving())
