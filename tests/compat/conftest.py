"""Real clients against a real node.

``COMPAT_BOOTSTRAP=host:port`` runs the tests that kill nothing against any other broker, for
instance Apache Kafka: what passes there and fails here is our fault. ``COMPAT_BROKERS=kafka`` runs
those that kill nodes against nodes of Apache Kafka, ``kafka-0`` against such as know version 1 of
transactions alone.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kept.testing import Cluster
from kept.testing.ports import free_port
from tests.compat.movers import Nodes
from tests.tools import kafka_dist
from tests.tools.needs import need

BROKERS = os.environ.get("COMPAT_BROKERS", "kept").split(",")


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


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs in JavaScript, beside the packages that they use."""
    folder = tmp_path_factory.mktemp("node-client")
    for path in (Path(__file__).parent / "node").glob("*.js*"):
        shutil.copy(path, folder)
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=300,
    )
    return folder


@pytest.fixture(scope="module", params=BROKERS)
def brokers(request: pytest.FixtureRequest) -> str:
    """Whose nodes are to be started."""
    if request.param != "kept":
        need("java")
    return str(request.param)


def _started(brokers: str, nodes: int, folder: Path) -> Any:
    if brokers == "kept":
        return Cluster(nodes)
    features = {"transaction.version": 0} if brokers == "kafka-0" else None
    ports = [free_port(above=[1]) for _ in range(nodes)]
    return kafka_dist.Cluster(folder, ports, features)


@pytest.fixture(scope="module")
def one_node(brokers: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """One node, which may be killed and started again."""
    with _started(brokers, 1, tmp_path_factory.mktemp("one")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def three_nodes(brokers: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Three nodes, of which any may be killed and started again."""
    with _started(brokers, 3, tmp_path_factory.mktemp("three")) as nodes:
        yield nodes


@pytest.fixture(scope="module", params=[1, 3])
def nodes(
    brokers: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    """One node, and three, for tests of which each runs on both."""
    with _started(brokers, request.param, tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def _clients_may_leak_sockets() -> Iterator[None]:
    """kafka-python leaves sockets to the garbage collector; our own code may not."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(5):  # cycles with finalizers go layer by layer
            gc.collect()
