"""A message that is encoded element by element has the bytes that kio gives it whole."""

from __future__ import annotations

import struct

import pytest
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.node.kafka.api import APIS
from kept.storage.errors import InvariantViolation
from tests.client.protocol.messages import sample

SERVED = [
    (api.key, version)
    for api in APIS
    for version in range(max(api.min_version, api.refused_below), api.max_version + 1)
]


def test_every_response_has_kios_bytes() -> None:
    for key, version in SERVED:
        cls = protocol.message_type(key, version, EntityType.response)
        for values in (sample(cls), {**sample(cls), "topics": [], "groups": ()}):
            body = protocol.encode(protocol.build(cls, values))
            tags = b"\0" if protocol.header_is_flexible(cls) and key != 18 else b""
            frame = struct.pack(">ii", len(body) + 4 + len(tags), 7) + tags + body
            assert protocol.encode_response(key, version, 7, values) == frame, (key, version)
            assert protocol.encode_response(key, version, 7, body) == frame


def test_every_request_has_kios_bytes() -> None:
    for key, version in SERVED:
        cls = protocol.message_type(key, version, EntityType.request)
        values = sample(cls)
        whole = protocol.encode(protocol.build(cls, values))
        assert protocol.request_body(key, version, values) == whole, (key, version)


def test_it_pauses_after_each_element_on_all_levels() -> None:
    partitions = [{"partition_index": n, "error_code": 0} for n in range(10)]
    values = {"topics": [{"name": "t", "partitions": partitions}] * 3}
    assert len(list(protocol.response_steps(8, 8, 1, values))) == 3 * 10 + 3


def test_a_missing_field_is_a_bug_of_ours() -> None:
    with pytest.raises(InvariantViolation, match="needs topics"):
        protocol.encode_response(8, 8, 1, {})


def test_a_refusal_of_the_whole_request_can_be_encoded_wherever_there_is_room_for_one() -> None:
    refused = 0
    for key, version in SERVED:
        values = protocol.refused(key, version, 42, "why")
        if values is None:
            continue
        refused += 1
        response = protocol.decode_response(
            key, version, protocol.encode_response(key, version, 1, values)[4:]
        )[1]
        assert int(response.error_code) == 42
    assert refused > 50
    assert protocol.refused(19, 7, 42, "why") is None  # CreateTopics: each topic has its own
