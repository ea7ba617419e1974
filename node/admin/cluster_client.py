"""This node as a Kafka client of its cluster: the asynchronous shell of the client's operations.

It drives the same operations and calls as the blocking client (:mod:`kept.client.client`); a call
decides itself what an error means and when it goes again (:class:`kept.client.core.calls.Call`).
Who leads what is known from the metadata, so nobody is asked for it. Other nodes are reached at
their listeners for nodes, this node by a pair of sockets with the rights of a node: who asks was
authorized where the request came in.

A connection is leased for one request at a time: responses leave a Kafka connection in the order
of the requests (semantics.md, rule 41), so a slow one would delay those behind it. Some connections
to each node are kept for the next request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kept.client.admin.topics import first_error
from kept.client.core.broker_errors import NotReached
from kept.client.core.calls import Call, ToCoordinator, ToLeader, ToNode
from kept.client.core.leader_errors import offline_grace_ms
from kept.client.node_connection import NodeConnection
from kept.client.protocol.api_keys import ApiKey
from kept.node.runtime.tasks import gather_or_cancel
from kept.storage.errors import (
    KeptError,
    NetworkException,
    NotLeaderOrFollower,
    ThrottlingQuotaExceeded,
    UnknownTopicOrPartition,
    UnsupportedVersion,
)

if TYPE_CHECKING:
    from kept.client.admin.topics import Operation
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.runtime.runtime import Runtime

KEPT_CONNECTIONS: Final = 8
"""To each node, between requests."""
CONNECT_S: Final = 2.0
RESPONSE_S: Final = 10.0
"""A request that may be repeated is given up and sent again after so long."""
SLACK_S: Final = 5.0
"""For the response itself, on top of what a request says that the node may take."""
UNKNOWN_TOPIC_GRACE_S: Final = 0.5
"""A topic that was just created may be unknown to a node for so long."""
POLL_S: Final = 0.01
VERSIONS: Final[Mapping[int, int]] = {
    ApiKey.PRODUCE: 9,
    ApiKey.FETCH: 12,
    ApiKey.LIST_OFFSETS: 6,
    ApiKey.OFFSET_COMMIT: 9,
    ApiKey.OFFSET_FETCH: 8,
    ApiKey.FIND_COORDINATOR: 4,
    ApiKey.DESCRIBE_GROUPS: 5,
    ApiKey.LIST_GROUPS: 4,
    ApiKey.CREATE_TOPICS: 7,
    ApiKey.DELETE_TOPICS: 6,
    ApiKey.CREATE_PARTITIONS: 3,
    ApiKey.DESCRIBE_CONFIGS: 4,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: 1,
    ApiKey.LIST_TRANSACTIONS: 1,
    ApiKey.DESCRIBE_TRANSACTIONS: 0,
    ApiKey.ELECT_LEADERS: 2,
}
"""The last ones that name topics: any kept of the cluster serves them."""

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class ClusterClient:
    """Runs the client's operations against this node's cluster, on the node's loop."""

    runtime: Runtime
    config: LiveConfig
    identity: NodeIdentity
    metadata: MetadataLog
    addresses: AddressBook
    client_id: str
    connect_here: Callable[[], Awaitable[socket.socket]]

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
        image = self.metadata.image.topics.get(topic)
        if image is None:
            raise UnknownTopicOrPartition(
                f"there is no topic {topic!r}; broker.Broker/CreateTopic makes one"
            )
        return len(image.partitions)

    async def await_topic(self, topic: str) -> None:
        """Wait a moment for a topic that another node may just have made; then go on as it is."""
        loop = self.runtime.loop
        end = loop.time() + (0.0 if self.config.current.alone else UNKNOWN_TOPIC_GRACE_S)
        while topic not in self.metadata.image.topics and loop.time() < end:
            await asyncio.sleep(POLL_S)

    def check_partition(self, topic: str, partition: int) -> None:
        """Raises UnknownTopicOrPartition."""
        count = self.partitions(topic)
        if not 0 <= partition < count:
            raise UnknownTopicOrPartition(
                f"topic {topic!r} has no partition {partition}; it has 0 to {count - 1}"
            )

    # Calls.

    async def run(
        self,
        operation: Operation[T],
        *,
        patience_s: float,
        node: int | None = None,
        retry: bool = True,
    ) -> T:
        """Drive an operation to its result; each of its calls may take ``patience_s``, and is
        tried once where ``retry`` is off.

        ``node`` gets the calls that go to no leader and to no node by its id; without it this node
        does. Raises what the operation or the last try of a call does.
        """
        try:
            calls = next(operation)
            while True:
                for call in calls:
                    call.timeout_ms, call.patient = int(patience_s * 1000), retry
                try:
                    responses = await gather_or_cancel(self.call(call, node) for call in calls)
                except KeptError as error:
                    calls = operation.throw(error)
                else:
                    calls = operation.send(responses)
        except StopIteration as end:
            result: T = end.value
            return result

    async def call(self, call: Call, node: int | None = None) -> Any:
        """Run one call: kio's response, or its error raised. Who is over a quota is not waited for:
        ThrottlingQuotaExceeded says when to come again.
        """
        call.begin(self._now_ms())
        while True:
            if isinstance(call.route, ToLeader):
                self.check_partition(call.route.topic, call.route.partition)
            try:
                return await self._send(call, node)
            except ThrottlingQuotaExceeded:
                raise
            except KeptError as error:
                if not (call.patient and call.is_retried_after(error)):
                    raise
                now_ms = self._now_ms()
                call.back_off(error, now_ms, offline_grace_ms(len(self.metadata.image.brokers)))
                if call.deadline_ms <= call.not_before_ms:
                    raise
                await asyncio.sleep((call.not_before_ms - now_ms) / 1000)

    async def _send(self, call: Call, node: int | None) -> Any:
        """One try. Raises NotReached where nothing was sent, else NetworkException."""
        version = VERSIONS.get(call.api_key)
        if version is None:  # Apache Kafka's alone, for which operations have another way
            raise UnsupportedVersion(f"{call.name}: nodes of kept are not asked for it")
        node_id = await self._node_of(call, node)
        values = call.values(version) if callable(call.values) else call.values
        left_s = (call.deadline_ms - self._now_ms()) / 1000 + SLACK_S
        timeout_s = min(left_s, RESPONSE_S) if call.repeatable else left_s
        async with self._lease(node_id) as connection:
            try:
                response = await connection.call(call.api_key, version, values, timeout_s)
            except NetworkException as broken:
                raise NetworkException(
                    f"{call.name}: the connection to node {node_id} broke after the request was "
                    f"sent: it may have been executed, and is twice if it is sent again ({broken})"
                ) from broken
        error = call.check(response) if call.check is not None else None
        if isinstance(error, ThrottlingQuotaExceeded):
            error.throttle_ms = response.throttle_time // timedelta(milliseconds=1)
        if error is not None:
            raise error
        return response

    async def _node_of(self, call: Call, otherwise: int | None) -> int:
        route = call.route
        if isinstance(route, ToNode):
            return route.node_id
        if isinstance(route, ToCoordinator) and otherwise is None:
            return await self._coordinator(route, call)
        if not isinstance(route, ToLeader):
            return self.identity.node_id if otherwise is None else otherwise
        leader = self.metadata.image.topics[route.topic].partitions[route.partition].leader
        if leader < 0:
            raise NotLeaderOrFollower(
                f"{route.topic}:{route.partition} has no leader now: its replicas are not available"
            )
        return leader

    async def _coordinator(self, route: ToCoordinator, needed_by: Call) -> int:
        """The node that coordinates a group or a transactional id. Raises as :meth:`call`."""
        what = f"FindCoordinator of {route.key}"
        call = Call(
            ApiKey.FIND_COORDINATOR,
            {"key_type": route.kind, "coordinator_keys": (route.key,)},
            what=what,
            timeout_ms=max(1, needed_by.deadline_ms - self._now_ms()),
            check=lambda response: first_error(response.coordinators, lambda _: what),
        )
        (found,) = (await self.call(call)).coordinators
        return int(found.node_id)

    def _now_ms(self) -> int:
        return int(self.runtime.loop.time() * 1000)

    @asynccontextmanager
    async def _lease(self, node_id: int) -> AsyncIterator[NodeConnection]:
        """A connection for this caller alone. Raises NotReached."""
        free = self._free.setdefault(node_id, [])
        connection = None
        while connection is None and free:
            connection = None if free[-1].closed else free[-1]
            free.pop()
        if connection is None:
            connection = await self._open(node_id)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if self._stopped or connection.closed or len(free) >= KEPT_CONNECTIONS:
            connection.close()
        else:
            free.append(connection)

    async def _open(self, node_id: int) -> NodeConnection:
        if node_id == self.identity.node_id:
            here = await self.connect_here()
            return await NodeConnection.from_socket(
                here, where="this node", client_id=self.client_id
            )
        address = self.addresses.node_address(node_id)
        if address is None:
            raise NotReached(f"nobody knows where node {node_id} is")
        try:
            return await NodeConnection.open(
                *address,
                client_id=self.client_id,
                timeout_s=CONNECT_S,
                tls=self.addresses.node_tls(),
            )
        except NetworkException as error:
            raise NotReached(f"node {node_id}: {error}") from error
