"""A request as a route sees it, and what a route answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kept.node.security.client_usage import UNMETERED, ClientUsage
from kept.node.security.password_checks import TooManyLogins
from kept.node.security.session import Session
from kept.storage.errors import (
    ClusterAuthorizationFailed,
    GroupIdNotFound,
    KeptError,
    MachineError,
    PeerError,
    RetriableError,
    ThrottlingQuotaExceeded,
    TopicAuthorizationFailed,
    TransactionalIdNotFound,
    UnknownTopicId,
    UnknownTopicOrPartition,
)

JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"


@dataclass(slots=True)
class HttpRequest:
    """What a route sees. ``query`` holds each parameter's last value, ``body`` the decoded JSON.

    With ``here`` this node is meant, whoever could answer better; ``may_change_voters`` says
    whether it came from where who votes may be changed (``kept.node.kafka.listener``).
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    accept: str = ""
    address: str = ""
    """HOST:PORT of this node, as the header Host has it."""
    here: bool = False
    may_change_voters: bool = False
    named: str = ""
    """What the path names where the route's ends in a name: a topic, a group."""
    session: Session = field(default_factory=Session)
    """Who makes the request."""
    schemes: tuple[str, ...] = ("Basic",)
    """How it may say who that is, on its listener: Basic, Bearer, or both."""
    usage: ClientUsage = UNMETERED
    """What it uses of his quotas."""


@dataclass(slots=True)
class HttpResponse:
    """What a route answers: a result or JSON value (``kept.node.http.json_results``), or text,
    whole or in chunks that come with pauses.
    """

    value: Any = None
    status: int = 200
    text: str | None = None
    chunks: AsyncIterator[bytes] | None = None
    content_type: str = ""
    """JSON or plain text, unless it is given."""
    allow: str = ""
    policy: str = ""
    """Content-Security-Policy of a page."""
    endless: bool = False
    """A stream that ends when the reader leaves."""
    retry_after_s: int | None = None
    """When whoever is refused may come again."""


_NOT_FOUND: Final = (
    UnknownTopicOrPartition,
    UnknownTopicId,
    GroupIdNotFound,
    TransactionalIdNotFound,
)


def failure(status: int, message: str, allow: str = "") -> HttpResponse:
    """An error as every client gets it."""
    return HttpResponse({"error": {"status": status, "message": message}}, status, allow=allow)


def failure_of(error: KeptError) -> HttpResponse:
    """An error of kept as every client gets it."""
    response = failure(status_of(error), error.client_message)
    if isinstance(error, ThrottlingQuotaExceeded):
        response.retry_after_s = max(1, -(-error.throttle_ms // 1000))
    elif isinstance(error, TooManyLogins):
        response.retry_after_s = 1
    return response


def status_of(error: KeptError) -> int:
    """The HTTP status of an error of kept."""
    if isinstance(error, ThrottlingQuotaExceeded):
        return 429
    if isinstance(error, _NOT_FOUND):
        return 404
    if isinstance(error, ClusterAuthorizationFailed | TopicAuthorizationFailed):
        return 403
    if isinstance(error, PeerError):
        return 400
    if isinstance(error, RetriableError | MachineError):
        return 503
    return 500


def plain_path(path: str) -> str:
    """A path as the routes name it: without a slash at its end. One that is ``%2F`` there belongs
    to a name.
    """
    return path.rstrip("/") or "/"
