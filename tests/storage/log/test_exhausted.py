"""Without descriptors (EMFILE): what was to be done is refused as it was, and done next time."""

from __future__ import annotations

import errno
import os
import resource
from uuid import UUID

import pytest

from kept.storage.disk import Disk
from kept.storage.errors import MachineError, ResourceExhausted
from kept.storage.log.log import Log
from kept.storage.records import CheckRules, build_batch, check, headers
from kept.storage.types import LogConfig, TopicPartition
from tests.support.simulated_disk import SimulatedDisk
from tests.support.swap_plans import fill

ROLL = ("index", "timeindex", "snapshot", "log")
"""What a roll opens, in its order."""


def opened(disk) -> Log:
    return Log.open(
        "/log/t-0",
        TopicPartition("t", 0),
        None if disk.exists("/log/t-0") else _ID,
        LogConfig(),
        disk,
        now_ms=0,
    )


_ID = UUID(int=1)


def append(log: Log, epoch: int = 0) -> None:
    log.append(check(build_batch([(1000, b"k", b"v" * 50, ())]), CheckRules(), 1000), epoch, 1000)
    log.write()


def offsets(log: Log) -> list[int]:
    found: list[int] = []
    while (at := found[-1] + 1 if found else 0) < log.log_end_offset:
        data = log.read_batches(at, 1 << 20, log.log_end_offset)
        found += [header.base_offset for _, header in headers(data)]
    return found


@pytest.mark.parametrize("kind", ROLL)
def test_a_roll_that_finds_no_descriptor_can_be_tried_again(kind):
    disk = SimulatedDisk()
    disk.ensure_directory("/log")
    log = opened(disk)
    for _ in range(3):
        append(log)
    end = f"{3 if kind in ('snapshot', 'log') else 0:020d}.{kind}"
    disk.fail("create", end, errno.EMFILE)
    with pytest.raises(ResourceExhausted, match="Too many open files"):
        log.roll(2000)
    assert not disk.injections, "it was met"
    log.check_invariants()
    append(log)
    assert offsets(log) == [0, 1, 2, 3] and len(log.segments) == 1
    log.roll(3000)
    append(log)
    assert offsets(log) == [0, 1, 2, 3, 4] and log.segments.bases == [0, 4]
    log.flush()
    again = opened(disk.after_power_loss(1))
    assert offsets(again) == [0, 1, 2, 3, 4]
    assert again.segments.bases == [0, 4]


def test_an_empty_active_segment_is_not_given_up_before_there_is_another():
    disk = SimulatedDisk()
    disk.ensure_directory("/log")
    log = opened(disk)
    disk.fail("create", f"{7:020d}.log", errno.EMFILE)
    with pytest.raises(ResourceExhausted):
        log.roll(1000, 7)
    log.check_invariants()
    append(log)
    assert offsets(log) == [0]


def test_an_epoch_that_was_not_saved_is_saved_by_the_next_append():
    disk = SimulatedDisk()
    disk.ensure_directory("/log")
    log = opened(disk)
    disk.fail("create", "leader-epoch-checkpoint", errno.EMFILE)
    with pytest.raises(ResourceExhausted):
        append(log, epoch=3)
    assert log.log_end_offset == 0
    append(log, epoch=3)
    assert disk.read("/log/t-0/leader-epoch-checkpoint").endswith(b"\n3 0\n")
    assert opened(disk.after_power_loss(1)).leader_epochs.entries == [(3, 0)]


CUTS = pytest.mark.parametrize(
    ("cut", "offset"), [("truncate_to", 1), ("truncate_fully_and_start_at", 9)]
)


@CUTS
def test_a_cut_that_finds_no_descriptor_before_anything_is_gone_can_be_made_again(cut, offset):
    disk = SimulatedDisk()
    disk.ensure_directory("/log")
    log = opened(disk)
    for _ in range(3):
        append(log)
    scarce = True

    def lower_checkpoints(*_):
        if scarce:
            raise ResourceExhausted("/log", "open", OSError(errno.EMFILE, "none"))

    log.before_cut = lower_checkpoints
    for _ in range(2):
        with pytest.raises(ResourceExhausted):
            getattr(log, cut)(offset)
        log.check_invariants()
        append(log)
    assert offsets(log) == [0, 1, 2, 3, 4]
    assert offsets(opened(disk.after_kill())) == [0, 1, 2, 3, 4]
    scarce = False
    getattr(log, cut)(offset)
    assert log.log_end_offset == offset
    append(log, epoch=1)
    assert offsets(log)[-1] == offset if cut == "truncate_to" else log.log_end_offset == 10


