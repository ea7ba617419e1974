"""Who may have which route of HTTP: what is asked before, and what others get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from msgspec import Struct

from kept.cluster.security.acls import ANONYMOUS, AclOperation, AclResourceType
from kept.node.http.messages import HttpRequest, HttpResponse, failure
from kept.node.http.parameters import Parameters
from kept.node.runtime.time_slices import Pace
from kept.node.security.access import (
    CLUSTER,
    NO_LOGIN,
    AuthorizeRequest,
    PermitAll,
    RequireLogin,
    Resource,
    the_cluster,
)
from kept.node.security.revocation import Revoked, run_while_allowed
from kept.node.security.visibility import describable
from kept.storage.errors import InvariantViolation

if TYPE_CHECKING:
    from kept.node.security.session import Session

T = TypeVar("T")

DESCRIBE: Final = AclOperation.DESCRIBE
PERMIT_ALL: Final = PermitAll()
PIECE_BYTES: Final = 64 * 1024
"""Of an answer of another node, at a time."""
ITEMS_TOGETHER: Final = 64
_WAYS: Final = {
    "Basic": "a user and a password (HTTP Basic)",
    "Bearer": "an access token (Authorization: Bearer)",
}


class FilterByDescribe(Struct, frozen=True):
    """Of the list ``field`` of the result those items are shown that may be described: resources of
    a type, named in ``name``.
    """

    field: str
    name: str
    resource_type: AclResourceType

    async def visible(
        self, session: Session, items: Iterable[T], name_of: Callable[[T], str]
    ) -> list[T]:
        """The items that ``session`` sees."""
        return await describable(session, self.resource_type, items, name_of)


class FilterFields(Struct, frozen=True):
    """The ``fields`` of the result are shown to who has the ``permission``; the answer to others
    has none of them.
    """

    fields: tuple[str, ...]
    permission: AuthorizeRequest


class AuthorizeTopicOrCluster(Struct, frozen=True):
    """A check of the operation on the topic that a request names, or on the cluster (``Create``:
    either is enough).
    """

    operation: AclOperation


class AllOf(Struct, frozen=True):
    """All of these checks; the first that is refused refuses the request."""

    parts: tuple[AuthorizeRequest | FilterByDescribe | FilterFields, ...]


Access = (
    PermitAll
    | RequireLogin
    | AuthorizeRequest
    | FilterByDescribe
    | FilterFields
    | AuthorizeTopicOrCluster
    | AllOf
)


def named_topic(p: Parameters) -> Resource:
    """The topic that the path names."""
    return AclResourceType.TOPIC, p.request.named


def named_group(p: Parameters) -> Resource:
    """The group that the path names."""
    return AclResourceType.GROUP, p.request.named


def named_id(p: Parameters) -> Resource:
    """The transactional id that the path names."""
    return AclResourceType.TRANSACTIONAL_ID, p.request.named


def _topic_of(p: Parameters) -> Resource:
    return AclResourceType.TOPIC, p.text("topic")


def _group_of(p: Parameters) -> Resource:
    return AclResourceType.GROUP, p.text("group")


DESCRIBE_CLUSTER: Final = AuthorizeRequest(DESCRIBE)
ALTER_CLUSTER: Final = AuthorizeRequest(AclOperation.ALTER)
DESCRIBE_CLUSTER_CONFIGS: Final = AuthorizeRequest(AclOperation.DESCRIBE_CONFIGS)
ALTER_CLUSTER_CONFIGS: Final = AuthorizeRequest(AclOperation.ALTER_CONFIGS)
DESCRIBE_TOPIC: Final = AuthorizeRequest(DESCRIBE, _topic_of)
DESCRIBE_NAMED_TOPIC_CONFIGS: Final = AuthorizeRequest(AclOperation.DESCRIBE_CONFIGS, named_topic)
DESCRIBE_NAMED_TOPIC: Final = AllOf(
    (
        AuthorizeRequest(DESCRIBE, named_topic),
        FilterFields(("config", "broker_defaults"), DESCRIBE_NAMED_TOPIC_CONFIGS),
    )
)
READ_TOPIC: Final = AuthorizeRequest(AclOperation.READ, _topic_of)
WRITE_TOPIC: Final = AuthorizeRequest(AclOperation.WRITE, _topic_of)
ALTER_TOPIC: Final = AuthorizeRequest(AclOperation.ALTER, _topic_of)
ALTER_TOPIC_CONFIGS: Final = AuthorizeRequest(AclOperation.ALTER_CONFIGS, _topic_of)
DELETE_TOPIC: Final = AuthorizeRequest(AclOperation.DELETE, _topic_of)
CREATE_TOPIC: Final = AuthorizeTopicOrCluster(AclOperation.CREATE)
DESCRIBE_GROUP: Final = AuthorizeRequest(DESCRIBE, _group_of)
COMMIT_OFFSETS: Final = AllOf((AuthorizeRequest(AclOperation.READ, _group_of), READ_TOPIC))
DESCRIBABLE_TOPICS: Final = FilterByDescribe("topics", "name", AclResourceType.TOPIC)
DESCRIBABLE_PARTITIONS: Final = FilterByDescribe("partitions", "topic", AclResourceType.TOPIC)
DESCRIBABLE_GROUPS: Final = FilterByDescribe("groups", "group", AclResourceType.GROUP)


def topic_or_cluster(p: Parameters) -> Access:
    """A topic where one is given; else it is about all of them."""
    return DESCRIBE_TOPIC if "topic" in p.given else DESCRIBE_CLUSTER


def topic_or_login(p: Parameters) -> Access:
    """A topic where one is given. Else whoever has logged in is told of what he may describe, and
    with Describe on the cluster, which anonymous clients may have, too, of all of it.
    """
    if "topic" in p.given:
        return DESCRIBE_TOPIC
    return DESCRIBE_CLUSTER if may_describe_cluster(p.request.session) else RequireLogin()


def may_describe_cluster(session: Session) -> bool:
    """Whether totals of a node may be shown."""
    return session.may(DESCRIBE, *CLUSTER, audited=False)


def topic_or_describable(p: Parameters) -> Access:
    """A topic where one is given: else whoever is told that there is none knows which there are.
    Without one those are shown that may be described.
    """
    return DESCRIBE_TOPIC if "topic" in p.given else DESCRIBABLE_PARTITIONS


def topic_or_key(p: Parameters) -> Access:
    """Who asks about a key is told whether there are records of it."""
    return DESCRIBE_TOPIC if p.key() is None else READ_TOPIC


def partitions_and_configs(p: Parameters) -> Access:
    """What changes a topic needs: as CreatePartitions and IncrementalAlterConfigs do."""
    more = (ALTER_TOPIC,) if p.given.get("partitions") is not None else ()
    if more and not (p.given.get("set") or p.given.get("delete")):
        return ALTER_TOPIC
    return AllOf((*more, ALTER_TOPIC_CONFIGS))


def refusal(
    session: Session, access: Access, request: HttpRequest, *, audited: bool = True
) -> HttpResponse | None:
    """Why the request is not served; whoever has not logged in is asked to. None: it is served."""
    what, allow = "use this", ""
    if isinstance(access, AllOf):
        of_parts = (refusal(session, part, request, audited=audited) for part in access.parts)
        return next((refused for refused in of_parts if refused is not None), None)
    if isinstance(access, RequireLogin):
        if session.principal != ANONYMOUS:
            return None
    elif isinstance(access, AuthorizeTopicOrCluster):
        if session.may(access.operation, *CLUSTER, audited=False):
            return None
        return refusal(
            session, AuthorizeRequest(access.operation, _topic_of), request, audited=audited
        )
    elif isinstance(access, AuthorizeRequest):
        resource_type, name = access.resource(Parameters(request))
        api = f"{request.method} {request.path}"
        if session.may(access.operation, resource_type, name, api=api, audited=audited):
            return None
        kind, is_cluster = resource_type.name.lower(), access.resource is the_cluster
        what = f"{access.operation.name.lower()} {kind if is_cluster else f'{kind} {name}'}"
        rule = f"{access.operation.name} {kind}".lower().replace("_", "-")
        rule = rule if is_cluster else f"{rule}:{name}"
        allow = f"; an administrator allows it by: kept acl add {session.principal} {rule}"
    else:
        return None
    message = f"{session.principal} may not {what}"
    if session.principal == ANONYMOUS:
        return login_wanted(request.schemes, f"{message}; ")
    return failure(403, message + allow)


def login_wanted(schemes: Collection[str], why: str = "") -> HttpResponse:
    """What somebody is told who has to say who he is, by one of the ``schemes`` of HTTP. Where the
    listener has none it is no use to ask.
    """
    if not schemes:
        return failure(403, f"{why}{NO_LOGIN}")
    ways = " or ".join(_WAYS[scheme] for scheme in schemes)
    return failure(401, f"{why}log in with {ways}")


def describe_filter(access: Access) -> FilterByDescribe | None:
    """What filters the list of a result, if something does."""
    return next((part for part in _parts(access) if isinstance(part, FilterByDescribe)), None)


def hidden_fields(access: Access, request: HttpRequest) -> list[str]:
    """The fields of a result that are not for who makes the request."""
    return [
        field
        for part in _parts(access)
        if isinstance(part, FilterFields)
        and refusal(request.session, part.permission, request, audited=False) is not None
        for field in part.fields
    ]


def _parts(access: Access) -> tuple[Access, ...]:
    return access.parts if isinstance(access, AllOf) else (access,)


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    """An answer of another node, passed on as it came."""
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]


async def without_hidden(
    access: Access, request: HttpRequest, response: HttpResponse
) -> HttpResponse:
    """Another node's answer without :func:`hidden_fields`: that node sends all of them."""
    hidden = hidden_fields(access, request)
    if not hidden or response.status != HTTPStatus.OK or response.chunks is None:
        return response
    body = b"".join([piece async for piece in response.chunks])
    members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    kept = {name: value for name, value in members.items() if name not in hidden}
    return HttpResponse(
        chunks=in_pieces(msgspec.json.encode(kept)), content_type=response.content_type
    )


