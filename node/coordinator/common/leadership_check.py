"""Checks that this node still coordinates a group before it returns committed offsets.

A coordinator that is partitioned from the others believes that it leads. It cannot commit, since
its in-sync replicas acknowledge nothing; but the offsets in its memory may be older than those that
its successor has committed. Within ``unfenced_for_ms`` of a controller's response it cannot have
been fenced. Later it needs proof from its replicas: each follower in the ISR, one of which a
successor would be, must have fetched in the present leader epoch *after* the request came. A
follower's second fetch since then proves it, because it was sent after the response to the first.
(When no controller is available, consumers get their offsets a moment later.) Not detected: a
leadership that is moved by hand or by balancing in the seconds of the partition.

Kafka responds from memory without a check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from kept.node.config.node_config import NodeConfig
    from kept.node.coordinator.common.shard import Shard
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.runtime.runtime import Runtime

LOOK_S: Final = 0.02
FETCHES: Final = 2
SPARE_S: Final = 1.0


class FollowerSessions(Protocol):
    """The fetch sessions of this node."""

    def of_followers(self) -> Iterable[Any]:
        """Those of followers: id, epoch, replica_id, and partitions by (name or id, number)."""


async def still_leads(
    runtime: Runtime,
    config: NodeConfig,
    metadata: MetadataLog,
    sessions: FollowerSessions,
    shard: Shard[Any],
) -> bool:
    """Whether all in-sync replicas follow this node in the shard's epoch, as the module says."""
    name, number = shard.tp
    topic = metadata.image.topics.get(name)
    if topic is None:
        return False
    names = {(topic.topic_id.bytes, number), (name.encode(), number)}
    before = _fetches(sessions, shard, names)
    patience_s = FETCHES * config.replica_fetch_wait_max_ms / 1000 + SPARE_S
    deadline = runtime.loop.time() + patience_s
    while shard.leads:
        now = _fetches(sessions, shard, names)
        if all(
            member in before
            and member in now
            and before[member][0] == now[member][0]
            and now[member][1] >= before[member][1] + FETCHES
            for member in shard.in_sync_followers
        ):
            return True
        for member in now:
            if member not in before or before[member][0] != now[member][0]:
                before[member] = now[member]  # a session that began meanwhile
        if runtime.loop.time() > deadline:
            return False
        await asyncio.sleep(LOOK_S)
    return False


def _fetches(
    sessions: FollowerSessions, shard: Shard[Any], names: set[tuple[bytes, int]]
) -> dict[int, tuple[int, int]]:
    """Follower -> (its session, its fetches in it), of those that follow in this epoch."""
    return {
        session.replica_id: (session.id, session.epoch)
        for session in sessions.of_followers()
        for name in names
        if (cached := session.partitions.get(name)) is not None
        and cached.request.current_leader_epoch == shard.leader_epoch
    }
