"""Who may have which route of HTTP: what is asked before, and what others get."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import Struct

from kept.cluster.security.acls import ANONYMOUS, AclOperation, AclResourceType
from kept.node.http.parameters import Parameters
from kept.node.http.server import HttpRequest, HttpResponse, failure
from kept.node.runtime.time_slices import Pace
from kept.node.security.access import Known, Open, Resource, Whole, the_cluster

if TYPE_CHECKING:
    from kept.node.security.session import Session

T = TypeVar("T")

DESCRIBE: Final = AclOperation.DESCRIBE
OPEN: Final = Open()


class Shown(Struct, frozen=True):
    """Of the list ``field`` of the result those items are shown that may be described: resources of
    a type, named in ``name``.
    """

    field: str
    name: str
    resource_type: AclResourceType

    async def of(
        self, session: Session, items: Iterable[T], name_of: Callable[[T], str]
    ) -> list[T]:
        """The items that ``session`` sees."""
        kind, pace, seen = self.resource_type, Pace(), []
        for item in items:
            if session.may(DESCRIBE, kind, name_of(item), audited=False):
                seen.append(item)
            await pace.checkpoint()
        return seen


Access = Open | Known | Whole | Shown


def named_topic(p: Parameters) -> Resource:
    """The topic that the path names."""
    return AclResourceType.TOPIC, p.request.path.removeprefix("/api/v1/topics/").rstrip("/")


def named_group(p: Parameters) -> Resource:
    """The group that the path names."""
    return AclResourceType.GROUP, p.request.path.removeprefix("/api/v1/groups/")


def named_id(p: Parameters) -> Resource:
    """The transactional id that the path names."""
    path = p.request.path
    return AclResourceType.TRANSACTIONAL_ID, path.removeprefix("/api/v1/transactions/")


def _topic_of(p: Parameters) -> Resource:
    return AclResourceType.TOPIC, p.text("topic")


DESCRIBE_CLUSTER: Final = Whole(DESCRIBE)
ALTER_CLUSTER: Final = Whole(AclOperation.ALTER)
DESCRIBE_TOPIC: Final = Whole(DESCRIBE, _topic_of)
READ_TOPIC: Final = Whole(AclOperation.READ, _topic_of)
ALTER_TOPIC: Final = Whole(AclOperation.ALTER, _topic_of)


def topic_or_cluster(p: Parameters) -> Access:
    """A topic where one is given; else it is about all of them."""
    return DESCRIBE_TOPIC if "topic" in p.given else DESCRIBE_CLUSTER


def topic_or_key(p: Parameters) -> Access:
    """Who asks about a key is told whether there are records of it."""
    return DESCRIBE_TOPIC if p.key() is None else READ_TOPIC


def refusal(session: Session, access: Access, request: HttpRequest) -> HttpResponse | None:
    """Why the request is not served: whoever is not known is asked who he is. None: it is."""
    what = "use this"
    if isinstance(access, Known):
        if session.principal != ANONYMOUS:
            return None
    elif isinstance(access, Whole):
        resource_type, name = access.resource(Parameters(request))
        api = f"{request.method} {request.path}"
        if session.may(access.operation, resource_type, name, api=api):
            return None
        kind = resource_type.name.lower()
        of = kind if access.resource is the_cluster else f"{kind} {name}"
        what = f"{access.operation.name.lower()} {of}"
    else:
        return None
    message = f"{session.principal} may not {what}"
    if session.principal == ANONYMOUS:
        return failure(401, f"{message}; log in with a user and a password")
    return failure(403, message)


async def shown(access: Access, session: Session, response: HttpResponse) -> HttpResponse:
    """What of another node's list may be described."""
    if isinstance(access, Shown) and response.status == HTTPStatus.OK:
        value = json.loads(response.text or "{}")
        name = access.name
        value[access.field] = await access.of(session, value[access.field], lambda item: item[name])
        return HttpResponse(value)
    return response


async def while_allowed(
    chunks: AsyncIterator[bytes], access: Access, request: HttpRequest
) -> AsyncIterator[bytes]:
    """A stream, until it may be read no more."""
    async for chunk in chunks:
        if refusal(request.session, access, request) is not None:
            return
        yield chunk
