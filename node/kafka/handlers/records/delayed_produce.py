"""Produce requests between their append and their answer.

A batch that was staged is answered when it counts: acks=1 after the write, acks=-1 when the high
watermark passes, either after the fsync where ``flush.messages`` asks for it. Two shapes:
:class:`DelayedProduce` is one request of any kind; a :class:`DelayedProduceRun` is the requests of
one plain batch that came one after another in one readiness event, which is nearly all there ever
is. A run waits, and is answered, as one: one place in the connection's order, one waiter per
partition, one timer, one buffer of responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from kept.node.kafka import api
from kept.node.kafka.codec import encode_run
from kept.node.kafka.codec import produce as codec
from kept.node.kafka.codec.wire import with_throttle
from kept.node.kafka.handlers.records.leader_hints import PRODUCE_HINTS, LeaderHints
from kept.node.kafka.handlers.records.produce_errors import (
    after_refused,
    failure,
    needs_proof,
    refusal,
    refused_result,
)
from kept.node.kafka.response_slot import (
    WAITING_BATCH_BYTES,
    WAITING_REQUEST_BYTES,
    ResponseSlot,
)
from kept.node.runtime import error_codes
from kept.node.runtime.time_slices import SlicedTask
from kept.replication.events import NO_TOKEN
from kept.steps import Steps, run_to_end
from kept.storage.errors import KeptError, NotEnoughReplicasAfterAppend, NotLeaderOrFollower

if TYPE_CHECKING:
    from kept.node.kafka.connection import Connection
    from kept.node.metadata.cluster_link import ClusterLink
    from kept.node.metadata.leadership_barrier import LeadershipBarrier
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.runtime.runtime import Runtime
    from kept.replication.events import Token
    from kept.replication.partition import Partition
    from kept.storage.log.log import AppendInfo

Entry = tuple[codec.PlainRequest, "LocalReplica", "AppendInfo"]
"""A request of a run, where its batch went, and at which offsets."""


class UnprovenRefusal(NamedTuple):
    """A batch whose refusal is final, if this node leads in ``leader_epoch`` as it thinks."""

    hosted: LocalReplica
    leader_epoch: int
    error: KeptError
    topic: int
    place: int


@dataclass(frozen=True, slots=True)
class DelayedProduceContext:
    """What requests need that wait for their response."""

    runtime: Runtime
    cluster_link: ClusterLink
    barrier: LeadershipBarrier
    hints: LeaderHints


def _timeout_code(context: DelayedProduceContext) -> int:
    """What a producer hears whose records were not committed in time.

    A leader that has not heard of a controller for a session may not lead any more. Producers ask
    for the next leader then; after REQUEST_TIMED_OUT they would stay with this one.
    """
    lost = context.cluster_link.out_of_touch
    return error_codes.NOT_LEADER_OR_FOLLOWER if lost else error_codes.REQUEST_TIMED_OUT


class DelayedProduce:
    """One request, from its append to its answer."""

    __slots__ = (
        "_appended",
        "_connection",
        "_context",
        "_correlation_id",
        "_due",
        "_held_bytes",
        "_reply",
        "_started",
        "_throttle_ms",
        "_timer",
        "_topics",
        "_unproven",
        "_waiters",
        "_waits",
        "acks",
        "timeout_ms",
        "version",
    )

    def __init__(  # noqa: PLR0917
        self,
        context: DelayedProduceContext,
        connection: Connection,
        version: int,
        correlation_id: int,
        acks: int,
        timeout_ms: int,
    ) -> None:
        self._context = context
        self._connection = connection
        self.version = version
        self._correlation_id = correlation_id
        self.acks = acks
        self.timeout_ms = timeout_ms
        self._topics: list[tuple[bytes, list[codec.PartitionResult]]] = []
        self._appended: list[tuple[LocalReplica, int, int, int, int]] = []
        """(partition, leader epoch of the append, end offset after it, topic's place, result's)"""
        self._due: list[int] = []
        """How many commits and fsyncs each of these waits for."""
        self._unproven: list[UnprovenRefusal] = []
        self._waits = 0
        self._waiters = 0
        """Commits and fsyncs that will call back, also after the time is up."""
        self._held_bytes = 0
        self._timer: Any = None
        self._started = connection.event_started
        self._throttle_ms = connection.throttle_ms
        self._reply = connection.reserve_response() if acks != 0 else None

    def topic(self, name: bytes) -> list[codec.PartitionResult]:
        """Begin the results of a topic."""
        results: list[codec.PartitionResult] = []
        self._topics.append((name, results))
        return results

    def appended(self, hosted: LocalReplica, index: int, info: AppendInfo) -> None:
        """A batch was staged."""
        results = self._topics[-1][1]
        epoch, end_offset = hosted.partition.leader_epoch, info.last_offset + 1
        self._appended.append((hosted, epoch, end_offset, len(self._topics) - 1, len(results)))
        self._due.append(0)
        results.append(_acknowledgement(index, info))

    def refused(self, index: int, error: KeptError, hosted: LocalReplica | None) -> None:
        """A batch was not taken; ``hosted`` where it should have gone, if that is here."""
        results = self._topics[-1][1]
        if hosted is not None:
            now_s = self._context.runtime.loop.time()
            error = after_refused(self._connection, error, hosted, now_s)
            if self.acks != 0 and needs_proof(error, hosted):
                epoch = hosted.partition.leader_epoch
                doubt = UnprovenRefusal(hosted, epoch, error, len(self._topics) - 1, len(results))
                self._unproven.append(doubt)
                results.append(codec.PartitionResult(index, error_codes.NOT_LEADER_OR_FOLLOWER))
                return
        results.append(refused_result(index, error, hosted))

    def written(self, failed: dict[Partition, KeptError]) -> None:
        """The event's writes are done, except for ``failed`` ones: wait for what is still due."""
        # One for this loop: a waiter that is called at once must not answer for those to come.
        self._waits = 1
        for number, (hosted, leader_epoch, end_offset, topic, place) in enumerate(self._appended):
            partition = hosted.partition
            if failed and partition in failed:
                self._set_error(topic, place, failed[partition])
                continue
            if partition.leader_epoch != leader_epoch or not partition.is_leader:
                # A long request went on in later turns: another leader's records may be there now.
                lost = NotLeaderOrFollower(
                    f"{partition.topic_partition.place}: its leader changed during the request"
                )
                self._set_error(topic, place, lost)
                continue
            if self.acks == -1 and partition.high_watermark < end_offset:
                partition.when_committed(end_offset, self._waiter(number))
            if hosted.sync and self.acks != 0:
                hosted.flush(end_offset, self._waiter(number))
        if self._unproven:
            self._waits += 1
            self._context.barrier.confirm(self._confirmed)
        self._waits -= 1
        if self._waits == 0:
            self._answer()
        elif self._reply is not None:
            batches = sum(len(results) for _, results in self._topics)
            self._held_bytes = WAITING_REQUEST_BYTES + WAITING_BATCH_BYTES * batches
            self._connection.waiting_account.overdraw(self._held_bytes)
            loop = self._context.runtime.loop
            self._timer = loop.call_later(max(self.timeout_ms, 0) / 1000, self._expire)

    def _waiter(self, number: int) -> Any:
        self._waits += 1
        self._waiters += 1
        self._due[number] += 1

        def done(error: BaseException | None) -> None:
            self._waiters -= 1
            if self._waits < 0:
                self._release()
                return
            self._due[number] -= 1
            if error is not None:
                *_, topic, place = self._appended[number]
                self._set_error(topic, place, error)
            self._waits -= 1
            if self._waits == 0:
                self._answer()

        return done

    def _release(self) -> None:
        """It is answered: give back what it held, once nothing will call back."""
        if not self._waiters and self._held_bytes:
            self._connection.waiting_account.release(self._held_bytes)
            self._held_bytes = 0

    def _confirmed(self, confirmed: bool) -> None:
        """This node knew who leads when it refused, or that can't be said."""
        doubts, self._unproven = self._unproven, []
        for hosted, leader_epoch, final, topic, place in doubts:
            partition = hosted.partition
            error = final
            if not (confirmed and partition.is_leader and partition.leader_epoch == leader_epoch):
                error = NotLeaderOrFollower(
                    f"{partition.topic_partition.place}: another one may lead; {final}"
                )
            results = self._topics[topic][1]
            index, now_s = results[place].partition, self._context.runtime.loop.time()
            results[place] = refusal(self._connection, index, error, hosted, now_s)
        if doubts:
            self._waits -= 1
            if self._waits == 0:
                self._answer()

    def _set_error(self, topic: int, place: int, error: BaseException) -> None:
        results = self._topics[topic][1]
        results[place] = failure(results[place], error)

    def _expire(self) -> None:
        """Not committed in the request's own time: say so for every partition that still waits."""
        self._timer = None
        if self._waits > 0:
            self._waits = -1
            self._confirmed(False)
            late = _timeout_code(self._context)
            for due, (*_, topic, place) in zip(self._due, self._appended, strict=True):
                results = self._topics[topic][1]
                if due and results[place].error_code == 0:
                    results[place] = results[place]._replace(error_code=late)
            self._answer()

    def _answer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        connection = self._connection
        connection.count_served(api.PRODUCE, 1, self._started)
        if self._reply is not None:
            self._release()
            self._encode(self._reply)
            if self._waiters:  # which keep this object
                self._topics, self._appended, self._due = [], [], []
            return
        by_id = self.version >= codec.TOPIC_IDS
        for name, results in self._topics:
            for result in results:
                if result.error_code:
                    connection.abort(
                        "produce with acks=0 failed",
                        topic=UUID(bytes=name) if by_id else name.decode("utf-8", "replace"),
                        partition=result.partition,
                        error_code=result.error_code,
                        error=result.error_message or "",
                    )
                    return

    def _encode(self, reply: ResponseSlot) -> None:
        connection = self._connection
        steps = encoded_steps(
            self._context.hints,
            connection.listener.name,
            self.version,
            self._correlation_id,
            self._topics,
            self._throttle_ms,
        )
        frame = self._context.runtime.slices.run(steps)
        if isinstance(frame, SlicedTask):
            frame.add_done_callback(lambda made: connection.complete(reply, [made.result()]))
        else:
            connection.complete(reply, [frame])


