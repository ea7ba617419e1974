"""Closed segments that were flushed, and whose files somebody cut, at a start.

Where no other replica has the records, nothing goes with those that the cut took: what is whole is
served, who reads what is torn is refused. Where another has them, the log is cut there, and
fetches the rest.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import replace

import pytest

from kept.storage import layout
from kept.storage.errors import DamagedData
from kept.storage.inspect.check import check_partition
from kept.storage.records import read_header
from kept.storage.records.control import ABORT, COMMIT
from kept.storage.types import LogConfig
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk
from tests.support.transactional_log import Feed

CONFIG = LogConfig(segment_bytes=900, index_interval_bytes=100)
"""Each batch but the first of a segment has an entry in the index."""
NO_ENTRIES = replace(CONFIG, index_interval_bytes=10_000)
COMPACT = replace(CONFIG, cleanup_policy=frozenset({"compact"}))
END = 80
HEADER = 61
EPOCHS = [(0, 0), (1, 20), (2, 40), (3, 60)]


def written(
    kit, *, config: LogConfig = CONFIG, close: bool = True, step_ms: int = 1
) -> tuple[SimulatedDisk, list, list[int]]:
    """The disk, the batches of the log, and the bases of its segments."""
    disk = SimulatedDisk()
    log = kit.open_log(disk, config=config)
    for n in range(END // 2):
        time = kit.NOW + n * step_ms
        data = kit.batch(2, mark=n, timestamp=time, pid=3, epoch=0, sequence=2 * n)
        kit.append(log, data, leader_epoch=n // 10)
    contents, bases = kit.contents(log), list(log.segments.bases)
    assert len(bases) > 4
    if close:
        log.close()
    return disk, contents, bases


def cut(disk: SimulatedDisk, base: int, size: int) -> str:
    """Cut a segment's file to ``size`` bytes, durably; its path."""
    path = layout.segment_file("/d/t-0", base, layout.LOG)
    inode = disk.inode(path)
    assert size < len(inode.data)
    del inode.data[size:]
    inode.sync()
    return path


def reopen(kit, disk: SimulatedDisk, config: LogConfig = CONFIG, **options):
    return kit.open_log(disk, config=config, **{"clean": True, "recovery_point": END, **options})


def served(log) -> tuple[list, list[int]]:
    """What consumers get: the batches, and the offsets at which they are refused."""
    batches, refused, offset = [], [], log.log_start_offset
    while offset < log.written_end_offset:
        try:
            data = log.read_batches(offset, 1, log.written_end_offset)
        except DamagedData:
            refused.append(offset)
            offset += 1
            continue
        header = read_header(data)
        assert len(data) == header.size_bytes
        batches.append((header.base_offset, header.last_offset, data))
        offset = header.next_offset
    return batches, refused


