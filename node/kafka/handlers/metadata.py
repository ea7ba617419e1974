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

from kept.cluster.controller.topics import INTERNAL_TOPICS
from kept.node.kafka.api import sliced
from kept.node.kafka.topic_creation import create_internal_topic, create_topic
from kept.node.runtime import error_codes
from kept.storage.errors import KeptError, PolicyViolation, TopicAlreadyExists

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image, TopicImage
    from kept.cluster.metadata.records import PartitionRecord
    from kept.node.kafka.api import Answer, RequestContext
    from kept.node.kafka.apis import KafkaApis
    from kept.node.runtime.yielding import Steps

DECISION_S: Final = 0.5
"""How long an answer waits for a leader where the one of before seems to be gone."""
NO_ID: Final = uuid.UUID(int=0)
CLUSTER_OPERATIONS: Final = 8096
"""All operations on a cluster, as Kafka answers without an authorizer."""
TOPIC_OPERATIONS: Final = 3576
"""All operations on a topic, likewise."""


@sliced
def metadata(ctx: RequestContext, request: Any) -> Steps[Answer]:
    """The cluster as this node knows it."""
    apis = ctx.apis
    names: list[str] = []
    unknown_ids: list[uuid.UUID] = []
    wanted = request.topics
    if wanted is None or (ctx.api_version == 0 and not wanted):
        names = sorted(apis.metadata.image.topics)
    else:
        for topic in wanted:
            yield
            topic_id = getattr(topic, "topic_id", None)
            if topic.name is None and topic_id is not None and topic_id != NO_ID:
                found = apis.metadata.image.topics_by_id.get(topic_id)
                if found is None:
                    unknown_ids.append(topic_id)
                else:
                    names.append(found.name)
            elif topic.name is not None:
                names.append(topic.name)
    missing = [name for name in dict.fromkeys(names) if name not in apis.metadata.image.topics]
    allowed = getattr(request, "allow_auto_topic_creation", True)
    if missing and allowed and (apis.config.current.auto_create_topics_enable):
        return _create_and_answer(ctx, request, list(dict.fromkeys(names)), missing, unknown_ids)
    wanted_names = list(dict.fromkeys(names))
    if _in_doubt(apis, wanted_names):
        return _answer_when_decided(ctx, request, wanted_names, unknown_ids)
    return (yield from _answer(ctx, request, wanted_names, {}, unknown_ids))


def _in_doubt(apis: KafkaApis, names: list[str]) -> bool:
    """Whether a leader that is asked for seems to be gone."""
    if not apis.detector.suspects_any:
        return False
    known = apis.metadata.image.topics
    topics = [known[name] for name in names if name in known]
    leaders = {record.leader for topic in topics for record in topic.partitions}
    return any(apis.detector.seems_gone(leader) for leader in leaders)


async def _answer_when_decided(
    ctx: RequestContext, request: Any, names: list[str], unknown_ids: list[uuid.UUID]
) -> dict[str, Any]:
    """Give the controller a moment to find the next leader: librdkafka that hears of none asks
    again only after a second.
    """
    apis = ctx.apis
    try:
        async with asyncio.timeout(DECISION_S):
            while _in_doubt(apis, names):
                await apis.metadata.acted(apis.metadata.image.index + 1)
    except TimeoutError:
        pass  # the answer says that there is no leader
    return await apis.runtime.slices.finish(_answer(ctx, request, names, {}, unknown_ids))


async def _create_and_answer(
    ctx: RequestContext,
    request: Any,
    names: list[str],
    missing: list[str],
    unknown_ids: list[uuid.UUID],
) -> dict[str, Any]:
    most = ctx.apis.config.current.auto_create_max_topics
    refused = dict.fromkeys(missing[most:], error_codes.LEADER_NOT_AVAILABLE)
    for name in missing[:most]:
        try:
            if name in INTERNAL_TOPICS:
                await create_internal_topic(ctx.apis, name)
            else:
                await create_topic(ctx.apis, name)
        except TopicAlreadyExists:
            continue
        except KeptError as error:
            refused[name] = error_codes.code_for(error)
            if isinstance(error, PolicyViolation):  # the answer has no place for the reason
                ctx.apis.open_files.refused(name, error)
    return await ctx.apis.runtime.slices.finish(_answer(ctx, request, names, refused, unknown_ids))


