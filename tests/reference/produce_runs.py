"""What ``kept.node.kafka.codec._codec`` does with runs of Produce requests, in plain Python."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from kept.node.kafka.codec.produce import (
    FLEXIBLE,
    IN_THREAD_BYTES,
    MAX_VERSION,
    MIN_VERSION,
    ZSTD_SINCE,
    PartitionResult,
    PlainRequest,
    encode_steps,
    parse,
)
from kept.steps import run_to_end
from kept.storage.errors import CorruptMessage

LONGEST_SHORT_NAME: Final = 126
"""Topic names whose length is one byte as a varint."""

_PRODUCE: Final = 0
_HEADER: Final = struct.Struct(">hhih").unpack_from
_I: Final = struct.Struct(">i").unpack_from
_SIZE_BYTES: Final = 4
_BATCH_HEADER_BYTES: Final = 61
_ATTRIBUTES_AT: Final = 22
_COMPRESSED: Final = 7
_ZSTD: Final = 4
_TRANSACTIONAL: Final = 16
_NO_TAGS: Final = 3
"""Bytes after the records of the only batch: no tags of partition, topic, request."""


def parse_plain(buffer: bytearray | memoryview, start: int, stop: int) -> PlainRequest | None:
    """The request in ``buffer[start:stop]``, its header included, if it is of the common kind.

    That is: a Produce request that this codec knows, acks 1 or -1, of one batch that belongs to no
    transaction and is not checked in a thread. None for anything else, wrong or right: the long way
    serves, or refuses, it.
    """
    if stop - start < 10:
        return None
    key, version, correlation_id, client = _HEADER(buffer, start)
    position = start + 10 + max(client, 0)
    if key != _PRODUCE or not MIN_VERSION <= version <= MAX_VERSION or position >= stop:
        return None
    flexible = version >= FLEXIBLE
    if flexible and buffer[position]:
        return None
    try:
        request = parse(memoryview(buffer)[:stop], position + flexible, version)
    except CorruptMessage:
        return None
    if request.transactional_id is not None or request.acks not in (-1, 1):
        return None
    if len(request.topics) != 1 or len(request.topics[0][1]) != 1:
        return None
    name, ((index, at, end),) = request.topics[0]
    size = end - at
    if at < 0 or size < _BATCH_HEADER_BYTES or stop - end != (_NO_TAGS if flexible else 0):
        return None
    attributes = buffer[at + _ATTRIBUTES_AT]
    if attributes & _TRANSACTIONAL or (attributes & _COMPRESSED and size > IN_THREAD_BYTES):
        return None
    if version < ZSTD_SINCE and attributes & _COMPRESSED == _ZSTD:
        return None
    if not 0 < len(name) <= LONGEST_SHORT_NAME:
        return None
    return version, correlation_id, request.acks, request.timeout_ms, name, index, at, end


def parse_run(  # noqa: PLR0917
    buffer: bytearray, start: int, end: int, frames: int, size: int, longest: int
) -> list[PlainRequest]:
    """Whole frames from ``buffer[start:end]`` on that :func:`parse_plain` reads, one after another.

    At most ``frames``, none longer than ``longest`` bytes, and none after ``size`` bytes; the first
    of another kind ends the run.
    """
    requests: list[PlainRequest] = []
    stop_at = start + size
    while len(requests) < frames and start < stop_at and end - start > _SIZE_BYTES:
        (length,) = _I(buffer, start)
        start += _SIZE_BYTES
        if not 0 <= length <= min(longest, end - start):
            break
        request = parse_plain(buffer, start, start + length)
        if request is None:
            break
        requests.append(request)
        start += length
    return requests


def encode_run(entries: Sequence[tuple[PlainRequest, Any, Sequence[int]]]) -> bytes:
    """As ``kept.node.kafka.codec.encode_run``."""
    frames = []
    for request, _, info in entries:
        version, correlation_id, _, _, topic, partition, _, _ = request
        base_offset, _, append_time, log_start_offset, *_ = info
        result = PartitionResult(partition, 0, base_offset, append_time, log_start_offset)
        steps = encode_steps(version, correlation_id, [(topic, [result])])
        frames.append(run_to_end(steps))
    return b"".join(frames)
