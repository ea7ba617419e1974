"""Fetch: records from the partitions' leaders, now, or as soon as enough are there.

A request reads at once; with less than ``min_bytes`` and no error it is parked until enough became
readable or ``max_wait_ms`` is over. Reading costs index look-ups only: records stay in their files
until the sender takes them (rule 44). Reads follow rules 25, 26, 32 and 38, which
``Partition.fetch`` decides. In a session (``kept.node.kafka.fetch_sessions``) only partitions that
are due are read, and only those with news are answered. What a consumer may not read is refused:
the session of its connection counts, not that of whoever opened the fetch session.

Only the listener between nodes takes requests of replicas: what a replica says that it has moves
the high watermark. On any other listener each partition is answered TOPIC_AUTHORIZATION_FAILED, as
in Kafka for a follower without ClusterAction. Negative replica ids are consumers, -2 included.

Long because a request that waits is read, woken and answered by one object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from kept.cluster.security.acls import AclOperation
from kept.node.kafka import api
from kept.node.kafka.codec import encode_fetch, parse_fetch
from kept.node.kafka.codec import fetch as codec
from kept.node.kafka.codec.wire import with_throttle
from kept.node.kafka.fetch_sessions import SESSIONLESS, CachedPartition, Key, Session
from kept.node.kafka.handlers.records.leader_hints import (
    FETCH_HINTS,
    RACK_AWARE,
    LeaderHints,
)
from kept.node.kafka.handlers.records.list_offsets import isolation_level
from kept.node.kafka.handlers.records.produce import check_entries, find, grant
from kept.node.kafka.response_memory import ResponseMemory
from kept.node.runtime import error_codes
from kept.node.runtime.clock import monotonic_ms
from kept.node.runtime.logging import bugs, log
from kept.node.runtime.time_slices import IN_PLACE_STEPS, ITEMS_PER_SLICE, SlicedTask
from kept.replication.fetch_messages import FetchPartition
from kept.replication.partition import ENOUGH_BYTES
from kept.steps import Steps
from kept.storage.disk import FileSlice
from kept.storage.errors import (
    DamagedData,
    KeptError,
    UnknownTopicId,
    UnknownTopicOrPartition,
)

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.kafka.connection import Connection
    from kept.node.kafka.fetch_sessions import FetchSessions
    from kept.node.kafka.handlers.records.woken_fetches import WokenFetches
    from kept.node.kafka.response_slot import ResponseSlot
    from kept.node.metadata.serving_lease import ServingLease
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.replica_manager import ReplicaManager
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.memory_budget import MemoryBudget
    from kept.node.runtime.runtime import Runtime
    from kept.replication.partition import Partition
    from kept.replication.quota import ReplicationQuota

FROM_FOLLOWERS: Final = 11
"""From this version on consumers may read from followers (KIP-392)."""
NOISE_INTERVAL_S: Final = 10.0
"""At most one line about refused replicas in this time, per listener."""
POSITIONS: Final = 10_000
"""Of so many partitions a connection remembers where its consumer was: for a metric only."""
_UNKNOWN_TOPICS: Final = (UnknownTopicId, UnknownTopicOrPartition)
"""Errors that Kafka answers with no aborted transactions, where others leave the field null."""

_LED_ELSEWHERE: Final = (error_codes.NOT_LEADER_OR_FOLLOWER, error_codes.FENCED_LEADER_EPOCH)

ReadPartitions = list[tuple[CachedPartition, codec.PartitionData]]
Read = tuple[ReadPartitions, int, bool]
"""(data of each partition, bytes of records, whether to answer at once)"""
Results = list[tuple[bytes, list[codec.PartitionData]]]


@dataclass(frozen=True, slots=True)
class FetchResources:
    """What fetches need of the node."""

    runtime: Runtime
    config: LiveConfig
    counters: Counters
    lease: ServingLease
    table: ReplicaTable
    sessions: FetchSessions
    replicas: ReplicaManager
    quota: ReplicationQuota
    """Of throttled replicas that are led here."""
    hints: LeaderHints
    responses: MemoryBudget
    """What is read and answered in slices draws on it."""
    woken: WokenFetches


class PendingFetch:
    """One request, from its first reading to its answer."""

    __slots__ = (
        "_blocks",
        "_broker_epoch",
        "_connection",
        "_context",
        "_correlation_id",
        "_is_parked",
        "_isolation",
        "_late",
        "_max_bytes",
        "_max_wait_ms",
        "_memory",
        "_min_bytes",
        "_moved",
        "_quota",
        "_rack",
        "_replica_id",
        "_reply",
        "_results",
        "_session",
        "_session_epoch",
        "_started",
        "_throttle_ms",
        "_version",
        "_woken",
        "_work",
    )

    def __init__(  # noqa: PLR0917
        self,
        context: FetchResources,
        connection: Connection,
        version: int,
        correlation_id: int,
        request: codec.FetchRequest,
        session: Session,
    ) -> None:
        self._context = context
        self._connection = connection
        self._version = version
        self._correlation_id = correlation_id
        # Not the request itself: the session has its partitions, and it may wait for long.
        self._replica_id = request.replica_id
        self._broker_epoch = request.broker_epoch
        self._session_epoch = request.session_epoch
        self._max_wait_ms = request.max_wait_ms
        self._session = session
        self._isolation = isolation_level(request.isolation_level)
        self._max_bytes = min(request.max_bytes, context.config.current.fetch_max_bytes)
        self._throttle_ms = connection.throttle_ms
        client = connection.client
        self._quota = None if client is None or request.replica_id >= 0 else client.consumer
        if self._quota is not None:
            self._max_bytes = int(min(self._max_bytes, self._quota.window_value))
        self._min_bytes = min(request.min_bytes, self._max_bytes)
        """Nobody waits for more than one response may carry."""
        self._rack = ""
        """Of the consumer, if it may be sent to a replica there."""
        if context.config.current.replica_selector_class == RACK_AWARE:
            self._rack = request.rack_id.decode("utf-8", "replace")
            session.awaits_commits = request.replica_id >= 0 and session.id != SESSIONLESS
        self._reply: ResponseSlot | None = None
        self._is_parked = False
        self._started = context.runtime.loop.time()
        self._woken = False
        self._work: SlicedTask[Any] | None = None
        """A reading that goes on in slices, or the making of the answer."""
        self._blocks = False
        """Later requests of this connection wait, until it has been read once and, if that is
        enough, answered."""
        self._results: ReadPartitions = []
        """What it has read so far."""
        self._moved = False
        """Something that was read moved while others were read."""
        self._late = False
        """The time is up while it reads."""
        self._memory: ResponseMemory | None = None
        """What it holds that it reads, and answers, in slices."""

    def start(self) -> None:
        """Answer now, or park."""
        is_replica = self._replica_id >= 0
        if is_replica and self._has_all() and self._context.sessions.park(self._session):
            self._park()
            return
        work = self._context.runtime.slices.run(self._read(), self._draws)
        if isinstance(work, SlicedTask):
            self._reply = self._connection.reserve_response()
            self._connection.parked[self] = None
            self._connection.block(lent=False)
            self._blocks = True
            self._continue_in_slices(work, self._on_first_read)
        else:
            self._on_first_read(*work)

    def _has_all(self) -> bool:
        """Whether a follower has all that is due to it. That is noted then, and there is nothing to
        read: so it is with nearly every request, which follows what its follower has appended.
        """
        session, context = self._session, self._context
        if session.id == SESSIONLESS or session.awaits_commits:
            return False
        if not 0 < len(session.due) <= IN_PLACE_STEPS:
            return False
        if self._max_wait_ms <= 0 or self._min_bytes <= 0:
            return False
        if perf_counter() >= context.lease.until:
            context.lease.check()
        now_ms, readable = monotonic_ms(), self._connection.session.readable
        for cached in tuple(session.due.values()):
            name, wanted = cached.key[0], cached.request
            try:
                partition = find(context.table, *cached.key, self._version).partition
                if name not in readable or not partition.follower_has_all(
                    self._replica_id, self._broker_epoch, wanted, now_ms
                ):
                    return False
            except KeptError:
                return False
            cached.read_from(partition)
        return True

    def _draws(self) -> ResponseMemory:
        if self._memory is None:
            is_replica = self._replica_id >= 0
            self._memory = ResponseMemory(None if is_replica else self._context.responses)
        return self._memory

    def _give_back(self) -> None:
        if self._memory is not None:
            self._memory.give_back()
            self._memory = None

    def _continue_in_slices(self, work: SlicedTask[Read], then: Callable[..., None]) -> None:
        """Go on with what a reading in slices finds. What was read is watched from then on: it may
        move while others are read.
        """
        self._work = work
        self._session.wake_fetch = self._wake
        for cached, _ in self._results:
            cached.watch()

        def done(finished: Any) -> None:
            self._work = None
            if finished.cancelled() or self._reply is None:
                return
            error = finished.exception()
            if error is not None:
                bugs.report("fetch failed", error, peer=self._connection.peer)
                self._connection.abort()
                return
            results, size, urgent = finished.result()
            moved, self._moved = self._moved, False
            then(results, size, urgent or self._late)
            if moved:
                self._wake()
            self._unblock()

        work.add_done_callback(done)

    def _unblock(self) -> None:
        """Let later requests go on, unless the answer is being made."""
        if self._blocks and self._work is None:
            self._blocks = False
            self._connection.unblock()

    def _on_first_read(self, results: ReadPartitions, size: int, urgent: bool) -> None:
        enough = urgent or size >= self._min_bytes or self._max_wait_ms <= 0
        enough = enough or not self._session.partitions
        # A reading ends with its segment: with more behind it there is nothing to wait for.
        enough = enough or bool(size and self._enough()) or self._has_new_high_watermark(results)
        if enough or not self._context.sessions.park(self._session):
            if self._reply is None:
                self._respond(results, None)
            else:
                self._answer(results)
            return
        self._give_back()
        self._park()

    def _park(self) -> None:
        self._is_parked = True
        if self._reply is None:
            self._reply = self._connection.reserve_response()
        session, loop = self._session, self._context.runtime.loop
        session.wait_until(self._started + self._max_wait_ms / 1000, loop, self._finish)
        session.wake_fetch = self._wake
        session.watch()
        self._connection.parked[self] = None

    def access_changed(self) -> None:
        """What may be read has changed: look whether all of this still may."""
        if self._is_parked:
            self._wake()

    def _wake(self) -> None:
        """A partition moved: look once at all that move in this turn of the loop. A follower, for
        which others wait, is not behind consumers, of which there may be very many.
        """
        if not self._woken and self._reply is not None:
            self._woken = True
            if self._replica_id >= 0:
                self._context.runtime.loop.call_soon(self._read_again)
            else:
                self._context.woken.add(self._read_again)

    def _read_again(self) -> None:
        """Enough now? Then what was read to find out is the answer."""
        self._woken = False
        if self._work is not None:
            self._moved = True
            return
        if self._reply is None:
            return
        work = self._context.runtime.slices.run(self._read(again=True), self._draws)
        if isinstance(work, SlicedTask):
            self._continue_in_slices(work, self._on_read_again)
        else:
            self._on_read_again(*work)

    def _on_read_again(self, results: ReadPartitions, size: int, urgent: bool) -> None:
        enough = urgent or size >= self._min_bytes or (size and self._enough())
        if enough or self._has_new_high_watermark(results):
            self._answer(results)
        else:
            self._give_back()
            self._session.watch()

    def _has_new_high_watermark(self, results: ReadPartitions) -> bool:
        """Whether a follower that is to hear of it has not been told a high watermark."""
        return self._session.awaits_commits and any(
            (last := cached.last_response) is not None and last[1] < data.high_watermark
            for cached, data in results
        )

    def _enough(self) -> bool:
        """Whether to answer now: ``min_bytes`` are readable, or an error is to be told."""
        readable = 0
        for (name, index), cached in self._session.due.items():
            wanted = cached.request
            try:
                hosted = find(self._context.table, name, index, self._version)
                if self._replica_id >= 0 and self._must_wait(hosted):
                    continue
                here = hosted.partition.readable_bytes(
                    wanted.fetch_offset,
                    self._isolation,
                    replica=self._replica_id >= 0,
                )
            except KeptError:
                return True
            readable += min(here, max(wanted.max_bytes, 1))
            if here >= ENOUGH_BYTES or readable >= self._min_bytes:
                return True
        return False

    def _finish(self) -> None:
        """The time is up: answer with what is there."""
        if self._reply is None:
            return
        if self._work is not None:
            self._late = True
            return
        work = self._context.runtime.slices.run(self._read(again=True), self._draws)
        if isinstance(work, SlicedTask):
            self._continue_in_slices(work, lambda results, *_: self._answer(results))
        else:
            self._answer(work[0])

    def _answer(self, results: ReadPartitions) -> None:
        """Watch nothing any more, and answer."""
        reply = self._reply
        self.cancel()
        self._connection.parked.pop(self, None)
        if self._connection.transport is not None:
            self._respond(results, reply)

    def _respond(self, results: ReadPartitions, reply: ResponseSlot | None) -> None:
        """Make the answer and send it, at its place if it has one."""
        connection = self._connection
        work = self._context.runtime.slices.run(self._encode(results), self._draws)
        if not isinstance(work, SlicedTask):
            if reply is None:
                connection.reply(work)
            else:
                connection.complete(reply, work)
            return
        place = connection.reserve_response() if reply is None else reply
        self._work = work
        connection.parked[self] = None

        def done(finished: Any) -> None:
            self._work = None
            self._give_back()
            connection.parked.pop(self, None)
            if finished.cancelled() or connection.transport is None:
                return
            error = finished.exception()
            if error is not None:
                bugs.report("fetch failed", error, peer=connection.peer)
                connection.abort()
                return
            connection.complete(place, finished.result())
            self._unblock()

        work.add_done_callback(done)

    def cancel(self) -> None:
        """The connection is gone, or the answer is made: watch nothing."""
        self._give_back()
        if self._is_parked:
            self._is_parked = False
            self._context.sessions.unpark(self._session)
        self._reply = None
        if self._work is not None:
            self._work.cancel()
        session = self._session
        session.wait_ended(self._finish)
        if session.id == SESSIONLESS:
            session.close()
        elif session.wake_fetch == self._wake:
            session.wake_fetch = None

    def _read(self, *, again: bool = False) -> Steps[Read]:
        """Read what is due, one partition a step; ``again``: this request has been read before."""
        lease = self._context.lease
        if perf_counter() >= lease.until:
            lease.check()
        left = self._max_bytes
        size = 0
        urgent = False
        results: ReadPartitions = []
        self._results = results
        if self._session.recheck:
            self._session.recheck_all()
        # What a disk's failure adds meanwhile is read next time.
        for cached in tuple(self._session.due.values()):
            if results:
                yield
                if self._work is not None and perf_counter() >= lease.until:
                    lease.check()
            cached.at_end = False
            try:
                data = self._read_one(cached, left, size == 0, again)
            except KeptError as error:
                data = self._failure(cached.key, error)
            if data.records is not None:
                got = data.records.size_bytes  # type: ignore[union-attr]
                size += got
                left -= got
            urgent = urgent or data.error_code != 0 or data.diverging is not None
            urgent = urgent or data.preferred_replica >= 0
            results.append((cached, data))
            if self._work is not None:
                cached.watch()
        self._results = []
        return results, size, urgent

    def _read_one(
        self, cached: CachedPartition, left: int, first: bool, again: bool
    ) -> codec.PartitionData:
        wanted = cached.request
        speaker, name = self._connection.session, cached.key[0]
        if name not in speaker.readable:
            may = AclOperation.READ
            grant(self._context.table, speaker, speaker.readable, may, name, self._version)
        hosted = find(self._context.table, *cached.key, self._version)
        partition = hosted.partition
        cached.read_from(partition)
        elsewhere = self._elsewhere(partition, wanted) if self._rack else -1
        if elsewhere >= 0 or (self._replica_id >= 0 and self._must_wait(hosted)):
            left, first = 0, False
        data = partition.fetch(
            wanted.fetch_offset,
            max(min(wanted.max_bytes, left), 0),
            isolation=self._isolation,
            current_leader_epoch=wanted.current_leader_epoch,
            last_fetched_epoch=wanted.last_fetched_epoch,
            replica_id=self._replica_id,
            broker_epoch=self._broker_epoch,
            log_start_offset=wanted.log_start_offset,
            from_follower=self._version >= FROM_FOLLOWERS,
            at_least_one=first,
            now_ms=monotonic_ms() if self._replica_id >= 0 and not again else 0,
            again=again,
        )
        # Not so where a limit may have hidden something, and where each fetch is to be counted.
        cached.at_end = (
            first
            and data.slice is None
            and data.diverging is None
            and elsewhere < 0
            and (self._replica_id < 0 or self._replica_id in partition.isr)
        )
        return codec.PartitionData(
            wanted.partition,
            0,
            data.high_watermark,
            data.last_stable_offset,
            data.log_start_offset,
            data.aborted,
            data.slice,
            data.diverging,
            None,
            elsewhere,
        )

    def _elsewhere(self, partition: Partition, wanted: FetchPartition) -> int:
        """The replica in the consumer's rack, where it reads from the leader (KIP-392); -1: none.

        A leader in that rack, too, serves it itself.
        """
        if not partition.is_leader:
            return -1
        return self._context.hints.preferred_replica(partition, wanted.fetch_offset, self._rack)

    def _must_wait(self, hosted: LocalReplica) -> bool:
        """A replica that is throttled, not in sync, and had its share gets nothing (KIP-73)."""
        return (
            hosted.throttled_as_leader
            and self._replica_id not in hosted.partition.isr
            and self._context.quota.exceeded(monotonic_ms())
        )

    def _count_throttled(self, cached: CachedPartition, size_bytes: int) -> None:
        """What throttled replicas are given counts, in sync or not, as in Kafka."""
        try:
            hosted = find(self._context.table, *cached.key, self._version)
        except KeptError:
            return  # it has gone since it was read
        if hosted.throttled_as_leader:
            quota = self._context.quota
            quota.record(size_bytes, monotonic_ms())

    def _failure(self, key: Key, error: KeptError) -> codec.PartitionData:
        code = error_codes.code_for(error, "fetch failed", partition=key[1])
        if isinstance(error, DamagedData):
            # As Kafka: consumers stop with it. A storage error they would try again for ever.
            code = error_codes.CORRUPT_MESSAGE
            self._context.replicas.damaged(error)
        elif self._session.id != SESSIONLESS and isinstance(error, UnknownTopicId):
            # A topic of this session was deleted: the consumer makes a new one.
            code = error_codes.UNKNOWN_TOPIC_ID
        nothing = () if isinstance(error, _UNKNOWN_TOPICS) else None
        return codec.PartitionData(key[1], code, aborted=nothing)

    def _encode(self, results: ReadPartitions) -> Steps[list[codec.Segment]]:
        """The response; what is in it counts as answered. Yields after each few partitions."""
        session, from_replica = self._session, self._replica_id >= 0
        if self._quota is not None:
            read = (data.records for _, data in results)
            bytes_read = sum(each.size_bytes for each in read if isinstance(each, FileSlice))
            delay_ms = self._quota.record_unless_over(bytes_read, monotonic_ms())
            if delay_ms:
                return self._throttled(delay_ms)
        grouped: Results = []
        table = self._context.table
        topics = table.by_id if self._version >= codec.TOPIC_IDS else table.by_name
        size, elsewhere = 0, False
        for number, (cached, data) in enumerate(results):
            if number % ITEMS_PER_SLICE == ITEMS_PER_SLICE - 1:
                yield
            if session.id != SESSIONLESS:
                must_respond = cached.must_respond(data)
                session.responded(cached, data)
                if not must_respond and self._session_epoch != 0:
                    continue
            name = cached.key[0]
            if grouped and grouped[-1][0] == name:
                grouped[-1][1].append(data)
            else:
                grouped.append((name, [data]))
            elsewhere = (
                elsewhere or data.preferred_replica >= 0 or data.error_code in _LED_ELSEWHERE
            )
            if isinstance(data.records, FileSlice):
                size += data.records.size_bytes
                if from_replica:
                    self._count_throttled(cached, data.records.size_bytes)
                elif (topic := topics.get(name)) is not None:  # it may be gone since it was read
                    topic.bytes_out += data.records.size_bytes
        metrics = self._context.counters
        metrics.fetched(size, to_replica=from_replica)
        metrics.request(api.FETCH, self._context.runtime.loop.time() - self._started)
        if elsewhere:
            segments = yield from self._encode_hints(session.id, grouped)
        else:
            segments = encode_fetch(self._version, self._correlation_id, 0, session.id, grouped)
        return self._told(segments, self._throttle_ms) if self._throttle_ms else segments

    def _throttled(self, delay_ms: int) -> list[codec.Segment]:
        """The response beyond ``consumer_byte_rate``: nothing but how long to wait. What was read
        is due again; a session that would begin with it does not.
        """
        session_id = self._session.id
        if self._session_epoch <= 0:
            self._context.sessions.close(self._session)
            session_id = SESSIONLESS
        self._connection.mute(delay_ms, "fetch")
        loop = self._context.runtime.loop
        self._context.counters.request(api.FETCH, loop.time() - self._started)
        segments = encode_fetch(self._version, self._correlation_id, 0, session_id, [])
        return self._told(segments, max(delay_ms, self._throttle_ms))

    def _told(self, segments: list[codec.Segment], throttle_ms: int) -> list[codec.Segment]:
        first = segments[0]
        assert isinstance(first, bytes)
        position = 9 if self._version >= codec.FLEXIBLE else 8
        return [with_throttle(first, position, throttle_ms), *segments[1:]]

    def _encode_hints(self, session_id: int, grouped: Results) -> Steps[list[codec.Segment]]:
        """A response that sends the client elsewhere: to leaders, or to replicas nearby."""
        leaders = []
        if self._version >= FETCH_HINTS:
            for name, results in grouped:
                yield
                for place, data in enumerate(results):
                    if place % ITEMS_PER_SLICE == ITEMS_PER_SLICE - 1:
                        yield
                    if data.error_code in _LED_ELSEWHERE:
                        leader = self._context.hints.current_leader(name, data.partition, True)
                        if leader is not None:
                            results[place] = data._replace(current_leader=leader)
                            leaders.append(leader)
        endpoints = self._context.hints.endpoints(self._connection.listener.name, leaders)
        version, number = self._version, self._correlation_id
        return (yield from codec.encode_steps(version, number, 0, session_id, grouped, endpoints))


@dataclass(frozen=True, slots=True)
class FetchHandler:
    """Serves Fetch requests."""

    context: FetchResources

    def access_changed(self, connections: Sequence[Connection]) -> Steps[None]:
        """Rules of access have changed: forget what was granted, at once, and answer fetches that
        are parked and read what they may not read any more. Yields after each connection.
        """
        self.context.sessions.access_changed()
        for connection in connections:
            connection.session.writable.clear()
            connection.session.readable.clear()
        for connection in connections:
            yield
            for waiting in tuple(connection.parked):
                if isinstance(waiting, PendingFetch):
                    waiting.access_changed()

    def _count_consumed(
        self, connection: Connection, request: codec.FetchRequest, version: int
    ) -> None:
        """Count the records that a consumer took: how far it went on since it last asked here.

        What is in a slice of a file is not looked at; in a compacted log gaps count, too. Of
        partitions that are not here nothing is remembered: a client may invent any number of them.
        """
        table = self.context.table
        topics = table.by_id if version >= codec.TOPIC_IDS else table.by_name
        positions, consumed = connection.positions, 0
        for name, partitions in request.topics:
            topic = topics.get(name)
            if topic is None:
                continue
            for wanted in partitions:
                if wanted.partition not in topic.partitions:
                    continue
                key, offset = (name, wanted.partition), wanted.fetch_offset
                consumed += max(0, offset - positions.get(key, offset))
                positions[key] = offset
        if len(positions) > POSITIONS:
            positions.clear()
        self.context.counters.records_out += consumed

    def _refuse_replica(
        self, connection: Connection, version: int, correlation_id: int, request: codec.FetchRequest
    ) -> None:
        """A client calls itself a replica: nothing is read, no session is opened or closed."""
        listener = connection.listener
        now = self.context.runtime.loop.time()
        if now >= listener.replica_warning_at:
            listener.replica_warning_at = now + NOISE_INTERVAL_S
            log.warning(
                "fetch as a replica refused: only the listener between nodes takes it",
                peer=connection.peer,
                listener=listener.name,
                replica=request.replica_id,
            )
        code = error_codes.TOPIC_AUTHORIZATION_FAILED
        refused = [
            (name, [codec.PartitionData(wanted.partition, code) for wanted in partitions])
            for name, partitions in request.topics
        ]
        connection.reply(encode_fetch(version, correlation_id, 0, SESSIONLESS, refused))

    def handle(
        self,
        connection: Connection,
        version: int,
        correlation_id: int,
        frame: memoryview,
        position: int,
    ) -> None:
        """Serve one Fetch request, whose body starts at ``position`` of ``frame``."""
        connection.listener.check_decoded(len(frame) - position)
        check_entries(connection, api.FETCH, version, frame, position)
        request = parse_fetch(frame, position, version)
        if request.replica_id >= 0 and not connection.listener.between_nodes:
            self._refuse_replica(connection, version, correlation_id, request)
            return
        if request.replica_id < 0:
            self._count_consumed(connection, request, version)
        session = None
        if version >= codec.SESSIONS:
            uses_ids = version >= codec.TOPIC_IDS
            owner = connection.session.principal
            error, session = self.context.sessions.open(request, uses_ids, monotonic_ms(), owner)
            if error:
                connection.reply(encode_fetch(version, correlation_id, error, 0, []))
                return
        if session is None:
            session = Session(SESSIONLESS, request, version >= codec.TOPIC_IDS, monotonic_ms())
        PendingFetch(self.context, connection, version, correlation_id, request, session).start()
