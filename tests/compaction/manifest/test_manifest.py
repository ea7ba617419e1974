"""The manifest's format, the removal journal, and what is read back at start."""

import struct
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from kept.compaction.cleaner import removal_log
from kept.compaction.cleaner.explain import TombstoneOutlook, removable_at_ms, tombstones
from kept.compaction.cleaner.removal_log import Fate, Reason
from kept.compaction.manifest import apply as applying
from kept.compaction.manifest import manifest
from kept.compaction.manifest.manifest import Manifest, OutputSegment
from kept.storage.errors import DamagedData, DirectoryRefused
from kept.storage.segments.swap import SwapGroup, SwapPlan
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import Generation

offsets = st.sets(st.integers(0, 999), max_size=30).map(BitMap)
segments = st.builds(
    lambda survivors, empties, horizons, txns, digest, tombstones: OutputSegment(
        0, 1000, survivors, empties, horizons, tuple(txns), digest, 17, tombstones
    ),
    offsets,
    offsets,
    st.dictionaries(st.integers(0, 1 << 45), offsets, max_size=3),
    st.lists(st.builds(AbortedTxn, *[st.integers(0, 1 << 40)] * 4), max_size=3),
    st.sampled_from([b"", bytes(range(16))]),
    offsets,
)


def of(*found, **more):
    fields = {
        "topic_id": uuid.UUID(int=5),
        "partition": 3,
        "generation": Generation(2, 9),
        "log_start_offset": 0,
        "clean_to": 900,
        "end_offset": found[-1].end_offset if found else 0,
        "now_ms": 11,
        "horizon_ms": 22,
        "segments": tuple(found),
    }
    return Manifest(**{**fields, **more})


PLAN = SwapPlan((SwapGroup((0, 500), (0, 100, 700)), SwapGroup((2000,), (2000,))))


@settings(deadline=None)
@given(segments)
def test_decode_after_encode_is_identity(segment):
    second = OutputSegment(1000, 1 << 40, BitMap([1, 5]))
    found = of(segment, second)
    assert manifest.decode("m", manifest.encode(found, PLAN)) == (found, PLAN)


@settings(deadline=None)
@given(segments, st.data())
def test_every_flipped_bit_is_told(segment, data):
    good = manifest.encode(of(segment), PLAN)
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert manifest.decode("m", bytes(bad)) == (of(segment), PLAN)
    except (DamagedData, DirectoryRefused):
        return
    raise AssertionError(f"the flip at {at} was not told")


@pytest.mark.parametrize("size", [0, 3, 8, 20, -1])
def test_a_file_that_is_cut_off_is_damaged(size):
    good = manifest.encode(of(OutputSegment(0, 10, BitMap([1]))), PLAN)
    with pytest.raises(DamagedData):
        manifest.decode("m", good[:size])


def test_a_newer_version_is_refused():
    good = bytearray(manifest.encode(of(OutputSegment(0, 10, BitMap([1]))), PLAN))
    struct.pack_into(">H", good, 4, manifest.VERSION + 1)
    with pytest.raises(DirectoryRefused, match="newer kept"):
        manifest.decode("m", bytes(good))


@pytest.mark.parametrize(
    "found",
    [
        of(OutputSegment(0, 10, BitMap()), OutputSegment(11, 20, BitMap())),
        of(OutputSegment(0, 10, BitMap([10]))),
        of(OutputSegment(5, 5, BitMap())),
        of(OutputSegment(0, 10, BitMap()), end_offset=11),
    ],
)
def test_a_manifest_that_contradicts_itself_is_damaged(found):
    with pytest.raises(DamagedData):
        manifest.decode("m", manifest.encode(found, PLAN))


def test_a_part_of_a_segment_is_relative_to_its_new_base():
    whole = OutputSegment(
        100,
        200,
        BitMap([0, 50, 99]),
        BitMap([60]),
        {7: BitMap([50]), 8: BitMap([0])},
        (AbortedTxn(1, 100, 120, 120), AbortedTxn(1, 130, 160, 160)),
    )
    part = whole.part(150, 200)
    assert (part.survivors, part.empties, part.horizons) == (
        BitMap([0, 49]),
        BitMap([10]),
        {7: BitMap([0])},
    )
    assert [t.last_offset for t in part.aborted] == [160]
    assert whole.part(100, 150).survivors == BitMap([0])


def test_survives_knows_the_whole_log_below_the_end():
    found = of(OutputSegment(0, 10, BitMap([3])), OutputSegment(10, 20, BitMap([5])))
    assert [found.survives(o) for o in (3, 4, 15, 19, 20)] == [True, False, True, False, None]


