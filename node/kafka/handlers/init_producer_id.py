"""InitProducerId for idempotent producers: ids from blocks that the metadata log gave this node.

An id is handed out once, ever: a block is durable before its first id leaves, and what a restart
leaves unused, or an answer that was lost, is never given again. The active controller
gives the blocks; while there is none the request waits, and then says
COORDINATOR_LOAD_IN_PROGRESS, the one answer that every client tries again on (Kafka answers it,
too). Transactional ids are refused until there is a coordinator (rule 40), with
TRANSACTIONAL_ID_AUTHORIZATION_FAILED: the code at which every client gives up at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from kept.node.internode.controller_rpc import AllocateProducerIdsRequest
from kept.node.runtime import error_codes
from kept.node.runtime.logging import log
from kept.storage.errors import (
    BrokerIdNotRegistered,
    CoordinatorLoadInProgress,
    KeptError,
    NetworkException,
    NotController,
    RequestTimedOut,
    StaleBrokerEpoch,
)

if TYPE_CHECKING:
    from kept.node.internode.peers import Peers
    from kept.node.kafka.api import Answer, RequestContext
    from kept.node.kafka.apis import KafkaApis
    from kept.node.metadata.metadata_log import Metadata
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.runtime.runtime import Runtime


ALLOCATE_S: Final = 5.0
"""How long a request waits for a controller that gives a block: longer than an election takes."""
RETRY_S: Final = 0.05

_PASSING: Final = (
    NotController,
    NetworkException,
    RequestTimedOut,
    StaleBrokerEpoch,
    BrokerIdNotRegistered,
)
"""Controllers change, and so do registrations: asking again helps."""


class ProducerIds:
    """The ids that this node may hand out."""

    def __init__(
        self, runtime: Runtime, metadata: Metadata, identity: NodeIdentity, peers: Peers
    ) -> None:
        self._runtime = runtime
        self._metadata = metadata
        self._identity = identity
        self._peers = peers
        self._left: list[int] = []
        self._lock = asyncio.Lock()

    async def next(self) -> int:
        """An id that nobody ever had. Raises KeptError, CoordinatorLoadInProgress."""
        async with self._lock:
            if not self._left:
                self._left = list(reversed(await self._block()))
            return self._left.pop()

    async def _block(self) -> range:
        loop = self._runtime.loop
        deadline = loop.time() + ALLOCATE_S
        while True:
            try:
                return await self._allocate()
            except _PASSING as error:
                if loop.time() >= deadline:
                    log.warning("no producer ids", error=str(error))
                    raise CoordinatorLoadInProgress(f"no producer ids: {error}") from error
            await asyncio.sleep(RETRY_S)

    async def _allocate(self) -> range:
        """A block of ids that nobody else has. Raises KeptError."""
        controller = self._metadata.leader_id
        if controller is None:
            raise NotController("no controller is elected")
        identity = self._identity
        request = AllocateProducerIdsRequest(identity.node_id, identity.broker_epoch)
        reply = await self._peers.call(controller, "AllocateProducerIds", request)
        return range(reply.first, reply.first + reply.count)


def init_producer_id(ctx: RequestContext, request: Any) -> Answer:
    """A producer id and epoch 0, or the next epoch of the producer that asks (KIP-360).

    A producer names its id and its epoch, or neither.
    """
    has_id = getattr(request, "producer_id", -1) != -1
    has_epoch = getattr(request, "producer_epoch", -1) != -1
    if request.transactional_id is not None:
        return _refused(error_codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    if has_id != has_epoch:
        return _refused(error_codes.INVALID_REQUEST)
    return _assign(ctx.apis)


def _refused(code: int) -> dict[str, Any]:
    return {"error_code": code, "producer_id": -1, "producer_epoch": -1}


async def _assign(apis: KafkaApis) -> dict[str, Any]:
    try:
        producer_id = await apis.producer_ids.next()
    except KeptError as error:
        return _refused(error_codes.code_for(error))
    return {"error_code": 0, "producer_id": producer_id, "producer_epoch": 0}
