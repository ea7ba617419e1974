"""What HTTP answers: which path and method is which operation of ``kept.node.admin``.

======  ============================================  ==============================================
method  path                                          answers
======  ============================================  ==============================================
GET     /                                             this list, as text; a browser gets the console
GET     /console/FILE                                 what the console is made of
GET     /healthz                                      200 while the process runs
GET     /readyz                                       200 when clients are served, else 503 and why
GET     /metrics                                      Prometheus text
GET     /api/v1/cluster                               brokers, log directories, totals
GET     /api/v1/topics                                every topic in a line
GET     /api/v1/quorum                                copies of the metadata log
GET     /api/v1/topics/NAME                           settings, partitions, segments [&leaders=true
                                                      &partition=P or &limit=N, &segments=N]
GET     /api/v1/groups[?name=TEXT]                    consumer groups of the cluster with their lag
GET     /api/v1/groups/NAME                           one group, by partition
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

import base64
import binascii
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kept.node.admin.record_browser import DEFAULT_RECORDS
from kept.node.admin.topic_view import MAX_SEGMENTS
from kept.node.compaction.replica_digests import Wanted
from kept.node.http import console, json_results
from kept.node.http.console import events
from kept.node.http.console.events import EventStreams, Pulses
from kept.node.http.server import JSON, TEXT, HttpRequest, HttpResponse, failure, plain_path
from kept.node.metrics.lazy_metrics import CONTENT_TYPE, LazyMetrics
from kept.storage.errors import InvalidRequest
from kept.storage.types import MAX_INT64, TopicPartition

if TYPE_CHECKING:
    from kept.node.admin.services import AdminServices

Route = Callable[["Routes", HttpRequest], Awaitable[HttpResponse]]

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
        if node_id is not None and node_id != self.node_id:
            return await self._forward(node_id, request)
        methods = _ROUTES.get(path)
        for prefix, handler in _NAMED.items():
            if methods is None and path.startswith(prefix + "/"):
                methods = {"GET": handler}
        if methods is None:
            return failure(404, f"there is nothing at {request.path}; GET / lists what there is")
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
            return failure(405, f"{request.method} is not for {path}; allowed: {allowed}", allowed)
        return await route(self, request)

    async def _forward(self, node_id: int, request: HttpRequest) -> HttpResponse:
        """What another node answers."""
        if self.alone:
            raise InvalidRequest(f"there is no node {node_id}: node {self.node_id} is alone")
        reply = await self.services.peer_http.request(
            node_id, request.method, request.path, query=request.query, body=request.body
        )
        return HttpResponse(text=reply.body.decode(), status=reply.status, content_type=JSON)


def _other_node(request: HttpRequest, path: str) -> int | None:
    """Takes ``node``, which is to answer, out of the query. Raises InvalidRequest."""
    if "node" not in request.query or not path.startswith(_API) or path == _EVENTS:
        return None
    query = dict(request.query)
    node_id = _needed(query, "node")
    del query["node"]
    request.query = query
    request.here = True
    return node_id


# Parameters.


def _only(given: Iterable[str], *known: str) -> None:
    for name in given:
        if name not in known:
            raise InvalidRequest(
                f"unknown parameter {name}; there are {', '.join(known) or 'none'}"
            )


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} is missing")
    return value


def _number(given: Mapping[str, Any], name: str, optional: bool = False) -> int | None:
    value = given.get(name)
    if value is None and optional:
        return None
    if isinstance(value, str) and value.isdecimal() and value.isascii() and len(value) < 20:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INT64:
        return value
    raise InvalidRequest(f"{name} must be a number, 0 or more")


def _needed(given: Mapping[str, Any], name: str) -> int:
    value = _number(given, name)
    assert value is not None
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if value in (True, "true", "1"):
        return True
    if value in (False, "false", "0"):
        return False
    raise InvalidRequest(f"{name} must be true or false")


def _key(given: Mapping[str, str]) -> bytes | None:
    if "key" in given and "key_base64" in given:
        raise InvalidRequest("key and key_base64 are both given; use one of them")
    if "key_base64" in given:
        try:
            return base64.b64decode(given["key_base64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"key_base64 is not base64: {error}") from error
    return given["key"].encode() if "key" in given else None


# Routes.


def _console(name: str) -> HttpResponse:
    return HttpResponse(
        text=console.text(name), content_type=console.TYPES[name], policy=console.POLICY
    )


async def _part_of_the_page(_routes: Routes, request: HttpRequest) -> HttpResponse:
    name = request.path.removeprefix(_CONSOLE + "/")
    if name not in console.TYPES:
        return failure(404, f"there is nothing at {request.path}")
    return _console(name)


async def _index(_routes: Routes, request: HttpRequest) -> HttpResponse:
    if "text/html" in request.accept:
        return _console("page.html")
    table = (__doc__ or "").split("======\n", 1)[1].rsplit("======  ====", 1)[0]
    lines = [line for line in table.splitlines() if not line.startswith("=")]
    return HttpResponse(text="\n".join(["kept", "", *lines, ""]))


async def _healthz(_routes: Routes, _request: HttpRequest) -> HttpResponse:
    return HttpResponse(text="ok\n")


async def _readyz(routes: Routes, _request: HttpRequest) -> HttpResponse:
    reason = routes.services.health.unready()
    if reason is None:
        strays = routes.services.health.stray_logs()
        more = "".join(f"log set aside: {path}\n" for path in strays[:STRAYS_SHOWN])
        return HttpResponse(text=f"ready\n{more}")
    return HttpResponse(text=f"not ready: {reason}\n", status=503)


async def _metrics(routes: Routes, _request: HttpRequest) -> HttpResponse:
    return HttpResponse(chunks=routes.metrics.render(), content_type=CONTENT_TYPE)


async def _cluster(routes: Routes, request: HttpRequest) -> HttpResponse:
    _only(request.query)
    return HttpResponse(await routes.services.cluster.describe())


async def _all_topics(routes: Routes, request: HttpRequest) -> HttpResponse:
    _only(request.query)
    return _large(await routes.services.topics.topics())


async def _topic(routes: Routes, request: HttpRequest) -> HttpResponse:
    query = request.query
    _only(query, "leaders", "partition", "limit", "segments")
    name = request.path.removeprefix(_TOPICS + "/").rstrip("/")
    segments = _number(query, "segments", optional=True)
    found = await routes.services.topics.topic(
        name,
        leaders=_flag(query, "leaders"),
        partition=_number(query, "partition", optional=True),
        limit=_number(query, "limit", optional=True),
        segments=MAX_SEGMENTS if segments is None else max(1, min(segments, MAX_SEGMENTS)),
    )
    return _large(found)


async def _quorum(routes: Routes, request: HttpRequest) -> HttpResponse:
    _only(request.query, "local")
    return HttpResponse(await routes.services.quorum.describe(_flag(request.query, "local")))


async def _groups(routes: Routes, request: HttpRequest) -> HttpResponse:
    _only(request.query, "name")
    return _large(await routes.services.consumer_lag.groups(request.query.get("name", "")))


async def _group(routes: Routes, request: HttpRequest) -> HttpResponse:
    _only(request.query)
    name = request.path.removeprefix(_GROUPS + "/")
    return _large(await routes.services.consumer_lag.group(name))


async def _records(routes: Routes, request: HttpRequest) -> HttpResponse:
    query = request.query
    _only(query, "topic", "partition", "offset", "timestamp", "limit")
    limit = _number(query, "limit", optional=True)
    found = await routes.services.records.browse(
        _text(query, "topic"),
        _needed(query, "partition"),
        offset=_number(query, "offset", optional=True),
        timestamp=_number(query, "timestamp", optional=True),
        limit=DEFAULT_RECORDS if limit is None else limit,
    )
    return _large(found)


async def _life(routes: Routes, request: HttpRequest) -> HttpResponse:
    query = request.query
    _only(query, "topic", "partition", "key", "key_base64")
    key = _key(query)
    if key is None:
        raise InvalidRequest("key is missing")
    partition = _number(query, "partition", optional=True)
    topic = _text(query, "topic")
    return _large(
        await routes.services.compaction.life_of_key(topic, partition, key, here=request.here)
    )


async def _cleaner(routes: Routes, request: HttpRequest) -> HttpResponse:
    _only(request.query)
    return _large(routes.services.cleaner_view.describe())


async def _passes(routes: Routes, request: HttpRequest) -> HttpResponse:
    query = request.query
    _only(query, "topic", "partition")
    return _large(
        await routes.services.compaction.passes(_text(query, "topic"), _needed(query, "partition"))
    )


async def _history(routes: Routes, request: HttpRequest) -> HttpResponse:
    query = request.query
    _only(query, "topic", "partition")
    return _large(
        routes.services.compaction.dirty_samples(_text(query, "topic"), _needed(query, "partition"))
    )


async def _events(routes: Routes, request: HttpRequest) -> HttpResponse:
    query = request.query
    _only(query, "topic", "partition")
    routes.streams.admit()
    tp = None
    if "topic" in query:
        tp = TopicPartition(_text(query, "topic"), _needed(query, "partition"))
    chunks, kind = routes.streams.stream(tp), events.CONTENT_TYPE
    return HttpResponse(chunks=chunks, content_type=kind, endless=True)


async def _pulse(routes: Routes, request: HttpRequest) -> HttpResponse:
    query = request.query
    _only(query, "topic", "partition")
    tp = TopicPartition(_text(query, "topic"), _needed(query, "partition"))
    return HttpResponse(routes.pulses.of_partition(tp))


async def _elect(routes: Routes, request: HttpRequest) -> HttpResponse:
    body = request.body
    _only(body, "topic", "partition")
    return HttpResponse(
        await routes.services.election.elect_preferred(
            _text(body, "topic"), _needed(body, "partition")
        )
    )


async def _compaction(routes: Routes, request: HttpRequest) -> HttpResponse:
    _only(request.query, "topic")
    return _large(await routes.services.compaction.statuses(request.query.get("topic")))


async def _explain(routes: Routes, request: HttpRequest) -> HttpResponse:
    query = request.query
    _only(query, "topic", "partition", "key", "key_base64")
    topic, partition = _text(query, "topic"), _number(query, "partition", optional=True)
    found = await routes.services.compaction.explain(
        topic, partition, _key(query), here=request.here
    )
    return _large(found)


async def _why_missing(routes: Routes, request: HttpRequest) -> HttpResponse:
    query = request.query
    _only(query, "topic", "partition", "offset", "key", "key_base64")
    topic, partition, offset = (
        _text(query, "topic"),
        _needed(query, "partition"),
        _needed(query, "offset"),
    )
    found = await routes.services.compaction.why_missing(
        topic, partition, offset, _key(query), here=request.here
    )
    return HttpResponse(found)


async def _lost(routes: Routes, request: HttpRequest) -> HttpResponse:
    query = request.query
    _only(query, "topic", "partition", "offset")
    partition = _number(query, "partition", optional=True)
    offset = _number(query, "offset", optional=True)
    return _large(
        await routes.services.replica_reports.lost_records(query.get("topic"), partition, offset)
    )


async def _replica(routes: Routes, request: HttpRequest) -> HttpResponse:
    query = request.query
    _only(query, "topic", "partition")
    return HttpResponse(
        routes.services.replica_reports.state(_text(query, "topic"), _needed(query, "partition"))
    )


async def _digests(routes: Routes, request: HttpRequest) -> HttpResponse:
    query = request.query
    _only(query, "topic", "partition", "generation", "start", "end", "parts")
    wanted = Wanted(
        query.get("generation"),
        _needed(query, "start"),
        _needed(query, "end"),
        _number(query, "parts", optional=True),
    )
    topic, partition = _text(query, "topic"), _needed(query, "partition")
    return _large(await routes.services.replica_reports.digests(topic, partition, wanted))


async def _now(routes: Routes, request: HttpRequest) -> HttpResponse:
    body = request.body
    _only(body, "topic", "partition", "wait")
    partition = _number(body, "partition", optional=True)
    topic, wait = _text(body, "topic"), _flag(body, "wait")
    return _large(
        await routes.services.compaction.compact_now(topic, partition, wait, here=request.here)
    )


async def _retry(routes: Routes, request: HttpRequest) -> HttpResponse:
    body = request.body
    _only(body, "topic", "partition")
    topic, partition = _text(body, "topic"), _needed(body, "partition")
    return HttpResponse(await routes.services.compaction.retry(topic, partition, here=request.here))


async def _add_voter(routes: Routes, request: HttpRequest) -> HttpResponse:
    body = request.body
    _only(body, "node_id", "address")
    address = _text(body, "address") if "address" in body else None
    node_id, allowed = _needed(body, "node_id"), request.may_change_voters
    return HttpResponse(await routes.services.quorum.add_voter(node_id, address, allowed=allowed))


async def _remove_voter(routes: Routes, request: HttpRequest) -> HttpResponse:
    _only(request.body, "node_id")
    node_id = _needed(request.body, "node_id")
    allowed = request.may_change_voters
    return HttpResponse(await routes.services.quorum.remove_voter(node_id, allowed=allowed))


_API: Final = "/api/v1/"
_CONSOLE: Final = "/console"
_EVENTS: Final = "/api/v1/events"
_GROUPS: Final = "/api/v1/groups"
_TOPICS: Final = "/api/v1/topics"

_ROUTES: Final[Mapping[str, Mapping[str, Route]]] = {
    "/": {"GET": _index},
    "/healthz": {"GET": _healthz},
    "/readyz": {"GET": _readyz},
    "/metrics": {"GET": _metrics},
    "/api/v1/cluster": {"GET": _cluster},
    "/api/v1/quorum": {"GET": _quorum},
    _TOPICS: {"GET": _all_topics},
    _GROUPS: {"GET": _groups},
    "/api/v1/records": {"GET": _records},
    "/api/v1/records/key": {"GET": _life},
    _EVENTS: {"GET": _events},
    "/api/v1/pulse": {"GET": _pulse},
    "/api/v1/partitions/elect": {"POST": _elect},
    "/api/v1/cleaner": {"GET": _cleaner},
    "/api/v1/compaction/passes": {"GET": _passes},
    "/api/v1/compaction/history": {"GET": _history},
    "/api/v1/compaction": {"GET": _compaction},
    "/api/v1/compaction/explain": {"GET": _explain},
    "/api/v1/compaction/why-missing": {"GET": _why_missing},
    "/api/v1/compaction/lost": {"GET": _lost},
    "/api/v1/compaction/replica": {"GET": _replica},
    "/api/v1/compaction/digests": {"GET": _digests},
    "/api/v1/compaction/now": {"POST": _now},
    "/api/v1/compaction/retry": {"POST": _retry},
    "/api/v1/voters/add": {"POST": _add_voter},
    "/api/v1/voters/remove": {"POST": _remove_voter},
}

_NAMED: Final[Mapping[str, Route]] = {_TOPICS: _topic, _GROUPS: _group, _CONSOLE: _part_of_the_page}
"""Paths that end in the name of something."""


def _large(value: Any) -> HttpResponse:
    """A result whose lists may be long: encoded and sent in slices."""
    return HttpResponse(chunks=json_results.chunks(value))


__all__ = ["TEXT", "Routes"]
