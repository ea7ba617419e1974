"""What a replica tells its node beside its core's effects (``PartitionListener.perform``)."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct


class LogTruncated(Struct, frozen=True):
    """The log was cut at its end, or emptied."""

    log_start_offset: int
    log_end_offset: int


class LostRecord(NamedTuple):
    """One record that goes. ``tombstone``: it deleted its key."""

    offset: int
    key: bytes | None
    tombstone: bool


class RecordsLost(Struct, frozen=True):
    """A cut is about to take away ``start..end``; it comes before the cut.

    With unclean election off, and no power cut of a whole ISR, that is a bug.

    Those below ``committed_to`` were committed; the others may have been: the leader was elected
    uncleanly, and a replica that crashed knows an older high watermark than there was.
    ``incomplete`` says why not all ``records`` are named; None: all are.
    """

    start: int
    end: int
    committed_to: int
    records: tuple[LostRecord, ...]
    incomplete: str | None


class AcknowledgementsLeft(Struct, frozen=True):
    """More are to hear that what they wait for is committed than are told at once: call
    :meth:`.partition.Partition.acknowledge_next` until nobody is left, in slices.
    """


Report = LogTruncated | RecordsLost | AcknowledgementsLeft
