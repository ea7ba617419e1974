"""The shell of the node's :class:`~.markers.MarkerSender`: WriteTxnMarkers to leaders, answers in.

Markers of partitions that this node leads are written without a request, in a turn of their own:
the answer to the EndTxn leaves first. Each other node gets them over a connection of its own: they
wait until markers are committed, and nobody else shall wait with them. A request that is not
answered closes its connection, and the next one has a higher number, by which the receiver knows
that it must not take up what still sits in the connections before: such a marker would end the
producer's next transaction of the same epoch. They are sent again once it is proven who
coordinates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from kept.client.protocol.api_keys import ApiKey
from kept.node.coordinator.transactions.events import MarkersWritten, WriteMarkers
from kept.node.coordinator.transactions.markers import (
    ConfirmLeadership,
    Effect,
    Event,
    ImageChanged,
    LeadershipConfirmed,
    MarkerEntry,
    MarkerSender,
    MarkersFailed,
    MarkersResponseReceived,
    SendMarkers,
    StatePartitionUnloaded,
)
from kept.node.coordinator.transactions.records import partitions_by_topic
from kept.node.metadata.internal_topics import TRANSACTION_STATE
from kept.node.runtime.logging import bugs, log
from kept.node.runtime.tasks import TaskOwner
from kept.node.runtime.time_slices import SlicedTask
from kept.storage.errors import KeptError
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image
    from kept.node.coordinator.transactions.marker_writer import Marked, MarkerWriter
    from kept.node.metadata.leadership_barrier import LeadershipBarrier
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.runtime.completable_future import CompletableFuture
    from kept.node.runtime.runtime import Runtime

WRITE_TXN_MARKERS_VERSION: Final = 2
ANSWER_S: Final = 30.0
"""A leader that has not committed markers for so long is asked anew; Kafka's
``request.timeout.ms``."""


class NodeCalls(Protocol):
    """Kafka requests to brokers by their ids."""

    async def call(
        self, node_id: int, api_key: ApiKey, version: int, values: dict[str, Any], timeout_s: float
    ) -> Any:
        """The typed response. Raises NetworkException, RequestTimedOut."""
        ...

    async def close(self) -> None:
        """Ask nobody any more."""
        ...


def _ignore(_: MarkersWritten) -> None:
    """Nobody waits yet."""


class MarkerChannel:
    """Sends WriteTxnMarkers to leaders, and gives their responses to the MarkerSender.
    ``on_written`` is called with what the sender says of written markers.
    """

    def __init__(  # noqa: PLR0917
        self,
        runtime: Runtime,
        metadata: MetadataLog,
        identity: NodeIdentity,
        barrier: LeadershipBarrier,
        calls: NodeCalls,
        writer: MarkerWriter,
    ) -> None:
        self._runtime = runtime
        self._metadata = metadata
        self._identity = identity
        self._barrier = barrier
        self._calls = calls
        self._writer = writer
        self.sender = MarkerSender()
        self.on_written: Callable[[MarkersWritten], None] = _ignore
        self._tasks = TaskOwner(runtime.loop)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def write(self, event: WriteMarkers) -> None:
        """Have a marker written."""
        self._step(event)

    def image_changed(self, image: Image) -> None:
        """Leaders may have moved."""
        self._step(ImageChanged(image))

    def unloaded(self, state_partition: int) -> None:
        """This node does not coordinate that partition any more."""
        self._step(StatePartitionUnloaded(state_partition))

    async def close(self) -> None:
        """Send nothing more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.close()
        await self._calls.close()

    def _step(self, event: Event) -> None:
        if not self._closed:
            self._perform(self.sender.step(event, self._now_ms()))

    def _now_ms(self) -> int:
        # Rounded: a timer that is due by the loop's clock must be due by this one, or it spins.
        return round(self._runtime.loop.time() * 1000)

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case SendMarkers(node) if node == self._identity.node_id:
                    self._runtime.loop.call_soon(self._write_here, effect)
                case SendMarkers():
                    self._tasks.spawn(self._send(effect))
                case MarkersWritten():
                    self.on_written(effect)
                case ConfirmLeadership(state_partition):
                    self._confirm(state_partition)
                case _:
                    log.warning("marker", producer=effect.subject, what=effect.text)
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_ms = self.sender.next_deadline_ms
        if deadline_ms is not None and not self._closed:
            self._timer = self._runtime.loop.call_at(deadline_ms / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self.sender.tick(self._now_ms()))

    def _write_here(self, effect: SendMarkers) -> None:
        if self._closed:
            return
        marks = [(entry.marker, sorted(entry.partitions)) for entry in effect.entries]

        def finish(done: SlicedTask[CompletableFuture[Marked]]) -> None:
            error = done.failure()
            if error is None:
                self._wait_for(effect.node, done.result())
            else:
                self._failed(effect.node, error)

        try:
            staged = self._runtime.slices.run(self._writer.write(marks))
        except Exception as error:  # noqa: BLE001
            self._failed(effect.node, error)
            return
        if isinstance(staged, SlicedTask):
            staged.add_done_callback(finish)
        else:
            self._wait_for(effect.node, staged)

    def _failed(self, node: int, error: BaseException) -> None:
        """A bug of ours: the markers are tried again, or transactions would hang for ever."""
        bugs.report("markers failed", error, node=node)
        self._step(MarkersFailed(node))

    def _wait_for(self, node: int, marked: CompletableFuture[Marked]) -> None:
        def answered(finished: CompletableFuture[Marked]) -> None:
            answers = tuple(
                (marker.producer_id, tp, error)
                for marker, partitions in finished.result()
                for tp, error in partitions
            )
            self._step(MarkersResponseReceived(node, answers))

        marked.add_done_callback(answered)

    async def _send(self, effect: SendMarkers) -> None:
        values = {"markers": [_marker_values(entry) for entry in effect.entries]}
        try:
            response = await self._calls.call(
                effect.node, ApiKey.WRITE_TXN_MARKERS, WRITE_TXN_MARKERS_VERSION, values, ANSWER_S
            )
        except KeptError as error:
            log.info("markers not answered", node=effect.node, error=str(error))
            # Or who was replaced meanwhile would write into transactions of its successor, where a
            # leader has forgotten the producer, and with it what it knew of later coordinators.
            await self._barrier.wait()
            self._step(MarkersFailed(effect.node))
            return
        except Exception as error:  # noqa: BLE001
            self._failed(effect.node, error)
            return
        answers = tuple(
            (marker.producer_id, TopicPartition(topic.name, part.partition_index), part.error_code)
            for marker in response.markers
            for topic in marker.topics
            for part in topic.partitions
        )
        self._step(MarkersResponseReceived(effect.node, answers))

    def _confirm(self, state_partition: int) -> None:
        def confirmed(is_current: bool) -> None:
            if not is_current:
                self._runtime.loop.call_later(1.0, self._confirm, state_partition)
                return
            record = self._metadata.image.partition(TRANSACTION_STATE, state_partition)
            is_leader = record is not None and record.leader == self._identity.node_id
            self._step(LeadershipConfirmed(state_partition, is_leader))

        if not self._closed:
            self._barrier.confirm(confirmed)


def _marker_values(entry: MarkerEntry) -> dict[str, Any]:
    marker = entry.marker
    return {
        "producer_id": marker.producer_id,
        "producer_epoch": marker.epoch,
        "transaction_result": marker.is_commit,
        "topics": [
            {"name": topic, "partition_indexes": numbers}
            for topic, numbers in partitions_by_topic(entry.partitions)
        ],
        "coordinator_epoch": marker.coordinator_epoch,
        "transaction_version": marker.version,
    }
