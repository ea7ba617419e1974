"""InitProducerId: for idempotent producers by any node, for transactional ids by their coordinator.

While no controller gives ids the answer is COORDINATOR_LOAD_IN_PROGRESS, as Kafka's: the one code
at which every client tries again. Transactional ids are refused while not every broker serves
transactions (rule 40) with TRANSACTIONAL_ID_AUTHORIZATION_FAILED, at which every client gives up at
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from kept.client.protocol.messages import milliseconds
from kept.cluster.security.acls import AclOperation, AclResourceType
from kept.node.coordinator.transactions import events as ev
from kept.node.kafka.handlers.transactions.transactional_requests import result_of
from kept.node.runtime import error_codes
from kept.node.security.access import CLUSTER
from kept.storage.errors import KeptError

if TYPE_CHECKING:
    from kept.node.coordinator.producer_ids import ProducerIds
    from kept.node.coordinator.transactions.coordinator import TransactionCoordinator
    from kept.node.kafka.api import HandlerResult, RequestContext


@dataclass(frozen=True, slots=True)
class ProducerIdHandler:
    """Producer ids."""

    producer_ids: ProducerIds
    transactions: TransactionCoordinator

    def init_producer_id(self, ctx: RequestContext, request: Any) -> HandlerResult:
        """A producer id and epoch 0, or the next epoch of the producer that asks (KIP-360).

        A producer names its id and its epoch, or neither.
        """
        producer_id = getattr(request, "producer_id", -1)
        epoch = getattr(request, "producer_epoch", -1)
        if request.transactional_id is not None:
            may = ctx.may(
                AclOperation.WRITE, AclResourceType.TRANSACTIONAL_ID, request.transactional_id
            )
            if not may or not self.transactions.is_served:
                return _answer(ErrorCode.transactional_id_authorization_failed)
            return self._begin(ctx, request, producer_id, epoch)
        if not (
            ctx.may(AclOperation.IDEMPOTENT_WRITE, *CLUSTER, audited=False)
            or ctx.session.may_any(AclOperation.WRITE, AclResourceType.TOPIC)
        ):
            return _answer(ErrorCode.cluster_authorization_failed)
        if (producer_id != -1) != (epoch != -1):
            return _answer(ErrorCode.invalid_request)
        return self._assign()

    async def _assign(self) -> dict[str, Any]:
        try:
            producer_id = await self.producer_ids.next()
        except KeptError as error:
            return _answer(error_codes.code_for(error))
        return _answer(ErrorCode.none, producer_id, 0)

    async def _begin(
        self, ctx: RequestContext, request: Any, producer_id: int, epoch: int
    ) -> dict[str, Any]:
        """The next producer of a transactional id: all before it are fenced."""
        name = request.transactional_id
        timeout_ms = milliseconds(request.transaction_timeout)
        result = await result_of(
            ctx,
            lambda: self.transactions.shards.submit_completable(
                name,
                lambda number: ev.InitProducerId(number, name, timeout_ms, producer_id, epoch),
            ),
            ev.InitProducerIdResult,
        )
        return _answer(result.error, result.producer_id, result.epoch)


def _answer(code: int, producer_id: int = -1, epoch: int = -1) -> dict[str, Any]:
    return {"error_code": code, "producer_id": producer_id, "producer_epoch": epoch}
