"""What a broker and the active controller say to each other, about every second.

They travel between ``kept.cluster.controller.broker_lifecycle`` (the broker's side) and
``kept.cluster.controller.broker_sessions`` (the controller's), on the wire as in
``node/proto/controller.proto``. The names are those of Kafka's BrokerHeartbeat; reports of logs are
ours (rule 33).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from msgspec import Struct

from kept.cluster.controller.features import Feature

MAX_LOGS_PER_HEARTBEAT: Final = 1000
"""Reports in one heartbeat: some 40 KB. What does not fit goes with the next one."""

FORESTALLED_INTERVALS: Final = 2
"""By how many heartbeat intervals a new controller shortens sessions when it starts, at most."""

OVERLAP_MS: Final = 1000
"""How long a controller may still answer when its successor leads: two election timeouts."""

PartitionKey = tuple[UUID, int]
"""(topic id, partition)."""


class ReplicaLog(Struct, frozen=True):
    """How far a replica's log goes, for an election by length.

    ``leader_epoch`` is that of the partition as the broker saw it: the report counts for that
    term only. ``last_epoch`` is the epoch of the last batch (-1: an empty log).
    """

    topic_id: UUID
    partition: int
    leader_epoch: int
    last_epoch: int
    log_end_offset: int

    @property
    def key(self) -> PartitionKey:
        """The partition."""
        return self.topic_id, self.partition

    @property
    def length(self) -> tuple[int, int]:
        """What is compared: of two logs the larger one holds all that is acknowledged."""
        return self.last_epoch, self.log_end_offset


class HeartbeatRequest(Struct, frozen=True):
    """A broker lives and has applied the metadata up to ``applied_index``.

    ``wants_fence``: its logs are not open yet. ``logs``: those that it was to report (rule 33).
    ``features``: what it serves.
    """

    broker_id: int
    broker_epoch: int
    applied_index: int
    wants_fence: bool = False
    wants_shutdown: bool = False
    logs: tuple[ReplicaLog, ...] = ()
    features: tuple[Feature, ...] = ()


class HeartbeatReply(Struct, frozen=True):
    """``fenced``: the broker takes no part yet, or no more. ``should_shut_down``: it may stop now.
    ``index``: the controller's image at the reply; whoever must act on the newest image waits until
    its own has come as far.
    """

    fenced: bool
    should_shut_down: bool = False
    index: int = 0


def unfenced_for_ms(session_timeout_ms: int, heartbeat_interval_ms: int) -> int:
    """How long after it sent a heartbeat that was answered a broker cannot have been fenced for its
    silence, in ms: not by the controller that answered, nor by one that leads since.
    """
    forestalled_ms = FORESTALLED_INTERVALS * heartbeat_interval_ms
    return max(0, session_timeout_ms - forestalled_ms - OVERLAP_MS)
