"""Events, effects and messages of :class:`kept.replication.manifests.ManifestCore`."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from kept.replication.events import (
    CommitAdvanced,
    ManifestAcknowledged,
    ManifestApplied,
    ManifestLost,
    ManifestOffered,
)
from kept.storage.types import Generation


@dataclass(frozen=True, slots=True)
class ManifestRef:
    """A manifest by its generation, which alone makes two equal. ``end_offset``: the rules' *b*."""

    generation: Generation
    end_offset: int = field(compare=False)

    @property
    def leader_epoch(self) -> int:
        """Of the leader that made it."""
        return self.generation.leader_epoch


# Messages between replicas: the bodies travel beside them.


class PullRequest(Struct, frozen=True):
    """A follower asks the leader of ``leader_epoch``, and acknowledges ``held`` with it.

    ``synced``: a fetch in this epoch did not diverge; only then do ``applied`` and what the leader
    says of publication count. ``log_end_offset``: as it was when this was sent. ``has``: manifests
    whose bodies need not be sent. ``complete``: the log had everything below the end of ``held``
    before anybody acted on that.
    """

    replica_id: int
    broker_epoch: int
    leader_epoch: int
    number: int
    held: ManifestRef | None
    applied: ManifestRef | None
    synced: bool
    log_end_offset: int
    has: tuple[ManifestRef, ...]
    complete: bool = False


class PullResponse(Struct, frozen=True):
    """``held``: the leader's newest; ``published``: its newest published in this epoch.

    ``bodies``: which of the two come with it. ``complete``: the log of whoever asked has everything
    below the end of ``held``, on which nobody had acted when the leader answered. ``outside_isr``:
    whoever asked is neither in the leader's ISR nor proposed for it.
    """

    held: ManifestRef | None
    published: ManifestRef | None
    bodies: tuple[ManifestRef, ...]
    complete: bool = False
    outside_isr: bool = False


# Events.


class StartedLeading(Struct, frozen=True):
    """This node leads from now on. ``unclean``: the controller's mark of the partition (rule 19).

    Follows ``BecameLeader(awaits_offer=True)`` in the same turn. ``alone``: the ISR is this node;
    the event is repeated in the same epoch when that changes.
    """

    leader_epoch: int
    unclean: bool = False
    alone: bool = False


class StartedFollowing(Struct, frozen=True):
    """The image names another leader, or none; nothing happens where it is the same once more."""

    leader_epoch: int


class DivergenceChecked(Struct, frozen=True):
    """``FollowerCore.agreed`` after an answer to a fetch in that epoch."""

    leader_epoch: int
    agreed: bool


class TruncationCompleted(Struct, frozen=True):
    """The log now ends there; ``log_start_offset``: where it starts, if all of it went."""

    log_end_offset: int
    log_start_offset: int = 0


class PullRequestReceived(Struct, frozen=True):
    """A follower pulls from this leader; ``PartitionCore.pull_response`` makes the response.

    Raises FencedLeaderEpoch, UnknownLeaderEpoch, NotLeaderOrFollower.
    """

    request: PullRequest


class PullResponseReceived(Struct, frozen=True):
    """The leader answered; the bodies named are at hand."""

    request: PullRequest
    response: PullResponse


class PullFailed(Struct, frozen=True):
    """There will be no answer to that request."""

    request: PullRequest


class ManifestStored(Struct, frozen=True):
    """:class:`StoreManifest` was done, durably, as the last one asked for it."""

    held: ManifestRef | None


class ManifestStoreFailed(Struct, frozen=True):
    """:class:`StoreManifest` was not done: what was held is still held."""


class PassCompleted(Struct, frozen=True):
    """A pass made ``manifest``, begun in ``leader_epoch`` when ``based_on`` was applied."""

    manifest: ManifestRef
    leader_epoch: int
    based_on: ManifestRef | None


class GenerationPublished(Struct, frozen=True):
    """The leader core says so (``ManifestPublished``)."""

    generation: Generation


class ApplyCompleted(Struct, frozen=True):
    """All segments of the manifest are in place, and the mark says so, durably."""

    manifest: ManifestRef


