"""DescribeProducers: who writes to a partition, and whose transactions are open there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kept.node.runtime.error_codes import code_for, message_for
from kept.storage.errors import KeptError
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.client.protocol.messages import Values
    from kept.node.kafka.api import Answer, RequestContext
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.steps import Steps


@dataclass(frozen=True, slots=True)
class DescribeProducersHandler:
    """The producers that the partitions led here know."""

    table: ReplicaTable

    def describe_producers(self, _ctx: RequestContext, request: Any) -> Steps[Answer]:
        """DescribeProducers v0, of idempotent producers, too."""
        topics = []
        for topic in request.topics:
            partitions = []
            for index in topic.partition_indexes:
                yield
                partitions.append(self._partition(TopicPartition(topic.name, index)))
            topics.append({"name": topic.name, "partitions": partitions})
        return {"topics": topics}

    def _partition(self, tp: TopicPartition) -> Values:
        code, message, producers = 0, None, []
        try:
            views = self.table.partition(tp).producers()
        except KeptError as error:
            code, message = code_for(error), message_for(error)
        else:
            producers = [view._asdict() for view in views]
        return {
            "partition_index": tp.partition,
            "error_code": code,
            "error_message": message,
            "active_producers": producers,
        }
