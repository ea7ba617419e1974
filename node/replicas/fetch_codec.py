"""Fetch as a follower speaks it: requests written, responses taken apart in place.

One version, :data:`VERSION`: topic ids, sessions, the last fetched epoch, and the broker epoch in
ReplicaState (KIP-903). Records stay a view into the response. The leader's side of the same
messages is ``kept.node.kafka.codec.fetch``. Layout: FetchRequest.json, FetchResponse.json of Apache
Kafka.
"""

from __future__ import annotations

import struct
from typing import Final
from uuid import UUID

from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.wire import read_uvarint, skip_tags, tags, uvarint
from kept.replication.fetch_messages import (
    FetchRequest,
    FetchResponse,
    PartitionRequest,
    PartitionResponse,
)
from kept.storage.errors import CorruptMessage
from kept.storage.types import TopicPartition

API_KEY: Final = ApiKey.FETCH
VERSION: Final = 17

_HEAD: Final = struct.Struct(">iiib")
_SESSION: Final = struct.Struct(">ii")
_PARTITION: Final = struct.Struct(">iiqiqi").pack
"""partition, current_leader_epoch, fetch_offset, last_fetched_epoch, log_start_offset, max_bytes"""
_REPLICA_STATE: Final = struct.Struct(">iq").pack
_ONE: Final = struct.Struct(">iiibiiB16sBiiqiqi7siqB").pack
"""A whole request for one partition: what is packed one after another for several."""
_ONE_TO_STATE: Final = b"\0\0\x01\x01\x01\x01\x0d"
"""In :data:`_ONE`: no tags of partition and topic, nothing forgotten, no rack, one tag: the state.
"""
_RESPONSE: Final = struct.Struct(">ihi").unpack_from
"""throttle_time_ms, error_code, session_id"""
_ANSWER: Final = struct.Struct(">ihqqq")
"""partition, error_code, high_watermark, last_stable_offset, log_start_offset"""
_ONE_ANSWER: Final = struct.Struct(">4xBihiB16sBihqqqBi")
"""A response without tags or aborted transactions, up to its one partition's records."""
_EPOCH_AND_OFFSET: Final = struct.Struct(">iq").unpack_from
_TWO_INTS: Final = struct.Struct(">ii").unpack_from
_ABORTED_BYTES: Final = 17
_NO_RACK: Final = b"\x01"
_NO_TAGS: Final = b"\0\0\0"
"""Of a partition, its topic, and the response."""

Topics = dict[bytes, dict[int, TopicPartition]]
"""Topic id's bytes to partition number to name: what a response is to be about."""


def encode_request(request: FetchRequest, replica_id: int, broker_epoch: int) -> bytes:
    """The body of a Fetch request, without its header."""
    if len(request.partitions) == 1 and not request.forgotten:
        return _encode_one(request, request.partitions[0], replica_id, broker_epoch)
    out = bytearray(_HEAD.pack(request.max_wait_ms, request.min_bytes, request.max_bytes, 0))
    out += _SESSION.pack(request.session_id, request.session_epoch)
    topics: dict[UUID, list[PartitionRequest]] = {}
    for wanted in request.partitions:
        topics.setdefault(wanted.topic_id, []).append(wanted)
    out += uvarint(len(topics) + 1)
    for topic_id, partitions in topics.items():
        out += topic_id.bytes + uvarint(len(partitions) + 1)
        for wanted in partitions:
            out += _PARTITION(
                wanted.tp.partition,
                wanted.leader_epoch,
                wanted.fetch_offset,
                wanted.last_fetched_epoch,
                wanted.log_start_offset,
                wanted.max_bytes,
            )
            out += b"\0"
        out += b"\0"
    forgotten: dict[UUID, list[int]] = {}
    for tp, topic_id in request.forgotten:
        forgotten.setdefault(topic_id, []).append(tp.partition)
    out += uvarint(len(forgotten) + 1)
    for topic_id, numbers in forgotten.items():
        out += topic_id.bytes + uvarint(len(numbers) + 1)
        out += struct.pack(f">{len(numbers)}i", *numbers) + b"\0"
    out += _NO_RACK
    state = _REPLICA_STATE(replica_id, broker_epoch) + b"\0"
    out += b"\x01\x01" + uvarint(len(state)) + state
    return bytes(out)


