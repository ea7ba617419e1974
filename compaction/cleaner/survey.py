"""First half of a pass: find out which records survive, and write it down as a manifest.

``survey(job, disk)`` reads the segments and decides (rules 4 to 10); it writes nothing. For the
strategy ``latest`` it maps ``first_dirty..end`` with the kernel's offset map. When the map is full
the scan's range ends there, the records below are looked up in the map, and a further scan
continues: k scans of reading, one of copying, one manifest. Every other strategy sees the whole
log (``scans.py``).

A record survives when no newer one in the mapped range has its key, and it has a value or its
delete horizon is unset or in the future. Keyless and aborted records do not survive; above
``clean_to`` everything does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pyroaring import BitMap

from kept.compaction.cleaner.job import Job, Source
from kept.compaction.cleaner.key_tracker import KeyOffsets, KeyTracker, merged_offsets
from kept.compaction.cleaner.scan_stats import (
    AbortedIndex,
    Progress,
    ScanStats,
    no_progress,
    producers_by_last_offset,
    scan_segment,
)
from kept.compaction.cleaner.segment_groups import group_sources
from kept.compaction.cleaner.transactions import Markers, decide
from kept.compaction.kernels import kernel
from kept.compaction.manifest.manifest import Manifest, OutputSegment
from kept.compaction.strategy import Latest, Strategy, Verdict, resolve
from kept.storage.disk import Disk
from kept.storage.errors import ConfigurationError, InvariantViolation

MIN_MAP_SLOTS: Final = 2
BYTES_PER_SLOT: Final = 16
MIN_BYTES_PER_KEY: Final = 7
"""A record has at least this many bytes, so a range has at most so many keys."""


@dataclass(slots=True)
class SegmentGroup:
    """Source segments that become one output (or several, should it grow beyond the limits)."""

    sources: tuple[Source, ...]
    output: OutputSegment
    changed: bool


@dataclass(slots=True)
class Survey:
    """What a survey found: the manifest, how to build it, and why records go.

    ``watched_offsets``: where the records of the watched keys are; ``watched_verdicts``: what a
    strategy that is not built in decided about them.
    """

    manifest: Manifest
    groups: list[SegmentGroup]
    facts: list[ScanStats]
    survivors: dict[int, BitMap]
    markers: dict[int, Markers]
    scans: int = 0
    map_bytes: int = 0
    keys: int = 0
    carried: frozenset[int] = field(default_factory=frozenset)
    watched_offsets: Mapping[bytes, KeyOffsets] = field(default_factory=dict)
    watched_verdicts: Mapping[bytes, Verdict] = field(default_factory=dict)


def survey(
    job: Job,
    disk: Disk,
    progress: Progress = no_progress,
    previous: Manifest | None = None,
    *,
    strategy: Strategy | None = None,
    keys: Iterable[bytes] = (),
) -> Survey:
    """Decide what survives; see the module. ``strategy`` is the job's; ``keys`` are watched.

    Raises DamagedData where a segment is damaged, and ConfigurationError naming
    ``log.cleaner.dedupe.buffer.size`` when not even one key fits into the map.
    """
    surveyor = _Surveyor(job, disk, progress, previous)
    surveyor.below, surveyor.above = KeyTracker(keys), KeyTracker(keys)
    return surveyor.run(strategy or resolve(job.config))


class _Surveyor:
    below: KeyTracker
    above: KeyTracker

    def __init__(self, job: Job, disk: Disk, progress: Progress, previous: Manifest | None) -> None:
        self.job, self.disk, self.progress = job, disk, progress
        self.aborted = AbortedIndex(job.aborted)
        self.producers = producers_by_last_offset(job)
        self.facts: dict[int, ScanStats] = {}
        self.survivors: dict[int, BitMap] = {}
        self.previous = previous
        self.before = {} if previous is None else {s.base_offset: s for s in previous.segments}
        self.scans = self.map_bytes = self.keys = 0
        self.watched_verdicts: Mapping[bytes, Verdict] = {}

    def run(self, strategy: Strategy) -> Survey:
        """All of it."""
        job = self.job
        carried: frozenset[int] = frozenset()
        if job.horizons_only:
            if self.previous is None:
                raise InvariantViolation("a pass for horizons needs the manifest it builds on")
            clean_to = self.previous.clean_to
            carried = self._scan_passed_horizons(self.previous)
        elif job.base:
            clean_to = job.log_start_offset
            for source in job.sources:
                self.scan(source)
                self.survivors[source.base_offset] = BitMap()
        elif type(strategy) is Latest:
            clean_to = self._latest()
        else:
            clean_to = self._other(strategy)
        facts = [self.facts[s.base_offset] for s in job.sources if s.base_offset in self.facts]
        markers = decide(job, facts, clean_to)
        for segment in facts:
            self._decide(segment, markers[segment.source.base_offset], clean_to)
        groups = self._groups(markers, clean_to, carried)
        manifest = Manifest(
            job.uuid,
            job.partition,
            job.generation,
            job.log_start_offset,
            clean_to,
            job.end_offset,
            job.now_ms,
            job.horizon_ms,
            tuple(group.output for group in groups),
        )
        manifest.check_invariants()
        noted = {key: merged_offsets(key, self.below, self.above) for key in self.above.keys}
        return Survey(
            manifest,
            groups,
            facts,
            self.survivors,
            markers,
            self.scans,
            self.map_bytes,
            self.keys,
            carried,
            {key: entry for key, entry in noted.items() if entry is not None},
            self.watched_verdicts,
        )

    # Scanning.

    def scan(self, source: Source, **options: object) -> kernel.SegmentScan:
        """Scan a segment; the first scan of each gathers its facts."""
        base = source.base_offset
        facts = None
        if base not in self.facts:
            facts = self.facts[base] = ScanStats(source)
        segment_scan = kernel.SegmentScan(
            base,
            now_ms=self.job.now_ms,
            producers=self.producers,
            uncleanable=self.job.end_offset,
            **options,  # type: ignore[arg-type]
        )
        scan_segment(
            segment_scan,
            source,
            job=self.job,
            disk=self.disk,
            aborted=self.aborted,
            facts=facts,
            progress=self.progress,
        )
        if facts is not None:
            facts.load(segment_scan)
        return segment_scan

    def _latest(self) -> int:
        """Map the dirty range, in as many scans as the map needs; returns ``clean_to``."""
        job = self.job
        start = max(job.first_dirty, job.log_start_offset)
        offset_map = self._new_map(start)
        end = start
        while end < job.end_offset and self.scans < job.max_scans:
            start, end = end, self._map_from(offset_map, end)
            if end <= start:
                raise _too_small(job)
            self._lookup_below(offset_map, start)
            offset_map.finish()
            for source in job.sources:
                low, high = max(source.base_offset, start), min(source.end_offset, end)
                if low < high:
                    won = BitMap(offset_map.winners(low, high)).shift(low - source.base_offset)
                    old = self.survivors.get(source.base_offset)
                    self.survivors[source.base_offset] = won if old is None else old | won
            self.scans += 1
        for source in job.sources:
            if source.base_offset not in self.facts:
                self.scan(source)
            present = self.facts[source.base_offset].present
            self.survivors.setdefault(source.base_offset, present.copy())
        return max(end, start)

    def _new_map(self, start: int) -> kernel.OffsetMap:
        job = self.job
        dirty = sum(s.size_bytes for s in job.sources if s.end_offset > start)
        wanted = int(dirty / MIN_BYTES_PER_KEY / job.load_factor) + MIN_MAP_SLOTS
        slots = min(job.buffer_bytes // BYTES_PER_SLOT, wanted)
        offset_map = kernel.OffsetMap(slots, job.load_factor, job.hash_key)
        if offset_map.capacity < 1:
            raise _too_small(job)
        self.map_bytes = offset_map.size_bytes
        return offset_map

    def _map_from(self, offset_map: kernel.OffsetMap, start: int) -> int:
        """Put the keys of ``start..`` into the map until it is full; returns where that ends."""
        job = self.job
        offset_map.clear(start)
        end = job.end_offset
        for source in job.sources:
            if source.end_offset <= start:
                continue
            filled = self.scan(
                source, mode=kernel.MAP, map=offset_map, first=start, watch=self.above
            )
            if filled.full_at >= 0:
                end = filled.full_at
                break
        self.keys += offset_map.size
        return end

    def _lookup_below(self, offset_map: kernel.OffsetMap, start: int) -> None:
        """Drop what the map supersedes from the survivors below its range."""
        for source in self.job.sources:
            base = source.base_offset
            if base >= start:
                break
            alive = self.survivors.get(base)
            lookup = self.scan(
                source,
                mode=kernel.LOOKUP,
                map=offset_map,
                first=self.job.log_start_offset,
                last=start,
                survivors=None if alive is None else alive.to_array(),
                watch=self.below,
            )
            self.survivors[base] = BitMap(lookup.kept())

    def _other(self, strategy: Strategy) -> int:
        """Any strategy but ``latest``: it sees every record (rule 4a)."""
        from kept.compaction.strategies.scans import verdicts

        for source in self.job.sources:
            self.scan(source)
        others = verdicts(
            self.job, self.disk, strategy, self.facts, self.progress, watch=self.above
        )
        self.survivors, self.scans, self.keys = others.survivors, others.scans, others.keys
        self.watched_verdicts = others.watched
        return self.job.end_offset

    def _scan_passed_horizons(self, previous: Manifest) -> frozenset[int]:
        """Scan the segments with a passed horizon; the others are as ``previous`` lists them."""
        carried = set()
        for source in self.job.sources:
            base = source.base_offset
            segment = self.before.get(base)
            if segment is None or segment.end_offset != source.end_offset:
                raise InvariantViolation(
                    f"segment {base} is not as manifest {previous.generation} left it"
                )
            if base in self.job.rewrite:
                self.scan(source)
                self.survivors[base] = self.facts[base].present.copy()
            else:
                carried.add(base)
                self.survivors[base] = segment.survivors
        return frozenset(carried)

    # Deciding.

    def _decide(self, facts: ScanStats, markers: Markers, clean_to: int) -> None:
        """Rule 5 for one segment, now that the map has spoken."""
        base, length = facts.source.base_offset, facts.source.end_offset - facts.source.base_offset
        alive = self.survivors[base]
        alive -= facts.expired
        alive -= facts.keyless
        alive -= facts.aborted
        alive -= markers.removed
        alive |= markers.kept
        above = max(clean_to - base, 0)
        if above < length:
            alive |= _above(facts.present, above)
        below = self.job.log_start_offset - base
        if below > 0:
            alive.remove_range(0, below)
        self.survivors[base] = alive

    def _groups(
        self, markers: dict[int, Markers], clean_to: int, carried: frozenset[int]
    ) -> list[SegmentGroup]:
        job = self.job
        alone = carried if job.horizons_only else frozenset[int]()
        groups = []
        shares = {
            base: min(len(self.survivors[base]) / len(facts.present), 1.0)
            for base, facts in self.facts.items()
            if facts.present
        }
        for sources in group_sources(job, clean_to, alone, shares):
            base, end = sources[0].base_offset, sources[-1].end_offset
            if len(sources) == 1 and base in carried:
                groups.append(SegmentGroup(sources, self.before[base], changed=False))
                continue
            parts = [
                self._part(source, markers[source.base_offset], clean_to) for source in sources
            ]
            output = _joined(base, end, parts)
            changed = len(sources) > 1 or self._differs(sources[0], output)
            if not changed:
                output = self._with_digest(output)
            groups.append(SegmentGroup(sources, output, changed))
        return groups

    def _with_digest(self, output: OutputSegment) -> OutputSegment:
        """An unchanged segment is what the last pass made of it: its digest still holds."""
        known = self.before.get(output.base_offset)
        if known is None or known.end_offset != output.end_offset:
            return output
        same = known.survivors == output.survivors
        return replace(known, tombstones=output.tombstones) if same else output

    def _part(self, source: Source, markers: Markers, clean_to: int) -> OutputSegment:
        """What the manifest says about one source segment."""
        base = source.base_offset
        facts, alive = self.facts[base], self.survivors[base]
        horizon_ms = self.job.horizon_ms
        tombstones = facts.tombstones & alive
        horizons: dict[int, BitMap] = {}
        waiting = BitMap()
        for first, last, old in facts.horizons:
            if old >= 0:
                keep, value = alive.range_cardinality(first, last + 1) > 0, old
            else:
                keep = base + first < clean_to and tombstones.range_cardinality(first, last + 1) > 0
                value = horizon_ms
            if keep:
                horizons.setdefault(value, BitMap()).add(first)
                waiting.add_range(first, last + 1)
        for first, value in markers.horizons:
            horizons.setdefault(value, BitMap()).add(first)
        empties = BitMap(
            first for first, last in facts.empties if not alive.range_cardinality(first, last + 1)
        )
        empties |= BitMap(first for first, _ in facts.bare if base + first >= clean_to)
        empties |= BitMap(markers.empties)
        return OutputSegment(
            base,
            source.end_offset,
            alive,
            empties,
            horizons,
            tuple(markers.aborted),
            tombstones=tombstones & waiting,
        )

    def _differs(self, source: Source, output: OutputSegment) -> bool:
        """Whether a rewrite of this one segment would change anything."""
        facts = self.facts[source.base_offset]
        if len(output.survivors) != len(facts.present):
            return True
        bare = {first for first, _ in facts.bare}
        bare |= {c.first for c in facts.controls if c.first not in facts.present}
        if set(output.empties) != bare:
            return True
        old = {(first, ms) for first, _, ms in facts.horizons if ms >= 0}
        old |= {(c.first, c.horizon_ms) for c in facts.controls if c.horizon_ms >= 0}
        new = {(first, ms) for ms, batches in output.horizons.items() for first in batches}
        if old != new:
            return True
        low, high = source.base_offset, source.end_offset
        entries = {t for t in self.job.aborted if low <= t.last_offset < high}
        return entries != set(output.aborted)


def _above(bitmap: BitMap, low: int) -> BitMap:
    above = bitmap.copy()
    if low > 0:
        above.remove_range(0, low)
    return above


def _joined(base: int, end: int, parts: Sequence[OutputSegment]) -> OutputSegment:
    """Several parts as one segment."""
    survivors, empties, tombstones = BitMap(), BitMap(), BitMap()
    horizons: dict[int, BitMap] = {}
    for part in parts:
        shift = part.base_offset - base
        survivors |= part.survivors.shift(shift)
        empties |= part.empties.shift(shift)
        tombstones |= part.tombstones.shift(shift)
        for value, batches in part.horizons.items():
            horizons[value] = horizons.get(value, BitMap()) | batches.shift(shift)
    aborted = tuple(entry for part in parts for entry in part.aborted)
    return OutputSegment(base, end, survivors, empties, horizons, aborted, tombstones=tombstones)


def _too_small(job: Job) -> ConfigurationError:
    return ConfigurationError(
        f"{job.topic_partition.place}: not even one key fits into the offset map of "
        f"{job.buffer_bytes} bytes at load factor {job.load_factor}: raise "
        "log.cleaner.dedupe.buffer.size"
    )
