"""A record that is appended at most once, by a leader that is not who it seems."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from socket import socket, socketpair
from typing import Any, cast
from uuid import UUID

import pytest

from kept.client.produce import AppendUncertain
from kept.client.protocol.messages import decode_request, encode_response
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import PartitionRecord, TopicRecord
from kept.node.admin.cluster_client import VERSIONS, ClusterClient
from kept.node.admin.records.partition_records import AppendResult, NewRecord, append
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.runtime.runtime import Runtime
from kept.node.security.client_usage import UNMETERED
from kept.storage.disk import Disk
from kept.storage.records import records
from kept.storage.types import TopicPartition
from tests.support.replicas import FixedMetadata, live_config

PRODUCE = 0
NOT_LEADER_OR_FOLLOWER, UNKNOWN_TOPIC_OR_PARTITION, KAFKA_STORAGE_ERROR = 6, 3, 56
HEADER = 8 + len("a-test") + 2 + 1
"""Bytes before a request's body: api, version, correlation id, client id, no tags."""

REFUSALS = [NOT_LEADER_OR_FOLLOWER, KAFKA_STORAGE_ERROR, UNKNOWN_TOPIC_OR_PARTITION]
Answer = tuple[int, int]
"""Error code and base offset."""


class Leader:
    """Answers Produce over a pair of sockets, one answer after another, the last one for ever;
    ``taken`` are the values of the records that came.
    """

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.taken: list[bytes | None] = []
        self.serving: set[asyncio.Task[None]] = set()

    async def connect(self) -> socket:
        ours, theirs = socketpair()
        self.serving.add(asyncio.get_running_loop().create_task(self._serve(theirs)))
        return ours

    async def _serve(self, theirs: socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                frame = await reader.readexactly(size)
                writer.write(self._answer(frame))
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    def _answer(self, frame: bytes) -> bytes:
        key, version, correlation = struct.unpack_from(">hhi", frame)
        assert (key, version) == (PRODUCE, VERSIONS[PRODUCE])
        (topic,) = decode_request(key, version, frame, HEADER).topic_data
        (data,) = topic.partition_data
        self.taken += [record.value for record in records(bytes(data.records))]
        code, offset = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        result = {
            "index": data.index,
            "error_code": code,
            "base_offset": offset,
            "record_errors": (),
        }
        answer = {"responses": [{"name": topic.name, "partition_responses": [result]}]}
        return encode_response(key, version, correlation, answer)


def appended(leader: Leader) -> AppendResult:
    async def run() -> AppendResult:
        topic_id, metadata = UUID(int=1), FixedMetadata()
        partition = PartitionRecord(topic_id, 0, (0,), (0,), 0, 0, 0)
        metadata.image = Image().apply([TopicRecord("t", topic_id), partition])[0]
        client = ClusterClient(
            Runtime(Disk()),
            live_config(),
            NodeIdentity(0),
            cast("Any", metadata),
            addresses=cast("Any", None),
            client_id="a-test",
            connect_here=cast("Callable[[], Any]", leader.connect),
        )
        try:
            record = NewRecord(7, None, b"v", ())
            return await append(client, TopicPartition("t", 0), record, 5.0, UNMETERED)
        finally:
            client.close()
            await asyncio.wait(leader.serving)

    return asyncio.run(run())


@pytest.mark.parametrize("code", REFUSALS)
def test_what_a_leader_appended_before_it_led_no_longer_is_not_sent_again(code):
    """The next leader may have it: it would be there twice."""
    leader = Leader((code, 41), (0, 42))
    with pytest.raises(AppendUncertain, match="at offset 41, and may have been written"):
        appended(leader)
    assert leader.taken == [b"v"]


@pytest.mark.parametrize("code", REFUSALS)
def test_what_a_node_did_not_append_is_sent_again(code):
    leader = Leader((code, -1), (0, 42))
    assert appended(leader) == AppendResult(42, 7)
    assert leader.taken == [b"v", b"v"], "of which the first was refused"
