"""What a replica holds and has not applied; and the base generation of an unclean leader."""

from __future__ import annotations

import uuid

import pytest
from pyroaring import BitMap

from kept.compaction.cleaner import job_builder, planner
from kept.compaction.cleaner.cleaner_run import discard, read_manifest, run_pass
from kept.compaction.manifest import apply as applying
from kept.compaction.manifest import follow, manifest, manifest_store
from kept.compaction.manifest.manifest import Manifest, OutputSegment
from kept.storage import layout
from kept.storage.errors import DamagedData, InvariantViolation
from kept.storage.types import Codec, Generation
from tests.support.installing import install
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk

DIRECTORY = "/t-0"


def made(generation: int, epoch: int = 1) -> Manifest:

    segment = OutputSegment(0, 40, BitMap([5, 7, 9]), digest=bytes(16), tombstones=BitMap([7]))
    return Manifest(uuid.UUID(int=7), 0, Generation(epoch, generation), 0, 40, 40, 1, 2, (segment,))


@pytest.fixture
def disk():
    found = SimulatedDisk()
    found.mkdir(DIRECTORY)
    found.fsync_dir("/")
    return found


def test_it_travels_with_its_tombstones() -> None:
    assert manifest_store.decode("there", manifest_store.encode(made(3))) == made(3)


def test_nothing_is_held_at_first(disk) -> None:
    assert manifest_store.load(DIRECTORY, disk) is None


def test_what_was_given_up_is_not_called_a_damaged_file(disk) -> None:
    """A crash while a base generation is made leaves that, and no disk is to blame."""
    manifest_store.store(DIRECTORY, disk, made(1), None)
    manifest_store.mark_lost(DIRECTORY, disk)
    with pytest.raises(DamagedData, match="was given up, and nothing is in its place"):
        manifest_store.load(DIRECTORY, disk)


@pytest.mark.parametrize("how", ["kill", "power"])
def test_a_crash_leaves_what_was_held_or_what_was_stored(how: str) -> None:
    found = []
    for call in range(1, 200):
        disk = SimulatedDisk()
        disk.mkdir(DIRECTORY)
        disk.fsync_dir("/")
        manifest_store.store(DIRECTORY, disk, made(1), None)
        disk.crash_at(disk.calls + call)
        try:
            manifest_store.store(DIRECTORY, disk, made(2), made(1))
            break
        except SimulatedCrash:
            disk = disk.after_kill() if how == "kill" else disk.after_power_loss(call)
        after = manifest_store.load(DIRECTORY, disk)
        assert after in (made(1), made(2))
        found.append(after.generation.number)
    assert 1 in found
    if how == "kill":
        assert found == sorted(found) and 2 in found


def test_what_was_stored_is_durable(disk) -> None:
    manifest_store.store(DIRECTORY, disk, made(1), None)
    for seed in range(20):
        assert manifest_store.load(DIRECTORY, disk.after_power_loss(seed)) == made(1)


@pytest.mark.parametrize(
    ("name", "other"), [(layout.HELD_MANIFEST, 1), (layout.PUBLISHED_MANIFEST, 2)]
)
def test_damage_is_noticed_by_who_needs_it(disk, name: str, other: int) -> None:
    manifest_store.store(DIRECTORY, disk, made(2), made(1))
    disk.flip_bit(f"{DIRECTORY}/{name}", 60)
    with pytest.raises(DamagedData, match=name):
        manifest_store.read_manifest(DIRECTORY, disk, Generation(1, 3 - other))
    assert manifest_store.read_manifest(DIRECTORY, disk, Generation(1, other)) == made(other)
    manifest_store.remove_applied(
        DIRECTORY, disk, Generation(1, other)
    )  # what is in place is not put in doubt by it
    assert disk.exists(f"{DIRECTORY}/{name}")


def test_a_body_is_found_wherever_it_is(world) -> None:
    w = world()
    w.append((b"a", b"1"))
    w.append((b"a", b"2"))
    w.roll()
    w.clean()
    manifest_store.store(DIRECTORY, w.disk, made(9), made(8))
    for generation in (w.state.applied, Generation(1, 9), Generation(1, 8)):
        assert manifest_store.read_manifest(DIRECTORY, w.disk, generation).generation == generation
    with pytest.raises(FileNotFoundError, match=r"1\.7"):
        manifest_store.read_manifest(DIRECTORY, w.disk, Generation(1, 7))


def test_what_is_applied_is_held_without_a_copy(world) -> None:
    w = world()
    w.append((b"a", b"1"))
    w.append((b"a", b"2"))
    w.roll()
    w.clean()
    applied = read_manifest(DIRECTORY, w.state.applied, w.disk)
    assert manifest_store.load(DIRECTORY, w.disk) == applied
    manifest_store.store(DIRECTORY, w.disk, applied, None)
    assert not w.disk.exists(f"{DIRECTORY}/{layout.HELD_MANIFEST}")
    manifest_store.store(DIRECTORY, w.disk, made(9), None)
    manifest_store.remove_applied(DIRECTORY, w.disk, Generation(1, 9))
    assert not w.disk.exists(f"{DIRECTORY}/{layout.HELD_MANIFEST}")
    with pytest.raises(InvariantViolation):
        manifest_store.store(DIRECTORY, w.disk, None, None)


def test_a_cut_below_its_end_leaves_it_held(world) -> None:
    w = world()
    w.append((b"a", b"1"))
    w.append((b"a", b"2"))
    w.roll()
    w.clean()
    applied = read_manifest(DIRECTORY, w.state.applied, w.disk)
    manifest_store.clear_applied(DIRECTORY, w.disk)
    assert applying.load_state(DIRECTORY, w.disk).applied is None
    assert manifest_store.load(DIRECTORY, w.disk) == applied
    manifest_store.remove_all(DIRECTORY, w.disk)
    assert manifest_store.load(DIRECTORY, w.disk) is None


