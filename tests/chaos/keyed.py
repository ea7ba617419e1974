"""A checked load on a compacted topic: what is deleted stays deleted, what is newest is there."""

from __future__ import annotations

import random
import threading
from typing import Any, Final

from confluent_kafka import Producer

from tests.tools.at_rest import records_at_rest

PATIENCE_S: Final = 120
KEYS: Final = 40
PARTITIONS: Final = 2
DELETED: Final = 0.3
CONFIG: Final = {
    "cleanup.policy": "compact",
    "segment.bytes": "16384",
    "min.cleanable.dirty.ratio": "0.3",
    "delete.retention.ms": "1000",
}


class KeyedLoad:
    """Rising versions of some keys, and deletions between them, until stopped."""

    def __init__(self, bootstrap: str, topic: str, seed: int) -> None:
        self.topic = topic
        self.latest: dict[str, int | None] = {}
        """What was sent last for each key; None: deleted."""
        self.sent = 0
        self.failed: list[str] = []
        self._bootstrap = bootstrap
        self._draw = random.Random(seed)
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "message.timeout.ms": 1000 * PATIENCE_S,
                "request.timeout.ms": 5000,
                "socket.timeout.ms": 6000,
                "linger.ms": 0,
                "batch.size": 2000,
                "log_level": 0,
            }
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set() and not self.failed:
            key = f"key-{self._draw.randrange(KEYS)}"
            self.sent += 1
            version = None if self._draw.random() < DELETED else self.sent
            value = None if version is None else str(version)
            self._producer.produce(self.topic, value, key, on_delivery=self._delivered)
            self.latest[key] = version
            self._producer.poll(0.002)
        if left := self._producer.flush(PATIENCE_S):
            self.failed.append(f"{left} records were neither acknowledged nor refused")

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.failed.append(f"{message.key()}: {error}")

    def stop(self) -> None:
        """End it, once everything that was sent is acknowledged."""
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """The table is what was sent, and every key's versions only ever rise."""
        assert not self.failed, self.failed[:5]
        table: dict[str, int | None] = {}
        newest: dict[str, int] = {}
        for message in records_at_rest(self._bootstrap, self.topic, PARTITIONS):
            key = message.key().decode()
            version = None if message.value() is None else int(message.value())
            table[key] = version
            if version is not None:
                assert version > newest.get(key, 0), f"{key}: {version} after {newest[key]}"
                newest[key] = version
        alive = {key: version for key, version in table.items() if version is not None}
        expected = {key: version for key, version in self.latest.items() if version is not None}
        back = sorted(alive.keys() - expected.keys())
        assert not back, f"deleted keys came back: {[(key, alive[key]) for key in back]}"
        wrong = {k: (alive.get(k), v) for k, v in expected.items() if alive.get(k) != v}
        assert not wrong, f"(found, sent last): {wrong}"
