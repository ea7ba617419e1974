"""Checked loads on compacted topics: one idempotent producer to each, and what it sent."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Producer

from tests.soak.table import KEPT, PREFIXES, Key, Read, strategy_of, wrong
from tests.tools.at_rest import records_at_rest

PARTITIONS: Final = 2
KEYS: Final = 400
"""Of each topic and prefix. What is deleted by version is never written again: another key takes
its place.
"""
DELETED: Final = 0.08
PAYLOAD_BYTES: Final = 60
PATIENCE_S: Final = 180
QUEUED: Final = 4000
"""Records on their way; more wait to be sent."""
BURST: Final = 100
AN_HOUR_MS: Final = 3_600_000
RETENTION_MS: Final = 3000
READINGS: Final = 5


@dataclass(frozen=True, slots=True)
class Kind:
    """What a topic is like."""

    strategy: str
    codec: str

    @property
    def name(self) -> str:
        """Name of its topic in the soak."""
        return f"soak-{self.strategy}-{self.codec}"

    @property
    def config(self) -> dict[str, str]:
        """Settings of its topic."""
        found = {
            "cleanup.policy": "compact",
            "segment.bytes": "131072",
            "min.cleanable.dirty.ratio": "0.3",
            "max.compaction.lag.ms": "10000",
            "delete.retention.ms": str(RETENTION_MS),
            "file.delete.delay.ms": "500",
            "kept.compaction.strategy": self.strategy,
        }
        if self.strategy == "latest-n":
            found["kept.compaction.latest.n"] = str(KEPT)
        if self.strategy == "by-key-prefix":
            found["kept.compaction.prefixes"] = PREFIXES
        return found


KINDS: Final = (
    Kind("latest", "none"),
    Kind("latest", "zstd"),
    Kind("latest-n", "gzip"),
    Kind("highest-version", "snappy"),
    Kind("by-key-prefix", "lz4"),
)


class Writer:
    """Random keys, versions and deletions to one topic while it is told to."""

    def __init__(
        self, bootstrap: str, topic: str, kind: Kind, seed: str, per_second: float
    ) -> None:
        self.topic, self.kind = topic, kind
        self.keys: dict[str, Key] = {}
        self.sent = self.acknowledged = 0
        self.failed: list[str] = []
        self._bootstrap, self._draw = bootstrap, random.Random(seed)
        self._per_second = per_second
        self._lives: Counter[str] = Counter()
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "compression.type": kind.codec,
                "message.timeout.ms": 1000 * PATIENCE_S,
                "request.timeout.ms": 5000,
                "socket.timeout.ms": 6000,
                "linger.ms": 5,
                "batch.size": 8000,
                "log_level": 0,
                "error_cb": self._error,
            }
        )
        self._pausing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write, until :meth:`pause`."""
        self._pausing.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def pause(self) -> None:
        """Stop writing; done when everything is acknowledged."""
        self._pausing.set()
        if self._thread is not None:
            self._thread.join()
        if left := self._producer.flush(PATIENCE_S + 10):
            self.failed.append(f"{left} records were neither acknowledged nor refused")

    def _error(self, error: Any) -> None:
        if error.fatal():
            self.failed.append(f"fatal: {error}")

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.failed.append(f"{message.key()}: {error}")
        else:
            self.acknowledged += 1

    def _run(self) -> None:
        began, before = time.monotonic(), self.sent
        while not self._pausing.is_set() and not self.failed:
            due = (time.monotonic() - began) * self._per_second - (self.sent - before)
            if due < BURST or len(self._producer) > QUEUED:
                self._producer.poll(0.02)
                continue
            for _ in range(BURST):
                self._send()
            self._producer.poll(0)

    def _key(self) -> str:
        name = f"{self._draw.choice('cnv')}{self._draw.randrange(KEYS)}"
        return f"{name}.{self._lives[name]}"

    def _send(self) -> None:
        self.sent += 1
        name, draw = self._key(), self._draw
        timestamp = int(time.time() * 1000) - draw.randrange(AN_HOUR_MS)
        tombstone = draw.random() < DELETED
        if tombstone and strategy_of(self.kind.strategy, name) == "highest-version":
            timestamp = int(time.time() * 1000)
            self._lives[name.partition(".")[0]] += 1
        self.keys.setdefault(name, Key()).sent(self.sent, timestamp, tombstone=tombstone)
        noise = draw.randbytes(draw.randrange(PAYLOAD_BYTES)).hex()
        self._producer.produce(
            self.topic,
            None if tombstone else f"{self.sent}|{name}|{noise}",
            name,
            partition=place(name),
            timestamp=timestamp,
            on_delivery=self._delivered,
        )

    def check(self) -> tuple[int, dict[str, str]]:
        """The topic's table is what was sent; returns how many records are there, and the keys
        of which compaction has left more than it promises.

        Who reads while passes go on may come upon a value and miss its tombstone: that is kept for
        ``delete.retention.ms`` since the pass that drops the value *began*, and on a loaded machine
        its files take their place seconds later. Nobody writes now, so what is back stays, and
        what is only read so is not there when one reads again.
        """
        assert not self.failed, self.failed[:5]
        assert self.acknowledged == self.sent
        for _ in range(READINGS):
            began = time.monotonic()
            count, faults, left = self._read()
            if not faults:
                break
            took_s, some = time.monotonic() - began, dict(list(faults.items())[:5])
            print(
                f"{self.topic}: read in {took_s:.1f} s, and again: {len(faults)} keys: {some}",
                flush=True,
            )
        assert not faults, f"{self.topic}: {len(faults)} keys: {dict(list(faults.items())[:5])}"
        return count, left

    def _read(self) -> tuple[int, dict[str, str], dict[str, str]]:
        """How many records there are, what is wrong with which key, and what could go yet."""
        seen: dict[str, list[Read]] = {}
        count = 0
        for message in records_at_rest(self._bootstrap, self.topic, PARTITIONS):
            count += 1
            name, value = message.key().decode(), message.value()
            number = None
            if value is not None:
                text, of_key, _ = value.decode().split("|")
                assert of_key == name and message.partition() == place(name), message.offset()
                number = int(text)
            seen.setdefault(name, []).append(Read(number, message.timestamp()[1]))
        assert seen.keys() <= self.keys.keys()
        faults: dict[str, str] = {}
        left: dict[str, str] = {}
        for name, key in self.keys.items():
            strategy, read = strategy_of(self.kind.strategy, name), seen.get(name, [])
            if fault := wrong(strategy, key, read, cleaned=False):
                faults[name] = fault
            elif more := wrong(strategy, key, read, cleaned=True):
                left[name] = more
        return count, faults, left


def place(name: str) -> int:
    """Partition of a key."""
    return zlib.crc32(name.encode()) % PARTITIONS
