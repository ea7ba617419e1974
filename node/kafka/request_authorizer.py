"""Carries out the access entry of an API before its handler sees a request.

What may not be done is answered in the API's own shape, with the code of the resource and nothing
that says whether it exists. Where nothing is forbidden to a session, the handler is called at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.client.protocol.messages import Values
from kept.node.kafka.error_responses import PARTS, Part, refusal
from kept.node.runtime.completable_future import CompletableFuture
from kept.node.security.access import (
    AUTHORIZATION_CODES,
    AUTHORIZATION_MESSAGES,
    CLUSTER,
    AuthorizedByHandler,
    AuthorizeEach,
    AuthorizeRequest,
)
from kept.steps import Steps
from kept.storage.errors import InvariantViolation

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image
    from kept.cluster.security.acls import AclResourceType
    from kept.node.kafka.api import Api, HandlerResult, RequestContext

Handler = Callable[["RequestContext", Any], "HandlerResult"]
Finish = Callable[[Values], Steps[Values]]


def not_allowed(resource_type: AclResourceType) -> Values:
    """The error fields of what may not be done with a resource of a type."""
    code = AUTHORIZATION_CODES[resource_type]
    return {"error_code": code, "error_message": AUTHORIZATION_MESSAGES[code]}


def serve(
    served: Api, context: RequestContext, request: Any, handler: Handler, image: Image
) -> HandlerResult:
    """The answer of ``handler`` to what its session may ask of ``request``, with refusals of the
    rest in between, in the request's order.

    Where the handler was to ask by itself and answered without, the answer is InvariantViolation.
    """
    if context.session.is_unrestricted:
        return handler(context, request)
    return _authorized(served, context, request, handler, image)


def _authorized(
    served: Api, context: RequestContext, request: Any, handler: Handler, image: Image
) -> Steps[HandlerResult]:
    by_item: AuthorizeEach | None = None
    for access in served.access:
        if isinstance(access, AuthorizeEach):
            by_item = access
        elif isinstance(access, AuthorizeRequest):
            resource_type, name = access.resource(request)
            if not _may(context, access, resource_type, name):
                failed = not_allowed(resource_type)
                return (yield from refusal(served.key, context.api_version, request, failed))
    if by_item is not None:
        return (yield from _item_by_item(served, context, request, handler, by_item, image))
    if AuthorizedByHandler() not in served.access:
        return handler(context, request)
    return (yield from then(handler(context, request), _asked(served, context)))


def _may(
    context: RequestContext, access: AuthorizeRequest, resource_type: AclResourceType, name: str
) -> bool:
    if access.otherwise is not None and context.session.may(
        access.otherwise, resource_type, name, audited=False
    ):
        return True
    return context.session.may(access.operation, resource_type, name, api=context.api_name)


def _item_by_item(  # noqa: PLR0917
    served: Api,
    context: RequestContext,
    request: Any,
    handler: Handler,
    access: AuthorizeEach,
    image: Image,
) -> Steps[HandlerResult]:
    part, session = PARTS[served.key][0], context.session
    items = getattr(request, part.request_field)
    if access.cluster is not None and session.may(access.cluster, *CLUSTER, audited=False):
        return handler(context, request)
    permitted, refused, api = [], [], context.api_name
    for item in items:
        yield
        resource = access.resource(item, image)
        if resource is None or session.may(access.operation, *resource, api=api):
            permitted.append(item)
        else:
            refused.append((item, resource))
    if not refused:
        return handler(context, request)
    cls = protocol.message_type(served.key, context.api_version, EntityType.response)
    element = protocol.array_element(cls, part.response_field)
    refusals = []
    for item, (resource_type, _) in refused:
        answer = yield from part.refused(element, item, not_allowed(resource_type))
        refusals.append((_key(part.key(item)), answer))
    if not permitted:
        nothing = {**protocol.nothing(cls), "error_code": 0, "error_message": None}
        return {**nothing, part.response_field: [answer for _, answer in refusals]}
    rest = dataclasses.replace(request, **{part.request_field: tuple(permitted)})
    finish = _merging(part, items, refusals)
    return (yield from then(handler(context, rest), finish))


def _key(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(values.items()))


def _merging(
    part: Part, items: Any, refusals: list[tuple[tuple[tuple[str, Any], ...], Values]]
) -> Finish:
    """Puts refusals between the answers to the others of ``items``, in their order."""

    def merge(answer: Values) -> Steps[Values]:
        if answer.get("error_code"):
            return answer  # it failed as a whole
        answers: dict[Any, list[Values]] = {}
        for key, refused in refusals:
            answers.setdefault(key, []).append(refused)
            yield
        for one in answer[part.response_field]:
            answers.setdefault(_key({name: one.get(name) for name in names}), []).append(one)
            yield
        merged: list[Values] = []
        for item in items:
            merged += answers.pop(_key(part.key(item)), ())
            yield
        for left in answers.values():
            merged += left
        return {**answer, part.response_field: merged}

    names = tuple(part.key(items[0]))
    return merge


def _asked(served: Api, context: RequestContext) -> Finish:
    """Lets an answer pass if its handler has asked what the session may do, or if it says nothing
    but an error.
    """

    def check(answer: Values) -> Steps[Values]:
        if not context.questions and not answer.get("error_code"):
            raise InvariantViolation(
                f"{served.name}: answered without asking what {context.session.principal} may do"
            )
        yield
        return answer

    return check


def then(answer: HandlerResult, finish: Finish) -> Steps[HandlerResult]:
    """The answer, whenever it comes, after ``finish`` has had it."""
    while isinstance(answer, Generator):
        answer = yield from answer
    if isinstance(answer, Mapping):
        return (yield from finish(answer))
    if isinstance(answer, CompletableFuture):
        return answer.map(lambda values: then(values, finish))
    return answer if answer is None else _later(answer, finish)


async def _later(answer: Any, finish: Finish) -> Steps[HandlerResult]:
    return then(await answer, finish)
