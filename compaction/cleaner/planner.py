"""Which part of which log to clean next (rules 1 to 3; Apache Kafka: ``LogCleanerManager``).

:func:`plan` looks at one log and says what a pass would do now, or why none is due. :func:`choose`
picks among logs: overdue ones first, then the highest dirty ratio. :class:`Failures` keeps the
reason of a log that failed and when it is tried again; one failing log never stops the others.

Where we differ from Kafka: a log is also due when a delete horizon in its clean part has passed
(such a pass maps nothing and rewrites only those segments), and the bytes of a partly cleaned
segment count as dirty only, not as both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kept.compaction.cleaner.build import RESERVE_BYTES
from kept.compaction.cleaner.job import (
    DEFAULT_BUFFER_BYTES,
    DEFAULT_CHECK_KEYS,
    DEFAULT_LOAD_FACTOR,
)
from kept.compaction.cleaner.log_snapshot import LogSnapshot, SegmentSnapshot
from kept.storage.types import MAX_INT64, Generation, TopicPartition

RETRY_BASE_MS: Final = 15_000
RETRY_MAX_MS: Final = 600_000
"""A failed log waits 15 s, then twice as long each time, 10 min at most."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the cleaner may use: ``log.cleaner.*`` of the node.

    ``dedupe_buffer_bytes`` is for one pass: ``log.cleaner.dedupe.buffer.size`` over the threads.
    ``free_bytes`` is what the log's disk has left, None for unknown. ``check_keys``:
    ``kept.compaction.check.keys``.
    """

    dedupe_buffer_bytes: int = DEFAULT_BUFFER_BYTES
    load_factor: float = DEFAULT_LOAD_FACTOR
    max_bytes_per_second: float = float(MAX_INT64)
    free_bytes: int | None = None
    check_keys: int = DEFAULT_CHECK_KEYS


@dataclass(frozen=True, slots=True)
class CleanableRange:
    """``first_dirty..end_offset`` may be mapped; ``bound`` says what holds the end back."""

    first_dirty: int
    end_offset: int
    bound: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A pass that is due: the range, the segments to read, and why now."""

    topic_partition: TopicPartition
    first_dirty: int
    end_offset: int
    bound: str
    segments: tuple[SegmentSnapshot, ...]
    clean_bytes: int
    cleanable_bytes: int
    why: str
    overdue: bool = False
    on_demand: bool = False
    horizons_only: bool = False
    rewrite: frozenset[int] = field(default_factory=frozenset)
    previous: Generation | None = None

    @property
    def dirty_ratio(self) -> float:
        """Cleanable bytes / (clean bytes + cleanable bytes)."""
        return ratio(self.clean_bytes, self.cleanable_bytes)

    @property
    def needs_bytes(self) -> int:
        """Space that the outputs may take: all of them exist before the first swap."""
        chosen = self.segments
        if self.horizons_only:
            chosen = tuple(s for s in chosen if s.base_offset in self.rewrite)
        return sum(segment.size_bytes for segment in chosen)


@dataclass(frozen=True, slots=True)
class PassSkipped:
    """No pass is made; ``reason`` is a sentence for the user."""

    topic_partition: TopicPartition
    reason: str
    dirty_ratio: float = 0.0


def ratio(clean_bytes: int, cleanable_bytes: int) -> float:
    """The dirty ratio; 0 for an empty log."""
    total = clean_bytes + cleanable_bytes
    return cleanable_bytes / total if total else 0.0


def cleanable_range(log: LogSnapshot, now_ms: int) -> CleanableRange:
    """Rule 1: what may be mapped, and what bounds it.

    A pass maps all that its manifest covers, and that end never goes down. So nothing may be mapped
    while a bound is below it: a base generation (rule 19) covers open transactions, too.
    """
    first_dirty = log.state.clean_to
    if not log.log_start_offset <= first_dirty <= log.log_end_offset:
        first_dirty = log.log_start_offset
    bounds = [
        (log.active.base_offset, "the active segment"),
        (log.last_stable_offset, "the last stable offset"),
    ]
    lag_ms = log.config.min_compaction_lag_ms
    if lag_ms > 0:
        for segment in log.segments[:-1]:
            if segment.end_offset > first_dirty and segment.largest_timestamp > now_ms - lag_ms:
                bounds.append((segment.base_offset, f"min.compaction.lag.ms={lag_ms}"))
                break
    upper, bound = min(bounds, key=lambda item: item[0])
    bases = [s.base_offset for s in log.segments if s.base_offset <= max(upper, first_dirty)]
    end = max(bases, default=first_dirty)
    if end < _applied_end(log):
        end = first_dirty
    return CleanableRange(first_dirty, end, bound)


