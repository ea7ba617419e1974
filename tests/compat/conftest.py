"""Real clients against a real node.

``COMPAT_BOOTSTRAP=host:port`` runs the tests that kill nothing against any other broker, for
instance Apache Kafka: what passes there and fails here is our fault.
"""

from __future__ import annotations

import gc
import os
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kept.testing import Cluster


@dataclass
class Broker:
    """Where the clients connect."""

    bootstrap: str

    def name(self, prefix: str) -> str:
        """A topic or group name that nobody used."""
        return f"{prefix}-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    if other := os.environ.get("COMPAT_BOOTSTRAP"):
        yield Broker(other)
        return
    with Cluster(nodes=1) as cluster:
        yield Broker(cluster.bootstrap)


@pytest.fixture(autouse=True)
def _clients_may_leak_sockets() -> Iterator[None]:
    """kafka-python leaves sockets to the garbage collector; our own code may not."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(5):  # cycles with finalizers go layer by layer
            gc.collect()
