"""Leaders here ask the controller for other ISRs: one AlterPartitions call for many partitions.

What is asked in one turn of the loop goes in one call, one call is under way at a time, and what
nobody answered is asked again. The ISR itself comes from the image alone (rule 35), and so does
the later leader epoch that is asked for where a log has batches of an epoch that the image does not
know.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from kept.node.internode import controller_rpc
from kept.node.internode.rpc_errors import error_of
from kept.node.runtime.logging import log
from kept.node.runtime.tasks import Batcher
from kept.replication.isr import AlterIsrItem
from kept.storage.errors import KeptError, NetworkException

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kept.cluster.metadata.records import PartitionRecord
    from kept.node.config.live_config import LiveConfig
    from kept.node.internode.peers import Peers
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.runtime.runtime import Runtime
    from kept.replication.partition import Partition
    from kept.storage.types import TopicPartition

RETRY_S: Final = 0.05
CALL_S: Final = 5.0
MAX_CHANGES: Final = 1000
"""Of one call: some 100 KB."""


class _Change:
    """A change that no leader's core proposes: it is asked for like those, until the first answer.

    ``answered`` is called then, whatever it says.
    """

    def __init__(
        self,
        tp: TopicPartition,
        record: PartitionRecord,
        isr: Iterable[int],
        last_epoch: int = 0,
        answered: Callable[[], None] | None = None,
    ) -> None:
        self.topic_partition = tp
        self._answered = answered
        self._item: AlterIsrItem | None = AlterIsrItem(
            record.topic_id,
            tp.partition,
            record.leader_epoch,
            record.partition_epoch,
            tuple((member, -1) for member in isr),
            not record.unclean,
            last_epoch,
        )

    def alter_isr_request(self) -> AlterIsrItem | None:
        """What to ask the controller; None once it has answered."""
        return self._item

    def alter_isr_completed(self, _: AlterIsrItem, __: KeptError | None) -> None:
        """What the image says then is of another epoch, for another request."""
        self._item = None
        if self._answered is not None:
            self._answered()


Replica: TypeAlias = "Partition | _Change"


class AlterPartitionQueue:
    """Sends the ISR changes of the leaders here to the controller, many in one call."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        config: LiveConfig,
        metadata: MetadataLog,
        identity: NodeIdentity,
        peers: Peers,
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._metadata = metadata
        self._identity = identity
        self._peers = peers
        self.on_still_lost: Callable[[TopicPartition, PartitionRecord | None], None]
        """Called when a replica that resigned may have to do it again."""
        self._requests = Batcher(runtime.loop, self._send, max_batch=MAX_CHANGES, backoff_s=RETRY_S)
        self._resigned_at: dict[TopicPartition, float] = {}
        self._repeats: dict[tuple[TopicPartition, bool], asyncio.TimerHandle] = {}
        """Pending repeats: of a resignation, or (False) of a request for a later epoch."""
        self.on_later_epoch_answered: Callable[[TopicPartition, PartitionRecord | None], None]
        """Called a while after a request for a later epoch was answered, maybe with a refusal."""

    def submit(self, partition: Replica) -> None:
        """A partition wants another ISR; it says which when the call is made."""
        self._requests.add(partition)

    def resign(self, tp: TopicPartition, record: PartitionRecord) -> None:
        """This node lost its replica: it leaves the ISR, and another member is to lead.

        A leader that does not know yet that nobody follows here may take it back; then it is asked
        again when the next fetch must have told it.
        """
        loop = self._runtime.loop
        due = self._resigned_at.get(tp, -1.0) + self._pause_s
        if loop.time() >= due:
            self._resigned_at[tp] = loop.time()
            others = [member for member in record.isr if member != self._identity.node_id]
            self.submit(_Change(tp, record, others))
        else:
            self._repeat_at(due, tp, resigned=True)

    def request_later_epoch(
        self, tp: TopicPartition, record: PartitionRecord, last_epoch: int
    ) -> None:
        """The log of a partition that this node is to lead is of an epoch above ``record``'s.

        A refusal must not end it, nor a controller of an older version, which does not know what
        is asked: :attr:`on_later_epoch_answered` asks again as long as it has to.
        """
        answered = partial(self._later_epoch_answered, tp)
        self.submit(_Change(tp, record, record.isr, last_epoch, answered))

    def _later_epoch_answered(self, tp: TopicPartition) -> None:
        self._repeat_at(self._runtime.loop.time() + self._pause_s, tp, resigned=False)

    def _repeat_at(self, due: float, tp: TopicPartition, *, resigned: bool) -> None:
        if (tp, resigned) not in self._repeats:
            handle = self._runtime.loop.call_at(due, self._repeat, tp, resigned)
            self._repeats[tp, resigned] = handle

    def _repeat(self, tp: TopicPartition, resigned: bool) -> None:
        del self._repeats[tp, resigned]
        call = self.on_still_lost if resigned else self.on_later_epoch_answered
        call(tp, self._metadata.image.partition(tp.topic, tp.partition))

    @property
    def _pause_s(self) -> float:
        """Between two requests of the same: when the next fetch must have told the leader."""
        return self._config.current.replica_fetch_wait_max_ms / 1000

    async def close(self) -> None:
        """Ask for nothing more."""
        for handle in self._repeats.values():
            handle.cancel()
        await self._requests.close()

    async def _send(self, partitions: list[Replica]) -> list[Replica]:
        """Ask the controller; those that it has not decided are asked about again."""
        asking: dict[Replica, AlterIsrItem] = {}
        for partition in partitions:
            item = partition.alter_isr_request()
            if item is not None:
                asking[partition] = item
        if not asking:
            return []
        request = controller_rpc.AlterPartitionsRequest(
            self._identity.node_id,
            self._identity.broker_epoch,
            tuple(
                controller_rpc.IsrChange(
                    item.topic_id,
                    item.partition,
                    item.leader_epoch,
                    item.partition_epoch,
                    tuple(controller_rpc.IsrMember(member, epoch) for member, epoch in item.isr),
                    int(not item.base_published),
                    item.last_epoch,
                )
                for item in asking.values()
            ),
        )
        try:
            controller = self._metadata.leader_id
            if controller is None:
                raise NetworkException("no controller is known")
            reply = await self._peers.call(controller, "AlterPartitions", request, CALL_S)
        except KeptError as error:
            log.debug("ISR change unanswered", error=str(error))
            return list(asking)
        undecided = []
        for (partition, item), result in zip(asking.items(), reply.results, strict=True):
            refusal = None if result.failure is None else error_of(result.failure)
            if refusal is None and not item.last_epoch:
                log.info(
                    "ISR changed",
                    topic=partition.topic_partition.topic,
                    partition=partition.topic_partition.partition,
                    isr=",".join(str(member) for member, _ in item.isr),
                )
            partition.alter_isr_completed(item, refusal)
            if (wanted := partition.alter_isr_request()) == item:
                undecided.append(partition)
            elif wanted is not None:
                self._requests.add(partition)
        return undecided
