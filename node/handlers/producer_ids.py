"""InitProducerId for idempotent producers: ids from blocks that the metadata log gave this node.

An id is handed out once, ever: a block is durable before its first id leaves, and what a restart
leaves unused is never given again. Transactional ids are refused until there is a coordinator (rule
40).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kept.cluster.controller import allocate_producer_ids
from kept.node import error_codes
from kept.storage.errors import KeptError

if TYPE_CHECKING:
    from kept.cluster.image import Image
    from kept.cluster.records import MetadataRecord
    from kept.node.api import Answer, RequestContext
    from kept.node.server import Node


class ProducerIds:
    """The ids that this node may hand out."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._left: list[int] = []
        self._lock = asyncio.Lock()

    async def next(self) -> int:
        """An id that nobody ever had."""
        async with self._lock:
            if not self._left and self._node.membership is not None:
                self._left = list(reversed(await self._node.membership.producer_ids()))
            if not self._left:
                block: range = range(0)

                def decide(image: Image) -> list[MetadataRecord]:
                    nonlocal block
                    records, block = allocate_producer_ids(
                        image, self._node.node_id, self._node.broker_epoch
                    )
                    return records

                await self._node.propose(decide)
                self._left = list(reversed(block))
            return self._left.pop()


def init_producer_id(ctx: RequestContext, request: Any) -> Answer:
    """A producer id and epoch 0, or the next epoch of the producer that asks (KIP-360)."""
    if request.transactional_id is not None:
        return {
            "error_code": error_codes.INVALID_REQUEST,
            "producer_id": -1,
            "producer_epoch": -1,
        }
    return _assign(ctx.node)


async def _assign(node: Node) -> dict[str, Any]:
    try:
        producer_id = await node.producer_ids.next()
    except KeptError as error:
        code = error_codes.code_for(error)
        return {"error_code": code, "producer_id": -1, "producer_epoch": -1}
    return {"error_code": 0, "producer_id": producer_id, "producer_epoch": 0}
