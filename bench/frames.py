"""Whole requests for ``load.c``: one frame that is sent again and again."""

from __future__ import annotations

import random
import struct

from kept.storage.records import build_batch
from kept.storage.types import Codec


def batch(size_bytes: int, record_bytes: int, codec: Codec, now_ms: int, seed: int = 1) -> bytes:
    """A record batch of about ``size_bytes`` uncompressed; half of each value compresses well."""
    draw = random.Random(seed)
    count = max(1, size_bytes // (record_bytes + 30))
    size = record_bytes if count > 1 else max(1, size_bytes - 100)
    records = []
    for i in range(count):
        value = draw.randbytes(size // 2) + b"kept" * (size // 8 + 1)
        records.append((now_ms, b"key-%012d" % i, value[:size], ()))
    return build_batch(records, codec=codec)


def produce(
    topic: str, data: bytes, acks: int = 1, partition: int = 0, transactional_id: str | None = None
) -> bytes:
    """A Produce v7 request of one batch to one partition."""
    name = topic.encode()
    producer = b"" if transactional_id is None else transactional_id.encode()
    body = struct.pack(">h", -1 if transactional_id is None else len(producer)) + producer
    body += struct.pack(">hi", acks, 30_000)
    body += struct.pack(">i", 1) + struct.pack(">h", len(name)) + name
    body += struct.pack(">iii", 1, partition, len(data)) + data
    return _frame(0, 7, body)


def fetch(topic: str, max_bytes: int) -> tuple[bytes, int]:
    """A Fetch v4 request of partition 0, and where its fetch offset is."""
    name = topic.encode()
    body = struct.pack(">iiiib", -1, 500, 1, max_bytes, 0)
    body += struct.pack(">i", 1) + struct.pack(">h", len(name)) + name
    body += struct.pack(">ii", 1, 0)
    frame = _frame(1, 4, body + struct.pack(">qi", 0, max_bytes))
    return frame, len(frame) - 12


def _frame(api_key: int, version: int, body: bytes) -> bytes:
    head = struct.pack(">hhih", api_key, version, 1, 5) + b"bench"
    return struct.pack(">i", len(head) + len(body)) + head + body
