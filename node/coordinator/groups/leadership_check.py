"""May this node still say what a group has committed? Another one may coordinate it by now.

A coordinator that is cut off leads its partition as far as it knows. It cannot commit, since its
in-sync replicas acknowledge nothing; but what it remembers may be older than what its successor has
committed. For a while after a controller has answered it, it cannot have been fenced
(``unfenced_for_ms``). After that it asks its replicas: each of those in the ISR, of which a
successor would be one, must have followed it in the epoch that it leads, *after* the request came.
A follower's second fetch since then was sent after an answer to its first, so it shows that. (Where
the controllers are all gone, consumers hear their offsets a moment later, and do not miss them.)
Not seen: a leader that is moved by hand, or balanced, in the seconds in which it is cut off.

Kafka answers from what it remembers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

from kept.node.metadata.internal_topics import CONSUMER_OFFSETS

if TYPE_CHECKING:
    from kept.node.config.node_config import NodeConfig
    from kept.node.coordinator.groups.shard import Shard
    from kept.node.metadata.metadata_log import Metadata
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
    metadata: Metadata,
    sessions: FollowerSessions,
    shard: Shard,
) -> bool:
    """Whether all in-sync replicas follow this node in the shard's epoch, as the module says."""
    topic = metadata.image.topics.get(CONSUMER_OFFSETS)
    if topic is None:
        return False
    names = {(topic.topic_id.bytes, shard.number), (topic.name.encode(), shard.number)}
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
    sessions: FollowerSessions, shard: Shard, names: set[tuple[bytes, int]]
) -> dict[int, tuple[int, int]]:
    """Follower -> (its session, how often it has fetched in it), of those that follow in this
    epoch.
    """
    return {
        session.replica_id: (session.id, session.epoch)
        for session in sessions.of_followers()
        for name in names
        if (cached := session.partitions.get(name)) is not None
        and cached.request.current_leader_epoch == shard.leader_epoch
    }
