"""Metadata: brokers, topics, leaders. Creates a topic that is asked for, where configured so.

Answers what the image says, with the endpoints of the listener that the request came in on (rule
42); any live broker is named as controller, and ``cluster_id`` is never null. Around the death of a
broker clients are told a little else, so that they find the next leader soon: see
:mod:`kept.node.metadata.failure_suspicions`.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, Final

from kept.client.protocol.messages import Values
from kept.cluster.controller.topics import INTERNAL_TOPICS, check_topic_name
from kept.cluster.metadata.records import NO_LEADER
from kept.cluster.security.acls import CLUSTER_NAME, AclOperation, AclResourceType
from kept.node.runtime import error_codes
from kept.node.security.access import CLUSTER
from kept.storage.errors import KeptError

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image, TopicImage
    from kept.cluster.metadata.records import PartitionRecord
    from kept.node.config.live_config import LiveConfig
    from kept.node.kafka.api import HandlerResult, RequestContext
    from kept.node.kafka.topic_creation import TopicCreation
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.failure_detector import FailureDetector
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.steps import Steps

DECISION_S: Final = 0.5
"""How long an answer waits for a leader where the one of before seems to be gone."""
NO_ID: Final = uuid.UUID(int=0)


class MetadataHandler:
    """The cluster as this node knows it."""

    def __init__(
        self,
        *,
        config: LiveConfig,
        metadata: MetadataLog,
        addresses: AddressBook,
        detector: FailureDetector,
        table: ReplicaTable,
        topics: TopicCreation,
    ) -> None:
        self._config = config
        self._metadata = metadata
        self._addresses = addresses
        self._detector = detector
        self._table = table
        self._topics = topics

    def metadata(self, ctx: RequestContext, request: Any) -> Steps[HandlerResult]:
        """The cluster as this node knows it, and the topics in it that may be described."""
        image = self._metadata.image
        named: dict[str, uuid.UUID] = {}
        unnamed: list[Values] = []
        wanted = request.topics
        if wanted is None or (ctx.api_version == 0 and not wanted):
            names = sorted(image.topics)
        else:
            for topic in wanted:
                yield
                topic_id = getattr(topic, "topic_id", None)
                if topic.name is None and topic_id is not None and topic_id != NO_ID:
                    known = image.topics_by_id.get(topic_id)
                    if known is None:
                        unnamed.append(_unnamed(ctx, error_codes.UNKNOWN_TOPIC_ID, topic_id))
                    else:
                        named.setdefault(known.name, topic_id)
                elif topic.name is not None:
                    named[topic.name] = NO_ID
            names = list(named)
        visible = yield from ctx.permitted(
            AclOperation.DESCRIBE, AclResourceType.TOPIC, names, audited=bool(named)
        )
        for name, topic_id in named.items():
            if name in visible:
                continue
            yield
            if topic_id == NO_ID:
                unnamed.append(_absent(name, error_codes.TOPIC_AUTHORIZATION_FAILED))
            else:
                code = error_codes.TOPIC_AUTHORIZATION_FAILED
                unnamed.append(_unnamed(ctx, code, topic_id))
        names = [name for name in names if name in visible]
        missing = [name for name in names if name not in image.topics]
        allowed = getattr(request, "allow_auto_topic_creation", True)
        if missing and allowed and (self._config.current.auto_create_topics_enable):
            creatable = yield from ctx.permitted(
                AclOperation.CREATE,
                AclResourceType.TOPIC,
                missing,
                cluster=AclOperation.CREATE,
                audited=True,
            )
            refused = {
                name: error_codes.TOPIC_AUTHORIZATION_FAILED
                for name in missing
                if name not in creatable
            }
            missing = [name for name in missing if name in creatable]
            return self._create_and_respond(ctx, request, names, missing, refused, unnamed)
        if self._leader_seems_gone(names):
            return self._respond_when_elected(ctx, request, names, unnamed)
        return (yield from self._response(ctx, request, names, {}, unnamed))

    def _leader_seems_gone(self, names: list[str]) -> bool:
        """Whether a leader that is asked for seems to be gone."""
        if not self._detector.suspects_any:
            return False
        known = self._metadata.image.topics
        topics = [known[name] for name in names if name in known]
        leaders = {record.leader for topic in topics for record in topic.partitions}
        return any(self._detector.seems_gone(leader) for leader in leaders)

    async def _respond_when_elected(
        self, ctx: RequestContext, request: Any, names: list[str], unnamed: list[Values]
    ) -> Steps[Values]:
        """Give the controller a moment to find the next leader: librdkafka that hears of none asks
        again only after a second.
        """
        try:
            async with asyncio.timeout(DECISION_S):
                while self._leader_seems_gone(names):
                    await self._metadata.acted(self._metadata.image.index + 1)
        except TimeoutError:
            pass  # the answer says that there is no leader
        return self._response(ctx, request, names, {}, unnamed)

    async def _create_and_respond(  # noqa: PLR0917
        self,
        ctx: RequestContext,
        request: Any,
        names: list[str],
        missing: list[str],
        refused: dict[str, int],
        unnamed: list[Values],
    ) -> Steps[Values]:
        most = self._config.current.auto_create_max_topics
        refused.update(dict.fromkeys(missing[most:], error_codes.LEADER_NOT_AVAILABLE))
        for name in missing[:most]:
            code = await self._topics.create_for_client(name, ctx)
            if code:
                refused[name] = code
        return self._response(ctx, request, names, refused, unnamed)

    def _response(
        self,
        ctx: RequestContext,
        request: Any,
        names: list[str],
        refused: dict[str, int],
        unnamed: list[Values],
    ) -> Steps[dict[str, Any]]:
        image = self._metadata.image
        topics: list[dict[str, Any]] = []
        for name in names:
            yield
            topic = image.topics.get(name)
            if topic is not None:
                topics.append((yield from self._topic(image, topic)))
            else:
                code = refused.get(name, missing_code(name))
                topics.append({**_absent(name, code), "is_internal": name in INTERNAL_TOPICS})
        yield from _add_topic_operations(ctx, request, topics)
        brokers = []
        for broker_id in sorted(image.brokers):
            broker = image.brokers[broker_id]
            address = self._addresses.broker(broker_id, ctx.session.listener)
            if address is not None and (
                not broker.fenced or self._detector.recently_fenced(broker_id)
            ):
                brokers.append(
                    {
                        "node_id": broker_id,
                        "host": address[0],
                        "port": address[1],
                        "rack": broker.rack,
                    }
                )
        answer = {
            "brokers": brokers,
            "cluster_id": self._metadata.image.cluster_id,
            "controller_id": self._config.current.node_id,
            "topics": [*topics, *unnamed],
            "error_code": 0,
        }
        if getattr(request, "include_cluster_authorized_operations", False):
            answer["cluster_authorized_operations"] = cluster_operations(ctx)
        return answer

    def _topic(self, image: Image, topic: TopicImage) -> Steps[dict[str, Any]]:
        detector, node_id = self._detector, self._config.current.node_id
        partitions = []
        for record in topic.partitions:
            yield
            gone = detector.seems_gone(record.leader)
            partitions.append(partition_values(self._table, node_id, image, record, topic, gone))
        return {
            "error_code": 0,
            "name": topic.name,
            "topic_id": topic.topic_id,
            "is_internal": topic.name in INTERNAL_TOPICS,
            "partitions": partitions,
        }


def cluster_operations(ctx: RequestContext) -> int:
    """What whoever asks may do with the cluster, in bits; nothing if he may not describe it."""
    if not ctx.may(AclOperation.DESCRIBE, *CLUSTER):
        return 0
    return ctx.session.operations(AclResourceType.CLUSTER, CLUSTER_NAME)


def _add_topic_operations(
    ctx: RequestContext, request: Any, topics: list[dict[str, Any]]
) -> Steps[None]:
    """Add what whoever asks may do with topics, in bits, where he wants to know."""
    if getattr(request, "include_topic_authorized_operations", False):
        for topic in topics:
            yield
            operations = ctx.session.operations(AclResourceType.TOPIC, topic["name"])
            topic["topic_authorized_operations"] = operations


def _absent(name: str, code: int) -> dict[str, Any]:
    """A topic that is named and not there, or not to be told of."""
    return {
        "error_code": code,
        "name": name,
        "topic_id": NO_ID,
        "is_internal": False,
        "partitions": (),
    }


def _unnamed(ctx: RequestContext, code: int, topic_id: uuid.UUID) -> Values:
    """The same of one that is asked for by its id."""
    name = None if ctx.api_version >= 12 else ""
    return {"error_code": code, "name": name, "topic_id": topic_id, "partitions": ()}


def missing_code(name: str) -> int:
    """The error of a topic that is not there, or that no topic can be."""
    try:
        check_topic_name(name)
    except KeptError as error:
        return error_codes.code_for(error)
    return error_codes.UNKNOWN_TOPIC_OR_PARTITION


def partition_values(  # noqa: PLR0917
    table: ReplicaTable,
    node_id: int,
    image: Image,
    record: PartitionRecord,
    topic: TopicImage,
    leader_is_gone: bool = False,
) -> dict[str, Any]:
    """A partition as responses show it. Offline are replicas whose broker is fenced or unknown, or
    whose directory on this node failed.
    """
    brokers = image.brokers
    offline = tuple(
        broker_id
        for broker_id in record.replicas
        if broker_id not in brokers
        or brokers[broker_id].fenced
        or (broker_id == node_id and table.is_offline(topic.name, record.partition))
    )
    leader = NO_LEADER if leader_is_gone or record.leader in offline else record.leader
    return {
        "error_code": 0 if leader != NO_LEADER else error_codes.LEADER_NOT_AVAILABLE,
        "partition_index": record.partition,
        "leader_id": leader,
        "leader_epoch": record.leader_epoch,
        "replica_nodes": record.replicas,
        "isr_nodes": record.isr,
        "offline_replicas": offline,
    }
