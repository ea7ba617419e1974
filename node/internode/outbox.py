"""Messages to one peer that wait for its connection. Pure, bounded: it loses some rather than grow.

Raft tolerates loss: what matters is that a slow or absent peer costs nobody else memory or time.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

MAX_MESSAGES: Final = 1024
"""Queued for one peer; Raft keeps far fewer in flight, so more means that the peer is gone."""
MAX_BYTES: Final = 32 * 1024 * 1024
"""Queued entries of the metadata log for one peer."""


class Outbox:
    """A queue that drops the oldest when it is full, heartbeats (Appends without entries) first."""

    def __init__(self, max_messages: int = MAX_MESSAGES, max_bytes: int = MAX_BYTES) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.dropped = 0
        """How many messages were dropped since the start."""
        self._queue: deque[tuple[Any, int]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, message: Any) -> None:
        """Queue a message, at the price of older ones if need be."""
        size = _size(message)
        while self._queue and (
            len(self._queue) >= self.max_messages or self._bytes + size > self.max_bytes
        ):
            self._drop_one()
        self._queue.append((message, size))
        self._bytes += size

    def pop(self) -> Any:
        """The oldest message; None: there is none."""
        if not self._queue:
            return None
        message, size = self._queue.popleft()
        self._bytes -= size
        return message

    def clear(self) -> None:
        """Forget everything: a message of before a break says nothing new after it."""
        self._queue.clear()
        self._bytes = 0

    def _drop_one(self) -> None:
        self.dropped += 1
        for position, (message, _) in enumerate(self._queue):
            if getattr(message, "entries", None) == ():
                del self._queue[position]
                return
        self._bytes -= self._queue.popleft()[1]


def _size(message: Any) -> int:
    entries = getattr(message, "entries", ())
    return sum(len(entry.data) for entry in entries) + len(getattr(message, "image_bytes", b""))
