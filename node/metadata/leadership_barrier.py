"""Proof that this node knew who leads at a moment: asked after it, of a majority's controller.

A leader may have been replaced without hearing of it. Nothing that it acknowledges for its ISR can
be wrong because of that, but what it says of its log can: that a producer's sequence does not
continue there. The controller confirms with a read barrier that it leads, and says how far its
metadata went; once this node has acted on as much, it leads what it led then, or knows better.
One question is under way at a time, for all who came before it was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from kept.node.internode.controller_rpc import ConfirmRequest
from kept.node.runtime.logging import log
from kept.storage.errors import KeptError

if TYPE_CHECKING:
    from kept.node.internode.peers import Peers
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.runtime.runtime import Runtime

ANSWER_S: Final = 2.0
"""Without an answer for so long nothing is proven; an election takes less."""

RETRY_S: Final = 0.5
"""Between two questions of :meth:`LeadershipBarrier.wait`."""

Then = Callable[[bool], None]


class LeadershipBarrier:
    """Proves that this node knew who leads at a moment."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        metadata: MetadataLog,
        identity: NodeIdentity,
        peers: Peers,
        alone: bool,
    ) -> None:
        self._alone = alone
        self._runtime = runtime
        self._metadata = metadata
        self._identity = identity
        self._peers = peers
        self._waiting: list[Then] = []
        self._task: asyncio.Task[None] | None = None

    def confirm(self, then: Then) -> None:
        """Call ``then`` once this node has acted on all that was decided before this call (True),
        or nobody could say (False). Later, never at once.
        """
        self._waiting.append(then)
        if self._task is None:
            self._task = self._runtime.loop.create_task(self._run())

    async def wait(self) -> None:
        """Return once this node has acted on all that was decided before this call; ask until
        somebody can say.
        """
        while True:
            answer: asyncio.Future[bool] = self._runtime.loop.create_future()
            self.confirm(partial(_resolve_once, answer))
            if await answer:
                return
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Ask nobody any more; who waits hears nothing."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                confirmed = await self._confirm()
                for then in waiting:
                    try:
                        then(confirmed)
                    except Exception as error:  # noqa: BLE001 - the others wait, too
                        log.exception("told of leadership in vain", error)
        finally:
            self._task = None

    async def _confirm(self) -> bool:
        if self._alone:
            return True  # nobody else decides anything
        controller = self._metadata.leader_id
        if controller is None:
            return False
        request = ConfirmRequest(self._identity.node_id, self._identity.broker_epoch)
        try:
            async with asyncio.timeout(ANSWER_S):
                reply = await self._peers.call(controller, "Confirm", request, ANSWER_S)
                await self._metadata.acted(reply.index)
        except (KeptError, TimeoutError) as error:
            log.warning("leadership not confirmed", controller=controller, error=str(error))
            return False
        return True


def _resolve_once(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():  # whoever waited may have gone
        future.set_result(value)
