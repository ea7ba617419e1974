"""AddRaftVoter, RemoveRaftVoter: who votes on the metadata (KIP-853).

The active controller answers, whoever was asked (``api.FORWARDED``). As in Kafka a voter is a node
on a disk, so both are named; one that votes already, from whatever disk, is removed first. Ours:
the answer is given when the change is committed, also where ``ack_when_committed`` is false; an
observer that does not follow, or lags, is refused with a message instead of a time-out. On clients'
listeners both are for the node's own machine alone
(``kept.node.kafka.listener.may_change_voters``): others get CLUSTER_AUTHORIZATION_FAILED, as Kafka
answers who may not alter the cluster.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kept.client.protocol.messages import Values
from kept.cluster.metadata.wal import NO_DIRECTORY
from kept.node.controller.quorum_reconfiguration import (
    QuorumReconfiguration,
    refuse_alone,
    refuse_strangers,
)
from kept.node.internode.controller_rpc import ChangeVotersRequest
from kept.node.kafka.error_responses import outcome
from kept.node.security.session import may_change_voters
from kept.storage.errors import (
    DuplicateVoter,
    InconsistentClusterId,
    InvalidRequest,
    RequestTimedOut,
)

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.controller.controller import Controller
    from kept.node.kafka.api import RequestContext
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.metadata_log import MetadataLog


@dataclass(frozen=True, slots=True)
class RaftVotersHandler:
    """Voters of the metadata quorum."""

    config: LiveConfig
    metadata: MetadataLog
    addresses: AddressBook
    controller: Controller

    async def add_raft_voter(self, ctx: RequestContext, request: Any) -> Values:
        """AddRaftVoter v0-1: an observer votes from now on."""
        return await outcome(self._add(ctx, request))

    async def remove_raft_voter(self, ctx: RequestContext, request: Any) -> Values:
        """RemoveRaftVoter v0: a voter does not vote any more; it goes on as an observer."""
        return await outcome(self._remove(ctx, request))

    async def _add(self, ctx: RequestContext, request: Any) -> None:
        reconfiguration = self._reconfiguration(ctx, request)
        node_id, name = request.voter_id, self._listener_name()
        voters = {voter.node_id: voter for voter in self.metadata.raft_node.voters}
        if node_id in voters:
            raise DuplicateVoter(
                f"node {node_id} votes already, from directory {voters[node_id].directory_id}: "
                "to let it vote from another one remove that voter first"
            )
        reached = [listener for listener in request.listeners if listener.name == name]
        if not reached:
            given = ", ".join(listener.name for listener in request.listeners) or "none"
            raise InvalidRequest(f"nodes reach each other by listener {name}; given were: {given}")
        change = ChangeVotersRequest(
            True, node_id, _directory(request), reached[0].host, int(reached[0].port)
        )
        try:
            async with asyncio.timeout(request.timeout.total_seconds()):
                await reconfiguration.change(change)
        except TimeoutError:
            raise RequestTimedOut(
                f"it is not known yet whether node {node_id} votes: describe the quorum"
            ) from None

    async def _remove(self, ctx: RequestContext, request: Any) -> None:
        reconfiguration = self._reconfiguration(ctx, request)
        await reconfiguration.change(
            ChangeVotersRequest(False, request.voter_id, _directory(request))
        )

    def _reconfiguration(self, ctx: RequestContext, request: Any) -> QuorumReconfiguration:
        if request.cluster_id not in (None, self.metadata.image.cluster_id):
            raise InconsistentClusterId(
                f"this is cluster {self.metadata.image.cluster_id}, the request is meant for "
                f"{request.cluster_id}"
            )
        refuse_alone(self.config.current)
        if not may_change_voters(ctx.session.listener == self._listener_name(), ctx.session):
            refuse_strangers(self.addresses)
        return self.controller.quorum_reconfiguration

    def _listener_name(self) -> str:
        listener = self.config.current.node_listener
        assert listener is not None, "a node among others has one"
        return listener.name


def _directory(request: Any) -> UUID:
    """Kafka's uuid of zeros is null to the decoder, and no disk's."""
    directory_id: UUID | None = request.voter_directory_id
    return NO_DIRECTORY if directory_id is None else directory_id
