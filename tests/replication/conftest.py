"""Partitions over real logs, on a simulated disk that can fail."""

from __future__ import annotations

import pytest

from kept.replication.partition import Partition
from tests.support.partitions import lead, open_log
from tests.support.simulated_disk import SimulatedDisk


@pytest.fixture
def disk() -> SimulatedDisk:
    made = SimulatedDisk()
    made.mkdir("/d")
    made.fsync_dir("/")
    return made


@pytest.fixture
def partition(disk: SimulatedDisk) -> Partition:
    """It leads alone in epoch 0."""
    made = Partition(open_log(disk), 0)
    lead(made)
    return made


@pytest.fixture
def replicated(disk: SimulatedDisk) -> Partition:
    """It leads in epoch 3, with follower 1 in the ISR and follower 2 outside."""
    made = Partition(open_log(disk), 0)
    lead(made, 3, (0, 1, 2), (0, 1))
    return made
