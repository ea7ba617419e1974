"""A power cut at any call loses no aborted transaction that a reader would need."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from kept.storage.log.durability import FlushTicket
from kept.storage.records import headers, read_marker, scan
from kept.storage.records.control import ABORT, COMMIT
from kept.storage.types import LogConfig
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk
from tests.support.slow import rest_slow
from tests.support.transactional_log import Feed, fill

CONFIG = LogConfig(segment_bytes=700, index_interval_bytes=100, file_delete_delay_ms=0)
STEPS = [*["write"] * 6, "ticket", "done", "roll", "checkpoint", "checkpoint", "cut", "again"]
CALLS = 40


@dataclass
class History:
    """What a start is told: the recovery point that was checkpointed, if it was not lost."""

    checkpoint: int | None = 0
    tickets: list[FlushTicket] = field(default_factory=list)


def run(kit, disk: SimulatedDisk, seed: int, history: History) -> None:
    """Transactions of two producers, and whatever may happen to a log meanwhile."""
    random, feed = Random(seed), Feed(kit)
    log = kit.open_log(disk, config=CONFIG)
    opened: set[int] = set()
    for _ in range(70):
        step = random.choice(STEPS)
        if step == "write":
            pid = random.choice((1, 2))
            if pid in opened and random.random() < 0.7:
                batch = feed.marker(pid, random.choice((ABORT, ABORT, COMMIT)))
                opened.discard(pid)
            else:
                batch = feed.data(pid)
                opened.add(pid)
            log.append_as_follower(batch, kit.NOW)
            log.write()
        elif step == "ticket" and not history.tickets:
            ticket = log.flush_ticket()
            history.tickets = [] if ticket is None else [ticket]
        elif step == "done" and history.tickets:
            ticket = history.tickets.pop()
            ticket.run()
            if random.random() < 0.5:
                log.roll(kit.NOW)
            ticket.done()
        elif step == "roll":
            log.roll(kit.NOW)
        elif step == "checkpoint":
            history.checkpoint = log.recovery_point
        elif step == "cut" and random.random() < 0.3:
            history.checkpoint = min(history.checkpoint or 0, log.log_end_offset - 1)
            log.truncate_to(max(0, log.log_end_offset - random.randint(1, 4)))
            history.checkpoint = min(history.checkpoint, log.recovery_point)
            feed.offset, feed.sequences = log.log_end_offset, {}
            opened = {
                pid for pid, state in log.producers.items() if state.txn_first_offset is not None
            }
        elif step == "again" and random.random() < 0.3:
            history.tickets = []
            if random.random() < 0.5:
                history.checkpoint = None
            log = kit.open_log(disk, config=CONFIG, recovery_point=history.checkpoint)
            history.checkpoint = log.recovery_point


def aborted_by_the_batches(log) -> list[tuple[int, int, int]]:
    """(producer, first, last offset) of the aborted transactions, read from the log itself."""
    begun: dict[int, int] = {}
    found = []
    data = log.read_batches(log.log_start_offset, 1 << 20, log.log_end_offset)
    while data:
        for position, header in headers(data):
            if not header.is_control:
                begun.setdefault(header.producer_id, header.base_offset)
                continue
            columns = scan(memoryview(data)[position : position + header.size_bytes])
            first = begun.pop(header.producer_id, None)
            marker = read_marker(columns.key(0), columns.value(0))
            if not marker.is_commit and first is not None:
                found.append((header.producer_id, first, header.last_offset))
        data = log.read_batches(header.last_offset + 1, 1 << 20, log.log_end_offset)
    return found


def check(kit, disk: SimulatedDisk, checkpoint: int | None) -> int:
    log = kit.open_log(disk, config=CONFIG, recovery_point=checkpoint)
    log.check_invariants()
    known = [entry[:3] for entry in log.aborted_transactions(0, log.log_end_offset)]
    assert known == aborted_by_the_batches(log)
    return len(known)


@pytest.mark.parametrize("seed", rest_slow(range(60), 10))
def test_a_crash_at_some_calls(kit, seed) -> None:
    whole = SimulatedDisk(seed=seed)
    run(kit, whole, seed, History())
    for call in Random(seed).sample(range(1, whole.calls + 1), CALLS):
        disk, history = SimulatedDisk(seed=seed), History()
        disk.crash_at(call)
        with pytest.raises(SimulatedCrash):
            run(kit, disk, seed, history)
        check(kit, disk.after_kill(), history.checkpoint)
        for cut in range(3):
            check(kit, disk.after_power_loss(cut), history.checkpoint)


def test_a_roll_while_the_segment_is_flushed(kit) -> None:
    """The flush does not know of the indexes, so the recovery point does not pass them."""
    for seed in range(20):
        disk, feed = SimulatedDisk(), Feed(kit)
        log = kit.open_log(disk, config=CONFIG)
        log.append_as_follower(feed.data(1), kit.NOW)
        log.append_as_follower(feed.marker(1, ABORT), kit.NOW)
        log.write()
        ticket = log.flush_ticket()
        ticket.run()
        log.roll(kit.NOW)
        ticket.done()
        assert log.recovery_point == 0
        check(kit, disk.after_power_loss(seed), log.recovery_point)
        log.flush()
        assert log.recovery_point == log.log_end_offset
        assert check(kit, disk.after_power_loss(seed), log.recovery_point) == 1


def test_without_a_checkpoint_what_a_start_makes_anew_is_durable(kit) -> None:
    for seed in range(20):
        disk = SimulatedDisk()
        log = kit.open_log(disk, config=CONFIG)
        fill(kit, log)
        log.flush()
        log = kit.open_log(disk, config=CONFIG, recovery_point=None)
        assert log.recovery_point == log.active_segment.base_offset > 0
        assert check(kit, disk.after_power_loss(seed), log.recovery_point) > 3
