"""A node with few descriptors: what would use the last is refused, and nothing breaks by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from functools import partial

import pytest

from kept.testing.ports import free_port
from tests.support.request_values import one_batch, topic_values

FILES = 300
DEADLINE_S = 60


class Limited:
    """``kept serve`` with ``ulimit -n``; ``log``: what it printed."""

    def __init__(self, directory, files: int, **settings: str) -> None:
        self.port = free_port()
        self.path = f"{directory}/node-{self.port}.log"
        command = [sys.executable, "-m", "kept", "serve", "--data-dir", f"{directory}/data"]
        command += ["--port", str(self.port)]
        for name, value in settings.items():
            command += ["--set", f"{name.replace('_', '.')}={value}"]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("KEPT_")}
        with open(self.path, "w") as out:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *command],
                stdout=out,
                stderr=out,
                env=environ,
            )
        end = time.monotonic() + DEADLINE_S
        while " ready on " not in self.log:
            assert self.process.poll() is None and time.monotonic() < end, self.log
            time.sleep(0.02)

    @property
    def log(self) -> str:
        with open(self.path) as file:
            return file.read()

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def ready(self) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz") as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def limited(tmp_path):
    """``limited(files, **settings)``: a node over the same directory each time."""
    nodes = []

    def start(files: int = FILES, **settings: str) -> Limited:
        nodes.append(Limited(tmp_path, files, **settings))
        return nodes[-1]

    yield start
    for node in nodes:
        node.process.kill()
        node.process.wait(DEADLINE_S)


def create(wire, name: str, partitions: int = 1, **configs: str):
    topics = [topic_values(name, partitions, **configs)]
    (result,) = wire.ask(19, 7, topics=topics, timeout=30_000, validate_only=False).topics
    return result.error_code.name


def metadata(wire, names):
    answer = wire.ask(
        3,
        9,
        topics=[{"name": name} for name in names],
        allow_auto_topic_creation=True,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )
    return Counter(topic.error_code.name for topic in answer.topics)


def accepted(request, end):
    """Send a request until the node has a descriptor for it, as clients do."""
    while (answer := request()).error_code.name == "kafka_storage_error":
        if hasattr(answer, "error_message"):  # a Fetch response has none
            assert "Too many open files" in answer.error_message
        assert time.monotonic() < end, "what a client tries again is accepted sooner or later"
        time.sleep(0.02)
    assert answer.error_code.name == "none", answer


def test_idle_connections_leave_the_node_its_descriptors(limited, connect):
    node = limited()
    wire = connect(node.port)
    assert create(wire, "t", partitions=20, segment_bytes="1024") == "none"
    idle = []
    for _ in range(FILES):
        try:
            one = connect(node.port)
            one.ask(18, 0)
        except ConnectionError:
            break
        idle.append(one)
    assert 100 < len(idle) < FILES - FILES // 8, "some are refused, and not too early"
    assert "connection refused" in node.log
    end = time.monotonic() + DEADLINE_S
    for _ in range(4):
        for partition in range(20):
            accepted(partial(wire.produce, "t", one_batch(1, 600), partition=partition), end)
    logs = [
        name
        for name in os.listdir(f"{os.path.dirname(node.path)}/data/log")
        if name.startswith("t-")
    ]
    assert len(logs) == 20
    accepted(partial(wire.fetch, "t", 0), end)  # a closed segment is opened
    assert "offline" not in node.log
    for one in idle:
        one.close()
    end = time.monotonic() + DEADLINE_S
    while not is_ready(node):
        assert time.monotonic() < end
    assert node.stop() == 0


def is_ready(node) -> bool:
    """False, too, while the node still refuses connections: it has not seen all that closed."""
    try:
        return node.ready()[0] == 200
    except OSError:
        return False


@pytest.mark.slow
def test_one_metadata_request_does_not_fill_the_node_with_topics(limited, connect):
    node = limited()
    wire = connect(node.port)
    codes = Counter()
    for first in range(0, 400, 50):
        codes += metadata(wire, [f"auto-{number}" for number in range(first, first + 50)])
    assert codes["policy_violation"] > 100 and codes["none"] > 100, codes
    assert "more than open files allow" in node.log
    assert wire.produce("auto-0", one_batch(1)).error_code.name == "none"
    assert node.stop() == 0
    again = limited()
    assert again.ready()[0] == 200
    assert connect(again.port).produce("auto-0", one_batch(1)).base_offset == 1


def test_a_node_with_too_many_logs_starts_and_says_which_it_left_closed(limited, connect):
    node = limited()
    wire = connect(node.port)
    assert create(wire, "t", partitions=200) == "none"
    for partition in range(200):
        assert wire.produce("t", one_batch(1), partition=partition).base_offset == 0
    assert node.stop() == 0

    node = limited(240)
    status, why = node.ready()
    assert status == 503 and "left closed for want of open files" in why
    room = 240 - 240 // 4
    assert node.log.count('event="log left closed"') == 200 - room
    assert "200 replicas are here" in node.log
    wire = connect(node.port)
    codes = Counter(
        wire.produce("t", one_batch(1), partition=partition).error_code.name
        for partition in range(200)
    )
    assert codes == {"none": room, "kafka_storage_error": 200 - room}
    with urllib.request.urlopen(f"http://127.0.0.1:{node.port}/api/v1/topics/t") as answer:
        told = [one["offline"] for one in json.load(answer)["partitions"]]
    assert sum("left closed" in (one or "") for one in told) == 200 - room
    assert node.stop() == 0

    node = limited()
    assert node.ready()[0] == 200
    wire = connect(node.port)
    ends = [wire.produce("t", one_batch(1), partition=p).base_offset for p in range(200)]
    assert Counter(ends) == {2: room, 1: 200 - room}
