"""Kafka Connect with an exactly-once source on one node and on three: each line of a file is in the
topic once, in order, while the worker and a node are killed.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kept.testing.ports import free_port
from tests.compat.movers import Killer, Nodes, create, leader, read
from tests.tools import kafka_dist

pytestmark = [pytest.mark.java, pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE_S = 200
FILE_CONNECTOR = f"org.apache.kafka:connect-file:{kafka_dist.VERSION}"
CONVERTER = "org.apache.kafka.connect.storage.StringConverter"
PART = 400


class Worker:
    """A worker of Connect, with a connector that reads a file."""

    def __init__(self, nodes: Nodes, folder: Path, topic: str) -> None:
        self.file, self.topic = folder / "lines.txt", topic
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        self._folder = folder
        settings = {
            "bootstrap.servers": nodes.bootstrap,
            "group.id": f"{topic}-workers",
            "exactly.once.source.support": "enabled",
            "listeners": f"http://127.0.0.1:{port}",
            "key.converter": CONVERTER,
            "value.converter": CONVERTER,
            "plugin.path": kafka_dist.libraries(FILE_CONNECTOR),
            "plugin.discovery": "service_load",  # reflection over the jars takes minutes
            "session.timeout.ms": 10_000,
            "heartbeat.interval.ms": 1_000,
            "scheduled.rebalance.max.delay.ms": 0,
        }
        for store in ("config", "offset", "status"):
            settings[f"{store}.storage.topic"] = f"{topic}-{store}"
            settings[f"{store}.storage.replication.factor"] = min(3, len(nodes))
            if store != "config":
                settings[f"{store}.storage.partitions"] = 1
        self._config = folder / "worker.properties"
        self._config.write_text("".join(f"{k}={v}\n" for k, v in settings.items()))

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """The worker runs; it is killed at the end."""
        with (self._folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                kafka_dist.command(
                    "org.apache.kafka.connect.cli.ConnectDistributed", str(self._config)
                ),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            wait(self._serves, "the worker serves")
            yield process
        finally:
            process.kill()
            process.wait()

    def _serves(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/connectors", timeout=10):
                return True
        except OSError:
            return False

    def connect(self) -> None:
        """Make the connector."""
        config = {
            "connector.class": "org.apache.kafka.connect.file.FileStreamSourceConnector",
            "tasks.max": "1",
            "file": str(self.file),
            "topic": self.topic,
            "exactly.once.support": "required",
        }
        request = urllib.request.Request(
            f"{self._url}/connectors",
            json.dumps({"name": self.topic, "config": config}).encode(),
            {"Content-Type": "application/json"},
        )

        def made() -> bool:
            try:
                with urllib.request.urlopen(request, timeout=60):
                    return True
            except urllib.error.HTTPError as error:
                assert error.code in {409, 500}, error.read()  # it rebalances
                return False

        wait(made, "the connector is made")


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def test_every_line_is_written_once(nodes: Nodes, tmp_path: Path) -> None:
    topic = "file-lines"
    create(nodes, [topic], partitions=1)
    worker = Worker(nodes, tmp_path, topic)
    lines: list[bytes] = []

    def feed() -> None:
        more = [b"line-%d" % number for number in range(len(lines), len(lines) + PART)]
        lines.extend(more)
        with worker.file.open("ab") as file:
            file.write(b"".join(line + b"\n" for line in more))

    def whole() -> bool:
        found = [value for _, value in read(nodes.bootstrap, topic, 1, "read_committed")]
        assert found == lines[: len(found)], "a line is missing, or there twice"
        return len(found) == len(lines)

    killer = Killer(nodes)
    feed()
    with worker.running():
        worker.connect()
        wait(whole, "the first part is there")
        feed()  # and kill it at once
    with worker.running():
        wait(whole, "the next worker goes on")
        feed()
        killer.kill(leader(nodes.bootstrap, topic))
        wait(whole, "all is there while a node dies")
        killer.wait()
        feed()
        wait(whole, "all is there")
