"""Running a strategy over the whole log, in as many scans as its memory needs (rule 4a).

**Built in** (and prefixes of these): the kernel's map, see ``_strategies.pyx``. Each scan takes a
range of key hashes and halves it when the map is full; the next one goes on where the range ended,
as wide as the map will probably hold. The log is read twice for each: to fill the map, and to ask
it.

**Anyone else's.** A scan hands the strategy the records of one class of key hashes, as objects. The
first attempt has one class. When the strategy says *MaxKeysReached*, the scan is thrown away and
the keys are split into more classes, guessed from how far it came; so every verdict is made from
all records of its key. Then only those records are read again of which the verdicts do not say by
themselves whose they are.

The hash is keyed as the offset map's is, so nobody can aim keys at one class.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pyroaring import BitMap

from kept.compaction.cleaner.job import Job
from kept.compaction.cleaner.key_tracker import KeyTracker
from kept.compaction.cleaner.scan_stats import AbortedIndex, Progress, ScanStats, scan_segment
from kept.compaction.kernels import kernel
from kept.compaction.kernels.kernel import CLASSES, WORD_BYTES, slot_words
from kept.compaction.strategy import (
    From,
    Only,
    Rule,
    RuleKind,
    Strategy,
    StrategyFailed,
    Verdict,
    rules,
)
from kept.storage.disk import Disk
from kept.storage.errors import ConfigurationError
from kept.storage.records import Record

BYTES_PER_KEY: Final = 256
"""Memory for a key of a Python strategy: the buffer's size divided by it is ``max_keys``."""
MAX_CLASSES: Final = 1024
"""Scans of one pass at most; a strategy that asks for more has too little memory."""
_SLACK: Final = 1.05
"""Classes of keys are not equally large, and their number is an estimate."""
_COUNT_BYTES: Final = 1 << 16
"""Memory at least for counting keys."""
_MANY: Final = 1000
"""In a map for so many keys they are spread evenly: it tells how many classes the next one holds.
A smaller one begins with all that are left, and gives up what it must.
"""


@dataclass(slots=True)
class Verdicts:
    """Survivors by the base of their segment, relative to it. ``watched``: of the watched keys,
    by a strategy that is not built in.
    """

    survivors: dict[int, BitMap]
    scans: int = 0
    keys: int = 0
    watched: dict[bytes, Verdict] = field(default_factory=dict)


class _Full(Exception):
    """A strategy has no room for another key; ``share`` of the log was read before that."""

    def __init__(self, share: float) -> None:
        self.share = share


