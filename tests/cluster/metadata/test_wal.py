from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept.cluster.metadata.wal import (
    HARD_STATE_NAME,
    WAL_NAME,
    Entry,
    HardState,
    WriteAheadLog,
    read_hard_state,
    write_hard_state,
)
from kept.storage.disk import Disk
from kept.storage.errors import (
    DamagedData,
    DirectoryRefused,
    InvariantViolation,
    KafkaStorageError,
    MachineError,
)
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk

DIR = "/meta"
PATH = f"{DIR}/{WAL_NAME}"
HEADER_BYTES = 32
FRAME_BYTES = 36


def entry(index: int, term: int = 1, size: int = 10) -> Entry:
    return Entry(term, index, b"%03d" % index + b"x" * size)


def entries(first: int, end: int, term: int = 1) -> list[Entry]:
    return [entry(index, term) for index in range(first, end)]


def open_log(disk: Disk) -> WriteAheadLog:
    return WriteAheadLog.open(DIR, disk)


def content(log: WriteAheadLog) -> list[Entry]:
    return log.entries(log.base_index + 1, 1 << 62)


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def log(disk: SimulatedDisk) -> WriteAheadLog:
    return open_log(disk)


def test_what_was_appended_is_there_after_reopening(tmp_path) -> None:
    log = WriteAheadLog.open(str(tmp_path), Disk())
    log.append(entries(1, 4))
    log.append([entry(4, term=3)])
    again = WriteAheadLog.open(str(tmp_path), Disk())
    assert content(again) == content(log) == [*entries(1, 4), entry(4, term=3)]
    assert (again.last_index, again.last_term) == (4, 3)
    assert [again.term_at(i) for i in range(-1, 6)] == [None, 0, 1, 1, 1, 3, None]


def test_golden_bytes(disk, log) -> None:
    log.append([Entry(2, 1, b"hello")])
    log.append([Entry(2, 2, b"")])
    assert disk.read(PATH).hex() == (
        "6b6570742d77616c"
        "00000001"
        "0000000000000000"
        "0000000000000000"
        "4539bd46"
        "4b455054"
        "00000005"
        "6ed3490e"
        "0000000000000002"
        "0000000000000001"
        "0000000000000020"
        "68656c6c6f"
        "4b455054"
        "00000000"
        "9c5863c6"
        "0000000000000002"
        "0000000000000002"
        "0000000000000049"
    )


def test_entries_are_read_in_portions(log) -> None:
    log.append(entries(1, 11))
    assert log.entries(3, max_bytes=1) == [entry(3)], "one at least"
    one = FRAME_BYTES + len(entry(1).data)
    assert log.entries(3, max_bytes=3 * one) == entries(3, 6)
    assert log.entries(11) == []


@pytest.mark.parametrize(
    "bad",
    [entry(3), entry(1), entry(5), Entry(0, 4, b""), Entry(2, 3, b"")],
    ids=["gap below", "repeated", "gap above", "older term", "repeated in a new term"],
)
def test_entries_that_do_not_follow_are_a_bug(log, bad) -> None:
    log.append(entries(1, 4))
    with pytest.raises(InvariantViolation):
        log.append([bad])
    assert content(log) == entries(1, 4)


def test_truncate_from_and_write_others(disk, log) -> None:
    log.append(entries(1, 6))
    log.truncate_from(3)
    log.truncate_from(9)
    assert (log.last_index, log.last_term) == (2, 1)
    log.append(entries(3, 5, term=2))
    for seed in range(20):
        again = open_log(disk.after_power_loss(seed))
        assert content(again) == [*entries(1, 3), *entries(3, 5, term=2)]


def test_a_dropped_prefix(disk, log) -> None:
    log.append(entries(1, 6))
    log.drop_prefix(3)
    log.append([entry(6)])
    for one in (log, open_log(disk)):
        assert (one.base_index, one.base_term, one.last_index) == (3, 1, 6)
        assert content(one) == entries(4, 7)
        assert one.term_at(3) == 1 and one.term_at(2) is None
        with pytest.raises(InvariantViolation, match="in the snapshot 3"):
            one.entries(3)
        with pytest.raises(InvariantViolation, match="in the snapshot 3"):
            one.truncate_from(3)


def test_restart_behind_a_snapshot(disk, log) -> None:
    log.append(entries(1, 3))
    log.restart_at(100, 7)
    log.append([Entry(7, 101, b"")])
    assert content(open_log(disk)) == [Entry(7, 101, b"")]


