"""DeleteRecords: the start of a log moves up, on its leader at once, elsewhere with the next fetch.

The answer waits until every live replica has followed, or says REQUEST_TIMED_OUT when the request's
own time is over (``DelayedDeleteRecords``); what was begun goes on either way. The low watermark is
the least log start among the live replicas.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.client.protocol.messages import Values
from kept.cluster.controller.topics import INTERNAL_TOPICS
from kept.node.runtime.error_codes import REQUEST_TIMED_OUT, code_for
from kept.storage.errors import InvalidTopicException, KeptError
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.kafka.api import HandlerResult, RequestContext
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.runtime import Runtime
    from kept.replication.partition import Partition
    from kept.steps import Steps

LIVENESS_CHECK_S: Final = 0.5
"""How often it is looked whether a replica that is waited for has died."""


@dataclass(slots=True)
class _Deletion:
    """One partition of a request. ``wanted``: where its log is to start on every live replica."""

    tp: TopicPartition
    partition: Partition | None = None
    wanted: int = -1
    low_watermark: int = -1
    code: int = 0

    def begin(self, table: ReplicaTable, offset: int) -> None:
        """Move the leader's log start."""
        try:
            if self.tp.topic in INTERNAL_TOPICS:
                raise InvalidTopicException(
                    f"Cannot delete records of internal topic {self.tp.topic}"
                )
            self.partition = table.partition(self.tp)
            self.wanted = self.partition.delete_records(offset)
        except KeptError as error:
            self._fail(error)

    def is_done(self, live: set[int]) -> bool:
        """Whether there is nothing to wait for (any more); ``live``: the brokers that live."""
        if self.code == 0 and self.partition is not None:
            try:
                self.low_watermark = self.partition.low_watermark(live)
            except KeptError as error:
                self._fail(error)
        return self.code != 0 or self.low_watermark >= self.wanted

    def _fail(self, error: KeptError) -> None:
        self.code, self.low_watermark = code_for(error), -1


@dataclass(frozen=True, slots=True)
class DeleteRecordsHandler:
    """Deletes records up to an offset."""

    runtime: Runtime
    metadata: MetadataLog
    table: ReplicaTable

    def delete_records(self, _ctx: RequestContext, request: Any) -> Steps[HandlerResult]:
        """DeleteRecords v0-2: raise the log start, up to the high watermark (offset -1)."""
        deletions = []
        for topic in request.topics:
            for entry in topic.partitions:
                yield
                deletion = _Deletion(TopicPartition(topic.name, entry.partition_index))
                deletion.begin(self.table, entry.offset)
                deletions.append(deletion)
        if not (yield from self._unfinished(deletions)):
            return _answer(deletions)
        return self._wait(deletions, request.timeout.total_seconds())

    def _unfinished(self, deletions: list[_Deletion]) -> Steps[list[_Deletion]]:
        """Those that are waited for."""
        brokers = self.metadata.image.brokers
        live = {broker_id for broker_id, broker in brokers.items() if not broker.fenced}
        waiting = []
        for deletion in deletions:
            yield
            if not deletion.is_done(live):
                waiting.append(deletion)
        return waiting

    async def _wait(self, deletions: list[_Deletion], seconds: float) -> Values:
        moved = asyncio.Event()
        end = self.runtime.loop.time() + seconds
        partitions = [
            deletion.partition for deletion in deletions if deletion.partition is not None
        ]
        for partition in partitions:
            partition.add_waiter(moved.set)
        try:
            while True:
                moved.clear()  # before they are looked at, which may take several turns
                waiting = await self.runtime.slices.finish(self._unfinished(deletions))
                if not waiting:
                    break
                left = end - self.runtime.loop.time()
                if left <= 0:
                    for deletion in waiting:
                        deletion.code = REQUEST_TIMED_OUT
                    break
                try:
                    await asyncio.wait_for(moved.wait(), min(left, LIVENESS_CHECK_S))
                except TimeoutError:
                    continue
        finally:
            for partition in partitions:
                partition.remove_waiter(moved.set)
        return _answer(deletions)


def _answer(deletions: list[_Deletion]) -> Values:
    topics: dict[str, list[Values]] = {}
    for deletion in deletions:
        topics.setdefault(deletion.tp.topic, []).append(
            {
                "partition_index": deletion.tp.partition,
                "low_watermark": deletion.low_watermark,
                "error_code": deletion.code,
            }
        )
    return {"topics": [{"name": name, "partitions": several} for name, several in topics.items()]}
