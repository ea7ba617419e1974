"""A log appends, reads, rolls, is recovered, truncated and cleaned up."""

from __future__ import annotations

import errno

import pytest

from kept.storage import layout
from kept.storage.errors import (
    CorruptMessage,
    DamagedData,
    KafkaStorageError,
    MachineError,
    OffsetOutOfRange,
    OutOfOrderSequenceNumber,
)
from kept.storage.records import check, patch, read_header
from kept.storage.types import Codec, LogConfig, TimestampType


def test_appended_batches_are_read_back_with_their_offsets(kit, make_log) -> None:
    log = make_log()
    infos = [kit.append(log, kit.batch(n, mark=n)) for n in (1, 3, 2)]
    assert [(i.base_offset, i.last_offset, i.duplicate) for i in infos] == [
        (0, 0, False),
        (1, 3, False),
        (4, 5, False),
    ]
    assert [r[0] for r in kit.values(log)] == list(range(6))
    assert [header_epoch(c) for _, _, c in kit.contents(log)] == [0, 0, 0]
    log.check_invariants()


def header_epoch(content: bytes) -> int:
    return read_header(content).partition_leader_epoch


def test_what_is_staged_is_not_read_before_it_is_written(kit, make_log) -> None:
    log = make_log()
    kit.append(log, kit.batch(2), write=False)
    assert log.log_end_offset == 2 and log.written_end_offset == 0
    assert log.read(0, 1000, 2) is None
    log.write()
    assert [r[0] for r in kit.values(log)] == [0, 1]


def test_a_read_only_rewritten_batch_is_appended_too(kit, make_log) -> None:
    log = make_log()
    checked = check(bytes(kit.batch(2)), kit.RULES, kit.NOW)
    log.append(checked, 3, kit.NOW)
    log.write()
    assert [(a, b, header_epoch(c)) for a, b, c in kit.contents(log)] == [(0, 1, 3)]


@pytest.mark.parametrize("max_bytes", [1, 100, 500, 5000, 1 << 20])
def test_every_offset_is_found_in_many_segments(kit, make_log, max_bytes) -> None:
    log = make_log()
    for n in range(200):
        kit.append(log, kit.batch(n % 3 + 1, mark=n, size=n % 50))
    assert len(log.segments) > 5
    for offset in range(log.log_end_offset):
        found = log.read(offset, max_bytes, log.log_end_offset)
        data = log.disk.pread(*found)
        header = read_header(data)
        assert header.base_offset <= offset <= header.last_offset
        assert len(data) <= max_bytes or len(data) == header.size_bytes
    all_of_it = kit.contents(log, max_bytes)
    assert [b for b, _, _ in all_of_it] == sorted({b for b, _, _ in all_of_it})
    assert all_of_it[-1][1] == log.log_end_offset - 1


def test_reads_end_below_the_end_offset(kit, make_log) -> None:
    log = make_log()
    for n in range(40):
        kit.append(log, kit.batch(2, mark=n))
    for end in range(81):
        last = -1
        offset = 0
        while (found := log.read(offset, 700, end)) is not None:
            data = log.disk.pread(*found)
            position = 0
            while position < len(data):
                header = read_header(data, position)
                last = header.last_offset
                position += header.size_bytes
            offset = last + 1
        assert last == end // 2 * 2 - 1


def test_a_small_read_may_be_refused_instead_of_one_batch(kit, make_log) -> None:
    log = make_log()
    kit.append(log, kit.batch(2))
    assert log.read(0, 10, 2, at_least_one=False) is None
    assert log.read(0, 10, 2).size_bytes > 10


def test_offsets_outside_are_refused(kit, make_log) -> None:
    log = make_log()
    kit.append(log, kit.batch(2))
    assert log.read(2, 100, 2) is None
    for offset in (-1, 3):
        with pytest.raises(OffsetOutOfRange):
            log.read(offset, 100, 2)


def test_rolls_by_size_age_and_index(kit, make_log) -> None:
    log = make_log(config=LogConfig(segment_bytes=1000, segment_ms=10_000))
    kit.append(log, kit.batch(size=800))
    kit.append(log, kit.batch(size=800))
    assert len(log.segments) == 2
    kit.append(log, kit.batch(timestamp=kit.NOW + 10_001))
    assert len(log.segments) == 3
    assert not log.maybe_roll(kit.NOW + 10_000)
    assert log.maybe_roll(kit.NOW + 10_001), "an idle log rolls"
    assert not log.maybe_roll(kit.NOW + 99_000), "an empty segment does not"
    log.update_config(LogConfig(segment_index_bytes=36, index_interval_bytes=1))
    bases = len(log.segments)
    for n in range(12):
        kit.append(log, kit.batch(mark=n))
    assert len(log.segments) > bases + 2


