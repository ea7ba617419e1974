"""ListOffsets and OffsetForLeaderEpoch answered from one log, as Apache Kafka does. One difference:
where the largest timestamp lies below the log start, Kafka names an offset that nobody can read.

Sources: ``UnifiedLog.fetchOffsetByTimestamp``, ``Partition.fetchOffsetForTimestamp``,
``ReplicaManager.fetchOffset``. There is no tiered storage: "local" means all, "tiered" nothing.
"""

from __future__ import annotations

from typing import Final

from kept.replication.partition_views import ListedOffset
from kept.storage.errors import OffsetNotAvailable, OffsetOutOfRange
from kept.storage.log.log import Log
from kept.storage.log.log_reader import FindRecord, find_record
from kept.storage.types import NO_LEADER_EPOCH, NO_OFFSET, NO_TIMESTAMP

LATEST_TIMESTAMP: Final = -1
EARLIEST_TIMESTAMP: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL_TIMESTAMP: Final = -4
LATEST_TIERED_TIMESTAMP: Final = -5
EARLIEST_PENDING_UPLOAD_TIMESTAMP: Final = -6

NOTHING: Final = ListedOffset(NO_TIMESTAMP, NO_OFFSET, NO_LEADER_EPOCH)
"""No offset answers the question; not an error."""


def list_offset(
    log: Log,
    timestamp: int,
    *,
    fetchable: int,
    leader_epoch: int,
    late: str | None,
    find: FindRecord = find_record,
) -> ListedOffset:
    """The offset for a timestamp or one of the special values above.

    ``fetchable`` is where this reader's offsets end. ``late`` is set when HW has not yet reached
    the start of the leader's epoch and a consumer asks: what depends on HW then raises
    OffsetNotAvailable (rule 38), because it could be an offset below one that was seen before.
    ``find`` looks into a batch; what it raises passes through.
    """
    if timestamp == LATEST_TIMESTAMP:
        if late is not None:
            raise OffsetNotAvailable(late)
        return ListedOffset(NO_TIMESTAMP, fetchable, leader_epoch)
    if timestamp in (EARLIEST_TIMESTAMP, EARLIEST_LOCAL_TIMESTAMP):
        start = log.log_start_offset
        entries = log.leader_epochs.entries
        known = bool(entries) and entries[0][1] <= start
        return ListedOffset(NO_TIMESTAMP, start, entries[0][0] if known else NO_LEADER_EPOCH)
    if timestamp in (LATEST_TIERED_TIMESTAMP, EARLIEST_PENDING_UPLOAD_TIMESTAMP):
        return NOTHING
    if timestamp == MAX_TIMESTAMP:
        entry = log.offset_of_max_timestamp(find)
    else:
        entry = log.offset_for_timestamp(timestamp, find)
    if entry is None or entry.offset >= fetchable:
        if late is not None:
            raise OffsetNotAvailable(late)
        return NOTHING
    return ListedOffset(entry.timestamp, entry.offset, entry.leader_epoch)


def diverging_epoch(log: Log, last_fetched_epoch: int, offset: int) -> tuple[int, int] | None:
    """Where a reader that has ``last_fetched_epoch`` up to ``offset`` left this log (rule 26).

    None: it did not. Raises OffsetOutOfRange when the epoch is unknown here, or the offset is
    below the log start, before any answer about divergence.
    """
    end = log.leader_epochs.end_offset_for(last_fetched_epoch)
    if end is None:
        raise OffsetOutOfRange(
            f"{log.topic_partition.place}: the last fetched epoch {last_fetched_epoch} is not "
            "known here"
        )
    if offset < log.log_start_offset:
        raise OffsetOutOfRange(
            f"{log.topic_partition.place}: offset {offset} is below the log start "
            f"{log.log_start_offset}"
        )
    if end[0] < last_fetched_epoch or end[1] < offset:
        return end
    return None
