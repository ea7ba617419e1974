"""The table of routes: which path and method is served by which function, and what is asked before.

A path may end in the name of something, or have one in its middle: ``/api/v1/topics/{topic}``,
``/api/v1/topics/{topic}/groups``. Names of groups may contain slashes. Where several paths fit, one
without a name goes before one with a name, and of these the one whose end is longer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import structs

from kept.node.admin.results import OMITTED
from kept.node.http import json_results
from kept.node.http.messages import HttpRequest, HttpResponse
from kept.node.http.parameters import Parameters
from kept.node.http.route_access import Access, describe_filter, hidden_fields
from kept.node.security.client_usage import QuotaKind

if TYPE_CHECKING:
    from kept.node.admin.services import AdminServices
    from kept.node.http.console.events import EventStreams, Pulses
    from kept.node.metrics.lazy_metrics import LazyMetrics

API: Final = "/api/v1/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteContext:
    """What routes are served from: the operator's services of one node, and its streams."""

    services: AdminServices
    metrics: LazyMetrics
    pulses: Pulses
    streams: EventStreams


Handler = Callable[[RouteContext, Parameters], Awaitable[Any]]
Names = Callable[[Parameters], Iterable[str]]


class Route(NamedTuple):
    """What serves a path and a method, and what is asked before.

    ``changes``: the names of what a request changes, for the audit log; None where it changes
    nothing, or where the Kafka request that does it is recorded. ``needs_actions``: it is served
    with ``kept.console.actions=true`` only. ``travels``: another node may serve it (``node=N``).
    ``filtered``: what it answers depends on who asks in more than a list, so that only requests of
    whom nothing is forbidden travel; others are served here, and are about the cluster anyhow.
    ``draws_on``: the quotas that it uses something of.
    """

    respond: Callable[[RouteContext, HttpRequest], Awaitable[HttpResponse]]
    access: Access | Callable[[Parameters], Access]
    changes: Names | None = None
    needs_actions: bool = False
    travels: bool = True
    filtered: bool = False
    draws_on: QuotaKind = "request"

    def access_to(self, request: HttpRequest) -> Access:
        """What is asked before this request. Raises InvalidRequest."""
        access = self.access
        return access(Parameters(request)) if callable(access) else access


ROUTES: Final[dict[str, dict[str, Route]]] = {}
"""Path -> method -> its route."""


def route(
    method: str,
    path: str,
    *names: str,
    access: Access | Callable[[Parameters], Access],
    large: bool = False,
    changes: Names | None = None,
    needs_actions: bool = False,
    travels: bool = True,
    filtered: bool = False,
    draws_on: QuotaKind = "request",
) -> Callable[[Handler], Handler]:
    """Serve ``path`` by the function below, which returns a response or a result, once ``access``
    is granted. Under ``/api/`` no parameters but ``names`` are allowed. The lists of a ``large``
    result may be long: it is encoded and sent in slices. The others as in :class:`Route`.
    """

    def add(handler: Handler) -> Handler:
        async def respond(context: RouteContext, request: HttpRequest) -> HttpResponse:
            parameters = Parameters(request)
            if path.startswith(API):
                parameters.check_names(names)
            result = await handler(context, parameters)
            if isinstance(result, HttpResponse):
                return result
            if not request.session.is_unrestricted:
                result = await _for_who_asks(served.access_to(request), request, result)
            return HttpResponse(result, chunks=json_results.chunks(result) if large else None)

        served = Route(respond, access, changes, needs_actions, travels, filtered, draws_on)
        ROUTES.setdefault(path, {})[method] = served
        return handler

    return add


async def _for_who_asks(access: Access, request: HttpRequest, result: Any) -> Any:
    """A result without the items and fields that are not for who makes the request."""
    part = describe_filter(access)
    if part is not None:
        name_of, items = attrgetter(part.name), getattr(result, part.field)
        shown = await part.visible(request.session, items, name_of)
        result = structs.replace(result, **{part.field: shown})
    hidden = hidden_fields(access, request)
    return structs.replace(result, **dict.fromkeys(hidden, OMITTED)) if hidden else result


def find(path: str) -> dict[str, tuple[Route, str]]:
    """By method, the routes of a path, each with the name in the path, or ""; empty: none."""
    found = {method: (served, "") for method, served in ROUTES.get(path, {}).items()}
    fitting = []
    for template, methods in ROUTES.items():
        start, brace, rest = template.partition("{")
        end = rest.partition("}")[2]
        name = path.removeprefix(start).removesuffix(end)
        if brace and path == f"{start}{name}{end}" and name:
            fitting.append((len(end), name, methods))
    for _, name, methods in sorted(fitting, key=lambda fit: -fit[0]):
        for method, served in methods.items():
            found.setdefault(method, (served, name))
    return found
