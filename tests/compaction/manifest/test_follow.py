"""A replica applies what the leader computed, to segments that end elsewhere."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from pyroaring import BitMap

from kept.compaction.cleaner import removal_log
from kept.compaction.manifest import follow
from kept.compaction.manifest.manifest import Manifest, OutputSegment
from kept.storage import layout
from kept.storage.errors import DamagedData, InvariantViolation
from kept.storage.segments.segment import Segment
from kept.storage.types import Codec, Generation
from tests.support.follower_pair import HOUR_MS, Pair, fill, write
from tests.support.given import Given
from tests.support.installing import install
from tests.support.simulated_disk import SimulatedCrash
from tests.support.slow import rest_slow

SEEDS = int(os.environ.get("SEEDS", "25"))


@pytest.fixture
def pair(kit):
    return lambda **changes: Pair(kit, **changes)


def cleaned(both: Pair) -> Pair:
    """30 records of 30 keys at both, cleaned by the leader."""
    fill(both, 30, 30)
    both.fetch()
    both.leader.clean()
    return both


def damage(both: Pair, offset: int, at: int, bits: int) -> Segment:
    """Flip bits of one byte of a batch of the follower, ``at`` counted as in a slice."""
    log, disk = both.follower.log, both.follower.disk
    segment = [s for s in log.segments if s.base_offset <= offset][-1]
    position, size = segment.locate(offset)[:2]
    path, position = segment.path(layout.LOG), position + at % size
    flipped = bytes([disk.read(path)[position] ^ bits])
    disk.writev(disk.open_append(path), [flipped], position)
    return segment


def test_boundaries_of_its_own(pair) -> None:
    both = pair()
    fill(both, 60, 9, rolls=(10, 20, 40))
    both.fetch(roll_at=lambda base: base in {5, 33})
    assert [s.base_offset for s in both.follower.log.segments] == [0, 5, 33]
    both.leader.clean()
    result = both.apply()
    assert result.end_offset == 60
    # The active segment began below the end: it was rolled, and nothing had to be split.
    assert both.follower.log.active_segment.base_offset == 60


def test_a_delete_horizon_is_set_where_nothing_else_changes(pair) -> None:
    both = pair(delete_retention_ms=1)  # so that sizes stay as they are
    both.leader.append((b"kept", b"1"))
    both.leader.append((b"deleted", None))
    both.leader.roll()
    both.fetch()
    both.follower.roll()
    both.leader.clean()
    both.apply()
    assert [header.has_delete_horizon for header in both.follower.headers()] == [False, True]


def test_the_leaders_delete_horizon_takes_the_place_of_ones_own(pair) -> None:
    """As after adopting Apache Kafka, whose replicas are each cleaned at a time of their own."""
    both = pair()
    both.leader.append((b"kept", b"1"))
    both.leader.append((b"deleted", None))
    both.leader.roll()
    both.fetch()
    both.follower.roll()
    before = both.follower.state
    both.follower.clean()
    both.follower.state = before
    (mine,) = [h.delete_horizon_ms for h in both.follower.headers() if h.has_delete_horizon]
    both.leader.now += 1000
    both.leader.clean()
    (theirs,) = [h.delete_horizon_ms for h in both.leader.headers() if h.has_delete_horizon]
    result = both.build()  # its check reads the outputs, as those of a pass are checked
    assert theirs == mine + 1000 and result.bytes_after > 0
    assert result.keys_checked > 0


def test_a_closed_segment_beyond_the_end_is_split(pair) -> None:
    both = pair()
    fill(both, 40, 5)
    both.leader.append((b"x", b"1"))
    both.leader.append((b"y", b"2"))
    both.fetch(roll_at=lambda base: base == 30)
    both.leader.clean()
    assert both.generation().end_offset == 40
    both.apply()
    bases = [segment.base_offset for segment in both.follower.log.segments]
    assert 40 in bases and bases[-1] == 42
    assert both.follower.pairs()[-2:] == [(40, b"x", b"1"), (41, b"y", b"2")]
    both.follower.open()
    both.check()


def cleaned_twice(pair) -> Pair:
    """The follower has applied the first generation; the second leaves the first segments alone."""
    both = pair(segment_bytes=4_000)
    for row in range(30):
        both.leader.append((b"old%d" % row, b"v" * 60))
    both.leader.roll()
    fill(both, 30, 20)
    both.fetch()
    both.leader.clean()
    both.apply()
    fill(both, 20, 20)
    both.fetch()
    both.leader.clean()
    return both


def test_segments_as_they_were_are_not_read_again(pair) -> None:
    both = cleaned_twice(pair)
    world = both.follower
    job = follow.job_for(world.log, both.generation(), both.previous(), world.now)
    assert job.pieces[0].output.base_offset == 0
    read = []
    disk = world.disk
    open_read, disk.open_read = disk.open_read, lambda p: (read.append(p), open_read(p))[1]
    follow.follow(job, disk)
    disk.open_read = open_read
    assert read and not any(f"{0:020d}.log" in path for path in read)


def test_a_segment_of_another_digest_is_not_taken_for_the_one_before(pair) -> None:
    """The same offsets survive, and the leader's records are others: this log has diverged."""
    both = cleaned_twice(pair)
    found = both.generation()
    first = found.segments[0]
    assert first.survivors == both.previous().segments[0].survivors
    other = found.with_segments([replace(first, digest=bytes(16)), *found.segments[1:]])
    world = both.follower
    job = follow.job_for(world.log, other, both.previous(), world.now)
    with pytest.raises(follow.LogsDiffer, match="digest") as error:
        follow.follow(job, world.disk)
    assert error.value.offset == first.base_offset


