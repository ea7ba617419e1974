"""What is read of producers before a cut is what the cut would read."""

from __future__ import annotations

import struct
from random import Random

import pytest

from kept.storage import layout
from kept.storage.errors import DamagedData
from kept.storage.producers import cut_preparation, producer_state_manager
from kept.storage.records import build_batch
from tests.support.logs import NOW, open_log
from tests.support.simulated_disk import SimulatedDisk

PRODUCERS = 3


def fetched(log, pid: int, sequence: int, count: int, *, transactional: bool) -> None:
    data = build_batch(
        [(NOW, b"k", b"v" * 30, ())] * count,
        producer_id=pid,
        producer_epoch=0,
        base_sequence=sequence,
        is_transactional=transactional,
        leader_epoch=0,
        base_offset=log.log_end_offset,
    )
    log.append_as_follower(data, NOW)


def ended(log, pid: int, *, commit: bool) -> None:
    key, value = struct.pack(">hh", 0, int(commit)), struct.pack(">hi", 0, 0)
    data = build_batch(
        [(NOW, key, value, ())],
        producer_id=pid,
        producer_epoch=0,
        is_transactional=True,
        is_control=True,
        leader_epoch=0,
        base_offset=log.log_end_offset,
    )
    log.append_as_follower(data, NOW)


def filled(seed: int):
    """Segments of some batches of plain and of transactional producers, with snapshots."""
    random, disk = Random(seed), SimulatedDisk()
    disk.mkdir("/d")
    log, sequences, is_open = open_log(disk), [0] * PRODUCERS, False
    for _ in range(60):
        pid, count = random.randrange(PRODUCERS), random.randrange(1, 4)
        if pid == 0 and is_open and random.random() < 0.5:
            ended(log, pid, commit=random.random() < 0.5)
            is_open = False
        else:
            fetched(log, pid, sequences[pid], count, transactional=pid == 0)
            sequences[pid] += count
            is_open = is_open or pid == 0
        log.write()
        if random.random() < 0.1:
            log.roll(NOW)
    return log


def known(log):
    states = {
        pid: (
            state.epoch,
            state.batches,
            state.last_timestamp,
            state.coordinator_epoch,
            state.txn_first_offset,
        )
        for pid, state in log.producers.items()
    }
    names = [n for n in log.disk.listdir(log.directory) if n.endswith(layout.SNAPSHOT)]
    undecided = [log.producers.first_undecided_offset(hw, 0) for hw in range(log.log_end_offset)]
    return log.log_end_offset, states, list(log.producers._open.items()), undecided, sorted(names)


@pytest.fixture(autouse=True)
def nothing_is_little(monkeypatch) -> None:
    monkeypatch.setattr(cut_preparation, "INLINE_BYTES", -1)


@pytest.mark.parametrize(("seed", "snapshots"), [(0, True), (1, True), (2, True), (3, False)])
def test_the_state_is_the_same(seed, snapshots, monkeypatch) -> None:
    """Without snapshots several segments are read."""
    end = filled(seed).log_end_offset
    prepared = 0
    for offset in range(1, end, 2):
        plain, log = filled(seed), filled(seed)
        for manager in (plain.producer_state, log.producer_state):
            if not snapshots:
                manager.remove_snapshots(manager.snapshot_offsets())
        plain.truncate_to(offset)
        preparation = log.prepare_cut(offset)
        if preparation is not None:
            assert log.prepare_cut(offset) is preparation
            preparation.run()
            assert log.prepare_cut(offset) is None
            prepared += 1
            with monkeypatch.context() as patch:
                patch.setattr(producer_state_manager, "replay", None)
                log.truncate_to(offset)
        else:
            log.truncate_to(offset)
        log.check_invariants()
        assert known(log) == known(plain)
    assert prepared > 20


def test_what_the_log_has_overtaken_counts_for_nothing() -> None:
    plain, log = filled(1), filled(1)
    offset = plain.log_end_offset - 9
    preparation = log.prepare_cut(offset)
    assert preparation is not None
    preparation.run()
    for cut in (plain, log):
        cut.truncate_to(offset - 5)
        fetched(cut, 2, 500, 20, transactional=False)
        cut.write()
        cut.truncate_to(offset)
    assert known(log) == known(plain)


