"""Decisions on brokers: registration, fencing, shutdown, producer ids. Pure functions of the image.

A broker's epoch is the index of the entry that registers it, so it grows and is never used twice.
Whether a broker is alive (heartbeats) is not in the image: the caller knows and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from kept.cluster.election import (
    UncleanAllowed,
    never_unclean,
    with_broker,
    without_broker,
)
from kept.cluster.image import BrokerImage, Image
from kept.cluster.records import (
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
    InvariantViolation,
    StaleBrokerEpoch,
)
from kept.storage.types import MAX_INT64

PRODUCER_ID_BLOCK: Final = 1000
"""Producer ids given to a broker at a time; what a restart leaves unused is never given again."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A broker's process presents itself. ``incarnation`` is random, one per process."""

    broker_id: int
    incarnation: UUID
    endpoints: tuple[Endpoint, ...]
    rack: str | None = None


def register_broker(
    image: Image,
    registration: Registration,
    *,
    fenced: bool = True,
    session_live: bool = False,
    unclean_allowed: UncleanAllowed = never_unclean,
) -> list[MetadataRecord]:
    """Register a broker's process, in place of the one before.

    The old process is gone with this: the broker leaves each ISR unless it is the last member, and
    others lead. With ``fenced`` False (a lone node) it takes part at once, and what has no leader
    gets one: each partition it leads has a new leader epoch. The same incarnation again changes
    nothing. Raises DuplicateBrokerRegistration while another one is alive (``session_live``).
    """
    known = image.brokers.get(registration.broker_id)
    if known is not None:
        if known.incarnation == registration.incarnation:
            return []
        if session_live:
            raise DuplicateBrokerRegistration(
                f"another broker is registered with id {registration.broker_id}"
            )
    record = BrokerRecord(
        registration.broker_id,
        image.index + 1,
        registration.incarnation,
        registration.endpoints,
        registration.rack,
        fenced,
    )
    out, _ = image.apply([_fenced(record)])
    changes = without_broker(out, registration.broker_id)
    if not fenced:
        back, _ = image.apply([record, *changes])
        changes += with_broker(back, registration.broker_id, unclean_allowed)
    return [record, *_last_of_each(changes)]


def _fenced(record: BrokerRecord) -> BrokerRecord:
    return BrokerRecord(
        record.broker_id, record.broker_epoch, record.incarnation, record.endpoints, record.rack
    )


def _last_of_each(changes: list[PartitionRecord]) -> list[PartitionRecord]:
    return list({(change.topic_id, change.partition): change for change in changes}.values())


def fence_broker(image: Image, broker_id: int, broker_epoch: int) -> list[MetadataRecord]:
    """A broker missed its heartbeats: it leads nothing and leaves each ISR but as last member.

    Raises BrokerIdNotRegistered, StaleBrokerEpoch.
    """
    broker = _registered(image, broker_id, broker_epoch)
    if broker.fenced:
        return []
    change = BrokerChangeRecord(broker_id, broker_epoch, True, broker.in_controlled_shutdown)
    out, _ = image.apply([change])
    return [change, *without_broker(out, broker_id)]


def unfence_broker(
    image: Image,
    broker_id: int,
    broker_epoch: int,
    unclean_allowed: UncleanAllowed = never_unclean,
) -> list[MetadataRecord]:
    """A broker has caught up with the metadata: it takes part. Raises as :func:`fence_broker`."""
    broker = _registered(image, broker_id, broker_epoch)
    if not broker.fenced:
        return []
    change = BrokerChangeRecord(broker_id, broker_epoch, False, broker.in_controlled_shutdown)
    back, _ = image.apply([change])
    return [change, *with_broker(back, broker_id, unclean_allowed)]


def shut_down_broker(image: Image, broker_id: int, broker_epoch: int) -> list[MetadataRecord]:
    """Controlled shutdown: leadership moves away before the process ends. Raises as
    :func:`fence_broker`.
    """
    broker = _registered(image, broker_id, broker_epoch)
    if broker.in_controlled_shutdown:
        return []
    change = BrokerChangeRecord(broker_id, broker_epoch, broker.fenced, True)
    out, _ = image.apply([change])
    return [change, *without_broker(out, broker_id)]


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

    The ids may be used once the records are durable. Raises as :func:`fence_broker`.
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
