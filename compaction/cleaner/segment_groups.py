"""Which segments become one (rule 10; Apache Kafka: ``Cleaner.groupSegmentsBySize``).

Groups are made from what the survey says survives of each source: the share of its records, taken
of its size (Apache Kafka, which knows no survivors yet, goes by the sizes of the sources). So a log
that shrinks by half ends with half as many segments. A source that loses nothing is joined by sizes
only: it is not copied to fill up what its neighbours lost. The share is an estimate: what grows
beyond ``segment.bytes`` or ``segment.index.bytes`` all the same (batch headers, a delete horizon
that lengthens timestamps) is split by the build. That offsets stay within 2^31 - 1 of the group's
base is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kept.compaction.cleaner.job import Job, Source
from kept.storage.types import MAX_INT32


def group_sources(
    job: Job, clean_to: int, alone: frozenset[int], shares: Mapping[int, float]
) -> Iterator[tuple[Source, ...]]:
    """Neighbouring sources in groups, ascending.

    Segments at or above ``clean_to`` and those in ``alone`` stay by themselves. ``shares`` is how
    much of each source survives, by base offset; all of it where nothing is said.
    """
    group: list[Source] = []
    for source in job.sources:
        single = source.base_offset >= clean_to or source.base_offset in alone
        if group and (single or not _fits(job, group, source, shares)):
            yield tuple(group)
            group = []
        group.append(source)
        if single:
            yield tuple(group)
            group = []
    if group:
        yield tuple(group)


def _fits(job: Job, group: list[Source], source: Source, shares: Mapping[int, float]) -> bool:
    chosen = (*group, source)
    if any(shares.get(segment.base_offset, 1.0) >= 1.0 for segment in chosen):
        shares = {}
    size = index = time_index = 0.0
    for segment in chosen:
        share = shares.get(segment.base_offset, 1.0)
        size += share * segment.size_bytes
        index += share * segment.index_bytes
        time_index += share * segment.time_index_bytes
    if size > job.config.segment_bytes:
        return False
    if max(index, time_index) > job.config.segment_index_bytes:
        return False
    return source.end_offset - 1 - group[0].base_offset <= MAX_INT32
