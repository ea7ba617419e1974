"""The follower's half of an incremental fetch session (KIP-227; ``FetchSessionHandler``).

The leader remembers what was asked of every partition, so a request names only what changed, and an
answer only partitions with news: a thousand idle partitions cost nothing. ``sent`` is what the
leader knows. A request that failed or was refused ends the session; the next one lists everything.
A leader without room for sessions answers with id 0, and is sent everything each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from kept.replication.fetch_messages import (
    FETCH_SESSION_ID_NOT_FOUND,
    FULL_REQUEST,
    NO_SESSION,
    NONE,
    FetchResponse,
    PartitionRequest,
)
from kept.storage.types import TopicPartition

MAX_EPOCH: Final = 2**31 - 1

Forgotten = tuple[tuple[TopicPartition, UUID], ...]


@dataclass(slots=True)
class FetchSession:
    """One session with one leader. ``epoch``: of the next request."""

    session_id: int = NO_SESSION
    epoch: int = FULL_REQUEST
    sent: dict[TopicPartition, PartitionRequest] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """The next request lists everything."""
        return self.epoch == FULL_REQUEST

    def changes(
        self, wanted: Mapping[TopicPartition, PartitionRequest | None]
    ) -> tuple[tuple[PartitionRequest, ...], Forgotten]:
        """What a request must carry so that the leader knows ``wanted`` (None: not any more).

        From then on the leader is taken to know it.
        """
        if self.full:
            self.sent.clear()
        news: list[PartitionRequest] = []
        forgotten: list[tuple[TopicPartition, UUID]] = []
        for tp, request in wanted.items():
            known = self.sent.get(tp)
            if request is None:
                if known is not None:
                    forgotten.append((tp, known.topic_id))
                    del self.sent[tp]
            elif request != known:
                if known is not None and known.topic_id != request.topic_id:
                    forgotten.append((tp, known.topic_id))
                news.append(request)
                self.sent[tp] = request
        return tuple(news), tuple(forgotten)

    def accept(self, answer: FetchResponse) -> bool:
        """Step to the next epoch; False when the session is over and the response says nothing."""
        if answer.error != NONE:
            if answer.error == FETCH_SESSION_ID_NOT_FOUND:
                self.session_id = NO_SESSION
            self.epoch = FULL_REQUEST
            return False
        if answer.session_id == NO_SESSION:
            self.session_id, self.epoch = NO_SESSION, FULL_REQUEST
        elif self.full:
            self.session_id, self.epoch = answer.session_id, 1
        else:
            self.epoch = 1 if self.epoch == MAX_EPOCH else self.epoch + 1
        return True

    def failed(self) -> None:
        """Nobody knows what the leader took in: close this session, begin another."""
        self.epoch = FULL_REQUEST
