"""OffsetCommit, OffsetFetch, OffsetDelete: topics are looked up here, ``kept.node.groups`` does
the rest.

Topics and partitions must exist to be committed (not to be fetched). From v10 on requests name
topics by id.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from kept.client.protocol import milliseconds
from kept.node.groups import events as ev
from kept.node.groups.records import NO_TOPIC_ID
from kept.node.groups.requests import Answer, ask, coordinator
from kept.node.groups.shard import group_error
from kept.node.groups.standing import is_in_doubt, still_leads
from kept.storage.errors import RetriableError

if TYPE_CHECKING:
    from kept.cluster.image import TopicImage
    from kept.node.api import RequestContext

TOPIC_IDS_FROM: Final = 10
"""Version of OffsetCommit and OffsetFetch that names topics by id."""
BATCHED_FROM: Final = 8
"""OffsetFetch asks for several groups from this version on."""
TOP_LEVEL_ERROR_FROM: Final = 2
"""Before, an OffsetFetch that fails says so in every partition."""

Refused = list[tuple[int, ErrorCode]]


def _topic(ctx: RequestContext, topic: Any) -> tuple[str, uuid.UUID, TopicImage | None]:
    """(name, id, the topic) of a topic in a request; name empty for an unknown id."""
    if ctx.api_version >= TOPIC_IDS_FROM:
        topic_id = topic.topic_id or NO_TOPIC_ID
        found = ctx.node.image.topics_by_id.get(topic_id)
        return (found.name if found else ""), topic_id, found
    found = ctx.node.image.topics.get(topic.name)
    return topic.name, (found.topic_id if found else NO_TOPIC_ID), found


def offset_commit(ctx: RequestContext, request: Any) -> Answer:
    """Commit offsets; what does not exist is refused, the rest goes to the group."""
    valid: list[ev.CommitTopic] = []
    refused: dict[tuple[str, uuid.UUID], Refused] = {}
    for topic in request.topics:
        name, topic_id, found = _topic(ctx, topic)
        if found is None:
            by_id = ctx.api_version >= TOPIC_IDS_FROM
            error = ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
            for p in topic.partitions:
                refused.setdefault((name, topic_id), []).append((p.partition_index, error))
            continue
        good = []
        for p in topic.partitions:
            if 0 <= p.partition_index < len(found.partitions):
                epoch = getattr(p, "committed_leader_epoch", -1)
                good.append(
                    ev.CommitPartition(
                        p.partition_index, p.committed_offset, epoch, p.committed_metadata
                    )
                )
            else:
                error = ErrorCode.unknown_topic_or_partition
                refused.setdefault((name, topic_id), []).append((p.partition_index, error))
        if good:
            valid.append(ev.CommitTopic(name, topic_id, tuple(good)))

    def answer(result: ev.CommitResult) -> dict[str, Any]:
        return _committed(valid, refused, result)

    if not valid:
        return answer(ev.CommitResult())
    retention = getattr(request, "retention_time", None)

    def event(now_ms: int, number: int) -> ev.CommitOffsets:
        return ev.CommitOffsets(
            now_ms, number, request.group_id, tuple(valid), request.member_id,
            request.generation_id_or_member_epoch, getattr(request, "group_instance_id", None),
            -1 if retention is None else milliseconds(retention), ctx.api_version >= 9,
        )  # fmt: skip

    def refuse(error: ErrorCode) -> dict[str, Any]:
        return answer(ev.CommitResult(error))

    return ask(ctx, request.group_id, event, answer, refuse, needs_name=False)


def _committed(
    valid: list[ev.CommitTopic],
    refused: dict[tuple[str, uuid.UUID], Refused],
    result: ev.CommitResult,
) -> dict[str, Any]:
    merged: dict[tuple[str, uuid.UUID], Refused] = {}
    if result.error is not ev.NO_ERROR:
        for topic in valid:
            merged.setdefault((topic.name, topic.topic_id), []).extend(
                (p.partition, result.error) for p in topic.partitions
            )
    for name, topic_id, partitions in result.topics:
        merged.setdefault((name, topic_id), []).extend(partitions)
    for key, more in refused.items():
        merged.setdefault(key, []).extend(more)
    return {
        "topics": [
            {
                "name": name,
                "topic_id": topic_id,
                "partitions": [{"partition_index": p, "error_code": error} for p, error in done],
            }
            for (name, topic_id), done in merged.items()
        ]
    }


def offset_fetch(ctx: RequestContext, request: Any) -> Answer:
    """Committed offsets of one group (up to v7) or several."""
    stable = getattr(request, "require_stable", False)
    if ctx.api_version < BATCHED_FROM:
        return _fetch_group(ctx, request, stable)
    answers = [_fetch_group(ctx, group, stable) for group in request.groups]
    ready = [answer for answer in answers if isinstance(answer, dict)]
    if len(ready) == len(answers):
        return {"groups": ready}
    return asyncio.ensure_future(_gathered(answers), loop=ctx.node.loop)


async def _gathered(answers: list[Answer]) -> dict[str, Any]:
    groups = [answer if isinstance(answer, dict) else await answer for answer in answers]
    return {"groups": groups}


def _fetch_group(ctx: RequestContext, group: Any, stable: bool) -> Answer:
    unknown: list[dict[str, Any]] = []
    topics: list[ev.FetchTopic] | None = None
    if group.topics is not None:
        topics = []
        for topic in group.topics:
            name, topic_id, _ = _topic(ctx, topic)
            if not name and ctx.api_version >= TOPIC_IDS_FROM:
                unknown.append(_unfetched(topic, topic_id, ErrorCode.unknown_topic_id))
            elif ctx.api_version >= TOPIC_IDS_FROM:
                topics.append(ev.FetchTopic(name, tuple(topic.partition_indexes), topic_id))
            else:
                topics.append(ev.FetchTopic(name, tuple(topic.partition_indexes)))
    asked = None if topics is None else tuple(topics)

    def answer(result: ev.FetchResult) -> dict[str, Any]:
        return _fetched(ctx, group, result, unknown)

    def refuse(error: ErrorCode) -> dict[str, Any]:
        return _fetch_refused(ctx, group, error)

    def event(now_ms: int, number: int) -> ev.FetchOffsets:
        return ev.FetchOffsets(now_ms, number, group.group_id, asked, stable)

    def asked_now() -> Answer:
        return ask(ctx, group.group_id, event, answer, refuse, needs_name=False)

    if not is_in_doubt(ctx.node):
        return asked_now()

    async def asked_if_it_leads() -> dict[str, Any]:
        try:
            shard = coordinator(ctx).shard(group.group_id)
        except RetriableError as error:
            return refuse(group_error(error))
        if not await still_leads(ctx.node, shard):
            return refuse(ErrorCode.not_coordinator)
        found = asked_now()
        return found if isinstance(found, dict) else await found

    return asyncio.ensure_future(asked_if_it_leads(), loop=ctx.node.loop)


def _fetched(
    ctx: RequestContext, group: Any, result: ev.FetchResult, unknown: list[dict[str, Any]]
) -> dict[str, Any]:
    if result.error is not ev.NO_ERROR:
        return _fetch_refused(ctx, group, result.error)
    topics = []
    for name, asked_id, offsets in result.topics:
        topic_id = asked_id
        if topic_id == NO_TOPIC_ID and ctx.api_version >= TOPIC_IDS_FROM:
            # All offsets were asked for: those of topics that are gone can't be named.
            found = ctx.node.image.topics.get(name)
            if found is None:
                continue
            topic_id = found.topic_id
        partitions = [
            {
                "partition_index": f.partition,
                "committed_offset": f.offset,
                "committed_leader_epoch": f.leader_epoch,
                "metadata": f.metadata,
                "error_code": f.error,
            }
            for f in offsets
        ]
        topics.append({"name": name, "topic_id": topic_id, "partitions": partitions})
    return {"group_id": group.group_id, "topics": topics + unknown, "error_code": ev.NO_ERROR}


def _unfetched(topic: Any, topic_id: uuid.UUID, error: ErrorCode) -> dict[str, Any]:
    partitions = [
        {
            "partition_index": partition,
            "committed_offset": -1,
            "committed_leader_epoch": -1,
            "metadata": "",
            "error_code": error,
        }
        for partition in topic.partition_indexes
    ]
    return {"name": getattr(topic, "name", ""), "topic_id": topic_id, "partitions": partitions}


def _fetch_refused(ctx: RequestContext, group: Any, error: ErrorCode) -> dict[str, Any]:
    if error is ErrorCode.coordinator_not_available:
        # Consumers before 3.9 do not expect it here.
        error = ErrorCode.not_coordinator
    topics: list[dict[str, Any]] = []
    if ctx.api_version < TOP_LEVEL_ERROR_FROM:
        topics = [_unfetched(topic, NO_TOPIC_ID, error) for topic in group.topics]
    return {"group_id": group.group_id, "topics": topics, "error_code": error}


def offset_delete(ctx: RequestContext, request: Any) -> Answer:
    """Delete offsets of topics that no member of the group reads."""
    valid: list[tuple[str, tuple[int, ...]]] = []
    refused: dict[str, Refused] = {}
    for topic in request.topics:
        found = ctx.node.image.topics.get(topic.name)
        count = len(found.partitions) if found else 0
        indexes = [p.partition_index for p in topic.partitions]
        good = tuple(index for index in indexes if 0 <= index < count)
        bad = [i for i in indexes if not 0 <= i < count]
        if bad:
            error = ErrorCode.unknown_topic_or_partition
            refused[topic.name] = [(index, error) for index in bad]
        if good:
            valid.append((topic.name, good))

    def answer(result: ev.DeleteOffsetsResult) -> dict[str, Any]:
        merged = {name: list(done) for name, done in result.topics}
        for name, more in refused.items():
            merged.setdefault(name, []).extend(more)
        topics = [
            {
                "name": name,
                "partitions": [{"partition_index": p, "error_code": error} for p, error in done],
            }
            for name, done in merged.items()
        ]
        failed = result.error is not ev.NO_ERROR
        return {"error_code": result.error, "topics": [] if failed else topics}

    def event(now_ms: int, number: int) -> ev.DeleteOffsets:
        return ev.DeleteOffsets(now_ms, number, request.group_id, tuple(valid))

    return ask(
        ctx, request.group_id, event, answer, lambda error: answer(ev.DeleteOffsetsResult(error))
    )
