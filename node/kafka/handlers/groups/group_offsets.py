"""OffsetCommit, TxnOffsetCommit, OffsetFetch, OffsetDelete: topics are looked up here,
``kept.node.coordinator.groups`` does the rest.

Topics and partitions must exist to be committed (not to be fetched). From v10 on requests name
topics by id.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from kept.client.protocol.messages import milliseconds
from kept.cluster.security.acls import AclOperation, AclResourceType
from kept.node.coordinator.common.leadership_check import still_leads
from kept.node.coordinator.common.shard import coordinator_error
from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.records import NO_TOPIC_ID
from kept.node.kafka.handlers.groups.group_requests import HandlerResult, submit
from kept.node.kafka.handlers.transactions.transactional_commits import CommitVerification, known_to
from kept.node.runtime.time_slices import Pace
from kept.storage.errors import KeptError, RetriableError

if TYPE_CHECKING:
    from kept.cluster.metadata.image import TopicImage
    from kept.node.config.live_config import LiveConfig
    from kept.node.coordinator.common.events import TransactionalProducer
    from kept.node.coordinator.groups.coordinator import GroupCoordinator
    from kept.node.coordinator.transactions.verifier import Verifier
    from kept.node.kafka.api import RequestContext
    from kept.node.kafka.fetch_sessions import FetchSessions
    from kept.node.metadata.cluster_link import ClusterLink
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.runtime.runtime import Runtime
    from kept.steps import Steps

TOPIC_IDS_FROM: Final = 10
"""Version of OffsetCommit and OffsetFetch that names topics by id."""
BATCHED_FROM: Final = 8
"""OffsetFetch asks for several groups from this version on."""
TOP_LEVEL_ERROR_FROM: Final = 2
"""Before, an OffsetFetch that fails says so in every partition."""

PART: Final = 200
"""Partitions that a group's core is given at a stretch."""

Refused = list[tuple[int, ErrorCode]]


class _Parts:
    """Partitions by topic, in parts of at most :data:`PART`; ``make`` makes a topic of its name, id
    and partitions.
    """

    def __init__(self, make: Callable[[str, uuid.UUID, tuple[Any, ...]], Any]) -> None:
        self._make = make
        self._parts: list[list[tuple[tuple[str, uuid.UUID], Sequence[Any]]]] = []
        self._left = 0

    @property
    def any(self) -> bool:
        """Whether there are topics."""
        return bool(self._parts)

    def add(self, topic: tuple[str, uuid.UUID], partitions: Sequence[Any]) -> None:
        """Add a topic with its partitions; one with many goes on in the next part."""
        begin = 0
        while True:
            if self._left <= 0:
                self._parts.append([])
                self._left = PART
            more = partitions[begin : begin + self._left]
            self._parts[-1].append((topic, more))
            self._left -= max(len(more), 1)
            begin += len(more)
            if begin >= len(partitions):
                return

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for part in self._parts:
            yield tuple(
                self._make(name, topic_id, tuple(partitions))
                for (name, topic_id), partitions in part
            )


