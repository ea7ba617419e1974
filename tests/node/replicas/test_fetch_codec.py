"""The follower's Fetch codec against the leader's, and against kio."""

from __future__ import annotations

import struct
from uuid import UUID

import pytest
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.node.kafka.codec import fetch as leader
from kept.node.replicas import fetch_codec
from kept.replication.fetch_messages import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    PartitionRequest,
    PartitionResponse,
)
from kept.storage.errors import CorruptMessage
from kept.storage.types import TopicPartition

A, B = UUID(int=1), UUID(int=2)
TOPICS = {
    A.bytes: {0: TopicPartition("a", 0), 3: TopicPartition("a", 3)},
    B.bytes: {1: TopicPartition("b", 1)},
}


def asked(topic: str, number: int, topic_id: UUID, offset: int) -> PartitionRequest:
    return PartitionRequest(TopicPartition(topic, number), topic_id, 7, offset, 6, 2, 1 << 20)


REQUEST = FetchRequest(
    session_id=9,
    session_epoch=4,
    max_wait_ms=500,
    min_bytes=1,
    max_bytes=10 << 20,
    partitions=(asked("a", 0, A, 100), asked("b", 1, B, 5), asked("a", 3, A, 0)),
    forgotten=((TopicPartition("a", 8), A), (TopicPartition("a", 9), A)),
)


def response(**fields: object) -> memoryview:
    data = leader.PartitionData(0, 0, 50, 49, 1, **fields)  # type: ignore[arg-type]
    segments = leader.encode(fetch_codec.VERSION, 77, 0, 9, [(A.bytes, [data])])
    return memoryview(b"".join(bytes(part) for part in segments))[4:]  # type: ignore[arg-type]


def test_a_leader_reads_what_a_follower_writes() -> None:
    body = fetch_codec.encode_request(REQUEST, replica_id=2, broker_epoch=31)
    read = leader.parse(memoryview(body), 0, fetch_codec.VERSION)
    assert read.replica_id == 2
    assert (read.session_id, read.session_epoch) == (9, 4)
    assert (read.max_wait_ms, read.min_bytes, read.max_bytes) == (500, 1, 10 << 20)
    assert read.topics == [
        (
            A.bytes,
            [
                FetchPartition(0, 100, 1 << 20, 7, 6, 2),
                FetchPartition(3, 0, 1 << 20, 7, 6, 2),
            ],
        ),
        (B.bytes, [FetchPartition(1, 5, 1 << 20, 7, 6, 2)]),
    ]
    assert read.forgotten == [(A.bytes, [8, 9])]


def test_kio_reads_the_same_request() -> None:
    body = fetch_codec.encode_request(REQUEST, replica_id=2, broker_epoch=31)
    message = protocol.decode_request(fetch_codec.API_KEY, fetch_codec.VERSION, body, 0)
    assert message.replica_state.replica_id == 2
    assert message.replica_state.replica_epoch == 31
    assert message.topics[1].partitions[0].fetch_offset == 5
    cls = protocol.message_type(fetch_codec.API_KEY, fetch_codec.VERSION, EntityType.request)
    assert protocol.encode(protocol.decode(cls, body)[0]) == body


def test_a_request_for_one_partition_is_read_like_any_other() -> None:
    one = REQUEST._replace(partitions=REQUEST.partitions[1:2], forgotten=())
    body = fetch_codec.encode_request(one, replica_id=2, broker_epoch=31)
    wanted = FetchPartition(1, 5, 1 << 20, 7, 6, 2)
    assert leader.parse(memoryview(body), 0, fetch_codec.VERSION) == leader.FetchRequest(
        2, 500, 1, 10 << 20, 0, 9, 4, [(B.bytes, [wanted])], [], b"", 31
    )
    cls = protocol.message_type(fetch_codec.API_KEY, fetch_codec.VERSION, EntityType.request)
    assert protocol.encode(protocol.decode(cls, body)[0]) == body


@pytest.mark.parametrize("records", [None, b"x" * 100, b"x" * 300])
def test_an_answer_about_one_partition_is_read_like_any_other(records: bytes | None) -> None:
    data = leader.PartitionData(3, 6, 50, 49, 1, records=records)
    segments = leader.encode(fetch_codec.VERSION, 77, 70, 9, [(A.bytes, [data])])
    frame = memoryview(b"".join(bytes(part) for part in segments))[4:]  # type: ignore[arg-type]
    tp = TopicPartition("a", 3)
    read = PartitionResponse(tp, 6, 50, 49, 1, None, None, records or b"")
    assert fetch_codec.decode_response(frame, TOPICS) == FetchResponse(70, 9, (read,))
    two = leader.encode(fetch_codec.VERSION, 77, 70, 9, [(A.bytes, [data]), (B.bytes, [])])
    frame = memoryview(b"".join(bytes(part) for part in two))[4:]  # type: ignore[arg-type]
    assert fetch_codec.decode_response(frame, TOPICS) == FetchResponse(70, 9, (read,))


def test_records_are_a_view_and_hints_are_read() -> None:
    frame = response(
        records=b"x" * 300,
        diverging=(5, 40),
        current_leader=(3, 8),
        aborted=[(1, 2), (3, 4)],
    )
    (answer,) = fetch_codec.decode_response(frame, TOPICS).partitions
    assert answer.tp == TopicPartition("a", 0)
    assert (answer.high_watermark, answer.last_stable_offset, answer.log_start_offset) == (
        50,
        49,
        1,
    )
    assert answer.diverging == (5, 40)
    assert answer.current_leader == (3, 8)
    assert bytes(answer.records) == b"x" * 300
    assert answer.records.obj is frame.obj  # type: ignore[union-attr]


def test_what_is_tagged_of_one_partition_is_read() -> None:
    frame = response(records=b"x" * 9, diverging=(5, 40))
    (answer,) = fetch_codec.decode_response(frame, TOPICS).partitions
    assert (answer.diverging, bytes(answer.records)) == ((5, 40), b"x" * 9)


def test_an_empty_answer_and_its_session() -> None:
    segments = leader.encode(fetch_codec.VERSION, 1, 70, 0, [])
    response = memoryview(segments[0])[4:]  # type: ignore[arg-type]
    answer = fetch_codec.decode_response(response, TOPICS)
    assert (answer.error, answer.session_id, answer.partitions) == (70, 0, ())


@pytest.mark.parametrize("cut", range(4, 100, 7))
def test_a_response_that_ends_early_is_refused(cut: int) -> None:
    whole = response(records=b"x" * 90)
    with pytest.raises(CorruptMessage):
        fetch_codec.decode_response(whole[:cut], TOPICS)


def test_a_partition_that_nobody_asked_for_is_refused() -> None:
    with pytest.raises(CorruptMessage, match="not asked for"):
        fetch_codec.decode_response(response(), {B.bytes: TOPICS[B.bytes]})


def test_no_partitions_is_a_short_request() -> None:
    body = fetch_codec.encode_request(REQUEST._replace(partitions=(), forgotten=()), 1, 2)
    assert len(body) < 64
    assert struct.unpack_from(">i", body) == (500,)
