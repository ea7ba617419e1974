"""A reason that names what a client sent arrives, however long that was."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

Code = grpc.StatusCode


@pytest.mark.parametrize("letter", ["x", "\N{GREEK SMALL LETTER OMEGA}", "%"])
def test_a_reason_that_names_something_long_arrives(rpc, letter: str) -> None:
    name = letter * 9_000
    for path, fields in (("Produce", {"payload": b"v"}), ("CreateTopic", {})):
        code, why = rpc.refusal(f"broker.Broker/{path}", topic=name, **fields)
        assert code in (Code.NOT_FOUND, Code.INVALID_ARGUMENT) and letter * 100 in why
    health = health_pb2_grpc.HealthStub(rpc.channel)
    with pytest.raises(grpc.RpcError) as refused:
        health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
    assert refused.value.code() is Code.NOT_FOUND and letter * 100 in refused.value.details()


def test_what_no_request_of_kafka_can_hold_is_refused_before_it_is_sent(rpc) -> None:
    """It would break the connection, and what became of it would be unknown."""
    for fields in ({"topic": "x" * 32_768}, {"topic": "t", "config": {"x" * 32_768: "1"}}):
        code, why = rpc.refusal("broker.Broker/CreateTopic", **fields)
        assert code is Code.INVALID_ARGUMENT and why.endswith(
            " has 32768 bytes: 32767 is the longest"
        )
