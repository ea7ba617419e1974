"""A cut reads little, syncs in the order that must hold, and leaves what a full read would."""

from __future__ import annotations

from random import Random

import pytest

from kept.storage import layout
from kept.storage.disk import File
from kept.storage.errors import DamagedData, MachineError, OffsetOutOfRange
from kept.storage.log.log import Log
from kept.storage.segments.segment import Segment
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import LogConfig
from tests.support.simulated_disk import SimulatedDisk


class CountingDisk(SimulatedDisk):
    """``log_bytes``: how much of ``.log`` files was read."""

    log_bytes = 0

    def pread(self, file: File, position: int, size: int) -> bytes:
        data = super().pread(file, position, size)
        if file.path.endswith(layout.LOG):
            self.log_bytes += len(data)
        return data


@pytest.mark.parametrize("closed", [False, True])
def test_a_cut_reads_from_the_last_index_entry_on(kit, closed) -> None:
    """``closed``: in a segment that was rolled before, whose indexes are on disk."""
    disk = CountingDisk()
    log = kit.open_log(disk, config=LogConfig(segment_bytes=1 << 20))
    for n in range(200):
        kit.append(log, kit.batch(1, mark=n, size=2000))
    if closed:
        log.roll(kit.NOW)
        kit.append(log, kit.batch(1))
        log.segments[0].index.unload()
        log.segments[0].time_index.unload()
    assert log.segments[0].size_bytes > 400_000
    disk.log_bytes = 0
    log.truncate_to(195)
    assert disk.log_bytes < 64_000
    assert [s.base_offset for s in log.segments] == [0] and log.log_end_offset == 195
    kit.append(log, kit.batch(1))
    assert [base for base, _, _ in kit.contents(log)] == list(range(196))


def derived(segment: Segment) -> dict[str, object]:
    return {
        "index": (list(segment.index.offsets), list(segment.index.positions)),
        "times": list(zip(segment.time_index.timestamps, segment.time_index.offsets, strict=True)),
        "largest": (segment.max_timestamp, segment.max_timestamp_offset),
        "first": segment.first_timestamp,
        "since": segment.bytes_since_index,
        "end": (segment.next_offset, segment.size_bytes),
    }


def read_anew(disk: SimulatedDisk, segment: Segment) -> dict[str, object]:
    fresh = Segment(
        disk,
        segment.directory,
        segment.base_offset,
        size_bytes=segment.size_bytes,
        mtime_ms=0,
        index_interval_bytes=segment.index_interval_bytes,
        loaded=True,
    )
    for batch in fresh.walk(0, fresh.size_bytes):
        fresh.index_batch(batch)
    return derived(fresh)


@pytest.mark.parametrize("damage", ["", "an entry", "a file"])
@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_what_follows_from_the_batches_is_as_if_all_were_read(kit, seed, reopened, damage) -> None:
    random = Random(seed)
    for _ in range(12):
        disk = SimulatedDisk()
        log = kit.open_log(disk)
        for n in range(40):
            timestamp = kit.NOW + random.randrange(1000)
            data = kit.batch(2, mark=n, timestamp=timestamp, size=random.randrange(150))
            kit.append(log, data)
            if reopened and n == 20:
                log.close()
                log = kit.open_log(disk, clean=True, recovery_point=42)
        to = random.randrange(80)
        active = log.segments[log.segments.floor(to)]
        if damage == "a file" and active is not log.active_segment:
            disk.write_file(active.time_index.path, disk.read(active.time_index.path)[:-1])
            active.time_index.unload()
        elif damage == "an entry" and active.index.loaded and active.index.offsets:
            active.index.offsets[-1] += 1
        log.truncate_to(to)
        log.check_invariants()
        found, wanted = derived(log.active_segment), read_anew(disk, log.active_segment)
        # A clean stop leaves one entry more in the time index.
        assert set(wanted["times"]) <= set(found.pop("times"))
        assert len(found) == 5 and found == {name: wanted[name] for name in found}
        assert log.log_end_offset == to - to % 2


