"""The gRPC server of the clients' port, on a unix socket that :mod:`kept.node.grpc.lazy_server`
joins.

Importing this imports gRPC. Limits: ``kept.grpc.max.requests`` calls at a time, streams included
(:mod:`kept.node.grpc.callers` says whose place one more takes), ``kept.grpc.request.max.bytes`` for
a message, five seconds for a connection to speak HTTP/2, ``connections.max.idle.ms`` without a
call; a peer that answers no ping is gone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import kept.node.admin.services  # noqa: F401 - takes long; this module is imported in a thread
from kept.node.grpc import broker, grpc_options, health
from kept.node.grpc.call_authorizer import CallAuthorizer
from kept.node.grpc.reflection import Symbols
from kept.node.grpc.socket_directory import PrivateServer
from kept.node.security.client_usage import GRPC_CLIENT_ID, ClientUsages

# isort: split
import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

if TYPE_CHECKING:
    from kept.node.admin.services import AdminServices
    from kept.node.config.node_config import NodeConfig
    from kept.node.grpc.callers import Callers

SOCKET: Final = "clients"
KEEPALIVE_MS: Final = 60_000
"""A connection on which nothing comes for so long is asked for a sign of life."""
KEEPALIVE_TIMEOUT_MS: Final = 20_000
MIN_PING_MS: Final = 5_000
"""A client that pings more often is sent away (GOAWAY, too many pings)."""
UNLIMITED: Final = -1


class GrpcServer:
    """Serves gRPC on a unix socket."""

    def __init__(self, services: AdminServices, callers: Callers) -> None:
        self._services = services
        self._client = services.new_client(client_id=GRPC_CLIENT_ID)
        self._private = PrivateServer(SOCKET)
        self._callers = callers

    @property
    def path(self) -> str:
        """Of the unix socket."""
        return self._private.path

    async def start(self) -> None:
        """Answer. Raises MachineError."""
        services = self._services
        server = grpc.aio.server(
            options=options(services.config.current),
            interceptors=[CallAuthorizer(self._callers, services.config)],
        )
        clients = broker.Broker(
            runtime=services.runtime,
            metadata=services.metadata,
            inflating=services.inflating,
            client=self._client,
            new_client=partial(services.new_client, client_id=GRPC_CLIENT_ID),
            callers=self._callers,
            usages=ClientUsages(services.quotas, services.counters, GRPC_CLIENT_ID),
        )
        node_health = health.Health(services.health, services.readiness, (broker.NAME,))
        handlers = (clients.handlers(), node_health.handlers())
        server.add_generic_rpc_handlers(handlers)
        listed = (broker.NAME, health.NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(listed, server, Symbols())
        await self._private.start(server)

    async def ended(self) -> None:
        """Wait until it answers no more, for whatever reason."""
        await self._private.ended()

    async def stop(self) -> None:
        """Answer no more; calls under way are cancelled."""
        await self._private.stop()
        self._client.close()


def options(config: NodeConfig) -> tuple[tuple[str, Any], ...]:
    """gRPC's, from the node's settings."""
    idle_ms = config.connections_max_idle_ms
    return (
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_MS),
        ("grpc.server_handshake_timeout_ms", grpc_options.HANDSHAKE_MS),
        ("grpc.max_concurrent_streams", config.grpc_max_requests),
        ("grpc.max_receive_message_length", config.grpc_request_max_bytes),
        ("grpc.max_send_message_length", UNLIMITED),
        ("grpc.so_reuseport", 0),
        *((("grpc.max_connection_idle_ms", min(idle_ms, 2**31 - 1)),) if idle_ms >= 0 else ()),
    )
