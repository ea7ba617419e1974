"""WriteTxnMarkers: coordinators, and operators who end a hanging transaction, write its markers.

Answered when all of its markers are committed or refused
(``kept.node.coordinator.transactions.marker_writer``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kept.node.coordinator.common.events import EndMarker
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.client.protocol.messages import Values
    from kept.node.coordinator.transactions.marker_writer import Marked, MarkerWriter
    from kept.node.kafka.api import HandlerResult, RequestContext
    from kept.steps import Steps


@dataclass(frozen=True, slots=True)
class WriteTxnMarkersHandler:
    """Has the markers of transactions written."""

    marker_writer: MarkerWriter

    def write_txn_markers(self, ctx: RequestContext, request: Any) -> Steps[HandlerResult]:
        """WriteTxnMarkers v1-2. A marker of v1 is of a transaction of version 0 or 1. Raises
        NetworkException, as :meth:`MarkerWriter.write_for_node` does.
        """
        marks = ((_marker(entry), _partitions(entry)) for entry in request.markers)
        if ctx.session.is_node and ctx.connection is not None:
            marked = yield from self.marker_writer.write_for_node(marks, ctx.connection)
        else:
            marked = yield from self.marker_writer.write(marks)
        return marked.map(_answer)


def _marker(entry: Any) -> EndMarker:
    return EndMarker(
        entry.producer_id,
        entry.producer_epoch,
        entry.coordinator_epoch,
        entry.transaction_result,
        getattr(entry, "transaction_version", 0),
    )


def _partitions(entry: Any) -> Iterator[TopicPartition]:
    for topic in entry.topics:
        for index in topic.partition_indexes:
            yield TopicPartition(topic.name, index)


def _answer(marked: Marked) -> Steps[Values]:
    """As the response has it, one partition a step."""
    results: list[Values] = []
    for marker, partitions in marked:
        topics: dict[str, list[Values]] = {}
        for tp, error in partitions:
            topics.setdefault(tp.topic, []).append(
                {"partition_index": tp.partition, "error_code": error}
            )
            yield
        named = [{"name": name, "partitions": each} for name, each in topics.items()]
        results.append({"producer_id": marker.producer_id, "topics": named})
        yield
    return {"markers": results}
