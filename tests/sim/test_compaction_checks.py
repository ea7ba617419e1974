"""How the checkers of compacted logs read them."""

from __future__ import annotations

from uuid import UUID

import pytest

from kept.storage import layout
from kept.storage.errors import MachineError
from kept.storage.types import TopicPartition
from tests.sim.compaction_checks import CompactionChecks, View
from tests.sim.world import Violation, World
from tests.support.logs import append, batch, open_log
from tests.support.simulated_disk import SimulatedDisk


def test_a_read_that_fails_half_way_leaves_what_was_known() -> None:
    """A view with less would differ from what another replica has at the same generation."""
    disk = SimulatedDisk()
    disk.mkdir("/d")
    log, view = open_log(disk), View(0)
    for _ in range(2):
        append(log, batch())
        log.roll(0)
    CompactionChecks._read_log(view, log)
    assert len(view.batches) == len(view.records) == 2
    known = view.seen, list(view.batches), list(view.records), dict(view.segments)
    append(log, batch())
    disk.broken.add("/d")
    with pytest.raises(MachineError):
        CompactionChecks._read_log(view, log)
    assert (view.seen, view.batches, view.records, view.segments) == known
    disk.broken.clear()
    CompactionChecks._read_log(view, log)
    assert len(view.batches) == len(view.records) == 3


def test_what_a_log_lists_and_cannot_be_read_is_gone_only_with_its_device() -> None:
    disk, tp, topic_id = SimulatedDisk(), TopicPartition("t", 0), UUID(int=1)
    disk.mkdir("/d")
    log = open_log(disk)
    append(log, batch())
    checks = CompactionChecks(World(1))
    checks.topics["t"] = topic_id, 1

    def look() -> None:
        checks.look_at(1, 0, tp, topic_id, log, 0, None, None, disk.broken)

    disk.broken.add("/d")
    look()
    disk.broken.clear()
    disk.fail("read", log.segments[0].path(layout.LOG))
    with pytest.raises(Violation, match="log-unreadable"):
        look()
