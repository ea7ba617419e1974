"""Decisions on topics: create, delete, add partitions. Pure functions of the image.

Each returns the records that make the decision true, for one proposal, or raises the PeerError that
the client gets; nothing else happens, so ``validate_only`` is a call whose records are thrown away.
Several topics of one request: apply each decision's records to the image before the next. What is
decided of thousands of partitions has a form that yields after a few (``..._in_steps``).

Rules and messages are those of ``ReplicationControlManager``. Topic ids are drawn by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from uuid import UUID

from msgspec import Struct, field

from kept.cluster.controller.config_changes import check_value
from kept.cluster.controller.placement import place
from kept.cluster.metadata.image import Image, TopicImage, unify
from kept.cluster.metadata.records import (
    RECORDS_PER_STEP,
    ConfigRecord,
    MetadataRecord,
    PartitionRecord,
    RemoveTopicRecord,
    ResourceType,
    TopicRecord,
)
from kept.steps import Steps, run_to_end
from kept.storage.errors import (
    InvalidConfig,
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    InvalidRequest,
    InvalidTopicException,
    PolicyViolation,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
)

MAX_TOPIC_NAME_LENGTH: Final = 249
MAX_PARTITIONS_PER_REQUEST: Final = 10_000
"""More would make one entry of the metadata log too large; Kafka's number."""

CLUSTER_METADATA_TOPIC: Final = "__cluster_metadata"
INTERNAL_TOPICS: Final = frozenset(
    ("__consumer_offsets", "__transaction_state", "__share_group_state")
)
"""Topics that Metadata marks as internal."""

_LEGAL = re.compile(r"[a-zA-Z0-9._-]+\Z")

ValidateConfigs = Callable[[Mapping[str, str]], None]
"""Raises InvalidConfig when a topic may not have these settings together."""


class CreateTopic(Struct, frozen=True):
    """A topic as a client asks for it; -1 takes the default.

    ``assignments``: partition -> replicas; then both counts must be -1.
    """

    name: str
    topic_id: UUID
    num_partitions: int = -1
    replication_factor: int = -1
    assignments: Mapping[int, Sequence[int]] = field(default_factory=dict)
    configs: Mapping[str, str | None] = field(default_factory=dict)


class TopicDefaults(Struct, frozen=True):
    """``num.partitions`` and ``default.replication.factor``."""

    num_partitions: int = 1
    replication_factor: int = 1


TOPIC_DEFAULTS: Final = TopicDefaults()


def check_topic_name(name: str) -> None:
    """Raises InvalidTopicException unless the name is legal."""
    if not name:
        why = "the empty string is not allowed"
    elif name in {".", ".."}:
        why = f"'{name}' is not allowed"
    elif len(name) > MAX_TOPIC_NAME_LENGTH:
        why = (
            f"the length of '{name}' is longer than the max allowed length {MAX_TOPIC_NAME_LENGTH}"
        )
    elif not _LEGAL.match(name):
        why = (
            f"'{name}' contains one or more characters other than "
            "ASCII alphanumerics, '.', '_' and '-'"
        )
    else:
        return
    raise InvalidTopicException(f"Topic name is invalid: {why}")


def create_topic(
    image: Image,
    request: CreateTopic,
    defaults: TopicDefaults = TOPIC_DEFAULTS,
    validate: ValidateConfigs | None = None,
) -> list[MetadataRecord]:
    """The topic, its settings, its partitions.

    Raises InvalidTopicException, TopicAlreadyExists, InvalidRequest, InvalidPartitions,
    InvalidReplicationFactor, InvalidReplicaAssignment, PolicyViolation, and InvalidConfig from
    ``validate``.
    """
    return run_to_end(create_topic_in_steps(image, request, defaults, validate))


