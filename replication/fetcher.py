"""One stream of Fetch requests to one leader, for many partitions, as a state machine.

:meth:`FetcherCore.tick` returns the request to send now, :meth:`FetcherCore.step` takes the answer
and returns, by partition, what the shell must do to the logs before the next tick. What it could
not do is a :class:`WorkFailed`. One request is in flight at a time. The work per request follows
the partitions that changed, not those that are there.

Rules are Kafka's (``AbstractFetcherThread``, ``ReplicaFetcherThread``, ``RemoteLeaderEndPoint``):
partitions that back off, are throttled (KIP-73) or wait for their flush are not asked for; those
that got records go to the end of the line; when the leader cannot be reached the stream as a whole
waits, longer each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final
from uuid import UUID

from msgspec import Struct

from kept.replication.fetch_messages import (
    REQUEST_TIMED_OUT,
    FetchRequest,
    FetchResponse,
    OffsetsRequest,
    OffsetsResponse,
    PartitionRequest,
)
from kept.replication.fetch_session import FetchSession
from kept.replication.follower import (
    BecameFollower,
    EffectFailed,
    Effects,
    FollowerCore,
    FollowerLog,
    FollowerState,
    OffsetsReceived,
    StoppedFollowing,
)
from kept.replication.quota import ReplicationQuota
from kept.storage.errors import InvariantViolation, KeptError
from kept.storage.types import TopicPartition

NEVER: Final = 1 << 62
"""``wake_at_ms`` when only an event can change anything."""
PATIENCE_MS: Final = 20
"""An answer that is on its way arrives within this; see :attr:`FetcherCore.impatient_at_ms`."""
THROTTLED_RETRY_MS: Final = 100
"""How often a throttled partition is looked at again."""

Work = tuple[tuple[TopicPartition, Effects], ...]
"""What to do to the logs, by partition, in order."""


class FetchResponseReceived(Struct, frozen=True):
    """The leader's answer to a Fetch. Ignored if ``request`` is not the one in flight."""

    request: FetchRequest
    response: FetchResponse


class OffsetsListed(Struct, frozen=True):
    """The leader's answers to a ListOffsets, as :class:`FetchResponseReceived`."""

    request: OffsetsRequest
    responses: tuple[OffsetsResponse, ...]


class RequestFailed(Struct, frozen=True):
    """No answer came: the connection is gone, or it took too long."""

    request: FetchRequest | OffsetsRequest


class RequestAbandoned(Struct, frozen=True):
    """The shell closed the connection of ``request``; the next request goes out at once."""

    request: FetchRequest | OffsetsRequest


class WorkFailed(Struct, frozen=True):
    """An effect could not be performed: the partition backs off, or stops with its disk."""

    tp: TopicPartition
    error: KeptError


Event = FetchResponseReceived | OffsetsListed | RequestFailed | RequestAbandoned | WorkFailed


class FetchSettings(Struct, frozen=True):
    """Kafka's ``replica.fetch.*``. ``backoff_min_ms`` (ours) is the first wait after an error; it
    doubles up to ``backoff_max_ms``, Kafka's ``replica.fetch.backoff.ms``.
    """

    max_wait_ms: int = 500
    min_bytes: int = 1
    response_max_bytes: int = 10 << 20
    partition_max_bytes: int = 1 << 20
    backoff_min_ms: int = 10
    backoff_max_ms: int = 1000


@dataclass(slots=True)
class _Member:
    topic_id: UUID
    core: FollowerCore
    throttled: bool = False


