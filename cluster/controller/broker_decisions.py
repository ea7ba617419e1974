"""What the active controller decides because of who lives, as data. Pure.

``kept.cluster.controller.broker_sessions`` says which of these is due. The shell takes one at a
time, and :func:`decide` turns it into the records of one proposal, on the newest image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from msgspec import Struct, field

from kept.cluster.controller import (
    brokers,
    features,
    partition_election,
    reassignment,
    unclean_recovery,
)
from kept.cluster.controller.heartbeats import PartitionKey
from kept.cluster.controller.partition_election import unclean_allowed_by
from kept.cluster.controller.unclean_recovery import Reports
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import MetadataRecord

MAX_PARTITIONS_PER_DECISION: Final = 1000
"""Of decisions that can wait (ELRs, balance): bounds one entry of the log to some 100 KB."""


class Fence(Struct, frozen=True):
    """Fence ``broker_id`` and all that are gone with it: ``gone`` maps id to broker epoch."""

    name: ClassVar[str] = "fence"
    broker_id: int
    broker_epoch: int
    unclean_default: bool
    gone: Mapping[int, int] = field(default_factory=dict)


class Unfence(Struct, frozen=True):
    """The broker has caught up: it takes part."""

    name: ClassVar[str] = "unfence"
    broker_id: int
    broker_epoch: int
    unclean_default: bool


class ShutDown(Struct, frozen=True):
    """Controlled shutdown: move what the broker leads."""

    name: ClassVar[str] = "shut-down"
    broker_id: int
    broker_epoch: int


class ClearElr(Struct, frozen=True):
    """Leaders have proved that they live: their partitions (-> partition epoch) need no ELR."""

    name: ClassVar[str] = "clear-elr"
    partitions: Mapping[PartitionKey, int]
    broker_id: ClassVar[int] = -1


class Recover(Struct, frozen=True):
    """Elect by length: where all have reported, and where those that have not are given up."""

    name: ClassVar[str] = "recover"
    complete: tuple[PartitionKey, ...]
    given_up: tuple[PartitionKey, ...]
    reports: Reports = field(default_factory=dict)
    broker_id: ClassVar[int] = -1


class ElectUnclean(Struct, frozen=True):
    """Leaders for partitions without one, where their topics allow it."""

    name: ClassVar[str] = "elect-unclean"
    unclean_default: bool
    broker_id: ClassVar[int] = -1


class FinishReassignments(Struct, frozen=True):
    """All replicas of some reassignments are in sync."""

    name: ClassVar[str] = "reassign"
    broker_id: ClassVar[int] = -1


class BalanceLeaders(Struct, frozen=True):
    """Preferred leaders are back: ``leader.imbalance.per.broker.percentage``."""

    name: ClassVar[str] = "balance"
    percentage: int
    broker_id: ClassVar[int] = -1


class FinalizeFeatures(Struct, frozen=True):
    """All registered brokers, by their epochs, serve these levels of features."""

    name: ClassVar[str] = "finalize-features"
    levels: Mapping[str, int]
    brokers: Mapping[int, int]
    broker_id: ClassVar[int] = -1


Decision = (
    Fence
    | Unfence
    | ShutDown
    | ClearElr
    | Recover
    | ElectUnclean
    | FinishReassignments
    | BalanceLeaders
    | FinalizeFeatures
)


def decide(image: Image, decision: Decision) -> list[MetadataRecord]:
    """The records of a decision on ``image``; none where nothing is left to do.

    Raises BrokerIdNotRegistered and StaleBrokerEpoch for a broker that is another process by now.
    """
    match decision:
        case Fence(unclean_default=default, gone=gone):
            brokers_now = image.brokers
            known = {
                b: epoch
                for b, epoch in gone.items()
                if b in brokers_now and brokers_now[b].broker_epoch == epoch
            }
            return brokers.fence_brokers(image, known, unclean_allowed_by(image, default))
        case Unfence(broker_id, broker_epoch, default):
            allowed = unclean_allowed_by(image, default)
            return brokers.unfence_broker(image, broker_id, broker_epoch, allowed)
        case ShutDown(broker_id, broker_epoch):
            return brokers.shut_down_broker(image, broker_id, broker_epoch)
        case ClearElr(partitions):
            return unclean_recovery.clear_elr(image, partitions)
        case Recover(complete, given_up, reports):
            whole = unclean_recovery.elect_longest(image, complete, reports)
            partly = unclean_recovery.elect_longest(image, given_up, reports, incomplete=True)
            return whole + partly
        case ElectUnclean(default):
            return partition_election.elect_offline(image, unclean_allowed_by(image, default))
        case FinishReassignments():
            return reassignment.finish_reassignments(image)
        case FinalizeFeatures(levels, served_by):
            registered = {b: broker.broker_epoch for b, broker in image.brokers.items()}
            if registered != served_by:
                return []
            return [*features.raise_levels(image, levels)]
        case BalanceLeaders(percentage):
            return partition_election.balance_preferred(
                image, percentage=percentage, limit=MAX_PARTITIONS_PER_DECISION
            )