def create_topic_in_steps(
    image: Image,
    request: CreateTopic,
    defaults: TopicDefaults = TOPIC_DEFAULTS,
    validate: ValidateConfigs | None = None,
) -> Steps[list[MetadataRecord]]:
    """:func:`create_topic` for many partitions."""
    name = request.name
    if name == CLUSTER_METADATA_TOPIC:
        raise InvalidRequest(f"Creation of internal topic {name} is prohibited.")
    check_topic_name(name)
    if name in image.topics:
        raise TopicAlreadyExists(f"Topic '{name}' already exists.")
    other = image.colliding.get(unify(name))
    if other is not None:
        raise InvalidTopicException(f"Topic '{name}' collides with existing topic: {other}")
    configs = _given(request.configs)
    for key, value in configs.items():
        check_value(key, value)
    if validate is not None:
        validate(configs)
    if request.assignments:
        assignments = yield from _manual(image, request)
    else:
        assignments = yield from _automatic(image, request, defaults)
    return [
        TopicRecord(name, request.topic_id),
        *(ConfigRecord(ResourceType.TOPIC, name, key, configs[key]) for key in sorted(configs)),
        *(yield from _new_partitions(image, request.topic_id, 0, assignments)),
    ]


def topic_counts(records: Sequence[MetadataRecord]) -> tuple[int, int]:
    """(partitions, replication factor) of what :func:`create_topic` decided."""
    partitions = [record for record in records if isinstance(record, PartitionRecord)]
    return len(partitions), len(partitions[0].replicas) if partitions else 0


def delete_topic(image: Image, topic: str | UUID) -> list[MetadataRecord]:
    """Remove a topic with its settings. Raises UnknownTopicOrPartition, UnknownTopicId."""
    return [RemoveTopicRecord(_existing(image, topic).topic_id)]


def create_partitions(
    image: Image, name: str, count: int, assignments: Sequence[Sequence[int]] | None = None
) -> list[MetadataRecord]:
    """Raise a topic's number of partitions to ``count``; ``assignments`` are for the new ones.

    Raises UnknownTopicOrPartition, InvalidPartitions, InvalidReplicaAssignment,
    InvalidReplicationFactor, PolicyViolation.
    """
    return run_to_end(create_partitions_in_steps(image, name, count, assignments))


def create_partitions_in_steps(
    image: Image, name: str, count: int, assignments: Sequence[Sequence[int]] | None = None
) -> Steps[list[MetadataRecord]]:
    """:func:`create_partitions` for many."""
    topic = _existing(image, name)
    have = len(topic.partitions)
    if count == have:
        raise InvalidPartitions(f"Topic already has {have} partition(s).")
    if count < have:
        raise InvalidPartitions(
            f"The topic {name} currently has {have} partition(s); {count} would not be an increase."
        )
    _limit_partitions(count - have)
    new = range(have, count)
    factor = len(topic.partitions[0].replicas) if topic.partitions else 1
    if assignments is None:
        placed = yield from _placed(image, new, factor, topic.topic_id)
    else:
        if len(assignments) != len(new):
            raise InvalidReplicaAssignment(
                f"Attempted to add {len(new)} additional partition(s), but only "
                f"{len(assignments)} assignment(s) were specified."
            )
        placed = yield from _checked(image, assignments, factor)
    return [*(yield from _new_partitions(image, topic.topic_id, have, placed))]


def _existing(image: Image, topic: str | UUID) -> TopicImage:
    existing = image.topic(topic)
    if existing is not None:
        return existing
    if isinstance(topic, UUID):
        raise UnknownTopicId("This server does not host this topic ID.")
    check_topic_name(topic)
    raise UnknownTopicOrPartition(f"Topic '{topic}' does not exist.")


def _given(configs: Mapping[str, str | None]) -> dict[str, str]:
    missing = sorted(name for name, value in configs.items() if value is None)
    if missing:
        raise InvalidConfig(f"Null value not supported for topic configs: {','.join(missing)}")
    return {name: value for name, value in configs.items() if value is not None}


def _limit_partitions(count: int) -> None:
    if count > MAX_PARTITIONS_PER_REQUEST:
        raise PolicyViolation(
            "Excessively large number of partitions per request: "
            f"{count}, the limit is {MAX_PARTITIONS_PER_REQUEST}."
        )