class DelayedProduceRun(ResponseSlot):
    """Requests of one plain batch each, in their order, with the same acks (1 or -1) and timeout.

    ``entries`` grow while the run is its connection's open one. The answer leaves when the last of
    them may, or at the timeout.
    """

    __slots__ = (
        "_commits",
        "_connection",
        "_context",
        "_errors",
        "_flushes",
        "_held_bytes",
        "_started",
        "_timer",
        "acks",
        "entries",
        "sync",
        "throttle_ms",
        "timeout_ms",
    )

    def __init__(
        self, context: DelayedProduceContext, connection: Connection, acks: int, timeout_ms: int
    ) -> None:
        super().__init__()
        self.acks = acks
        self.timeout_ms = timeout_ms
        self.entries: list[Entry] = []
        self.sync = False
        self.throttle_ms = 0
        self._context = context
        self._connection = connection
        self._started = connection.event_started
        self._errors: dict[int, codec.PartitionResult] = {}
        """By place in ``entries``."""
        self._commits: dict[LocalReplica, Token] = {}
        """The partitions whose high watermark is waited for."""
        self._flushes: dict[LocalReplica, None] = {}
        """Those whose fsync is; it calls back also after the time is up."""
        self._held_bytes = 0
        self._timer: Any = None

    def written(self, failed: dict[Partition, KeptError]) -> None:
        """As :meth:`DelayedProduce.written`."""
        if failed:
            for hosted in {entry[1] for entry in self.entries if entry[1].partition in failed}:
                self._fail(hosted, failed[hosted.partition])
        if self.acks == -1 or self.sync:
            self._wait(failed)
        else:
            self._answer()

    def _wait(self, failed: dict[Partition, KeptError]) -> None:
        ends: dict[LocalReplica, int] = {}
        for _, hosted, info in self.entries:
            ends[hosted] = max(info.last_offset + 1, ends.get(hosted, 0))
        # All that is waited for is noted first: a waiter may be called at once.
        for hosted, end_offset in ends.items():
            if hosted.partition in failed:
                continue
            if self.acks == -1 and hosted.partition.high_watermark < end_offset:
                self._commits[hosted] = NO_TOKEN
            if hosted.sync:
                self._flushes[hosted] = None
        for hosted in tuple(self._commits):
            callback = partial(self._committed, hosted)
            token = hosted.partition.when_committed(ends[hosted], callback)
            if hosted in self._commits:
                self._commits[hosted] = token
        for hosted in tuple(self._flushes):
            hosted.flush(ends[hosted], partial(self._flushed, hosted))
        if self._commits or self._flushes:
            self._held_bytes = WAITING_REQUEST_BYTES + WAITING_BATCH_BYTES * len(self.entries)
            self._connection.waiting_account.overdraw(self._held_bytes)
            delay = max(self.timeout_ms, 0) / 1000
            self._timer = self._context.runtime.loop.call_later(delay, self._expire)
        elif self.segments is None:
            self._answer()

    def _committed(self, hosted: LocalReplica, error: BaseException | None) -> None:
        if self.segments is not None:
            return
        if error is not None:
            # Those below the high watermark are committed, whatever ended the wait for the last.
            too_few = isinstance(error, NotEnoughReplicasAfterAppend)
            self._fail(hosted, error, 0 if too_few else hosted.partition.high_watermark)
        del self._commits[hosted]
        self._maybe_answer()

    def _flushed(self, hosted: LocalReplica, error: BaseException | None) -> None:
        if self.segments is not None:
            self._flushes.pop(hosted, None)
            self._release()
            return
        if error is not None:
            self._fail(hosted, error)
        self._flushes.pop(hosted, None)
        self._maybe_answer()

    def _maybe_answer(self) -> None:
        if not self._commits and not self._flushes:
            self._answer()

    def _release(self) -> None:
        """As :meth:`DelayedProduce._release`."""
        if not self._flushes and self._held_bytes:
            self._connection.waiting_account.release(self._held_bytes)
            self._held_bytes = 0

    def _fail(self, hosted: LocalReplica, error: BaseException, committed: int = 0) -> None:
        """Note an error for a partition's batches that end above ``committed``."""
        for place, (request, where, info) in enumerate(self.entries):
            if where is hosted and info.last_offset >= committed and place not in self._errors:
                self._errors[place] = failure(_plain_acknowledgement(request, info), error)

    def _expire(self) -> None:
        """Not committed in the requests' own time: say so for those that still wait."""
        self._timer = None
        for hosted, token in tuple(self._commits.items()):
            hosted.partition.forget_commit(token)  # which calls if the wait is over
        if self.segments is not None:
            return
        late = _timeout_code(self._context)
        for place, (request, hosted, info) in enumerate(self.entries):
            is_late = hosted in self._flushes or (
                hosted in self._commits and info.last_offset >= hosted.partition.high_watermark
            )
            if is_late and place not in self._errors:
                self._errors[place] = _plain_acknowledgement(request, info)._replace(
                    error_code=late
                )
        self._answer()

    def _answer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        connection = self._connection
        entries = self.entries
        connection.count_served(api.PRODUCE, len(entries), self._started)
        frames = self._frames() if self._errors else encode_run(entries)
        if self.throttle_ms and not self._errors:
            (version, *_), _, _ = entries[-1]
            after = 1 if version >= codec.FLEXIBLE else 0  # no tags
            frames = with_throttle(frames, len(frames) - 4 - after, self.throttle_ms)
        self._release()
        connection.complete(self, [frames])

    def _frames(self) -> bytes:
        """The responses, some of which are errors."""
        frames = []
        for place, (request, _, info) in enumerate(self.entries):
            version, correlation_id, _, _, topic, _, _, _ = request
            result = self._errors.get(place) or _plain_acknowledgement(request, info)
            steps = encoded_steps(
                self._context.hints,
                self._connection.listener.name,
                version,
                correlation_id,
                [(topic, [result])],
                self.throttle_ms if place == len(self.entries) - 1 else 0,
            )
            frames.append(run_to_end(steps))
        return b"".join(frames)