def _with_operations(request: Any, answer: dict[str, Any]) -> dict[str, Any]:
    """Add the operations that the client may do, where it asks for them: all, as in Kafka without
    an authorizer.
    """
    if getattr(request, "include_cluster_authorized_operations", False):
        answer["cluster_authorized_operations"] = CLUSTER_OPERATIONS
    if getattr(request, "include_topic_authorized_operations", False):
        for topic in answer["topics"]:
            if topic["error_code"] == error_codes.UNKNOWN_TOPIC_ID:
                continue
            topic["topic_authorized_operations"] = TOPIC_OPERATIONS
    return answer


def _answer(
    ctx: RequestContext,
    request: Any,
    names: list[str],
    refused: dict[str, int],
    unknown_ids: list[uuid.UUID],
) -> Steps[dict[str, Any]]:
    apis = ctx.apis
    image = apis.metadata.image
    topics: list[dict[str, Any]] = []
    for name in names:
        yield
        found = image.topics.get(name)
        if found is not None:
            topics.append((yield from _topic(ctx, image, found)))
        else:
            topics.append(
                {
                    "error_code": refused.get(name, missing_code(name)),
                    "name": name,
                    "topic_id": NO_ID,
                    "is_internal": name in INTERNAL_TOPICS,
                    "partitions": (),
                }
            )
    topics += [
        {
            "error_code": error_codes.UNKNOWN_TOPIC_ID,
            "name": None if ctx.api_version >= 12 else "",
            "topic_id": topic_id,
            "partitions": (),
        }
        for topic_id in unknown_ids
    ]
    brokers = []
    for broker_id in sorted(image.brokers):
        broker = image.brokers[broker_id]
        address = apis.addresses.broker(broker_id, ctx.listener_name)
        if address is not None and (not broker.fenced or apis.detector.lingers(broker_id)):
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
        "cluster_id": apis.identity.cluster_id,
        "controller_id": apis.identity.node_id,
        "topics": topics,
        "error_code": 0,
    }
    return _with_operations(request, answer)


def missing_code(name: str) -> int:
    """The error of a topic that is not there, or that no topic can be."""
    from kept.cluster.controller.topics import check_topic_name

    try:
        check_topic_name(name)
    except KeptError as error:
        return error_codes.code_for(error)
    return error_codes.UNKNOWN_TOPIC_OR_PARTITION


def offline_replicas(
    apis: KafkaApis, image: Image, topic: str, record: PartitionRecord
) -> tuple[int, ...]:
    """The replicas whose broker is fenced or unknown, or whose directory here failed."""
    brokers = image.brokers
    return tuple(
        broker_id
        for broker_id in record.replicas
        if broker_id not in brokers
        or brokers[broker_id].fenced
        or (broker_id == apis.identity.node_id and apis.table.is_offline(topic, record.partition))
    )


def _topic(ctx: RequestContext, image: Image, topic: TopicImage) -> Steps[dict[str, Any]]:
    detector = ctx.apis.detector
    partitions = []
    for number, record in enumerate(topic.partitions):
        yield
        offline = offline_replicas(ctx.apis, image, topic.name, record)
        leader = record.leader
        if leader in offline or detector.seems_gone(leader):
            leader = -1
        partitions.append(
            {
                "error_code": 0 if leader >= 0 else error_codes.LEADER_NOT_AVAILABLE,
                "partition_index": number,
                "leader_id": leader,
                "leader_epoch": record.leader_epoch,
                "replica_nodes": record.replicas,
                "isr_nodes": record.isr,
                "offline_replicas": offline,
            }
        )
    return {
        "error_code": 0,
        "name": topic.name,
        "topic_id": topic.topic_id,
        "is_internal": topic.name in INTERNAL_TOPICS,
        "partitions": partitions,
    }
