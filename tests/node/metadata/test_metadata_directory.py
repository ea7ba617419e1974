"""The metadata directory on a disk that loses what was not synced."""

from __future__ import annotations

import asyncio

from kept.node.metadata.metadata_directory import MetadataDirectory
from kept.node.runtime.runtime import Runtime
from kept.node.runtime.shutdown import Shutdown
from kept.testing.simulated_disk import SimulatedDisk


def test_a_new_directory_outlives_a_power_loss_with_all_its_parents() -> None:
    disk = SimulatedDisk(seed=1)

    async def take() -> None:
        runtime = Runtime(disk)
        MetadataDirectory(runtime, Shutdown()).acquire("/not/there/yet/meta")
        runtime.close()

    asyncio.run(take())
    for seed in range(20):
        assert disk.after_power_loss(seed).exists("/not/there/yet/meta")
