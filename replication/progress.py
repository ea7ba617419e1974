"""What a leader keeps count of: how far another replica is (``Replica.scala``), who waits."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kept.replication.events import UNKNOWN_OFFSET, Token
from kept.storage.types import Generation

LONG_AGO: Final = -(1 << 62)
"""When a replica outside of the ISR was caught up, before it fetched: the high watermark does not
wait for it."""


@dataclass(slots=True)
class ReplicaProgress:
    """One other replica.

    ``log_end_offset``: UNKNOWN_OFFSET until it fetches in this epoch. ``caught_up_ms``: when it
    last had all that the leader had at that time. ``log_start_offset``: as it told with its last
    fetch. ``broker_epoch``: of the process that fetched last (KIP-903), -1 when it did not say.
    ``follows``: it has not said since that it follows no more, so what is known of it still holds.
    ``complete``: its log had everything below the end of ``held`` before anybody acted on that.
    ``went_back``: its log was cut since it first fetched in this epoch. What it fetched there again
    may have gaps, so it is complete no more, and a pull from before the cut may come late. What it
    has applied it is to say anew.
    ``last_pull``: number of the last pull of this process that counted.
    """

    log_end_offset: int = UNKNOWN_OFFSET
    caught_up_ms: int = 0
    fetched_ms: int = 0
    end_at_fetch: int = UNKNOWN_OFFSET
    held: Generation | None = None
    applied: Generation | None = None
    broker_epoch: int = -1
    log_start_offset: int = UNKNOWN_OFFSET
    follows: bool = True
    complete: bool = False
    went_back: bool = False
    last_pull: int = 0

    def fetched(
        self, log_end_offset: int, leader_end_offset: int, now_ms: int, broker_epoch: int
    ) -> bool:
        """It has everything below ``log_end_offset``, and the leader below ``leader_end_offset``.

        ``broker_epoch`` is the image's: the leader has refused any other. Returns whether what it
        had applied was forgotten.
        """
        had_applied = self.applied is not None
        if broker_epoch != self.broker_epoch:
            if self.broker_epoch != -1:  # another life: its disk may be another, too
                self.held = self.applied = None
                self.complete = self.went_back = False
                self.last_pull = 0
                self.log_end_offset = UNKNOWN_OFFSET
            self.broker_epoch = broker_epoch
        if log_end_offset < self.log_end_offset:
            self.applied, self.complete, self.went_back = None, False, True
        if log_end_offset >= leader_end_offset:
            self.caught_up_ms = max(self.caught_up_ms, now_ms)
        elif self.end_at_fetch != UNKNOWN_OFFSET and log_end_offset >= self.end_at_fetch:
            self.caught_up_ms = max(self.caught_up_ms, self.fetched_ms)
        self.log_end_offset = log_end_offset
        self.end_at_fetch = leader_end_offset
        self.fetched_ms = now_ms
        self.follows = True
        return had_applied and self.applied is None

    def polled(self, now_ms: int) -> None:
        """Until ``now_ms`` it asked for the same again, and the leader's end had not moved."""
        if self.log_end_offset == UNKNOWN_OFFSET:
            return
        self.fetched_ms = max(self.fetched_ms, now_ms)
        if self.log_end_offset >= self.end_at_fetch:
            self.caught_up_ms = max(self.caught_up_ms, now_ms)


class CommitQueue:
    """Who waits for the high watermark, by the offset it must reach, then by arrival."""

    __slots__ = ("_forgotten", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Token]] = deque()
        self._forgotten: set[Token] = set()
        """They are taken out of ``_waiting`` together, when half of it was forgotten."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def ends(self) -> list[int]:
        """The offsets waited for, in the order of answers."""
        return [end for end, token in self._waiting if token not in self._forgotten]

    def add(self, token: Token, end_offset: int) -> None:
        """Somebody waits for ``end_offset``."""
        if not self._waiting or self._waiting[-1][0] <= end_offset:
            self._waiting.append((end_offset, token))
        else:
            insort(self._waiting, (end_offset, token))

    def forget(self, token: Token) -> None:
        """It waits no more; one that does not wait must not be forgotten."""
        forgotten = self._forgotten
        forgotten.add(token)
        if 2 * len(forgotten) >= len(self._waiting):
            self._waiting = deque(entry for entry in self._waiting if entry[1] not in forgotten)
            forgotten.clear()

    def reaches(self, high_watermark: int) -> bool:
        """Whether somebody's offset is reached."""
        return bool(self._waiting) and self._waiting[0][0] <= high_watermark

    def reached(self, high_watermark: int) -> Iterator[Token]:
        """Take out those whose offset is reached, in order."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= high_watermark:
            token = waiting.popleft()[1]
            if token not in self._forgotten:
                yield token
            else:
                self._forgotten.discard(token)

    def drain(self) -> list[Token]:
        """Take out all."""
        tokens = [token for _, token in self._waiting if token not in self._forgotten]
        self._waiting.clear()
        self._forgotten.clear()
        return tokens
