"""Which segments become one (rule 10)."""

import uuid

import pytest

from kept.compaction.cleaner.job import Job, Source
from kept.compaction.cleaner.segment_groups import group_sources
from kept.storage.types import Generation, LogConfig


def groups(sizes, shares=None, *, clean_to=1 << 40, alone=(), indexes=0, step=10, limit=100):
    """Base offsets (in steps) by group."""
    sources = tuple(
        Source(i * step, (i + 1) * step, size, 0, indexes, indexes) for i, size in enumerate(sizes)
    )
    config = LogConfig(segment_bytes=limit, segment_index_bytes=100)
    job = Job(
        "/d",
        "t",
        0,
        str(uuid.uuid4()),
        Generation(0, 1),
        0,
        0,
        len(sizes) * step,
        sources,
        0,
        b"k" * 16,
        config,
    )
    told = {i * step: share for i, share in enumerate(shares or ())}
    found = group_sources(job, clean_to, frozenset(alone), told)
    return [[source.base_offset // step for source in group] for group in found]


def test_by_what_survives():
    assert groups([90] * 4) == [[0], [1], [2], [3]]
    assert groups([90] * 4, [0.5] * 4) == [[0, 1], [2, 3]]
    assert groups([90] * 4, [1, 0, 0, 0.2]) == [[0], [1, 2, 3]]
    assert groups([50, 50, 1]) == [[0, 1], [2]]


def test_limits():
    assert groups([1] * 4, indexes=50) == [[0, 1], [2, 3]]
    assert groups([1] * 4, [0.25] * 4, indexes=100) == [[0, 1, 2, 3]]
    assert groups([1] * 3, [0] * 3, step=1 << 30) == [[0, 1], [2]]
    assert groups([200, 1]) == [[0], [1]]


def test_alone():
    assert groups([1] * 5, clean_to=30) == [[0, 1, 2], [3], [4]]
    assert groups([1] * 5, alone=[20]) == [[0, 1], [2], [3, 4]]


@pytest.mark.usefixtures("each_kernel")
def test_a_log_that_shrinks_by_half_has_half_the_segments(world):
    w = world(segment_bytes=1000)
    for i in range(128):
        w.append((b"k%d" % (i // 2), b"%03d" % i * 10))
    w.roll()
    before = w.log.segments[:-1]
    w.clean()
    after = w.log.segments[:-1]
    assert len(before) >= 14 and len(after) <= len(before) / 2 + 1
    assert all(segment.size_bytes <= 1000 for segment in after)
    assert w.offsets() == list(range(1, 128, 2))
