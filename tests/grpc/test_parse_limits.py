"""A message of very many headers or settings is refused before protobuf makes objects of them."""

from __future__ import annotations

import pytest

from kept.node.grpc.status_codes import MAX_ITEMS, parsed
from kept.node.proto import broker_pb2
from kept.storage.errors import InvalidRequest

HEADERS, CONFIG = b"\x2a\x00", b"\x22\x00"
"""An empty item of field 5 of ProduceRequest, and of field 4 of CreateTopicRequest."""


@pytest.mark.parametrize(
    ("kind", "item"),
    [(broker_pb2.ProduceRequest, HEADERS), (broker_pb2.CreateTopicRequest, CONFIG)],
)
def test_millions_of_empty_items_are_refused(kind, item) -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_ITEMS} items"):
        parsed(kind, item * 2_000_000)


def test_what_clients_send_is_parsed() -> None:
    headers = [broker_pb2.Header(key=f"h{number}", value=bytes(20)) for number in range(MAX_ITEMS)]
    request = broker_pb2.ProduceRequest(topic="t", payload=bytes(1 << 20), headers=headers)
    assert len(parsed(broker_pb2.ProduceRequest, request.SerializeToString()).headers) == MAX_ITEMS
    with pytest.raises(InvalidRequest, match=r"this is no broker\.ProduceRequest"):
        parsed(broker_pb2.ProduceRequest, b"\x0a\xff")
