"""Kafka requests from this node to brokers, by their ids; those to itself are calls.

Each purpose has its connections, one to a node, so that what waits long at a leader holds up
nothing else. They are named ``kept-<purpose>-<node>-<incarnation>-<n>``: ``n`` grows with each
connection to a node, and the connection before it is closed first.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from kio.static.constants import EntityType

from kept.client.node_connection import NodeConnection
from kept.client.protocol import messages as protocol
from kept.client.protocol.api_keys import ApiKey
from kept.node.kafka.api import RequestContext
from kept.node.security.session import node_session
from kept.storage.errors import NetworkException, RequestTimedOut

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.node_identity import NodeIdentity


class Handlers(Protocol):
    """What serves requests on this node."""

    async def complete(self, context: RequestContext, request: Any) -> Any:
        """The values of a response."""
        ...


class NodeRequests:
    """See the module. ``handlers`` is to be set before the first call."""

    handlers: Handlers

    def __init__(
        self,
        purpose: str,
        config: LiveConfig,
        identity: NodeIdentity,
        incarnation: UUID,
        addresses: AddressBook,
    ) -> None:
        self._name = f"kept-{purpose}-{identity.node_id}-{incarnation.hex}"
        self._config = config
        self._identity = identity
        self._addresses = addresses
        self._connections: dict[int, NodeConnection] = {}
        self._opened: dict[int, int] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._closed = False

    async def call(
        self, node_id: int, api_key: ApiKey, version: int, values: dict[str, Any], timeout_s: float
    ) -> Any:
        """The typed response of a broker. Raises NetworkException, RequestTimedOut; the connection
        is closed then, since the request may still be served.
        """
        if node_id == self._identity.node_id:
            return await self._call_self(api_key, version, values)
        connection = await self._connection(node_id)
        try:
            return await connection.call(api_key, version, values, timeout_s)
        except (NetworkException, RequestTimedOut):
            connection.close()
            raise

    async def _call_self(self, api_key: ApiKey, version: int, values: dict[str, Any]) -> Any:
        request = protocol.build(
            protocol.message_type(api_key, version, EntityType.request), values
        )
        session = node_session(self._config.current.listeners[0].name)
        context = RequestContext(api_key, version, self._name, session)
        response = await self.handlers.complete(context, request)
        return protocol.build(
            protocol.message_type(api_key, version, EntityType.response), response
        )

    async def _connection(self, node_id: int) -> NodeConnection:
        async with self._locks.setdefault(node_id, asyncio.Lock()):
            known = self._connections.get(node_id)
            if known is not None and not known.closed:
                return known
            address = self._addresses.node_address(node_id)
            if address is None or self._closed:
                raise NetworkException(f"node {node_id}: no address is known, or this node stops")
            number = self._opened[node_id] = self._opened.get(node_id, 0) + 1
            setup_s = self._config.current.socket_connection_setup_timeout_ms / 1000
            connection = await NodeConnection.open(
                *address,
                client_id=f"{self._name}-{number}",
                timeout_s=setup_s,
                tls=self._addresses.node_tls(),
            )
            self._connections[node_id] = connection
            return connection

    async def close(self) -> None:
        """Ask nobody any more."""
        self._closed = True
        for connection in self._connections.values():
            connection.close()
