"""Incremental fetch sessions (KIP-227).

A session remembers which partitions a consumer reads, so that a request carries only changes and a
response only partitions with news. The cache has a fixed number of slots; a full cache answers
new sessions with id 0 (sessionless), after evicting what has been idle longer than
:data:`EVICTION_MS`. Errors: 70 for an unknown session, 71 for a wrong epoch, 106 where a session
made with names goes on with topic ids or the other way round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kept.node import error_codes
from kept.node.hot import fetch as codec

SLOTS: Final = 1000
"""Kafka's max.incremental.fetch.session.cache.slots: a session of 1,000 partitions is ~100 KB."""
EVICTION_MS: Final = 120_000
MAX_EPOCH: Final = 2**31 - 1
INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1

Key = tuple[bytes, int]
"""(topic name or id as on the wire, partition)"""


class CachedPartition:
    """A partition of a session: what is asked of it, and what was last answered."""

    __slots__ = ("answered", "request")

    def __init__(self, request: codec.FetchPartition) -> None:
        self.request = request
        self.answered: tuple[int, int, int, int] | None = None
        """(error_code, high_watermark, last_stable_offset, log_start_offset) of the last response
        """

    def has_news(self, data: codec.PartitionData) -> bool:
        """Whether a response must carry ``data``; remembers it as answered."""
        state = data[1:5]
        news = (
            data.records is not None
            or data.error_code != 0
            or data.diverging is not None
            or data.preferred_replica >= 0
            or state != self.answered
        )
        # After an error the next answer is always sent, so that the client sees it heal.
        self.answered = state if data.error_code == 0 else None
        return news


class Session:
    """One consumer's session. ``epoch`` is what the next request must carry."""

    __slots__ = ("epoch", "id", "last_used_ms", "partitions", "uses_ids")

    def __init__(self, session_id: int, uses_ids: bool, now_ms: int) -> None:
        self.id = session_id
        self.uses_ids = uses_ids
        self.epoch = 1
        self.last_used_ms = now_ms
        self.partitions: OrderedDict[Key, CachedPartition] = OrderedDict()

    def update(self, request: codec.FetchRequest) -> None:
        """Take over what a request adds, changes and forgets."""
        for topic, wanted in request.topics:
            for partition in wanted:
                cached = self.partitions.get((topic, partition.partition))
                if cached is None:
                    self.partitions[topic, partition.partition] = CachedPartition(partition)
                else:
                    cached.request = partition
        for topic, forgotten in request.forgotten:
            for index in forgotten:
                self.partitions.pop((topic, index), None)


class FetchSessions:
    """The cache of a node. ``draw`` gives a random positive 31-bit id."""

    def __init__(self, draw: Callable[[], int], slots: int = SLOTS) -> None:
        self._draw = draw
        self._slots = slots
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        """By id, least recently used first."""

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self, request: codec.FetchRequest, uses_ids: bool, now_ms: int
    ) -> tuple[int, Session | None]:
        """(error code, session) for a request; (0, None) is a sessionless fetch."""
        if request.session_epoch == FINAL_EPOCH:
            self._sessions.pop(request.session_id, None)
            return error_codes.NONE, None
        if request.session_epoch == INITIAL_EPOCH:
            self._sessions.pop(request.session_id, None)
            return error_codes.NONE, self._create(request, uses_ids, now_ms)
        session = self._sessions.get(request.session_id)
        if session is None:
            return error_codes.FETCH_SESSION_ID_NOT_FOUND, None
        if session.uses_ids != uses_ids:
            return error_codes.FETCH_SESSION_TOPIC_ID_ERROR, None
        if session.epoch != request.session_epoch:
            return error_codes.INVALID_FETCH_SESSION_EPOCH, None
        session.epoch = 1 if session.epoch == MAX_EPOCH else session.epoch + 1
        session.last_used_ms = now_ms
        self._sessions.move_to_end(session.id)
        session.update(request)
        return error_codes.NONE, session

    def _create(self, request: codec.FetchRequest, uses_ids: bool, now_ms: int) -> Session | None:
        if len(self._sessions) >= self._slots:
            oldest = next(iter(self._sessions.values()))
            if now_ms - oldest.last_used_ms <= EVICTION_MS:
                return None
            del self._sessions[oldest.id]
        session_id = self._draw()
        while session_id in self._sessions or session_id <= 0:
            session_id = self._draw()
        session = Session(session_id, uses_ids, now_ms)
        session.update(request)
        self._sessions[session_id] = session
        return session