def test_an_epoch_that_stays_in_the_file_as_it_is_cut_is_a_failure(monkeypatch):
    """The log end moves on, and nobody asks for that cut again."""
    disk = SimulatedDisk()
    disk.ensure_directory("/log")
    log = opened(disk)
    append(log, epoch=4)
    log.leader_epochs.enter(5, log.log_end_offset)
    log.leader_epochs.save()

    def refuse(*_):
        raise ResourceExhausted("/log", "open", OSError(errno.EMFILE, "none"))

    monkeypatch.setattr(type(log.leader_epochs), "save", refuse)
    with pytest.raises(MachineError) as failed:
        log.truncate_to(log.log_end_offset)
    assert not isinstance(failed.value, ResourceExhausted)


def test_a_cut_that_cannot_open_the_segment_where_it_is_can_be_made_again(monkeypatch):
    disk = SimulatedDisk()
    disk.ensure_directory("/log")
    log = opened(disk)
    for _ in range(3):
        append(log)
    log.roll(2000)
    append(log)
    log.flush()
    log.segments[0].close_file()

    def refuse(path):
        raise ResourceExhausted(path, "open", OSError(errno.EMFILE, "none"))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "open_existing", refuse)
        with pytest.raises(ResourceExhausted):
            log.truncate_to(1)
    log.check_invariants()
    assert offsets(log) == [0, 1, 2, 3]
    log.truncate_to(1)
    assert offsets(log) == [0]


def test_a_look_up_that_cannot_open_a_segment_forgets_nothing_of_it(monkeypatch):
    """Its index is damaged; the largest timestamp is what retention goes by."""
    disk = SimulatedDisk()
    disk.ensure_directory("/log")
    log = opened(disk)
    append(log)
    log.roll(2000)
    log.flush()
    segment = log.segments[0]
    segment.close_file()
    segment.index.unload()
    disk.write_file(segment.index.path, b"x")

    def refuse(path):
        raise ResourceExhausted(path, "open", OSError(errno.EMFILE, "none"))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "open_existing", refuse)
        with pytest.raises(ResourceExhausted):
            log.read_batches(0, 1 << 20, 1)
    assert (segment.max_timestamp, segment.next_offset) == (1000, 1)
    assert offsets(log) == [0] and segment.index.loaded


@CUTS
def test_a_cut_that_stops_half_way_is_a_failure(cut, offset):
    disk = SimulatedDisk()
    disk.ensure_directory("/log")
    log = opened(disk)
    for _ in range(3):
        append(log)
    disk.fail("fsync", "/log/t-0", errno.EMFILE)
    with pytest.raises(MachineError) as failed:
        getattr(log, cut)(offset)
    assert not isinstance(failed.value, ResourceExhausted)


def test_a_write_that_fails_is_told_though_cutting_it_back_finds_no_descriptor(monkeypatch):
    disk = SimulatedDisk()
    disk.ensure_directory("/log")
    log = opened(disk)
    append(log)
    disk.fail("write", ".log", errno.EIO)

    def no_descriptor(error):
        raise ResourceExhausted("x", "open", OSError(errno.EMFILE, "none"))

    monkeypatch.setattr(log, "_cut_back", no_descriptor)
    with pytest.raises(MachineError, match="Input/output"):
        append(log)


# The real thing.


