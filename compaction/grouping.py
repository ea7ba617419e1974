"""Which segments become one (rule 10; Apache Kafka: ``Cleaner.groupSegmentsBySize``).

Groups are made from the sizes of the sources, so that an output, which is hardly ever larger,
stays within ``segment.bytes``, its indexes within ``segment.index.bytes`` and its offsets within
2^31 - 1 of its base. What grows beyond that all the same (a new delete horizon lengthens
timestamps) is split by the build.
"""

from __future__ import annotations

from collections.abc import Iterator

from kept.compaction.job import Job, Source
from kept.storage.types import MAX_INT32


def group_sources(
    job: Job, clean_to: int, alone: frozenset[int] = frozenset()
) -> Iterator[tuple[Source, ...]]:
    """Neighbouring sources in groups, ascending.

    Segments at or above ``clean_to`` and those in ``alone`` stay by themselves.
    """
    group: list[Source] = []
    for source in job.sources:
        single = source.base_offset >= clean_to or source.base_offset in alone
        if group and (single or not _fits(job, group, source)):
            yield tuple(group)
            group = []
        group.append(source)
        if single:
            yield tuple(group)
            group = []
    if group:
        yield tuple(group)


def _fits(job: Job, group: list[Source], source: Source) -> bool:
    limit, index_limit = job.config.segment_bytes, job.config.segment_index_bytes
    if sum(s.size_bytes for s in group) + source.size_bytes > limit:
        return False
    if sum(s.index_bytes for s in group) + source.index_bytes > index_limit:
        return False
    if sum(s.time_index_bytes for s in group) + source.time_index_bytes > index_limit:
        return False
    return source.end_offset - 1 - group[0].base_offset <= MAX_INT32
