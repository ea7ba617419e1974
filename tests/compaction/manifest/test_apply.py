"""What a start reads back of compaction."""

from __future__ import annotations

import pytest

from kept.compaction.manifest import apply
from kept.node.replicas.manifests import recover
from kept.storage import layout
from kept.storage.errors import DamagedData
from kept.storage.types import Generation
from tests.support.simulated_disk import SimulatedDisk


def test_a_mark_without_its_manifest_is_damage_and_can_be_cleared() -> None:
    disk = SimulatedDisk()
    disk.mkdir("/t-0")
    apply.write_mark("/t-0", disk, Generation(0, 7))
    with pytest.raises(DamagedData, match=r"manifest-0-7.*missing"):
        apply.load_state("/t-0", disk)
    apply.clear("/t-0", disk)
    assert apply.load_state("/t-0", disk) == apply.CompactionState()
    assert apply.read_mark("/t-0", disk) is None


def test_a_start_completes_retention_that_a_power_cut_half_undid(world) -> None:
    """The first segment's name is back, the second one is still on its way out."""
    w = world(cleanup_policy=frozenset({"compact", "delete"}), segment_bytes=100)
    for number in range(4):
        w.append((b"k%d" % number, b"v"))
        w.roll()
    w.clean()
    assert w.log.segments.bases == [0, 1, 2, 3, 4]
    size = w.log.segments[1].size_bytes
    w.log.segments[1].rename("", layout.DELETED)
    state, _ = recover.before("/t-0", w.disk, False)
    assert state is not None and state.retired == {1: size}
    w.open()
    state, status = recover.after("/t-0", w.disk, state, False, w.log)
    assert state is not None and not status.lost and not state.retired
    assert w.log.segments.bases == [0, 2, 3, 4] and w.log.log_start_offset == 2
    w.log.delete_old_segments(w.now, w.log.log_end_offset, by_policy=False)
    assert w.log.segments.bases == [2, 3, 4]
    w.log.check_invariants()
    state, _ = recover.before("/t-0", w.disk, False)
    w.open()
    assert not recover.after("/t-0", w.disk, state, False, w.log)[1].lost