@pytest.fixture
def few():
    """Not many more descriptors than are open: 40 above the highest of them."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Holder:
    def __init__(self, disk: Disk, path: str) -> None:
        self.file = disk.open_append(path)

    def close_file(self) -> None:
        self.file = None


def test_no_file_stays_open_on_the_last_descriptors(few, tmp_path):
    disk = Disk({})
    disk.keep_below = few - 16
    kept = []
    with pytest.raises(ResourceExhausted, match="open failed: Too many open files"):
        for number in range(few):
            kept.append(disk.open_append(f"{tmp_path}/{number}"))
    assert len(kept) > 20 and max(file.fd for file in kept) == few - 17
    moments = [disk.open_read(kept[0].path) for _ in range(10)]
    disk.write_atomic(f"{tmp_path}/checkpoint", b"0\n")
    assert disk.listdir(str(tmp_path)) and moments


def test_an_error_that_somebody_keeps_keeps_no_descriptor(few, tmp_path):
    disk = Disk({})
    disk.keep_below = 0
    before, errors = len(os.listdir("/proc/self/fd")), []
    for number in range(10):
        with pytest.raises(ResourceExhausted) as refused:
            disk.open_append(f"{tmp_path}/{number}")
        errors.append(refused)
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_that_can_be_opened_again_give_way(few, tmp_path):
    disk = Disk({})
    disk.keep_below = few - 16
    holders = [Holder(disk, f"{tmp_path}/{number}") for number in range(15)]
    for holder in holders:
        disk.can_close(holder)
    free = few - 16 - len(os.listdir("/proc/self/fd"))
    kept = [disk.open_append(f"{tmp_path}/more-{number}") for number in range(free + 10)]
    assert len(kept) == free + 10
    closed = [holder.file is None for holder in holders]
    assert closed == sorted(closed, reverse=True) and any(closed), "the oldest first"


def test_only_so_many_of_them_stay_open(tmp_path):
    disk = Disk({})
    disk.max_reopenable = 3
    holders = [Holder(disk, f"{tmp_path}/{number}") for number in range(5)]
    for holder in holders:
        disk.can_close(holder)
    assert [holder.file is None for holder in holders] == [True, True, False, False, False]


def test_closed_segments_are_closed_only_when_they_are_durable(tmp_path):
    disk = Disk({})
    disk.max_reopenable = 0
    log = Log.open(f"{tmp_path}/t-0", TopicPartition("t", 0), _ID, LogConfig(), disk, now_ms=0)
    append(log)
    log.roll(2000)
    first = log.segments[0]
    first.close_file()
    assert first._file is not None
    log.flush()
    assert first._file is None
    append(log)
    assert offsets(log) == [0, 1]


def test_a_start_without_a_recovery_point_leaves_no_closed_segment_open(kit, tmp_path):
    written = fill(kit, Disk({}), f"{tmp_path}/t-0")
    disk = Disk({})
    disk.max_reopenable = 2
    before = len(os.listdir("/proc/self/fd"))
    log = kit.open_log(disk, f"{tmp_path}/t-0", config=written.config)
    assert len(log.segments) > 6 and all(segment.flushed for segment in log.segments[:-1])
    assert len(os.listdir("/proc/self/fd")) <= before + 1 + 2, "the active one, and those read last"


@pytest.mark.parametrize("name", ["open", "listdir"])
def test_what_can_be_opened_again_is_closed_where_no_descriptor_is_left(
    name, tmp_path, monkeypatch
):
    disk = Disk({})
    holder = Holder(disk, f"{tmp_path}/a")
    original = getattr(os, name)

    def refused(*given):
        if holder.file is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return original(*given)

    monkeypatch.setattr(os, name, refused)
    call = {
        "open": lambda: disk.open_read(f"{tmp_path}/a"),
        "listdir": lambda: disk.listdir(str(tmp_path)),
    }[name]
    with pytest.raises(ResourceExhausted, match="Too many open files"):
        call()
    disk.can_close(holder)
    assert call()


@pytest.mark.parametrize("times", [1, 3, 4])
def test_a_write_waits_a_little_for_memory(tmp_path, monkeypatch, times):
    disk = Disk({})
    log = Log.open(f"{tmp_path}/t-0", TopicPartition("t", 0), _ID, LogConfig(), disk, now_ms=0)
    pwrite, left = os.pwrite, [errno.ENOMEM] * times

    def scarce(fd, data, position):
        if left:
            raise OSError(left.pop(), "no memory")
        return pwrite(fd, data, position)

    monkeypatch.setattr(os, "pwrite", scarce)
    if times <= 3:
        append(log)
        assert offsets(log) == [0]
    else:
        with pytest.raises(MachineError, match="write failed: no memory") as failed:
            append(log)
        assert not isinstance(failed.value, ResourceExhausted)
        assert log.log_end_offset == 0
