"""Requests to ``/api/v1/`` that came through another node
(:mod:`kept.node.admin.peer_http`)."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kept.node.http.json_results import dumps
from kept.node.http.messages import HttpRequest, failure, status_of
from kept.node.http.routes import Routes
from kept.node.internode.controller_rpc import PeerHttpReply, PeerHttpRequest
from kept.node.security.session import node_session
from kept.storage.errors import CorruptMessage, KeptError, PolicyViolation, is_bug

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
PREFIX: Final = "/api/v1/"


async def respond(routes: Routes, request: PeerHttpRequest) -> PeerHttpReply:
    """Answer another node. Raises PolicyViolation for what is not for other nodes, CorruptMessage
    for what is no request.
    """
    query, body = _object(request.query), _object(request.body)
    if not request.path.startswith(PREFIX) or "node" in query:
        raise PolicyViolation(f"{request.path} is not served through another node")
    try:
        forwarded = HttpRequest(
            request.method,
            request.path,
            query,
            body,
            here=True,
            session=node_session(""),
        )
        response = await routes.respond(forwarded)
    except KeptError as error:
        if is_bug(error):
            raise
        response = failure(status_of(error), error.client_message)
    if response.endless:
        raise PolicyViolation(f"{request.path} is a stream, and not served through another node")
    if response.chunks is None:
        data = dumps(response.value) if response.text is None else response.text.encode()
        return PeerHttpReply(response.status, data)
    whole = bytearray()
    async for chunk in response.chunks:
        whole += chunk
        if len(whole) > MAX_ANSWER_BYTES:
            raise PolicyViolation(
                f"the answer to {request.path} has more than {MAX_ANSWER_BYTES} bytes: ask node "
                f"{routes.node_id} itself"
            )
    return PeerHttpReply(response.status, bytes(whole))


def _object(text: str) -> dict[str, Any]:
    """A JSON object. Raises CorruptMessage."""
    try:
        value: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptMessage(f"not a request of another node: {error}") from error
    return value
