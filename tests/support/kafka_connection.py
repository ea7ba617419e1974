"""Requests of any API over a blocking socket, to a broker of any make: as kio writes them, or as a
test mangles them.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from typing import Any

from kept.client.protocol.messages import decode_response, encode_request
from tests.support.request_values import fetch_values, list_offsets_values, produce_values

COMMIT, FETCH, FIND, JOIN, HEARTBEAT, LEAVE, SYNC = 8, 9, 10, 11, 12, 13, 14
DESCRIBE, LIST, METADATA, CREATE, DELETE_GROUPS, DELETE_OFFSETS = 15, 16, 3, 19, 42, 47
DEADLINE_S = 60.0
"""Tests that ask for more than this are not to wait: they fail where they do."""


class Connection:
    """One connection; requests may be sent before earlier responses were read. ``address``: the
    one of this machine that it comes from.
    """

    def __init__(self, bootstrap: str, *, address: str = "") -> None:
        host, _, port = bootstrap.rpartition(":")
        source = (address, 0) if address else None
        self.socket = socket.create_connection((host, int(port)), DEADLINE_S, source)
        self._unread: deque[tuple[int, int, int]] = deque()
        self._correlation_id = 0

    def close(self) -> None:
        self.socket.close()

    def raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send(self, api: int, version: int, **values: Any) -> int:
        """Send a request; its correlation id."""
        self._correlation_id += 1
        self._unread.append((api, version, self._correlation_id))
        self.raw(encode_request(api, version, self._correlation_id, "scenario", values))
        return self._correlation_id

    def receive(self) -> Any:
        """The response to the oldest request that :meth:`send` sent, and that has none yet."""
        api, version, expected = self._unread.popleft()
        correlation_id, body = self.response(api, version)
        assert correlation_id == expected
        return body

    def response(self, api: int, version: int) -> tuple[int, Any]:
        """The next response, to whatever was sent: correlation id and body."""
        return decode_response(api, version, self.frame())

    def frame(self) -> bytes:
        """The next response without its length."""
        (size,) = struct.unpack(">i", self.exactly(4))
        return self.exactly(size)

    def exactly(self, size: int) -> bytes:
        """So many bytes. Raises ConnectionResetError where the broker closes before."""
        data = bytearray()
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise ConnectionResetError(f"closed after {len(data)} of {size} bytes")
            data += more
        return bytes(data)

    def ask(self, api: int, version: int, **values: Any) -> Any:
        """A request's response, when all before were read."""
        frame = self.frame_of(api, version, **values)
        correlation_id, body = decode_response(api, version, frame)
        assert correlation_id == self._correlation_id
        return body

    def frame_of(self, api: int, version: int, **values: Any) -> bytes:
        """A request's response without its length, when all before were read."""
        self.send(api, version, **values)
        self._unread.pop()
        return self.frame()

    def is_answered(self, within_s: float) -> bool:
        """Whether bytes are there; looks, does not take."""
        self.socket.settimeout(within_s)
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except TimeoutError:
            return False
        finally:
            self.socket.settimeout(DEADLINE_S)

    def is_closed(self) -> bool:
        """Wait until the broker closes; False when it says something first."""
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
