"""Controllers and brokers as processes of their own: three and two, started in any order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from kept.client.client import Client, OutRecord
from kept.client.core.metadata import Endpoint
from kept.client.json_api import JsonApi
from kept.testing import reaper
from kept.testing.ports import free_port
from tests.support.kafka_connection import FIND, Connection

CONTROLLERS = (100, 101, 102)
BROKERS = (1, 2)
DEADLINE_S = 60


class Site:
    """Three controllers and two brokers, each with a configuration file as an operator's."""

    def __init__(self, root: Path, **more: Any) -> None:
        self.root = root
        self.ports = {node: free_port() for node in (*CONTROLLERS, *BROKERS)}
        self.node_ports = {node: free_port() for node in BROKERS}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        voters = ",".join(f"{node}@localhost:{self.ports[node]}" for node in CONTROLLERS)
        for node, port in self.ports.items():
            directory = root / f"node-{node}"
            directory.mkdir()
            settings = {
                "node.id": node,
                "controller.quorum.voters": voters,
                "controller.listener.names": "CONTROLLER",
                "metadata.log.dir": str(directory / "meta"),
                "default.replication.factor": 2,
                **more,
            }
            if node in CONTROLLERS:
                settings["process.roles"] = "controller"
                settings["listeners"] = f"CONTROLLER://localhost:{port}"
            else:
                inside = f"CONTROLLER://localhost:{self.node_ports[node]}"
                settings["process.roles"] = "broker"
                settings["listeners"] = f"PLAINTEXT://localhost:{port},{inside}"
                settings["log.dirs"] = str(directory / "log")
            (directory / "kept.yaml").write_text(yaml.safe_dump(settings))

    @property
    def bootstrap(self) -> str:
        return ",".join(f"localhost:{self.ports[node]}" for node in BROKERS)

    def log(self, node: int) -> str:
        return (self.root / f"node-{node}" / "out").read_text()

    def start(self, *nodes: int) -> None:
        for node in nodes:
            directory = self.root / f"node-{node}"
            with (directory / "out").open("wb") as out:
                self.processes[node] = subprocess.Popen(
                    [sys.executable, "-m", "kept", "serve", "--config", "kept.yaml"],
                    cwd=directory,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def ready(self, *nodes: int) -> None:
        for node in nodes:
            self.until(lambda node=node: " ready on " in self.log(node), f"node {node} is ready")

    def until(self, condition, what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > end:
                logs = "\n".join(f"--- {n}\n{self.log(n)}" for n in self.processes)
                pytest.fail(f"not so: {what}\n{logs}")
            time.sleep(0.02)

    def end(self, *nodes: int, by: signal.Signals = signal.SIGTERM) -> list[int]:
        for node in nodes:
            self.processes[node].send_signal(by)
        return [self.processes.pop(node).wait(DEADLINE_S) for node in nodes]

    def answer(self, node: int, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://localhost:{self.ports[node]}{path}") as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def client(self) -> Client:
        return Client(self.bootstrap, client_id="test")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with made_at(tmp_path) as made:
        yield made


@contextmanager
def made_at(tmp_path: Path, **more: Any) -> Iterator[Site]:
    reaper.watch(str(tmp_path))
    made = Site(tmp_path, **more)
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.wait()
        reaper.forget(str(tmp_path))


def produce(site: Site, topic: str, value: bytes) -> None:
    with site.client() as client:
        client.produce(topic, [OutRecord(key=b"k", value=value)])


@pytest.mark.slow
def test_controllers_and_brokers_apart(site):
    site.start(2, 100)  # neither can do anything alone
    site.start(1, 102, 101)
    site.ready(*CONTROLLERS, *BROKERS)
    assert f"controller 100 ready on localhost:{site.ports[100]}, data in" in site.log(100)
    assert not (site.root / "node-100" / "data").exists()
    with site.client() as client:
        client.create_topic("t", partitions=2)
        view = client.topic("t")
        assert {p.replicas for p in view.partitions.values()} <= {(1, 2), (2, 1)}
        assert set(client.metadata().nodes) == set(BROKERS)
    produce(site, "t", b"1")
    for node in CONTROLLERS:
        assert site.answer(node, "/readyz") == (200, "ready\n")
        told = json.loads(site.answer(node, "/api/v1/cluster")[1])
        assert [broker["node_id"] for broker in told["brokers"]] == list(BROKERS)
        assert told["voters"] == list(CONTROLLERS)
        assert site.answer(node, "/metrics")[0] == 200
    api = JsonApi(Endpoint("localhost", site.ports[1]))
    assert api.post("voters/remove", {"node_id": 102}) == {"voters": [100, 101]}
    assert api.post("voters/add", {"node_id": 102}) == {"voters": list(CONTROLLERS)}

    # The brokers serve without any controller, and go on with it when it is back.
    assert site.end(*CONTROLLERS, by=signal.SIGKILL) == [-9, -9, -9]
    produce(site, "t", b"2")
    site.start(101, 100)
    site.ready(100, 101)
    with site.client() as client:
        client.create_topic("u", partitions=1)
    produce(site, "u", b"3")
    site.start(102)
    site.ready(102)

    # A broker that starts while no controller is there waits for one.
    assert site.end(1) == [0]
    site.end(*CONTROLLERS, by=signal.SIGKILL)
    site.start(1)
    site.until(lambda: "event=joining" in site.log(1), "it joins")
    site.start(*CONTROLLERS)
    site.ready(1, *CONTROLLERS)
    produce(site, "t", b"4")

    # All at once, in order.
    assert site.end(*CONTROLLERS, *BROKERS) == [0] * 5
    for node in BROKERS:
        assert (site.root / f"node-{node}" / "log" / ".kafka_cleanshutdown").exists()
    site.start(*BROKERS, *CONTROLLERS)
    site.ready(*CONTROLLERS, *BROKERS)
    produce(site, "u", b"5")
    assert "Traceback" not in "".join(site.log(node) for node in site.processes)


SHORT = {
    "broker.session.timeout.ms": 3000,
    "broker.heartbeat.interval.ms": 500,
    "kept.stall.ms": 2000,
}


@pytest.mark.slow
def test_offsets_are_told_without_any_controller(tmp_path):
    """A coordinator that hears of no controller makes sure that its replicas follow it."""
    with made_at(tmp_path, **SHORT) as site:
        site.start(*CONTROLLERS, *BROKERS)
        site.ready(*CONTROLLERS, *BROKERS)
        place = TopicPartition("t", 0)
        with site.client() as client:
            client.create_topic("t", partitions=1)
        consumer = Consumer({"bootstrap.servers": site.bootstrap, "group.id": "g"})
        commit(consumer, TopicPartition("t", 0, 7))
        site.end(*CONTROLLERS, by=signal.SIGKILL)
        end = time.monotonic() + 6
        while time.monotonic() < end:
            (found,) = consumer.committed([place], timeout=20)
            assert (found.offset, found.error) == (7, None)
        site.end(3 - coordinator(site), by=signal.SIGKILL)
        with pytest.raises(KafkaException):  # nobody is left who could say that it still leads
            consumer.committed([place], timeout=5)
        consumer.close()


def commit(consumer: Consumer, place: TopicPartition) -> None:
    """Commit an offset; a coordinator whose topic was made a moment ago may still load it."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            consumer.commit(offsets=[place], asynchronous=False)
        except KafkaException as error:
            loads = error.args[0].code() == KafkaError.COORDINATOR_LOAD_IN_PROGRESS
            assert loads and time.monotonic() < deadline, error
            time.sleep(0.1)
        else:
            return


def coordinator(site: Site) -> int:
    connection = Connection(site.bootstrap.split(",")[0])
    try:
        return int(connection.ask(FIND, 2, key="g", key_type=0).node_id)
    finally:
        connection.close()