def test_a_manifest_without_tombstones_says_nothing_of_them():
    """As those of kept 0.1.0, which do not know of them."""
    found = of(OutputSegment(0, 1000, BitMap([1]), BitMap(), {5: BitMap([1])}))
    assert b"TOMB" not in manifest.encode(found, PLAN)


def test_when_tombstones_may_go():
    segment = OutputSegment(
        100,
        200,
        BitMap(range(60)),
        BitMap(),
        {7: BitMap([10, 40]), 5: BitMap([20])},
        tombstones=BitMap([12, 13, 25, 44]),
    )
    assert segment.removable() == {7: BitMap([12, 13, 44]), 5: BitMap([25])}
    found = of(segment)
    assert [removable_at_ms(found, o) for o in (99, 112, 125, 126, 144, 200)] == [
        None,
        7,
        5,
        None,
        7,
        None,
    ]
    assert tombstones(found) == (TombstoneOutlook(5, 1, 125, 125), TombstoneOutlook(7, 3, 112, 144))
    assert segment.part(120, 150).tombstones == BitMap([5, 24])


# The removal journal, through real passes.


def fates(w, offsets):
    there = set(w.offsets())
    path = f"{w.log.directory}/manifest-0-{w.state.applied.number}"
    found = manifest.decode(path, w.disk.read(path))[0]
    return [
        removal_log.explain_offset(
            o,
            directory="/t-0",
            disk=w.disk,
            log_start_offset=w.log.log_start_offset,
            high_watermark=w.log.log_end_offset - 1,
            log_end_offset=w.log.log_end_offset,
            manifest=found,
            is_there=there.__contains__,
        )
        for o in offsets
    ]


def cleaned(world):
    w = world(delete_retention_ms=10)
    w.append((b"a", b"1"), (b"b", b"1"), (b"a", None), (None, b"x"))
    w.append((b"n", b"bad"), pid=9, sequence=0, transactional=True)
    w.marker(9, commit=False)
    w.append((b"c", b"1"), (b"q", b"1"), pid=9, sequence=1)
    w.roll()
    w.clean()
    w.now += 20
    w.clean(on_demand=False)
    w.append((b"b", b"2"))
    w.roll()
    w.clean()
    w.append((b"open", b"1"))
    w.append((b"open", b"2"))
    return w


def test_why_missing_names_generation_and_reason(world):
    w = cleaned(world)
    found = fates(w, range(12))
    assert [(a.reason, str(a.generation)) for a in found[:5] if a.fate == Fate.REMOVED] == [
        (Reason.SUPERSEDED, "0.1"),
        (Reason.SUPERSEDED, "0.3"),
        (Reason.EXPIRED, "0.2"),
        (Reason.KEYLESS, "0.1"),
        (Reason.ABORTED, "0.1"),
    ]
    assert found[6].fate == Fate.PRESENT
    assert [a.fate for a in found[10:]] == [Fate.ABOVE_HIGH_WATERMARK, Fate.NEVER_WRITTEN]
    assert found[0].text == "removed in generation 0.1 as superseded"


def test_a_survivor_that_is_not_there_is_lost(world):
    w = cleaned(world)
    path = "/t-0/manifest-0-3"
    found = manifest.decode(path, w.disk.read(path))[0]
    answer = removal_log.explain_offset(
        6,
        directory="/t-0",
        disk=w.disk,
        log_start_offset=0,
        high_watermark=99,
        log_end_offset=99,
        manifest=found,
        is_there=lambda offset: False,
    )
    assert answer.fate == Fate.LOST and "0.3" in answer.text


def test_the_journal_is_bounded_and_says_what_it_no_longer_knows(world):
    w = cleaned(world)
    sizes = [w.disk.stat(path).size_bytes for _, path in removal_log.files("/t-0", w.disk)]
    assert len(sizes) == 3
    assert removal_log.trim("/t-0", w.disk, sum(sizes[1:])) == 1
    answer = fates(w, [0])[0]
    assert answer.fate == Fate.BEFORE_HISTORY and "before generation 0.2" in answer.text
    assert fates(w, [1])[0].reason == Reason.SUPERSEDED


def test_a_damaged_journal_is_told(world):
    w = cleaned(world)
    path = removal_log.files("/t-0", w.disk)[-1][1]
    w.disk.flip_bit(path, 30)
    with pytest.raises(DamagedData):
        fates(w, [0])