class ApplyAborted(Struct, frozen=True):
    """Nothing was put into place. ``missing``: a survivor that is not in the log."""

    manifest: ManifestRef
    missing: int | None = None


class RetryTriggered(Struct, frozen=True):
    """Try again what failed."""


class ManifestDamaged(Struct, frozen=True):
    """The file of a manifest cannot be read, or is gone.

    ``alone``: this leader is the whole ISR, and has asked for nobody else: whoever acknowledged
    what it holds is no member, and whoever joins must have applied what comes instead.
    """

    manifest: ManifestRef
    alone: bool = False


class BaseGenerationCreated(Struct, frozen=True):
    """The base generation is durable, and counts as applied (rule 19)."""

    manifest: ManifestRef


Event = (
    StartedLeading
    | StartedFollowing
    | DivergenceChecked
    | TruncationCompleted
    | PullRequestReceived
    | PullResponseReceived
    | PullFailed
    | ManifestStored
    | ManifestStoreFailed
    | PassCompleted
    | GenerationPublished
    | ApplyCompleted
    | ApplyAborted
    | RetryTriggered
    | ManifestDamaged
    | BaseGenerationCreated
)


# Effects.


class NoteManifest(Struct, frozen=True):
    """For the :class:`kept.replication.partition_core.PartitionCore` that this is a part of, at
    once; no shell sees it.
    """

    event: ManifestOffered | ManifestLost | ManifestAcknowledged | ManifestApplied | CommitAdvanced


class AnnounceManifest(Struct, frozen=True):
    """This leader has something for its followers: tell them to pull."""


class StoreManifest(Struct, frozen=True):
    """Make ``held`` durable, and keep the body of ``published`` beside it.

    Their bodies are in the response, from a pass, or here already. ``published`` is written first,
    then ``held`` by one rename, and with it whether the log is ``complete`` for it: a crash leaves
    what was held before or this. :class:`ManifestStored` follows.
    """

    held: ManifestRef | None
    published: ManifestRef | None
    complete: bool = False


class DiscardPass(Struct, frozen=True):
    """Throw away the result of a pass."""

    manifest: ManifestRef


class ApplyManifest(Struct, frozen=True):
    """Bring the log to this manifest; :class:`ApplyCompleted` or :class:`ApplyAborted` follows.

    The high watermark, raised by the effect before this one, is checkpointed first (rule 12).
    """

    manifest: ManifestRef


class CancelApply(Struct, frozen=True):
    """Stop it if no segment is in place yet, else finish it; the answer is still owed."""

    manifest: ManifestRef


class CreateBaseGeneration(Struct, frozen=True):
    """Forget all manifests; make durable one in which every record below the log end survives,
    with ``clean_to`` at the log start. :class:`BaseGenerationCreated` follows.

    ``replaces``: one of the same epoch, that must not have the base's name.
    """

    leader_epoch: int
    replaces: ManifestRef | None = None


class ClearApplied(Struct, frozen=True):
    """The log was cut below the end of ``manifest``: durably, nothing is applied (rule 19)."""

    manifest: ManifestRef


class ClearComplete(Struct, frozen=True):
    """The log was cut below the end of ``manifest``, which is held: durably, it is not complete."""

    manifest: ManifestRef


class MarkManifestLost(Struct, frozen=True):
    """Durably, nothing is applied, and what is held is not known: the leader is to be asked."""


class ReportMissing(Struct, frozen=True):
    """A record that the leader has is not here: corruption, or the trace of an unclean election."""

    manifest: ManifestRef
    offset: int


class TruncateLog(Struct, frozen=True):
    """Cut the log there and fetch again; :class:`TruncationCompleted` follows."""

    offset: int


Effect = (
    NoteManifest
    | AnnounceManifest
    | StoreManifest
    | DiscardPass
    | ApplyManifest
    | CancelApply
    | CreateBaseGeneration
    | ClearApplied
    | ClearComplete
    | MarkManifestLost
    | ReportMissing
    | TruncateLog
)
Effects = tuple[Effect, ...]
