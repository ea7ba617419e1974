"""How the checkers of compacted logs read them."""

from __future__ import annotations

import pytest

from kept.storage.errors import MachineError
from tests.sim.compaction_checks import CompactionChecks, View
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
