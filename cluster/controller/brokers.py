"""Decisions on brokers: registration, fencing, shutdown, producer ids. Pure functions of the image.

A broker's epoch is the index of the entry that registers it, so it grows and is never used twice.
Whether a broker is alive (heartbeats) is not in the image: the caller knows and says so
(``kept.cluster.controller.broker_sessions``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from kept.cluster.controller.features import Feature, unsupported_features
from kept.cluster.controller.partition_election import (
    UncleanAllowed,
    is_active,
    never_unclean,
    with_broker,
    without_broker,
)
from kept.cluster.metadata.image import BrokerImage, Image
from kept.cluster.metadata.records import (
    NO_LEADER,
    BrokerChangeRecord,
    BrokerRecord,
    Endpoint,
    MetadataRecord,
    PartitionRecord,
    ProducerIdsRecord,
    UnregisterBrokerRecord,
)
from kept.storage.errors import (
    BrokerIdNotRegistered,
    DuplicateBrokerRegistration,
    InvalidRequest,
    InvariantViolation,
    StaleBrokerEpoch,
    UnsupportedVersion,
)
from kept.storage.types import MAX_INT64

PRODUCER_ID_BLOCK: Final = 1000
"""Producer ids given to a broker at a time; what a restart leaves unused is never given again."""


class RegisterRequest(Struct, frozen=True):
    """A broker's process presents itself. ``incarnation`` is random, one per process.

    ``clean_epoch``: the broker epoch of the process before, if all of its directories show that
    nothing which that one wrote was lost (it stopped cleanly, or was killed on a machine that runs
    still); -1 without proof. ``log_dirs``: the ids of its log directories, which it has
    locked: two processes that name the same one are one after the other. ``features``: what it
    serves.
    """

    broker_id: int
    incarnation: UUID
    endpoints: tuple[Endpoint, ...]
    rack: str | None = None
    clean_epoch: int = -1
    log_dirs: tuple[UUID, ...] = ()
    features: tuple[Feature, ...] = ()


def register_broker(
    image: Image,
    registration: RegisterRequest,
    *,
    fenced: bool = True,
    session_live: bool = False,
    unclean_allowed: UncleanAllowed = never_unclean,
) -> list[MetadataRecord]:
    """Register a broker's process, in place of the one before.

    The old process is gone with this: the broker leaves each ISR unless it is the last member, and
    others lead. Unless ``clean_epoch`` is that of the process before, it may have lost what was not
    flushed (rule 33). With ``fenced`` False (a lone node) it takes part at once, and what has no
    leader gets one: each partition it leads has a new leader epoch. The same incarnation again
    changes nothing. Raises DuplicateBrokerRegistration while another one is alive
    (``session_live``), InvalidRequest for an id that cannot be one, UnsupportedVersion for a
    process that does not serve a feature at its finalized level.
    """
    broker_id = registration.broker_id
    if broker_id < 0:
        raise InvalidRequest(f"broker id {broker_id}: it must be 0 or larger")
    registered = image.brokers.get(broker_id)
    if registered is not None:
        if registered.incarnation == registration.incarnation:
            return []
        if session_live:
            raise DuplicateBrokerRegistration(
                f"a live broker is registered with id {broker_id}, at "
                f"{address_of(registered.endpoints)}: each needs its own node.id"
            )
    if lacks := unsupported_features(image, registration.features):
        raise UnsupportedVersion(
            f"broker {broker_id} does not serve {', '.join(lacks)} at the level that this cluster "
            "has finalized: run the version of kept that the other nodes run"
        )
    record = BrokerRecord(
        broker_id,
        image.index + 1,
        registration.incarnation,
        registration.endpoints,
        registration.rack,
        fenced,
        registration.log_dirs,
    )
    clean = registered is not None and registered.broker_epoch == registration.clean_epoch
    out, _ = image.apply([replace(record, fenced=True)])
    changes = without_broker(out, broker_id, unclean_allowed, unclean_restart=not clean)
    if not fenced:
        back, _ = image.apply([record, *changes])
        changes += with_broker(back, broker_id, unclean_allowed)
    return [record, *_last_of_each(changes)]


def address_of(endpoints: tuple[Endpoint, ...]) -> str:
    """Endpoints, for a message."""
    return ", ".join(f"{e.host}:{e.port}" for e in endpoints) or "no address"


def _last_of_each(changes: list[PartitionRecord]) -> list[PartitionRecord]:
    return list({change.key: change for change in changes}.values())


def fence_brokers(
    image: Image, broker_epochs: Mapping[int, int], unclean_allowed: UncleanAllowed = never_unclean
) -> list[MetadataRecord]:
    """Brokers are dead or silent: they lead nothing, and leave each ISR in which somebody is left.

    ``broker_epochs``: broker id -> its epoch. Those that died together are fenced together: one
    after the other would leave only the last of them in an ISR, and all would wait for that one.
    A shutdown that they were in is over. Raises BrokerIdNotRegistered, StaleBrokerEpoch.
    """
    marks: list[MetadataRecord] = [
        BrokerChangeRecord(broker_id, broker_epoch, True)
        for broker_id, broker_epoch in broker_epochs.items()
        if not _registered(image, broker_id, broker_epoch).fenced
    ]
    out, _ = image.apply(marks)
    changes: list[PartitionRecord] = []
    moved: list[PartitionRecord] = []
    for broker_id in broker_epochs:
        if moved:
            out, _ = out.apply(moved)
        moved = without_broker(out, broker_id, unclean_allowed)
        changes += moved
    return [*marks, *_last_of_each(changes)] if marks else []


def unfence_broker(
    image: Image, broker_id: int, broker_epoch: int, unclean_allowed: UncleanAllowed = never_unclean
) -> list[MetadataRecord]:
    """A broker has caught up with the metadata: it takes part. Raises as :func:`fence_brokers`."""
    broker = _registered(image, broker_id, broker_epoch)
    if not broker.fenced:
        return []
    change = BrokerChangeRecord(broker_id, broker_epoch, False, broker.in_controlled_shutdown)
    back, _ = image.apply([change])
    return [change, *with_broker(back, broker_id, unclean_allowed)]


def shut_down_broker(image: Image, broker_id: int, broker_epoch: int) -> list[MetadataRecord]:
    """Controlled shutdown: leadership moves away before the process ends.

    Decide it again while the broker leads (:func:`leads_any_partition`): what it leads as the only
    member of the ISR stays with it as long as another live replica could still catch up, and is
    given up when there is none. Raises as :func:`fence_brokers`.
    """
    broker = _registered(image, broker_id, broker_epoch)
    change = BrokerChangeRecord(broker_id, broker_epoch, broker.fenced, True)
    mark: list[MetadataRecord] = [] if broker.in_controlled_shutdown else [change]
    out, _ = image.apply(mark)
    topics = out.topics_by_id
    moved = [
        record
        for record in without_broker(out, broker_id)
        if record.leader != NO_LEADER
        or topics[record.topic_id].partitions[record.partition].leader == NO_LEADER
        or not any(is_active(out, replica) for replica in record.replicas)
    ]
    return [*mark, *moved]


def leads_any_partition(image: Image, broker_id: int) -> bool:
    """Whether the broker leads any partition."""
    topics = image.topics_by_id
    return any(
        topics[topic_id].partitions[number].leader == broker_id
        for topic_id, numbers in image.hosted.get(broker_id, {}).items()
        for number in numbers
    )


def unregister_broker(image: Image, broker_id: int) -> list[MetadataRecord]:
    """A broker leaves for good; its replicas stay assigned. Raises BrokerIdNotRegistered."""
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise BrokerIdNotRegistered(f"Broker ID {broker_id} is not currently registered")
    record = UnregisterBrokerRecord(broker_id, broker.broker_epoch)
    out, _ = image.apply([record])
    return [record, *without_broker(out, broker_id)]


def allocate_producer_ids(
    image: Image, broker_id: int, broker_epoch: int
) -> tuple[list[MetadataRecord], range]:
    """A block of producer ids that nobody ever had: the records, and the ids.

    The ids may be used once the records are durable. Raises as :func:`fence_brokers`.
    """
    _registered(image, broker_id, broker_epoch)
    first = image.next_producer_id
    end = first + PRODUCER_ID_BLOCK
    if end > MAX_INT64:
        raise InvariantViolation(f"producer ids are exhausted at {first}")
    return [ProducerIdsRecord(broker_id, broker_epoch, end)], range(first, end)


def _registered(image: Image, broker_id: int, broker_epoch: int) -> BrokerImage:
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise BrokerIdNotRegistered(f"Broker ID {broker_id} is not currently registered")
    if broker.broker_epoch != broker_epoch:
        raise StaleBrokerEpoch(
            f"broker {broker_id} has epoch {broker.broker_epoch}, not {broker_epoch}"
        )
    return broker
