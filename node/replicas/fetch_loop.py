"""The shell of the fetcher cores: one connection and one task for each leader that is followed.

A leader's partitions are spread over ``num.replica.fetchers`` streams. A stream asks, performs what
its core makes of the answer on the partitions' logs, and asks again; it ends when it has nothing
left to follow. Answers are taken apart in place; appends happen on the loop, as those of producers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from msgspec import Struct

from kept.client.node_connection import NodeConnection
from kept.client.protocol.api_keys import ApiKey
from kept.node.replicas import fetch_codec
from kept.node.runtime.clock import monotonic_ms
from kept.node.runtime.logging import log
from kept.replication.fetch_messages import (
    FetchRequest,
    OffsetsRequest,
    OffsetsResponse,
)
from kept.replication.fetcher import (
    NEVER,
    PATIENCE_MS,
    FetcherCore,
    FetchSettings,
    OffsetsListed,
    RequestAbandoned,
    RequestFailed,
    Work,
    WorkFailed,
)
from kept.replication.follower_replica import perform_all
from kept.storage.errors import (
    KafkaStorageError,
    KeptError,
    NetworkException,
    ResourceExhausted,
    is_bug,
)
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.failure_detector import FailureDetector
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.runtime.runtime import Runtime
    from kept.replication.partition import Partition
    from kept.replication.quota import ReplicationQuota

LIST_OFFSETS_VERSION: Final = 6
EARLIEST: Final = -2
LATEST: Final = -1
EXHAUSTED_RETRY_S: Final = 1.0
"""What was not flushed for want of a descriptor is tried again after this."""
RESTART_S: Final = 1.0
"""After a bug of ours a stream starts over this much later."""


class FetchContext(Struct, frozen=True):
    """What all streams of fetches work with. ``quota`` limits what replicas out of sync fetch."""

    runtime: Runtime
    config: LiveConfig
    identity: NodeIdentity
    addresses: AddressBook
    detector: FailureDetector
    quota: ReplicationQuota


class Fetchers:
    """What this node follows, by leader."""

    def __init__(self, context: FetchContext) -> None:
        self._context = context
        self._config = context.config
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._where: dict[TopicPartition, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def follow(self, hosted: LocalReplica, leader_id: int, leader_epoch: int) -> None:
        """Fetch a partition from that leader, from now on."""
        partition = hosted.partition
        tp = partition.topic_partition
        number = crc32(tp.topic.encode()) + tp.partition
        key = (leader_id, number % max(1, self._config.current.num_replica_fetchers))
        if self._where.get(tp, key) != key:
            self.stop_following(tp)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream(self._context, leader_id)
        self._where[tp] = key
        stream.follow(hosted, leader_epoch)

    def stop_following(self, tp: TopicPartition) -> None:
        """Fetch it no more; a partition that is not followed is no error."""
        key = self._where.pop(tp, None)
        if key is None:
            return
        stream = self._streams[key]
        stream.leave(tp)
        if not len(stream.core):
            del self._streams[key]
            stream.stop()

    def throttle(self, hosted: LocalReplica) -> None:
        """Whether a partition is throttled has changed; one not followed is no error."""
        key = self._where.get(hosted.partition.topic_partition)
        if key is not None:
            self._streams[key].throttle(hosted)

    def nudge(self, tp: TopicPartition) -> None:
        """Its log was cut by somebody else than its fetcher; one not followed is no error."""
        key = self._where.get(tp)
        if key is not None:
            self._streams[key].nudge(tp)

    async def stop(self) -> None:
        """Follow nobody any more."""
        streams, self._streams = list(self._streams.values()), {}
        self._where.clear()
        for stream in streams:
            stream.stop()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)


class _Stream:
    """One stream of requests to one leader."""

    def __init__(self, context: FetchContext, leader_id: int) -> None:
        self._runtime = context.runtime
        self._config = context.config
        self._identity = context.identity
        self._addresses = context.addresses
        self._detector = context.detector
        self._leader_id = leader_id
        self._hosted: dict[TopicPartition, LocalReplica] = {}
        self._partitions: dict[TopicPartition, Partition] = {}
        """Those of ``_hosted``."""
        self._topics: fetch_codec.Topics = {}
        """What answers may be about."""
        self._left: list[tuple[bytes, TopicPartition]] = []
        """Partitions that the answer in flight may still be about."""
        self._connection: NodeConnection | None = None
        self._woken = asyncio.Event()
        self._complained = False
        self._impatience: asyncio.TimerHandle | None = None
        self._given_up: FetchRequest | None = None
        """The request whose answer is not waited for: see :meth:`_give_up`."""
        config = context.config.current
        settings = FetchSettings(
            max_wait_ms=config.replica_fetch_wait_max_ms,
            min_bytes=config.replica_fetch_min_bytes,
            response_max_bytes=config.replica_fetch_response_max_bytes,
            partition_max_bytes=config.replica_fetch_max_bytes,
            backoff_max_ms=config.replica_fetch_backoff_ms,
        )
        self._patience_s = config.replica_socket_timeout_ms / 1000
        """How much longer than its ``max_wait_ms`` a request may take before the leader counts as
        silent."""
        self.core = FetcherCore(leader_id, settings, context.quota)
        self.task = context.runtime.loop.create_task(self._run())

    # Membership.

    def follow(self, hosted: LocalReplica, leader_epoch: int) -> None:
        """Follow a partition, or go on in another epoch."""
        partition = hosted.partition
        tp = partition.topic_partition
        self._hosted[tp] = hosted
        self._partitions[tp] = partition
        self._topics.setdefault(partition.topic_id.bytes, {})[tp.partition] = tp
        self.core.add(
            tp,
            partition.topic_id,
            partition.follower,
            leader_epoch,
            throttled=hosted.throttled_as_follower,
            now_ms=monotonic_ms(),
        )
        self._woken.set()
        self._lose_patience()

    def leave(self, tp: TopicPartition) -> None:
        """Follow it no more."""
        hosted = self._hosted.pop(tp, None)
        if hosted is None:
            return
        del self._partitions[tp]
        self._left.append((hosted.partition.topic_id.bytes, tp))
        self.core.remove(tp)
        self._woken.set()

    def _forget_left(self) -> None:
        """Nothing is in flight: no answer is about those that were left."""
        for topic_id, tp in self._left:
            hosted = self._hosted.get(tp)
            if hosted is None or hosted.partition.topic_id.bytes != topic_id:
                numbers = self._topics.get(topic_id, {})
                numbers.pop(tp.partition, None)
                if not numbers:
                    self._topics.pop(topic_id, None)
        self._left.clear()

    def throttle(self, hosted: LocalReplica) -> None:
        """Ask for it as fast as it may be asked for now."""
        self.core.set_throttled(hosted.partition.topic_partition, hosted.throttled_as_follower)
        self._woken.set()

    def nudge(self, tp: TopicPartition) -> None:
        """Ask for it anew: the leader does not know from where."""
        self.core.nudge(tp)
        self._woken.set()

    def _lose_patience(self) -> None:
        """New partitions wait behind a request that the leader may hold: not for long."""
        if self.core.impatient_at_ms < NEVER and self._impatience is None:
            seconds = max(0, self.core.impatient_at_ms - monotonic_ms()) / 1000
            self._impatience = self._runtime.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        """End the wait for the answer in flight, unless it is coming in."""
        self._impatience = None
        request, connection = self.core.in_flight, self._connection
        if self.core.impatient_at_ms >= NEVER or not isinstance(request, FetchRequest):
            return
        if connection is None or connection.closed:
            # It is being made: at once would be again and again, for as long as that takes.
            self._impatience = self._runtime.loop.call_later(PATIENCE_MS / 1000, self._give_up)
        elif not connection.receiving:
            self._given_up = request
            connection.close()

    def stop(self) -> None:
        """End the stream."""
        self.task.cancel()
        if self._impatience is not None:
            self._impatience.cancel()
        if self._connection is not None:
            self._connection.close()

    # Work.

    async def _run(self) -> None:
        while True:
            try:
                await self._fetch()
            # A bug of ours must not end replication: the stream starts over, and says so.
            except Exception as error:  # noqa: BLE001
                log.exception("fetching failed", error, leader=self._leader_id)
                if self.core.in_flight is not None:
                    self._lost(self.core.in_flight, error)
                await asyncio.sleep(RESTART_S)

    async def _fetch(self) -> None:
        """One request and what follows from it, or the wait for something to ask for."""
        while waiting := self.core.unflushed():
            await self._flush(waiting)
        if self._left:
            self._forget_left()
        request = self.core.next_request(monotonic_ms())
        if request is None:
            await self._pause()
            return
        try:
            work = await self._exchange(request)
        except (KeptError, OSError) as error:
            if is_bug(error):
                raise
            if request is self._given_up:
                self.core.step(RequestAbandoned(request), monotonic_ms())
            else:
                self._lost(request, error)
            return
        self._complained = False
        self._perform(work)

    async def _flush(self, waiting: list[TopicPartition]) -> None:
        """What ``flush.messages`` asks for, before the leader may count what was appended.

        The stream waits for it, as Kafka's does: a request sent without these partitions could be
        held by the leader for much longer than a flush takes.
        """
        several = [self._hosted[tp] for tp in waiting]
        flushes = [hosted.flushed(hosted.partition.log_end_offset) for hosted in several]
        outcomes = await asyncio.gather(*flushes, return_exceptions=True)
        while any(isinstance(outcome, ResourceExhausted) for outcome in outcomes):
            await asyncio.sleep(EXHAUSTED_RETRY_S)
            flushes = [hosted.flushed(hosted.partition.log_end_offset) for hosted in several]
            outcomes = await asyncio.gather(*flushes, return_exceptions=True)
        for tp, error in zip(waiting, outcomes, strict=True):
            if error is not None:
                failed = KafkaStorageError(f"{tp.place}: not flushed: {error}")
                self.core.step(WorkFailed(tp, failed), monotonic_ms())

    async def _pause(self) -> None:
        """Until something is to be asked again."""
        self._woken.clear()
        wake_at_ms = self.core.wake_at_ms()
        delay = None if wake_at_ms >= NEVER else (wake_at_ms - monotonic_ms()) / 1000
        if delay is not None and delay <= 0:
            return
        try:
            async with asyncio.timeout(delay):
                await self._woken.wait()
        except TimeoutError:
            return

    def _lost(self, request: FetchRequest | OffsetsRequest, error: BaseException) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self.core.step(RequestFailed(request), monotonic_ms())
        self._detector.connection_broke(self._leader_id)
        if not self._complained:
            self._complained = True
            log.warning("leader does not answer", leader=self._leader_id, error=str(error))

    async def _connected(self) -> NodeConnection:
        connection = self._connection
        if connection is None or connection.closed:
            address = self._addresses.node_address(self._leader_id)
            if address is None:
                raise NetworkException(f"no address of broker {self._leader_id} is known")
            config = self._config.current
            connection = await NodeConnection.open(
                *address,
                client_id=f"node-{self._identity.node_id}",
                timeout_s=config.socket_connection_setup_timeout_ms / 1000,
                tls=self._addresses.node_tls(),
            )
            self._connection = connection
        return connection

    async def _exchange(self, request: FetchRequest | OffsetsRequest) -> Work:
        connection = await self._connected()
        if isinstance(request, OffsetsRequest):
            answers = await self._offsets(connection, request)
            return self.core.step(OffsetsListed(request, answers), monotonic_ms())
        body = fetch_codec.encode_request(
            request, self._identity.node_id, self._identity.broker_epoch
        )
        timeout_s = request.max_wait_ms / 1000 + self._patience_s
        frame = await connection.request(fetch_codec.API_KEY, fetch_codec.VERSION, body, timeout_s)
        answer = fetch_codec.decode_response(frame, self._topics)
        return self.core.fetch_answered(request, answer, monotonic_ms())

    async def _offsets(
        self, connection: NodeConnection, request: OffsetsRequest
    ) -> tuple[OffsetsResponse, ...]:
        starts = await self._list(connection, request, EARLIEST)
        ends = await self._list(connection, request, LATEST)
        answers = []
        for tp, _, _ in request.partitions:
            start, end = starts.get(tp, (-1, -1)), ends.get(tp, (-1, -1))
            error = start[0] or end[0]
            answers.append(OffsetsResponse(tp, error, start[1], end[1]))
        return tuple(answers)

    async def _list(
        self, connection: NodeConnection, request: OffsetsRequest, timestamp: int
    ) -> dict[TopicPartition, tuple[int, int]]:
        topics: dict[str, list[dict[str, Any]]] = {}
        for tp, _, leader_epoch in request.partitions:
            topics.setdefault(tp.topic, []).append(
                {
                    "partition_index": tp.partition,
                    "current_leader_epoch": leader_epoch,
                    "timestamp": timestamp,
                }
            )
        values = {
            "replica_id": self._identity.node_id,
            "isolation_level": 0,
            "topics": [{"name": name, "partitions": parts} for name, parts in topics.items()],
        }
        frame = await connection.call(
            ApiKey.LIST_OFFSETS, LIST_OFFSETS_VERSION, values, self._patience_s
        )
        return {
            TopicPartition(topic.name, part.partition_index): (int(part.error_code), part.offset)
            for topic in frame.topics
            for part in topic.partitions
        }

    def _perform(self, work: Work) -> None:
        try:
            perform_all(self.core, work, self._partitions, monotonic_ms(), self._runtime.now_ms())
        # A bug of ours must not end replication: those partitions are asked for again, later.
        except Exception as error:  # noqa: BLE001
            log.exception("fetched in vain", error, leader=self._leader_id)
            for tp, _ in work:
                self.core.step(WorkFailed(tp, NetworkException(str(error))), monotonic_ms())
        for tp, _ in work:
            hosted, core = self._hosted.get(tp), self.core.core(tp)
            if hosted is not None and core is not None:
                hosted.manifests.fetched(core.leader_epoch, core.agreed)
