"""NodeEndpoints of Produce (v10 on) and Fetch (v16 on) responses: where leaders are (KIP-951)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kept.client.protocol.wire import uvarint


class Endpoint(NamedTuple):
    """One node, as clients of a listener reach it."""

    node_id: int
    host: str
    port: int
    rack: str | None


def endpoint_tags(endpoints: Sequence[Endpoint]) -> bytes:
    """The tagged fields at the end of a response: NodeEndpoints is tag 0; none when empty."""
    if not endpoints:
        return b"\0"
    body = bytearray(uvarint(len(endpoints) + 1))
    for one in endpoints:
        body += struct.pack(">i", one.node_id) + _string(one.host)
        body += struct.pack(">i", one.port) + _string(one.rack) + b"\0"
    return b"\x01\x00" + uvarint(len(body)) + bytes(body)


def _string(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    data = text.encode()
    return uvarint(len(data) + 1) + data
