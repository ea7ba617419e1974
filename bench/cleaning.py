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

from kept.client.client import Client
from kept.storage.records import headers
from kept.storage.types import Codec

IN_FLIGHT = 16
PASS_DEADLINE_S = 240


def fill(broker: Broker, topic: str, total_bytes: float, clean_share: float = 0.0) -> None:
    """Produce the log of ``cleaner.py`` into a compacted topic that is not cleaned yet.

    But for ``clean_share`` of it, whose keys are distinct: that was cleaned before the rest came.
    """
    segment_bytes = cleaner.SEGMENT_BYTES // 4 if clean_share else cleaner.SEGMENT_BYTES
    with Client(broker.bootstrap) as client:
        config = {
            "cleanup.policy": "compact",
            "min.cleanable.dirty.ratio": "1.0",
            "segment.bytes": str(segment_bytes),
            "message.timestamp.before.max.ms": str(2**62),
            "message.timestamp.after.max.ms": str(2**62),
        }
        client.create_topic(topic, partitions=1, config=config)
    with tempfile.TemporaryDirectory(prefix="bench-log-") as folder:
        sources, dirty_from, _ = cleaner.generate(folder, total_bytes, Codec.NONE, clean_share)
        paths = {s.base_offset: Path(f"{folder}/{s.base_offset:020d}.log") for s in sources}
        clean = [path for base, path in paths.items() if base < dirty_from]
        if clean:
            _produce(broker, topic, clean)
            release(broker, topic)
            await_pass(broker, topic)
            hold(broker, topic)
        _produce(broker, topic, [path for base, path in paths.items() if base >= dirty_from])


def _produce(broker: Broker, topic: str, paths: list[Path]) -> None:
    """Every batch of these files."""
    with socket.create_connection((broker.host, broker.port)) as connection:
        reader = connection.makefile("rb")
        waiting = 0
        for path in paths:
            data = path.read_bytes()
            for position, header in headers(data):
                # Apache Kafka refuses a producer's batch whose base offset is not 0.
                batch = bytes(8) + data[position + 8 : position + header.size_bytes]
                connection.sendall(frames.produce(topic, batch))
                waiting += 1
                if waiting == IN_FLIGHT:
                    _reply(reader)
                    waiting -= 1
        for _ in range(waiting):
            _reply(reader)


def _reply(reader: object) -> None:
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


def hold(broker: Broker, topic: str) -> None:
    """Keep the cleaner from the topic again."""
    with Client(broker.bootstrap) as client:
        client.alter_topic(topic, {"min.cleanable.dirty.ratio": "1.0"})


def cleaned_to(broker: Broker, topic: str) -> int:
    """Up to where the cleaner's checkpoint says that the topic is clean."""
    path = broker.log_dir / "cleaner-offset-checkpoint"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((int(x.split()[2]) for x in lines if x.startswith(f"{topic} 0 ")), default=0)


def await_pass(broker: Broker, topic: str, after: int = 0) -> None:
    """Until the topic is clean beyond an offset."""
    deadline = time.monotonic() + PASS_DEADLINE_S
    while time.monotonic() < deadline:
        if cleaned_to(broker, topic) > after:
            return
        time.sleep(0.02)
    raise RuntimeError(f"{broker.name} did not clean {topic} within {PASS_DEADLINE_S} s")


def cpu_of_a_pass(
    broker: Broker, topic: str, gigabytes: float, clean_share: float = 0.0
) -> tuple[float, float]:
    """(CPU seconds per GB, wall seconds) of one pass over a log that is dirty, or partly clean."""
    fill(broker, topic, gigabytes * 1e9, clean_share)
    size, clean = closed_bytes(broker, topic), cleaned_to(broker, topic)
    time.sleep(2)  # what producing left to do in the background
    before, started = broker.cpu_seconds(), time.monotonic()
    release(broker, topic)
    await_pass(broker, topic, clean)
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