def _automatic(
    image: Image, request: CreateTopic, defaults: TopicDefaults
) -> Steps[list[tuple[int, ...]]]:
    factor, count = request.replication_factor, request.num_partitions
    if factor < -1 or factor == 0:
        raise InvalidReplicationFactor(
            "Replication factor must be larger than 0, or -1 to use the default value."
        )
    if count < -1 or count == 0:
        raise InvalidPartitions("Number of partitions was set to an invalid non-positive value.")
    count = defaults.num_partitions if count == -1 else count
    factor = defaults.replication_factor if factor == -1 else factor
    _limit_partitions(count)
    return (yield from _placed(image, range(count), factor, request.topic_id))


def _placed(
    image: Image, numbers: range, factor: int, topic_id: UUID
) -> Steps[list[tuple[int, ...]]]:
    """Replicas for each of ``numbers``, one at least. Raises InvalidReplicationFactor."""
    placed: list[tuple[int, ...]] = []
    while len(placed) < len(numbers):
        some = numbers[len(placed) : len(placed) + RECORDS_PER_STEP]
        placed += place(image.brokers.values(), some, factor, _shift(topic_id))
        yield
    return placed


def _shift(topic_id: UUID) -> int:
    """Where a topic starts on the ring: topics of one partition spread, too."""
    return topic_id.int & 0xFFFF


def _manual(image: Image, request: CreateTopic) -> Steps[list[tuple[int, ...]]]:
    if request.replication_factor != -1:
        raise InvalidRequest(
            "A manual partition assignment was specified, but replication factor was not set to -1."
        )
    if request.num_partitions != -1:
        raise InvalidRequest(
            "A manual partition assignment was specified, but numPartitions was not set to -1."
        )
    _limit_partitions(len(request.assignments))
    if sorted(request.assignments) != list(range(len(request.assignments))):
        raise InvalidReplicaAssignment(
            "partitions should be a consecutive 0-based integer sequence"
        )
    assignments = [request.assignments[number] for number in range(len(request.assignments))]
    return (yield from _checked(image, assignments, len(assignments[0])))


def _checked(
    image: Image, assignments: Sequence[Sequence[int]], factor: int
) -> Steps[list[tuple[int, ...]]]:
    """Raises InvalidReplicaAssignment."""
    placed: list[tuple[int, ...]] = []
    for replicas in assignments:
        placed.append(tuple(replicas))
        check_assignment(image, placed[-1], factor)
        if len(placed) % RECORDS_PER_STEP == 0:
            yield
    return placed


def check_assignment(
    image: Image,
    replicas: tuple[int, ...],
    factor: int | None = None,
    *,
    prefix: str = "The manual partition assignment includes",
) -> None:
    """Raises InvalidReplicaAssignment unless these are ``factor`` registered brokers, each once."""
    if not replicas:
        raise InvalidReplicaAssignment(f"{prefix} an empty replica list.")
    for number, broker_id in enumerate(replicas):
        if broker_id not in image.brokers:
            registered = ", ".join(map(str, sorted(image.brokers)))
            raise InvalidReplicaAssignment(
                f"{prefix} broker {broker_id}, but no such broker is registered "
                f"(registered: {registered})."
            )
        if broker_id in replicas[:number]:
            raise InvalidReplicaAssignment(f"{prefix} the broker {broker_id} more than once.")
    if factor is not None and len(replicas) != factor:
        raise InvalidReplicaAssignment(
            f"{prefix} a partition with {len(replicas)} replica(s), but this is not consistent "
            f"with previous partitions, which have {factor} replica(s)."
        )


def _new_partitions(
    image: Image, topic_id: UUID, first: int, placed: Sequence[tuple[int, ...]]
) -> Steps[list[PartitionRecord]]:
    records: list[PartitionRecord] = []
    for number, replicas in enumerate(placed, first):
        records.append(_new_partition(image, topic_id, number, replicas))
        if len(records) % RECORDS_PER_STEP == 0:
            yield
    return records


def _new_partition(
    image: Image, topic_id: UUID, number: int, replicas: tuple[int, ...]
) -> PartitionRecord:
    isr = tuple(broker_id for broker_id in replicas if image.brokers[broker_id].active)
    if not isr:
        raise InvalidReplicaAssignment(
            "All brokers specified in the manual partition assignment for "
            f"partition {number} are fenced or in controlled shutdown."
        )
    return PartitionRecord(topic_id, number, replicas, isr, isr[0], 0, 0)
