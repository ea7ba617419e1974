"""DescribeCluster, DescribeTopicPartitions, UnregisterBroker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.client.protocol.messages import Values
from kept.cluster.controller import brokers as controller_brokers
from kept.cluster.controller.topics import INTERNAL_TOPICS
from kept.cluster.metadata.image import Image, TopicImage
from kept.cluster.metadata.records import MetadataRecord, PartitionRecord
from kept.cluster.security.acls import AclOperation, AclResourceType
from kept.node.kafka.error_responses import outcome
from kept.node.kafka.handlers.cluster.metadata import (
    cluster_operations,
    missing_code,
    partition_values,
)
from kept.node.runtime.error_codes import TOPIC_AUTHORIZATION_FAILED, code_for
from kept.storage.errors import InvalidRequest

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.kafka.api import RequestContext
    from kept.node.kafka.metadata_changes import MetadataChanges
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.steps import Steps

NO_OPERATIONS: Final = -(2**31)
"""Authorized operations that were not asked for."""

BROKER_ENDPOINT: Final = 1
CONTROLLER_ENDPOINT: Final = 2
MISMATCHED_ENDPOINT_TYPE: Final = 114
UNSUPPORTED_ENDPOINT_TYPE: Final = 115


@dataclass(frozen=True, slots=True)
class ClusterHandler:
    """What the cluster is made of."""

    config: LiveConfig
    metadata: MetadataLog
    addresses: AddressBook
    table: ReplicaTable
    metadata_changes: MetadataChanges

    def describe_cluster(self, ctx: RequestContext, request: Any) -> Values:
        """DescribeCluster v0-2: brokers as seen on the listener that the request came in on."""
        endpoint_type = getattr(request, "endpoint_type", BROKER_ENDPOINT)
        if endpoint_type != BROKER_ENDPOINT:
            return _wrong_endpoint(endpoint_type)
        fenced_too = getattr(request, "include_fenced_brokers", False)
        operations = NO_OPERATIONS
        if request.include_cluster_authorized_operations:
            operations = cluster_operations(ctx)
        return {
            "error_code": 0,
            "error_message": None,
            "endpoint_type": BROKER_ENDPOINT,
            "cluster_id": self.metadata.image.cluster_id,
            "controller_id": self.config.current.node_id,
            "brokers": self._brokers(ctx.session.listener, fenced_too),
            "cluster_authorized_operations": operations,
        }

    def _brokers(self, listener_name: str, fenced_too: bool) -> list[Values]:
        brokers: list[Values] = []
        for broker_id, broker in sorted(self.metadata.image.brokers.items()):
            if broker.fenced and not fenced_too:
                continue
            endpoint = self.addresses.broker(broker_id, listener_name)
            if endpoint is None:
                continue
            host, port = endpoint
            brokers.append(
                {
                    "broker_id": broker_id,
                    "host": host,
                    "port": port,
                    "rack": broker.rack,
                    "is_fenced": broker.fenced,
                }
            )
        return brokers

    def describe_topic_partitions(self, ctx: RequestContext, request: Any) -> Steps[Values]:
        """DescribeTopicPartitions v0: partitions in pages, topics by name (KIP-966).

        Topics that may not be described are left out of all topics, and refused where they are
        named.
        """
        cursor = request.cursor
        image = self.metadata.image
        names = sorted({topic.name for topic in request.topics} or image.topics)
        if cursor is not None and (
            cursor.partition_index < 0 or (request.topics and cursor.topic_name not in names)
        ):
            yield from ctx.permitted(AclOperation.DESCRIBE, AclResourceType.TOPIC, ())
            return (yield from _cursor_refused(request))
        if cursor is not None:
            names = [name for name in names if name >= cursor.topic_name]
        visible = yield from ctx.permitted(AclOperation.DESCRIBE, AclResourceType.TOPIC, names)
        hidden = [_hidden_topic(name) for name in names if name not in visible]
        names = [name for name in names if name in visible]
        page = yield from self._page(ctx, request, names, image)
        return {**page, "topics": [*page["topics"], *(hidden if request.topics else ())]}

    def _page(
        self, ctx: RequestContext, request: Any, names: list[str], image: Image
    ) -> Steps[Values]:
        cursor = request.cursor
        limit = request.response_partition_limit
        most = self.config.current.max_request_partition_size_limit
        left = max(1, min(limit, most))
        topics: list[Values] = []
        for name in names:
            yield
            if not left:
                return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": 0}}
            topic = image.topics.get(name)
            if topic is None:
                if cursor is None or request.topics:
                    topics.append(_unknown_topic(ctx, name))
                continue
            begins = cursor is not None and name == cursor.topic_name
            first = cursor.partition_index if begins and cursor is not None else 0
            page = topic.partitions[first : first + left]
            topics.append((yield from self._topic(ctx, topic, page)))
            left -= len(page)
            if first + len(page) < len(topic.partitions):
                following = {"topic_name": name, "partition_index": first + len(page)}
                return {"topics": topics, "next_cursor": following}
        return {"topics": topics, "next_cursor": None}

    def _topic(
        self, ctx: RequestContext, topic: TopicImage, page: tuple[PartitionRecord, ...]
    ) -> Steps[Values]:
        image, node_id = self.metadata.image, self.config.current.node_id
        partitions = []
        for record in page:
            values = partition_values(self.table, node_id, image, record, topic)
            partitions.append({**values, "eligible_leader_replicas": (), "last_known_elr": ()})
            yield
        return {
            "error_code": 0,
            "name": topic.name,
            "topic_id": topic.topic_id,
            "is_internal": topic.name in INTERNAL_TOPICS,
            "partitions": partitions,
            "topic_authorized_operations": ctx.session.operations(
                AclResourceType.TOPIC, topic.name
            ),
        }

    async def unregister_broker(self, _ctx: RequestContext, request: Any) -> Values:
        """UnregisterBroker v0: forget a broker that is gone for good; its replicas stay assigned.

        Ours: one that lives is refused, since it would register again.
        """
        broker_id = request.broker_id

        def decision(image: Image) -> tuple[None, Sequence[MetadataRecord]]:
            records = controller_brokers.unregister_broker(image, broker_id)
            if not image.brokers[broker_id].fenced:
                raise InvalidRequest(f"Broker {broker_id} is alive: stop it first")
            return None, records

        return await outcome(self.metadata_changes.decide(decision))


def _wrong_endpoint(endpoint_type: int) -> Values:
    if endpoint_type == CONTROLLER_ENDPOINT:
        code = MISMATCHED_ENDPOINT_TYPE
        message = (
            "The request was sent to an endpoint of type BROKER, but we wanted an endpoint of "
            "type CONTROLLER"
        )
    else:
        code, message = UNSUPPORTED_ENDPOINT_TYPE, f"Unsupported endpoint type {endpoint_type}"
    return {
        "error_code": code,
        "error_message": message,
        "endpoint_type": BROKER_ENDPOINT,
        "cluster_id": "",
        "controller_id": -1,
        "brokers": (),
        "cluster_authorized_operations": NO_OPERATIONS,
    }


def _cursor_refused(request: Any) -> Steps[Values]:
    code = code_for(InvalidRequest("cursor"))
    topics = []
    for topic in request.topics:
        topics.append({**_hidden_topic(topic.name), "error_code": code})
        yield
    return {"topics": topics, "next_cursor": None}


def _unknown_topic(ctx: RequestContext, name: str) -> dict[str, Any]:
    return {
        **_hidden_topic(name),
        "error_code": missing_code(name),
        "is_internal": name in INTERNAL_TOPICS,
        "topic_authorized_operations": ctx.session.operations(AclResourceType.TOPIC, name),
    }


def _hidden_topic(name: str) -> dict[str, Any]:
    """A topic of which nothing is said, not even whether it exists."""
    return {
        "error_code": TOPIC_AUTHORIZATION_FAILED,
        "name": name,
        "topic_id": None,
        "is_internal": False,
        "partitions": (),
        "topic_authorized_operations": NO_OPERATIONS,
    }