def max_keys(buffer_bytes: int) -> int:
    """Keys that a strategy may hold at once."""
    return max(1, buffer_bytes // BYTES_PER_KEY)


def verdicts(
    job: Job,
    disk: Disk,
    strategy: Strategy,
    facts: Mapping[int, ScanStats],
    progress: Progress,
    *,
    watch: KeyTracker | None = None,
) -> Verdicts:
    """What ``strategy`` keeps of the log; expired tombstones are still among it.

    Raises ConfigurationError naming ``log.cleaner.dedupe.buffer.size`` when the keys do not fit,
    and DamagedData where a segment is damaged.
    """
    segments = _Segments(job, disk, facts, progress, watch or KeyTracker(()))
    known = rules(strategy)
    if known is not None:
        return _by_rules(segments, known)
    return _by_strategy(segments, strategy)


class _Segments:
    """The segments of one job, and reading them."""

    def __init__(
        self,
        job: Job,
        disk: Disk,
        facts: Mapping[int, ScanStats],
        progress: Progress,
        watch: KeyTracker,
    ) -> None:
        self.job, self.facts, self.watch = job, facts, watch
        self._disk, self._progress = disk, progress
        self._aborted = AbortedIndex(job.aborted)
        self._bases = sorted(facts)
        self.tombstones = any(segment.tombstones for segment in facts.values())

    def none_survives(self) -> Verdicts:
        """To begin with."""
        return Verdicts({source.base_offset: BitMap() for source in self.job.sources})

    def scan(self, make: Callable[[int], Any]) -> None:
        """Drive the scan that ``make`` makes for each segment's base; None: it is not read."""
        for source in self.job.sources:
            scan = make(source.base_offset)
            if scan is not None:
                scan_segment(
                    scan,
                    source,
                    job=self.job,
                    disk=self._disk,
                    aborted=self._aborted,
                    facts=None,
                    progress=self._progress,
                )

    def base_of(self, offset: int) -> int:
        """Base of the segment that an offset is in, -1 below the first."""
        index = bisect_right(self._bases, offset) - 1
        return self._bases[index] if index >= 0 else -1

    def is_tombstone(self, offset: int) -> bool:
        """The record at ``offset`` has no value."""
        base = self.base_of(offset)
        return base >= 0 and offset - base in self.facts[base].tombstones

    def too_small(self, scans: int) -> ConfigurationError:
        """The error for too little memory."""
        return ConfigurationError(
            f"{self.job.topic_partition.place}: the strategy "
            f"{self.job.config.compaction_strategy} would need {scans} scans: raise "
            "log.cleaner.dedupe.buffer.size"
        )


# Built in.


def _by_rules(segments: _Segments, known: tuple[Rule, ...]) -> Verdicts:
    rule_map = _new_map(segments, known, segments.job.buffer_bytes)
    survivors = segments.none_survives()
    low, width = 0, CLASSES
    while low < CLASSES:
        scans = survivors.scans + max(1, (CLASSES - low) // width)
        if scans > MAX_CLASSES:
            raise segments.too_small(scans)
        rule_map.begin(low, min(low + width, CLASSES))
        _scan_by_rules(segments, rule_map, survivors)
        if rule_map.capacity >= _MANY:
            width = (rule_map.high - low) * rule_map.capacity * 95 // (100 * rule_map.size + 1)
        low, width = rule_map.high, max(1, min(width, CLASSES))
        survivors.scans += 1
        survivors.keys += rule_map.size
    return survivors


def _new_map(segments: _Segments, known: tuple[Rule, ...], buffer_bytes: int) -> kernel.RuleMap:
    """As large as the memory allows and the records need."""
    job, words = segments.job, slot_words(known)
    records = sum(facts.records for facts in segments.facts.values())
    wanted = int(records / job.load_factor) + 2
    slots = min(buffer_bytes // (words * WORD_BYTES), wanted)
    rule_map = kernel.RuleMap(slots, job.load_factor, job.hash_key, known, words)
    if rule_map.capacity < 1:
        raise segments.too_small(records)
    return rule_map


def _fill(segments: _Segments, rule_map: kernel.RuleMap, watch: KeyTracker | None = None) -> None:
    first = segments.job.log_start_offset
    segments.scan(lambda base: kernel.RuleScan(base, rule_map, first=first, watch=watch))


def _scan_by_rules(segments: _Segments, rule_map: kernel.RuleMap, found: Verdicts) -> None:
    """Fill the map from all segments, then ask it about all of them."""
    _fill(segments, rule_map, segments.watch)
    if rule_map.full:
        raise segments.too_small(CLASSES)
    first = segments.job.log_start_offset
    scans = {}

    def scan_kept(base: int) -> kernel.RuleScan:
        scans[base] = kernel.RuleScan(base, rule_map, first=first, keep=True)
        return scans[base]

    segments.scan(scan_kept)
    for base, scan in scans.items():
        found.survivors[base] |= BitMap(scan.kept())


# Anyone else's.


def _by_strategy(segments: _Segments, strategy: Strategy) -> Verdicts:
    classes, scans, keys = 1, 0, 0
    room = max_keys(segments.job.buffer_bytes)
    while True:
        survivors = segments.none_survives()
        share = 1.0
        try:
            for chosen in range(classes):
                scans += 1
                _Class(segments, strategy, chosen, classes).add_survivors(survivors)
        except _Full as full:
            share = max(full.share, 1e-3)
        else:
            survivors.scans = scans
            return survivors
        keys = keys or _record_keys(segments)
        classes = max(classes * 2, int(min(classes / share, keys * _SLACK / room)) + 1)
        if classes > MAX_CLASSES:
            raise segments.too_small(classes)


def _record_keys(segments: _Segments) -> int:
    """About how many keys the records have; a strategy's own are mostly no more."""
    buffer_bytes = max(segments.job.buffer_bytes, _COUNT_BYTES)
    rule_map = _new_map(segments, (Rule(b"", RuleKind.LATEST),), buffer_bytes)
    _fill(segments, rule_map)
    return rule_map.size * CLASSES // (rule_map.high - rule_map.low)


class _Class:
    """One class of keys under a strategy."""

    def __init__(self, segments: _Segments, strategy: Strategy, chosen: int, classes: int) -> None:
        self._segments, self._strategy = segments, strategy
        self._chosen, self._classes = chosen, classes
        self._newest: dict[bytes, int] = {}
        self._doubtful: dict[bytes, Verdict] = {}
        self._unproven: set[bytes] = set()
        """Keys of which the newest record goes, and no other was seen yet that stays."""
        self._from = segments.job.end_offset
        self._offsets = array("q")

    def add_survivors(self, found: Verdicts) -> None:
        """Add the survivors to ``found``. Raises StrategyFailed where nothing is left of a key."""
        given = self._collect()
        for key in self._newest.keys() - given.keys():
            raise self._lost(key)
        found.keys += len(given)
        found.watched.update((k, given[k]) for k in self._segments.watch.keys if k in given)
        for base, offsets in self._by_segment(self._judge(given)):
            found.survivors[base] |= offsets
        if self._doubtful:
            self._read_doubtful(found)
        for key in self._unproven:
            raise self._lost(key)

    def _lost(self, key: bytes) -> StrategyFailed:
        name, newest = type(self._strategy).__name__, self._newest[key]
        return StrategyFailed(
            f"the strategy {name} keeps no record of key {key!r}, whose newest is at offset "
            f"{newest}: of every key one must stay; nothing was changed"
        )

    def _collect(self) -> Mapping[bytes, Verdict]:
        """What the strategy says after all records of the class."""
        job = self._segments.job
        state = self._strategy.init(max_keys(job.buffer_bytes))
        key_of, reduce, newest = self._strategy.key, self._strategy.reduce, self._newest
        class_of_key, hash_key = kernel.class_of, job.hash_key
        chosen, classes = self._chosen, self._classes
        watched, note = frozenset(self._segments.watch.keys), self._segments.watch.note

        def use(records: list[Record]) -> None:
            for record in records:
                key = key_of(record)
                if key in watched:
                    note(key, record.offset)
                if classes != 1 and class_of_key(hash_key, key, classes) != chosen:
                    continue
                if reduce(state, key, record):
                    done = record.offset - job.log_start_offset
                    raise _Full(done / max(job.end_offset - job.log_start_offset, 1))
                newest[key] = record.offset

        first = job.log_start_offset
        self._segments.scan(lambda base: kernel.RecordScan(base, use, first=first))
        return self._strategy.collect(state)

    def _judge(self, given: Mapping[bytes, Verdict]) -> array[int]:
        """The records that certainly stay, each the newest of its key; notes what is doubtful."""
        certain, doubtful, offsets = array("q"), self._doubtful, self._offsets
        newest_of, end = self._newest, self._from
        is_tombstone = self._segments.is_tombstone if self._segments.tombstones else None
        for key, said in given.items():
            verdict = said
            newest = newest_of.get(key, -1)
            if isinstance(verdict, From):
                if verdict.offset < newest and is_tombstone is not None:
                    verdict = without_older(verdict, newest, is_tombstone)
            elif len(verdict.offsets) > 1 and is_tombstone is not None:
                verdict = without_older(verdict, newest, is_tombstone)
            if isinstance(verdict, From):
                if newest >= verdict.offset:
                    certain.append(newest)
                    if newest > verdict.offset:
                        doubtful[key] = verdict
                        end = min(end, verdict.offset)
                elif newest >= 0:
                    raise self._lost(key)
                continue
            certainly = newest in verdict.offsets
            if certainly:
                certain.append(newest)
            elif newest >= 0:
                self._unproven.add(key)
            if len(verdict.offsets) > certainly:
                doubtful[key] = verdict
                offsets.extend(verdict.offsets)
        self._from = end
        return certain

    def _by_segment(self, offsets: array[int]) -> Iterator[tuple[int, BitMap]]:
        """(base, relative offsets) of the segments that some offsets are in."""
        ordered = sorted(offsets)
        at = 0
        for source in self._segments.job.sources:
            base = source.base_offset
            at = bisect_left(ordered, base, at)
            end = bisect_left(ordered, source.end_offset, at)
            if end > at:
                yield base, BitMap(array("I", [offset - base for offset in ordered[at:end]]))
            at = end

    def _read_doubtful(self, found: Verdicts) -> None:
        """Read the records that doubtful verdicts may be about, and keep those that they name."""
        job, key_of, verdicts_ = self._segments.job, self._strategy.key, self._doubtful
        unproven = self._unproven
        wanted = dict(self._by_segment(self._offsets))
        for source in job.sources:
            low = max(self._from, job.log_start_offset, source.base_offset)
            if low < source.end_offset:
                base = source.base_offset
                wanted.setdefault(base, BitMap()).add_range(low - base, source.end_offset - base)

        def scan(base: int) -> kernel.RecordScan | None:
            if base not in wanted:
                return None
            survivors, left = found.survivors[base], wanted[base] - found.survivors[base]

            def use(records: list[Record]) -> None:
                for record in records:
                    key = key_of(record)
                    if keeps(verdicts_.get(key), record.offset):
                        survivors.add(record.offset - base)
                        unproven.discard(key)

            return kernel.RecordScan(base, use, first=job.log_start_offset, wanted=left.to_array())

        self._segments.scan(scan)


def keeps(verdict: Verdict | None, offset: int) -> bool:
    """Whether a verdict keeps the record at ``offset``; a key without one keeps nothing."""
    if isinstance(verdict, From):
        return offset >= verdict.offset
    return verdict is not None and offset in verdict.offsets


def without_older(verdict: Verdict, newest: int, is_tombstone: Callable[[int], bool]) -> Verdict:
    """The verdict, cut down to its winner where that is a tombstone.

    The winner is the newest record that the verdict keeps; ``newest`` is the newest record of the
    key.
    """
    if isinstance(verdict, Only):
        winner = max(verdict.offsets, default=-1)
        return Only(frozenset((winner,))) if is_tombstone(winner) else verdict
    if newest >= verdict.offset and is_tombstone(newest):
        return From(newest)
    return verdict


def class_of(hash_key: bytes, key: bytes, classes: int) -> int:
    """Which of the disjoint classes a key is in."""
    return kernel.class_of(hash_key, key, classes)
