"""Closed segments that were flushed, and that somebody cut inside a batch, at a start.

The log of a lone replica loses the end of that segment, and says so. What follows stays: it was
flushed, too, and nobody else has it. One of several is cut there, and fetches the rest.
"""

from __future__ import annotations

import logging
import uuid
from bisect import bisect_right
from dataclasses import replace

import pytest

from kept.storage import layout
from kept.storage.directory import Checkpoint, LogDirectory
from kept.storage.inspect.check import check_partition
from kept.storage.records.control import ABORT, COMMIT
from kept.storage.types import LogConfig, TopicPartition
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk
from tests.support.transactional_log import Feed

CONFIG = LogConfig(segment_bytes=900, index_interval_bytes=100)
COMPACT = replace(CONFIG, cleanup_policy=frozenset({"compact"}))
END = 80
HEADER = 61


def written(kit, *, close: bool = True) -> tuple[SimulatedDisk, list, list[int]]:
    """The disk, the batches of the log, and the bases of its segments."""
    disk = SimulatedDisk()
    log = kit.open_log(disk, config=CONFIG)
    for n in range(END // 2):
        data = kit.batch(2, mark=n, timestamp=kit.NOW + n, pid=3, epoch=0, sequence=2 * n)
        kit.append(log, data, leader_epoch=n // 10)
    contents, bases = kit.contents(log), list(log.segments.bases)
    assert len(bases) > 4
    if close:
        log.close()
    return disk, contents, bases


def tear(disk: SimulatedDisk, base: int, size: int) -> str:
    """Cut a segment's file to ``size`` bytes, durably; its path."""
    path = layout.segment_file("/d/t-0", base, layout.LOG)
    inode = disk.inode(path)
    assert size < len(inode.data)
    del inode.data[size:]
    inode.sync()
    return path


def reopen(kit, disk: SimulatedDisk, config: LogConfig = CONFIG, **options):
    options = {"clean": True, "recovery_point": END, "alone": True, **options}
    return kit.open_log(disk, config=config, **options)


def errors(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


def lost(path: str, end: int, next_base: int) -> str:
    """What a start says."""
    return (
        f"{path}: it ends at {end}, the next segment begins at {next_base}: records from {end} to "
        f"{next_base - 1} are lost here; a file was cut or removed, or the topic was compacted "
        "once and nothing tells of it any more"
    )


def part(contents: list, bases: list[int], number: int) -> list:
    """The batches of a segment."""
    return [c for c in contents if bisect_right(bases, c[0]) - 1 == number]


@pytest.mark.parametrize("config", [CONFIG, COMPACT], ids=["delete", "compact"])
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("keep", [0, 1, -2, -1], ids=["none", "one", "all but two", "all but one"])
@pytest.mark.parametrize("more", [1, HEADER - 1, HEADER, HEADER + 9, -1])
def test_a_lone_replica_loses_the_torn_end_alone(  # noqa: PLR0917
    kit, caplog, more, keep, clean, config
) -> None:
    """``keep`` whole batches are left in a segment, and ``more`` bytes of the next."""
    disk, contents, bases = written(kit)
    batches = part(contents, bases, 1)
    gone = batches[keep:]
    size = sum(len(c[2]) for c in batches[: len(batches) - len(gone)])
    path = tear(disk, bases[1], size + (more if more > 0 else len(gone[0][2]) - 1))
    assert [f.damaged for f in check_partition("/d/t-0", disk) if f.path == path][:1] == [True]
    log = reopen(kit, disk, config, clean=clean)
    log.check_invariants()
    left = [c for c in contents if c not in gone]
    assert kit.contents(log, 200) == left
    assert errors(caplog) == [lost(path, gone[0][0], bases[2])]
    assert log.lacks_records and log.log_end_offset == log.recovery_point == END
    assert disk.stat(path).size_bytes == size
    assert not any(f.damaged for f in check_partition("/d/t-0", disk)), "indexes name what is there"
    for offset in range(gone[0][0], bases[2]):
        found = disk.pread(*log.read(offset, 1, END))
        assert int.from_bytes(found[:8], "big") == bases[2], "a consumer reads past the gap"
        # The last record of a batch is as old as the first one of the next.
        assert log.offset_for_timestamp(kit.NOW + offset // 2 + 1).offset == bases[2]
    assert log.leader_epochs.entries == [(0, 0), (1, 20), (2, 40), (3, 60)]
    kit.append(log, kit.batch(1, pid=3, epoch=0, sequence=END), leader_epoch=9)
    log.close()
    caplog.clear()
    again = reopen(kit, disk, config, recovery_point=log.recovery_point)
    assert kit.contents(again)[:-1] == left and not again.lacks_records
    assert again.log_end_offset == END + 1
    said = [lost(path, gone[0][0], bases[2])] if config is CONFIG else []
    assert errors(caplog) == said, "as of a file that was cut at the end of a batch"


def test_several_torn_segments(kit, caplog) -> None:
    disk, contents, bases = written(kit)
    torn = [0, 2, 3]
    for number in torn:
        tear(disk, bases[number], len(part(contents, bases, number)[0][2]) + 7)
    log = reopen(kit, disk)
    gone = [c for number in torn for c in part(contents, bases, number)[1:]]
    assert kit.contents(log) == [c for c in contents if c not in gone]
    assert len(errors(caplog)) == len(torn)


@pytest.mark.parametrize("clean", [True, False])
def test_one_replica_of_several_is_cut_there(kit, caplog, clean) -> None:
    """Its leader has what is missing: no gap is to stay."""
    disk, contents, bases = written(kit)
    tear(disk, bases[1], len(contents[0][2]) + 7)
    log = reopen(kit, disk, clean=clean, alone=False)
    assert kit.contents(log) == [*part(contents, bases, 0), part(contents, bases, 1)[0]]
    assert log.log_end_offset == bases[1] + 2 == log.recovery_point
    assert "everything below 80 was durable: records are lost" in errors(caplog)[-1]


@pytest.mark.parametrize("known", ["none", "unknown", "its first batch", "all but its last record"])
def test_above_the_recovery_point_a_lone_replica_is_cut_as_ever(kit, known) -> None:
    """There a power cut may have torn it: nothing that follows is known to be whole."""
    disk, contents, bases = written(kit, close=False)
    tear(disk, bases[2], len(contents[0][2]) + 7)
    points = {"none": 0, "unknown": None, "its first batch": bases[2] + 2}
    point = points.get(known, bases[3] - 1)
    log = reopen(kit, disk, clean=False, recovery_point=point)
    assert kit.contents(log) == [c for c in contents if c[0] <= bases[2]]
    assert log.log_end_offset == bases[2] + 2 and not log.lacks_records
    assert disk.listdir("/d/t-0").count(f"{bases[3]:020d}.log") == 0


@pytest.mark.parametrize("clean", [True, False])
def test_the_active_segment_is_cut_where_it_is_torn(kit, clean) -> None:
    disk, contents, bases = written(kit)
    tear(disk, bases[-1], len(contents[0][2]) + 7)
    log = reopen(kit, disk, clean=clean)
    assert log.log_end_offset == bases[-1] + 2
    assert kit.contents(log) == [c for c in contents if c[0] <= bases[-1]]


def test_whole_batches_behind_a_damaged_header_go_with_it(kit, caplog) -> None:
    """Of that segment: nothing tells where the next one begins. Found where the index is, too."""
    disk, contents, bases = written(kit)
    path = layout.segment_file("/d/t-0", bases[1], layout.LOG)
    size = len(contents[0][2])
    disk.flip_bit(path, size + 8, 6)
    disk.unlink(path.replace(layout.LOG, layout.INDEX))
    log = reopen(kit, disk)
    gone = part(contents, bases, 1)[1:]
    assert len(gone) > 1
    assert kit.contents(log) == [c for c in contents if c not in gone]
    assert errors(caplog) == [lost(path, bases[1] + 2, bases[2])]


def test_records_that_rot_stay_where_the_batches_can_be_followed(kit, caplog) -> None:
    """No start reads them: whoever does is refused by their CRC, and nothing is removed."""
    disk, contents, bases = written(kit)
    path = layout.segment_file("/d/t-0", bases[1], layout.LOG)
    disk.flip_bit(path, len(contents[0][2]) + HEADER + 9, 3)
    log = reopen(kit, disk)
    assert [c[:2] for c in kit.contents(log)] == [c[:2] for c in contents]
    assert errors(caplog) == [] and not log.lacks_records


def test_epochs_of_a_torn_segment_come_from_their_file(kit) -> None:
    """No CRC covers the epoch of a batch: rot there is not to take the others' places."""
    disk, contents, bases = written(kit)
    path = tear(disk, bases[1], 2 * len(contents[0][2]) + 7)
    disk.flip_bit(path, 12, 5)
    log = reopen(kit, disk)
    assert log.leader_epochs.entries == [(0, 0), (1, 20), (2, 40), (3, 60)]
    assert log.log_end_offset == END


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
    tear(disk, 0, disk.stat(path).size_bytes - 5)
    log = reopen(kit, disk, recovery_point=end)
    assert log.first_unstable_offset is None and log.log_end_offset == end
    assert log.aborted_transactions(0, end) == aborted


@pytest.mark.parametrize("config", [CONFIG, COMPACT], ids=["delete", "compact"])
@pytest.mark.parametrize("torn", [1, -1], ids=["early", "late"])
def test_a_crash_at_any_call_of_the_cut(kit, caplog, torn, config) -> None:
    """The same batches are left, whenever a start ends; and one start at least has said so."""
    disk, contents, bases = written(kit)
    batches = part(contents, bases, 1)
    kept = batches[:torn]
    path = tear(disk, bases[1], sum(len(c[2]) for c in kept) + 7)
    gone = batches[len(kept) :]
    left = [c for c in contents if c not in gone]
    said = lost(path, gone[0][0], bases[2])
    probe = disk.after_kill()
    reopen(kit, probe, config, clean=False)
    assert probe.calls > 3
    for call in range(1, probe.calls + 1):
        again = disk.after_kill()
        again.crash_at(call)
        caplog.clear()
        with pytest.raises(SimulatedCrash):
            reopen(kit, again, config, clean=False)
        before = list(caplog.records)
        for after in (again.after_kill(), *(again.after_power_loss(seed) for seed in range(3))):
            caplog.clear()
            log = reopen(kit, after, config, clean=False)
            log.check_invariants()
            assert kit.contents(log) == left and log.log_end_offset == END, call
            for offset in range(END):
                assert log.offset_for_timestamp(kit.NOW + offset // 2) is not None
            assert said in errors(caplog) or said in [r.getMessage() for r in before], call


def test_the_directory_knows_that_records_are_lost(kit, caplog) -> None:
    """The mark by which a controller takes its other replicas for complete goes, as ever."""
    disk = SimulatedDisk()
    tp = TopicPartition("t", 0)

    def open_directory() -> LogDirectory:
        return LogDirectory.open(
            "/d",
            disk,
            cluster_id="c",
            node_id=0,
            new_directory_id=uuid.UUID(int=7),
            now_ms=kit.NOW,
        )

    directory = open_directory()
    log = kit.create_log(directory, tp, kit.TOPIC_ID, CONFIG)
    for n in range(END // 2):
        kit.append(log, kit.batch(2, mark=n))
    bases, size = list(log.segments.bases), len(kit.contents(log)[0][2])
    log.close()
    directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {tp: END})
    directory.write_checkpoints(Checkpoint.HIGH_WATERMARKS, {tp: END})
    directory.close(broker_epoch=5)
    tear(disk, bases[1], size + 7)
    directory = open_directory()
    assert directory.was_clean and directory.proven_epoch == 5
    log = directory.open_log(tp, kit.TOPIC_ID, CONFIG, now_ms=kit.NOW, alone=True)
    assert log.log_end_offset == END and len(errors(caplog)) == 1
    assert directory.has_lost and directory.proven_epoch == -1