@pytest.mark.parametrize(("now_ms", "bases"), [(None, [0]), (10_000, [0]), (10_001, [0, 1])])
def test_a_segment_whose_first_batch_has_no_timestamp_rolls_by_the_clock(
    kit, make_log, now_ms, bases
) -> None:
    """Without a time the clock is where the log saw it last."""
    log = make_log(config=LogConfig(segment_ms=10_000))
    for offset, at in ((0, 0), (1, now_ms)):
        data = kit.batch(timestamp=-1)
        patch(data, 0, offset, 0)
        log.append_as_follower(bytes(data), None if at is None else kit.NOW + at)
    assert log.segments.bases == bases


def test_idempotent_producers(kit, make_log) -> None:
    log = make_log()
    sent = [kit.batch(2, pid=7, epoch=0, sequence=2 * n) for n in range(6)]
    first = [kit.append(log, bytearray(data)) for data in sent]
    again = [kit.append(log, bytearray(data)) for data in sent[1:]]
    assert [i[:2] for i in again] == [i[:2] for i in first[1:]]
    assert all(i.duplicate for i in again)
    with pytest.raises(OutOfOrderSequenceNumber):
        kit.append(log, bytearray(sent[0]))
    with pytest.raises(OutOfOrderSequenceNumber):
        kit.append(log, kit.batch(1, pid=7, epoch=0, sequence=13))
    assert log.log_end_offset == 12


@pytest.mark.parametrize("clean", [True, False])
def test_reopening_knows_the_five_last_batches(kit, disk, clean) -> None:
    log = kit.open_log(disk)
    sent = [kit.batch(2, pid=7, epoch=0, sequence=2 * n) for n in range(6)]
    first = [kit.append(log, bytearray(data)) for data in sent]
    if clean:
        log.close()
    log = kit.open_log(disk, clean=clean, recovery_point=12 if clean else 0)
    again = [kit.append(log, data) for data in sent[1:]]
    assert [i[:2] for i in again] == [i[:2] for i in first[1:]] and all(i[4] for i in again)
    log.check_invariants()


def test_log_append_time_is_answered(kit, make_log) -> None:
    config = LogConfig(message_timestamp_type=TimestampType.LOG_APPEND_TIME)
    assert kit.append(make_log(config=config), kit.batch()).log_append_time == kit.NOW


def test_timestamps_are_found(kit, make_log) -> None:
    log = make_log()
    for n in range(100):
        codec = Codec(n % 5)
        kit.append(log, kit.batch(3, timestamp=kit.NOW + 10 * n, codec=codec))
    for n in range(100):
        found = log.offset_for_timestamp(kit.NOW + 10 * n + 1)
        assert (found.timestamp, found.offset) == (kit.NOW + 10 * n + 1, 3 * n + 1)
    assert log.offset_for_timestamp(kit.NOW - 5).offset == 0
    assert log.offset_for_timestamp(kit.NOW + 993) is None
    assert log.offset_of_max_timestamp()[:2] == (kit.NOW + 992, 299)
    log.advance_log_start(100)
    assert log.offset_for_timestamp(0).offset == 100


def test_followers_append_with_gaps_and_never_over(kit, make_log) -> None:
    log = make_log()
    one, two = kit.batch(2), kit.batch(3)
    patch(one, 0, 0, 1)
    patch(two, 0, 10, 4)
    log.append_as_follower(bytes(one + two), kit.NOW)
    log.write()
    assert [(a, b) for a, b, _ in kit.contents(log)] == [(0, 1), (10, 12)]
    assert log.log_end_offset == 13
    assert log.leader_epochs.entries == [(1, 0), (4, 10)]
    with pytest.raises(OffsetOutOfRange):
        log.append_as_follower(bytes(two), kit.NOW)
    for inside in range(2, 11):
        assert log.read(inside, 1, 13) == log.read(10, 1, 13), "rule 32"
    broken = bytearray(two)
    patch(broken, 0, 20, 4)
    broken[-1] ^= 1
    with pytest.raises(CorruptMessage):
        log.append_as_follower(bytes(broken), kit.NOW)
    assert log.log_end_offset == 13