def test_the_newest_pass_is_the_newest_also_after_a_manifest_was_given_up(world):
    w = cleaned(world)
    before = removal_log.files("/t-0", w.disk)
    applying.clear("/t-0", w.disk)
    w.log.close()
    w.open()
    w.append((b"c", b"2"))
    w.roll()
    w.clean()
    assert w.state.applied == Generation(0, 1), "generations begin anew"
    after = removal_log.files("/t-0", w.disk)
    assert after[:-1] == before, "the first pass 0.1 is not overwritten"
    assert after[-1][0] == Generation(0, 1)
    assert [a.reason for a in fates(w, [0, 6])] == [Reason.SUPERSEDED] * 2
    newest = w.disk.stat(after[-1][1]).size_bytes
    assert removal_log.trim("/t-0", w.disk, newest) == 3
    assert removal_log.files("/t-0", w.disk) == after[-1:]
    answers = fates(w, [0, 6])
    assert [a.fate for a in answers] == [Fate.BEFORE_HISTORY, Fate.REMOVED]


def test_the_journal_knows_every_generation_that_a_manifest_knows():
    generation = Generation(2**31 - 1, 2**63 - 1)
    record = removal_log.Removals(generation, 5, {Reason.KEYLESS: [(7, BitMap([1, 9]))]})
    assert removal_log.decode("r", removal_log.encode(record)) == record


def first_version(record):
    """A file as kept 0.1.0 wrote it."""
    content = record.reasons[Reason.SUPERSEDED][0][1].serialize()
    sections = {
        b"HEAD": struct.pack(">iiq", *record.generation, record.now_ms),
        b"SUPE": struct.pack(">qi", 0, len(content)) + content,
    }
    return manifest.encode_sections(b"KREM", 1, sections)


def test_journals_of_the_first_version_are_read_and_come_first(world):
    w = world()
    old = removal_log.Removals(Generation(3, 70), 5, {Reason.SUPERSEDED: [(0, BitMap([1, 9]))]})
    w.disk.write_file("/t-0/removals-3-70", first_version(old))
    w.disk.write_file("/t-0/removals-4-9", first_version(old))
    w.append((b"a", b"1"), (b"a", b"2"))
    w.roll()
    w.clean()
    found = removal_log.files("/t-0", w.disk)
    assert [i for i, _ in found] == [Generation(4, 9), Generation(3, 70), Generation(0, 1)]
    assert removal_log.decode("r", w.disk.read(found[1][1])) == old
    assert str(fates(w, [0])[0].generation) == "0.1"
    answer = removal_log.explain_offset(
        9,
        directory="/t-0",
        disk=w.disk,
        log_start_offset=0,
        high_watermark=99,
        log_end_offset=99,
        manifest=None,
        is_there=lambda offset: False,
    )
    assert answer.generation == Generation(3, 70)
    newer = b"KREM\0\3" + removal_log.encode(old)[6:]
    with pytest.raises(DirectoryRefused):
        removal_log.decode("r", newer)


# State.


def test_clearing_makes_the_next_pass_start_over(world):
    w = cleaned(world)
    applying.clear("/t-0", w.disk)
    w.log.close()
    w.open()
    assert w.state == applying.CompactionState()
    before = w.records()
    w.clean()
    assert w.state.applied == Generation(0, 1)
    assert w.records() == before


def test_a_damaged_mark_is_told(world):
    w = cleaned(world)
    w.disk.write_file("/t-0/manifest-applied", b"nonsense")
    with pytest.raises(DamagedData, match="manifest-applied"):
        applying.load_state("/t-0", w.disk)


def digests(w):
    path = f"/t-0/manifest-0-{w.state.applied.number}"
    found = manifest.decode(path, w.disk.read(path))[0]
    return [(s.base_offset, s.end_offset, s.digest) for s in found.segments]


def test_digests_are_equal_for_equal_records_whatever_the_way(world):
    """One big map or many small ones; the hash key differs too. Another record: another digest."""
    found = []
    for slots, last in ((1 << 20, b"1"), (3, b"1"), (1 << 20, b"2")):
        w = world(segment_bytes=500)
        for i in range(20):
            w.append((b"k%d" % (i % 6), None if i % 7 == 6 else b"v%d" % i * 20, 5 + i))
        w.append((b"x", last, 9))
        w.roll()
        w.clean(dedupe_buffer_bytes=slots * 16)
        found.append(digests(w))
    assert found[0] == found[1]
    assert found[0][:-1] == found[2][:-1] and found[0][-1] != found[2][-1]


def test_an_untouched_segment_keeps_its_digest_without_being_read(world):
    w = world(segment_bytes=300)
    w.append((b"a", b"v" * 200))
    w.roll()
    w.append((b"b", b"v" * 200))
    w.roll()
    w.clean()
    before = digests(w)
    w.append((b"b", b"w" * 200))
    w.roll()
    w.clean()
    after = digests(w)
    assert after[0] == before[0] and after[1] != before[1]
    assert all(digest for _, _, digest in after)
