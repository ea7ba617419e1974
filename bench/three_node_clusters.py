"""Three nodes of kept and three of Apache Kafka: the same topics, settings, signals and questions.

Each node is broker and controller (Kafka's combined mode). Three replicas, two of them in sync for
an acknowledgement; everything else as each system has it by default, Kafka's JVM with the flags of
its own ``kafka-server-start.sh``. Both are asked over Kafka's protocol, with one client.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import brokers
import meters

from kept.client.admin.cluster import describe_quorum
from kept.client.admin.topics import NewTopic
from kept.client.client import Client, OutRecord
from kept.client.core.metadata import PartitionMetadata
from kept.storage.errors import KeptError
from kept.testing import Cluster, reaper
from kept.testing.ports import free_port

NODES = 3
HOST = "127.0.0.1"
READY_DEADLINE_S = brokers.READY_DEADLINE_S
SETTLED_DEADLINE_S = 120.0
QUORUM_MS = 60_000
STOP_DEADLINE_S = 20.0
CONTROLLER_PORT_OFFSET = 100
POLL_S = 0.01


class Nodes(Protocol):
    """How a cluster's processes are reached and treated."""

    def port(self, i: int = 0) -> int: ...
    def pid(self, i: int = 0) -> int: ...
    def start(self, i: int = 0) -> None: ...
    def kill(self, i: int = 0) -> None: ...
    def pause(self, i: int = 0) -> None: ...
    def resume(self, i: int = 0) -> None: ...