def _encode_one(
    request: FetchRequest, wanted: PartitionRequest, replica_id: int, broker_epoch: int
) -> bytes:
    """Nearly every request: it follows what was appended to one partition."""
    return _ONE(
        request.max_wait_ms,
        request.min_bytes,
        request.max_bytes,
        0,
        request.session_id,
        request.session_epoch,
        2,
        wanted.topic_id.bytes,
        2,
        wanted.tp.partition,
        wanted.leader_epoch,
        wanted.fetch_offset,
        wanted.last_fetched_epoch,
        wanted.log_start_offset,
        wanted.max_bytes,
        _ONE_TO_STATE,
        replica_id,
        broker_epoch,
        0,
    )


def decode_response(frame: memoryview, topics: Topics) -> FetchResponse:
    """The answer in a response frame (correlation id first); records are views into it.

    ``topics`` names the partitions that may be answered. Raises CorruptMessage for bytes that are
    not such a response, and for partitions that nobody asked about.
    """
    try:
        return _decode_one(frame, topics) or _decode(frame, topics)
    except (struct.error, IndexError) as error:
        raise CorruptMessage("a Fetch response that ends early") from error


def _decode_one(frame: memoryview, topics: Topics) -> FetchResponse | None:
    """Nearly every response: one partition has news, and nothing is tagged; None: it is another."""
    if len(frame) < _ONE_ANSWER.size:
        return None
    (
        header_tags,
        _,
        error_code,
        session_id,
        topic_count,
        topic_id,
        partition_count,
        number,
        partition_error,
        high_watermark,
        stable,
        log_start,
        aborted,
        _,
    ) = _ONE_ANSWER.unpack_from(frame)
    if header_tags or topic_count != 2 or partition_count != 2 or aborted > 1:
        return None
    size, position = read_uvarint(frame, _ONE_ANSWER.size)
    end = position + max(size - 1, 0)
    tp = topics.get(topic_id, {}).get(number)
    if tp is None or bytes(frame[end:]) != _NO_TAGS:
        return None
    records = frame[position:end]
    answer = PartitionResponse(
        tp, partition_error, high_watermark, stable, log_start, None, None, records
    )
    return FetchResponse(error_code, session_id, (answer,))


def _decode(frame: memoryview, topics: Topics) -> FetchResponse:
    position = skip_tags(frame, 4)
    _, error_code, session_id = _RESPONSE(frame, position)
    position += 10
    count, position = read_uvarint(frame, position)
    partitions: list[PartitionResponse] = []
    for _ in range(count - 1):
        topic_id = bytes(frame[position : position + 16])
        known = topics.get(topic_id)
        several, position = read_uvarint(frame, position + 16)
        for _ in range(several - 1):
            answer, position = _partition(frame, position, known, topic_id)
            partitions.append(answer)
        position = skip_tags(frame, position)
    skip_tags(frame, position)
    return FetchResponse(error_code, session_id, tuple(partitions))


def _partition(
    frame: memoryview, position: int, known: dict[int, TopicPartition] | None, topic_id: bytes
) -> tuple[PartitionResponse, int]:
    number, error_code, high_watermark, stable, log_start = _ANSWER.unpack_from(frame, position)
    tp = None if known is None else known.get(number)
    if tp is None:
        raise CorruptMessage(f"a Fetch response about {topic_id.hex()}-{number}, not asked for")
    aborted, position = read_uvarint(frame, position + _ANSWER.size)
    position += max(aborted - 1, 0) * _ABORTED_BYTES + 4  # and the preferred read replica
    size, position = read_uvarint(frame, position)
    end = position + max(size - 1, 0)
    if end > len(frame):
        raise CorruptMessage("records that end outside their Fetch response")
    records = frame[position:end]
    diverging = current_leader = None
    tagged, position = tags(frame, end)
    for tag, start, _ in tagged:
        if tag == 0:
            diverging = _EPOCH_AND_OFFSET(frame, start)
        elif tag == 1:
            current_leader = _TWO_INTS(frame, start)
    answer = PartitionResponse(
        tp,
        error_code,
        high_watermark,
        stable,
        log_start,
        diverging,
        current_leader,
        records,
    )
    return answer, position
