"""What a leader knows of one follower's log, and how fast it may send to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from uuid import UUID

from kept.storage.errors import InvariantViolation


class ProgressState(Enum):
    """How the leader sends to a follower."""

    PROBE = "probe"
    """One append at a time: it is not known where the logs meet."""
    REPLICATE = "replicate"
    """Appends follow each other without waiting, up to the limit in flight."""
    SNAPSHOT = "snapshot"
    """A snapshot is on its way; only heartbeats until it is answered."""


@dataclass(slots=True)
class Progress:
    """One follower, voter or observer."""

    directory_id: UUID
    """The disk it answered from; what another disk says is about another log."""
    next_index: int
    """The first entry to send next; above ``match_index``."""
    last_contact: int
    """The tick of its last answer."""
    match_index: int = 0
    """Its durable log equals the leader's up to here; never falls."""
    state: ProgressState = ProgressState.PROBE
    paused: bool = False
    """A probe is on its way; the next heartbeat sends another."""
    round: int = 0
    """The newest heartbeat it answered."""
    sent_commit: int = -1
    """The commit index it was told last."""
    snapshot_at: int = 0
    """The tick at which the snapshot was sent."""
    inflight: deque[int] = field(default_factory=deque)
    """The last index of each append that is not answered."""

    def probe(self, next_index: int) -> None:
        """Find out where the logs meet, beginning with the entry before ``next_index``."""
        self.state = ProgressState.PROBE
        self.paused = False
        self.inflight.clear()
        self.next_index = max(next_index, self.match_index + 1)

    def sent(self, last_index: int) -> None:
        """Entries up to ``last_index`` are on their way."""
        if self.state is ProgressState.REPLICATE:
            self.inflight.append(last_index)
            self.next_index = last_index + 1

    def accepted(self, match_index: int, base_index: int) -> bool:
        """An append or snapshot was accepted; returns whether it told something new.

        ``base_index``: from what comes after it the follower can be sent entries.
        """
        news = match_index > self.match_index
        self.match_index = max(self.match_index, match_index)
        self.next_index = max(self.next_index, self.match_index + 1)
        while self.inflight and self.inflight[0] <= self.match_index:
            self.inflight.popleft()
        if self.state is ProgressState.PROBE or (
            self.state is ProgressState.SNAPSHOT and self.match_index >= base_index
        ):
            self.state = ProgressState.REPLICATE
            self.paused = False
            self.inflight.clear()
            news = True
        return news

    def refused(self, prev_index: int, next_index: int) -> bool:
        """The append after ``prev_index`` does not fit; returns whether that is to be acted on.

        ``next_index`` is where to look next. An answer to an older append is not news.
        """
        if self.state is ProgressState.REPLICATE:
            if prev_index <= self.match_index:
                return False
            self.probe(self.match_index + 1)
            return True
        if self.state is ProgressState.SNAPSHOT or prev_index != self.next_index - 1:
            return False
        self.probe(min(prev_index, next_index))
        if self.next_index > prev_index:
            self.paused = True  # it lacks what it had acknowledged: ask once a heartbeat
            return False
        return True

    def check_invariants(self) -> None:
        """Raises InvariantViolation where it contradicts itself."""
        if self.next_index <= self.match_index:
            raise InvariantViolation(f"next {self.next_index}, but {self.match_index} match")
        if self.inflight and self.state is not ProgressState.REPLICATE:
            raise InvariantViolation(f"{len(self.inflight)} appends in flight in {self.state}")
