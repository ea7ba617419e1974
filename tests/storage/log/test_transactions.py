"""Transactions in a log: first unstable offset and aborted ones, after a restart too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kept.storage import checkpoints, layout
from kept.storage.disk import Disk
from kept.storage.inspect.check import check_partition
from kept.storage.records import headers
from kept.storage.records.control import ABORT, COMMIT
from kept.storage.segments import txn_index
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import LogConfig
from tests.support.simulated_disk import SimulatedDisk
from tests.support.transactional_log import Feed, fill

CONFIG = LogConfig(segment_bytes=600, index_interval_bytes=100)


@pytest.mark.parametrize("reopen", ["no", "clean", "unclean"])
def test_aborted_transactions_are_known(kit, disk, reopen) -> None:
    log = kit.open_log(disk, config=CONFIG)
    expected = fill(kit, log)
    assert len(log.segments) > 4
    if reopen != "no":
        if reopen == "clean":
            log.close()
        log = kit.open_log(disk, config=CONFIG, clean=reopen == "clean")
    end = log.log_end_offset
    assert log.aborted_transactions(0, end) == expected
    assert log.first_unstable_offset == end - 2
    for start in range(0, end, 5):
        for stop in range(start + 1, end, 7):
            found = log.aborted_transactions(start, stop)
            must = [t for t in expected if t.last_offset >= start and t.first_offset < stop]
            assert found == must
    log.check_invariants()


def test_truncation_opens_a_transaction_again(kit, disk) -> None:
    log = kit.open_log(disk, config=CONFIG)
    expected = fill(kit, log)
    last = expected[-1]
    log.truncate_to(last.last_offset)
    assert log.aborted_transactions(0, 1000) == expected[:-1]
    assert log.first_unstable_offset == last.first_offset
    log.check_invariants()


@pytest.mark.java
def test_apache_kafka_reads_the_index(kit, kafka_dist, tmp_path) -> None:
    log = kit.open_log(Disk({}), str(tmp_path / "t-0"), config=CONFIG)
    expected = fill(kit, log)
    log.close()
    files = sorted(Path(log.directory).glob("*.txnindex"))
    output = kafka_dist.dump(files)
    found = re.findall(
        r"producerId: (\d+) firstOffset: (\d+) lastOffset: (\d+) lastStableOffset: (\d+)", output
    )
    assert [tuple(map(int, entry)) for entry in found] == [tuple(e) for e in expected]
    output = kafka_dist.dump(sorted(Path(log.directory).glob("*.log")), "--deep-iteration")
    assert "isvalid: false" not in output and output.count("isControl: true") == 24


@pytest.mark.parametrize("max_bytes", [1, 300, 1000, 1 << 20])
def test_a_slice_brings_its_own_aborted_transactions_only(kit, disk, max_bytes) -> None:
    """Every one that reaches into what is read, and none that begins behind it."""
    log = kit.open_log(disk, config=CONFIG)
    expected = fill(kit, log)
    end = expected[-1].last_offset  # the last one is not decided yet
    offset, slices = 0, 0
    while (found := log.read(offset, max_bytes, end)) is not None:
        read = [header for _, header in headers(disk.pread(*found))]
        must = [
            t
            for t in expected
            if t.last_offset >= offset and t.first_offset <= read[-1].last_offset
        ]
        assert log.aborted_in_slice(offset, found, end) == must
        offset, slices = read[-1].next_offset, slices + 1
    assert offset >= end - 1 and slices > 4
    assert log.aborted_in_slice(end, None, end) == []


@pytest.mark.parametrize("clean", [True, False])
def test_a_transaction_whose_records_are_gone_is_forgotten_after_a_restart_too(
    kit, disk, clean
) -> None:
    """Else read_committed consumers would wait at the log start for a marker that never comes."""
    log, feed = kit.open_log(disk, config=CONFIG), Feed(kit)
    log.append_as_follower(feed.data(1), kit.NOW)
    log.append_as_follower(feed.data(2), kit.NOW)
    for _ in range(20):
        log.append_as_follower(feed.data(3), kit.NOW)
        log.append_as_follower(feed.marker(3, COMMIT), kit.NOW)
    log.write()
    log.advance_log_start(3)
    assert log.first_unstable_offset == 2, "half of the second one's is there"
    log.advance_log_start(4)
    assert log.first_unstable_offset is None
    start = log.log_start_offset
    if clean:
        log.close()
    log = kit.open_log(disk, config=CONFIG, clean=clean, log_start_offset=start)
    assert log.log_start_offset == start and log.first_unstable_offset is None
    log.append_as_follower(feed.data(3), kit.NOW)
    log.write()
    log.truncate_to(feed.offset - 2)
    assert log.first_unstable_offset is None


def test_a_check_compares_the_index_with_the_markers(kit, disk) -> None:
    log = kit.open_log(disk, config=CONFIG)
    expected = fill(kit, log)
    log.close()
    disk.write_file("/d/.kafka_cleanshutdown", b'{"version":0,"brokerEpoch":1}')
    assert check_partition(log.directory, disk) == []
    (path, entries) = next(
        (segment.path(layout.TXN_INDEX), segment.aborted)
        for segment in log.segments
        if segment.aborted
    )
    first = entries[0]
    changed = first._replace(producer_id=9)
    disk.write_file(path, txn_index.encode([changed, *entries[1:]]))
    found = [(f.path, f.offset, f.damaged) for f in check_partition(log.directory, disk)]
    assert found == [(path, first.last_offset, True)], "it names another producer"
    disk.unlink(path)
    found = [(f.path, f.offset, f.damaged) for f in check_partition(log.directory, disk)]
    assert (path, first.last_offset, True) in found and len(found) == len(entries)
    starts = {kit.TP: first.last_offset}
    checkpoints.write_offsets(disk, f"/d/{layout.LOG_STARTS}", starts)
    found = [f.offset for f in check_partition(log.directory, disk)]
    assert first.last_offset not in found, "what it aborted cannot be read any more"
    assert expected[0] == first
    disk.unlink("/d/.kafka_cleanshutdown")
    disk.write_file(path, b"\0")
    torn = [f for f in check_partition(log.directory, disk) if f.path == path]
    assert [f.damaged for f in torn] == [True], "it was written long before a kill"


@pytest.mark.parametrize("left", [0, 1])
def test_no_aborted_transaction_above_a_cut_comes_back(kit, left) -> None:
    """It would hide what is appended there from read_committed consumers."""
    disk = SimulatedDisk()
    log, feed = kit.open_log(disk, config=LogConfig(segment_bytes=1 << 20)), Feed(kit)
    expected = []
    for _ in range(3):
        first = feed.offset
        log.append_as_follower(feed.data(1), kit.NOW)
        expected.append(AbortedTxn(1, first, feed.offset, feed.offset + 1))
        log.append_as_follower(feed.marker(1, ABORT), kit.NOW)
    log.roll(kit.NOW)
    log.flush()
    path = log.segments[0].path(layout.TXN_INDEX)
    assert txn_index.decode(path, disk.read(path)) == expected
    log.truncate_to(3 * left)
    for seed in range(20):
        after = disk.after_power_loss(seed)
        data = after.read(path) if after.exists(path) else b""
        assert txn_index.decode(path, data) == expected[:left]
