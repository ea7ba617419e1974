"""``broker.Broker``: topics and records for whoever speaks gRPC (``node/proto/broker.proto``).

Deadlines are the caller's; a little before one ends, a call that can't be done is answered with the
reason. A stream of records is written as fast as its reader takes them and no faster. What a
cancelled call had sent to a leader may still be appended.

Quotas of clients hold (:mod:`kept.node.security.client_usage`): a call of whoever is over one of
his waits, and so does each further fetch of a stream. Where that takes longer than the call may, it
is refused at once with RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.client.admin.topics import NewTopic, create_topics_call
from kept.client.consume.positions import EARLIEST
from kept.client.partitioner import partition_for
from kept.client.protocol.bounds import check_string
from kept.node.admin.records.partition_records import NewRecord, Reader, append
from kept.node.grpc.status_codes import Handler, with_statuses
from kept.node.proto import broker_pb2
from kept.storage.errors import InvalidRequest, NetworkException
from kept.storage.types import MAX_INT32, TopicPartition

# isort: split
import grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from kept.node.admin.cluster_client import ClusterClient
    from kept.node.grpc.callers import Callers
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.runtime.memory_budget import BudgetShare
    from kept.node.runtime.runtime import Runtime
    from kept.node.security.client_usage import ClientUsage, ClientUsages
    from kept.node.security.session import Session
    from kept.storage.records import Record

    Metered = Callable[[Any, Any, ClientUsage], Coroutine[Any, Any, Any]]

NAME: Final = "broker.Broker"
DEFAULT: Final = -1
MAX_INT16: Final = 2**15 - 1
"""Kafka's replication factor is an int16."""
PATIENCE_S: Final = 30.0
"""Of a caller that sets no deadline, as ``request.timeout.ms`` of Kafka's clients."""
PATIENCE_SHARE: Final = 0.9
"""Of a caller's deadline: the rest is for telling what was wrong."""
MAX_PATIENCE_S: Final = 3600.0
MAX_TIMESTAMP: Final = 1 << 60


