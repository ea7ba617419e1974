"""Bytes to a real node and back: requests as kio writes them, or as a test mangles them."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kept.client.protocol import messages as protocol
from kept.storage.records import build_batch

DEADLINE_S = 60.0
"""Tests that ask for more than this are not to wait: they fail where they do."""


class Wire:
    """One connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        self._correlation_id = 0

    def close(self) -> None:
        self.socket.close()

    def raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send(self, key: int, version: int, **values: Any) -> int:
        """Send a request; its correlation id."""
        self._correlation_id += 1
        frame = protocol.encode_request(key, version, self._correlation_id, "wire", values)
        self.socket.sendall(frame)
        return self._correlation_id

    def frame(self) -> bytes:
        """The next response without its length."""
        (size,) = struct.unpack(">i", self.exactly(4))
        return self.exactly(size)

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise EOFError(f"closed after {len(data)} of {size} bytes")
            data += more
        return data

    def receive(self, key: int, version: int) -> tuple[int, Any]:
        return protocol.decode_response(key, version, self.frame())

    def ask(self, key: int, version: int, **values: Any) -> Any:
        wanted = self.send(key, version, **values)
        correlation_id, response = self.receive(key, version)
        assert correlation_id == wanted
        return response

    def is_closed(self) -> bool:
        """Wait until the node closes; False when it says something first."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    # Shorthands.

    def produce(
        self, topic: str, data: bytes | None, *, version: int = 9, acks: int = 1, **more: Any
    ) -> Any:
        """The answer for the one partition of a Produce."""
        response = self.ask(0, version, **produce_values(topic, data, acks=acks, **more))
        return response.responses[0].partition_responses[0]

    def fetch(self, topic: str, offset: int, *, version: int = 11, **more: Any) -> Any:
        """The answer for the one partition of a Fetch."""
        response = self.ask(1, version, **fetch_values(topic, offset, **more))
        return response.responses[0].partitions[0]

    def end_offset(self, topic: str) -> int:
        partition = {"partition_index": 0, "timestamp": -1}
        response = self.ask(2, 5, **list_values(topic, partition))
        return response.topics[0].partitions[0].offset


def produce_values(topic: str, data: bytes | None, **more: Any) -> dict[str, Any]:
    partition = {"index": more.pop("partition", 0), "records": data}
    topics = [
        {"name": topic, "topic_id": more.pop("topic_id", None), "partition_data": [partition]}
    ]
    return {"transactional_id": None, "acks": 1, "timeout": 60_000, "topic_data": topics, **more}


def fetch_values(topic: str, offset: int, **more: Any) -> dict[str, Any]:
    partition = {
        "partition": more.pop("partition", 0),
        "fetch_offset": offset,
        "partition_max_bytes": more.pop("partition_max_bytes", 1 << 20),
        "current_leader_epoch": more.pop("current_leader_epoch", -1),
    }
    topics = [{"topic": topic, "topic_id": more.pop("topic_id", None), "partitions": [partition]}]
    return {
        "replica_id": -1,
        "max_wait": 0,
        "min_bytes": 1,
        "max_bytes": 1 << 24,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "topics": topics,
        "forgotten_topics_data": (),
        "rack_id": "",
        **more,
    }


def list_values(topic: str, partition: dict[str, Any]) -> dict[str, Any]:
    topics = [{"name": topic, "partitions": [partition]}]
    return {"replica_id": -1, "isolation_level": 0, "topics": topics, "timeout": 1000}


def now_ms() -> int:
    return int(time.time() * 1000)


def one_batch(count: int = 1, size: int = 10, **more: Any) -> bytes:
    """A batch of ``count`` records with keys."""
    stamp = more.pop("timestamp", None) or now_ms()
    records = [(stamp, b"k%d" % i, b"v" * size, ()) for i in range(count)]
    return build_batch(records, **more)


class Tools:
    """What the tests of this folder share."""

    batch = staticmethod(one_batch)
    produce_values = staticmethod(produce_values)
    fetch_values = staticmethod(fetch_values)
    list_values = staticmethod(list_values)
    now_ms = staticmethod(now_ms)


@pytest.fixture
def tools() -> type[Tools]:
    return Tools


@pytest.fixture
def connect() -> Iterator[Callable[[int], Wire]]:
    """``connect(port)``: a :class:`Wire`, closed when the test ends."""
    opened: list[Wire] = []

    def dial(port: int) -> Wire:
        opened.append(Wire(port))
        return opened[-1]

    yield dial
    for one in opened:
        one.close()


@pytest.fixture
def wire(kept_broker: Any, connect: Callable[[int], Wire]) -> Wire:
    """A connection to the shared node."""
    return connect(kept_broker.port())