def _applied_end(log: LogSnapshot) -> int:
    """Where the applied manifest ends, if a segment begins there; else 0."""
    end = log.state.end_offset
    return end if any(s.base_offset == end for s in log.segments) else 0


def sizes(log: LogSnapshot, found: CleanableRange) -> tuple[int, int]:
    """(clean, cleanable) bytes."""
    clean = sum(s.size_bytes for s in log.segments if s.end_offset <= found.first_dirty)
    cleanable = sum(
        s.size_bytes
        for s in log.segments
        if found.first_dirty < s.end_offset and s.base_offset < found.end_offset > found.first_dirty
    )
    return clean, cleanable


def is_overdue(log: LogSnapshot, first_dirty: int, now_ms: int) -> bool:
    """Rule 3: the oldest dirty segment is beyond ``max.compaction.lag.ms``."""
    oldest = [
        s.first_timestamp
        for s in log.segments[:-1]
        if s.end_offset > first_dirty and s.first_timestamp > 0
    ]
    lag_ms = max(log.config.max_compaction_lag_ms, 0)
    return bool(oldest) and min(oldest) < now_ms - lag_ms


def expired_segments(log: LogSnapshot, now_ms: int) -> frozenset[int]:
    """Segments of the applied manifest with a delete horizon that has passed."""
    there = {segment.base_offset for segment in log.segments}
    passed = {base for base, horizon in log.state.horizons.items() if horizon <= now_ms}
    return frozenset(passed & there)


def _covered(log: LogSnapshot) -> bool:
    """The applied manifest still describes what is below its end, as a pass for horizons needs."""
    below = [s for s in log.segments if s.base_offset < log.state.end_offset]
    return bool(below) and below[-1].end_offset == log.state.end_offset


def plan(
    log: LogSnapshot, now_ms: int, limits: Limits, *, on_demand: bool = False, renew: bool = False
) -> Plan | PassSkipped:
    """What a pass would do now, or why none is due.

    ``on_demand``: an operator wants one, at any ratio and lag. ``renew``: the applied manifest
    cannot be read, so that one is wanted even where there is nothing to clean.
    """
    tp = log.topic_partition
    if not log.config.compact:
        return PassSkipped(tp, "cleanup.policy has no compact")
    if log.uncleanable is not None:
        return PassSkipped(tp, log.uncleanable)
    outcome = cleanable_range(log, now_ms)
    clean, cleanable = sizes(log, outcome)
    dirty_ratio = ratio(clean, cleanable)
    overdue = cleanable > 0 and is_overdue(log, outcome.first_dirty, now_ms)
    passed = expired_segments(log, now_ms)
    due = dirty_ratio > log.config.min_cleanable_dirty_ratio
    if cleanable and (on_demand or overdue or due):
        limit = log.config.min_cleanable_dirty_ratio
        why = "asked for" if on_demand else dirty_in_words(dirty_ratio, limit)
        if overdue and not on_demand:
            why = "max.compaction.lag.ms has passed"
        candidate = Plan(
            tp,
            outcome.first_dirty,
            outcome.end_offset,
            outcome.bound,
            tuple(s for s in log.segments if s.base_offset < outcome.end_offset),
            clean,
            cleanable,
            why,
            overdue=overdue,
            on_demand=on_demand,
            previous=log.state.applied,
        )
    elif passed and _covered(log) and not renew:  # for the manifest that it would build on
        end = log.state.end_offset
        candidate = Plan(
            tp,
            outcome.first_dirty,
            end,
            outcome.bound,
            tuple(s for s in log.segments if s.base_offset < end),
            clean,
            cleanable,
            "delete horizons have passed",
            on_demand=on_demand,
            horizons_only=True,
            rewrite=passed,
            previous=log.state.applied,
        )
    elif renew and _covered(log) and log.last_stable_offset >= log.state.end_offset:
        end = log.state.end_offset
        candidate = Plan(
            tp,
            log.log_start_offset,
            end,
            outcome.bound,
            tuple(s for s in log.segments if s.base_offset < end),
            clean,
            cleanable,
            "its manifest cannot be read",
            on_demand=on_demand,
        )
    else:
        return PassSkipped(tp, _why_not(log, outcome, cleanable, dirty_ratio), dirty_ratio)
    return _unless_full(candidate, limits, dirty_ratio)


