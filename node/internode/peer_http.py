"""What one node asks of another's ``/api/v1/``: a browser speaks with the node of its page alone.

A request with the parameter ``node=N`` is answered by node N, over the connection that the nodes
have anyway (:mod:`kept.node.internode`), so no browser and no proxy has to reach that node. Hosts,
origins and headers are judged where the request came in. An answer is as long as
:data:`MAX_ANSWER_BYTES` at most, and comes whole.
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
    PolicyViolation,
    UnknownTopicOrPartition,
)

if TYPE_CHECKING:
    from kept.node.http.server import HttpRequest
    from kept.node.node import Node

ASK_S: Final = 30.0
"""A dry run of a large log takes this long at most when it is asked through another node."""
MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
PREFIX: Final = "/api/v1/"
_REFUSALS: Final[Mapping[int, type[KeptError]]] = {
    400: InvalidRequest,
    404: UnknownTopicOrPartition,
}
"""What is wrong with the question itself, whoever is asked."""


async def ask(node: Node, node_id: int, request: HttpRequest, timeout_s: float = ASK_S) -> AskReply:
    """What node ``node_id`` answers; its refusals are answers with their status.

    Raises InvalidRequest (there is no such node), RequestTimedOut, NetworkException.
    """
    voters = (voter.node_id for voter in node.metadata.member.voters)
    nodes = sorted({node.node_id, *node.image.brokers, *voters})
    if node_id not in nodes:
        raise InvalidRequest(f"there is no node {node_id}; there are {', '.join(map(str, nodes))}")
    asked = AskRequest(
        request.method,
        request.path,
        json.dumps(dict(request.query)),
        json.dumps(dict(request.body)),
    )
    reply: AskReply = await node.peers.call(node_id, "Ask", asked, timeout_s)
    return reply


async def ask_json(
    node: Node,
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
    from kept.node.http.server import HttpRequest

    request = HttpRequest("GET" if body is None else "POST", path, query or {}, body or {})
    reply = await ask(node, node_id, request, timeout_s)
    value = json.loads(reply.body)
    if reply.status != 200:
        message = value.get("error", {}).get("message", "") if isinstance(value, dict) else ""
        refusal = _REFUSALS.get(reply.status)
        if refusal is not None:
            raise refusal(message)
        raise NetworkException(f"node {node_id} answers {reply.status}: {message}")
    return value


async def answer(node: Node, request: AskRequest) -> AskReply:
    """Answer another node. Raises PolicyViolation for what is not for other nodes."""
    from kept.node.http.routes import route
    from kept.node.http.server import HttpRequest, failure, status_of

    query, body = json.loads(request.query), json.loads(request.body)
    if not request.path.startswith(PREFIX) or "node" in query:
        raise PolicyViolation(f"{request.path} is not asked through another node")
    try:
        asked = HttpRequest(request.method, request.path, query, body, here=True)
        response = await route(node, asked)
    except KeptError as error:
        response = failure(status_of(error), str(error))
    if response.endless:
        raise PolicyViolation(f"{request.path} is a stream, and not asked through another node")
    if response.chunks is None:
        text = json.dumps(response.value) if response.text is None else response.text
        return AskReply(response.status, text.encode())
    whole = bytearray()
    async for chunk in response.chunks:
        whole += chunk
        if len(whole) > MAX_ANSWER_BYTES:
            raise PolicyViolation(
                f"the answer to {request.path} has more than {MAX_ANSWER_BYTES} bytes: ask node "
                f"{node.node_id} itself"
            )
    return AskReply(response.status, bytes(whole))
