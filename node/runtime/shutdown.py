"""The end of a node's process: a signal asks for it, or a failure forces it."""

from __future__ import annotations

import asyncio

from kept.node.runtime.logging import log


class Shutdown:
    """Whether the node is to end, and why if nobody asked for it."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.failure = ""
        """The first reason given to :meth:`fatal`; the exit code is 1 then."""

    def fatal(self, reason: str) -> None:
        """Nothing can be served any more: end with exit code 1, and say ``reason`` once more."""
        log.error("node stops", reason=reason)
        self.failure = self.failure or reason
        self.requested.set()
