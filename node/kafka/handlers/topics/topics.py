"""CreateTopics, DeleteTopics, CreatePartitions, DeleteRecords.

Decisions are those of ``kept.cluster.controller.topics``; this module takes requests apart, puts
all topics of one request into one entry of the metadata log, and answers when that is durable and
applied here. Messages and order of checks are Kafka's (``ReplicationControlManager``,
``ControllerApis``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID, uuid4

from kept.client.protocol.messages import Values
from kept.cluster.controller import topics as controller_topics
from kept.cluster.controller.topics import (
    MAX_PARTITIONS_PER_REQUEST,
    CreateTopic,
    TopicDefaults,
)
from kept.cluster.metadata.image import Image, TopicImage
from kept.cluster.metadata.records import (
    ConfigRecord,
    MetadataRecord,
    PartitionRecord,
    RemoveTopicRecord,
    ResourceType,
)
from kept.cluster.security.acls import AclOperation, AclResourceType
from kept.node.kafka.handlers.topics.config_schema import check_topic, entry_values, topic_entries
from kept.node.kafka.metadata_changes import Decided
from kept.node.metadata import internal_topics
from kept.node.metadata.internal_topics import COORDINATED
from kept.node.runtime.clock import monotonic_ms
from kept.node.runtime.error_codes import TOPIC_AUTHORIZATION_FAILED, error_values
from kept.node.runtime.fd_quota import FdQuota
from kept.node.security.access import AUTHORIZATION_MESSAGES, CLUSTER
from kept.node.security.client_quotas import ControllerMutations
from kept.steps import Steps
from kept.storage.errors import (
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidRequest,
    KeptError,
    PolicyViolation,
    TopicAuthorizationFailed,
    TopicDeletionDisabled,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from kept.storage.layout import encode_uuid

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.kafka.api import RequestContext
    from kept.node.kafka.metadata_changes import MetadataChanges
    from kept.node.runtime.fd_quota import OpenFiles
    from kept.node.security.client_quotas import ClientQuotas

_DUPLICATE: Final = "Duplicate topic name."

Wanted = TypeVar("Wanted")
Outcome = tuple[Values, Sequence[MetadataRecord]]
"""(answer, records)"""
Decision = Callable[[Image, Wanted], Outcome | Steps[Outcome]]


def _each(  # noqa: PLR0917
    image: Image,
    wanted: Iterable[Wanted],
    decision: Decision[Wanted],
    name_of: Callable[[Wanted], Values],
    validate_only: bool,
    mutations: ControllerMutations,
    *,
    room: FdQuota | None = None,
) -> Steps[tuple[list[Values], list[MetadataRecord]]]:
    """Decide one after the other, each on the image that those before it leave, and within the
    room there is. (A decision's records fit the image that it was taken on.)
    """
    answers: list[Values] = []
    records: list[MetadataRecord] = []
    decided: Sequence[MetadataRecord] = ()
    for item in wanted:
        yield
        if decided:
            image, _ = yield from image.apply_in_steps(decided)
            decided = ()
            yield
        try:
            outcome = decision(image, item)
            answer, more = (yield from outcome) if isinstance(outcome, Generator) else outcome
            mutations.record(_partitions_changed(image, more))
            if room is not None:
                yield
                room.reserve(more)
        except KeptError as error:
            answers.append({**name_of(item), **error_values(error)})
            continue
        answers.append(answer)
        records.extend(more)
        decided = more
    return answers, [] if validate_only else records


def _partitions_changed(image: Image, records: Iterable[MetadataRecord]) -> int:
    """How many partitions records create or delete."""
    count = 0
    for record in records:
        if isinstance(record, PartitionRecord):
            count += 1
        elif isinstance(record, RemoveTopicRecord):
            count += len(image.topics_by_id[record.topic_id].partitions)
    return count


def _without_twins(topics: Iterable[Any]) -> tuple[list[Any], list[Values]]:
    """Topics that are named once, and the errors for those that are not."""
    topics = list(topics)
    counts = Counter(topic.name for topic in topics)
    error = InvalidRequest(_DUPLICATE)
    twins: list[Values] = [
        {"name": name, **error_values(error)} for name, count in counts.items() if count > 1
    ]
    return [topic for topic in topics if counts[topic.name] == 1], twins


@dataclass(frozen=True, slots=True)
class TopicsHandler:
    """Creates, deletes and grows topics."""

    config: LiveConfig
    open_files: OpenFiles
    metadata_changes: MetadataChanges
    quotas: ClientQuotas

    def _mutations(self, ctx: RequestContext, strict_since: int) -> ControllerMutations:
        """What this client may change, in partitions; nodes may change what they want to."""
        if ctx.session.is_node:
            return ControllerMutations(None, monotonic_ms(), strict=True)
        principal, strict = ctx.session.principal, ctx.api_version >= strict_since
        return self.quotas.mutations(principal, ctx.client_id, monotonic_ms(), strict=strict)

    async def create_topics(self, ctx: RequestContext, request: Any) -> Values:
        """CreateTopics v2-7: defaults for -1, manual assignment, validate_only.

        The id of a topic comes from that of the try: a request that was forwarded may be tried
        again after it was done and the answer lost, and finds the topic that it made itself. Each
        try has an id of its own, since the topic may have been deleted meanwhile, and no id is used
        twice.
        """
        topics, answers = _without_twins(request.topics)
        tries = ctx.tries or (uuid4(),)
        mutations = self._mutations(ctx, 6)

        def decision(
            image: Image,
        ) -> Decided[list[Values]] | Steps[Decided[list[Values]]]:
            if sum(_partitions_wanted(topic) for topic in topics) > MAX_PARTITIONS_PER_REQUEST:
                error = PolicyViolation("Excessively large number of partitions per request.")
                return [_uncreated(topic) | error_values(error) for topic in topics], []
            return _each(
                image,
                topics,
                lambda image, topic: self._create(ctx, image, topic, tries),
                _uncreated,
                request.validate_only,
                mutations,
                room=FdQuota(self.open_files, image),
            )

        answers = [{**_NOT_CREATED, **answer} for answer in answers]
        answers += await self.metadata_changes.decide(decision)
        return {"throttle_time": mutations.throttle_ms, "topics": answers}

    def _create(
        self, ctx: RequestContext, image: Image, topic: Any, tries: Sequence[UUID]
    ) -> Steps[Outcome]:
        ids = [_topic_id(seed, topic.name) for seed in tries]
        made = image.topics.get(topic.name)
        if made is not None and made.topic_id in ids:
            given = image.config(ResourceType.TOPIC, topic.name)
            counts = len(made.partitions), len(made.partitions[0].replicas)
            return self._created(ctx, made.name, made.topic_id, counts, given), []
        topic_id = ids[-1]
        assignments: dict[int, Sequence[int]] = {}
        for entry in topic.assignments:
            if entry.partition_index in assignments:
                raise InvalidReplicaAssignment(
                    "Found multiple manual partition assignments for partition "
                    f"{entry.partition_index}"
                )
            assignments[entry.partition_index] = entry.broker_ids
        config = self.config.current
        settings = {entry.name: entry.value for entry in topic.configs}
        defaults = TopicDefaults(config.num_partitions, config.default_replication_factor)
        if topic.name in COORDINATED:
            settings = internal_topics.settings(topic.name, config, settings)
            defaults = internal_topics.defaults(topic.name, image, config)
        records = yield from controller_topics.create_topic_in_steps(
            image,
            CreateTopic(
                topic.name,
                topic_id,
                topic.num_partitions,
                topic.replication_factor,
                assignments,
                settings,
            ),
            defaults,
            lambda values: check_topic(config, values),
        )
        given = {
            record.name: record.value
            for record in records
            if isinstance(record, ConfigRecord) and record.value is not None
        }
        counts = controller_topics.topic_counts(records)
        return self._created(ctx, topic.name, topic_id, counts, given), records

    def _created(
        self,
        ctx: RequestContext,
        name: str,
        topic_id: UUID,
        counts: tuple[int, int],
        given: Mapping[str, str],
    ) -> Values:
        created = {**_NOT_CREATED, "name": name, "topic_id": topic_id, **error_values(None)}
        if not ctx.may(AclOperation.DESCRIBE_CONFIGS, AclResourceType.TOPIC, name, audited=False):
            return {**created, "topic_config_error_code": TOPIC_AUTHORIZATION_FAILED}
        return {
            **created,
            "num_partitions": counts[0],
            "replication_factor": counts[1],
            "configs": [entry_values(e) for e in topic_entries(self.config.current, given)],
        }

    async def delete_topics(self, ctx: RequestContext, request: Any) -> Values:
        """DeleteTopics v1-6: by name, or by name or id."""
        if ctx.api_version >= 6:
            wanted = [(topic.name, topic.topic_id) for topic in request.topics]
        else:
            wanted = [(name, None) for name in request.topic_names]

        mutations = self._mutations(ctx, 5)

        def decision(image: Image) -> Steps[Decided[list[Values]]]:
            resolved, answers = yield from _resolve(ctx, image, wanted)
            if not self.config.current.delete_topic_enable:
                why = "Topic deletion is disabled: delete.topic.enable is false."
                error = InvalidRequest(why) if ctx.api_version < 3 else TopicDeletionDisabled(why)
                refused: list[Values] = [
                    {"name": name, "topic_id": topic_id, **error_values(error)}
                    for name, topic_id in wanted
                ]
                return refused, []
            more, records = yield from _each(
                image, resolved, _delete, lambda one: one, False, mutations
            )
            return answers + more, records

        responses = await self.metadata_changes.decide(decision)
        if not ctx.session.is_unrestricted:
            # Else the order would tell what is not there from what may not be described.
            random.shuffle(responses)
        return {"throttle_time": mutations.throttle_ms, "responses": responses}

    async def create_partitions(self, ctx: RequestContext, request: Any) -> Values:
        """CreatePartitions v0-3: more partitions for existing topics."""
        topics, answers = _without_twins(request.topics)
        mutations = self._mutations(ctx, 3)

        def decision(image: Image) -> Steps[Decided[list[Values]]]:
            return _each(
                image,
                topics,
                _add_partitions,
                lambda topic: {"name": topic.name},
                request.validate_only,
                mutations,
                room=FdQuota(self.open_files, image),
            )

        answers += await self.metadata_changes.decide(decision)
        return {"throttle_time": mutations.throttle_ms, "results": answers}


_NOT_CREATED: Final[Values] = {
    "topic_id": None,
    "num_partitions": -1,
    "replication_factor": -1,
    "configs": (),
}


def _uncreated(topic: Any) -> dict[str, Any]:
    return {"name": topic.name, **_NOT_CREATED}


def _topic_id(seed: UUID, name: str) -> UUID:
    """Random as ``seed`` is, another one for each name; as Kafka's it does not begin with a dash
    as text.
    """
    drawn = blake2b(name.encode(), key=seed.bytes, digest_size=16).digest()
    while encode_uuid(topic_id := UUID(bytes=drawn, version=4)).startswith("-"):
        drawn = blake2b(drawn, digest_size=16).digest()
    return topic_id


def _partitions_wanted(topic: Any) -> int:
    return len(topic.assignments) or max(topic.num_partitions, 1)


def _delete(image: Image, topic: Values) -> Outcome:
    answer = {**topic, "error_code": 0, "error_message": None}
    return answer, controller_topics.delete_topic(image, topic["topic_id"])


_DESCRIBE: Final = (AclOperation.DESCRIBE, AclResourceType.TOPIC)


def _resolve(
    ctx: RequestContext, image: Image, wanted: Sequence[tuple[str | None, UUID | None]]
) -> Steps[tuple[list[Values], list[Values]]]:
    """(topics as name and id, errors) of what is to be deleted. Of a topic that may not be
    described nothing is said, also not its name for its id.
    """
    deletes_all = ctx.may(AclOperation.DELETE, *CLUSTER, audited=False)
    counts = Counter(key for pair in wanted for key in pair if key is not None)
    topics: list[TopicImage] = []
    errors: dict[tuple[str | None, UUID | None], KeptError] = {}
    for name, topic_id in wanted:
        yield
        try:
            may_see = deletes_all or name is None or ctx.may(*_DESCRIBE, name)
            topic = _find(image, name, topic_id, counts, may_see=may_see)
        except KeptError as error:
            errors[name, topic_id] = error.without_frames()
            continue
        if deletes_all or ctx.may(AclOperation.DELETE, AclResourceType.TOPIC, topic.name):
            topics.append(topic)
            continue
        describes = ctx.may(*_DESCRIBE, topic.name)
        errors[topic.name if describes else name, topic_id] = TopicAuthorizationFailed(
            AUTHORIZATION_MESSAGES[TOPIC_AUTHORIZATION_FAILED]
        )
    times = Counter(topic.name for topic in topics)
    for name in [name for name, count in times.items() if count > 1]:
        errors[name, None] = InvalidRequest("The same topic was specified by name and by id.")
    return [
        {"name": topic.name, "topic_id": topic.topic_id}
        for topic in topics
        if times[topic.name] == 1
    ], [
        {"name": name, "topic_id": topic_id, **error_values(error)}
        for (name, topic_id), error in errors.items()
    ]


def _find(
    image: Image,
    name: str | None,
    topic_id: UUID | None,
    counts: Counter[str | UUID],
    *,
    may_see: bool,
) -> TopicImage:
    """The topic of that name or id, which must be named once. ``may_see``: the client may know
    whether there is one of that name.
    """
    if name is not None and topic_id is not None:
        raise InvalidRequest("You may not specify both topic name and topic id.")
    if name is not None:
        if counts[name] > 1:
            raise InvalidRequest(_DUPLICATE)
        if not may_see:
            raise TopicAuthorizationFailed(AUTHORIZATION_MESSAGES[TOPIC_AUTHORIZATION_FAILED])
        topic = image.topics.get(name)
        if topic is None:
            raise UnknownTopicOrPartition("This server does not host this topic-partition.")
        return topic
    if topic_id is None:
        raise InvalidRequest("Neither topic name nor id were specified.")
    if counts[topic_id] > 1:
        raise InvalidRequest("Duplicate topic id.")
    topic = image.topics_by_id.get(topic_id)
    if topic is None:
        raise UnknownTopicId("This server does not host this topic ID.")
    return topic


def _add_partitions(image: Image, topic: Any) -> Steps[Outcome]:
    if topic.name not in image.topics:
        raise UnknownTopicOrPartition("This server does not host this topic-partition.")
    if topic.name in COORDINATED and topic.count > len(image.topics[topic.name].partitions):
        raise InvalidPartitions(
            f"{topic.name} keeps a group or a transactional id in the partition that the hash of "
            "its name tells: with more partitions none would be found."
        )
    assignments = topic.assignments
    manual = None if assignments is None else [entry.broker_ids for entry in assignments]
    records = yield from controller_topics.create_partitions_in_steps(
        image, topic.name, topic.count, manual
    )
    return {"name": topic.name, "error_code": 0, "error_message": None}, records
