"""The hand-written Fetch codec against kio, every version."""

from __future__ import annotations

import struct
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.node.kafka.codec import fetch as codec
from kept.replication.fetch_messages import FetchPartition
from kept.storage.disk import FileSlice
from kept.storage.errors import CorruptMessage

PLAIN = (codec.parse, codec.encode)
try:
    from kept.node.kafka.codec import _codec
except ImportError:
    KERNELS = {"python": PLAIN}
else:
    KERNELS = {"python": PLAIN, "cython": (_codec.parse_fetch, _codec.encode_fetch)}
PARSE = pytest.mark.parametrize("parse", [k[0] for k in KERNELS.values()], ids=list(KERNELS))
ENCODE = pytest.mark.parametrize("encode", [k[1] for k in KERNELS.values()], ids=list(KERNELS))
VERSIONS = range(codec.MIN_VERSION, codec.MAX_VERSION + 1)
TOPIC_ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


def request_body(version, replica_id=-1):
    cls = protocol.message_type(1, version, EntityType.request)
    partition = {
        "partition": 3,
        "current_leader_epoch": 9,
        "fetch_offset": 1 << 40,
        "last_fetched_epoch": 8,
        "log_start_offset": 11,
        "partition_max_bytes": 1 << 20,
    }
    values = {
        "cluster_id": "cluster",
        "replica_id": replica_id,
        "replica_state": {"replica_id": replica_id, "replica_epoch": 5},
        "max_wait": 500,
        "min_bytes": 1,
        "max_bytes": 1 << 25,
        "isolation_level": 1,
        "session_id": 77,
        "session_epoch": 2,
        "topics": [{"topic": "orders", "topic_id": TOPIC_ID, "partitions": [partition]}],
        "forgotten_topics_data": [
            {"topic": "gone", "topic_id": TOPIC_ID, "partitions": [1, 2]},
        ],
        "rack_id": "r1",
    }
    return protocol.encode(protocol.build(cls, values))


@PARSE
@pytest.mark.parametrize("replica_id", [-1, 4])
@pytest.mark.parametrize("version", VERSIONS)
def test_parses_what_kio_writes(parse, version, replica_id):
    body = b"head" + request_body(version, replica_id)
    request = parse(memoryview(body), 4, version)
    assert request[:5] == (replica_id, 500, 1, 1 << 25, 1)
    name = TOPIC_ID.bytes if version >= 13 else b"orders"
    expected = FetchPartition(
        3,
        1 << 40,
        1 << 20,
        9 if version >= 9 else -1,
        8 if version >= 12 else -1,
        11 if version >= 5 else -1,
    )
    assert request.topics == [(name, [expected])]
    if version >= 7:
        assert (request.session_id, request.session_epoch) == (77, 2)
        gone = TOPIC_ID.bytes if version >= 13 else b"gone"
        assert request.forgotten == [(gone, [1, 2])]
    else:
        assert (request.session_id, request.session_epoch, request.forgotten) == (0, -1, [])
    assert request.rack_id == (b"r1" if version >= 11 else b"")


@PARSE
@pytest.mark.parametrize("version", VERSIONS)
def test_every_cut_and_every_tail_is_refused(parse, version):
    body = request_body(version)
    for end in range(len(body)):
        with pytest.raises(CorruptMessage):
            parse(memoryview(body)[:end], 0, version)
    with pytest.raises(CorruptMessage):
        parse(memoryview(body + b"\0"), 0, version)


@PARSE
@given(st.binary(max_size=200), st.sampled_from(list(VERSIONS)))
def test_any_bytes_parse_or_are_refused(parse, data, version):
    try:
        parse(memoryview(data), 0, version)
    except CorruptMessage:
        return


def joined(segments):
    return b"".join(
        b"r" * segment.size_bytes if isinstance(segment, FileSlice) else segment
        for segment in segments
    )


@ENCODE
@pytest.mark.parametrize("version", VERSIONS)
def test_response_is_what_kio_reads(encode, version):
    name = TOPIC_ID.bytes if version >= 13 else b"orders"
    data = [
        codec.PartitionData(0, 0, 10, 9, 1, [(5, 6), (7, 8)], FileSlice(None, 0, 200_000)),
        codec.PartitionData(1, 1),
        codec.PartitionData(2, 0, 4, 4, 0, None, b"abc", (3, 33), (1, 2)),
        codec.PartitionData(3, 0, 4, 4, 0, []),
    ]
    frame = joined(encode(version, 5, 0, 1234, [(name, data), (name, data[1:2])]))
    (size,) = struct.unpack_from(">i", frame)
    assert size == len(frame) - 4
    correlation_id, response = protocol.decode_response(1, version, frame[4:])
    assert correlation_id == 5
    if version >= 7:
        assert (int(response.error_code), response.session_id) == (0, 1234)
    assert len(response.responses) == 2
    first, error, diverging, empty = response.responses[0].partitions
    assert bytes(first.records) == b"r" * 200_000
    assert (first.high_watermark, first.last_stable_offset) == (10, 9)
    aborted = [(a.producer_id, a.first_offset) for a in first.aborted_transactions]
    assert aborted == [(5, 6), (7, 8)]
    assert (int(error.error_code), error.high_watermark, bytes(error.records)) == (1, -1, b"")
    assert bytes(diverging.records) == b"abc"
    assert bytes(empty.records) == b""
    assert empty.aborted_transactions == ()
    if version >= 5:
        assert (first.log_start_offset, error.log_start_offset) == (1, -1)
    if version >= 12:
        epoch = diverging.diverging_epoch
        assert (epoch.epoch, epoch.end_offset) == (3, 33)
        leader = diverging.current_leader
        assert (leader.leader_id, leader.leader_epoch) == (1, 2)


@ENCODE
@pytest.mark.parametrize("version", VERSIONS)
def test_an_error_for_the_whole_request(encode, version):
    frame = joined(encode(version, 1, 70, 0, []))
    _, response = protocol.decode_response(1, version, frame[4:])
    assert response.responses == ()
    if version >= 7:
        assert int(response.error_code) == 70


@given(st.data(), st.sampled_from(list(VERSIONS)))
def test_both_kernels_read_damaged_requests_alike(data, version):
    body = bytearray(request_body(version, 4))
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    found = []
    for parse, _ in KERNELS.values():
        try:
            found.append(parse(memoryview(body), 0, version))
        except CorruptMessage:
            found.append(None)
    assert all(one == found[0] for one in found)
