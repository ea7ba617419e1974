"""Offline: what is not there any more, and what proves that it was. For ``kept log check``.

A log that lacks files, or has a file that was cut at the end of a batch, is whole as far as it
goes. A start serves it, and says at level error which records are lost
(:mod:`kept.storage.log.missing_files`, :mod:`kept.storage.log.recovery`); here that is damage. What
a power cut takes before it is flushed is a note.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kept.storage import checkpoints, layout
from kept.storage.directory import OWNER
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData
from kept.storage.inspect.findings import Finding
from kept.storage.segments import time_index
from kept.storage.types import MAX_INT32, TopicPartition

_KINDS: Final = (
    layout.RECOVERY_POINTS,
    layout.HIGH_WATERMARKS,
    layout.LOG_STARTS,
    layout.CLEANER_OFFSETS,
)
"""As :class:`Known` has them."""

_OR_COMPACTED: Final = (
    "a file was cut or removed, or the topic was compacted once and nothing tells of it any more"
)
"""A start says the same of such a gap."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a directory's checkpoints say of one of its logs; whether it stopped cleanly, and
    whether kept made it.
    """

    clean: bool
    is_kepts: bool = False
    recovery_point: int = 0
    high_watermark: int = 0
    log_start_offset: int = 0
    cleaned_to: int = 0


class Checkpointed:
    """The checkpoints of an entry of ``log.dirs``, read once. One that is damaged says nothing, and
    is a finding of its own.
    """

    def __init__(self, disk: Disk, directory: str) -> None:
        self.clean = disk.exists(f"{directory}/{layout.CLEAN_SHUTDOWN}")
        self._is_kepts = _has_kepts_properties(disk, directory)
        self.knows_deletions = self._is_kepts or disk.exists(f"{directory}/{layout.ADOPTED}")
        """Apache Kafka's may know a log that was deleted a moment before a crash."""
        self._offsets = [_offsets(disk, f"{directory}/{kind}") for kind in _KINDS]

    def known(self, name: str) -> Known:
        """What is known of the log in the directory ``name``; of one set aside nothing is."""
        parsed = layout.parse_directory_name(name)
        if parsed is None or parsed.state:
            return Known(self.clean)
        tp = parsed.topic_partition
        return Known(self.clean, self._is_kepts, *(known.get(tp, 0) for known in self._offsets))

    def reached(self) -> dict[TopicPartition, int]:
        """How far each log went, at least."""
        recovery_points, high_watermarks, *_ = self._offsets
        tps = {*recovery_points, *high_watermarks}
        return {tp: max(recovery_points.get(tp, 0), high_watermarks.get(tp, 0)) for tp in tps}


def _offsets(disk: Disk, path: str) -> Mapping[TopicPartition, int]:
    try:
        return checkpoints.read_offsets(disk, path)
    except DamagedData:
        return {}


def missing_records(
    disk: Disk, path: str, ends: Mapping[int, int], known: Known, damaged: Set[int]
) -> list[Finding]:
    """What the log in ``path`` lacks. ``ends``: the offset after the last batch of each segment, by
    its base offset; ``damaged``: those of them that end with damage.
    """
    files, bases = _segment_files(disk, path), sorted(ends)
    findings = []
    end = max([known.log_start_offset, *(max(base, ends[base]) for base in bases[-1:])])
    if end < known.recovery_point:
        why = f"ends at {end}, though everything below {known.recovery_point} was durable"
        findings.append(_lost(path, end, known.recovery_point, why, True))
    newest = max((f.base_offset for f in files if f.kind == layout.SNAPSHOT), default=0)
    reached, proof = max(
        (known.high_watermark, layout.HIGH_WATERMARKS), (newest, f"{newest:020d}{layout.SNAPSHOT}")
    )
    if reached > max(end, known.recovery_point) and damaged.isdisjoint(bases[-1:]):
        why = f"ends at {end}, and was at {reached} by {proof}"
        findings.append(_lost(path, end, reached, why, known.clean))
    if not bases and _has_epochs(disk, path):
        why = f"there is a {layout.LEADER_EPOCHS} and no .log"
        findings.append(_lost(path, known.log_start_offset, None, why, True))
    return findings + _gaps(disk, path, ends, known, damaged)


