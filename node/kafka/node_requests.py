"""Kafka requests from this node to other brokers, by their ids.

Each purpose has its connections, one to a node, so that what waits long at a leader holds up
nothing else. They are named ``kept-<purpose>-<node>-<incarnation>-<n>``: ``n`` grows with each
connection to a node, and the connection before it is closed first.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kept.client.node_connection import NodeConnection
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import NetworkException, RequestTimedOut

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.node_identity import NodeIdentity


class NodeRequests:
    """Sends Kafka requests to other brokers, by their ids."""

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
        connection = await self._connection(node_id)
        try:
            return await connection.call(api_key, version, values, timeout_s)
        except (NetworkException, RequestTimedOut):
            connection.close()
            raise

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