# Crashes.


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.integers(1, 60),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_a_crash_at_any_call_leaves_a_prefix_with_all_that_was_acknowledged(
    groups, call, seed, power
) -> None:
    disk = SimulatedDisk(seed=seed)
    acknowledged, proposed = 0, 0
    disk.crash_at(call)
    try:
        log = open_log(disk)
        for size in groups:
            proposed += size
            log.append(entries(acknowledged + 1, acknowledged + size + 1))
            acknowledged += size
            if acknowledged % 3 == 0:
                log.drop_prefix(acknowledged - 2)
    except SimulatedCrash:
        pass
    for after in (disk.after_power_loss(seed) if power else disk.after_kill(),):
        again = open_log(after)
        assert acknowledged <= again.last_index <= max(proposed, acknowledged)
        assert content(again) == entries(again.base_index + 1, again.last_index + 1)
        again.append([entry(again.last_index + 1)])
        assert content(open_log(after.after_power_loss(seed))) == content(again)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_torn_last_group_is_cut(first, second, data) -> None:
    """The last append was not acknowledged: any of its bytes may be missing or zero."""
    disk = SimulatedDisk()
    log = open_log(disk)
    log.append(entries(1, first + 1))
    durable = log.size_bytes
    log.append(entries(first + 1, first + second + 1))
    whole = disk.read(PATH)
    start = data.draw(st.integers(durable, len(whole)), "first byte lost")
    end = data.draw(st.integers(start, len(whole)), "first byte kept again")
    cut = data.draw(st.integers(end, len(whole)), "size of the file")
    torn = bytearray(whole[:cut])
    torn[start:end] = bytes(end - start)
    disk.write_file(PATH, bytes(torn))
    again = open_log(disk)
    assert first <= again.last_index <= first + second
    assert content(again) == entries(1, again.last_index + 1)
    assert len(disk.read(PATH)) == again.size_bytes


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=5), st.data())
def test_damage_before_the_last_group_is_refused_with_its_place(groups, data) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    for size in groups:
        before = log.size_bytes
        log.append(entries(log.last_index + 1, log.last_index + 1 + size))
    position = data.draw(st.integers(HEADER_BYTES, before - 1))
    disk.flip_bit(PATH, position, data.draw(st.integers(0, 7)))
    with pytest.raises(DamagedData) as caught:
        open_log(disk)
    assert caught.value.path == PATH
    damaged = max(at for at in [*log._positions] if at <= position)
    assert caught.value.position == damaged
    assert "behind it is" in str(caught.value)


@pytest.mark.parametrize("position", range(HEADER_BYTES))
def test_a_damaged_header_is_refused(disk, log, position) -> None:
    log.append(entries(1, 3))
    disk.flip_bit(PATH, position)
    with pytest.raises((DamagedData, DirectoryRefused)):
        open_log(disk)


def test_damage_found_while_reading(disk, log) -> None:
    log.append(entries(1, 3))
    disk.flip_bit(PATH, log.size_bytes - 1)
    with pytest.raises(DamagedData, match="CRC"):
        log.entries(1)


def test_a_newer_version_is_refused(disk, log) -> None:
    data = bytearray(disk.read(PATH))
    data[11] = 2
    disk.write_file(PATH, bytes(data))
    with pytest.raises(DirectoryRefused, match="version 2; this kept reads up to 1"):
        open_log(disk)


def test_another_file_is_refused(disk) -> None:
    disk.mkdir(DIR)
    disk.write_file(PATH, b"something else entirely, not ours at all")
    with pytest.raises(DamagedData, match="kept-wal"):
        open_log(disk)


# Faults.


def test_a_failed_write_is_cut_back_and_the_log_goes_on(disk, log) -> None:
    log.append(entries(1, 3))
    disk.fail("write", WAL_NAME, partial=True)
    with pytest.raises(MachineError):
        log.append(entries(3, 6))
    assert len(disk.read(PATH)) == log.size_bytes
    log.append([entry(3)])
    assert content(open_log(disk)) == content(log) == entries(1, 4)


def test_a_failed_fsync_is_final(disk, log) -> None:
    log.append(entries(1, 3))
    disk.fail("fsync", WAL_NAME)
    with pytest.raises(MachineError):
        log.append([entry(3)])
    assert log.last_index == 2
    for refused in (lambda: log.append([entry(3)]), lambda: log.truncate_from(2)):
        with pytest.raises(KafkaStorageError, match="takes no more entries"):
            refused()


def test_a_full_disk_while_dropping_the_prefix_changes_nothing(disk, log) -> None:
    log.append(entries(1, 5))
    disk.fail("write", WAL_NAME)
    with pytest.raises(MachineError):
        log.drop_prefix(2)
    log.append([entry(5)])
    assert content(open_log(disk)) == content(log) == entries(1, 6)


# Hard state.


def test_hard_state_survives(disk) -> None:
    disk.ensure_data_directory(DIR)
    assert read_hard_state(disk, DIR) == HardState()
    state = HardState(7, 3, UUID(int=5))
    write_hard_state(disk, DIR, state)
    for seed in range(10):
        assert read_hard_state(disk.after_power_loss(seed), DIR) == state


@pytest.mark.parametrize("position", range(44))
def test_damaged_hard_state_is_refused(disk, position) -> None:
    disk.mkdir(DIR)
    write_hard_state(disk, DIR, HardState(7, 3, UUID(int=5)))
    assert len(disk.read(f"{DIR}/{HARD_STATE_NAME}")) == 44
    disk.flip_bit(f"{DIR}/{HARD_STATE_NAME}", position)
    with pytest.raises((DamagedData, DirectoryRefused)):
        read_hard_state(disk, DIR)


def test_an_open_makes_the_names_that_a_kill_left_durable(monkeypatch) -> None:
    """The process was killed after the rename of the first log, before the directory was synced."""
    disk = SimulatedDisk()
    disk.ensure_data_directory(DIR)
    with monkeypatch.context() as killed:
        killed.setattr(disk, "fsync_dir", lambda path: None)
        open_log(disk)
    again = open_log(disk.after_kill())
    again.append(entries(1, 3))
    for seed in range(20):
        assert content(open_log(again._disk.after_power_loss(seed))) == entries(1, 3)
