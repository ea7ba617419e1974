"""What one node asks of another's ``/api/v1/``: a browser speaks with the node of its page alone.

A request with the parameter ``node=N`` is answered by node N, over the connection that the nodes
have anyway (:mod:`kept.node.internode`), so no browser and no proxy has to reach that node. Hosts,
origins and headers are judged where the request came in. An answer comes whole; how long it may be
says :mod:`kept.node.http.peer_requests`, which makes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kept.node.internode.controller_rpc import AskReply, AskRequest
from kept.storage.errors import (
    InvalidRequest,
    KeptError,
    NetworkException,
    UnknownTopicOrPartition,
)

if TYPE_CHECKING:
    from kept.node.admin.context import AdminContext

ASK_S: Final = 30.0
"""A dry run of a large log takes this long at most when it is asked through another node."""
_REFUSALS: Final[Mapping[int, type[KeptError]]] = {
    400: InvalidRequest,
    404: UnknownTopicOrPartition,
}
"""What is wrong with the question itself, whoever is asked."""


def question(
    method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any]
) -> AskRequest:
    """A request to the API of another node."""
    return AskRequest(method, path, json.dumps(dict(query)), json.dumps(dict(body)))


async def ask(
    context: AdminContext, node_id: int, asked: AskRequest, timeout_s: float = ASK_S
) -> AskReply:
    """What node ``node_id`` answers; its refusals are answers with their status.

    Raises InvalidRequest (there is no such node), RequestTimedOut, NetworkException.
    """
    voters = (voter.node_id for voter in context.metadata.member.voters)
    nodes = sorted({context.identity.node_id, *context.metadata.image.brokers, *voters})
    if node_id not in nodes:
        raise InvalidRequest(f"there is no node {node_id}; there are {', '.join(map(str, nodes))}")
    reply: AskReply = await context.peers.call(node_id, "Ask", asked, timeout_s)
    return reply


async def ask_json(
    context: AdminContext,
    node_id: int,
    path: str,
    query: Mapping[str, str] | None = None,
    *,
    body: Mapping[str, Any] | None = None,
    timeout_s: float = ASK_S,
) -> Any:
    """The value of a GET, or of a POST of ``body``. Raises as :func:`ask`, and for a refusal
    InvalidRequest, UnknownTopicOrPartition or NetworkException.
    """
    asked = question("GET" if body is None else "POST", path, query or {}, body or {})
    reply = await ask(context, node_id, asked, timeout_s)
    value = json.loads(reply.body)
    if reply.status != 200:
        message = value.get("error", {}).get("message", "") if isinstance(value, dict) else ""
        refusal = _REFUSALS.get(reply.status)
        if refusal is not None:
            raise refusal(message)
        raise NetworkException(f"node {node_id} answers {reply.status}: {message}")
    return value
