"""This node as a Kafka client of its cluster: requests to partitions' leaders, itself among them.

A connection is leased for one request at a time: responses leave a Kafka connection in the order
of the requests (semantics.md, rule 41), so a slow one would delay those behind it. Some connections
to each node are kept for the next request. Other nodes are reached at their listeners for nodes,
this node at its own first listener.

A request is retried within the caller's time limit while it cannot have been executed: there is no
leader, it moved, or no connection was made. Where the connection broke after the request was sent,
the caller gets NetworkException: its outcome is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kept.client.node_connection import NodeConnection
from kept.storage.errors import (
    FencedLeaderEpoch,
    KafkaStorageError,
    NetworkException,
    NotEnoughReplicas,
    NotLeaderOrFollower,
    OffsetNotAvailable,
    RetriableError,
    UnknownLeaderEpoch,
    UnknownTopicOrPartition,
)

if TYPE_CHECKING:
    from kept.client.protocol.messages import Values
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.metadata_log import Metadata
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.runtime.runtime import Runtime
    from kept.storage.types import TopicPartition

CLIENT_ID: Final = "kept-grpc"
KEPT_CONNECTIONS: Final = 8
"""To each node, between requests."""
CONNECT_S: Final = 2.0
UNKNOWN_TOPIC_GRACE_S: Final = 0.5
"""A topic that was just created may be unknown to a node for so long."""
BACKOFF_S: Final = 0.01
BACKOFF_MAX_S: Final = 0.25

Answer = TypeVar("Answer")


class NotReached(NetworkException):
    """No connection: no request was sent."""


_NOTHING_DONE: Final = (
    NotReached,
    NotLeaderOrFollower,
    FencedLeaderEpoch,
    UnknownLeaderEpoch,
    NotEnoughReplicas,
    OffsetNotAvailable,
    KafkaStorageError,
    UnknownTopicOrPartition,
)
"""Nothing was done, and a moment later it may be possible."""


@dataclass(eq=False, repr=False)
class ClusterClient:
    """See the module."""

    runtime: Runtime
    config: LiveConfig
    identity: NodeIdentity
    metadata: Metadata
    addresses: AddressBook

    def __post_init__(self) -> None:
        self._free: dict[int, list[NodeConnection]] = {}
        self._stopped = False

    def close(self) -> None:
        """Close free connections; leased ones are closed when their calls end."""
        self._stopped = True
        for connections in self._free.values():
            for connection in connections:
                connection.close()
        self._free.clear()

    # Who leads.

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has. Raises UnknownTopicOrPartition."""
        found = self.metadata.image.topics.get(topic)
        if found is None:
            raise UnknownTopicOrPartition(
                f"there is no topic {topic!r}; broker.Broker/CreateTopic makes one"
            )
        return len(found.partitions)

    async def await_topic(self, topic: str) -> None:
        """Wait a moment for a topic that another node may just have made; then go on as it is."""
        loop = self.runtime.loop
        end = loop.time() + (0.0 if self.config.current.alone else UNKNOWN_TOPIC_GRACE_S)
        while topic not in self.metadata.image.topics and loop.time() < end:
            await asyncio.sleep(BACKOFF_S)

    def leader(self, tp: TopicPartition) -> int:
        """The node that leads a partition. Raises UnknownTopicOrPartition, NotLeaderOrFollower."""
        count = self.partitions(tp.topic)
        if not 0 <= tp.partition < count:
            raise UnknownTopicOrPartition(
                f"topic {tp.topic!r} has no partition {tp.partition}; it has 0 to {count - 1}"
            )
        leader = self.metadata.image.topics[tp.topic].partitions[tp.partition].leader
        if leader < 0:
            raise NotLeaderOrFollower(f"{tp} has no leader now: its replicas are not available")
        return leader

    def _address(self, node_id: int) -> tuple[str, int]:
        if node_id != self.identity.node_id:
            found = self.addresses.node_address(node_id)
            if found is None:
                raise NotReached(f"nobody knows where node {node_id} is")
            return found
        return self.addresses.own_bound()

    # Calls.

    async def at_leader(
        self, tp: TopicPartition, call: Callable[[int], Awaitable[Answer]], patience_s: float
    ) -> Answer:
        """``call(leader's node id)``, again while that can help and do no harm.

        Raises what it raised last.
        """
        loop = self.runtime.loop
        end = loop.time() + patience_s
        pause = BACKOFF_S
        while True:
            try:
                return await call(self.leader(tp))
            except RetriableError as error:
                known = tp.topic in self.metadata.image.topics and (
                    tp.partition in range(self.partitions(tp.topic))
                )
                hopeless = isinstance(error, UnknownTopicOrPartition) and not known
                if not isinstance(error, _NOTHING_DONE) or hopeless or loop.time() + pause >= end:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, BACKOFF_MAX_S)

    async def call(
        self, node_id: int, api_key: int, version: int, values: Values, timeout_s: float
    ) -> Any:
        """One request; kio's typed response. Raises NotReached, NetworkException,
        RequestTimedOut.
        """
        async with self.lease(node_id) as connection:
            return await connection.call(api_key, version, values, timeout_s)

    @asynccontextmanager
    async def lease(self, node_id: int) -> AsyncIterator[NodeConnection]:
        """A connection for this caller alone. Raises NotReached."""
        connection = self._free_connection(node_id)
        if connection is None:
            connection = await self._open(node_id)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        free = self._free.setdefault(node_id, [])
        if self._stopped or connection.closed or len(free) >= KEPT_CONNECTIONS:
            connection.close()
        else:
            free.append(connection)

    def _free_connection(self, node_id: int) -> NodeConnection | None:
        free = self._free.get(node_id, [])
        while free:
            connection = free.pop()
            if not connection.closed:
                return connection
        return None

    async def _open(self, node_id: int) -> NodeConnection:
        host, port = self._address(node_id)
        try:
            return await NodeConnection.open(host, port, client_id=CLIENT_ID, timeout_s=CONNECT_S)
        except NetworkException as error:
            raise NotReached(f"node {node_id}: {error}") from error
