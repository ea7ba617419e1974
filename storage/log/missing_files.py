"""Files of a log that were there and are not any more: nobody is to miss records without a word.

A log that lacks a ``.log`` file opens: as far as its other files go it is whole, and the other logs
of a node are not to wait for it (Apache Kafka opens it, too, and says nothing but that it found an
index without a log). But what is left behind proves that there was more: the checkpoint of high
watermarks, the producer snapshot of a later roll, an index whose log is gone, the epochs of a log
that has no segment at all. :func:`find_traces` takes that down before recovery tidies it up, and
:func:`report_missing` compares it with what was opened: one line at level error, with the offsets.

What was to be durable and is not is told by :mod:`kept.storage.log.recovery` itself.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from kept.storage import layout
from kept.storage.checkpoints import read_epochs
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData

if TYPE_CHECKING:
    from kept.storage.log.log import Log

logger = logging.getLogger(__name__)


class Traces(NamedTuple):
    """What the names in a log's directory prove."""

    snapshots: tuple[int, ...]
    orphans: tuple[int, ...]
    """Base offsets of indexes without a ``.log``."""
    bereft: bool
    """A leader had written, and there is no ``.log`` at all, not even on its way out or in."""


def find_traces(disk: Disk, directory: str) -> Traces:
    """Before recovery; a directory that is not there has no traces."""
    logs: set[int] = set()
    indexes: set[int] = set()
    snapshots: list[int] = []
    for name in disk.listdir(directory) if disk.exists(directory) else ():
        parsed = layout.parse_segment_file(name)
        if parsed is None:
            continue
        if parsed.kind == layout.LOG:
            logs.add(parsed.base_offset)
        elif parsed.state:
            continue  # on its way out or in
        elif parsed.kind == layout.SNAPSHOT:
            snapshots.append(parsed.base_offset)
        else:
            indexes.add(parsed.base_offset)
    bereft = not logs and _has_epochs(disk, f"{directory}/{layout.LEADER_EPOCHS}")
    return Traces(tuple(snapshots), tuple(sorted(indexes - logs)), bereft)


def _has_epochs(disk: Disk, path: str) -> bool:
    try:
        return bool(read_epochs(disk, path))
    except DamagedData:
        return True  # recovery says what is wrong with it


def report_missing(log: Log, traces: Traces, high_watermark: int, recovery_point: int) -> bool:
    """Name what is missing; whether anything is. ``high_watermark`` and ``recovery_point`` as
    checkpointed.
    """
    end = log.log_end_offset
    within = False
    for base in traces.orphans:
        if log.segments.bases[0] < base < end:
            upper = log.segments.bases[log.segments.floor(base) + 1 :]
            until = upper[0] if upper else end
            if until > log.log_start_offset:  # else it was to go: nobody reads below the start
                within = True
                _report(log, _index_alone(base), base, until)
    newest = max(traces.snapshots, default=0)
    reached, proof = max(
        (high_watermark, layout.HIGH_WATERMARKS), (newest, f"{newest:020d}{layout.SNAPSHOT}")
    )
    if reached > max(end, recovery_point):
        _report(log, f"it ends at {end}, and was at {reached} by {proof}", end, reached)
    elif end >= recovery_point and any(base >= end for base in traces.orphans):
        _report(log, _index_alone(max(traces.orphans)), end, None)
    elif end >= recovery_point and traces.bereft:
        _report(log, f"there is a {layout.LEADER_EPOCHS} and no .log", end, None)
    else:
        return within or end < recovery_point
    return True


def _index_alone(base: int) -> str:
    return f"the .log of its index {base:020d} is missing"


def _report(log: Log, why: str, first: int, end: int | None) -> None:
    until = "on" if end is None else f"to {end - 1}"
    logger.error(
        "%s: %s: records from %d %s are lost here; a file was removed or damaged, or power failed "
        "before a flush (a follower fetches them from its leader)",
        log.directory,
        why,
        first,
        until,
    )
