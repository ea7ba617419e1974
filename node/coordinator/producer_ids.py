"""Producer ids, from blocks that the controller gives this node.

An id is handed out once, ever: a block is durable in the metadata log before its first id leaves,
and what a restart leaves unused, or a lost response carried, is never given again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kept.node.internode.controller_rpc import AllocateProducerIdsRequest
from kept.node.runtime.logging import log
from kept.storage.errors import (
    BrokerIdNotRegistered,
    CoordinatorLoadInProgress,
    NetworkException,
    NotController,
    RequestTimedOut,
    StaleBrokerEpoch,
)

if TYPE_CHECKING:
    from kept.node.internode.peers import Peers
    from kept.node.metadata.metadata_log import MetadataLog
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
        self, runtime: Runtime, metadata: MetadataLog, identity: NodeIdentity, peers: Peers
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
