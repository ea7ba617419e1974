"""What a client asks: calls, where they go, and after which errors they go again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kept.client.core.broker_errors import ConnectionFailed, NotReached, api_name
from kept.client.protocol.messages import Values
from kept.storage.errors import (
    FencedLeaderEpoch,
    KafkaStorageError,
    KeptError,
    NotEnoughReplicas,
    NotLeaderOrFollower,
    OffsetNotAvailable,
    RetriableError,
    UnknownLeaderEpoch,
    UnknownTopicOrPartition,
)

BACKOFF_MS: Final = 20
BACKOFF_MAX_MS: Final = 1_000
UNKNOWN_TOPIC_GRACE_MS: Final = 1_500
"""A topic that was just created may be unknown to a node for so long."""
NOT_EXECUTED: Final = (
    NotReached,
    NotLeaderOrFollower,
    FencedLeaderEpoch,
    UnknownLeaderEpoch,
    NotEnoughReplicas,
    OffsetNotAvailable,
    KafkaStorageError,
    UnknownTopicOrPartition,
)
"""Errors after which a request has had no effect, and may be possible a moment later; but see
:data:`PERHAPS_EXECUTED`.
"""
PERHAPS_EXECUTED: Final = (NotLeaderOrFollower, KafkaStorageError)
"""Those of them that a node answers, too, where it has appended what was to be written: it led no
longer, or could not make it durable.
"""

# Where a call goes.


@dataclass(frozen=True, slots=True)
class Anywhere:
    """Any node answers."""


@dataclass(frozen=True, slots=True)
class ToNode:
    """One node, by its id."""

    node_id: int


@dataclass(frozen=True, slots=True)
class ToController:
    """The node that Metadata names as controller."""


@dataclass(frozen=True, slots=True)
class ToLeader:
    """The leader of a partition."""

    topic: str
    partition: int
    auto_create: bool = False


@dataclass(frozen=True, slots=True)
class ToCoordinator:
    """The coordinator of a group (kind 0) or a transactional id (kind 1)."""

    key: str
    kind: int = 0


Route = Anywhere | ToNode | ToController | ToLeader | ToCoordinator


@dataclass(slots=True, eq=False)
class Call:
    """One request and what is known of it.

    ``values`` are the message's fields for all versions, or a function of the version. ``check``
    turns a response that is an error into one of ours; a RetriableError is tried again until
    ``timeout_ms``. Not ``patient``: it ends when its node is not there, and whoever asked finds
    another way. ``optional``: whoever asked does without the answer; the last RetriableError comes
    in its place. ``at_most_once``: it goes again only after an error of :data:`NOT_EXECUTED`.
    ``while_heard``: its time begins anew with whatever comes over its connection.
    """

    api_key: int
    values: Values | Callable[[int], Values]
    route: Route = field(default_factory=Anywhere)
    what: str = ""
    timeout_ms: int = 30_000
    check: Callable[[Any], KeptError | None] | None = None
    repeatable: bool = True
    patient: bool = True
    optional: bool = False
    at_most_once: bool = False
    while_heard: bool = False
    expects_response: bool = True
    max_version: int = 32767
    needed_for: tuple[object, ...] | None = None
    """Set on calls that the core makes for itself: what they find out."""
    id: int = -1
    started_ms: int = 0
    deadline_ms: int = 0
    tries: int = 0
    not_before_ms: int = 0
    offline_since_ms: int | None = None
    """When it was first heard that the log directory of its partition is offline, and since."""
    reported: bool = False
    last_error: KeptError | None = None
    may_have_effect: bool = False
    """Whether a try of it had no answer, or an error after which nobody knows."""
    version: int = -1

    @property
    def name(self) -> str:
        """What a message calls it: ``Fetch of orders:0``."""
        return self.what or api_name(self.api_key)

    @property
    def earlier_error(self) -> str:
        """What a node has answered to it, for a message that no other answer came."""
        error = self.last_error
        if error is None or isinstance(error, ConnectionFailed):
            return ""
        return f"; before that: {error}"

    @property
    def needs(self) -> tuple[object, ...]:
        """What has to be found out before the call can go."""
        route = self.route
        if isinstance(route, ToCoordinator):
            return ("coordinator", route.kind, route.key)
        if isinstance(route, ToLeader):
            return ("metadata", (route.topic,), route.auto_create)
        return ("metadata", (), False)

    def begin(self, now_ms: int) -> None:
        """The time that it may take begins now."""
        self.started_ms, self.deadline_ms = now_ms, now_ms + self.timeout_ms

    def is_retried_after(self, error: KeptError) -> bool:
        """Whether an error in a response is worth another try; changes await no unknown topics."""
        if self.at_most_once:
            return isinstance(error, NOT_EXECUTED)
        if not self.repeatable and isinstance(error, UnknownTopicOrPartition):
            return False
        return isinstance(error, RetriableError)

    def back_off(self, why: KeptError, now_ms: int, offline_grace_ms: int) -> None:
        """Wait before it is tried again; an error that waiting cannot mend ends it now.

        ``offline_grace_ms``: how long KafkaStorageError is waited out.
        """
        self.last_error = why
        self.may_have_effect |= not isinstance(why, NOT_EXECUTED)
        self.tries += 1
        pause_ms = min(BACKOFF_MS << min(self.tries - 1, 10), BACKOFF_MAX_MS)
        self.not_before_ms = now_ms + pause_ms
        if not isinstance(why, KafkaStorageError):
            self.offline_since_ms = None
        elif self.offline_since_ms is None:
            self.offline_since_ms = now_ms
        elif self.offline_since_ms + offline_grace_ms <= now_ms:
            self.deadline_ms = now_ms
        if not isinstance(why, RetriableError):
            self.deadline_ms = now_ms
        elif isinstance(why, UnknownTopicOrPartition):
            self.deadline_ms = min(self.deadline_ms, self.started_ms + UNKNOWN_TOPIC_GRACE_MS)

    def is_to_be_reported(self, started_ms: int) -> bool:
        """Somebody else's call, begun by then, of which it was not told that it waits."""
        return not self.reported and self.needed_for is None and self.started_ms <= started_ms
