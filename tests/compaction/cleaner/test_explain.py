"""The dry run and the cleaner cannot disagree."""

import pytest

from kept.compaction.cleaner.explain import TombstoneOutlook, explain, life_of_key

DAY = 86_400_000


def filled(world, **changes):
    w = world(segment_bytes=400, **changes)
    for i in range(20):
        w.append((b"k%d" % (i % 6), None if i % 5 == 4 else b"v%d" % i * 20))
    w.append((None, b"keyless"))
    w.roll()
    return w


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("strategy", ["latest", "highest-version"])
def test_it_says_what_the_pass_then_does(world, strategy):
    w = filled(world, compaction_strategy=strategy)
    before = w.records()
    job = w.job(w.plan())
    said, _ = explain(job, w.disk)
    assert w.records() == before, "nothing was written"
    result = w.clean()
    assert said.removed == result.removed
    assert said.records == result.records_examined == 21
    assert (said.clean_to, said.end_offset) == (w.state.clean_to, w.state.end_offset)
    assert said.segments_after == result.segments_after
    assert sum(s.kept for s in said.segments) == len(w.records())
    assert 0 < said.bytes_dropped < said.size_bytes
    tombstones = [r for r in w.records() if r.value is None]
    assert said.tombstones_kept == len(tombstones) > 0
    assert {s.tombstones_go_at_ms for s in said.segments if s.tombstones} == {w.now + DAY}
    (outlook,) = said.tombstones
    offsets = [r.offset for r in tombstones]
    assert outlook == TombstoneOutlook(w.now + DAY, len(offsets), offsets[0], offsets[-1])
    assert w.state.tombstones_from(0) == len(offsets)


def test_tombstones_are_known_whatever_the_passes_do(world):
    """Mapped, carried by a pass for horizons, joined and untouched segments."""
    w = world(segment_bytes=400, delete_retention_ms=1000)
    for i in range(30):
        w.append((b"k%d" % i, None if i % 5 == 4 else b"v" * 100))
        w.now += 100
        if i % 10 == 9:
            w.roll()
            w.clean()
        kept = [r.offset for r in w.records() if r.value is None and r.offset < w.state.clean_to]
        assert w.state.tombstones_from(0) == len(kept)
    for _ in range(6):
        w.now += 400
        w.clean(on_demand=False)
        kept = [r.offset for r in w.records() if r.value is None]
        assert w.state.tombstones_from(0) == len(kept)
    assert w.state.tombstones_from(0) == 0


def test_the_life_of_a_key(world):
    w = filled(world)
    w.append((b"k0", b"not yet"))
    job = w.job(w.plan())
    _, found = explain(job, w.disk)
    active = w.view.active
    from kept.compaction.cleaner.job import Source

    above = [Source(active.base_offset, active.end_offset, active.size_bytes, 0)]
    life = life_of_key(job, w.disk, b"k0", found, above)
    assert [(r.offset, r.fate) for r in life] == [
        (0, "superseded"),
        (6, "superseded"),
        (12, "superseded"),
        (18, "survives"),
        (21, "not cleanable yet"),
    ]
    assert [r.is_tombstone for r in life] == [False] * 5
