"""Asking the controller for another ISR: requests, and what follows from the answers.

The leader core says what it wants (:class:`.events.ProposeIsr`); the node collects
:meth:`IsrReplica.alter_isr_request` of many partitions into one AlterPartition request and gives
every answer to :meth:`IsrReplica.isr_answered` (``Partition.scala``: handleAlterPartitionError).
What the ISR *is* comes from the image alone (rule 35); until it does, the proposal stays pending
and counts in both directions (rule 30).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from kept.replication.events import IsrRefused, ProposeIsr
from kept.replication.replica import Replica
from kept.storage.errors import (
    FencedLeaderEpoch,
    IneligibleReplica,
    InvalidRequest,
    InvalidUpdateVersion,
    KeptError,
    NotLeaderOrFollower,
    UnknownTopicId,
    UnknownTopicOrPartition,
)

REFUSED_PAUSE_MS: Final = 100
"""After "not eligible" the image is about to say so, too; do not ask with every fetch till then."""

_REFUSED: Final = (IneligibleReplica, InvalidRequest)
"""It will not happen: back to the confirmed ISR."""
_OVERTAKEN: Final = (
    InvalidUpdateVersion,
    FencedLeaderEpoch,
    NotLeaderOrFollower,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
"""The partition changed since, perhaps by an earlier try of ours: the image will tell."""


@dataclass(frozen=True, slots=True)
class AlterIsrItem:
    """One partition of an AlterPartition request. ``isr``: (broker id, broker epoch), -1: unknown.

    ``base_published``: nothing is left to be published of an unclean leader (rule 19).
    """

    topic_id: UUID
    partition: int
    leader_epoch: int
    partition_epoch: int
    isr: tuple[tuple[int, int], ...]
    base_published: bool


class IsrReplica(Replica):
    """A replica whose ISR can change; see the module."""

    _settled: tuple[int, int] | None = None
    """(leader epoch, partition epoch) of the proposal that the controller has answered."""

    def alter_isr_request(self) -> AlterIsrItem | None:
        """What to ask the controller; None when nothing is pending, or the answer is known.

        The same again after an attempt whose outcome nobody knows.
        """
        core = self.core
        pending = core.pending_isr
        if (
            pending is None
            or self.suspended
            or self._settled == (core.leader_epoch, core.partition_epoch)
        ):
            return None
        return AlterIsrItem(
            self.topic_id,
            self.topic_partition.partition,
            core.leader_epoch,
            core.partition_epoch,
            tuple(zip(pending, core.pending_epochs, strict=True)),
            core.all_published,
        )

    def resume(self) -> None:
        """As for any replica; what was proposed and not asked for meanwhile is told again."""
        before, core = self.suspended, self.core
        super().resume()
        if before and core.pending_isr is not None and self.alter_isr_request() is not None:
            proposal = ProposeIsr(core.pending_isr, core.leader_epoch, core.partition_epoch)
            self._tell(proposal)

    def isr_answered(self, asked: AlterIsrItem, error: KeptError | None) -> None:
        """The controller's answer to ``asked``; any error that is no decision means "unknown".

        Late answers change nothing.
        """
        core = self.core
        version = (core.leader_epoch, core.partition_epoch)
        if core.pending_isr is None or version != (asked.leader_epoch, asked.partition_epoch):
            return
        if error is None or isinstance(error, _OVERTAKEN):
            self._settled = version
        elif isinstance(error, _REFUSED):
            self.step(IsrRefused(core.partition_epoch, REFUSED_PAUSE_MS))
