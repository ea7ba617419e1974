"""Requests of one node to ``/api/v1/`` of another.

A request with the parameter ``node=N`` is served by node N, over the connection between the nodes
(:mod:`kept.node.internode`), so no browser and no proxy has to reach that node. Hosts, origins and
headers are checked by the node that received the request. The response is not streamed;
:mod:`kept.node.http.peer_requests` limits its size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.node.internode.controller_rpc import PeerHttpReply, PeerHttpRequest
from kept.storage.errors import InvalidRequest, KeptError, NetworkException, UnknownTopicOrPartition

if TYPE_CHECKING:
    from kept.node.internode.peers import Peers
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity

CALL_S: Final = 30.0
"""How long a node may take, where nothing else is said."""
_REFUSALS: Final[Mapping[int, type[KeptError]]] = {
    400: InvalidRequest,
    404: UnknownTopicOrPartition,
}
"""What is wrong with the request itself, whoever serves it."""


@dataclass(frozen=True, slots=True)
class PeerHttp:
    """The HTTP API of the other nodes."""

    identity: NodeIdentity
    metadata: MetadataLog
    peers: Peers

    async def request(
        self,
        node_id: int,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = CALL_S,
    ) -> PeerHttpReply:
        """What node ``node_id`` answers; its refusals are answers with their status.

        Raises InvalidRequest (there is no such node), RequestTimedOut, NetworkException.
        """
        voters = (voter.node_id for voter in self.metadata.raft_node.voters)
        nodes = sorted({self.identity.node_id, *self.metadata.image.brokers, *voters})
        if node_id not in nodes:
            names = ", ".join(map(str, nodes))
            raise InvalidRequest(f"there is no node {node_id}; nodes: {names}")
        request = PeerHttpRequest(
            method, path, json.dumps(dict(query or {})), json.dumps(dict(body or {}))
        )
        reply: PeerHttpReply = await self.peers.call(node_id, "PeerHttp", request, timeout_s)
        return reply

    async def get(
        self, node_id: int, path: str, query: Mapping[str, str], timeout_s: float = CALL_S
    ) -> Any:
        """The JSON of a GET. Raises as :meth:`request`, and for a refusal InvalidRequest,
        UnknownTopicOrPartition or NetworkException.
        """
        reply = await self.request(node_id, "GET", path, query=query, timeout_s=timeout_s)
        return _value(node_id, reply)

    async def post(
        self, node_id: int, path: str, body: Mapping[str, Any], timeout_s: float = CALL_S
    ) -> Any:
        """The JSON that a POST is answered with. Raises as :meth:`get`."""
        reply = await self.request(node_id, "POST", path, body=body, timeout_s=timeout_s)
        return _value(node_id, reply)


def _value(node_id: int, reply: PeerHttpReply) -> Any:
    value = json.loads(reply.body)
    if reply.status == 200:
        return value
    message = value.get("error", {}).get("message", "") if isinstance(value, dict) else ""
    refusal = _REFUSALS.get(reply.status)
    if refusal is not None:
        raise refusal(message)
    raise NetworkException(f"node {node_id} answers {reply.status}: {message}")
