"""Limits how many large responses a node holds at a time; further requests wait in a queue.

A response about a large topic occupies megabytes until it is sent. While requests wait, a client
that has read nothing for :data:`STALLED_S` loses its connection, so that it cannot block the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final

MOST: Final = 16
STALLED_S: Final = 1.0

End = Callable[[], None]
"""Ends a connection; its answer is given up."""


class ResponseLimiter:
    """Of one node. A context manager: inside, a request has its turn."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MOST)
        self._waiting = 0
        self._stalled: dict[End, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        self._waiting += 1
        try:
            if self._free.locked():
                self._schedule_check()
            await self._free.acquire()
        finally:
            self._waiting -= 1

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._free.release()

    def stalled(self, end: End) -> None:
        """A peer reads nothing from now on."""
        self._stalled[end] = asyncio.get_running_loop().time()

    def resumed(self, end: End) -> None:
        """The peer has read something, or is gone."""
        self._stalled.pop(end, None)

    def _schedule_check(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(STALLED_S / 2, self._end_stalled)

    def _end_stalled(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        long_ago = asyncio.get_running_loop().time() - STALLED_S
        for end, since in list(self._stalled.items()):
            if since <= long_ago:
                self.resumed(end)
                end()
        self._schedule_check()