def test_it_is_held_with_whether_the_log_is_complete(disk) -> None:
    manifest_store.store(DIRECTORY, disk, made(1), None, complete=True)
    for seed in range(20):
        assert manifest_store.is_complete(DIRECTORY, disk.after_power_loss(seed))
    assert manifest_store.load(DIRECTORY, disk) == made(1)
    travels = manifest_store.encode(manifest_store.load(DIRECTORY, disk))
    assert not manifest.is_log_complete("there", travels), "what is said of a log stays beside it"
    manifest_store.store(DIRECTORY, disk, made(2), made(1))
    assert not manifest_store.is_complete(DIRECTORY, disk)


def test_after_a_cut_it_is_held_and_not_complete(disk) -> None:
    manifest_store.clear_complete(DIRECTORY, disk)
    assert not manifest_store.is_complete(DIRECTORY, disk), "nothing is held"
    manifest_store.store(DIRECTORY, disk, made(1), made(3), complete=True)
    manifest_store.clear_complete(DIRECTORY, disk)
    for seed in range(20):
        assert not manifest_store.is_complete(DIRECTORY, disk.after_power_loss(seed))
    assert manifest_store.load(DIRECTORY, disk) == made(1)
    assert manifest_store.read_manifest(DIRECTORY, disk, Generation(1, 3)) == made(3)
    manifest_store.mark_lost(DIRECTORY, disk)
    manifest_store.clear_complete(DIRECTORY, disk)
    with pytest.raises(DamagedData, match="was given up"):
        manifest_store.load(DIRECTORY, disk)


def test_what_was_applied_and_is_cut_is_not_complete(world) -> None:
    w = world()
    w.append((b"a", b"1"))
    w.append((b"a", b"2"))
    w.roll()
    w.clean()
    manifest_store.clear_applied(DIRECTORY, w.disk)
    assert w.disk.exists(f"{DIRECTORY}/{layout.HELD_MANIFEST}")
    assert not manifest_store.is_complete(DIRECTORY, w.disk)


def test_a_pass_leaves_the_held_ones_alone(world) -> None:
    w = world()
    w.append((b"a", b"1"))
    w.append((b"a", b"2"))
    w.roll()
    manifest_store.store(DIRECTORY, w.disk, made(9), made(8))
    w.disk.write_atomic(f"{DIRECTORY}/unrelated", b"")
    discard(DIRECTORY, w.disk)
    w.clean()
    w.open()
    assert manifest_store.read_manifest(DIRECTORY, w.disk, Generation(1, 9)) == made(9)


def test_generations_need_not_ascend_over_epochs(world) -> None:
    """A base counts from less than what it replaces: its swap is completed all the same."""
    w = world()
    for generation in range(3):
        w.append((b"a", b"%d" % generation))
        w.roll()
        w.clean()
    assert w.state.applied == Generation(0, 3)
    w.append((b"a", b"x"))
    job = job_builder.base_job(w.log, Generation(5, 0), now_ms=w.now, limits=planner.Limits())
    result = run_pass(job, w.disk)
    applying.commit_files(DIRECTORY, w.disk, result, w.state.applied)
    w.open()  # as after a crash before the mark
    assert w.state.applied == Generation(5, 0)


def fill(w) -> None:
    w.append((b"a", b"1"), (b"b", b"1"), (b"a", None))
    w.append((b"a", b"2"), codec=Codec.ZSTD)
    w.append((b"t", b"bad"), pid=9, sequence=0, transactional=True)
    w.marker(9, commit=False)
    w.roll()
    w.append((b"b", None))
    w.roll()


def test_in_a_base_generation_everything_survives(world) -> None:
    w = world(delete_retention_ms=1000)
    fill(w)
    w.clean()
    fill(w)
    before = w.pairs()
    bytes_before = [data for _, data in w.read()]
    w.now += 10_000  # horizons have passed
    job = job_builder.base_job(w.log, Generation(7, 0), now_ms=w.now, limits=planner.Limits())
    result = run_pass(job, w.disk)
    assert result.bytes_after == 0
    w.state = install(w.log, result, w.state.applied, w.now)
    assert w.pairs() == before
    assert [data for _, data in w.read()] == bytes_before
    found = read_manifest(DIRECTORY, Generation(7, 0), w.disk)
    assert (found.clean_to, found.end_offset) == (0, w.log.log_end_offset)
    records = sum(header.record_count for header in w.headers())
    assert sum(len(s.survivors) for s in found.segments) == records
    assert all(segment.digest for segment in found.segments)


def test_a_follower_of_an_unclean_leader_is_compared_with_its_base(world) -> None:
    leader, follower, other = world(), world(), world()
    fill(leader)
    fill(follower)
    fill(other)
    leader.append((b"x", b"1"))
    follower.append((b"x", b"1"))
    other.append((b"x", b"2"))
    job = job_builder.base_job(
        leader.log, Generation(7, 0), now_ms=leader.now, limits=planner.Limits()
    )
    leader.state = install(leader.log, run_pass(job, leader.disk), None, leader.now)
    base = read_manifest(DIRECTORY, Generation(7, 0), leader.disk)
    result = follow.follow(follow.job_for(follower.log, base, None, 0), follower.disk)
    assert install(follower.log, result, None, 0).applied == Generation(7, 0)
    with pytest.raises(follow.LogsDiffer) as error:
        follow.follow(follow.job_for(other.log, base, None, 0), other.disk)
    assert error.value.offset == base.segments[-1].base_offset