@dataclass(frozen=True, slots=True)
class GroupOffsetsHandler:
    """Committed offsets."""

    runtime: Runtime
    config: LiveConfig
    metadata: MetadataLog
    cluster_link: ClusterLink
    fetch_sessions: FetchSessions
    groups: GroupCoordinator
    verifier: Verifier

    def _topic(self, ctx: RequestContext, topic: Any) -> tuple[str, uuid.UUID, TopicImage | None]:
        """(name, id, the topic) of a topic in a request; name empty for an unknown id."""
        if ctx.api_version >= TOPIC_IDS_FROM:
            topic_id = topic.topic_id or NO_TOPIC_ID
            image = self.metadata.image.topics_by_id.get(topic_id)
            # The id of the image: every offset that is stored for the topic shares it.
            return ("", topic_id, None) if image is None else (image.name, image.topic_id, image)
        image = self.metadata.image.topics.get(topic.name)
        return topic.name, (image.topic_id if image else NO_TOPIC_ID), image

    def offset_commit(self, ctx: RequestContext, request: Any) -> Steps[HandlerResult]:
        """Commit offsets; what does not exist is refused, the rest goes to the group, in parts
        where there is much of it.
        """
        parts, refused = yield from self._existing(ctx, request)
        answers = []
        for valid in parts:
            answers.append(self._commit(ctx, request, valid))
            yield
        return self._merged(answers, lambda done: _committed([*done, refused]))

    def txn_offset_commit(self, ctx: RequestContext, request: Any) -> Steps[HandlerResult]:
        """Commit offsets in a transaction; the first ones when its coordinator said that it is
        open.
        """
        parts, refused = yield from self._existing(ctx, request)
        if not parts.any:
            return _committed([refused])
        commit = self._commit_in_transaction(ctx, request, parts, refused)
        return asyncio.ensure_future(commit, loop=self.runtime.loop)

    async def _commit_in_transaction(
        self, ctx: RequestContext, request: Any, parts: _Parts, refused: dict[Any, Refused]
    ) -> dict[str, Any]:
        producer: TransactionalProducer | ErrorCode = ErrorCode.invalid_group_id
        if request.group_id:
            verification = CommitVerification(self.runtime, self.verifier)
            try:
                shard = self.groups.shards.shard(request.group_id)
                producer = await verification.producer_of(request, ctx.api_version, shard)
            except KeptError as error:
                producer = coordinator_error(error)
        done: list[dict[Any, Refused]] = [refused]
        waiting = []
        pace = Pace()
        for valid in parts:
            if isinstance(producer, ErrorCode):
                done.append(_outcome(valid, ev.CommitResult(producer)))
            else:
                waiting.append(self._commit(ctx, request, valid, producer))
            await pace.checkpoint()
        done += [part if isinstance(part, dict) else await part for part in waiting]
        for outcome in done:
            for partitions in outcome.values():
                partitions[:] = [(p, known_to(ctx.api_version, error)) for p, error in partitions]
        return _committed(done)

    def _existing(
        self, ctx: RequestContext, request: Any
    ) -> Steps[tuple[_Parts, dict[Any, Refused]]]:
        """Partitions to commit, in parts, and the others: these do not exist."""
        parts = _Parts(ev.CommitTopic)
        refused: dict[tuple[str, uuid.UUID], Refused] = {}
        for topic in request.topics:
            name, topic_id, image = self._topic(ctx, topic)
            if image is None:
                by_id = ctx.api_version >= TOPIC_IDS_FROM
                error = (
                    ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
                )
                for p in topic.partitions:
                    refused.setdefault((name, topic_id), []).append((p.partition_index, error))
                    yield
                continue
            good = []
            for p in topic.partitions:
                yield
                if 0 <= p.partition_index < len(image.partitions):
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
                parts.add((name, topic_id), good)
        return parts, refused

    def _commit(
        self,
        ctx: RequestContext,
        request: Any,
        valid: tuple[ev.CommitTopic, ...],
        producer: TransactionalProducer | None = None,
    ) -> dict[Any, Refused] | asyncio.Future[dict[Any, Refused]]:
        """What became of each partition, by topic."""
        retention = getattr(request, "retention_time", None)
        if producer is None:
            generation = request.generation_id_or_member_epoch
        else:
            generation = getattr(request, "generation_id", ev.UNKNOWN_GENERATION)

        def event(number: int) -> ev.CommitOffsets:
            return ev.CommitOffsets(
                number,
                request.group_id,
                valid,
                getattr(request, "member_id", ev.UNKNOWN_MEMBER_ID),
                generation,
                getattr(request, "group_instance_id", None),
                -1 if retention is None else milliseconds(retention),
                ctx.api_version >= 9,
                producer,
            )

        def answer(result: ev.CommitResult) -> dict[Any, Refused]:
            return _outcome(valid, result)

        def refuse(error: ErrorCode) -> dict[Any, Refused]:
            return answer(ev.CommitResult(error))

        return submit(
            self.groups.shards, ctx, request.group_id, event, answer, refuse, needs_name=False
        )

    def offset_fetch(self, ctx: RequestContext, request: Any) -> Steps[HandlerResult]:
        """Committed offsets of one group (up to v7) or several."""
        stable = getattr(request, "require_stable", False)
        batched = ctx.api_version >= BATCHED_FROM
        groups = _once(request.groups) if batched else [request]
        visible = yield from ctx.permitted(
            AclOperation.DESCRIBE, AclResourceType.GROUP, [g.group_id for g in groups], audited=True
        )
        answers: list[Any] = []
        for group in groups:
            if group.group_id in visible:
                answers.append((yield from self._fetch_group(ctx, group, stable)))
            else:
                error = ErrorCode.group_authorization_failed
                answers.append(self._fetch_refused(ctx, group, error))
            yield
        return self._merged(answers, lambda done: {"groups": done} if batched else done[0])

    def _merged(
        self, answers: list[Any], merge: Callable[[list[Any]], dict[str, Any]]
    ) -> HandlerResult:
        """What ``merge`` makes of all answers: now, or when they are there."""
        if all(isinstance(answer, dict) for answer in answers):
            return merge(answers)

        async def gathered() -> dict[str, Any]:
            return merge([one if isinstance(one, dict) else await one for one in answers])

        return asyncio.ensure_future(gathered(), loop=self.runtime.loop)

    def _fetch_group(self, ctx: RequestContext, group: Any, stable: bool) -> Steps[HandlerResult]:
        """One group's offsets, in parts where many are asked for. Topics that may not be described
        are left out of all topics, and refused where they are named. Also by name only offsets of
        the topic that has it now are shown: those of one before it may still be being deleted.
        """
        unknown: list[dict[str, Any]] = []
        parts = _Parts(_fetch_topic)
        for committed, partitions in self._all_committed(group):
            if ctx.may(AclOperation.DESCRIBE, AclResourceType.TOPIC, committed, audited=False):
                image = self.metadata.image.topics.get(committed)
                parts.add((committed, image.topic_id if image else NO_TOPIC_ID), partitions)
            yield
        for topic in group.topics or ():
            yield
            name, topic_id, _ = self._topic(ctx, topic)
            if not name and ctx.api_version >= TOPIC_IDS_FROM:
                unknown.append(_unfetched(topic, topic_id, ErrorCode.unknown_topic_id))
                continue
            if not ctx.may(AclOperation.DESCRIBE, AclResourceType.TOPIC, name):
                code = ErrorCode.topic_authorization_failed
                unknown.append(_unfetched(topic, topic_id, code))
                continue
            parts.add((name, topic_id), topic.partition_indexes)
        answers = []
        for topics in parts if parts.any else ((),):
            answers.append(self._fetch_part(ctx, group, topics, stable))
            for _ in range(sum(len(topic.partitions) for topic in topics)):
                yield  # each is an item of the answer

        def merge(groups: list[dict[str, Any]]) -> dict[str, Any]:
            topics: list[dict[str, Any]] = []
            for answer in groups:
                if answer["error_code"] is not ev.NO_ERROR:
                    return self._fetch_refused(ctx, group, answer["error_code"])
                first, *others = answer["topics"] or [None]
                if topics and first is not None and first["name"] == topics[-1]["name"]:
                    topics[-1]["partitions"] += first["partitions"]  # the part before ended in it
                elif first is not None:
                    topics.append(first)
                topics += others
            return {
                "group_id": group.group_id,
                "topics": topics + unknown,
                "error_code": ev.NO_ERROR,
            }

        return self._merged(answers, merge)

    def _all_committed(self, group: Any) -> list[tuple[str, tuple[int, ...]]]:
        """Topics with partitions of which the group has offsets, where all are asked for."""
        if group.topics is not None:
            return []
        try:
            committed = self.groups.shards.shard(group.group_id).core.committed_of(group.group_id)
        except KeptError:
            return []  # the group's core is asked nevertheless, and refused with the reason
        return [(name, tuple(partitions)) for name, partitions in committed.items()]

    def _fetch_part(
        self, ctx: RequestContext, group: Any, asked: tuple[ev.OffsetFetchTopic, ...], stable: bool
    ) -> HandlerResult:
        def answer(result: ev.FetchResult) -> dict[str, Any]:
            return self._fetched(ctx, group, result)

        def refuse(error: ErrorCode) -> dict[str, Any]:
            return self._fetch_refused(ctx, group, error)

        def event(number: int) -> ev.FetchOffsets:
            return ev.FetchOffsets(number, group.group_id, asked, stable)

        def asked_now() -> HandlerResult:
            return submit(
                self.groups.shards, ctx, group.group_id, event, answer, refuse, needs_name=False
            )

        if not self.cluster_link.may_be_fenced:
            return asked_now()

        async def asked_if_it_leads() -> dict[str, Any]:
            try:
                shard = self.groups.shards.shard(group.group_id)
            except RetriableError as error:
                return refuse(coordinator_error(error))
            config = self.config.current
            if not await still_leads(
                self.runtime, config, self.metadata, self.fetch_sessions, shard
            ):
                return refuse(ErrorCode.not_coordinator)
            found = asked_now()
            return found if isinstance(found, dict) else await found

        return asyncio.ensure_future(asked_if_it_leads(), loop=self.runtime.loop)

    def _fetched(self, ctx: RequestContext, group: Any, result: ev.FetchResult) -> dict[str, Any]:
        if result.error is not ev.NO_ERROR:
            return self._fetch_refused(ctx, group, result.error)
        topics = []
        for name, topic_id, fetched in result.topics:
            offsets: Sequence[ev.FetchedOffset] = fetched
            if topic_id == NO_TOPIC_ID and ctx.api_version >= TOPIC_IDS_FROM:
                continue  # all offsets were asked for: those of topics that are gone can't be named
            if group.topics is None:
                offsets = [f for f in fetched if f.offset >= 0 or f.error is not ev.NO_ERROR]
                if not offsets:
                    continue
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
        return {"group_id": group.group_id, "topics": topics, "error_code": ev.NO_ERROR}

    def _fetch_refused(self, ctx: RequestContext, group: Any, error: ErrorCode) -> dict[str, Any]:
        if error is ErrorCode.coordinator_not_available:
            # Consumers before 3.9 do not expect it here.
            error = ErrorCode.not_coordinator
        topics: list[dict[str, Any]] = []
        if ctx.api_version < TOP_LEVEL_ERROR_FROM:
            topics = [_unfetched(topic, NO_TOPIC_ID, error) for topic in group.topics]
        return {"group_id": group.group_id, "topics": topics, "error_code": error}

    def offset_delete(self, ctx: RequestContext, request: Any) -> Steps[HandlerResult]:
        """Delete offsets of topics that no member of the group reads, in parts where there are
        many.
        """
        parts = _Parts(lambda name, _, partitions: (name, partitions))
        refused: dict[str, Refused] = {}
        for topic in request.topics:
            yield
            image = self.metadata.image.topics.get(topic.name)
            count = len(image.partitions) if image else 0
            indexes = [p.partition_index for p in topic.partitions]
            good = tuple(index for index in indexes if 0 <= index < count)
            bad = [i for i in indexes if not 0 <= i < count]
            if bad:
                error = ErrorCode.unknown_topic_or_partition
                refused.setdefault(topic.name, []).extend((index, error) for index in bad)
            if good:
                parts.add((topic.name, NO_TOPIC_ID), good)
        answers = []
        for valid in parts if parts.any else ((),):
            answers.append(self._delete(ctx, request.group_id, valid))
            yield
        return self._merged(answers, lambda done: _offsets_deleted(done, refused))

    def _delete(
        self, ctx: RequestContext, group_id: str, valid: tuple[tuple[str, tuple[int, ...]], ...]
    ) -> HandlerResult:
        def event(number: int) -> ev.DeleteOffsets:
            return ev.DeleteOffsets(number, group_id, valid)

        def answer(result: ev.DeleteOffsetsResult) -> dict[str, Any]:
            return {"error_code": result.error, "topics": result.topics}

        def refuse(error: ErrorCode) -> dict[str, Any]:
            return answer(ev.DeleteOffsetsResult(error))

        return submit(self.groups.shards, ctx, group_id, event, answer, refuse)


