"""Routes about what clients see: records, consumer groups, transactions; and what moves."""

from __future__ import annotations

from typing import Any, Final

from kept.cluster.security.acls import AclResourceType
from kept.node.admin.records.record_browser import DEFAULT_RECORDS
from kept.node.admin.records.record_filter import RecordFilter
from kept.node.http.console import events
from kept.node.http.messages import HttpResponse
from kept.node.http.parameters import Parameters
from kept.node.http.route_access import (
    DESCRIBABLE_GROUPS,
    DESCRIBE,
    DESCRIBE_TOPIC,
    READ_TOPIC,
    FilterByDescribe,
    named_group,
    named_id,
    topic_or_login,
)
from kept.node.http.route_table import RouteContext, route
from kept.node.security.access import AuthorizeRequest
from kept.storage.errors import InvalidRequest

_SELECTION: Final = ("topic", "partition", "key", "key_base64", "contains", "header")
"""What selects records, of a search and of a tail."""


@route(
    "GET",
    "/api/v1/groups",
    "name",
    large=True,
    access=DESCRIBABLE_GROUPS,
    filtered=True,
)
async def _groups(node: RouteContext, p: Parameters) -> Any:
    return await node.services.consumer_lag.groups(p.request.session, p.given.get("name", ""))


@route(
    "GET",
    "/api/v1/groups/{group}",
    large=True,
    access=AuthorizeRequest(DESCRIBE, named_group),
    filtered=True,
)
async def _group(node: RouteContext, p: Parameters) -> Any:
    return await node.services.consumer_lag.group(p.request.session, p.request.named)


@route(
    "GET",
    "/api/v1/transactions",
    "name",
    large=True,
    access=FilterByDescribe("transactions", "transactional_id", AclResourceType.TRANSACTIONAL_ID),
    filtered=True,
)
async def _transactions(node: RouteContext, p: Parameters) -> Any:
    part_of_name = p.given.get("name", "")
    return await node.services.transactions_view.transactions(p.request.session, part_of_name)


@route(
    "GET",
    "/api/v1/transactions/{transactional_id}",
    large=True,
    access=AuthorizeRequest(DESCRIBE, named_id),
    filtered=True,
)
async def _transaction(node: RouteContext, p: Parameters) -> Any:
    return await node.services.transactions_view.transaction(p.request.session, p.request.named)


@route(
    "GET",
    "/api/v1/records",
    "topic",
    "partition",
    "offset",
    "timestamp",
    "limit",
    large=True,
    access=READ_TOPIC,
    draws_on="fetch",
)
async def _records(node: RouteContext, p: Parameters) -> Any:
    limit = p.optional_number("limit")
    return await node.services.records.browse(
        p.request.usage,
        *p.partition(),
        offset=p.optional_number("offset"),
        timestamp=p.optional_number("timestamp"),
        limit=DEFAULT_RECORDS if limit is None else limit,
    )


@route(
    "GET",
    "/api/v1/records/key",
    "topic",
    "partition",
    "key",
    "key_base64",
    large=True,
    access=READ_TOPIC,
)
async def _life(node: RouteContext, p: Parameters) -> Any:
    key = p.key()
    if key is None:
        raise InvalidRequest("key is missing")
    partition, topic = p.optional_number("partition"), p.text("topic")
    return await node.services.compaction.life_of_key(topic, partition, key, here=p.request.here)


@route("GET", "/api/v1/events", "topic", "partition", access=topic_or_login, travels=False)
async def _events(node: RouteContext, p: Parameters) -> HttpResponse:
    node.streams.admit()
    chunks = node.streams.stream(p.request.session, p.partition() if "topic" in p.given else None)
    return HttpResponse(chunks=chunks, content_type=events.CONTENT_TYPE, endless=True)


@route("GET", "/api/v1/pulse", "topic", "partition", access=DESCRIBE_TOPIC)
async def _pulse(node: RouteContext, p: Parameters) -> Any:
    return node.pulses.of_partition(p.partition())


@route(
    "GET",
    "/api/v1/search",
    *_SELECTION,
    "from",
    "to",
    "newest",
    "limit",
    "cursor",
    large=True,
    access=READ_TOPIC,
    draws_on="fetch",
)
async def _search(node: RouteContext, p: Parameters) -> Any:
    limit = p.optional_number("limit")
    return await node.services.search.search(
        p.request.usage,
        p.text("topic"),
        _record_filter(p),
        partition=p.optional_number("partition"),
        newest="newest" not in p.given or p.flag("newest"),
        limit=DEFAULT_RECORDS if limit is None else limit,
        cursor=p.text("cursor") if "cursor" in p.given else None,
    )


def _record_filter(p: Parameters) -> RecordFilter:
    """What selects records. Raises InvalidRequest."""
    header: tuple[str, bytes | None] | None = None
    if "header" in p.given:
        name, equals, value = p.text("header").partition("=")
        header = name, value.encode() if equals else None
    return RecordFilter(
        key=p.key(),
        contains=p.text("contains").encode() if "contains" in p.given else None,
        header=header,
        from_ms=p.optional_number("from"),
        to_ms=p.optional_number("to"),
    )


@route(
    "GET",
    "/api/v1/tail",
    *_SELECTION,
    access=READ_TOPIC,
    travels=False,
    draws_on="fetch",
)
async def _tail(node: RouteContext, p: Parameters) -> HttpResponse:
    node.streams.admit()
    partition = p.optional_number("partition")
    tail = node.services.tails.tail(p.request.usage, p.text("topic"), _record_filter(p), partition)
    chunks = node.streams.follow(tail)
    return HttpResponse(chunks=chunks, content_type=events.CONTENT_TYPE, endless=True)
