"""Bytes to a real node and back: requests as kio writes them, or as a test mangles them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kept.client.protocol import messages as protocol
from tests.support.request_values import fetch_values, list_offsets_values, produce_values

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
        response = self.ask(2, 5, **list_offsets_values(topic))
        return response.topics[0].partitions[0].offset


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
