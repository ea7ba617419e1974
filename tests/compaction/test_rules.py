"""Rules 4 to 10 of the cleaner, each on a log small enough to see why. Both kernels."""

import pytest

from kept.compaction.manifest import manifest
from kept.storage import layout
from kept.storage.errors import ConfigurationError, DamagedData
from kept.storage.records import build_batch
from kept.storage.segments import txn_index
from kept.storage.types import MAX_INT64, Codec, Generation, TimestampType

pytestmark = pytest.mark.usefixtures("each_kernel")
DAY = 86_400_000


def test_the_newest_record_of_each_key_survives_at_its_offset(world):
    w = world()
    w.append((b"a", b"1"), (b"b", b"1"), (b"a", b"2"))
    w.append((b"c", b"1"), (b"a", b"3"))
    w.roll()
    result = w.clean()
    assert w.pairs() == [(1, b"b", b"1"), (3, b"c", b"1"), (4, b"a", b"3")]
    assert result.removed == {"superseded": 2}
    assert (w.state.clean_to, w.state.end_offset) == (5, 5)


def test_records_above_the_range_supersede_nothing_and_stay(world):
    w = world()
    w.append((b"a", b"1"))
    w.roll()
    w.append((b"a", b"2"))
    w.clean()
    assert w.pairs() == [(0, b"a", b"1"), (1, b"a", b"2")]


def test_clean_records_are_superseded_by_dirty_ones(world):
    w = world()
    w.append((b"a", b"1"), (b"b", b"1"))
    w.roll()
    w.clean()
    w.append((b"a", b"2"))
    w.roll()
    w.clean()
    assert w.pairs() == [(1, b"b", b"1"), (2, b"a", b"2")]


def test_keyless_records_are_dropped(world):
    w = world()
    w.append((None, b"x"), (b"", b"empty key"), (None, b"y"))
    w.roll()
    result = w.clean()
    assert w.pairs() == [(1, b"", b"empty key")]
    assert result.removed == {"keyless": 2}


@pytest.mark.parametrize("codec", list(Codec))
def test_every_codec_is_kept(world, codec):
    w = world()
    w.append(*((b"k%d" % (i % 5), b"v" * 50, w.now + i) for i in range(20)), codec=codec)
    w.append((b"z", b"whole"), codec=codec)
    before = w.read()[-1]
    w.roll()
    w.clean()
    assert [r.offset for r in w.records()] == [15, 16, 17, 18, 19, 20]
    assert {header.codec for header in w.headers()} == {codec}
    assert w.read()[-1] == before, "an untouched batch is copied as it is"


def test_a_rewritten_batch_keeps_what_rule_7_says(world):
    w = world()
    w.append((b"a", b"1", w.now + 50), (b"b", b"1", w.now + 90), (b"c", b"1", w.now + 10))
    w.append((b"b", b"2"))
    w.roll()
    (old, _), _ = w.read()
    w.clean()
    new = w.headers()[0]
    assert new.max_timestamp == w.now + 50
    assert new.record_count == 2
    for name in (
        "base_offset",
        "last_offset_delta",
        "partition_leader_epoch",
        "producer_id",
        "attributes",
        "producer_epoch",
        "base_sequence",
        "base_timestamp",
    ):
        assert getattr(new, name) == getattr(old, name), name


def test_log_append_time_keeps_its_max_timestamp(world):
    w = world(message_timestamp_type=TimestampType.LOG_APPEND_TIME)
    w.append((b"a", b"1"), (b"b", None))
    old = w.headers()[0]
    w.now += 5
    w.append((b"a", b"2"))
    w.roll()
    w.clean()
    new = w.headers()[0]
    assert (new.max_timestamp, new.timestamp_type) == (old.max_timestamp, 1)
    assert new.has_delete_horizon
    assert [r.timestamp for r in w.records()] == [old.max_timestamp, old.max_timestamp + 5]