def test_thousands_of_segments_are_matched_in_one_pass() -> None:
    """It happens on the loop: a replica of many segments must not stand still for seconds."""
    looks = 0

    class Counted:
        size_bytes, mtime_ms = 700, 0

        def __init__(self, base_offset: int) -> None:
            self._base_offset = base_offset

        @property
        def base_offset(self) -> int:
            nonlocal looks
            looks += 1
            return self._base_offset

        def locate(self, offset: int) -> tuple[int]:
            return (offset - self._base_offset,)

    many = 3000
    log: Any = Given(segments=[Counted(70 * n) for n in range(many + 1)])
    ends = [*range(100, 70 * many, 100), 70 * many]
    outputs = tuple(OutputSegment(a, b, BitMap()) for a, b in pairwise([0, *ends]))
    found = Manifest(UUID(int=1), 0, Generation(1, 1), 0, ends[-1], ends[-1], 0, 0, outputs)
    made = list(follow.pieces(log, found))
    assert [piece.output for piece in made] == list(outputs)
    for piece in made:
        at = piece.base_offset
        for source in piece.sources:
            assert (source.base_offset, source.file_offset) == (at, at // 70 * 70)
            assert source.start_bytes == at % 70
            at = source.end_offset
        assert at == piece.output.end_offset
    assert looks < 20 * many


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_a_batch_that_the_leader_emptied_in_two_passes_is_emptied_in_one(pair, codec) -> None:
    """An idempotent producer's last batch, whose newest record goes first. What its header says of
    the records that went differs then, and is no difference.
    """
    both = pair(segment_bytes=100_000, index_interval_bytes=256)
    world = both.leader
    rows = (b"a", b"1", world.now), (b"b", b"1", world.now + 4)
    world.append(*rows, pid=90, sequence=0, codec=codec)
    world.roll()
    world.append((b"b", b"2"))
    world.roll()
    both.fetch()
    world.clean()
    world.append((b"a", b"2"))
    world.roll()
    world.clean()
    both.fetch()
    both.apply()
    (theirs, *_), (mine, *_) = both.leader.headers(), both.follower.headers()
    assert (theirs.record_count, theirs.max_timestamp) == (0, rows[0][2])
    assert (mine.record_count, mine.max_timestamp) == (0, rows[1][2])


def test_a_survivor_that_is_missing_is_named(pair) -> None:
    both = cleaned(pair())
    world = both.follower
    other = pair()
    other.leader, other.follower = both.leader, other.follower
    for batch in both.kit.batches(b"".join(data for _, data in world.read())):
        if int.from_bytes(batch[:8], "big") != 11:
            other.follower.log.append_as_follower(batch, world.now)
    other.follower.log.write()
    with pytest.raises(follow.LogsDiffer) as error:
        other.build()
    assert error.value.offset == 11
    assert other.follower.log.log_end_offset == 30


def test_a_survivor_in_a_damaged_batch_is_named(pair) -> None:
    """One bit of a value: the header, of which digests are made, is as it was."""
    both = cleaned(pair())
    damage(both, 11, -5, 1)
    with pytest.raises(follow.LogsDiffer, match="survives") as error:
        both.build()
    assert error.value.offset == 11


@pytest.mark.parametrize("at", [0, 8, 10, 16], ids=lambda at: f"byte {at}")
@pytest.mark.parametrize("split", [12, 17])
def test_a_damaged_header_behind_which_nothing_survives_is_fetched_again_too(
    pair, split, at
) -> None:
    """Each try would meet it: the replica would never come to the manifest."""
    both = pair()
    fill(both, 30, 5, rolls=(9, 19))
    both.fetch(roll_at=lambda base: base in {5, split})
    both.leader.clean()
    assert min(min(s.survivors, default=99) for s in both.generation().segments[:1]) > split
    segment = damage(both, 8, at, 0x81)
    with pytest.raises(follow.LogsDiffer, match="is built") as error:
        both.build()
    assert (error.value.offset, error.value.path) == (5, segment.path(layout.LOG))
    both.follower.log.truncate_to(5)
    both.fetch()
    both.apply()


@pytest.mark.parametrize("at", [0, 3, 7, 8, 10, 16], ids=lambda at: f"byte {at}")
def test_a_survivor_behind_a_damaged_header_is_named(pair, at) -> None:
    """Nobody knows where the next batch begins; or the batch seems to be somewhere else."""
    both = cleaned(pair())
    segment = damage(both, 11, at, 0x81)
    with pytest.raises(follow.LogsDiffer) as error:
        both.build()
    assert error.value.offset in (11, segment.base_offset)


def test_a_survivor_that_is_missing_below_the_log_start_goes_with_what_is_below(pair) -> None:
    """Nobody reads it, but the segment does not come to its digest with it; a cut at the log start
    would leave it there.
    """
    both = cleaned(pair())
    damage(both, 11, -5, 1)
    log = both.follower.log
    log.advance_log_start(15)
    for cut in (lambda: None, lambda: log.truncate_to(15)):
        cut()
        both.fetch()
        with pytest.raises(follow.LogsDiffer) as error:
            both.build()
        assert error.value.offset == 11
    log.truncate_fully_and_start_at(15)
    both.fetch()
    assert both.build().end_offset == 30


def test_a_header_that_hides_where_an_output_begins_is_damage_of_its_segment(pair) -> None:
    both = cleaned(pair())
    log = both.follower.log
    segment = log.segments[0]
    position = segment.locate(11)[0] + 16
    disk = both.follower.disk
    disk.writev(disk.open_append(segment.path(layout.LOG)), [b"\0"], position)
    found = both.generation()
    (output, *rest) = found.segments
    parts = [output.part(0, 15), output.part(15, output.end_offset)]
    for start in (0, 5):
        log.advance_log_start(start)
        with pytest.raises(follow.LogsDiffer) as error:
            follow.job_for(log, found.with_segments([*parts, *rest]), None, both.follower.now)
        assert error.value.offset == start and error.value.path == segment.path(layout.LOG)


def test_damage_that_is_in_no_segment_is_told_as_it_is(pair, monkeypatch) -> None:
    both = cleaned(pair())

    def damaged(*_: Any) -> None:
        raise DamagedData("/elsewhere", 3, -1, "torn")

    monkeypatch.setattr(follow, "pieces", damaged)
    with pytest.raises(DamagedData, match="/elsewhere") as error:
        follow.job_for(both.follower.log, both.generation(), None, both.follower.now)
    assert type(error.value) is DamagedData


def split_by_its_end(pair) -> Pair:
    """The end of the manifest is in the middle of the follower's second segment."""
    both = pair()
    fill(both, 30, 30, rolls=(9,))
    both.leader.clean()
    both.leader.append((b"later", b"1"))
    both.leader.append((b"later", b"2"))
    both.fetch(roll_at=lambda base: base == 20)
    both.follower.append((b"later", b"3"))
    both.follower.roll()
    both.follower.append((b"later", b"4"))
    both.follower.roll()
    assert [s.base_offset for s in both.follower.log.segments] == [0, 20, 33, 34]
    assert both.generation().end_offset == 30
    return both


@pytest.mark.parametrize(("number", "told"), [(0, None), (1, 20), (2, None)])
def test_a_damaged_transaction_index_is_damage_of_the_segment_that_is_split(
    pair, number, told
) -> None:
    """What of its rest was aborted nobody knows then; those of others are not asked."""
    both = split_by_its_end(pair)
    log = both.follower.log
    segment = log.segments[number]
    path = segment.path(layout.TXN_INDEX)
    both.follower.disk.write_file(path, bytes(7))
    segment._aborted = None
    if told is None:
        both.apply()
        return
    with pytest.raises(follow.LogsDiffer, match="txnindex") as error:
        both.build()
    assert (error.value.offset, error.value.path) == (told, path)


def test_another_record_at_the_same_offset_is_noticed(pair) -> None:
    both = cleaned(pair())
    other = pair()
    fill(other, 30, 30, value=b"w" * 40)
    other.leader, other.follower = both.leader, other.leader
    with pytest.raises(follow.LogsDiffer, match="digest"):
        other.build()


def test_a_log_that_ends_too_early_is_refused(pair) -> None:
    both = pair()
    fill(both, 30, 3)
    both.leader.clean()
    with pytest.raises(InvariantViolation, match="ends at 0"):
        both.build()


def test_what_went_is_in_the_journal(pair) -> None:
    both = pair()
    fill(both, 30, 3)
    both.fetch()
    both.leader.clean()
    both.apply()
    records = [
        removal_log.decode(path, both.follower.disk.read(path))
        for _, path in removal_log.files(both.kit.DIRECTORY, both.follower.disk)
    ]
    there = set(both.follower.offsets())
    for offset in range(30):
        expected = None if offset in there else removal_log.Reason.FOLLOWED
        assert records[-1].reason(offset) == expected


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_logs_come_to_the_same(pair, seed: int) -> None:
    """Codecs, transactions, idempotent producers, horizons; generations applied or skipped; a
    follower that begins in the middle of it all.
    """
    rnd = random.Random(seed)
    both = pair(
        delete_retention_ms=HOUR_MS,
        segment_bytes=rnd.choice((2_000, 1 << 20)),
        index_interval_bytes=256,
    )
    continuous = True
    for _ in range(rnd.randint(2, 6)):
        write(both, rnd)
        for _ in range(rnd.randint(0, 2)):
            if rnd.random() < 0.8:
                both.fetch(roll_at=lambda base: rnd.random() < 0.15)
            both.leader.now += rnd.choice((0, HOUR_MS // 2, 2 * HOUR_MS))
            both.follower.now = both.leader.now
            both.leader.clean()
            if rnd.random() < 0.6 and both.leader.state.applied is not None:
                both.fetch(roll_at=lambda base: rnd.random() < 0.15)
                both.apply()
        if rnd.random() < 0.2:
            both.follower = both.kit.World(
                delete_retention_ms=HOUR_MS,
                segment_bytes=both.leader.config.segment_bytes,
                index_interval_bytes=256,
            )
            both.follower.now = both.leader.now
            continuous = False
        if rnd.random() < 0.3:
            both.follower.open()
            continuous = False
    both.fetch()
    both.leader.clean()
    both.apply()
    mine, theirs = both.follower.log, both.leader.log
    end = mine.log_end_offset
    aborted = [set(log.aborted_transactions(0, end)) for log in (mine, theirs)]
    # A recovery, and who fetches later, do not see a transaction whose data is gone already.
    assert aborted[0] == aborted[1] if continuous else aborted[0] <= aborted[1]
    both.follower.open()
    both.check()


# Crashes.


def prepared(pair):
    """A follower that has applied one generation, and is about to apply another."""
    both = pair(segment_bytes=400)
    for row in range(12):
        value = None if row % 4 == 3 else b"v%d" % row * 20
        both.leader.append((b"k%d" % (row % 5), value), pid=4, sequence=row)
    both.leader.roll()
    both.fetch(roll_at=lambda base: base % 5 == 2)
    both.leader.clean()
    both.apply()
    for row in range(12, 20):
        both.leader.append((b"k%d" % (row % 5), b"w%d" % row * 20), pid=4, sequence=row)
    both.leader.roll()
    both.leader.append((b"rest", b"1"))
    both.fetch(roll_at=lambda base: base in {14, 17})
    both.leader.clean()
    both.follower.log.flush()
    both.follower.disk.fsync_dir(both.kit.DIRECTORY)
    return both


@pytest.mark.parametrize("how", rest_slow(["power", "kill"], 1))
def test_a_crash_at_every_call_recovers(pair, how: str) -> None:
    """It has the one generation or the other, whole; and comes to the newest."""
    generations = []
    for call in range(1, 10_000):
        both = prepared(pair)
        world = both.follower
        before = world.records()
        world.disk.crash_at(world.disk.calls + call)
        try:
            result = both.build()
            install(world.log, result, world.state.applied, world.now)
            break
        except SimulatedCrash:
            world.disk = (
                world.disk.after_kill() if how == "kill" else world.disk.after_power_loss(call)
            )
        world.open()
        generation = world.state.applied.number
        generations.append(generation)
        assert generation in {1, 2}
        if generation == 1:
            assert world.records() == before
        names = world.disk.listdir(both.kit.DIRECTORY)
        assert not [n for n in names if n.endswith((".swap", ".cleaned"))]
        both.apply()
        assert world.records()[-1].key == b"rest"
    assert call > 50
    assert set(generations) == {1, 2}
    if how == "kill":
        assert generations == sorted(generations)
