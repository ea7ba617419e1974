"""Routes about the cluster: its nodes, the metadata log, topics, who votes and who leads."""

from __future__ import annotations

from typing import Any

from kept.node.admin.actions.cluster_actions import Caller
from kept.node.admin.views.topic_view import MAX_SEGMENTS
from kept.node.http.parameters import Parameters
from kept.node.http.route_access import (
    ALTER_CLUSTER,
    DESCRIBABLE_GROUPS,
    DESCRIBABLE_TOPICS,
    DESCRIBE,
    DESCRIBE_CLUSTER,
    DESCRIBE_CLUSTER_CONFIGS,
    DESCRIBE_GROUP,
    DESCRIBE_NAMED_TOPIC,
    DESCRIBE_NAMED_TOPIC_CONFIGS,
    AllOf,
    named_topic,
    topic_or_cluster,
)
from kept.node.http.route_table import RouteContext, route
from kept.node.security.access import AuthorizeRequest
from kept.storage.errors import InvalidRequest
from kept.storage.types import decimal_number


def partition_name(p: Parameters) -> list[str]:
    """What the audit log calls a partition, or the topic where no partition is given."""
    partition = p.optional_number("partition")
    return [p.text("topic") if partition is None else str(p.partition())]


def node_name(p: Parameters) -> list[str]:
    """What it calls a node."""
    return [str(p.number("node_id"))]


@route("GET", "/api/v1/cluster", access=DESCRIBE_CLUSTER)
async def _cluster(node: RouteContext, p: Parameters) -> Any:
    return await node.services.cluster.describe(p.request.session.listener)


@route("GET", "/api/v1/quorum", "local", access=DESCRIBE_CLUSTER)
async def _quorum(node: RouteContext, p: Parameters) -> Any:
    return await node.services.quorum.describe(p.flag("local"))


@route("GET", "/api/v1/topics", large=True, access=DESCRIBABLE_TOPICS)
async def _all_topics(node: RouteContext, _p: Parameters) -> Any:
    return await node.services.topics.topics()


@route(
    "GET",
    "/api/v1/topics/{topic}",
    "leaders",
    "partition",
    "limit",
    "segments",
    large=True,
    access=DESCRIBE_NAMED_TOPIC,
)
async def _topic(node: RouteContext, p: Parameters) -> Any:
    segments = p.optional_number("segments")
    return await node.services.topics.topic(
        p.request.named,
        leaders=p.flag("leaders"),
        partition=p.optional_number("partition"),
        limit=p.optional_number("limit"),
        segments=MAX_SEGMENTS if segments is None else max(1, min(segments, MAX_SEGMENTS)),
    )


@route(
    "POST",
    "/api/v1/partitions/elect",
    "topic",
    "partition",
    access=ALTER_CLUSTER,
    changes=partition_name,
)
async def _elect(node: RouteContext, p: Parameters) -> Any:
    return await node.services.election.elect_preferred(*p.partition())


@route("POST", "/api/v1/voters/add", "node_id", "address", access=ALTER_CLUSTER, changes=node_name)
async def _add_voter(node: RouteContext, p: Parameters) -> Any:
    address = p.text("address") if "address" in p.given else None
    return await node.services.quorum.add_voter(
        p.number("node_id"), address, allowed=p.request.may_change_voters
    )


@route("POST", "/api/v1/voters/remove", "node_id", access=ALTER_CLUSTER, changes=node_name)
async def _remove_voter(node: RouteContext, p: Parameters) -> Any:
    return await node.services.quorum.remove_voter(
        p.number("node_id"), allowed=p.request.may_change_voters
    )


@route(
    "GET",
    "/api/v1/topics/{topic}/groups",
    large=True,
    access=AllOf((AuthorizeRequest(DESCRIBE, named_topic), DESCRIBABLE_GROUPS)),
    filtered=True,
)
async def _groups_of_topic(node: RouteContext, p: Parameters) -> Any:
    topic = node.services.lookup.topic(p.request.named)
    return await node.services.consumer_lag.groups_of_topic(p.request.session, topic.name)


@route("GET", "/api/v1/topics/{topic}/config", large=True, access=DESCRIBE_NAMED_TOPIC_CONFIGS)
async def _topic_config(node: RouteContext, p: Parameters) -> Any:
    return node.services.topics.topic_config(p.request.named)


@route("GET", "/api/v1/history/throughput", "topic", large=True, access=topic_or_cluster)
async def _throughput(node: RouteContext, p: Parameters) -> Any:
    topic = p.text("topic") if "topic" in p.given else None
    return await node.services.activity.throughput(topic, here=p.request.here)


@route("GET", "/api/v1/history/lag", "group", large=True, access=DESCRIBE_GROUP)
async def _lag(node: RouteContext, p: Parameters) -> Any:
    return await node.services.activity.lag(p.text("group"), here=p.request.here)


@route("GET", "/api/v1/brokers/{broker}/config", large=True, access=DESCRIBE_CLUSTER_CONFIGS)
async def _broker_config(node: RouteContext, p: Parameters) -> Any:
    broker = decimal_number(p.request.named)
    if broker is None:
        raise InvalidRequest(f"{p.request.named} is not the id of a broker")
    return await node.services.actions.broker_config(
        Caller(p.request.session, p.request.address, p.request.usage), broker
    )