def test_a_tombstone_gets_its_horizon_once_and_goes_when_it_has_passed(world):
    w = world(delete_retention_ms=1000)
    w.append((b"a", b"1", 5), (b"b", b"1", 7))
    w.append((b"a", None, 9), (b"c", b"1", 11))
    w.roll()
    w.clean()
    batch = w.headers()[1]
    assert batch.delete_horizon_ms == w.now + 1000
    assert batch.base_timestamp == w.now + 1000
    assert [(r.offset, r.timestamp) for r in w.records()] == [(1, 7), (2, 9), (3, 11)]
    first_horizon = batch.delete_horizon_ms
    w.now += 500
    w.append((b"d", b"1"))
    w.roll()
    w.clean()
    assert w.headers()[1].delete_horizon_ms == first_horizon, "it never moves"
    w.now = first_horizon - 1
    assert w.clean(on_demand=False) is None
    w.now = first_horizon
    result = w.clean(on_demand=False)
    assert result is not None and result.removed == {"expired tombstone": 1}
    assert w.offsets() == [1, 3, 4]
    assert w.clean(on_demand=False) is None, "the horizon that stays on the batch is not due again"


@pytest.mark.parametrize("timestamp", [0, -1, -2, 2**63 - 1])
def test_no_retention_of_tombstones_is_too_long(world, timestamp):
    """``delete.retention.ms`` may be all of int64: with the time added it did not fit."""
    w = world(delete_retention_ms=MAX_INT64)
    w.append((b"a", b"1", 5))
    w.append((b"a", None, timestamp))
    w.roll()
    w.clean()
    assert w.headers()[0].delete_horizon_ms == MAX_INT64
    assert [(r.offset, r.timestamp, r.value) for r in w.records()] == [(1, timestamp, None)]


def test_horizon_of_a_batch_with_all_its_records_is_set_too(world):
    w = world()
    w.append((b"a", None, 5), codec=Codec.LZ4)
    w.roll()
    w.clean()
    header = w.headers()[0]
    assert header.delete_horizon_ms == w.now + DAY
    assert header.codec == Codec.LZ4
    assert header.max_timestamp == 5
    assert [(r.key, r.value, r.timestamp) for r in w.records()] == [(b"a", None, 5)]


def test_a_pass_for_horizons_touches_only_their_segments(world):
    w = world(delete_retention_ms=10, segment_bytes=250)
    for i in range(6):
        w.append((b"k%d" % i, None if i == 2 else b"v" * 150))
        w.roll()
    w.clean()
    before = {name: inode for name, inode in w.disk.files() if name.endswith(".log")}
    w.now += 10
    made = w.plan(on_demand=False)
    assert made.horizons_only and made.rewrite == {2}
    w.clean(on_demand=False)
    after = {name: inode for name, inode in w.disk.files() if name.endswith(".log")}
    changed = [name for name in after if before.get(name) is not after[name]]
    assert changed == [f"/t-0/{2:020d}.log"]
    assert w.offsets() == [0, 1, 3, 4, 5]


def test_expired_tombstone_in_the_dirty_range_still_supersedes(world):
    w = world(delete_retention_ms=10)
    w.append((b"a", None))
    w.roll()
    w.clean()
    w.append((b"a", b"2"))
    w.append((b"a", None))
    w.roll()
    w.clean()
    assert w.offsets() == [2]
    w.now += 11
    w.clean(on_demand=False)
    assert w.offsets() == []


def test_map_that_is_full_ends_the_range_in_the_middle_of_a_segment(world):
    w = world()
    rows = [b"a", b"b", b"a", b"c", b"a", b"d", b"b"]
    for key in rows:
        w.append((key, b"%d" % len(rows)))
    w.roll()
    made = w.plan()
    job = w.job(made)
    from dataclasses import replace

    from kept.compaction.cleaner.cleaner_run import run_pass

    job = replace(job, buffer_bytes=3 * 16, max_scans=1)
    result = run_pass(job, w.disk)
    assert result.clean_to == 3, "two keys fit, c is the third"
    found, _ = manifest.decode("m", w.disk.read(layout.manifest_file("/t-0", 0, 1) + ".tmp"))
    assert [s.survivors.to_array().tolist() for s in found.segments] == [[1, 2, 3, 4, 5, 6]]


def test_a_tombstone_that_was_not_mapped_yet_gets_no_horizon(world):
    """Its time begins with the pass that has seen it (rule 6), not with one that stopped before."""
    from dataclasses import replace

    from kept.compaction.cleaner.survey import survey

    w = world()
    for key, value in ((b"a", b"1"), (b"b", b"1"), (b"b", None), (b"c", b"1"), (b"d", None)):
        w.append((key, value))
    w.roll()
    job = w.job(w.plan())
    found = survey(replace(job, buffer_bytes=3 * 16, max_scans=1), w.disk).manifest
    (segment,) = found.segments
    assert found.clean_to == 3 and 4 in segment.survivors
    assert [list(bases) for bases in segment.horizons.values()] == [[2]]
    assert list(segment.tombstones) == [2]
    whole = survey(job, w.disk).manifest.segments[0]
    assert [list(bases) for bases in whole.horizons.values()] == [[2, 4]]


