"""Markers that are held back, so that a transaction stays PrepareCommit or PrepareAbort.

Apache Kafka sends markers over its listener between brokers, to itself as well: a gate stands in
front of that. kept writes its own at once: there a node is stopped that leads the topics of the
scripts alone, and neither coordinates nor controls.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from kept.client.admin.cluster import describe_quorum
from kept.node.metadata.internal_topics import TRANSACTION_STATE
from kept.testing import Cluster
from kept.testing.ports import free_port
from tests.golden.transactions.script import SETTINGS
from tests.golden.transactions.verbs import DEADLINE_S, Verbs
from tests.tools import kafka_dist

HOST = "127.0.0.1"
CONTROLLER, BETWEEN, GATE = 1, 2, 3
"""Ports above that of the clients."""
CHUNK_BYTES = 65_536
ONE_REPLICA = {
    "offsets_topic_replication_factor": 1,
    "transaction_state_log_replication_factor": 1,
    "transaction_state_log_min_isr": 1,
}
"""Or what is decided would wait for the node that is stopped."""


class Hold(Protocol):
    """A way to hold markers back. ``node``: who has to lead the partitions; None: anybody."""

    node: int | None

    def hold(self) -> None: ...
    def release(self) -> None: ...


class Gate:
    """A port that passes on to another what comes, once it is open."""

    node = None

    def __init__(self, port: int, target: int) -> None:
        self._target = target
        self._is_open = threading.Event()
        self._is_open.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server((HOST, port))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def hold(self) -> None:
        """Pass nothing on from now on."""
        self._is_open.clear()

    def release(self) -> None:
        """Pass on what came meanwhile, and what comes."""
        self._is_open.set()

    def close(self) -> None:
        """Cut all connections."""
        self._is_open.set()
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                accepted = self._listener.accept()[0]
                try:
                    ends = (accepted, socket.create_connection((HOST, self._target)))
                except OSError:  # nobody listens there yet
                    accepted.close()
                    continue
                self._sockets += ends
                for source, sink in (ends, ends[::-1]):
                    self._threads.append(
                        threading.Thread(target=self._pass_on, args=(source, sink))
                    )
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                self._is_open.wait()
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def kafka(folder: Path, level: int) -> Iterator[Verbs]:
    """Apache Kafka at a level of ``transaction.version``."""
    port = free_port(above=[CONTROLLER, BETWEEN, GATE])
    at = {"PLAINTEXT": port, "CONTROLLER": port + CONTROLLER, "BETWEEN": port + BETWEEN}
    told = {"PLAINTEXT": port, "BETWEEN": port + GATE}
    properties = {
        "listeners": ",".join(f"{name}://{HOST}:{number}" for name, number in at.items()),
        "advertised_listeners": ",".join(f"{n}://{HOST}:{number}" for n, number in told.items()),
        "listener_security_protocol_map": ",".join(f"{name}:PLAINTEXT" for name in at),
        "inter_broker_listener_name": "BETWEEN",
    }
    with contextlib.closing(Gate(port + GATE, port + BETWEEN)) as gate:
        features = {"transaction.version": level}
        broker = kafka_dist.Broker(folder, port, features=features, **SETTINGS, **properties)
        with broker, contextlib.closing(Verbs(broker.bootstrap, gate)) as verbs:
            verbs.ready()
            yield verbs


class StoppedNode:
    """One of three nodes of kept, which is stopped for a while."""

    def __init__(self, cluster: Cluster, node: int) -> None:
        self.node = node
        self._cluster = cluster

    def hold(self) -> None:
        self._cluster.pause(self.node)

    def release(self) -> None:
        self._cluster.resume(self.node)


@contextlib.contextmanager
def kept() -> Iterator[Verbs]:
    """Three nodes of kept, of which one is needed for nothing."""
    with Cluster(3, **SETTINGS, **ONE_REPLICA) as cluster:
        with contextlib.closing(Verbs(_address(cluster, 0))) as asking:
            for find in (asking.find, asking.find_group):
                found = lambda find=find: find("first", version=3)  # noqa: E731
                assert asking.await_answer(found, "none", DEADLINE_S) == "none"
        with cluster.client() as client:
            coordinator = client.metadata([TRANSACTION_STATE]).topics[TRANSACTION_STATE]
            needed = {
                coordinator.partitions[0].leader,
                client.run(describe_quorum(60_000)).leader_id,
            }
        held = StoppedNode(cluster, min({0, 1, 2} - needed))
        address = _address(cluster, coordinator.partitions[0].leader)
        with contextlib.closing(Verbs(address, held)) as verbs:
            yield verbs


def _address(cluster: Cluster, node: int) -> str:
    return f"{cluster.host(node)}:{cluster.port(node)}"