def of_three_segments(kit) -> tuple[SimulatedDisk, Log]:
    disk = SimulatedDisk()
    log = kit.open_log(disk)
    while len(log.segments) < 3:
        kit.append(log, kit.batch(2))
    return disk, log


def overwrite(disk: SimulatedDisk, segment: Segment, position: int) -> None:
    """Leave no batch at a position of the ``.log``."""
    disk.writev(segment.file, [bytes(64)], position)


def steps(disk: SimulatedDisk, since: int) -> list[str]:
    """What was done that could be lost: operations with the kind of file."""
    return [f"{line.split()[0]} {line.rpartition('/')[2]}" for line in disk.trace[since:]]


def test_a_cut_in_the_active_segment_is_one_fsync(kit) -> None:
    disk = SimulatedDisk()
    log = kit.open_log(disk)
    for n in range(5):
        kit.append(log, kit.batch(2, mark=n))
    name = f"{0:020d}.log"
    before = disk.calls
    log.truncate_to(6)
    assert steps(disk, before) == [f"truncate {name}", f"fsync {name}"]


def test_a_cut_to_the_end_forgets_an_epoch_without_records_and_touches_no_segment(kit) -> None:
    """A leader that appended nothing left its entry there."""
    disk = SimulatedDisk()
    log = kit.open_log(disk)
    kit.append(log, kit.batch(2))
    log.leader_epochs.assign(5, log.log_end_offset)
    log.leader_epochs.save()
    before = disk.calls
    log.truncate_to(log.log_end_offset)
    assert log.leader_epochs.latest == 0
    assert not [step for step in steps(disk, before) if step.endswith(layout.LOG)]


@pytest.mark.parametrize("offset", [-1, -2])
def test_there_is_no_cut_below_zero(kit, offset) -> None:
    log = kit.open_log(SimulatedDisk())
    kit.append(log, kit.batch(2))
    with pytest.raises(OffsetOutOfRange):
        log.truncate_to(offset)
    assert log.log_end_offset == 2