def _offsets_deleted(parts: list[dict[str, Any]], refused: dict[str, Refused]) -> dict[str, Any]:
    """What became of each partition, or the error that all or some have met."""
    merged: dict[str, Refused] = {}
    for part in parts:
        if part["error_code"] is not ev.NO_ERROR:
            return {"error_code": part["error_code"], "topics": []}
        for name, done in part["topics"]:
            merged.setdefault(name, []).extend(done)
    for name, more in refused.items():
        merged.setdefault(name, []).extend(more)
    topics = [
        {
            "name": name,
            "partitions": [{"partition_index": p, "error_code": error} for p, error in done],
        }
        for name, done in merged.items()
    ]
    return {"error_code": ev.NO_ERROR, "topics": topics}


def _outcome(valid: tuple[ev.CommitTopic, ...], result: ev.CommitResult) -> dict[Any, Refused]:
    """What became of each partition, by topic."""
    done: dict[Any, Refused] = {}
    if result.error is not ev.NO_ERROR:
        for topic in valid:
            done.setdefault((topic.name, topic.topic_id), []).extend(
                (p.partition, result.error) for p in topic.partitions
            )
    for name, topic_id, partitions in result.topics:
        done.setdefault((name, topic_id), []).extend(partitions)
    return done


def _committed(outcomes: list[dict[Any, Refused]]) -> dict[str, Any]:
    merged: dict[tuple[str, uuid.UUID], Refused] = {}
    for outcome in outcomes:
        for key, more in outcome.items():
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


def _once(groups: Iterable[Any]) -> list[Any]:
    """The groups without those that are asked for again: else a small request has an answer
    without bound.
    """
    return list({(group.group_id, group.topics): group for group in groups}.values())


def _fetch_topic(
    name: str, topic_id: uuid.UUID, partitions: tuple[int, ...]
) -> ev.OffsetFetchTopic:
    return ev.OffsetFetchTopic(name, partitions, topic_id)


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
