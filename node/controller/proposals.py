"""A change of the metadata: records, or how to decide on them when its turn has come."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Final

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import MetadataRecord
from kept.cluster.raft.messages import NO_NODE
from kept.node.runtime.time_slices import Pace, TimeSlices
from kept.steps import Steps
from kept.storage.errors import NotController

if TYPE_CHECKING:
    from kept.node.metadata.metadata_log import MetadataLog

Records = Sequence[MetadataRecord]
Change = Records | Callable[[Image], Records | Steps[Records]]
"""Records, or a function of the image that they will follow; one that decides on many things is a
generator and yields after each."""

TRIES: Final = 3


def check_leads(metadata: MetadataLog) -> None:
    """Raises NotController, with the leader as far as known, where this node may not decide."""
    if not metadata.leads:
        raise not_controller(metadata)


def not_controller(metadata: MetadataLog) -> NotController:
    """The error of a node that is not the active controller."""
    leader_id = metadata.leader_id
    return NotController(
        "this node is not the active controller", NO_NODE if leader_id is None else leader_id
    )


async def resolve(change: Change, current: Callable[[], Image], slices: TimeSlices) -> Records:
    """The records of a change to the ``current`` image.

    The caller sees to it that nobody else changes that image meanwhile. Another controller may,
    while this node does not lead: then it is decided again. Raises what the decision raises, and
    NotController when that does not end.
    """
    if not callable(change):
        return change
    for _ in range(TRIES):
        image = current()
        records = change(image)
        if not isinstance(records, Generator):
            return records
        pace = Pace()
        resolved = await slices.finish(records)
        await pace.checkpoint()  # what follows checks them and writes them down, at a stretch
        if current() is image:
            return resolved
    raise NotController("the metadata moved while a change was decided")
