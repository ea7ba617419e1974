"""InitProducerId for idempotent producers.

While no controller gives ids the answer is COORDINATOR_LOAD_IN_PROGRESS, as Kafka's: the one code
at which every client tries again. Transactional ids are refused until there is a coordinator
(rule 40) with TRANSACTIONAL_ID_AUTHORIZATION_FAILED, at which every client gives up at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kept.node.runtime import error_codes
from kept.storage.errors import KeptError

if TYPE_CHECKING:
    from kept.node.kafka.api import Answer, RequestContext
    from kept.node.kafka.producer_ids import ProducerIds


@dataclass(frozen=True, slots=True)
class ProducerIdHandler:
    """Producer ids."""

    producer_ids: ProducerIds

    def init_producer_id(self, _ctx: RequestContext, request: Any) -> Answer:
        """A producer id and epoch 0, or the next epoch of the producer that asks (KIP-360).

        A producer names its id and its epoch, or neither.
        """
        has_id = getattr(request, "producer_id", -1) != -1
        has_epoch = getattr(request, "producer_epoch", -1) != -1
        if request.transactional_id is not None:
            return _refused(error_codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        if has_id != has_epoch:
            return _refused(error_codes.INVALID_REQUEST)
        return self._assign()

    async def _assign(self) -> dict[str, Any]:
        try:
            producer_id = await self.producer_ids.next()
        except KeptError as error:
            return _refused(error_codes.code_for(error))
        return {"error_code": 0, "producer_id": producer_id, "producer_epoch": 0}


def _refused(code: int) -> dict[str, Any]:
    return {"error_code": code, "producer_id": -1, "producer_epoch": -1}
