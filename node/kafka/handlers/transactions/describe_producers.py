"""DescribeProducers: who writes to a partition, and whose transactions are open there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kept.client.protocol.messages import LazyArray
from kept.node.runtime.error_codes import code_for, message_for
from kept.replication.partition_views import ProducerView
from kept.storage.errors import KeptError
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.client.protocol.messages import Values
    from kept.node.kafka.api import HandlerResult, RequestContext
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.steps import Steps


@dataclass(frozen=True, slots=True)
class DescribeProducersHandler:
    """The producers that the partitions led here know."""

    table: ReplicaTable

    def describe_producers(self, _ctx: RequestContext, request: Any) -> Steps[HandlerResult]:
        """DescribeProducers v0, of idempotent producers, too. What is named twice is answered
        once: else a small request has an answer without bound.
        """
        wanted: dict[str, dict[TopicPartition, None]] = {}
        for topic in request.topics:
            named = wanted.setdefault(topic.name, {})
            for index in topic.partition_indexes:
                named[TopicPartition(topic.name, index)] = None
                yield
        return {
            "topics": [
                {"name": name, "partitions": LazyArray(tuple(named), self._partition)}
                for name, named in wanted.items()
            ]
        }

    def _partition(self, tp: TopicPartition) -> Values:
        code, message = 0, None
        views: Sequence[ProducerView] = ()
        try:
            views = self.table.partition(tp).producers()
        except KeptError as error:
            code, message = code_for(error), message_for(error)
        return {
            "partition_index": tp.partition,
            "error_code": code,
            "error_message": message,
            "active_producers": LazyArray(views, ProducerView._asdict),
        }
