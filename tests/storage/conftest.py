"""What the tests of logs share; the functions are those of :mod:`tests.support.logs`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from kept.storage.log.log import Log
from tests.support import logs
from tests.support.simulated_disk import SimulatedDisk


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def make_log(disk: SimulatedDisk) -> Callable[..., Log]:
    return lambda **options: logs.open_log(disk, **options)


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The functions of :mod:`tests.support.logs`."""
    return logs
