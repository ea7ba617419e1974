"""Admin requests on their way to the active controller, and back (Kafka's ``ForwardingManager``).

Any node takes an admin request; the active controller decides. A node sends what it got on, follows
the metadata as far as the answer reaches, and only then answers its client, who sees the effect at
this node at once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from kept.client.protocol import messages as protocol
from kept.client.protocol.api_keys import ApiKey
from kept.node.internode import controller_rpc
from kept.node.kafka import api
from kept.node.kafka.error_responses import UNANSWERED, refusal, unanswered
from kept.node.runtime.logging import log
from kept.storage.errors import NetworkException, NotController

# isort: split
from kio.static.constants import EntityType

if TYPE_CHECKING:
    from kept.node.internode.peers import Peers
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.replicas.log_lifecycle import LogLifecycle
    from kept.node.runtime.runtime import Runtime

MOVES_LOGS: Final = frozenset(
    {ApiKey.CREATE_TOPICS, ApiKey.DELETE_TOPICS, ApiKey.CREATE_PARTITIONS}
)
"""Requests that create or delete logs."""
FORWARD_S: Final = 15.0
"""How long an admin request may take at the controller, or wait for one to be elected."""
RETRY_S: Final = 0.05
FOLLOW_S: Final = 1.0
"""How long a forwarded request waits for its effect to be seen at this node, too."""


class ForwardingManager:
    """Forwards administrative requests to the active controller, and returns its responses.
    ``changes`` are the logs that come and go here.
    """

    def __init__(
        self, runtime: Runtime, metadata: MetadataLog, peers: Peers, changes: LogLifecycle
    ) -> None:
        self._runtime = runtime
        self._metadata = metadata
        self._peers = peers
        self._changes = changes

    async def respond(
        self, context: api.RequestContext, body: bytes, request: Any
    ) -> bytes | protocol.Values:
        """What :meth:`forward` brings, or the response that says that no controller answered."""
        try:
            return await self.forward(context, body)
        except UNANSWERED as error:
            log.warning(
                "no controller answers", api=api.served()[context.api_key].name, error=str(error)
            )
            failed = unanswered(error)
            steps = refusal(context.api_key, context.api_version, request, failed)
            return await self._runtime.slices.finish(steps)

    async def forward(self, context: api.RequestContext, body: bytes) -> bytes:
        """The response's body to an admin request, from whoever is the active controller.

        Raises NotController, NetworkException after :data:`FORWARD_S`.
        """
        tries: list[uuid.UUID] = []

        session = context.session

        def request() -> controller_rpc.ForwardRequest:
            tries.append(uuid.uuid4())
            return controller_rpc.ForwardRequest(
                context.api_key,
                context.api_version,
                body,
                session.listener,
                context.client_id,
                session.host,
                tuple(tries),
                session.principal,
                session.mechanism,
                session.is_node,
            )

        reply = await self._call_controller("Forward", request, logs=context.api_key in MOVES_LOGS)
        response: bytes = reply.body
        return response

    async def _call_controller(
        self, method: str, request: Callable[[], Any], *, logs: bool = False
    ) -> Any:
        """Call whoever is the active controller, and follow as far as it answered; with ``logs``
        down to the logs that come and go with it. ``request`` is called for each try.

        Raises what it raises, NotController, NetworkException after :data:`FORWARD_S`.
        """
        loop = self._runtime.loop
        deadline = loop.time() + FORWARD_S
        while True:
            try:
                controller = self._metadata.leader_id
                if controller is None:
                    raise NotController("no controller is elected")
                reply = await self._while_it_leads(
                    controller, self._peers.call(controller, method, request(), FORWARD_S)
                )
            except (NotController, NetworkException):
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)
                continue
            try:
                async with asyncio.timeout(FOLLOW_S):
                    await self._metadata.acted(reply.index)
                    if logs:
                        await self._changes.done_up_to(reply.index)
            except TimeoutError:
                log.warning("metadata lags behind the controller", index=reply.index)
            return reply

    async def _while_it_leads(self, controller: int, call: Coroutine[Any, Any, Any]) -> Any:
        """The answer to a call. Raises what it raises, and NotController once another one leads:
        one that stands still answers nothing, and whoever asked need not wait for it.
        """
        answer = self._runtime.loop.create_task(call)
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=RETRY_S)
                if not answer.done() and self._metadata.leader_id not in (controller, None):
                    raise NotController(f"node {controller} is the controller no more")
            return answer.result()
        finally:
            answer.cancel()

    async def change_voters(self, request: controller_rpc.ChangeVotersRequest) -> None:
        """Let a node vote, or no longer. Raises InvalidRequest with what would be right, and as
        :meth:`forward`.
        """
        await self._call_controller("ChangeVoters", lambda: request)

    async def request(self, context: api.RequestContext, values: protocol.Values) -> Any:
        """An admin request of this node's own, of the API and version of ``context``; kio's typed
        response. Raises as :meth:`forward`.
        """
        api_key, version = context.api_key, context.api_version
        cls = protocol.message_type(api_key, version, EntityType.request)
        body = protocol.encode(protocol.build(cls, values))
        answer = await self.forward(context, body)
        response = protocol.message_type(api_key, version, EntityType.response)
        return protocol.decode(response, answer)[0]
