"""What a replica tells its node beside the leader core's effects (``on_effect``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Truncated:
    """The log was cut at its end, or emptied.

    The shell writes the recovery points of the directory durably before the call that reported it
    returns: a stale one would let a start trust bytes that were never synced. ``mark_cleared``: the
    cut went below the end of the applied manifest, whose mark does not hold any more (rule 19).
    """

    log_start_offset: int
    log_end_offset: int
    recovery_point: int
    mark_cleared: bool = False


@dataclass(frozen=True, slots=True)
class CommittedLost:
    """Records of ``start..end`` were below the high watermark and are cut away.

    With unclean election off, and no power cut of a whole ISR, that is a bug.
    """

    start: int
    end: int
    leader_id: int
    leader_epoch: int


Report = Truncated | CommittedLost
