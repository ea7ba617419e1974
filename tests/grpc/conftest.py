"""gRPC clients of real nodes, by grpcio: without generated stubs, as any client could be."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kept.node.grpc import grpc_options  # noqa: F401 - before grpc
from kept.node.proto import broker_pb2

# isort: split
import grpc

DEADLINE_S = 60.0


class Grpc:
    """One channel: ``call("broker.Broker/Produce", topic="t", …)``."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.insecure_channel(
            target,
            options=(
                ("grpc.enable_http_proxy", 0),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
            ),
        )

    def method(self, path, **fields):
        method = path.removeprefix("broker.Broker/")
        found = broker_pb2.DESCRIPTOR.services_by_name["Broker"].methods_by_name[method]
        request = getattr(broker_pb2, found.input_type.name)(**fields)
        reply = getattr(broker_pb2, found.output_type.name)
        make = self.channel.unary_stream if found.server_streaming else self.channel.unary_unary
        ready = make(
            f"/{path}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        return ready, request

    def call(self, path, timeout=DEADLINE_S, **fields):
        ready, request = self.method(path, **fields)
        return ready(request, timeout=timeout, wait_for_ready=True)

    def refusal(self, path, **fields):
        """(status, message) of a call that must fail."""
        with pytest.raises(grpc.RpcError) as caught:
            found = self.call(path, **fields)
            if not hasattr(found, "DESCRIPTOR"):
                list(found)
        return caught.value.code(), caught.value.details()

    def produce(self, topic, **fields):
        return self.call("broker.Broker/Produce", topic=topic, **fields)

    def consume(self, topic, **fields):
        return self.call("broker.Broker/Consume", topic=topic, **fields)

    def close(self) -> None:
        self.channel.close()


@pytest.fixture(scope="module")
def dial() -> Iterator:
    """A function from a port to a :class:`Grpc`."""
    opened = []

    def dial(port):
        opened.append(Grpc(f"127.0.0.1:{port}"))
        return opened[-1]

    yield dial
    for one in opened:
        one.close()


@pytest.fixture
def rpc(kept_broker, dial):
    """gRPC with the session's node."""
    return dial(kept_broker.port())


@pytest.fixture
def wait_until():
    def wait_until(condition, what="it"):
        deadline = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what} did not happen"
            time.sleep(0.01)
        return found

    return wait_until
