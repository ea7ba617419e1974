"""The metadata log for operators: how far its copies are, and who votes on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from kept.node.admin.results import Remote
from kept.node.controller.quorum_reconfiguration import refuse_alone, refuse_strangers
from kept.node.internode.controller_rpc import ChangeVotersRequest
from kept.node.metadata.metadata_log import TICK_S
from kept.storage.errors import InvalidRequest, KeptError

if TYPE_CHECKING:
    from kept.node.admin.peer_http import PeerHttp
    from kept.node.config.live_config import LiveConfig
    from kept.node.kafka.forwarding_manager import ForwardingManager
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity


class QuorumMember(Struct, frozen=True):
    """One copy of the metadata log. ``last_index`` and ``heard_ms_ago`` (milliseconds) are None
    where it has not answered in this term.
    """

    node_id: int
    voter: bool
    last_index: int | None
    lag: int | None
    heard_ms_ago: int | None


class Quorum(Struct, frozen=True):
    """Who leads the metadata log and how far each copy is, as node ``said_by`` knows; ``reason``
    is why the leader did not say it.
    """

    leader_id: int
    term: int
    commit_index: int
    said_by: int
    members: list[QuorumMember]
    reason: str | None


class Voters(Struct, frozen=True):
    """Who votes on the metadata log."""

    voters: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumView:
    """The metadata log's copies and voters."""

    identity: NodeIdentity
    metadata: MetadataLog
    config: LiveConfig
    addresses: AddressBook
    forwarding: ForwardingManager
    peer_http: PeerHttp

    async def describe(self, local: bool) -> Quorum | Remote:
        """The quorum as the active controller knows; with ``local`` as this node knows."""
        metadata, node_id, reason = self.metadata, self.identity.node_id, None
        leader_id = metadata.leader_id
        if not metadata.leads and not local and leader_id not in (None, node_id):
            try:
                path, query = "/api/v1/quorum", {"local": "true"}
                return Remote(await self.peer_http.get(leader_id, path, query))
            except KeptError as error:
                reason = error.client_message
        return Quorum(
            leader_id=-1 if leader_id is None else leader_id,
            term=metadata.raft_node.term,
            commit_index=metadata.raft_node.commit_index,
            said_by=node_id,
            members=self._members() if metadata.leads else [],
            reason=reason,
        )

    def _members(self) -> list[QuorumMember]:
        member, own_id = self.metadata.raft_node, self.identity.node_id
        voters = {voter.node_id for voter in member.voters}
        members = []
        for node_id in sorted({*voters, *member.progress, own_id}):
            index: int | None = None
            last_contact_ms: int | None = None
            if node_id == own_id:
                index, last_contact_ms = member.last_index, 0
            elif node_id in member.progress:
                follower = member.progress[node_id]
                if follower.match_index:  # 0: it has not answered in this term
                    index = follower.match_index
                    ticks = member.ticks - follower.last_contact
                    last_contact_ms = round(ticks * TICK_S * 1000)
            lag = None if index is None else max(0, member.last_index - index)
            members.append(QuorumMember(node_id, node_id in voters, index, lag, last_contact_ms))
        return members

    async def add_voter(self, node_id: int, address: str | None = None, *, allowed: bool) -> Voters:
        """Let an observer vote; ``address`` of its node listener where that is not known.
        ``allowed``: the request came from where it may be made (``kept.node.kafka.listener``).

        Raises InvalidRequest, PolicyViolation, ClusterAuthorizationFailed with what would be right.
        """
        host, port = ("", 0) if address is None else _host_and_port(address)
        return await self._change_voters(
            ChangeVotersRequest(True, node_id, host=host, port=port), allowed
        )

    async def remove_voter(self, node_id: int, *, allowed: bool) -> Voters:
        """Let a node vote no longer. Raises as :meth:`add_voter`."""
        return await self._change_voters(ChangeVotersRequest(False, node_id), allowed)

    async def _change_voters(self, request: ChangeVotersRequest, allowed: bool) -> Voters:
        refuse_alone(self.config.current)
        if not allowed:
            refuse_strangers(self.addresses)
        await self.forwarding.change_voters(request)
        return Voters([voter.node_id for voter in self.metadata.image.voters])


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidRequest(f"address {address!r} is not HOST:PORT, such as node-3:10092")
    return host.removeprefix("[").removesuffix("]"), int(port)