def test_an_unchanged_segment_is_listed_as_it_is_and_not_as_a_manifest_says(world):
    from kept.compaction.cleaner.cleaner_run import read_manifest
    from kept.compaction.cleaner.survey import survey

    w = world(segment_bytes=400)  # two of them are not joined
    w.append((b"a", b"1" * 100), (b"b", b"1" * 100))
    w.roll()
    w.clean()
    w.append((b"c", b"1" * 200))
    w.roll()
    job = w.job(w.plan())
    before = read_manifest(job.directory, job.previous, w.disk)
    (segment,) = before.segments
    assert survey(job, w.disk, previous=before).manifest.segments[0].digest == segment.digest
    segment.survivors.remove(1)
    found = survey(job, w.disk, previous=before).manifest.segments[0]
    assert list(found.survivors) == [0, 1] and found.digest == b""


@pytest.mark.parametrize("slots", [2, 3, 4, 7])
def test_small_maps_take_several_scans_and_one_copy(world, slots):
    w = world()
    keys = [b"a", b"b", b"a", b"c", b"d", b"a", b"e", b"b", b"f", b"c", b"g"]
    for i, key in enumerate(keys):
        w.append((key, b"%d" % i))
    w.roll()
    result = w.clean(dedupe_buffer_bytes=slots * 16)
    assert result.scans > 1
    w.clean_all(dedupe_buffer_bytes=slots * 16)
    newest = {key: i for i, key in enumerate(keys)}
    assert w.offsets() == sorted(newest.values())


def test_a_map_without_room_for_one_key_names_the_setting(world):
    w = world()
    w.append((b"a", b"1"))
    w.roll()
    with pytest.raises(ConfigurationError, match=r"log\.cleaner\.dedupe\.buffer\.size"):
        w.clean(dedupe_buffer_bytes=16)


def test_the_last_batch_of_an_active_producer_stays_empty(world):
    w = world()
    w.append((b"a", b"1"), (b"b", b"1"), pid=5, sequence=0)
    w.append((b"a", b"2"), (b"b", b"2"), pid=5, sequence=2)
    w.append((b"a", b"3"), (b"b", b"3"))
    w.append((b"z", b"1"))
    w.roll()
    old = w.headers()[1]
    w.clean()
    kept = w.headers()[0]
    assert (kept.base_offset, kept.last_offset, kept.record_count) == (2, 3, 0)
    assert (kept.producer_id, kept.base_sequence, kept.size_bytes) == (5, 2, 61)
    assert (kept.base_timestamp, kept.max_timestamp) == (-1, old.max_timestamp)
    assert w.offsets() == [4, 5, 6]
    w.log.close()
    w.open()
    assert w.append((b"q", b"1"), pid=5, sequence=4) == 7, "the sequence goes on after a restart"


def test_an_empty_batch_goes_once_its_producer_is_forgotten(world):
    w = world()
    w.append((b"a", b"1"), pid=5, sequence=0)
    w.append((b"a", b"2"))
    w.append((b"b", b"2"))
    w.roll()
    w.clean()
    assert [h.record_count for h in w.headers()] == [0, 1, 1]
    w.log.producers.clear()
    w.append((b"c", b"1"))
    w.roll()
    w.clean()
    assert [h.record_count for h in w.headers()] == [1, 1, 1]


def test_the_batch_below_the_uncleanable_offset_stays_empty(world):
    w = world()
    w.append((b"a", None))
    w.append((b"b", b"1"), (None, b"2"))
    w.append((None, b"3"), (None, b"4"))
    w.roll()
    w.clean()
    last = w.headers()[-1]
    assert (last.base_offset, last.next_offset, last.record_count) == (3, 5, 0)


def test_a_group_that_loses_everything_leaves_an_empty_segment(world):
    w = world(segment_bytes=300)
    w.append((b"a", b"1" * 200))
    w.roll()
    w.append((b"a", b"2" * 200))
    w.roll()
    w.clean()
    assert [s.base_offset for s in w.log.segments] == [0, 1, 2]
    assert w.log.segments[0].size_bytes == 0
    assert w.offsets() == [1]


