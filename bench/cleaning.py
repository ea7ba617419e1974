"""The cleaner inside a running broker: its CPU, and what producers feel of it.

Each broker gets the log of ``cleaner.py`` (records of about 180 bytes, keys drawn from two
million) through Produce, with the cleaner held back by ``min.cleanable.dirty.ratio=1``; then the
ratio is let go and the pass watched through ``cleaner-offset-checkpoint``, which both write.
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import cleaner
import frames
from brokers import Broker

from kept.client.blocking import Client
from kept.storage.records import headers
from kept.storage.types import Codec

IN_FLIGHT = 16
PASS_DEADLINE_S = 240


def fill(broker: Broker, topic: str, total_bytes: float) -> None:
    """Produce the log of ``cleaner.py`` into a compacted topic that is not cleaned yet."""
    with Client(broker.bootstrap) as client:
        config = {
            "cleanup.policy": "compact",
            "min.cleanable.dirty.ratio": "1.0",
            "segment.bytes": str(cleaner.SEGMENT_BYTES),
            "message.timestamp.before.max.ms": str(2**62),
            "message.timestamp.after.max.ms": str(2**62),
        }
        client.create_topic(topic, partitions=1, config=config)
    with tempfile.TemporaryDirectory(prefix="bench-log-") as folder:
        sources, _, _ = cleaner.generate(folder, total_bytes, Codec.NONE, 0.0)
        with socket.create_connection((broker.host, broker.port)) as connection:
            reader = connection.makefile("rb")
            waiting = 0
            for source in sources:
                data = Path(f"{folder}/{source.base_offset:020d}.log").read_bytes()
                for position, header in headers(data):
                    # Apache Kafka refuses a producer's batch whose base offset is not 0.
                    batch = bytes(8) + data[position + 8 : position + header.size_bytes]
                    connection.sendall(frames.produce(topic, batch))
                    waiting += 1
                    if waiting == IN_FLIGHT:
                        _answer(reader)
                        waiting -= 1
            for _ in range(waiting):
                _answer(reader)


def _answer(reader: object) -> None:
    size = int.from_bytes(reader.read(4), "big")  # type: ignore[attr-defined]
    body = reader.read(size)  # type: ignore[attr-defined]
    name = int.from_bytes(body[8:10], "big")
    error = int.from_bytes(body[10 + name + 8 : 10 + name + 10], "big", signed=True)
    if error:
        raise RuntimeError(f"produce answered error {error}")


def closed_bytes(broker: Broker, topic: str) -> int:
    """Bytes of the segments that a pass may touch."""
    logs = sorted((broker.log_dir / f"{topic}-0").glob("*.log"))
    return sum(path.stat().st_size for path in logs[:-1])


def release(broker: Broker, topic: str) -> None:
    """Let the cleaner have the topic."""
    with Client(broker.bootstrap) as client:
        client.alter_topic(topic, {"min.cleanable.dirty.ratio": "0.01"})


def await_pass(broker: Broker, topic: str) -> None:
    """Until the topic is in the cleaner's checkpoint."""
    path = broker.log_dir / "cleaner-offset-checkpoint"
    deadline = time.monotonic() + PASS_DEADLINE_S
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.exists() else []
        if any(line.startswith(f"{topic} 0 ") and line.split()[2] != "0" for line in lines):
            return
        time.sleep(0.02)
    raise RuntimeError(f"{broker.name} did not clean {topic} within {PASS_DEADLINE_S} s")


def cpu_of_a_pass(broker: Broker, gigabytes: float) -> tuple[float, float]:
    """(CPU seconds per GB, wall seconds) of one pass over an all-dirty log."""
    fill(broker, "cleaning", gigabytes * 1e9)
    size = closed_bytes(broker, "cleaning")
    time.sleep(2)  # what producing left to do in the background
    before, started = broker.cpu_seconds(), time.monotonic()
    release(broker, "cleaning")
    await_pass(broker, "cleaning")
    cpu = broker.cpu_seconds() - before
    return cpu / (size / 1e9), time.monotonic() - started


def latency_during_a_pass(
    broker: Broker, load: Path, frame: bytes, gigabytes: float
) -> tuple[float, float]:
    """p99 in milliseconds of 500 requests/s, (without, during) a pass."""
    fill(broker, "cleaning-aside", gigabytes * 1e9)
    with tempfile.NamedTemporaryFile() as file:
        file.write(frame)
        file.flush()
        command = [str(load), "pace", broker.host, str(broker.port), file.name, "500"]
        quiet = json.loads(subprocess.check_output([*command, "2500"]))
        release(broker, "cleaning-aside")
        during = json.loads(subprocess.check_output([*command, "1000"]))
    await_pass(broker, "cleaning-aside")
    return quiet["p99_ms"], during["p99_ms"]
