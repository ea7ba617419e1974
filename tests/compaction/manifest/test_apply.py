"""What a start reads back of compaction."""

from __future__ import annotations

import pytest

from kept.compaction.manifest import apply
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