def test_groups_stay_within_segment_bytes_and_join_small_ones(world):
    w = world(segment_bytes=1000)
    for i in range(12):
        w.append((b"k%d" % i, b"v" * 200))
        w.roll()
    w.clean()
    assert w.offsets() == list(range(12))
    sizes = [s.size_bytes for s in w.log.segments[:-1]]
    assert len(sizes) == 4 and max(sizes) <= 1000


def test_an_output_that_grows_beyond_the_limit_is_split(world):
    w = world(segment_bytes=1200)
    while w.log.active_segment.base_offset == 0:
        n = w.log.log_end_offset
        w.append(*((b"k%d" % (n + i), None, i) for i in range(10)))
    w.roll()
    count = w.log.log_end_offset
    w.clean()
    assert w.offsets() == list(range(count))
    assert max(s.size_bytes for s in w.log.segments[:-1]) <= 1200
    assert len(w.log.segments) > 3
    found, _ = manifest.decode("m", w.disk.read(layout.manifest_file("/t-0", 0, 1)))
    assert [s.base_offset for s in found.segments] == [
        s.base_offset for s in w.log.segments if s.base_offset < found.end_offset
    ]


def test_offsets_stay_within_31_bits_of_the_base(world):
    w = world()
    w.append((b"a", b"1"))
    w.roll()
    for base in (2**31 - 2, 2**31 + 5):
        data = build_batch([(w.now, b"k%d" % base, b"v", ())], base_offset=base, leader_epoch=0)
        w.log.append_as_follower(data, w.now)
        w.log.write()
        w.roll()
    w.clean()
    assert w.offsets() == [0, 2**31 - 2, 2**31 + 5]
    for segment in w.log.segments[:-1]:
        assert segment.next_offset - segment.base_offset <= 2**31


def test_records_below_log_start_go(world):
    w = world()
    w.append((b"a", b"1"), (b"b", b"1"), (b"c", b"1"))
    w.roll()
    w.append((b"d", b"1"))
    w.log.advance_log_start(2)
    w.state = type(w.state)()
    result = w.clean()
    assert result.removed == {"below log start": 2}
    assert w.offsets() == [2, 3]


def test_output_files_keep_the_mtime_of_the_last_source(world):
    w = world()
    w.append((b"a", b"1"))
    w.roll()
    w.now += 5000
    w.append((b"a", b"2"))
    w.roll()
    mtime = w.log.segments[1].mtime_ms
    w.now += 5000
    w.disk.now_ms = w.now
    w.clean()
    assert w.disk.stat(f"/t-0/{0:020d}.log").mtime_ms == mtime < w.now


def test_damage_is_reported_with_path_and_position(world):
    w = world()
    w.append((b"a", b"1"))
    w.append((b"b", b"1"))
    w.roll()
    second = w.log.segments[0].size_bytes // 2
    w.disk.flip_bit(f"/t-0/{0:020d}.log", second + 65)
    with pytest.raises(DamagedData) as caught:
        w.clean()
    assert caught.value.position == second
    assert caught.value.path.endswith(f"{0:020d}.log")


# Transactions (rule 9).


def transaction(w, pid, rows, *, commit, sequence=0):
    w.append(*rows, pid=pid, sequence=sequence, transactional=True)
    return w.marker(pid, commit=commit)


def test_aborted_data_goes_at_once_and_its_marker_after_its_horizon(world):
    w = world(delete_retention_ms=100)
    w.append((b"a", b"1"))
    marker = transaction(w, 9, [(b"a", b"aborted"), (b"n", b"aborted")], commit=False)
    w.append((b"z", b"1"), pid=9, sequence=2)
    w.roll()
    result = w.clean()
    assert result.removed == {"aborted": 2}
    assert w.offsets() == [0, 4]
    assert [h.base_offset for h in w.headers() if h.is_control] == [marker]
    assert not next(h for h in w.headers() if h.is_control).has_delete_horizon
    path = layout.segment_file("/t-0", 0, layout.TXN_INDEX)
    assert [e.producer_id for e in txn_index.decode(path, w.disk.read(path))] == [9]
    w.append((b"y", b"1"))
    w.roll()
    w.clean()
    control = next(h for h in w.headers() if h.is_control)
    assert control.delete_horizon_ms == w.now + 100, "the data is gone: the horizon is set"
    w.now += 100
    w.clean(on_demand=False)
    assert not any(h.is_control for h in w.headers())
    assert not w.disk.exists(path)
    assert w.offsets() == [0, 4, 5]


