"""Routes about compaction: where it stands, what it would do, what it did, and doing it now."""

from __future__ import annotations

from typing import Any

from kept.node.compaction.replica_digests import Wanted
from kept.node.http.cluster_routes import partition_name
from kept.node.http.parameters import Parameters
from kept.node.http.route_access import (
    ALTER_TOPIC,
    DESCRIBE_CLUSTER,
    DESCRIBE_TOPIC,
    READ_TOPIC,
    topic_or_cluster,
    topic_or_describable,
    topic_or_key,
)
from kept.node.http.route_table import RouteContext, route


@route("GET", "/api/v1/cleaner", large=True, access=DESCRIBE_CLUSTER)
async def _cleaner(node: RouteContext, _p: Parameters) -> Any:
    return node.services.cleaner_view.describe()


@route(
    "GET", "/api/v1/compaction/passes", "topic", "partition", large=True, access=DESCRIBE_CLUSTER
)
async def _passes(node: RouteContext, p: Parameters) -> Any:
    return await node.services.compaction.passes(*p.partition())


@route("GET", "/api/v1/compaction/history", "topic", "partition", large=True, access=DESCRIBE_TOPIC)
async def _history(node: RouteContext, p: Parameters) -> Any:
    return node.services.compaction.dirty_samples(*p.partition())


@route(
    "GET",
    "/api/v1/compaction",
    "topic",
    large=True,
    access=topic_or_describable,
)
async def _compaction(node: RouteContext, p: Parameters) -> Any:
    topic = p.text("topic") if "topic" in p.given else None
    return await node.services.compaction.statuses(topic)


@route(
    "GET",
    "/api/v1/compaction/explain",
    "topic",
    "partition",
    "key",
    "key_base64",
    large=True,
    access=topic_or_key,
)
async def _explain(node: RouteContext, p: Parameters) -> Any:
    topic, partition = p.text("topic"), p.optional_number("partition")
    return await node.services.compaction.explain(topic, partition, p.key(), here=p.request.here)


@route(
    "GET",
    "/api/v1/compaction/why-missing",
    "topic",
    "partition",
    "offset",
    "key",
    "key_base64",
    access=READ_TOPIC,
)
async def _why_missing(node: RouteContext, p: Parameters) -> Any:
    return await node.services.compaction.why_missing(
        *p.partition(), p.number("offset"), p.key(), here=p.request.here
    )


@route(
    "GET",
    "/api/v1/compaction/lost",
    "topic",
    "partition",
    "offset",
    large=True,
    access=topic_or_cluster,
)
async def _lost(node: RouteContext, p: Parameters) -> Any:
    return await node.services.replica_reports.lost_records(
        p.given.get("topic"), p.optional_number("partition"), p.optional_number("offset")
    )


@route("GET", "/api/v1/compaction/replica", "topic", "partition", access=DESCRIBE_TOPIC)
async def _replica(node: RouteContext, p: Parameters) -> Any:
    return node.services.replica_reports.state(*p.partition())


@route(
    "GET",
    "/api/v1/compaction/digests",
    "topic",
    "partition",
    "generation",
    "start",
    "end",
    "parts",
    access=READ_TOPIC,
    large=True,
)
async def _digests(node: RouteContext, p: Parameters) -> Any:
    generation, parts = p.given.get("generation"), p.optional_number("parts")
    wanted = Wanted(generation, p.number("start"), p.number("end"), parts)
    return await node.services.replica_reports.digests(*p.partition(), wanted)


@route(
    "POST",
    "/api/v1/compaction/now",
    "topic",
    "partition",
    "wait",
    large=True,
    access=ALTER_TOPIC,
    changes=partition_name,
)
async def _now(node: RouteContext, p: Parameters) -> Any:
    partition = p.optional_number("partition")
    return await node.services.compaction.compact_now(
        p.text("topic"), partition, p.flag("wait"), here=p.request.here
    )


@route(
    "POST",
    "/api/v1/compaction/retry",
    "topic",
    "partition",
    access=ALTER_TOPIC,
    changes=partition_name,
)
async def _retry(node: RouteContext, p: Parameters) -> Any:
    return await node.services.compaction.retry(*p.partition(), here=p.request.here)
