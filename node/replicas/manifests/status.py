"""What a replica of a partition knows of manifests, and what it says of itself: without I/O.

The shell of the node (:mod:`.replica`) and the simulator's use the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kept.cluster.controller.config_changes import was_compacted
from kept.replication import manifests_events as ev
from kept.replication.manifests_events import ManifestRef
from kept.storage.types import Generation

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image
    from kept.cluster.metadata.records import PartitionRecord
    from kept.compaction.manifest.manifest import Manifest
    from kept.replication.manifests import ManifestCore
    from kept.replication.partition import Partition
    from kept.replication.partition_core import PartitionCore

APPLY_MS: Final = 60_000
APPLY_PASSES: Final = 4
"""How long other replicas have at least to apply a generation before there is a newer one: so long,
or so many times as long as its pass took."""


class ManifestStatus(Struct, frozen=True):
    """What a start found: manifests held and applied; ``lost``: they could not be read.

    ``complete``: the log is so for what is held and not applied.
    """

    held: ManifestRef | None = None
    applied: ManifestRef | None = None
    lost: bool = False
    complete: bool = False


def started_leading(
    image: Image, partition: Partition, record: PartitionRecord, core: ManifestCore, node_id: int
) -> ev.StartedLeading:
    """That this node leads. Where nothing was ever compacted an unclean leader has nothing to begin
    anew with: a base generation would cost a reading of the whole log.
    """
    compacted = (
        partition.log.config.compact
        or core.held is not None
        or core.lost
        or was_compacted(image, partition.topic_partition.topic)
    )
    return ev.StartedLeading(
        record.leader_epoch, record.unclean and compacted, record.isr == (node_id,)
    )


def is_alone(core: PartitionCore, node_id: int) -> bool:
    """This leader is the whole ISR, and has asked for nobody else."""
    return core.leading and core.isr == (node_id,) and core.pending_isr is None


def base_name(effect: ev.CreateBaseGeneration) -> Generation:
    """The generation of a base: that of nothing else in its epoch."""
    lost = effect.replaces
    return Generation(effect.leader_epoch, 0 if lost is None else lost.generation.number + 1)


def awaited_replicas(core: PartitionCore) -> str:
    """Whom a pass waits for, or the publication of what one made."""
    if core.lacks_members and (core.awaits_members or core.all_published):
        minimum = core.effective_min_isr
        return f"another replica, ten minutes at most: the ISR {core.isr} is below {minimum}"
    return ", ".join(map(str, core.unacknowledged_replicas)) or "this node"


def others_apply(core: PartitionCore) -> bool:
    """Replicas that are there still apply what was published last: a newer generation would keep
    those that take longer than a pass out of the ISR.
    """
    return any(
        follower.held == core.published != follower.applied and replica in core.eligible
        for replica, follower in core.followers.items()
    )


def ref_of(manifest: Manifest) -> ManifestRef:
    """A manifest's name in the protocol."""
    return ManifestRef(manifest.generation, manifest.end_offset)


def generation_text(ref: ManifestRef | None) -> str:
    """A generation as it is shown: ``<leader epoch>.<generation>``."""
    return "none" if ref is None else str(ref.generation)