def test_aborted_records_do_not_supersede(world):
    w = world()
    w.append((b"a", b"good"))
    transaction(w, 9, [(b"a", b"bad")], commit=False)
    w.append((b"z", b"1"))
    w.roll()
    w.clean()
    assert (0, b"a", b"good") in w.pairs()


def test_marker_of_a_committed_transaction_stays_while_its_data_does(world):
    w = world(delete_retention_ms=100)
    marker = transaction(w, 9, [(b"a", b"1")], commit=True)
    w.append((b"z", b"1"), pid=9, sequence=1)
    w.roll()
    for _ in range(3):
        w.now += 1000
        w.append((b"q", b"1"))
        w.roll()
        w.clean()
        assert marker in [h.base_offset for h in w.headers() if h.is_control]
        assert not next(h for h in w.headers() if h.is_control).has_delete_horizon


def test_transaction_that_ends_in_a_later_segment_is_known_as_aborted(world):
    w = world()
    w.append((b"a", b"bad"), pid=9, sequence=0, transactional=True)
    w.roll()
    w.marker(9, commit=False)
    w.roll()
    w.clean()
    assert w.offsets() == []
    assert [e.first_offset for e in w.log.aborted_transactions(0, 10)] == [0]


def test_every_batch_of_an_aborted_transaction_goes(world):
    w = world()
    w.append((b"a", b"bad"), pid=9, sequence=0, transactional=True)
    w.append((b"b", b"good"))
    w.append((b"b", b"bad"), (b"c", b"bad"), pid=9, sequence=1, transactional=True)
    w.marker(9, commit=False)
    w.append((b"z", b"1"))
    w.roll()
    w.clean()
    assert w.pairs() == [(1, b"b", b"good"), (5, b"z", b"1")]


def test_two_transactions_of_one_producer_are_told_apart(world):
    w = world()
    transaction(w, 9, [(b"a", b"bad")], commit=False)
    transaction(w, 9, [(b"b", b"good")], commit=True, sequence=1)
    transaction(w, 9, [(b"c", b"bad")], commit=False, sequence=2)
    w.append((b"z", b"1"))
    w.roll()
    w.clean()
    assert w.pairs() == [(2, b"b", b"good"), (6, b"z", b"1")]


def test_the_marker_of_a_producer_without_data_stays_for_its_epoch(world):
    w = world(delete_retention_ms=10)
    w.marker(9, commit=True, epoch=3)
    w.append((b"z", b"1"))
    w.roll()
    w.clean()
    w.now += 20
    w.clean(on_demand=False)
    first = w.headers()[0]
    assert first.is_control and first.record_count == 0 and first.producer_epoch == 3


def test_identity_goes_up_and_the_manifest_lists_the_whole_log(world):
    w = world(segment_bytes=300)
    for i in range(6):
        w.append((b"k%d" % (i % 4), b"v" * 150))
        w.roll()
    w.clean()
    w.append((b"k0", b"new"))
    w.roll()
    w.clean()
    assert w.state.applied == Generation(0, 2)
    found, plan = manifest.decode("m", w.disk.read(layout.manifest_file("/t-0", 0, 2)))
    assert found.segments[0].base_offset == 0 and found.segments[-1].end_offset == 7
    survivors = [s.base_offset + r for s in found.segments for r in s.survivors]
    assert survivors == w.offsets()
    assert all(s.digest for s in found.segments)
    assert plan.groups, "the swap plan is in the file"
    assert not w.disk.exists(layout.manifest_file("/t-0", 0, 1))


@pytest.mark.parametrize("later", [1, 9])
def test_what_a_producer_wrote_last_below_the_end_of_a_pass_keeps_its_batch(world, later):
    """What is above may be lost with the leader. Memory has five batches, a snapshot the rest."""
    w = world()
    w.append((b"a", b"1"), pid=7, sequence=0)
    last = w.append((b"b", b"1"), pid=7, sequence=1)
    w.append((b"a", b"2"), (b"b", b"2"))
    w.roll()
    for number in range(later):
        w.append((b"c%d" % number, b"1"), pid=7, sequence=2 + number)
    w.clean()
    kept = [h for h in w.headers() if h.producer_id == 7 and h.base_offset < w.state.end_offset]
    assert [(h.base_offset, h.base_sequence) for h in kept] == [(last, 1)]
    assert [key for _, key, _ in w.pairs()][:2] == [b"a", b"b"]
