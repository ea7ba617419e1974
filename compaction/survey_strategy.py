"""Running a strategy over the whole log, in as many scans as its memory needs (rule 4a).

A scan hands the strategy the records of one class of key hashes. The first attempt has one class.
When the strategy says *MaxKeysReached*, the scan is thrown away and the keys are split into more
classes, guessed from how far it came; so every verdict is made from all records of its key. The
hash is keyed as the offset map's is, so nobody can aim keys at one class.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pyroaring import BitMap

from kept.compaction.facts import Progress, SegmentFacts, whole_batches
from kept.compaction.job import INFLATE_LIMIT, Job
from kept.compaction.strategy import From, Only, Strategy, Verdict
from kept.storage.disk import Disk
from kept.storage.errors import ConfigurationError
from kept.storage.records import Record, records

BYTES_PER_KEY: Final = 256
"""Memory that a Python strategy is reckoned to need for a key: the buffer's size sets
``max_keys``.
"""
MAX_CLASSES: Final = 1024
"""Scans of one pass at most; a strategy that asks for more has too little memory."""


@dataclass(slots=True)
class Verdicts:
    """Survivors by the base of their segment, relative to it."""

    survivors: dict[int, BitMap]
    scans: int
    keys: int


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
    facts: Mapping[int, SegmentFacts],
    progress: Progress,
) -> Verdicts:
    """What ``strategy`` keeps of the log; expired tombstones are still among it.

    Raises ConfigurationError naming ``log.cleaner.dedupe.buffer.size`` when the keys do not fit.
    """
    reader = _Reader(job, disk, strategy, facts, progress)
    classes, scans = 1, 0
    while True:
        found = Verdicts({source.base_offset: BitMap() for source in job.sources}, 0, 0)
        try:
            for chosen in range(classes):
                scans += 1
                verdict = reader.verdicts_of_class(chosen, classes)
                for base, key, record in reader.records(chosen, classes):
                    if keeps(verdict.get(key), record.offset):
                        found.survivors[base].add(record.offset - base)
                found.keys += len(verdict)
        except _Full as full:
            classes = max(classes * 2, int(classes / max(full.share, 1e-3)) + 1)
            if classes > MAX_CLASSES:
                raise ConfigurationError(
                    f"{job.topic_partition}: the strategy {job.config.compaction_strategy} would "
                    f"need {classes} scans: raise log.cleaner.dedupe.buffer.size"
                ) from None
            continue
        found.scans = scans
        return found


def keeps(verdict: Verdict | None, offset: int) -> bool:
    """Whether a verdict keeps the record at ``offset``; a key without one keeps nothing."""
    if isinstance(verdict, From):
        return offset >= verdict.offset
    return verdict is not None and offset in verdict.offsets


class _Reader:
    """The live records of one log as a strategy sees them."""

    def __init__(
        self,
        job: Job,
        disk: Disk,
        strategy: Strategy,
        facts: Mapping[int, SegmentFacts],
        progress: Progress,
    ) -> None:
        self._job, self._disk, self._strategy = job, disk, strategy
        self._facts, self._progress = facts, progress
        self._bases = sorted(facts)

    def verdicts_of_class(self, chosen: int, classes: int) -> dict[bytes, Verdict]:
        """Verdicts about one class of keys; a winning tombstone drops all that is older."""
        job, strategy = self._job, self._strategy
        state = strategy.init(max_keys(job.buffer_bytes))
        newest: dict[bytes, int] = {}
        for _, key, record in self.records(chosen, classes):
            if strategy.reduce(state, key, record):
                done = record.offset - job.log_start_offset
                raise _Full(done / max(job.end_offset - job.log_start_offset, 1))
            newest[key] = record.offset
        return {
            key: without_older(verdict, newest.get(key, -1), self._is_tombstone)
            for key, verdict in strategy.collect(state).items()
        }

    def _is_tombstone(self, offset: int) -> bool:
        index = bisect_right(self._bases, offset) - 1
        base = self._bases[index] if index >= 0 else 0
        return index >= 0 and offset - base in self._facts[base].tombstones

    def records(self, chosen: int, classes: int) -> Iterator[tuple[int, bytes, Record]]:
        """(segment base, strategy's key, record) of the records of one class, in order."""
        job = self._job
        for source in job.sources:
            base = source.base_offset
            dead = self._facts[base].aborted | self._facts[base].keyless
            file = self._disk.open_read(source.path(job.directory))
            for data in whole_batches(self._disk, file, source.size_bytes, job.chunk_bytes):
                self._progress(len(data))
                for record in records(data, inflate_limit=INFLATE_LIMIT):
                    if record.offset < job.log_start_offset or record.offset - base in dead:
                        continue
                    key = self._strategy.key(record)
                    if classes == 1 or class_of(job.hash_key, key, classes) == chosen:
                        yield base, key, record


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
    digest = hashlib.blake2b(key, digest_size=8, key=hash_key).digest()
    return int.from_bytes(digest, "big") % classes
