"""Events and effects of :class:`kept.replication.partition_core.PartitionCore`."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from kept.storage.errors import KeptError
from kept.storage.types import Generation

Token = int
"""Stands for somebody who waits; of two, the larger one came later."""
NO_TOKEN: Final = 0
"""Stands for nobody."""

UNKNOWN_OFFSET: Final = -1


# Events.


class BecameLeader(Struct, frozen=True):
    """This node leads: from the image. The high watermark stays what it knew as a replica.

    ``awaits_offer``: ManifestOffered follows; nobody may join the ISR before.
    """

    leader_epoch: int
    partition_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    log_end_offset: int
    awaits_offer: bool = False


class Appended(Struct, frozen=True):
    """Batches up to ``log_end_offset`` are in the log and readable."""

    log_end_offset: int


class FollowerFetched(Struct, frozen=True):
    """A follower asked for ``log_end_offset``: it has everything below.

    ``broker_epoch``: of the process that asks (Fetch v15 ReplicaState), -1: not said.
    """

    replica_id: int
    log_end_offset: int
    broker_epoch: int = -1


class CommitAdvanced(Struct, frozen=True):
    """Everything below ``offset`` is committed, because a published manifest covers it."""

    offset: int


class IsrChanged(Struct, frozen=True):
    """The image has another ISR (or replicas) in the same leader epoch."""

    partition_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


class IsrProposalRejected(Struct, frozen=True):
    """The controller said no to the proposal made at that partition epoch; it will not happen.

    ``pause_ms``: nobody is proposed again so soon, unless the brokers change.
    """

    partition_epoch: int
    pause_ms: int = 0


class CommitAwaited(Struct, frozen=True):
    """Somebody waits until HW >= ``end_offset``."""

    token: Token
    end_offset: int


class WaitCancelled(Struct, frozen=True):
    """Somebody stopped waiting."""

    token: Token


class MinIsrChanged(Struct, frozen=True):
    """``min.insync.replicas`` of the topic."""

    min_insync_replicas: int


class EligibleBrokersChanged(Struct, frozen=True):
    """Which brokers may join an ISR: unfenced, not shutting down.

    ``epochs``: (broker id, broker epoch) as registered; a replica whose requests carry another one
    may not join.
    """

    eligible: frozenset[int]
    epochs: tuple[tuple[int, int], ...] = ()


class ManifestOffered(Struct, frozen=True):
    """The leader holds this manifest durably. ``applied``: it had applied it before its term."""

    generation: Generation | None
    applied: bool = False


class ManifestLost(Struct, frozen=True):
    """The leader cannot read what it has offered: nobody joins before it offers something else."""


class ManifestAcknowledged(Struct, frozen=True):
    """A replica acknowledged a manifest in the leader's epoch.

    ``broker_epoch``: of the process that said so; it counts for that process only (KIP-903).
    ``complete``: its log agrees with the leader's, and had everything below the manifest's end
    before anybody acted on that. ``number``: of the pull that said so; none counts after a later
    one of that process. 0: always.
    """

    replica_id: int
    generation: Generation | None
    broker_epoch: int = -1
    complete: bool = False
    number: int = 0


class ManifestApplied(Struct, frozen=True):
    """A replica has applied a manifest; ``broker_epoch`` and ``number`` as in ManifestAcknowledged,
    which comes after it for the same pull.
    """

    replica_id: int
    generation: Generation | None
    broker_epoch: int = -1
    number: int = 0


class StoppedLeading(Struct, frozen=True):
    """This node does not lead any more."""


Event = (
    BecameLeader
    | Appended
    | FollowerFetched
    | CommitAdvanced
    | IsrChanged
    | IsrProposalRejected
    | CommitAwaited
    | WaitCancelled
    | MinIsrChanged
    | EligibleBrokersChanged
    | ManifestOffered
    | ManifestLost
    | ManifestAcknowledged
    | ManifestApplied
    | StoppedLeading
)


# Effects.


class HighWatermarkMoved(Struct, frozen=True):
    """Consumers may read up to ``PartitionCore.high_watermark``, which is another one now. It comes
    before all else that the event caused.
    """


class Acknowledge(Struct, frozen=True):
    """Tell a waiter: committed, or why not."""

    token: Token
    error: type[KeptError] | None


class ProposeIsr(Struct, frozen=True):
    """Ask the controller for another ISR, compare-and-set on the partition epoch."""

    isr: tuple[int, ...]
    leader_epoch: int
    partition_epoch: int


class ManifestPublished(Struct, frozen=True):
    """Every replica that holds back HW has the manifest: the leader may swap, and says so."""

    generation: Generation


Effect = HighWatermarkMoved | Acknowledge | ProposeIsr | ManifestPublished
Effects = tuple[Effect, ...]
