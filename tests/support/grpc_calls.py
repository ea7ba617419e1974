"""Calls of gRPC with a login in their metadata, without generated stubs."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kept.node.grpc import grpc_options  # noqa: F401 - before grpc
from kept.node.proto import broker_pb2

# isort: split
import grpc
import grpc.aio


def basic(user: str, password: str) -> str:
    """A header ``authorization``."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@asynccontextmanager
async def calling(
    port: int, method: str, request: Any, login: str = "", credentials: Any = None
) -> AsyncIterator[Any]:
    """A call under way; with ``credentials`` in TLS, to a node that names localhost."""
    found = broker_pb2.DESCRIPTOR.services_by_name["Broker"].methods_by_name[method]
    reply = getattr(broker_pb2, found.output_type.name)
    options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
    target = f"127.0.0.1:{port}"
    channel = grpc.aio.insecure_channel(target, options)
    if credentials is not None:
        named = ("grpc.ssl_target_name_override", "localhost")
        channel = grpc.aio.secure_channel(target, credentials, (*options, named))
    async with channel:
        make = channel.unary_stream if found.server_streaming else channel.unary_unary
        ready = make(
            f"/broker.Broker/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        yield ready(request, metadata=(("authorization", login),) if login else (), timeout=60)


async def call(
    port: int, method: str, request: Any, login: str = "", credentials: Any = None
) -> Any:
    """The reply, or the status that ends the call."""
    async with calling(port, method, request, login, credentials) as under_way:
        try:
            return await under_way
        except grpc.aio.AioRpcError as error:
            return error.code()
