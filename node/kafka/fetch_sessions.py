"""Incremental fetch sessions (KIP-227), and what is new in them.

A session remembers which partitions a consumer or follower reads, so that a request carries only
changes and a response only partitions with news. The work of a request follows the partitions that
moved, too: a partition that was read to its end, with nothing left to tell, *rests*. It watches its
replica, and is *due* again when the end, the high watermark, the start, the leader or the ISR moves
there, or when a request names it. A thousand idle partitions cost nothing.

The cache has a fixed number of slots, and of partitions in all of them
(``kept.fetch.sessions.max.partitions``). What has been idle longer than :data:`EVICTION_MS` gives
way first. For partitions the largest session of a consumer gives way to a smaller one, which keeps
the most readers at their ease: Kafka, which counts slots only, lets the larger one stay. Followers
give way to nobody. Where there is no room a fetch is answered with id 0 (sessionless), which costs
its client longer requests and nothing else.

Errors: 70 for an unknown session, and for another reader's (a consumer has no part in a
follower's, nor one principal in another's), 71 for a wrong epoch, 106 where a session made with
names goes on with topic ids or the other way round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kept.node.kafka.codec import fetch as codec
from kept.node.runtime import error_codes

if TYPE_CHECKING:
    import asyncio

    from kept.replication.fetch_messages import FetchPartition
    from kept.replication.partition import Partition

SLOTS: Final = 1000
"""Kafka's max.incremental.fetch.session.cache.slots: one of 1,000 resting partitions
is 0.6 MB, a follower's 0.9."""
MAX_PARTITIONS: Final = 250_000
"""kept.fetch.sessions.max.partitions: 0.4 KB each, if its topic is unknown, to 0.9."""
PARKED_PARTITIONS: Final = 3
"""A fetch that waits counts as so many partitions more: 2.7 KB with its first one."""
EVICTION_MS: Final = 120_000
MAX_EPOCH: Final = 2**31 - 1
INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
SESSIONLESS: Final = 0

Key = tuple[bytes, int]
"""(topic name or id as on the wire, partition)"""


class CachedPartition:
    """A partition of a session: what is asked of it, and what was last answered."""

    __slots__ = ("at_end", "key", "last_response", "partition", "request", "session")

    def __init__(self, session: Session, key: Key, request: FetchPartition) -> None:
        self.session: Session | None = session
        """None once that is closed: else only the collector of garbage would free both, which looks
        next to never at what has lived for a while, as a large session has."""
        self.key = key
        self.request = request
        self.last_response: tuple[int, int, int, int] | None = None
        """(error_code, high_watermark, last_stable_offset, log_start_offset) of the last response
        """
        self.partition: Partition | None = None
        """The replica here that was read last, and is watched while this rests."""
        self.at_end = False
        """The last reading found all there is: once that is answered, it may rest."""

    def must_respond(self, data: codec.PartitionData) -> bool:
        """Whether a response must carry ``data``; remembers it as answered."""
        state = data[1:5]
        must_respond = (
            data.records is not None
            or data.error_code != 0
            or data.diverging is not None
            or data.preferred_replica >= 0
            or state != self.last_response
        )
        # After an error the next answer is always sent, so that the client sees it heal; and after
        # a divergence, which a follower that has cut its log is to hear has ended.
        agrees = data.error_code == 0 and data.diverging is None
        self.last_response = state if agrees else None
        return must_respond

    def read_from(self, partition: Partition) -> None:
        """It is this replica that is read: a topic's name may come to mean another one."""
        if partition is not self.partition:
            self.unwatch()
            self.partition = partition

    def watch(self) -> None:
        """Hear of the replica's next move. A follower waits for the end, and for commits only where
        consumers read from it; elsewhere the next answer, whatever it is for, tells of them.
        """
        partition, session = self.partition, self.session
        if partition is None or session is None:
            return
        if session.replica_id < 0:
            partition.add_waiter(self.mark_due_and_wake)
        else:
            partition.add_waiter(self.mark_due_and_wake, replica=True)
            partition.add_waiter(
                self.mark_due_and_wake if session.awaits_commits else self.mark_due
            )

    def unwatch(self) -> None:
        """Hear of nothing any more."""
        if self.partition is not None:
            self.partition.remove_waiter(self.mark_due_and_wake)
            self.partition.remove_waiter(self.mark_due)

    def mark_due_and_wake(self) -> None:
        """There is something new to read, or to be told: the fetch that is parked reads again."""
        session, partition = self.session, self.partition
        self.unwatch()
        if session is None:
            return
        self.at_end = False  # of a reading that is not answered yet
        session.due[self.key] = self
        if session.replica_id >= 0 and partition is not None:
            # The end has not moved since this is watched: what that follower had then, it had with
            # every request since, though they did not name the partition.
            partition.follower_polled(session.replica_id, session.last_used_ms)
        if session.wake_fetch is not None:
            session.wake_fetch()

    def mark_due(self) -> None:
        """There is something to be told with the next answer; the end is watched on."""
        if self.partition is not None:
            self.partition.remove_waiter(self.mark_due)
        self.at_end = False
        if self.session is not None:
            self.session.due[self.key] = self