def errors(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


def part(contents: list, bases: list[int], number: int) -> list:
    """The batches of a segment."""
    return [c for c in contents if bisect_right(bases, c[0]) - 1 == number]


def size_of(batches: list) -> int:
    return sum(len(c[2]) for c in batches)


@pytest.mark.parametrize("config", [CONFIG, COMPACT], ids=["delete", "compact"])
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("keep", [0, 1, -2, -1], ids=["none", "one", "all but two", "all but one"])
@pytest.mark.parametrize("more", [1, HEADER - 1, HEADER, HEADER + 9, -1])
def test_a_lone_replica_loses_what_was_cut_off_alone(  # noqa: PLR0917
    kit, caplog, more, keep, clean, config
) -> None:
    """``keep`` whole batches are left in a segment, and ``more`` bytes of the next."""
    disk, contents, bases = written(kit)
    batches = part(contents, bases, 1)
    gone = batches[keep:]
    size = size_of(batches) - size_of(gone)
    path = cut(disk, bases[1], size + (more if more > 0 else len(gone[0][2]) - 1))
    left = [c for c in contents if c not in gone]
    refused = list(range(gone[0][0], bases[2]))
    torn = disk.read(path)
    log = reopen(kit, disk, config, clean=clean)
    log.check_invariants()
    assert served(log) == (left, refused)
    assert disk.read(path) == torn, "nothing is removed"
    assert any(f.damaged and f.path == path for f in check_partition("/d/t-0", disk))
    assert log.log_end_offset == log.recovery_point == END
    assert log.leader_epochs.entries == EPOCHS
    later = log.offset_for_timestamp(kit.NOW + bases[2] // 2 + 1)
    assert later is not None and later.offset == bases[2] + 1
    # Compaction may have left gaps: where no index names what is gone, only readers find it.
    assert any(path in line for line in errors(caplog)) is (config is CONFIG or len(gone) > 1)
    kit.append(log, kit.batch(1, pid=3, epoch=0, sequence=END), leader_epoch=9)
    log.close()
    again = reopen(kit, disk, config, recovery_point=log.recovery_point)
    batches, still_refused = served(again)
    assert (batches[:-1], still_refused) == (left, refused)
    assert again.log_end_offset == END + 1


def test_several_torn_segments(kit, caplog) -> None:
    disk, contents, bases = written(kit)
    torn = [0, 2, 3]
    for number in torn:
        cut(disk, bases[number], size_of(part(contents, bases, number)[:1]) + 7)
    gone = [c for number in torn for c in part(contents, bases, number)[1:]]
    batches, refused = served(reopen(kit, disk))
    assert batches == [c for c in contents if c not in gone]
    assert refused == [offset for c in gone for offset in range(c[0], c[1] + 1)]
    assert len(errors(caplog)) == len(torn)


def test_a_damaged_header_takes_nothing_along(kit, caplog) -> None:
    """Its length is that of a batch that was cut off, and whole ones follow in the file."""
    disk, contents, bases = written(kit)
    path = layout.segment_file("/d/t-0", bases[1], layout.LOG)
    disk.flip_bit(path, size_of(contents[:1]) + 8, 6)
    disk.unlink(path.replace(layout.LOG, layout.INDEX))
    rotten = disk.read(path)
    log = reopen(kit, disk)
    hidden = part(contents, bases, 1)[1:]
    assert len(hidden) > 1
    refused = list(range(hidden[0][0], bases[2]))
    assert served(log) == ([c for c in contents if c not in hidden], refused)
    assert disk.read(path) == rotten
    (line,) = errors(caplog)
    assert line.startswith(f"{path}: damaged at byte {size_of(contents[:1])}")
    assert line.endswith("it stays, and who reads there is refused")
    log.close()
    cut(disk, bases[1], size_of(contents[:1]))  # whoever has no backup gives it up
    assert served(reopen(kit, disk)) == ([c for c in contents if c not in hidden], [])


@pytest.mark.parametrize("kind", [ABORT, COMMIT])
def test_a_torn_marker_leaves_no_transaction_open(kit, kind) -> None:
    """Readers of committed records do not wait for it: the state behind the segment is known."""
    disk = SimulatedDisk()
    log = kit.open_log(disk, config=CONFIG)
    feed = Feed(kit)
    log.append_as_follower(feed.data(1), kit.NOW)
    log.append_as_follower(feed.marker(1, kind), kit.NOW)
    log.write()
    log.roll(kit.NOW)
    log.append_as_follower(feed.data(2), kit.NOW)
    log.append_as_follower(feed.marker(2, COMMIT), kit.NOW)
    log.write()
    end = log.log_end_offset
    aborted = log.aborted_transactions(0, end)
    assert len(aborted) == (kind == ABORT)
    log.close()
    path = layout.segment_file("/d/t-0", 0, layout.LOG)
    cut(disk, 0, disk.stat(path).size_bytes - 5)
    disk.unlink(path.replace(layout.LOG, layout.INDEX))
    log = reopen(kit, disk, recovery_point=end)
    assert log.first_unstable_offset is None and log.log_end_offset == end
    assert log.aborted_transactions(0, end) == aborted


@pytest.mark.parametrize("known", ["none", "unknown", "its first batch", "all but its last record"])
def test_above_the_recovery_point_a_log_is_cut(kit, known) -> None:
    """There a power cut may have torn it: nothing that follows is known to be whole."""
    disk, contents, bases = written(kit, close=False)
    cut(disk, bases[2], size_of(contents[:1]) + 7)
    points = {"none": 0, "unknown": None, "its first batch": bases[2] + 2}
    point = points.get(known, bases[3] - 1)
    log = reopen(kit, disk, clean=False, recovery_point=point)
    assert kit.contents(log) == [c for c in contents if c[0] <= bases[2]]
    assert log.log_end_offset == bases[2] + 2
    assert disk.listdir("/d/t-0").count(f"{bases[3]:020d}.log") == 0


@pytest.mark.parametrize("clean", [True, False])
def test_the_active_segment_is_cut_where_it_is_torn(kit, clean) -> None:
    disk, contents, bases = written(kit)
    cut(disk, bases[-1], size_of(contents[:1]) + 7)
    log = reopen(kit, disk, clean=clean)
    assert log.log_end_offset == bases[-1] + 2
    assert kit.contents(log) == [c for c in contents if c[0] <= bases[-1]]


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("more", [0, 1, HEADER, -1], ids=["no batch", "a byte", "a header", "most"])
@pytest.mark.parametrize("keep", [1, -1], ids=["one", "all but one"])
@pytest.mark.parametrize("config", [CONFIG, NO_ENTRIES], ids=["entries", "no entries"])
def test_one_replica_of_several_is_cut_there(  # noqa: PLR0917
    kit, caplog, config, keep, more, clean
) -> None:
    """Its leader has what is missing: no gap is to stay, and nothing that is torn."""
    disk, contents, bases = written(kit, config=config)
    batches = part(contents, bases, 1)
    gone = batches[keep:]
    size = size_of(batches) - size_of(gone)
    path = cut(disk, bases[1], size + (more if more >= 0 else len(gone[0][2]) - 1))
    log = reopen(kit, disk, config, clean=clean, replicated=True)
    log.check_invariants()
    assert kit.contents(log) == [c for c in contents if c[0] < gone[0][0]]
    assert log.log_end_offset == gone[0][0] == log.recovery_point
    assert disk.stat(path).size_bytes == size
    assert "everything below 80 was durable: records are lost" in errors(caplog)[-1]


@pytest.mark.parametrize("size", ["nothing", "one batch"])
def test_a_gap_of_a_lone_replica_stays(kit, caplog, size) -> None:
    """It is named, and consumers read past it."""
    disk, contents, bases = written(kit)
    gone = part(contents, bases, 1)[size == "one batch" :]
    path = cut(disk, bases[1], size_of(contents[:1]) * (size == "one batch"))
    assert served(reopen(kit, disk)) == ([c for c in contents if c not in gone], [])
    (line,) = errors(caplog)
    assert line.startswith(
        f"{path}: it ends at {gone[0][0]}, the next segment begins at {bases[2]}"
    )


def test_a_gap_that_no_index_proves_stays(kit, caplog) -> None:
    """Were the topic compacted once, the records would be nowhere. The time index does not name the
    last batch here, as that is no younger than another one.
    """
    disk, contents, bases = written(kit, config=NO_ENTRIES, step_ms=0)
    batches = part(contents, bases, 1)
    path = cut(disk, bases[1], size_of(batches[:-1]))
    log = reopen(kit, disk, NO_ENTRIES, replicated=True)
    assert kit.contents(log) == [c for c in contents if c != batches[-1]]
    (line,) = errors(caplog)
    assert line.startswith(f"{path}: it ends at {batches[-1][0]}, the next segment begins at")


@pytest.mark.parametrize("policy", ["compact", "delete"])
def test_a_gap_where_compaction_was_stays(kit, caplog, policy) -> None:
    """What was compacted is compared with its manifest."""
    disk, contents, bases = written(kit)
    if policy == "delete":
        disk.write_file("/d/t-0/manifest-0-1", b"")
    gone = part(contents, bases, 1)[1:]
    cut(disk, bases[1], size_of(contents[:1]))
    log = reopen(kit, disk, COMPACT if policy == "compact" else CONFIG, replicated=True)
    assert kit.contents(log) == [c for c in contents if c not in gone]
    assert errors(caplog) == []


@pytest.mark.parametrize(
    ("keep", "more", "replicated"),
    [
        *[(keep, more, True) for keep in (1, -1) for more in (0, 7)],
        *[(1, 0, False), (-1, 0, False), (1, 7, False)],
    ],
)
def test_a_crash_at_any_call_of_such_a_start(kit, keep, more, replicated) -> None:
    """The next start leaves what this one would have left: the proof is there until all is done."""
    disk, contents, bases = written(kit)
    batches = part(contents, bases, 1)
    gone = batches[keep:]
    cut(disk, bases[1], size_of(batches) - size_of(gone) + more)
    refused = list(range(gone[0][0], bases[2])) if more and not replicated else []
    left = [c for c in contents if c not in gone and not (replicated and c[0] > gone[0][0])]
    probe = disk.after_kill()
    log = reopen(kit, probe, clean=False, replicated=replicated)
    calls = probe.calls
    assert calls and served(log) == (left, refused)
    for call in range(1, calls + 1):
        again = disk.after_kill()
        again.crash_at(call)
        with pytest.raises(SimulatedCrash):
            reopen(kit, again, clean=False, replicated=replicated)
        for after in (again.after_kill(), *(again.after_power_loss(seed) for seed in range(3))):
            log = reopen(kit, after, clean=False, replicated=replicated)
            log.check_invariants()
            assert served(log) == (left, refused), call


def test_a_gap_that_apache_kafka_may_have_left_stays(kit) -> None:
    """Its followers begin a segment where the next batch does."""
    disk, contents, bases = written(kit)
    disk.write_file(f"/d/{layout.ADOPTED}", b"")
    gone = part(contents, bases, 1)[1:]
    cut(disk, bases[1], size_of(contents[:1]))
    log = reopen(kit, disk, replicated=True)
    assert kit.contents(log) == [c for c in contents if c not in gone]


def test_a_cut_that_a_power_cut_half_undid_is_made_again(kit) -> None:
    """What followed was removed, and some names are back: of the next segment only an index."""
    disk, contents, bases = written(kit)
    cut(disk, bases[1], size_of(contents[:1]))
    disk.unlink(layout.segment_file("/d/t-0", bases[2], layout.LOG))
    log = reopen(kit, disk, clean=False, replicated=True)
    assert kit.contents(log) == [c for c in contents if c[0] <= bases[1]]
