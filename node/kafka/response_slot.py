"""A response's place in its connection's order (semantics.md, rule 41)."""

from __future__ import annotations

from kept.storage.disk import FileSlice

Segment = bytes | FileSlice
"""What a response consists of: bytes, and slices of log files."""


class ResponseSlot:
    """One place; ``segments`` is None until the response is made, or those of all ``requests``."""

    __slots__ = ("requests", "segments")

    def __init__(self) -> None:
        self.segments: list[Segment] | None = None
        self.requests = 1