def _unless_full(candidate: Plan, limits: Limits, dirty_ratio: float) -> Plan | PassSkipped:
    """The plan, where its outputs have room on the disk."""
    needed = candidate.needs_bytes + RESERVE_BYTES
    if limits.free_bytes is not None and needed > limits.free_bytes:
        why = f"needs {needed} bytes, {limits.free_bytes} are free"
        return PassSkipped(candidate.topic_partition, why, dirty_ratio)
    return candidate


def _why_not(log: LogSnapshot, found: CleanableRange, cleanable: int, dirty_ratio: float) -> str:
    if not cleanable:
        if found.first_dirty >= log.log_end_offset:
            return "everything is clean"
        below = found.end_offset < _applied_end(log)
        where = f"begins below {log.state.end_offset}" if below else "begins there"
        return f"nothing is cleanable from {found.first_dirty} on: {found.bound} {where}"
    words = dirty_in_words(dirty_ratio, log.config.min_cleanable_dirty_ratio)
    return f"{words} (min.cleanable.dirty.ratio)"


def dirty_in_words(dirty_ratio: float, limit: float) -> str:
    """``34 % dirty, limit 50 %``: a pass is due above the limit (min.cleanable.dirty.ratio). Where
    whole percents do not tell the two apart, there are decimals.
    """
    for digits in range(4):
        dirty, least = f"{100 * dirty_ratio:.{digits}f}", f"{100 * limit:.{digits}f}"
        if dirty != least or dirty_ratio == limit:
            break
    return f"{dirty} % dirty, limit {least} %"


def choose(
    plans: Iterable[Plan],
    in_progress: Iterable[TopicPartition] = (),
    failures: Failures | None = None,
    now_ms: int = 0,
) -> Plan | None:
    """The pass to run next: what was asked for, overdue logs, then the highest dirty ratio."""
    busy = set(in_progress)
    ready = [
        candidate
        for candidate in plans
        if candidate.topic_partition not in busy
        and (failures is None or failures.may_try(candidate.topic_partition, now_ms))
    ]
    return max(ready, key=lambda p: (p.on_demand, p.overdue, p.dirty_ratio), default=None)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a log could not be cleaned, how often in a row, and when it is tried again.

    ``stopped``: the check of a pass found it wrong, so nothing is tried before somebody says so.
    """

    reason: str
    count: int
    retry_at_ms: int
    stopped: bool = False


class Failures:
    """Logs that failed, with back-off."""

    def __init__(self) -> None:
        self._failures: dict[TopicPartition, Failure] = {}

    def note(
        self, tp: TopicPartition, reason: str, now_ms: int, *, stopped: bool = False
    ) -> Failure:
        """A pass over this log failed; ``stopped``: see :class:`Failure`."""
        before = self._failures.get(tp)
        count = before.count + 1 if before else 1
        wait_ms = min(RETRY_BASE_MS << min(count - 1, 16), RETRY_MAX_MS)
        retry_at_ms = MAX_INT64 if stopped else now_ms + wait_ms
        failure = self._failures[tp] = Failure(reason, count, retry_at_ms, stopped)
        return failure

    def may_try(self, tp: TopicPartition, now_ms: int) -> bool:
        """Whether its back-off is over, or the clock was set back to before it began."""
        failure = self._failures.get(tp)
        if failure is None or now_ms >= failure.retry_at_ms:
            return True
        return not failure.stopped and failure.retry_at_ms - now_ms > RETRY_MAX_MS

    def succeeded(self, tp: TopicPartition) -> None:
        """A pass over this log succeeded: it is cleanable again."""
        self._failures.pop(tp, None)

    def retry(self, tp: TopicPartition) -> bool:
        """Do not wait any longer; the reason stays until a pass succeeds. False: it had not
        failed.
        """
        failure = self._failures.get(tp)
        if failure is None:
            return False
        self._failures[tp] = Failure(failure.reason, failure.count, 0)
        return True

    def all(self) -> Mapping[TopicPartition, Failure]:
        """The logs that are uncleanable now."""
        return dict(self._failures)


def next_generation(last: Generation | None, leader_epoch: int) -> Generation:
    """The generation of the pass that comes after an applied one."""
    generation = last.number + 1 if last is not None else 1
    return Generation(max(leader_epoch, 0), generation)