def _gaps(
    disk: Disk, path: str, ends: Mapping[int, int], known: Known, damaged: Set[int]
) -> list[Finding]:
    """Closed segments that lack their end, in a log of which nothing says that it was compacted.

    What says it can be gone: a manifest that was given up, a journal without room
    (``kept.compaction.history.bytes``), a checkpoint. Apache Kafka's followers of a compacted log
    begin their segments where the next batch does (kept's where the one before ended). So a gap
    that was durable proves nothing by itself, and a start leaves it open, too; a time index proves
    something that names a record in it (one replica of several is cut there by its start).
    """
    if known.cleaned_to or layout.tells_of_compaction(disk.listdir(path)):
        return []
    orphans, findings = _orphans(_segment_files(disk, path)), []
    for base, following in pairwise(sorted(ends)):
        is_far = following - 1 - base > MAX_INT32
        is_orphaned = any(base < orphan < following for orphan in orphans)
        if ends[base] >= following or is_far or is_orphaned or base in damaged:
            continue
        if following <= known.log_start_offset:
            continue  # nobody reads it: a power cut left some of what was to go
        why = f"ends at {ends[base]}, the next segment begins at {following}"
        was_durable = known.clean or following <= known.recovery_point
        file = layout.segment_file(path, base, layout.LOG)
        if not was_durable:
            findings.append(_lost(file, ends[base], following, why, False))
        elif known.is_kepts and (last := _last_indexed(disk, path, base)) >= ends[base]:
            why += f", and its {layout.TIME_INDEX} names {last}"
            findings.append(_lost(file, ends[base], following, why, True))
        else:
            lost = _lost(file, ends[base], following, why, False)
            findings.append(lost._replace(why=f"{lost.why}; {_OR_COMPACTED}"))
    return findings


def _last_indexed(disk: Disk, path: str, base: int) -> int:
    """The largest offset that a segment's time index names; -1: none."""
    try:
        data = disk.read(layout.segment_file(path, base, layout.TIME_INDEX))
    except FileNotFoundError:
        return -1
    _, offsets = time_index.decode_entries(data)
    return max((base + relative for relative in offsets), default=-1)


def lost_segments(disk: Disk, path: str, ends: Mapping[int, int], known: Known) -> set[int]:
    """Bases of indexes without a ``.log`` that prove that records are gone: no remainders of a
    retention, and of files that no power cut took before they were flushed.
    """
    bases = sorted(ends)

    def is_lost(base: int) -> bool:
        slot = bisect_right(bases, base)
        if slot < len(bases) and bases[slot] <= known.log_start_offset:
            return False
        is_behind = slot > 0 and ends[bases[slot - 1]] <= base
        return is_behind and (known.clean or base < known.recovery_point)

    return set(filter(is_lost, _orphans(_segment_files(disk, path))))


def _segment_files(disk: Disk, path: str) -> list[layout.SegmentFile]:
    return [file for name in disk.listdir(path) if (file := layout.parse_segment_file(name))]


def _orphans(files: Iterable[layout.SegmentFile]) -> set[int]:
    """Bases of indexes without a ``.log``, not even one on its way in or out."""
    of_segments = [file for file in files if file.kind != layout.SNAPSHOT]
    logs = {file.base_offset for file in of_segments if file.kind == layout.LOG}
    return {file.base_offset for file in of_segments if not file.state} - logs


def _has_epochs(disk: Disk, path: str) -> bool:
    try:
        return bool(checkpoints.read_epochs(disk, f"{path}/{layout.LEADER_EPOCHS}"))
    except DamagedData:
        return False  # a finding of its own


def missing_logs(path: str, names: Iterable[str], checkpointed: Checkpointed) -> list[Finding]:
    """The logs that the checkpoints of a directory know, and that are not among its ``names``."""
    there = {p.topic_partition for name in names if (p := layout.parse_directory_name(name))}
    lost = {tp: end for tp, end in checkpointed.reached().items() if end > 0 and tp not in there}
    is_settled = checkpointed.clean or checkpointed.knows_deletions
    findings = []
    for tp in sorted(lost):
        name = layout.directory_name(tp)
        first = checkpointed.known(name).log_start_offset
        findings.append(_lost(f"{path}/{name}", first, lost[tp], "is not there", is_settled))
    return findings


def _has_kepts_properties(disk: Disk, path: str) -> bool:
    try:
        properties = checkpoints.read_properties(disk, f"{path}/{layout.META_PROPERTIES}")
    except DamagedData:
        return False
    return properties is not None and OWNER in properties


def _lost(path: str, first: int, end: int | None, why: str, damaged: bool) -> Finding:
    until = "on" if end is None else f"to {end - 1}"
    return Finding(path, -1, first, f"{why}: records from {first} {until} are lost here", damaged)
