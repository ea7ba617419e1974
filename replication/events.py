"""Events and effects of :class:`kept.replication.partition_core.PartitionCore`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kept.storage.errors import KeptError
from kept.storage.types import Generation

Token = int
"""Stands for somebody who waits; of two, the larger one came later."""

UNKNOWN_OFFSET: Final = -1


# Events.


@dataclass(frozen=True, slots=True)
class Elected:
    """This node leads: from the image. The high watermark is what it knew as replica.

    ``awaits_offer``: ManifestOffered follows; nobody may join the ISR before.
    """

    leader_epoch: int
    partition_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    log_end_offset: int
    high_watermark: int
    awaits_offer: bool = False


@dataclass(frozen=True, slots=True)
class Appended:
    """Batches up to ``log_end_offset`` are in the log and readable."""

    log_end_offset: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """A follower asked for ``log_end_offset``: it has everything below.

    ``broker_epoch``: of the process that asks (Fetch v15 ReplicaState), -1: not said.
    """

    replica_id: int
    log_end_offset: int
    broker_epoch: int = -1


@dataclass(frozen=True, slots=True)
class CommitKnown:
    """Everything below ``offset`` is committed, because a published manifest covers it."""

    offset: int


@dataclass(frozen=True, slots=True)
class IsrDecided:
    """The image has another ISR (or replicas) in the same leader epoch."""

    partition_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IsrRefused:
    """The controller said no to the proposal made at that partition epoch; it will not happen.

    ``pause_ms``: nobody is proposed again so soon, unless the brokers change.
    """

    partition_epoch: int
    pause_ms: int = 0


@dataclass(frozen=True, slots=True)
class CommitAwaited:
    """Somebody waits until HW >= ``end_offset``."""

    token: Token
    end_offset: int


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """Somebody stopped waiting."""

    token: Token


@dataclass(frozen=True, slots=True)
class MinIsrChanged:
    """``min.insync.replicas`` of the topic."""

    min_insync_replicas: int


@dataclass(frozen=True, slots=True)
class BrokersChanged:
    """Which brokers may join an ISR: unfenced, not shutting down.

    ``epochs``: (broker id, broker epoch) as registered; a replica whose requests carry another one
    may not join.
    """

    eligible: frozenset[int]
    epochs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ManifestOffered:
    """The leader holds this manifest durably. ``applied``: it had applied it before its term."""

    generation: Generation | None
    applied: bool = False


@dataclass(frozen=True, slots=True)
class ManifestLost:
    """The leader cannot read what it has offered: nobody joins before it offers something else."""


@dataclass(frozen=True, slots=True)
class ManifestHeld:
    """A replica acknowledged a manifest in the leader's epoch.

    ``broker_epoch``: of the process that said so; it counts for that process only (KIP-903).
    """

    replica_id: int
    generation: Generation | None
    broker_epoch: int = -1


@dataclass(frozen=True, slots=True)
class ManifestApplied:
    """A replica has applied a manifest; ``broker_epoch`` as in ManifestHeld."""

    replica_id: int
    generation: Generation | None
    broker_epoch: int = -1


@dataclass(frozen=True, slots=True)
class Resigned:
    """This node does not lead any more."""


Event = (
    Elected
    | Appended
    | Fetched
    | CommitKnown
    | IsrDecided
    | IsrRefused
    | CommitAwaited
    | WaitEnded
    | MinIsrChanged
    | BrokersChanged
    | ManifestOffered
    | ManifestLost
    | ManifestHeld
    | ManifestApplied
    | Resigned
)


# Effects.


@dataclass(frozen=True, slots=True)
class HighWatermarkMoved:
    """Consumers may read up to ``PartitionCore.high_watermark``, which is another one now. It comes
    before all else that the event caused.
    """


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell a waiter: committed, or why not."""

    token: Token
    error: type[KeptError] | None


@dataclass(frozen=True, slots=True)
class ProposeIsr:
    """Ask the controller for another ISR, compare-and-set on the partition epoch."""

    isr: tuple[int, ...]
    leader_epoch: int
    partition_epoch: int


@dataclass(frozen=True, slots=True)
class ManifestPublished:
    """Every replica that holds back HW has the manifest: the leader may swap, and says so."""

    generation: Generation


Effect = HighWatermarkMoved | Acknowledge | ProposeIsr | ManifestPublished
Effects = tuple[Effect, ...]
