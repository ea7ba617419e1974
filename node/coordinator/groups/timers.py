"""The deadlines of a :class:`~.core.GroupCore`."""

from __future__ import annotations

from msgspec import Struct


class SessionExpiry(Struct, frozen=True):
    """A member was not heard of for its session timeout, or one to come did not. ``began_ms`` here
    and below is when the timeout began.
    """

    group: str
    member: str
    timeout_ms: int
    began_ms: int


class JoinDeadline(Struct, frozen=True):
    """Members had their rebalance timeout to rejoin.

    In the first rebalance of a group (``initial``) it is how long to wait for more members:
    ``delay_ms`` was waited, ``remaining_ms`` may still be.
    """

    group: str
    began_ms: int
    initial: bool = False
    delay_ms: int = 0
    remaining_ms: int = 0


class SyncDeadline(Struct, frozen=True):
    """Members had their rebalance timeout to ask for their assignment."""

    group: str
    generation: int
    began_ms: int


class ExpireOffsets(Struct, frozen=True):
    """Look for offsets and groups whose time is over."""


class SweepTopics(Struct, frozen=True):
    """Delete the offsets of deleted topics, which could not be."""


Timer = SessionExpiry | JoinDeadline | SyncDeadline | ExpireOffsets | SweepTopics