def test_an_empty_follower_restarts_at_the_first_batch_around_its_start(kit, make_log) -> None:
    log = make_log(log_start_offset=5)
    data = kit.batch(4)
    patch(data, 0, 3, 0)
    log.append_as_follower(bytes(data), kit.NOW)
    log.write()
    assert (log.log_start_offset, log.log_end_offset) == (3, 7)


def test_relative_offsets_beyond_int32_begin_a_segment(kit, make_log) -> None:
    log = make_log(config=LogConfig())
    one, two = kit.batch(1), kit.batch(1)
    patch(two, 0, 2**31 + 5, 0)
    log.append_as_follower(bytes(one), kit.NOW)
    log.append_as_follower(bytes(two), kit.NOW)
    log.write()
    assert [s.base_offset for s in log.segments] == [0, 2**31 + 5]
    assert [a for a, _, _ in kit.contents(log)] == [0, 2**31 + 5]


@pytest.mark.parametrize("to", [0, 1, 2, 7, 30, 58, 59, 60, 99])
@pytest.mark.parametrize("reopen", [False, True])
def test_truncation_leaves_the_batches_below(kit, disk, to, reopen) -> None:
    log = kit.open_log(disk)
    for n in range(30):
        data = kit.batch(2, mark=n, pid=7, epoch=0, sequence=2 * n)
        kit.append(log, data, leader_epoch=n // 10)
    before = kit.contents(log)
    log.flush()
    log.truncate_to(to)
    log.check_invariants()
    left = [b for b in before if b[1] < to]
    if reopen:
        log = kit.open_log(disk, recovery_point=log.recovery_point)
    assert kit.contents(log) == left
    end = left[-1][1] + 1 if left else 0
    assert log.log_end_offset == end
    assert all(start < end for _, start in log.leader_epochs.entries)
    state = log.producers.get(7)
    assert (state.last_offset if state else -1) == end - 1
    kit.append(log, kit.batch(2, pid=7, epoch=0, sequence=end), leader_epoch=9)
    assert log.log_end_offset == end + 2


def test_a_read_after_a_cut_finds_no_batch_that_is_gone(kit, make_log) -> None:
    log = make_log()
    for _ in range(6):
        kit.append(log, kit.batch(2))
    log.truncate_to(4)
    kit.append(log, kit.batch(8))
    for offset in range(4, 12):
        assert log.read(offset, 10_000, 12) == log.read(4, 10_000, 12)


def test_starting_over(kit, disk) -> None:
    log = kit.open_log(disk)
    for n in range(30):
        kit.append(log, kit.batch(2, mark=n))
    log.truncate_fully_and_start_at(1000)
    log.check_invariants()
    assert (log.log_start_offset, log.log_end_offset, len(log.segments)) == (1000, 1000, 1)
    kit.append(log, kit.batch())
    log = kit.open_log(disk, log_start_offset=1000)
    assert [a for a, _, _ in kit.contents(log)] == [1000]


def test_a_failed_write_is_cut_back_and_nothing_of_it_stays(kit, disk, make_log) -> None:
    log = make_log()
    for n in range(3):
        kit.append(log, kit.batch(2, pid=7, epoch=0, sequence=2 * n))
    before = kit.contents(log)
    data = kit.batch(2, pid=7, epoch=0, sequence=6)
    disk.fail("write", ".log", errno.ENOSPC, partial=True)
    with pytest.raises(MachineError, match="No space"):
        kit.append(log, bytearray(data))
    log.check_invariants()
    assert kit.contents(log) == before and log.log_end_offset == 6
    assert disk.stat(log.active_segment.file.path).size_bytes == sum(len(c) for _, _, c in before)
    info = kit.append(log, data)
    assert (info.base_offset, info.duplicate) == (6, False), "its sequence was forgotten too"
    assert kit.contents(kit.open_log(disk))[:3] == before


def test_a_log_that_can_not_be_cut_back_refuses_everything(kit, disk, make_log) -> None:
    log = make_log()
    disk.fail("write", ".log", errno.EIO, partial=True)
    disk.fail("truncate", ".log")
    with pytest.raises(MachineError):
        kit.append(log, kit.batch())
    with pytest.raises(KafkaStorageError):
        kit.append(log, kit.batch())
    with pytest.raises(KafkaStorageError):
        log.append_as_follower(bytes(kit.batch()), kit.NOW)
    assert kit.contents(kit.open_log(disk.after_kill())) == []


def test_the_flush_ticket_moves_the_recovery_point(kit, disk, make_log) -> None:
    log = make_log(config=LogConfig(flush_messages=3, segment_bytes=2000))
    assert log.flush_ticket() is None
    kit.append(log, kit.batch(2))
    assert not log.flush_due(kit.NOW)
    kit.append(log, kit.batch(2))
    assert log.flush_due(kit.NOW)
    ticket = log.flush_ticket()
    kit.append(log, kit.batch(2))
    ticket.run()
    assert log.recovery_point == 0
    ticket.done()
    assert log.recovery_point == 4
    disk.fail("fsync", ".log")
    with pytest.raises(MachineError):
        log.flush_ticket().run()
    assert log.recovery_point == 4


def test_a_segment_that_was_clean_is_synced_again_after_an_append(kit, disk) -> None:
    log = kit.open_log(disk)
    kit.append(log, kit.batch(2))
    log.close()
    log = kit.open_log(disk, clean=True, recovery_point=2)
    kit.append(log, kit.batch(2))
    log.roll(kit.NOW)
    log.flush()
    assert log.recovery_point == 4
    for seed in range(20):
        left = kit.open_log(disk.after_power_loss(seed), recovery_point=4)
        assert left.log_end_offset == 4


def test_the_name_of_a_new_active_segment_is_synced_too(kit, disk) -> None:
    log = kit.open_log(disk, config=LogConfig(retention_ms=0))
    kit.append(log, kit.batch(2))
    log.delete_old_segments(kit.NOW + 10_000, 2)
    assert log.size_bytes == 0
    kit.append(log, kit.batch(2))
    log.flush()
    for seed in range(20):
        left = kit.open_log(disk.after_power_loss(seed), recovery_point=4, log_start_offset=2)
        assert left.log_end_offset == 4


def test_a_ticket_from_before_a_truncation_does_not_count(kit, make_log) -> None:
    log = make_log()
    for n in range(4):
        kit.append(log, kit.batch(2, mark=n))
    ticket = log.flush_ticket()
    ticket.run()
    log.truncate_to(2)
    kit.append(log, kit.batch(6))
    ticket.done()
    assert log.recovery_point <= 2


def test_closing_an_untouched_log_again_writes_nothing(kit, disk) -> None:
    log = kit.open_log(disk)
    for n in range(60):
        kit.append(log, kit.batch(2, mark=n, pid=1, epoch=0, sequence=2 * n))
    log.close()
    log = kit.open_log(disk, clean=True, recovery_point=120)
    calls = disk.calls
    log.close()
    assert disk.calls == calls
    assert kit.open_log(disk, clean=True, recovery_point=120).log_end_offset == 120


def test_few_indexes_of_closed_segments_stay_in_memory(kit, make_log) -> None:
    log = make_log()
    for n in range(300):
        kit.append(log, kit.batch(2, mark=n))
    assert len(log.segments) > 10
    kit.contents(log)
    assert sum(s.index.loaded for s in log.segments) <= 5


def test_another_topic_id_is_refused(kit, disk) -> None:
    kit.open_log(disk)
    path = f"/d/t-0/{layout.PARTITION_METADATA}"
    assert disk.stat(path).size_bytes == 43
    disk.flip_bit(path, 30)
    with pytest.raises(DamagedData):
        kit.open_log(disk)


@pytest.mark.parametrize("records", [0, 5])
def test_a_clean_start_and_stop_of_an_idle_log_change_nothing(kit, disk, make_log, records) -> None:
    """A node with thousands of logs would pay for each of them, twice."""
    log = make_log()
    for n in range(records):
        kit.append(log, kit.batch(1, mark=n), leader_epoch=3)
    log.leader_epochs.assign(4, records)  # led, and appended nothing
    log.leader_epochs.save()
    log.close()
    disk = disk.after_kill()
    again = kit.open_log(disk, clean=True, recovery_point=records)
    assert again.leader_epochs.latest == 4
    again.close()
    assert disk.trace == []
