"""What a log knows of its producers, against a model, and the same anew from snapshot and batches.

Random transactions of both versions on a leader, its copy on a follower, and both over rolls,
restarts after clean and unclean stops, cuts and moves of the log start.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from kept.storage.log.log import Log
from kept.storage.records import EndTxnMarker, build_batch, check
from kept.storage.types import NO_SEQUENCE, AppendOrigin, LogConfig
from tests.support.simulated_disk import SimulatedDisk

CONFIG = LogConfig(segment_bytes=1500, index_interval_bytes=100)
PRODUCERS = range(6)
STEPS = 120


@dataclass
class Producer:
    """What the model knows of one; ``first``: of its open transaction, -1 none."""

    pid: int
    is_tv2: bool = False
    epoch: int = 0
    next_sequence: int = 0
    first: int = -1
    last: int = -1
    last_sequence: int = NO_SEQUENCE
    coordinator_epoch: int = -1
    is_known: bool = False
    is_cut: bool = False
    """The log start moved into its open transaction, or beyond."""


class World:
    """A leader's log, a follower's, and the model of both."""

    def __init__(self, kit, seed: int) -> None:
        self.kit, self.random = kit, random.Random(seed)
        self.disks = [SimulatedDisk(), SimulatedDisk()]
        self.logs = [kit.open_log(disk, config=CONFIG) for disk in self.disks]
        self.producers = [Producer(pid, is_tv2=bool(pid % 2)) for pid in PRODUCERS]
        self.aborted: list[tuple[int, int, int, bool]] = []
        """(producer id, first offset, marker's offset, whether the log start moved into it); one
        whose records are gone ends where it begins.
        """
        self.coordinator_epoch = 3

    @property
    def leader(self) -> Log:
        return self.logs[0]

    def step(self) -> None:
        kinds = {
            self.data: 10,
            self.end: 6,
            self.roll: 1,
            self.start: 1,
            self.restart: 1,
            self.cut: 1,
            self.replicate: 4,
        }
        (kind,) = self.random.choices(list(kinds), list(kinds.values()))
        kind()

    def data(self) -> None:
        """A batch of a transaction, or a plain one of producers 4 and 5."""
        p = self.random.choice(self.producers)
        is_transactional, count = p.pid < 4, self.random.randint(1, 3)
        made = build_batch(
            [(self.kit.NOW, b"k", b"v" * 30, ())] * count,
            producer_id=p.pid,
            producer_epoch=p.epoch,
            base_sequence=p.next_sequence,
            is_transactional=is_transactional,
        )
        checked = check(memoryview(bytearray(made)), self.kit.RULES, self.kit.NOW)
        guard = None
        if is_transactional and p.first < 0:
            guard = self.leader.producers.guards.obtain(
                p.pid, p.epoch, p.next_sequence, is_tv2=p.is_tv2, leader_epoch=0, now_ms=0
            )
        origin = AppendOrigin.COORDINATOR if self.random.random() < 0.1 else AppendOrigin.CLIENT
        info = self.leader.append(checked, 0, self.kit.NOW, guard, origin)
        p.is_known, p.last = True, info.last_offset
        p.last_sequence = p.next_sequence + count - 1
        p.next_sequence += count
        if is_transactional and p.first < 0:
            p.first = info.base_offset

    def end(self) -> None:
        """A marker: of an open transaction, of one that has no data here, or the same twice."""
        p = self.random.choice(self.producers[:4])
        is_commit = self.random.random() < 0.5
        if self.random.random() < 0.1:
            self.coordinator_epoch += 1
        if p.is_tv2 or self.random.random() < 0.2:  # or fenced
            self._new_epoch(p)
        marker = EndTxnMarker(is_commit, self.coordinator_epoch)
        for is_again in (False, True):
            info = self.leader.append_marker(
                marker, p.pid, p.epoch, 0, self.kit.NOW, is_tv2=p.is_tv2
            )
            if (p.first >= 0 or p.is_cut) and not is_commit:
                began = p.first if p.first >= 0 else info.base_offset
                self.aborted.append((p.pid, began, info.base_offset, p.is_cut))
            p.is_known, p.first, p.is_cut = True, -1, False
            p.coordinator_epoch = self.coordinator_epoch
            if is_again or self.random.random() < 0.8:
                break

    def _new_epoch(self, p: Producer) -> None:
        p.epoch, p.next_sequence, p.last_sequence, p.last = p.epoch + 1, 0, NO_SEQUENCE, -1

    def roll(self) -> None:
        self.leader.roll(self.kit.NOW)

    def start(self) -> None:
        """Records are deleted, through whatever is open."""
        self.replicate()
        start, end = self.leader.log_start_offset, self.leader.log_end_offset
        offset = self.random.randint(start, min(end, start + 30))
        for log in self.logs:
            log.advance_log_start(offset)
            log.delete_old_segments(self.kit.NOW, end)
        for p in self.producers:
            if 0 <= p.first < offset:
                p.is_cut = True
                if p.last < offset:
                    p.first = -1

    def restart(self) -> None:
        place, is_clean = self.random.randrange(2), self.random.random() < 0.5
        log = self.logs[place]
        log.write()
        start = log.log_start_offset
        if is_clean:
            log.close()
        self.logs[place] = self.kit.open_log(
            self.disks[place], config=CONFIG, clean=is_clean, log_start_offset=start
        )

    def cut(self) -> None:
        """The follower loses its end, and gets it again."""
        log = self.logs[1]
        log.write()
        end = log.log_end_offset
        log.truncate_to(self.random.randint(min(log.log_start_offset + 5, end), end))
        log.check_invariants()
        self.replicate()

    def replicate(self) -> None:
        self.leader.write()
        to = self.logs[1]
        while to.log_end_offset < self.leader.log_end_offset:
            end = self.leader.log_end_offset
            data = self.leader.read_batches(to.log_end_offset, 1000, end)
            to.append_as_follower(data, self.kit.NOW)
        to.write()

    def check(self) -> None:
        for log in self.logs:
            log.check_invariants()
            self.check_producers(log)
            self.check_aborted(log)

    def check_producers(self, log: Log) -> None:
        start = log.log_start_offset
        for p in self.producers:
            state = log.producers.get(p.pid)
            assert (state is not None) == p.is_known, p
            if state is None:
                continue
            assert (state.epoch, state.coordinator_epoch) == (p.epoch, p.coordinator_epoch), p
            assert (state.last_sequence, state.last_offset) == (p.last_sequence, p.last), p
            assert (state.txn_first_offset is not None) == (p.first >= 0), p
            if p.first >= 0 and not p.is_cut:
                assert state.txn_first_offset == p.first, p
            elif p.first >= 0:
                assert state.txn_first_offset <= p.last, p
        open_ = [p for p in self.producers if p.first >= 0]
        stable = log.producers.first_undecided_offset(log.log_end_offset, start)
        if not open_:
            assert stable is None
        elif not any(p.is_cut for p in open_):
            assert stable == min(p.first for p in open_)
        else:
            assert start <= stable <= min(p.last for p in open_)

    def check_aborted(self, log: Log) -> None:
        start, end = log.log_start_offset, log.log_end_offset
        for _ in range(5):
            first = self.random.randint(start, end)
            last = self.random.randint(first, end)
            found = {
                (a.producer_id, a.last_offset): a.first_offset
                for a in log.aborted_transactions(first, last)
            }
            for pid, began, ended, is_cut in self.aborted:
                if is_cut or began < start:  # where it begins depends on when that was noticed
                    assert found.pop((pid, ended), ended) <= ended
                elif ended >= first and began < last:
                    assert found.pop((pid, ended)) == began
            assert not found


@pytest.mark.parametrize("seed", range(25))
def test_the_state_is_that_of_the_model_whatever_happens_to_the_log(kit, seed) -> None:
    world = World(kit, seed)
    for _ in range(STEPS):
        world.step()
        world.leader.write()
        world.check_producers(world.leader)
    world.replicate()
    world.check()
    for _ in range(2):
        world.restart()
        world.check()


def test_a_leader_writes_the_bytes_that_its_follower_gets(kit) -> None:
    world = World(kit, 1)
    for _ in range(STEPS):
        world.step()
    world.replicate()
    start = max(log.log_start_offset for log in world.logs)
    one, other = ([c for c in kit.contents(log) if c[0] >= start] for log in world.logs)
    assert one == other and len(one) > 10
