"""Asking the controller for another ISR: requests, and what follows from the answers.

The leader core says what it wants (:class:`.events.ProposeIsr`); the node collects
:meth:`.replica.Replica.alter_isr_request` of many partitions into one AlterPartition request and
gives every answer to :meth:`.replica.Replica.alter_isr_completed`
(``Partition.scala``: handleAlterPartitionError).
What the ISR *is* comes from the image alone (rule 35); until it does, the proposal stays pending
and counts in both directions (rule 30).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from msgspec import Struct

from kept.storage.errors import (
    FencedLeaderEpoch,
    IneligibleReplica,
    InvalidRequest,
    InvalidUpdateVersion,
    NotLeaderOrFollower,
    UnknownTopicId,
    UnknownTopicOrPartition,
)

REFUSED_PAUSE_MS: Final = 100
"""After "not eligible" the image is about to say so, too; do not ask with every fetch till then."""

REFUSED: Final = (IneligibleReplica, InvalidRequest)
"""It will not happen: back to the confirmed ISR."""
OVERTAKEN: Final = (
    InvalidUpdateVersion,
    FencedLeaderEpoch,
    NotLeaderOrFollower,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
"""The partition changed since, perhaps by an earlier try of ours: the image will tell."""


class AlterIsrItem(Struct, frozen=True):
    """One partition of an AlterPartition request. ``isr``: (broker id, broker epoch), -1: unknown.

    ``base_published``: nothing is left to be published of an unclean leader (rule 19).
    ``last_epoch``: of the log, if it is above ``leader_epoch``, in which it cannot be led; else 0.
    """

    topic_id: UUID
    partition: int
    leader_epoch: int
    partition_epoch: int
    isr: tuple[tuple[int, int], ...]
    base_published: bool
    last_epoch: int = 0