def test_names_go_then_records_then_their_epochs(kit) -> None:
    disk = SimulatedDisk()
    log = kit.open_log(disk)
    for n in range(40):
        data = kit.batch(2, mark=n, pid=7, epoch=0, sequence=2 * n)
        kit.append(log, data, leader_epoch=n // 10)
    assert len(log.segments) > 2
    log.flush()
    before = disk.calls
    log.truncate_to(6)
    done = steps(disk, before)
    last_unlink = max(i for i, step in enumerate(done) if step.startswith("unlink"))
    cut, synced = (done.index(f"{what} {0:020d}.log") for what in ("truncate", "fsync"))
    names = [i for i, step in enumerate(done) if step == "fsync_dir t-0"]
    epochs = done.index(f"rename {layout.LEADER_EPOCHS}.tmp")
    assert last_unlink < names[0] < cut < synced < epochs < names[1] and len(names) == 2


def test_no_snapshot_above_a_cut_comes_back(kit) -> None:
    """It would vouch for producers whose records are others by then."""
    disk = SimulatedDisk()
    log = kit.open_log(disk)
    for n in range(5):
        kit.append(log, kit.batch(2, mark=n, pid=7, epoch=0, sequence=2 * n))
    log.close()
    log = kit.open_log(disk, clean=True, recovery_point=10)
    assert log.producer_state.snapshot_offsets() == [10] and len(log.segments) == 1
    log.truncate_to(6)
    for seed in range(20):
        left = map(layout.parse_segment_file, disk.after_power_loss(seed).listdir("/d/t-0"))
        assert layout.SNAPSHOT not in {parsed.kind for parsed in left if parsed is not None}
    assert log.producers.get(7).last_offset == 5


def test_damage_that_hides_where_to_cut_is_told_before_anything_is_gone(kit) -> None:
    disk, log = of_three_segments(kit)
    overwrite(disk, log.segments[0], 0)
    log.segments[0].index.unload()
    before = log.segments.bases
    calls = disk.calls
    with pytest.raises(DamagedData):
        log.truncate_to(1)
    assert log.segments.bases == before
    assert not [step for step in steps(disk, calls) if step.startswith(("unlink", "truncate"))]
    kit.append(log, kit.batch(1))
    assert log.log_end_offset == log.segments.active.next_offset


def test_damage_right_below_the_place_is_told_before_anything_is_gone(kit) -> None:
    """An entry of the index leads to the place itself, past it."""
    disk = SimulatedDisk()
    log = kit.open_log(disk, config=LogConfig(segment_bytes=1 << 20))
    for n in range(6):
        kit.append(log, kit.batch(1, mark=n, size=5_000))
    segment, calls = log.segments[0], disk.calls
    assert segment.index.floor_entry(4) == (4, segment.locate(4)[0])
    overwrite(disk, segment, segment.locate(3)[0])
    for cut in (log.check_cut, log.truncate_to):
        with pytest.raises(DamagedData):
            cut(4)
    assert (log.log_end_offset, segment.next_offset) == (6, 6)
    assert not [step for step in steps(disk, calls) if step.startswith(("unlink", "truncate"))]
    log.check_cut(0)
    log.truncate_to(0)
    kit.append(log, kit.batch(1))
    assert [base for base, _, _ in kit.contents(log)] == [0]
    log.check_invariants()


@pytest.mark.parametrize("index", [True, False])
def test_at_the_base_of_a_segment_damage_hides_nothing(kit, index) -> None:
    disk, log = of_three_segments(kit)
    base = log.segments.bases[1]
    left = [batch for batch in kit.contents(log) if batch[0] < base]
    overwrite(disk, log.segments[1], 0)
    log.segments[1].index.unload()
    if not index:
        disk.unlink(log.segments[1].path(layout.INDEX))
    log.truncate_to(base)
    assert log.log_end_offset == base and kit.contents(log) == left
    log.check_invariants()
    kit.append(log, kit.batch(2))
    assert kit.contents(kit.open_log(disk.after_kill())) == kit.contents(log)


def with_aborted(kit) -> tuple[SimulatedDisk, Log]:
    """A log of three segments, each with an aborted transaction; those of the second one on disk
    cannot be read.
    """
    disk, log = of_three_segments(kit)
    for segment in log.segments:
        base = segment.base_offset
        segment.reset_aborted([AbortedTxn(7, base, base + 1, base)])
        segment.save_aborted()
    damaged = log.segments[1]
    disk.write_file(damaged.path(layout.TXN_INDEX), bytes(7))
    damaged._aborted = None
    return disk, log


def test_a_damaged_transaction_index_is_told_before_anything_is_gone(kit) -> None:
    disk, log = with_aborted(kit)
    before, calls = log.segments.bases, disk.calls
    with pytest.raises(DamagedData, match="txnindex"):
        log.truncate_to(log.segments.bases[1] + 2)
    assert log.segments.bases == before
    assert not [step for step in steps(disk, calls) if step.startswith(("unlink", "truncate"))]
    kit.append(log, kit.batch(1))
    assert log.log_end_offset == log.segments.active.next_offset


def test_a_transaction_index_goes_unread_with_all_of_its_segment(kit) -> None:
    disk, log = with_aborted(kit)
    base = log.segments.bases[1]
    path = log.segments[1].path(layout.TXN_INDEX)
    log.truncate_to(base)
    assert log.log_end_offset == base and log.segments.active.aborted == []
    assert not disk.exists(path) and not disk.after_power_loss(0).exists(path)
    assert [entry.first_offset for entry in log.aborted_transactions(0, base)] == [0]


def test_damage_that_is_found_once_segments_are_gone_is_a_failure(kit, monkeypatch) -> None:
    """The log has no end to append at then: nobody may go on with it."""
    _, log = of_three_segments(kit)

    def damaged(segment: Segment, _size_bytes: int) -> None:
        raise DamagedData(segment.path(layout.LOG), 0, 0, "a bit flipped")

    monkeypatch.setattr(Segment, "cut", damaged)
    with pytest.raises(MachineError, match="a bit flipped"):
        log.truncate_to(1)