class Session:
    """What one reader reads. ``epoch`` is what its next request must carry."""

    __slots__ = (
        "_timer",
        "_timer_at",
        "_wait_ends_at",
        "awaits_commits",
        "closed",
        "due",
        "epoch",
        "id",
        "last_used_ms",
        "on_time_up",
        "owner",
        "partitions",
        "recheck",
        "replica_id",
        "uses_ids",
        "wake_fetch",
    )

    def __init__(
        self,
        session_id: int,
        request: codec.FetchRequest,
        uses_ids: bool,
        now_ms: int,
        owner: str = "",
    ) -> None:
        self.owner = owner
        """The principal that opened it: nobody else goes on with it."""
        self.recheck = False
        """What may be read has changed since its partitions were read."""
        self.id = session_id
        self.uses_ids = uses_ids
        self.replica_id = request.replica_id
        self.awaits_commits = False
        """A follower that consumers read from hears of a commit at once."""
        self.epoch = 1
        self.last_used_ms = now_ms
        self.closed = False
        self.partitions: dict[Key, CachedPartition] = {}
        self.due: dict[Key, CachedPartition] = {}
        """What does not rest, in the order of reading: who got records goes to the end."""
        self.wake_fetch: Callable[[], None] | None = None
        """Makes the request that is parked, or reads in slices, read again; None: there is none."""
        self.on_time_up: Callable[[], None] | None = None
        """Of the request that is parked, too; None: none is."""
        self._wait_ends_at = self._timer_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.update(request)

    def update(self, request: codec.FetchRequest) -> None:
        """Take over what a request adds, changes and forgets."""
        partitions, due = self.partitions, self.due
        for topic, wanted in request.topics:
            for partition in wanted:
                key = (topic, partition.partition)
                cached = partitions.get(key)
                if cached is None:
                    cached = partitions[key] = CachedPartition(self, key, partition)
                else:
                    if cached.request.current_leader_epoch != partition.current_leader_epoch:
                        cached.last_response = (
                            None  # it is told that the logs agree in this epoch, too
                        )
                    cached.request = partition
                due[key] = cached
        for topic, forgotten in request.forgotten:
            for index in forgotten:
                gone = partitions.pop((topic, index), None)
                due.pop((topic, index), None)
                if gone is not None:
                    gone.unwatch()
                    if self.replica_id >= 0 and gone.partition is not None:
                        gone.partition.follower_stopped(self.replica_id)

    def recheck_all(self) -> None:
        """Before a reading, when :attr:`recheck` says so: all partitions are due."""
        self.recheck = False
        for key, cached in self.partitions.items():
            self.due.setdefault(key, cached)

    def watch(self) -> None:
        """A request is parked: hear of what is due, too. What rests is watched anyway."""
        for cached in self.due.values():
            cached.watch()

    def wait_until(
        self, ends_at: float, loop: asyncio.AbstractEventLoop, on_time_up: Callable[[], None]
    ) -> None:
        """A request is parked until then, by the loop's clock; the wait of an earlier one ends.

        The timer outlives the wait, and is moved when it goes off: a follower is answered a
        thousand times before its time is up once.
        """
        if self.on_time_up is not None:
            self.on_time_up()
        self.on_time_up, self._wait_ends_at = on_time_up, ends_at
        if self._timer is None or ends_at < self._timer_at:
            self._set_timer(loop)

    def wait_ended(self, on_time_up: Callable[[], None]) -> None:
        """The request that waits so is answered, or its connection is gone: a session that was
        closed meanwhile needs no timer any more, and would live as long as one.
        """
        if self.on_time_up != on_time_up:
            return
        self.on_time_up = None
        if self.closed:
            self._cancel_timer()

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._cancel_timer()
        self._timer_at = self._wait_ends_at
        self._timer = loop.call_at(self._timer_at, self._timer_fired, loop)

    def _timer_fired(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self.on_time_up is None:
            return
        if self._wait_ends_at > self._timer_at:
            self._set_timer(loop)
        else:
            self.on_time_up()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def responded(self, cached: CachedPartition, data: codec.PartitionData) -> None:
        """``data`` was answered (or is as answered before): may the partition rest?"""
        key = cached.key
        if self.partitions.get(key) is not cached:
            return
        if data.records is not None:
            self.due.pop(key, None)
            self.due[key] = cached
        elif cached.at_end:
            self.due.pop(key, None)
            cached.watch()

    def close(self) -> None:
        """It is used no more; a request that is parked is answered when its time is up."""
        self.closed = True
        self.wake_fetch = None
        if self.on_time_up is None:
            self._cancel_timer()
        for cached in self.partitions.values():
            cached.unwatch()
            cached.session = None


class FetchSessions:
    """The cache of a node. ``draw`` gives a random positive 31-bit id.

    ``held_partitions`` counts those of all sessions, and of sessionless fetches that are parked.
    """

    def __init__(
        self,
        draw: Callable[[], int],
        slots: int = SLOTS,
        max_partitions: int = MAX_PARTITIONS,
    ) -> None:
        self._draw = draw
        self._slots = slots
        self._max_partitions = max_partitions
        self.held_partitions = 0
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        """By id, least recently used first."""

    def __len__(self) -> int:
        return len(self._sessions)

    def of_followers(self) -> list[Session]:
        """The sessions of other brokers, least recently used first."""
        return [session for session in self._sessions.values() if session.replica_id >= 0]

    def access_changed(self) -> None:
        """What consumers may read has changed: each session reads all of its partitions once."""
        for session in self._sessions.values():
            session.recheck = session.replica_id < 0

    def open(
        self, request: codec.FetchRequest, uses_ids: bool, now_ms: int, owner: str = ""
    ) -> tuple[int, Session | None]:
        """(error code, session) for a request of ``owner``; (0, None) is a sessionless fetch."""
        if request.session_epoch == FINAL_EPOCH:
            self._close_own(request, owner)
            return error_codes.NONE, None
        if request.session_epoch == INITIAL_EPOCH:
            self._close_own(request, owner)
            return error_codes.NONE, self._create(request, uses_ids, now_ms, owner)
        session = self._sessions.get(request.session_id)
        if session is None or (session.replica_id, session.owner) != (request.replica_id, owner):
            return error_codes.FETCH_SESSION_ID_NOT_FOUND, None
        if session.uses_ids != uses_ids:
            return error_codes.FETCH_SESSION_TOPIC_ID_ERROR, None
        if session.epoch != request.session_epoch:
            return error_codes.INVALID_FETCH_SESSION_EPOCH, None
        session.epoch = 1 if session.epoch == MAX_EPOCH else session.epoch + 1
        session.last_used_ms = now_ms
        self._sessions.move_to_end(session.id)
        before = len(session.partitions)
        session.update(request)
        self.held_partitions += len(session.partitions) - before
        if self.held_partitions > self._max_partitions and not self._make_room(
            0, len(session.partitions), session, session.replica_id >= 0, now_ms
        ):
            self._close(session.id)
            return error_codes.FETCH_SESSION_ID_NOT_FOUND, None
        return error_codes.NONE, session

    def close(self, session: Session) -> None:
        """A session is used no more; one that is not of this cache is none."""
        if self._sessions.get(session.id) is session:
            self._close(session.id)

    def park(self, session: Session) -> bool:
        """Whether a fetch may wait; a follower's always may."""
        cost = _parked(session)
        if session.replica_id < 0 and self.held_partitions + cost > self._max_partitions:
            return False
        self.held_partitions += cost
        return True

    def unpark(self, session: Session) -> None:
        """A fetch that was parked waits no more."""
        self.held_partitions -= _parked(session)

    def _create(
        self, request: codec.FetchRequest, uses_ids: bool, now_ms: int, owner: str
    ) -> Session | None:
        size = sum(len(partitions) for _, partitions in request.topics)
        follower = request.replica_id >= 0
        if not self._free_slot(follower, now_ms):
            return None
        if not self._make_room(size, size, None, follower, now_ms):
            return None
        session_id = self._draw()
        while session_id in self._sessions or session_id <= 0:
            session_id = self._draw()
        session = Session(session_id, request, uses_ids, now_ms, owner)
        self._sessions[session_id] = session
        self.held_partitions += len(session.partitions)
        return session

    def _free_slot(self, follower: bool, now_ms: int) -> bool:
        if len(self._sessions) < self._slots:
            return True
        oldest = next(iter(self._sessions.values()), None)
        if oldest is not None and now_ms - oldest.last_used_ms <= EVICTION_MS:
            consumers = (s for s in self._sessions.values() if s.replica_id < 0)
            oldest = next(consumers, None) if follower else None
        if oldest is None:
            return False
        self._close(oldest.id)
        return True

    def _make_room(
        self, more: int, size: int, keep: Session | None, follower: bool, now_ms: int
    ) -> bool:
        """Close other sessions until ``more`` partitions fit, for one that then has ``size``."""
        while self.held_partitions + more > self._max_partitions:
            others = [session for session in self._sessions.values() if session is not keep]
            if others and now_ms - others[0].last_used_ms > EVICTION_MS:
                self._close(others[0].id)
                continue
            consumers = [session for session in others if session.replica_id < 0]
            largest = max(consumers, key=lambda s: len(s.partitions), default=None)
            if largest is None or not (follower or len(largest.partitions) > size):
                return False
            self._close(largest.id)
        return True

    def _close_own(self, request: codec.FetchRequest, owner: str) -> None:
        """A consumer does not reach a follower's session, or another's, whatever id it names."""
        session = self._sessions.get(request.session_id)
        if session is not None and (session.replica_id, session.owner) == (
            request.replica_id,
            owner,
        ):
            self._close(session.id)

    def _close(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self.held_partitions -= len(session.partitions)
            session.close()


def _parked(session: Session) -> int:
    """What a fetch counts for that waits: without a session its partitions are remembered, too."""
    return PARKED_PARTITIONS + (len(session.partitions) if session.id == SESSIONLESS else 0)