async def shown(access: Access, session: Session, response: HttpResponse) -> HttpResponse:
    """What of another node's list may be described: it is read and passed on item by item."""
    part = describe_filter(access)
    if part is None or response.status != HTTPStatus.OK or response.chunks is None:
        return response
    body = b"".join([piece async for piece in response.chunks])
    return HttpResponse(
        chunks=_shown_items(body.decode(), part, session), content_type=response.content_type
    )


async def _shown_items(text: str, part: FilterByDescribe, session: Session) -> AsyncIterator[bytes]:
    """An answer as ``kept.node.http.json_results`` writes it, with the items of its list that may
    be described. No string has the list's beginning in it: quotes in strings are escaped.
    """
    begin = f"{json.dumps(part.field)}:["
    at = text.find(begin) + len(begin)
    if at < len(begin):
        raise InvariantViolation(f"an answer without {part.field}")
    out, pace, decoder = [text[:at]], Pace(), json.JSONDecoder()
    seen = 0
    while not text.startswith("]", at):
        await pace.checkpoint()
        item, end = decoder.raw_decode(text, at)
        if session.may(DESCRIBE, part.resource_type, item[part.name], audited=False):
            out.append("," * (seen > 0) + text[at:end])
            seen += 1
        at = end + text.startswith(",", end)
        if len(out) >= ITEMS_TOGETHER:
            yield "".join(out).encode()
            out.clear()
    yield ("".join(out) + text[at:]).encode()


async def while_allowed(
    chunks: AsyncIterator[bytes], access: Access, request: HttpRequest
) -> AsyncIterator[bytes]:
    """A stream, until its reader has no right to it any more or his session ends."""
    session, loop = request.session, asyncio.get_running_loop()

    def is_allowed() -> bool:
        if loop.time() >= session.expires_at:
            return False
        return refusal(session, access, request, audited=False) is None

    while True:
        try:
            chunk = await run_while_allowed(anext(chunks, None), is_allowed)
        except Revoked:
            return
        if chunk is None or not is_allowed():
            return
        yield chunk