@dataclass(eq=False, repr=False, kw_only=True)
class Broker:
    """The service of one node."""

    runtime: Runtime
    metadata: MetadataLog
    inflating: BudgetShare
    client: ClusterClient
    new_client: Callable[[Session], ClusterClient]
    """One that asks in the name of a session; whoever makes it closes it."""
    callers: Callers
    usages: ClientUsages

    def __post_init__(self) -> None:
        self._sticky = itertools.count()

    def handlers(self) -> Any:
        """For a gRPC server."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        pb = broker_pb2
        return grpc.method_handlers_generic_handler(
            NAME,
            {
                "CreateTopic": unary(
                    with_statuses(self._metered(self._create_topic), pb.CreateTopicRequest),
                    None,
                    pb.CreateTopicResponse.SerializeToString,
                ),
                "Produce": unary(
                    with_statuses(self._metered(self._produce), pb.ProduceRequest),
                    None,
                    pb.ProduceResponse.SerializeToString,
                ),
                "Consume": stream(
                    with_statuses(self._metered(self._consume), pb.ConsumeRequest),
                    None,
                    pb.ConsumeResponse.SerializeToString,
                ),
            },
        )

    def _caller(self, context: Any) -> Session:
        """Who makes a call. Raises NetworkException for one whose connection is closed."""
        session = self.callers.session(context.peer())
        if session is None:
            raise NetworkException("the connection of this call is closed")
        return session

    def _metered(self, serve: Metered) -> Handler:
        """A handler that is given the usage of whoever calls; its time on the loop is his."""

        async def handle(request: Any, context: Any) -> Any:
            usage = self.usages.of(self._caller(context))
            return await usage.run(serve(request, context, usage))

        return handle

    async def _create_topic(self, request: Any, context: Any, usage: ClientUsage) -> Any:
        """In the name of whoever calls, as a Kafka client: the controller has his rights, his
        quotas and the audit log.
        """
        name = _named(request.topic)
        patience_s = patience(context)
        await usage.admit("request", patience_s)
        for what, most in (("partitions", MAX_INT32), ("replication_factor", MAX_INT16)):
            if not 0 <= getattr(request, what) <= most:
                raise InvalidRequest(
                    f"{what} is {getattr(request, what)}: 1 to {most}, or 0 for the node's default"
                )
        for setting in request.config:
            check_string("a setting's name", setting)
        new = NewTopic(
            name,
            request.partitions or DEFAULT,
            request.replication_factor or DEFAULT,
            dict(request.config),
        )
        call = create_topics_call([new], int(patience_s * 1000), validate_only=False)
        call.at_most_once = True
        client = self.new_client(self._caller(context))
        try:
            (made,) = (await client.call(call)).topics
        finally:
            client.close()
        # Whoever may not describe its settings is told -1, as in Kafka.
        return broker_pb2.CreateTopicResponse(
            topic=name,
            partitions=max(0, int(made.num_partitions)),
            replication_factor=max(0, int(made.replication_factor)),
        )

    async def _produce(self, request: Any, context: Any, usage: ClientUsage) -> Any:
        name = _named(request.topic)
        key = request.key if request.HasField("key") else None
        value = request.payload if request.HasField("payload") else None
        if value is None and key is None:
            raise InvalidRequest(
                "payload is missing: without a payload and with a key it would be a tombstone, and "
                "there is no key either"
            )
        timestamp = request.timestamp if request.HasField("timestamp") else self.runtime.now_ms()
        if not 0 <= timestamp < MAX_TIMESTAMP:
            raise InvalidRequest(f"timestamp {timestamp} is not in milliseconds since 1970")
        await usage.admit("produce", patience(context))
        await self.client.await_topic(name)
        partition = self._partition(request, name, key)
        record = NewRecord(timestamp, key, value, _headers(request.headers))
        tp = TopicPartition(name, partition)
        done = await append(self.client, tp, record, patience(context), usage)
        return broker_pb2.ProduceResponse(
            offset=done.offset, partition=partition, timestamp=done.timestamp
        )

    def _partition(self, request: Any, name: str, key: bytes | None) -> int:
        if request.HasField("partition"):
            return int(request.partition)
        return partition_for(key, self.client.partitions(name), next(self._sticky))

    async def _consume(self, request: Any, context: Any, usage: ClientUsage) -> None:
        tp = TopicPartition(_named(request.topic), request.partition)
        reader = Reader(self.runtime, self.metadata, self.inflating, self.client, tp, usage)
        await self._read(reader, request, context)

    async def _read(self, reader: Reader, request: Any, context: Any) -> None:
        await self.client.await_topic(request.topic)
        await reader.seek(request.offset if request.HasField("offset") else EARLIEST)
        end = None if request.follow else await reader.end()
        first = True
        while end is None or reader.position < end or first:
            await reader.usage.admit("fetch", _time_left(context))
            batches = await reader.fetch(wait=end is None)
            first = False
            if end is not None and not batches:
                return  # nothing left below the end: the cleaner took it
            for batch in batches:
                async for record in reader.records_of(batch):
                    if end is not None and record.offset >= end:
                        return
                    await context.write(_message(record))


def _time_left(context: Any) -> float:
    """How long a stream may still go on, in seconds."""
    remaining = context.time_remaining()
    return float("inf") if remaining is None else float(remaining)


def patience(context: Any) -> float:
    """How long a call may take, in seconds."""
    remaining = context.time_remaining()
    if remaining is None:
        return PATIENCE_S
    return float(min(max(remaining * PATIENCE_SHARE, 0.001), MAX_PATIENCE_S))


def _named(topic: str) -> str:
    if not topic:
        raise InvalidRequest("topic is missing")
    check_string("topic", topic)
    return topic


def _headers(given: Sequence[Any]) -> tuple[tuple[str, bytes | None], ...]:
    return tuple(
        (header.key, header.value if header.HasField("value") else None) for header in given
    )


def _message(record: Record) -> Any:
    message = broker_pb2.ConsumeResponse(
        offset=record.offset,
        timestamp=record.timestamp,
        key=record.key,
        payload=record.value,
    )
    for key, value in record.headers:
        message.headers.add(key=key, value=value)
    return message