def _acknowledgement(index: int, info: AppendInfo) -> codec.PartitionResult:
    """The result of a batch that was appended, unless it turns out that it does not count."""
    return codec.PartitionResult(
        index, 0, info.base_offset, info.log_append_time, info.log_start_offset
    )


def _plain_acknowledgement(request: codec.PlainRequest, info: AppendInfo) -> codec.PartitionResult:
    _, _, _, _, _, partition, _, _ = request
    return _acknowledgement(partition, info)


def encoded_steps(  # noqa: PLR0917
    hints: LeaderHints,
    listener: str,
    version: int,
    correlation_id: int,
    topics: list[tuple[bytes, list[codec.PartitionResult]]],
    throttle_ms: int = 0,
) -> Steps[bytes]:
    """A response's frame, with where the leaders are that were looked for here (KIP-951)."""
    leaders: list[tuple[int, int]] = []
    if version >= PRODUCE_HINTS:
        for name, results in topics:
            for place, result in enumerate(results):
                if place & 63 == 63:
                    yield
                if result.error_code == error_codes.NOT_LEADER_OR_FOLLOWER:
                    by_id = version >= codec.TOPIC_IDS
                    leader = hints.current_leader(name, result.partition, by_id)
                    if leader is not None:
                        results[place] = result._replace(current_leader=leader)
                        leaders.append(leader)
    found = hints.endpoints(listener, leaders)
    return (yield from codec.encode_steps(version, correlation_id, topics, found, throttle_ms))


def write_staged(connection: Connection, failed: dict[Partition, KeptError]) -> None:
    """Write what was staged; adds the partitions where that failed."""
    dirty, connection.dirty = connection.dirty, {}
    for partition in dirty:
        try:
            partition.write()
        except KeptError as error:
            failed[partition] = error.without_frames()


def write(connection: Connection, failed: dict[Partition, KeptError] | None = None) -> None:
    """End of a readiness event: write what was staged, then let answers go on their way. ``failed``
    are the partitions where writing failed before.
    """
    failed = {} if failed is None else failed
    write_staged(connection, failed)
    connection.close_run()
    unwritten, connection.unwritten = connection.unwritten, []
    for produced in unwritten:
        produced.written(failed)