class FetcherCore:
    """Decides which partitions are fetched from one leader, and when. ``quota`` is shared by all
    fetchers of a node; None: nothing is throttled.
    """

    def __init__(
        self,
        leader_id: int,
        settings: FetchSettings | None = None,
        quota: ReplicationQuota | None = None,
    ) -> None:
        self.leader_id = leader_id
        self.settings = settings or FetchSettings()
        self.session = FetchSession()
        self.in_flight: FetchRequest | OffsetsRequest | None = None
        self.failures = 0
        self.retry_at_ms = 0
        self.impatient_at_ms = NEVER
        """When to give up waiting for the answer in flight (:class:`RequestAbandoned`), because new
        partitions wait behind it: a leader holds a request up to ``max_wait_ms``, and acks=all of
        the new ones would wait as long after a failover."""
        self._quota = quota
        self._members: dict[TopicPartition, _Member] = {}
        self._changed: dict[TopicPartition, None] = {}
        self._awaiting_offsets: dict[TopicPartition, None] = {}
        self._delayed: list[tuple[int, TopicPartition]] = []

    def __repr__(self) -> str:
        return f"FetcherCore(leader {self.leader_id}, {len(self._members)} partitions)"

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, tp: TopicPartition) -> bool:
        return tp in self._members

    def step(self, event: Event, now_ms: int) -> Work:
        """Take one event; returns what to do to the logs before the next request is made."""
        match event:
            case FetchResponseReceived(request, answer):
                return self.fetch_answered(request, answer, now_ms)
            case OffsetsListed(request, answers):
                return self._offsets_listed(request, answers, now_ms)
            case RequestFailed(request):
                self._request_ended(request, now_ms, failed=True)
            case RequestAbandoned(request):
                self._request_ended(request, now_ms, failed=False)
            case WorkFailed(tp, error):
                if (member := self._members.get(tp)) is not None:
                    member.core.step(EffectFailed(error), now_ms)
                    self._follow_up(tp, member.core)
        return ()

    def tick(self, now_ms: int) -> tuple[FetchRequest | OffsetsRequest, ...]:
        """The request to send now, if there is one: :meth:`next_request`."""
        request = self.next_request(now_ms)
        return () if request is None else (request,)

    # Who is followed.

    def add(
        self,
        tp: TopicPartition,
        topic_id: UUID,
        log: FollowerLog,
        leader_epoch: int,
        *,
        throttled: bool = False,
        now_ms: int | None = None,
    ) -> None:
        """Follow this leader for a partition, or go on in another epoch.

        ``throttled``: it is among ``follower.replication.throttled.replicas``. With ``now_ms`` it
        need not wait for a request that the leader holds: see :attr:`impatient_at_ms`.
        """
        settings = self.settings
        member = self._members.get(tp)
        if member is None or member.topic_id != topic_id or member.core.log is not log:
            core = FollowerCore(log, settings.backoff_min_ms, settings.backoff_max_ms)
            member = self._members[tp] = _Member(topic_id, core)
        member.throttled = throttled
        member.core.step(BecameFollower(self.leader_id, leader_epoch), now_ms or 0)
        self._follow_up(tp, member.core)
        if self.in_flight is not None and now_ms is not None:
            self.impatient_at_ms = min(self.impatient_at_ms, now_ms + PATIENCE_MS)

    def remove(self, tp: TopicPartition) -> None:
        """Follow it no more; unknown ones are no error. A late answer for it is ignored."""
        member = self._members.pop(tp, None)
        if member is not None:
            member.core.step(StoppedFollowing(), 0)
            self._awaiting_offsets.pop(tp, None)
            self._changed[tp] = None

    def core(self, tp: TopicPartition) -> FollowerCore | None:
        """The follower of a partition."""
        member = self._members.get(tp)
        return None if member is None else member.core

    def nudge(self, tp: TopicPartition) -> None:
        """Something that holds a partition back may be over: its flush, a change of throttles; or
        its log was cut by somebody else, and the session says an offset that it has no more.
        """
        if tp in self._members:
            self._changed[tp] = None

    def unflushed(self) -> list[TopicPartition]:
        """Partitions that would be asked for, were they flushed (``flush.messages``).

        The shell flushes them before it asks for the next request: nobody else looks after them.
        """
        candidates = self._members if self.session.full else self._changed
        return [tp for tp in candidates if (core := self.core(tp)) and core.awaits_flush]

    def set_throttled(self, tp: TopicPartition, throttled: bool) -> None:
        """The throttled replicas changed."""
        member = self._members.get(tp)
        if member is not None:
            member.throttled = throttled
            self._changed[tp] = None

    # Requests.

    def wake_at_ms(self) -> int:
        """When to call :meth:`next_request` again if nothing happens before; NEVER: not at all."""
        if self.in_flight is not None or not self._members:
            return NEVER
        if self._changed or (self.session.sent and not self.session.full):
            return self.retry_at_ms
        at = self._delayed[0][0] if self._delayed else NEVER
        return max(at, self.retry_at_ms)

    def next_request(self, now_ms: int) -> FetchRequest | OffsetsRequest | None:
        """What to send now; None while a request is in flight, or there is nothing to ask."""
        if self.in_flight is not None or now_ms < self.retry_at_ms:
            return None
        delayed = self._delayed
        while delayed and delayed[0][0] <= now_ms:
            tp = heappop(delayed)[1]
            if tp in self._members:
                self._changed[tp] = None
        self.in_flight = self._offsets_request(now_ms) or self._fetch_request(now_ms)
        return self.in_flight

    def _offsets_request(self, now_ms: int) -> OffsetsRequest | None:
        if not self._awaiting_offsets:
            return None
        partitions = []
        for tp in tuple(self._awaiting_offsets):
            member = self._members[tp]
            if member.core.state is not FollowerState.LISTING_OFFSETS:
                del self._awaiting_offsets[tp]
            elif member.core.wants(now_ms):
                partitions.append((tp, member.topic_id, member.core.leader_epoch))
        return OffsetsRequest(tuple(partitions)) if partitions else None

    def _fetch_request(self, now_ms: int) -> FetchRequest | None:
        session, settings = self.session, self.settings
        candidates = (*self._members, *self._changed) if session.full else tuple(self._changed)
        wanted = {tp: self._wanted(tp, now_ms) for tp in candidates}
        if session.full and not any(wanted.values()):
            self._changed.clear()
            return None
        partitions, forgotten = session.changes(wanted)
        self._changed.clear()
        if not session.sent:
            session.failed()
            return None
        max_wait_ms = settings.max_wait_ms
        if self._delayed:
            # The leader holds it no longer than until somebody's back-off is over.
            max_wait_ms = min(max_wait_ms, max(self._delayed[0][0] - now_ms, 1))
        return FetchRequest(
            session.session_id,
            session.epoch,
            max_wait_ms,
            settings.min_bytes,
            settings.response_max_bytes,
            partitions,
            forgotten,
        )

    def _wanted(self, tp: TopicPartition, now_ms: int) -> PartitionRequest | None:
        member = self._members.get(tp)
        if member is None:
            return None
        core = member.core
        if core.state is not FollowerState.FETCHING or not core.wants(now_ms):
            return None
        quota = self._quota
        if member.throttled and quota is not None and not core.in_sync and quota.exceeded(now_ms):
            heappush(self._delayed, (now_ms + THROTTLED_RETRY_MS, tp))
            return None
        log = core.log
        return PartitionRequest(
            tp,
            member.topic_id,
            core.leader_epoch,
            log.log_end_offset,
            log.latest_epoch,
            log.log_start_offset,
            self.settings.partition_max_bytes,
        )

    # Answers.

    def fetch_answered(self, request: FetchRequest, answer: FetchResponse, now_ms: int) -> Work:
        """As :class:`FetchResponseReceived`, for the path of every fetch."""
        if request is not self.in_flight:
            return ()
        self._clear_in_flight()
        session = self.session
        if not session.accept(answer):
            self._start_over(now_ms)
            return ()
        self.failures = self.retry_at_ms = 0
        work: list[tuple[TopicPartition, Effects]] = []
        for part in answer.partitions:
            tp = part.tp
            member = self._members.get(tp)
            requested = session.sent.get(tp)
            if member is None or requested is None:
                continue
            if requested.topic_id is not member.topic_id and requested.topic_id != member.topic_id:
                continue
            effects = member.core.fetch_completed(requested, part, now_ms)
            self._follow_up(tp, member.core)
            if effects:
                work.append((tp, effects))
            size = len(part.records)
            if size:
                del self._members[tp]
                self._members[tp] = member
                if member.throttled and self._quota is not None:
                    self._quota.record(size, now_ms)
        return tuple(work)

    def _offsets_listed(
        self, request: OffsetsRequest, answers: tuple[OffsetsResponse, ...], now_ms: int
    ) -> Work:
        if request is not self.in_flight:
            return ()
        self._clear_in_flight()
        self.failures = self.retry_at_ms = 0
        epochs = {tp: epoch for tp, _, epoch in request.partitions}
        work: list[tuple[TopicPartition, Effects]] = []
        unanswered = epochs.keys() - {answer.tp for answer in answers}
        absent = tuple(OffsetsResponse(tp, REQUEST_TIMED_OUT) for tp in unanswered)
        for answer in (*answers, *absent):
            member = self._members.get(answer.tp)
            epoch = epochs.get(answer.tp)
            if member is None or epoch is None:
                continue
            effects = member.core.step(OffsetsReceived(epoch, answer), now_ms)
            self._follow_up(answer.tp, member.core)
            if effects:
                work.append((answer.tp, effects))
        return tuple(work)

    def _follow_up(self, tp: TopicPartition, core: FollowerCore) -> None:
        """Look at the partition again: now, or when its back-off is over."""
        self._changed[tp] = None
        if core.state is FollowerState.LISTING_OFFSETS:
            self._awaiting_offsets[tp] = None
        else:
            self._awaiting_offsets.pop(tp, None)
        if core.retry_at_ms > 0:
            heappush(self._delayed, (core.retry_at_ms, tp))

    def _request_ended(
        self, request: FetchRequest | OffsetsRequest, now_ms: int, *, failed: bool
    ) -> None:
        """Without an answer; the session ends, too."""
        if request is self.in_flight:
            self._clear_in_flight()
            self.session.failed()
            if failed:
                self._start_over(now_ms)
            else:
                self._changed.update(dict.fromkeys(self._members))

    def _clear_in_flight(self) -> None:
        self.in_flight = None
        self.impatient_at_ms = NEVER

    def _start_over(self, now_ms: int) -> None:
        """Everything is to be asked again: at once the first time, then later and later."""
        self._changed.update(dict.fromkeys(self._members))
        self.failures += 1
        settings = self.settings
        if self.failures > 1:
            doublings = min(self.failures - 2, 20)
            wait_ms = min(settings.backoff_max_ms, settings.backoff_min_ms << doublings)
            self.retry_at_ms = now_ms + wait_ms

    def check_invariants(self) -> None:
        """Raises InvariantViolation for a state that must not exist."""
        for tp, member in self._members.items():
            core = member.core
            core.check_invariants()
            if core.leader_id != self.leader_id:
                raise InvariantViolation(f"{self} follows {core.leader_id} for {tp}")
            if core.state is FollowerState.LISTING_OFFSETS and tp not in self._awaiting_offsets:
                raise InvariantViolation(f"{self}: {tp} is not asked for its offsets")
        if self.failures and self.in_flight is None and self.retry_at_ms < 0:
            raise InvariantViolation(f"{self}: {self.failures} failures")
