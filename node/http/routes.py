"""What HTTP answers: which path and method is which operation of ``kept.node.admin``:
:data:`TABLE` lists them.

A key is text (``key=``) or base64 (``key_base64=``). With ``node=N`` that node of the cluster
answers (``kept.node.admin.peer_http``); only streams do not travel. Compaction is requested of
any node, which calls the leaders, and so are ``explain``, ``why-missing``, ``retry`` and the life
of a key (``kept.node.admin.leader_router``). From ``topics/create`` on the list needs
``kept.console.actions=true``; each does what a Kafka request does, with its rights.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kept.cluster.controller.topics import MAX_TOPIC_NAME_LENGTH
from kept.node.admin.topic_lookup import nearest_name
from kept.node.http import (  # noqa: F401 - they fill the table
    action_routes,
    cluster_routes,
    compaction_routes,
    console,
    record_routes,
)
from kept.node.http.console.events import EventStreams, Pulses
from kept.node.http.messages import JSON, HttpRequest, HttpResponse, failure
from kept.node.http.parameters import Parameters
from kept.node.http.route_access import (
    DESCRIBABLE_TOPICS,
    DESCRIBE,
    DESCRIBE_CLUSTER,
    PERMIT_ALL,
    in_pieces,
    refusal,
    shown,
    while_allowed,
    without_hidden,
)
from kept.node.http.route_table import API, Route, RouteContext, find, route
from kept.node.metrics.lazy_metrics import LazyMetrics, accepted_format
from kept.node.security.access import CLUSTER, RequireLogin
from kept.node.security.client_usage import QuotaKind
from kept.storage.errors import InvalidRequest, UnknownTopicOrPartition

if TYPE_CHECKING:
    from kept.node.admin.services import AdminServices

STRAYS_SHOWN: Final = 20
"""Logs set aside that ``/readyz`` names; ``kept_stray_logs`` counts all."""
REPLICAS_SHOWN: Final = 20
"""Replicas that an error took offline, which it names; ``/api/v1/cluster`` names all."""
NO_ACTIONS: Final = "kept.console.actions is false: with kept.console.actions=true this is served"
TABLE: Final = """\
method  path                                          answers
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
GET     /api/v1/topics/NAME/config                    all its settings, defaults, meaning
GET     /api/v1/topics/NAME/groups                    groups that read it, with lag by partition
GET     /api/v1/groups[?name=TEXT]                    consumer groups of the cluster with their lag
GET     /api/v1/groups/NAME                           one group, by partition
GET     /api/v1/transactions[?name=TEXT]              transactional ids of the cluster
GET     /api/v1/transactions/NAME                     one transactional id
GET     /api/v1/records?topic=T&partition=P           the last records [&offset=O or &timestamp=MS]
                                                      [&limit=N]
GET     /api/v1/records/key?topic=T&key=K             the life of a key [&partition=P]
GET     /api/v1/search?topic=T[&…]                    records of all partitions: [&partition=P]
                                                      [&key=K][&contains=TEXT][&header=NAME=TEXT]
                                                      [&from=MS][&to=MS][&newest=false][&limit=N]
                                                      [&cursor=C]
GET     /api/v1/tail?topic=T[&…]                      server-sent events: records as they come,
                                                      [&partition=P][&key=K][&contains=TEXT]
                                                      [&header=NAME=TEXT]
GET     /api/v1/history/throughput[?topic=T]          bytes and records of the last hour, and sizes
GET     /api/v1/history/lag?group=G                   lag of the last hour
GET     /api/v1/brokers/N/config                      settings of a broker and where each is from
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
POST    /api/v1/topics/create                         {"topic": T, "partitions": N, "config": {…}}
POST    /api/v1/topics/alter                          {"topic": T, "partitions": N, "set": {…},
                                                      "delete": […]}
POST    /api/v1/topics/delete                         {"topic": T}
POST    /api/v1/produce                               {"topic": T, "key": K, "value": V, …}
POST    /api/v1/groups/reset-offsets                  {"group": G, "topic": T, "to": "earliest",
                                                      "dry_run": true}
