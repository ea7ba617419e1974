"""News to followers: there is a manifest to pull.

A partition is open from the moment its leader has something to offer until every replica holds and
has applied it. A follower gets news at once, and again after longer and longer waits while nothing
changes: messages get lost, and replicas are away. Where all have everything nothing is sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.node.internode import manifest_rpc as calls
from kept.node.runtime.logging import log
from kept.node.runtime.tasks import TaskOwner
from kept.storage.errors import KeptError

if TYPE_CHECKING:
    from kept.node.internode.peers import Peers
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.runtime import Runtime
    from kept.replication.partition_core import PartitionCore
    from kept.replication.progress import ReplicaProgress

CALL_S: Final = 5.0
REVIEW_S: Final = 1.0
"""How often all open partitions are reviewed."""
RESEND_MAX_S: Final = 30.0
MAX_NEWS: Final = 1000
"""Partitions of one call."""
YIELD_EVERY: Final = 200
"""After so many partitions the loop serves others."""


@dataclass(slots=True)
class _Sent:
    """The state that a follower got news of, and when it gets them again."""

    state: Any
    resend_at: float
    wait_s: float


class ManifestNotifier:
    """Tells followers that there is a manifest to pull."""

    def __init__(
        self, runtime: Runtime, identity: NodeIdentity, table: ReplicaTable, peers: Peers
    ) -> None:
        self._runtime = runtime
        self._identity = identity
        self._table = table
        self._peers = peers
        self._open: dict[LocalReplica, dict[int, _Sent]] = {}
        self._fresh: dict[LocalReplica, None] = {}
        self._woken = asyncio.Event()
        self._tasks = TaskOwner(runtime.loop)
        self._running = False

    def announce(self, hosted: LocalReplica) -> None:
        """A leader here has something for its followers, or they are others now."""
        if not hosted.partition.replicated:
            return
        self._open.setdefault(hosted, {})
        self._fresh[hosted] = None
        self._woken.set()
        if not self._running:
            self._running = True
            self._tasks.spawn(self._run())

    def brokers_changed(self) -> None:
        """Some may be back, and with less than they had."""
        for hosted in self._table.replicas.values():
            if (core := hosted.partition.core.manifests).has_offered and core.held is not None:
                self.announce(hosted)

    async def stop(self) -> None:
        """Send nothing more."""
        await self._tasks.close()

    async def _run(self) -> None:
        try:
            await self._send_until_closed()
        except Exception:
            self._running = False  # a bug of ours: the next announcement begins anew
            raise
        self._running = False

    async def _send_until_closed(self) -> None:
        """Send news until no partition is open."""
        loop = self._runtime.loop
        review_at = 0.0
        while self._open:
            await asyncio.sleep(0)
            self._woken.clear()
            all_open = loop.time() >= review_at
            if all_open:
                review_at = loop.time() + REVIEW_S
            due, self._fresh = list(self._open if all_open else self._fresh), {}
            news: dict[int, list[LocalReplica]] = {}
            for number, hosted in enumerate(due):
                if number % YIELD_EVERY == YIELD_EVERY - 1:
                    await asyncio.sleep(0)
                if not self._collect(hosted, news):
                    self._open.pop(hosted, None)
            for broker, replicas in news.items():
                for first in range(0, len(replicas), MAX_NEWS):
                    self._tasks.spawn(self._send(broker, replicas[first : first + MAX_NEWS]))
            try:
                async with asyncio.timeout(max(review_at - loop.time(), 0)):
                    await self._woken.wait()
            except TimeoutError:
                continue

    def _collect(self, hosted: LocalReplica, news: dict[int, list[LocalReplica]]) -> bool:
        """Add the followers that are due to get news; False when none lacks anything."""
        core = hosted.partition.core
        tp = hosted.partition.topic_partition
        if not core.leading or core.offered is None or self._table.replicas.get(tp) is not hosted:
            return False
        # One that was announced during the review may have been closed since.
        sent, now, lacking = self._open.setdefault(hosted, {}), self._runtime.loop.time(), False
        for replica, follower in core.followers.items():
            if not is_behind(core, replica, follower):
                continue
            lacking = True
            if follower.broker_epoch == -1 or replica not in core.eligible:
                continue  # what it acknowledges would not count yet
            state = (
                core.leader_epoch,
                core.offered,
                core.published,
                follower.broker_epoch,
                follower.held,
                follower.applied,
            )
            last = sent.get(replica)
            if last is None or last.state != state:
                sent[replica] = _Sent(state, now + REVIEW_S, REVIEW_S)
            elif now < last.resend_at:
                continue
            else:
                last.wait_s = min(2 * last.wait_s, RESEND_MAX_S)
                last.resend_at = now + last.wait_s
            news.setdefault(replica, []).append(hosted)
        return lacking

    async def _send(self, broker: int, replicas: list[LocalReplica]) -> None:
        items = tuple(
            calls.ManifestNews(
                hosted.partition.topic_id,
                hosted.partition.topic_partition.partition,
                hosted.partition.leader_epoch,
            )
            for hosted in replicas
        )
        request = calls.ManifestNewsRequest(self._identity.node_id, items)
        try:
            await self._peers.call(broker, "ManifestNews", request, CALL_S)
        except KeptError as error:
            log.debug("manifest news not sent", broker=broker, error=str(error))


def is_behind(core: PartitionCore, replica: int, follower: ReplicaProgress) -> bool:
    """Whether a follower has not acknowledged what is offered, or not applied what is published, or
    is another process than the one that did.
    """
    known = core.broker_epochs.get(replica, -1)
    return (
        follower.held != core.offered
        or follower.applied != core.published
        or known != follower.broker_epoch
    )
