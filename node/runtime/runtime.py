"""What all parts of a node share of their process: the loop, its clock, its threads, the disk.

It is the one thing that stands between a node's parts and the outside, so whoever drives them
under another loop, clock or disk replaces this.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kept.node.runtime.executors import CALL_THREADS
from kept.node.runtime.time_slices import LOAD_TURN_S, TimeSlices

if TYPE_CHECKING:
    from kept.storage.disk import Disk


class Runtime:
    """The surroundings of one node; made on its loop."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.loop = asyncio.get_running_loop()
        self.slices = TimeSlices(self.loop)
        """Long work that the loop does in slices."""
        self.loads = TimeSlices(self.loop, in_place=0, turn_s=LOAD_TURN_S)
        """The logs that coordinators read: many at once after a start or a failover."""
        self._threads = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="call")

    def now_ms(self) -> int:
        """Wall clock, in ms since 1970."""
        return int(time.time() * 1000)

    def stream_socket(self, family: int) -> socket.socket:
        """A new socket of a listener, not bound yet. Raises OSError where the family is missing."""
        return socket.socket(family, socket.SOCK_STREAM)

    def in_thread(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run something that blocks in a thread; the future has its result or what it raised."""
        return self.loop.run_in_executor(self._threads, function, *args)

    def close(self) -> None:
        """Wait for what runs in threads; nothing runs there after that."""
        self._threads.shutdown(wait=True)