POST    /api/v1/brokers/config                        {"broker": N, "set": {…}, "delete": […]}
"""


class Routes:
    """The answers of one node."""

    def __init__(self, services: AdminServices, metrics: LazyMetrics) -> None:
        self.services = services
        self.node_id = services.identity.node_id
        self.alone = services.config.current.alone
        pulses = Pulses(
            metadata=services.metadata,
            counters=services.counters,
            cleaner=services.cleaner,
            lookup=services.lookup,
            compaction=services.compaction_view,
        )
        self.context = RouteContext(
            services=services,
            metrics=metrics,
            pulses=pulses,
            streams=EventStreams(
                config=services.config,
                health=services.health,
                pulses=pulses,
                peer_http=services.peer_http,
            ),
        )

    def draws_on(self, request: HttpRequest) -> QuotaKind:
        """The quotas that a request uses something of."""
        served = find(request.path).get(_method(request))
        return "request" if served is None else served[0].draws_on

    async def respond(self, request: HttpRequest) -> HttpResponse:
        """Answer a request. Raises KeptError for what the operation refuses."""
        path, methods = request.path, find(request.path)
        if not methods:
            return failure(404, f"there is nothing at {request.path}; GET / lists what there is")
        served = methods.get(_method(request))
        if served is None:
            allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
            return failure(405, f"{request.method} is not for {path}; allowed: {allowed}", allowed)
        route, request.named = served
        node_id = _other_node(request, path, route)
        access = PERMIT_ALL if request.session.is_unrestricted else route.access_to(request)
        refused = refusal(request.session, access, request)
        if refused is not None:
            return refused
        if route.needs_actions and not self.services.config.current.console_actions:
            return failure(403, NO_ACTIONS)
        served_here = route.filtered and not request.session.is_unrestricted
        if node_id is not None and node_id != self.node_id and not served_here:
            response = await self._forward(node_id, request, route.draws_on)
            if access is not PERMIT_ALL:
                response = await shown(access, request.session, response)
                response = await without_hidden(access, request, response)
        else:
            response = await self._serve(route, request)
        self._record(route, request, response)
        ends = access is not PERMIT_ALL or math.isfinite(request.session.expires_at)
        if response.endless and response.chunks is not None and ends:
            response.chunks = while_allowed(response.chunks, access, request)
        return response

    async def _serve(self, route: Route, request: HttpRequest) -> HttpResponse:
        """What a route answers; of a topic that there is not, with the name that is near."""
        try:
            return await route.respond(self.context, request)
        except UnknownTopicOrPartition as error:
            near = await self._near_topic(request)
            if near is None:
                raise
            raise UnknownTopicOrPartition(f"{error}; did you mean {near}?") from error

    async def _near_topic(self, request: HttpRequest) -> str | None:
        """The topic that may be meant, of those that whoever asks may see."""
        session, topics = request.session, self.services.metadata.image.topics
        given = Parameters(request).given.get("topic")
        name = request.named if request.path.startswith(f"{API}topics/{request.named}") else given
        if session.is_node or not name or not isinstance(name, str) or name in topics:
            return None
        names = list(topics)
        if not session.is_unrestricted:
            names = await DESCRIBABLE_TOPICS.visible(session, names, str)
        return await nearest_name(name[:MAX_TOPIC_NAME_LENGTH], names)

    async def _forward(
        self, node_id: int, request: HttpRequest, draws_on: QuotaKind
    ) -> HttpResponse:
        """What another node answers, as to this one: what it fetched counts as it is shown."""
        if self.alone:
            raise InvalidRequest(f"there is no node {node_id}: node {self.node_id} is alone")
        reply = await self.services.peer_http.request(
            node_id, request.method, request.path, query=request.query, body=request.body
        )
        if draws_on == "fetch":
            request.usage.consumed(len(reply.body))
        return HttpResponse(chunks=in_pieces(reply.body), status=reply.status, content_type=JSON)

    def _record(self, route: Route, request: HttpRequest, response: HttpResponse) -> None:
        """Let the audit log have what was changed; the node that a user asked writes it."""
        if route.changes is None or response.status != 200 or request.session.is_node:
            return
        names = [*route.changes(Parameters(request))]
        if names and getattr(response.value, "done", True):
            api = f"{request.method} {request.path}"
            self.services.audit.changed(request.session, api, names)


def _method(request: HttpRequest) -> str:
    return "GET" if request.method == "HEAD" else request.method


def _other_node(request: HttpRequest, path: str, route: Route) -> int | None:
    """The node of the cluster that is to serve the request, taken out of the query as ``node``.
    Raises InvalidRequest.
    """
    if "node" not in request.query or not path.startswith(API):
        return None
    if not route.travels:
        raise InvalidRequest(f"unknown parameter node; {path} is of the node that gets the request")
    query = dict(request.query)
    node_id = Parameters(HttpRequest("GET", path, query)).number("node")
    del query["node"]
    request.query = query
    request.here = True
    return node_id


def _console(name: str) -> HttpResponse:
    return HttpResponse(
        text=console.text(name), content_type=console.TYPES[name], policy=console.POLICY
    )


@route("GET", "/", access=RequireLogin())
async def _index(_node: RouteContext, p: Parameters) -> HttpResponse:
    if "text/html" in p.request.accept:
        return _console("page.html")
    return HttpResponse(text=f"kept\n\n{TABLE}")


@route("GET", "/console/{file}", access=RequireLogin())
async def _part_of_the_page(_node: RouteContext, p: Parameters) -> HttpResponse:
    name = p.request.named
    if name not in console.TYPES:
        return failure(404, f"there is nothing at {p.request.path}")
    return _console(name)


@route("GET", "/healthz", access=PERMIT_ALL)
async def _healthz(_node: RouteContext, _p: Parameters) -> HttpResponse:
    return HttpResponse(text="ok\n")


@route("GET", "/readyz", access=PERMIT_ALL)
async def _readyz(node: RouteContext, p: Parameters) -> HttpResponse:
    reason = node.services.health.unready()
    if not p.request.session.may(DESCRIBE, *CLUSTER, audited=False):
        ready = reason is None
        return HttpResponse(
            text="ready\n" if ready else "not ready\n", status=200 if ready else 503
        )
    if reason is None:
        health = node.services.health
        shown = [f"log set aside: {path}\n" for path in health.stray_logs()[:STRAYS_SHOWN]]
        for place in health.offline_replicas()[:REPLICAS_SHOWN]:
            shown.append(f"replica offline until this node is started again: {place}\n")
        more = "".join(shown)
        return HttpResponse(text=f"ready\n{more}")
    return HttpResponse(text=f"not ready: {reason}\n", status=503)


@route("GET", "/metrics", access=DESCRIBE_CLUSTER)
async def _metrics(node: RouteContext, p: Parameters) -> HttpResponse:
    text_format = accepted_format(p.request.accept)
    return HttpResponse(chunks=node.metrics.render(text_format), content_type=text_format.value)
