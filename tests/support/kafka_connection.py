"""Requests of any API as frames over a blocking socket, to a broker of any make."""

from __future__ import annotations

import socket
import struct
from typing import Any

from kept.client.protocol.messages import decode_response, encode_request

COMMIT, FETCH, FIND, JOIN, HEARTBEAT, LEAVE, SYNC = 8, 9, 10, 11, 12, 13, 14
DESCRIBE, LIST, METADATA, CREATE, DELETE_GROUPS, DELETE_OFFSETS = 15, 16, 3, 19, 42, 47


class Connection:
    """One connection; requests may be sent before earlier answers were read."""

    def __init__(self, bootstrap: str) -> None:
        host, _, port = bootstrap.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.sent: list[tuple[int, int, int]] = []
        self.last = 0

    def send(self, api: int, version: int, **values: Any) -> None:
        self.last += 1
        self.sent.append((api, version, self.last))
        self.socket.sendall(encode_request(api, version, self.last, "scenario", values))

    def receive(self) -> Any:
        api, version, expected = self.sent.pop(0)
        correlation_id, body = decode_response(api, version, self.frame())
        assert correlation_id == expected
        return body

    def frame(self) -> bytes:
        """The next response without its length."""
        (size,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(size)

    def ask(self, api: int, version: int, **values: Any) -> Any:
        self.send(api, version, **values)
        return self.receive()

    def is_answered(self, within_s: float) -> bool:
        """Whether bytes are there; looks, does not take."""
        self.socket.settimeout(within_s)
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except TimeoutError:
            return False
        finally:
            self.socket.settimeout(30)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            assert more, "the broker closed the connection"
            data += more
        return data

    def close(self) -> None:
        self.socket.close()
