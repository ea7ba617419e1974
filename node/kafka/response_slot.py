"""Responses' places in their connection's order (semantics.md, rule 41)."""

from __future__ import annotations

from typing import Any, Final, Protocol

from kept.storage.disk import FileSlice

Segment = bytes | FileSlice
"""What a response consists of: bytes, and slices of log files."""


WAITING_REQUEST_BYTES: Final = 1024
"""About what a request holds until it is answered: its place, timer and waiters."""
WAITING_ENTRY_BYTES: Final = 128
"""About what it holds for each decoded entry, besides its bytes."""
WAITING_BATCH_BYTES: Final = 512
"""About what a Produce holds for each batch: its result, where the batch went, and its waiter."""


class ResponseSlot:
    """One place; ``segments`` is None until the response is made, or those of all ``requests``."""

    __slots__ = ("behind_bytes", "requests", "segments")

    def __init__(self) -> None:
        self.segments: list[Segment] | None = None
        self.requests = 1
        self.behind_bytes = 0
        """What of it is drawn since it was made and others before it were not."""


class ResponseRun(Protocol):
    """The slot of several Produce requests with the same acks and timeout."""

    segments: list[Segment] | None
    requests: int
    behind_bytes: int
    acks: int
    timeout_ms: int
    sync: bool
    throttle_ms: int
    """What the response to the last of them says that the client must wait."""
    """A partition among them wants its fsync first."""
    entries: list[Any]
    """The requests: they grow until another place follows."""

    def written(self, failed: dict[Any, Any]) -> None:
        """What was staged is written, but for the ``failed`` partitions."""
