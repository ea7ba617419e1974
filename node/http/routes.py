"""What HTTP answers: which path and method is which operation of ``kept.node.admin``.

======  ============================================  ==============================================
method  path                                          answers
======  ============================================  ==============================================
GET     /                                             this list, as text; a browser gets the console
GET     /console/FILE                                 what the console is made of
GET     /healthz                                      200 while the process runs
GET     /readyz                                       200 when clients are served, else 503 and why
GET     /metrics                                      Prometheus text, or OpenMetrics (Accept)
GET     /api/v1/cluster                               brokers, log directories, totals
GET     /api/v1/topics                                every topic in a line
GET     /api/v1/quorum                                copies of the metadata log
GET     /api/v1/topics/NAME                           settings, partitions, segments [&leaders=true
                                                      &partition=P or &limit=N, &segments=N]
GET     /api/v1/groups[?name=TEXT]                    consumer groups of the cluster with their lag
GET     /api/v1/groups/NAME                           one group, by partition
GET     /api/v1/transactions[?name=TEXT]              transactional ids of the cluster
GET     /api/v1/transactions/NAME                     one transactional id
GET     /api/v1/records?topic=T&partition=P           the last records [&offset=O or &timestamp=MS]
                                                      [&limit=N]
GET     /api/v1/records/key?topic=T&key=K             the life of a key [&partition=P]
GET     /api/v1/compaction[?topic=T]                  where each compacted partition stands
GET     /api/v1/compaction/explain?topic=T            what a pass would do now [&partition=P&key=K]
GET     /api/v1/compaction/why-missing?topic=T&…      where &partition=P&offset=O is [&key=K]
GET     /api/v1/compaction/lost[?topic=T&…]           committed records cut away here, &partition=P
GET     /api/v1/compaction/replica?topic=T&…          how far this node's replica is: &partition=P
GET     /api/v1/compaction/digests?topic=T&…          what it has: &partition=P&start=O&end=O[&…]
GET     /api/v1/cleaner                               what this node's cleaner does and did
GET     /api/v1/compaction/passes?topic=T&…           what the last passes did: &partition=P
GET     /api/v1/compaction/history?topic=T&…          dirty ratios of the last hour: &partition=P
GET     /api/v1/events[?topic=T&partition=P]          server-sent events: what moves
GET     /api/v1/pulse?topic=T&partition=P             the same of a partition, once
POST    /api/v1/partitions/elect                      {"topic": T, "partition": P}
POST    /api/v1/compaction/now                        {"topic": T, "partition": P, "wait": true}
POST    /api/v1/compaction/retry                      {"topic": T, "partition": P}
POST    /api/v1/voters/add                            {"node_id": N, "address": "HOST:PORT"}
POST    /api/v1/voters/remove                         {"node_id": N}
======  ============================================  ==============================================

A key is text (``key=``) or base64 (``key_base64=``). With ``node=N`` that node of the cluster
answers (``kept.node.admin.peer_http``); only streams do not travel. Compaction is requested of
any node, which calls the leaders, and so are ``explain``, ``why-missing``, ``retry`` and the life
of a key (``kept.node.admin.leader_router``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import Struct, structs

from kept.cluster.security.acls import AclResourceType
from kept.node.admin.record_browser import DEFAULT_RECORDS
from kept.node.admin.topic_view import MAX_SEGMENTS
from kept.node.compaction.replica_digests import Wanted
from kept.node.http import console, json_results
from kept.node.http.console import events
from kept.node.http.console.events import EventStreams, Pulses
from kept.node.http.parameters import Parameters
from kept.node.http.route_access import (
    ALTER_CLUSTER,
    ALTER_TOPIC,
    DESCRIBE,
    DESCRIBE_CLUSTER,
    DESCRIBE_TOPIC,
    OPEN,
    READ_TOPIC,
    Access,
    Shown,
    named_group,
    named_id,
    named_topic,
    refusal,
    shown,
    topic_or_cluster,
    topic_or_key,
    while_allowed,
)
from kept.node.http.server import JSON, TEXT, HttpRequest, HttpResponse, failure, plain_path
from kept.node.metrics.lazy_metrics import LazyMetrics, accepted_format
from kept.node.security.access import CLUSTER, Known, Whole
from kept.storage.errors import InvalidRequest

if TYPE_CHECKING:
    from kept.node.admin.services import AdminServices


class Route(NamedTuple):
    """What serves a path and a method, and what is asked before."""

    respond: Callable[[Routes, HttpRequest], Awaitable[HttpResponse]]
    access: Access | Callable[[Parameters], Access]

    def access_to(self, request: HttpRequest) -> Access:
        """What is asked before this request. Raises InvalidRequest."""
        access = self.access
        return access if isinstance(access, Struct) else access(Parameters(request))


_API: Final = "/api/v1/"
_EVENTS: Final = "/api/v1/events"

STRAYS_SHOWN: Final = 20
"""Logs set aside that ``/readyz`` names; ``kept_stray_logs`` counts all."""


class Routes:
    """The answers of one node. ``streams`` are those of server-sent events."""

    def __init__(self, services: AdminServices) -> None:
        self.services = services
        self.metrics = LazyMetrics(services)
        self.node_id = services.identity.node_id
        self.alone = services.config.current.alone
        self.pulses = Pulses(
            metadata=services.metadata,
            counters=services.counters,
            cleaner=services.cleaner,
            lookup=services.lookup,
            compaction=services.compaction_view,
        )
        self.streams = EventStreams(
            config=services.config,
            health=services.health,
            pulses=self.pulses,
            peer_http=services.peer_http,
        )

    async def respond(self, request: HttpRequest) -> HttpResponse:
        """Answer a request. Raises KeptError for what the operation refuses."""
        path = plain_path(request.path)
        node_id = _other_node(request, path)
        methods = _ROUTES.get(path)
        for prefix, named in _NAMED.items():
            if methods is None and path.startswith(prefix + "/"):
                methods = {"GET": named}
        if methods is None:
            return failure(404, f"there is nothing at {request.path}; GET / lists what there is")
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
            return failure(405, f"{request.method} is not for {path}; allowed: {allowed}", allowed)
        access = OPEN if request.session.is_unrestricted else route.access_to(request)
        refused = refusal(request.session, access, request)
        if refused is not None:
            return refused
        if node_id is not None and node_id != self.node_id:
            response = await self._forward(node_id, request)
            return await shown(access, request.session, response)
        response = await route.respond(self, request)
        if response.endless and response.chunks is not None and access is not OPEN:
            response.chunks = while_allowed(response.chunks, access, request)
        return response

    async def _forward(self, node_id: int, request: HttpRequest) -> HttpResponse:
        """What another node answers."""
        if self.alone:
            raise InvalidRequest(f"there is no node {node_id}: node {self.node_id} is alone")
        reply = await self.services.peer_http.request(
            node_id, request.method, request.path, query=request.query, body=request.body
        )
        return HttpResponse(text=reply.body.decode(), status=reply.status, content_type=JSON)


def _other_node(request: HttpRequest, path: str) -> int | None:
    """The node of the cluster that is to serve the request, taken out of the query as ``node``.
    Raises InvalidRequest.
    """
    if "node" not in request.query or not path.startswith(_API) or path == _EVENTS:
        return None
    query = dict(request.query)
    node_id = Parameters(HttpRequest("GET", path, query)).number("node")
    del query["node"]
    request.query = query
    request.here = True
    return node_id


Handler = Callable[[Routes, Parameters], Awaitable[Any]]

_ROUTES: Final[dict[str, dict[str, Route]]] = {}
"""Path -> method -> its route."""
_NAMED: Final[dict[str, Route]] = {}
"""The same of GET for paths that end in the name of something, by what stands before the name."""


def _route(
    method: str,
    path: str,
    *names: str,
    access: Access | Callable[[Parameters], Access],
    large: bool = False,
) -> Callable[[Handler], Handler]:
    """Serve ``path`` (of anything below it, where it ends in ``/``) by the function below, which
    returns a response or a result, once ``access`` is granted. Under ``/api/`` no parameters but
    ``names`` are allowed. The lists of a ``large`` result may be long: it is encoded and sent in
    slices.
    """

    def add(handler: Handler) -> Handler:
        async def route(routes: Routes, request: HttpRequest) -> HttpResponse:
            parameters = Parameters(request)
            if path.startswith(_API):
                parameters.check_names(names)
            result = await handler(routes, parameters)
            if isinstance(result, HttpResponse):
                return result
            if isinstance(access, Shown) and not request.session.is_unrestricted:
                name_of, items = attrgetter(access.name), getattr(result, access.field)
                shown = await access.of(request.session, items, name_of)
                result = structs.replace(result, **{access.field: shown})
            return (
                HttpResponse(chunks=json_results.chunks(result)) if large else HttpResponse(result)
            )

        if path.endswith("/") and path != "/":
            _NAMED[path.rstrip("/")] = Route(route, access)
        else:
            _ROUTES.setdefault(path, {})[method] = Route(route, access)
        return handler

    return add


def _console(name: str) -> HttpResponse:
    return HttpResponse(
        text=console.text(name), content_type=console.TYPES[name], policy=console.POLICY
    )


@_route("GET", "/", access=Known())
async def _index(_routes: Routes, p: Parameters) -> HttpResponse:
    if "text/html" in p.request.accept:
        return _console("page.html")
    table = (__doc__ or "").split("======\n", 1)[1].rsplit("======  ====", 1)[0]
    lines = [line for line in table.splitlines() if not line.startswith("=")]
    return HttpResponse(text="\n".join(["kept", "", *lines, ""]))


@_route("GET", "/console/", access=Known())
async def _part_of_the_page(_routes: Routes, p: Parameters) -> HttpResponse:
    name = p.request.path.removeprefix("/console/")
    if name not in console.TYPES:
        return failure(404, f"there is nothing at {p.request.path}")
    return _console(name)


@_route("GET", "/healthz", access=OPEN)
async def _healthz(_routes: Routes, _p: Parameters) -> HttpResponse:
    return HttpResponse(text="ok\n")


@_route("GET", "/readyz", access=OPEN)
async def _readyz(routes: Routes, p: Parameters) -> HttpResponse:
    reason = routes.services.health.unready()
    if not p.request.session.may(DESCRIBE, *CLUSTER, audited=False):
        ready = reason is None
        return HttpResponse(
            text="ready\n" if ready else "not ready\n", status=200 if ready else 503
        )
    if reason is None:
        strays = routes.services.health.stray_logs()
        more = "".join(f"log set aside: {path}\n" for path in strays[:STRAYS_SHOWN])
        return HttpResponse(text=f"ready\n{more}")
    return HttpResponse(text=f"not ready: {reason}\n", status=503)


@_route("GET", "/metrics", access=DESCRIBE_CLUSTER)
async def _metrics(routes: Routes, p: Parameters) -> HttpResponse:
    text_format = accepted_format(p.request.accept)
    return HttpResponse(chunks=routes.metrics.render(text_format), content_type=text_format.value)


@_route("GET", "/api/v1/cluster", access=DESCRIBE_CLUSTER)
async def _cluster(routes: Routes, p: Parameters) -> Any:
    return await routes.services.cluster.describe(p.request.session.listener)


@_route("GET", "/api/v1/quorum", "local", access=DESCRIBE_CLUSTER)
async def _quorum(routes: Routes, p: Parameters) -> Any:
    return await routes.services.quorum.describe(p.flag("local"))


@_route("GET", "/api/v1/topics", large=True, access=Shown("topics", "name", AclResourceType.TOPIC))
async def _all_topics(routes: Routes, _p: Parameters) -> Any:
    return await routes.services.topics.topics()


@_route(
    "GET",
    "/api/v1/topics/",
    "leaders",
    "partition",
    "limit",
    "segments",
    large=True,
    access=Whole(DESCRIBE, named_topic),
)
async def _topic(routes: Routes, p: Parameters) -> Any:
    segments = p.optional_number("segments")
    return await routes.services.topics.topic(
        p.request.path.removeprefix("/api/v1/topics/").rstrip("/"),
        leaders=p.flag("leaders"),
        partition=p.optional_number("partition"),
        limit=p.optional_number("limit"),
        segments=MAX_SEGMENTS if segments is None else max(1, min(segments, MAX_SEGMENTS)),
    )


@_route(
    "GET",
    "/api/v1/groups",
    "name",
    large=True,
    access=Shown("groups", "group", AclResourceType.GROUP),
)
async def _groups(routes: Routes, p: Parameters) -> Any:
    return await routes.services.consumer_lag.groups(p.given.get("name", ""))


@_route("GET", "/api/v1/groups/", large=True, access=Whole(DESCRIBE, named_group))
async def _group(routes: Routes, p: Parameters) -> Any:
    name = p.request.path.removeprefix("/api/v1/groups/")
    return await routes.services.consumer_lag.group(name)


@_route(
    "GET",
    "/api/v1/transactions",
    "name",
    large=True,
    access=Shown("transactions", "transactional_id", AclResourceType.TRANSACTIONAL_ID),
)
async def _transactions(routes: Routes, p: Parameters) -> Any:
    return await routes.services.transactions_view.transactions(p.given.get("name", ""))


@_route("GET", "/api/v1/transactions/", large=True, access=Whole(DESCRIBE, named_id))
async def _transaction(routes: Routes, p: Parameters) -> Any:
    name = p.request.path.removeprefix("/api/v1/transactions/")
    return await routes.services.transactions_view.transaction(name)


@_route(
    "GET",
    "/api/v1/records",
    "topic",
    "partition",
    "offset",
    "timestamp",
    "limit",
    large=True,
    access=READ_TOPIC,
)
async def _records(routes: Routes, p: Parameters) -> Any:
    limit = p.optional_number("limit")
    return await routes.services.records.browse(
        *p.partition(),
        offset=p.optional_number("offset"),
        timestamp=p.optional_number("timestamp"),
        limit=DEFAULT_RECORDS if limit is None else limit,
    )


@_route(
    "GET",
    "/api/v1/records/key",
    "topic",
    "partition",
    "key",
    "key_base64",
    large=True,
    access=READ_TOPIC,
)
async def _life(routes: Routes, p: Parameters) -> Any:
    key = p.key()
    if key is None:
        raise InvalidRequest("key is missing")
    partition, topic = p.optional_number("partition"), p.text("topic")
    return await routes.services.compaction.life_of_key(topic, partition, key, here=p.request.here)


@_route("GET", "/api/v1/cleaner", large=True, access=DESCRIBE_CLUSTER)
async def _cleaner(routes: Routes, _p: Parameters) -> Any:
    return routes.services.cleaner_view.describe()


@_route(
    "GET", "/api/v1/compaction/passes", "topic", "partition", large=True, access=DESCRIBE_CLUSTER
)
async def _passes(routes: Routes, p: Parameters) -> Any:
    return await routes.services.compaction.passes(*p.partition())


@_route(
    "GET", "/api/v1/compaction/history", "topic", "partition", large=True, access=DESCRIBE_TOPIC
)
async def _history(routes: Routes, p: Parameters) -> Any:
    return routes.services.compaction.dirty_samples(*p.partition())


@_route("GET", _EVENTS, "topic", "partition", access=DESCRIBE_CLUSTER)
async def _events(routes: Routes, p: Parameters) -> HttpResponse:
    routes.streams.admit()
    chunks = routes.streams.stream(p.partition() if "topic" in p.given else None)
    return HttpResponse(chunks=chunks, content_type=events.CONTENT_TYPE, endless=True)


@_route("GET", "/api/v1/pulse", "topic", "partition", access=DESCRIBE_TOPIC)
async def _pulse(routes: Routes, p: Parameters) -> Any:
    return routes.pulses.of_partition(p.partition())


@_route("POST", "/api/v1/partitions/elect", "topic", "partition", access=ALTER_CLUSTER)
async def _elect(routes: Routes, p: Parameters) -> Any:
    return await routes.services.election.elect_preferred(*p.partition())


@_route(
    "GET",
    "/api/v1/compaction",
    "topic",
    large=True,
    access=Shown("partitions", "topic", AclResourceType.TOPIC),
)
async def _compaction(routes: Routes, p: Parameters) -> Any:
    return await routes.services.compaction.statuses(p.given.get("topic"))


@_route(
    "GET",
    "/api/v1/compaction/explain",
    "topic",
    "partition",
    "key",
    "key_base64",
    large=True,
    access=topic_or_key,
)
async def _explain(routes: Routes, p: Parameters) -> Any:
    topic, partition = p.text("topic"), p.optional_number("partition")
    return await routes.services.compaction.explain(topic, partition, p.key(), here=p.request.here)


@_route(
    "GET",
    "/api/v1/compaction/why-missing",
    "topic",
    "partition",
    "offset",
    "key",
    "key_base64",
    access=READ_TOPIC,
)
async def _why_missing(routes: Routes, p: Parameters) -> Any:
    return await routes.services.compaction.why_missing(
        *p.partition(), p.number("offset"), p.key(), here=p.request.here
    )


@_route(
    "GET",
    "/api/v1/compaction/lost",
    "topic",
    "partition",
    "offset",
    large=True,
    access=topic_or_cluster,
)
async def _lost(routes: Routes, p: Parameters) -> Any:
    return await routes.services.replica_reports.lost_records(
        p.given.get("topic"), p.optional_number("partition"), p.optional_number("offset")
    )


@_route("GET", "/api/v1/compaction/replica", "topic", "partition", access=DESCRIBE_TOPIC)
async def _replica(routes: Routes, p: Parameters) -> Any:
    return routes.services.replica_reports.state(*p.partition())


@_route(
    "GET", "/api/v1/compaction/digests",
    "topic", "partition", "generation", "start", "end", "parts", access=READ_TOPIC, large=True,
)  # fmt: skip
async def _digests(routes: Routes, p: Parameters) -> Any:
    generation, parts = p.given.get("generation"), p.optional_number("parts")
    wanted = Wanted(generation, p.number("start"), p.number("end"), parts)
    return await routes.services.replica_reports.digests(*p.partition(), wanted)


@_route(
    "POST", "/api/v1/compaction/now", "topic", "partition", "wait", large=True, access=ALTER_TOPIC
)
async def _now(routes: Routes, p: Parameters) -> Any:
    partition = p.optional_number("partition")
    return await routes.services.compaction.compact_now(
        p.text("topic"), partition, p.flag("wait"), here=p.request.here
    )


@_route("POST", "/api/v1/compaction/retry", "topic", "partition", access=ALTER_TOPIC)
async def _retry(routes: Routes, p: Parameters) -> Any:
    return await routes.services.compaction.retry(*p.partition(), here=p.request.here)


@_route("POST", "/api/v1/voters/add", "node_id", "address", access=ALTER_CLUSTER)
async def _add_voter(routes: Routes, p: Parameters) -> Any:
    address = p.text("address") if "address" in p.given else None
    return await routes.services.quorum.add_voter(
        p.number("node_id"), address, allowed=p.request.may_change_voters
    )


@_route("POST", "/api/v1/voters/remove", "node_id", access=ALTER_CLUSTER)
async def _remove_voter(routes: Routes, p: Parameters) -> Any:
    return await routes.services.quorum.remove_voter(
        p.number("node_id"), allowed=p.request.may_change_voters
    )


__all__ = ["TEXT", "Routes"]
