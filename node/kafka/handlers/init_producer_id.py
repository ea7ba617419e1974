"""InitProducerId for idempotent producers: ids from blocks that the metadata log gave this node.

An id is handed out once, ever: a block is durable before its first id leaves, and what a restart
leaves unused, or an answer that was lost, is never given again. Among several nodes the active
controller gives the blocks; while there is none the request waits, and then says
COORDINATOR_LOAD_IN_PROGRESS, the one answer that every client tries again on (Kafka answers it,
too). Transactional ids are refused until there is a coordinator (rule 40), with
TRANSACTIONAL_ID_AUTHORIZATION_FAILED: the code at which every client gives up at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from kept.cluster.controller.decisions import allocate_producer_ids
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
    from kept.cluster.metadata.image import Image
    from kept.cluster.metadata.records import MetadataRecord
    from kept.node.kafka.api import Answer, RequestContext
    from kept.node.node import Node


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

    def __init__(self, node: Node) -> None:
        self._node = node
        self._left: list[int] = []
        self._lock = asyncio.Lock()

    async def next(self) -> int:
        """An id that nobody ever had. Raises KeptError, CoordinatorLoadInProgress."""
        async with self._lock:
            if not self._left:
                self._left = list(reversed(await self._block()))
            return self._left.pop()

    async def _block(self) -> range:
        cluster_link = self._node.cluster_link
        if cluster_link is None:
            return await self._own_block()
        loop = self._node.loop
        deadline = loop.time() + ALLOCATE_S
        while True:
            try:
                return await cluster_link.producer_ids()
            except _PASSING as error:
                if loop.time() >= deadline:
                    log.warning("no producer ids", error=str(error))
                    raise CoordinatorLoadInProgress(f"no producer ids: {error}") from error
            await asyncio.sleep(RETRY_S)

    async def _own_block(self) -> range:
        """A lone node decides itself."""
        node = self._node
        block = range(0)

        def decide(image: Image) -> list[MetadataRecord]:
            nonlocal block
            records, block = allocate_producer_ids(image, node.node_id, node.broker_epoch)
            return records

        await node.propose(decide)
        return block


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
    return _assign(ctx.node)


def _refused(code: int) -> dict[str, Any]:
    return {"error_code": code, "producer_id": -1, "producer_epoch": -1}


async def _assign(node: Node) -> dict[str, Any]:
    try:
        producer_id = await node.producer_ids.next()
    except KeptError as error:
        return _refused(error_codes.code_for(error))
    return {"error_code": 0, "producer_id": producer_id, "producer_epoch": 0}