class Trio:
    """A running cluster of three: whom to ask, what it costs."""

    def __init__(self, name: str, nodes: Nodes, ready_seconds: float) -> None:
        self.name, self.nodes, self.ready_seconds = name, nodes, ready_seconds

    @property
    def bootstrap(self) -> str:
        return ",".join(f"{HOST}:{self.nodes.port(i)}" for i in range(NODES))

    def client(self) -> Client:
        """A new client; the caller closes it."""
        return Client(self.bootstrap)

    def cpu_seconds(self) -> list[float]:
        """CPU of each node so far."""
        return [meters.cpu_seconds(self.nodes.pid(i)) for i in range(NODES)]

    def kernel_seconds(self) -> float:
        """The part of it that all nodes together spent in the kernel."""
        return sum(meters.kernel_seconds(self.nodes.pid(i)) for i in range(NODES))

    def memory(self) -> tuple[list[int], list[int]]:
        """RSS and PSS of each node, in bytes."""
        pids = [self.nodes.pid(i) for i in range(NODES)]
        resident = [meters.resident_bytes(pid) for pid in pids]
        return resident, [meters.proportional_bytes(pid) for pid in pids]

    def controller(self) -> int:
        """The active controller."""
        with self.client() as client:
            return int(client.run(describe_quorum(QUORUM_MS)).leader_id)

    def create_topic(self, name: str, partitions: int = NODES, **config: str) -> None:
        """A topic of three replicas; all have a first record of each partition in the end."""
        with self.client() as client:
            settings = {key.replace("_", "."): value for key, value in config.items()}
            client.create_topics([NewTopic(name, partitions, NODES, settings)])
            first = [OutRecord(None, b"first", partition=i) for i in range(partitions)]
            client.produce(name, first)
        self.await_in_sync(name)

    def delete_topic(self, name: str) -> None:
        with self.client() as client:
            client.delete_topics([name])

    def partitions(self, topic: str) -> dict[int, PartitionMetadata]:
        """Leaders and replicas of a topic as they are known now."""
        with self.client() as client:
            return client.metadata([topic]).topics[topic].partitions

    def partition_led_by(self, topic: str, wanted: Callable[[int], bool]) -> tuple[int, int]:
        """(partition, its leader): one whose leader is as wanted."""
        for number, view in sorted(self.partitions(topic).items()):
            if view.leader >= 0 and wanted(view.leader):
                return number, view.leader
        raise RuntimeError(f"{self.name}: no partition of {topic} has such a leader")

    def await_in_sync(self, topic: str) -> None:
        """Until all replicas of a topic are in sync and there is a controller."""

        def settled() -> bool:
            if self.controller() < 0:
                return False
            views = self.partitions(topic).values()
            return bool(views) and all(len(v.isr) == NODES and v.leader >= 0 for v in views)

        self.wait_until(settled, f"{topic} in sync")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Ask until it is so; errors of a cluster in motion pass. RuntimeError in the end."""
        end = time.monotonic() + SETTLED_DEADLINE_S
        last: Exception | None = None
        while time.monotonic() < end:
            try:
                if condition():
                    return
            except (KeptError, OSError, KeyError) as error:
                last = error
            time.sleep(POLL_S)
        raise RuntimeError(f"{self.name}: not within {SETTLED_DEADLINE_S:.0f} s: {what}: {last}")


def _await_three(ports: list[int], until: float) -> None:
    """Until every node says in Metadata that there are three brokers."""
    waiting = list(ports)
    while waiting:
        if time.monotonic() > until:
            raise RuntimeError(f"no three nodes within {READY_DEADLINE_S:.0f} s: {waiting}")
        for port in list(waiting):
            with contextlib.suppress(KeptError, OSError), Client(f"{HOST}:{port}") as client:
                if len(client.metadata([]).nodes) == NODES:
                    waiting.remove(port)
        time.sleep(POLL_S)


@contextlib.contextmanager
def kept(**settings: str) -> Iterator[Trio]:
    """Three nodes of kept on empty directories."""
    cluster = Cluster(NODES, **settings)
    started = time.monotonic()
    with cluster:
        ports = [cluster.port(i) for i in range(NODES)]
        _await_three(ports, started + READY_DEADLINE_S)
        yield Trio("kept", cluster, time.monotonic() - started)


@contextlib.contextmanager
def kafka(**settings: str) -> Iterator[Trio]:
    """Three Apache Kafka nodes on empty directories, formatted beforehand."""
    with tempfile.TemporaryDirectory(prefix="bench-kafka-") as folder:
        reaper.watch(folder)
        nodes = _KafkaNodes(Path(folder), settings)
        try:
            started = time.monotonic()
            for i in range(NODES):
                nodes.launch(i)
            _await_three([nodes.port(i) for i in range(NODES)], started + READY_DEADLINE_S)
            yield Trio("kafka", nodes, time.monotonic() - started)
        finally:
            nodes.close()
            reaper.forget(folder)


class _KafkaNodes:
    """The processes of an Apache Kafka cluster in combined mode."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self._folder = folder
        distances = (0, CONTROLLER_PORT_OFFSET)
        self._first = free_port(above=[i + more for i in range(NODES) for more in distances])
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        commands = [self._configure(i, settings) for i in range(NODES)]
        formats = [subprocess.Popen(c, stdout=subprocess.DEVNULL) for c in commands]
        failed = [process.args for process in formats if process.wait()]
        if failed:
            raise RuntimeError(f"not formatted: {failed}")

    def _configure(self, i: int, settings: dict[str, str]) -> list[str]:
        """Write a node's properties; the command that formats its directory."""
        port = self.port(i)
        voters = (f"{n}@{HOST}:{self.port(n) + CONTROLLER_PORT_OFFSET}" for n in range(NODES))
        controller = f"CONTROLLER://{HOST}:{port + CONTROLLER_PORT_OFFSET}"
        properties = {
            "process.roles": "broker,controller",
            "node.id": str(i),
            "controller.quorum.voters": ",".join(voters),
            "listeners": f"PLAINTEXT://{HOST}:{port},{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": str(self._folder / f"data-{i}"),
            "default.replication.factor": str(NODES),
            "min.insync.replicas": "2",
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        path = self._properties(i)
        path.write_text("".join(f"{k}={v}\n" for k, v in properties.items()))
        return brokers.kafka_format(path)

    def _properties(self, i: int) -> Path:
        return self._folder / f"{i}.properties"

    def launch(self, i: int) -> None:
        """Start a node's process."""
        self._processes[i] = subprocess.Popen(
            brokers.kafka_server(self._properties(i)),
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def port(self, i: int = 0) -> int:
        return self._first + i

    def pid(self, i: int = 0) -> int:
        return self._processes[i].pid

    def start(self, i: int = 0) -> None:
        """Start a node again and wait until it answers."""
        self.launch(i)
        brokers.wait_ready(self.port(i), self._processes[i], READY_DEADLINE_S)

    def kill(self, i: int = 0) -> None:
        self._processes[i].kill()
        self._processes[i].wait()

    def pause(self, i: int = 0) -> None:
        os.kill(self.pid(i), signal.SIGSTOP)

    def resume(self, i: int = 0) -> None:
        os.kill(self.pid(i), signal.SIGCONT)

    def close(self) -> None:
        """End all processes and remove their files."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)
        end = time.monotonic() + STOP_DEADLINE_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for i in range(NODES):
            shutil.rmtree(self._folder / f"data-{i}", ignore_errors=True)