@pytest.mark.parametrize("how", ["waits", "fails"])
def test_a_cut_that_does_not_wait_reads_for_itself(how) -> None:
    plain, log = filled(1), filled(1)
    offset = plain.log_end_offset - 9
    preparation = log.prepare_cut(offset)
    assert preparation is not None
    if how == "fails":
        log.disk.broken.add("/d")
        preparation.run()
        log.disk.broken.clear()
        assert preparation.done and preparation.states is None
    plain.truncate_to(offset)
    log.truncate_to(offset)
    assert known(log) == known(plain)


def test_little_is_read_at_once(monkeypatch) -> None:
    monkeypatch.setattr(cut_preparation, "INLINE_BYTES", 1 << 20)
    plain, log = filled(1), filled(1)
    offset = log.log_end_offset - 9
    assert log.prepare_cut(log.log_end_offset) is None
    assert log.prepare_cut(offset) is None
    plain.truncate_to(offset)
    monkeypatch.setattr(producer_state_manager, "replay", None)
    log.truncate_to(offset)
    assert known(log) == known(plain)


def damaged(log, batch: int):
    """The largest segment, and where its last batch begins. Of one batch of it the number of
    records is wrong, which nothing else of a cut looks at.
    """
    segment = max(log.segments[1:], key=lambda segment: segment.size_bytes)
    batches = list(segment.walk(0, segment.size_bytes))
    log.disk.writev(segment.file, [b"\xff" * 4], batches[batch][0] + 57)
    return segment, batches[-1][2]


@pytest.mark.parametrize("little", [True, False])
def test_damage_below_a_cut_is_told_before_anything_is_gone(little, monkeypatch) -> None:
    if little:
        monkeypatch.setattr(cut_preparation, "INLINE_BYTES", 1 << 20)
    log = filled(1)
    segment, offset = damaged(log, 1)
    base, end = segment.base_offset, log.log_end_offset
    if not little:
        preparation = log.prepare_cut(offset)
        assert preparation is not None
        preparation.run()
    for _ in range(2):
        with pytest.raises(DamagedData, match="negative record count") as error:
            log.prepare_cut(offset)
    assert (error.value.path, error.value.offset) == (segment.path(layout.LOG), -1)
    assert log.log_end_offset == end
    log.disk.unlink(log.producer_state.path(base))  # so that there is something to read below
    preparation = log.prepare_cut(base)
    assert (preparation is None) is little
    if preparation is not None:
        preparation.run()
    assert log.prepare_cut(base) is None, "nothing of the segment stays"
    log.truncate_to(base)
    assert log.log_end_offset == base
    log.check_invariants()


def test_a_segment_of_which_nothing_stays_is_not_read() -> None:
    log = filled(1)
    segment = log.segments[1]
    log.disk.unlink(log.producer_state.path(segment.base_offset))
    log.disk.writev(segment.file, [b"\xff" * 61], 0)
    preparation = log.prepare_cut(segment.base_offset)
    assert preparation is not None
    preparation.run()
    assert preparation.states is not None


def test_damage_of_what_is_cut_hides_nothing() -> None:
    log = filled(1)
    _, offset = damaged(log, -1)
    preparation = log.prepare_cut(offset)
    assert preparation is not None
    preparation.run()
    assert log.prepare_cut(offset) is None and preparation.states is not None
    log.truncate_to(offset)
    assert log.log_end_offset == offset
    log.check_invariants()


def test_a_damaged_snapshot_is_no_damage_of_a_segment() -> None:
    """An older one is taken, or all is read."""
    plain, log = filled(1), filled(1)
    offset = plain.log_end_offset - 9
    preparation = log.prepare_cut(offset)
    assert preparation is not None and preparation._snapshot is not None
    log.disk.write_file(preparation._snapshot, bytes(5))
    preparation.run()
    assert preparation.done and preparation.states is preparation.damage is None
    assert log.prepare_cut(offset) is None
    ends = []
    for cut in (plain, log):
        cut.truncate_to(offset)
        ends.append({pid: state.last_sequence for pid, state in cut.producers.items()})
    assert ends[0] == ends[1] and known(log)[2:4] == known(plain)[2:4]
