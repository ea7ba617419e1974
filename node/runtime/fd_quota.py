"""How the open files of this process are shared: replicas, connections, and the work in between.

Each replica keeps its active segment open, each connection is a descriptor. Without descriptors no
connection is accepted and no segment rolled. Of RLIMIT_NOFILE (``ulimit -n``, ``LimitNOFILE``)

- :func:`reserved` many are never replicas': a topic that would use one is refused before it is
  made, whoever asks for it (:class:`FdQuota`), and a node that holds more replicas than that at
  its start leaves some of them closed;
- half of those are never connections' either: closed segments, indexes, the cleaner, other nodes
  (:meth:`OpenFiles.connection_limit`).

The last few are for files that are opened for a moment (``kept.storage.disk``). What meets the
limit all the same says so and is tried again: no disk is at fault.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Iterable, Sized
from typing import TYPE_CHECKING, Final

from kept.cluster.metadata.records import MetadataRecord, PartitionRecord
from kept.node.runtime.logging import log
from kept.storage.disk import HEADROOM, MAX_REOPENABLE
from kept.storage.errors import PolicyViolation, ResourceExhausted
from kept.storage.types import MAX_INT32

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image
    from kept.node.runtime.connection_quota import ConnectionQuota
    from kept.node.runtime.runtime import Runtime

RESERVED_FILES: Final = 1000
"""For connections, closed segments that are read, indexes and the cleaner; a quarter of the limit
where that is less."""
NOISE_INTERVAL_S: Final = 10.0
"""At most one line about a want of descriptors in this time."""


def raise_file_limit() -> int:
    """Raise RLIMIT_NOFILE to its hard limit; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else os.sysconf("SC_OPEN_MAX")


def file_limit() -> int:
    """Descriptors that this process may have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_INT32 if limit == resource.RLIM_INFINITY else limit


def reserved(limit: int) -> int:
    """How many of ``limit`` descriptors replicas leave to others."""
    return min(RESERVED_FILES, limit // 4)


def replica_limit() -> int:
    """Replicas that a node may hold."""
    limit = file_limit()
    return limit - reserved(limit)


class OpenFiles:
    """What the limit leaves for connections, and what is done when it is met."""

    def __init__(
        self,
        runtime: Runtime,
        node_id: int,
        replicas: Sized,
        client_connections: ConnectionQuota,
        node_connections: ConnectionQuota,
    ) -> None:
        self.node_id = node_id
        self._runtime = runtime
        self._replicas = replicas
        self._client_connections = client_connections
        self._node_connections = node_connections
        self._quiet_until = 0.0

    @property
    def connection_count(self) -> int:
        """Connections that are open, of clients and of nodes, in every protocol."""
        return self._client_connections.count + self._node_connections.count

    def connection_limit(self, max_connections: int) -> int:
        """Connections of clients that there may be: ``max.connections`` at most, and what replicas
        and the work of this node leave.
        """
        limit = file_limit()
        left = limit - reserved(limit) // 2 - len(self._replicas)
        left -= self._node_connections.count
        return min(max_connections, max(left, 0))

    @staticmethod
    def nearly_out(fd: int) -> bool:
        """Whether a descriptor that was just opened is one of those that connections leave: its
        number is the lowest that was free, so at least as many others are open.
        """
        limit = file_limit()
        return fd >= limit - reserved(limit) // 2

    def exhausted(self, error: ResourceExhausted) -> None:
        """Say that something failed for want of descriptors (or memory), and is tried again."""
        if self._may_speak():
            log.error(
                "out of open files or memory",
                error=str(error),
                limit=file_limit(),
                replicas=len(self._replicas),
                connections=self.connection_count,
                why="it is tried again; raise LimitNOFILE (ulimit -n), or lower max.connections",
            )

    def refused(self, topic: str, error: PolicyViolation) -> None:
        """Say that a topic was not created that a client expected to come by itself."""
        if self._may_speak():
            log.warning("topic not created", topic=topic, why=str(error))

    def _may_speak(self) -> bool:
        now = self._runtime.loop.time()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + NOISE_INTERVAL_S
        return True

    def share(self) -> None:
        """Say to the disk how many descriptors files may keep, closed segments in particular."""
        limit, disk = file_limit(), self._runtime.disk
        disk.keep_below = limit - HEADROOM
        disk.max_reopenable = min(MAX_REOPENABLE, reserved(limit) // 4)


class FdQuota:
    """What one decision may still create. Brokers are taken to have the limit of this one, and
    this one knows its connections.
    """

    def __init__(self, open_files: OpenFiles, image: Image) -> None:
        self._limit = file_limit()
        self._room = self._limit - reserved(self._limit)
        self._open_files = open_files
        self._image = image
        self._most = sum(len(topic.partitions) for topic in image.topics.values())
        """More replicas than that no broker has: one of each partition."""
        self._added: Counter[int] = Counter()
        self._held: Counter[int] | None = None
        """Replicas by broker; counted only where the room may be too small."""
        self._here = self._room_here()

    def _room_here(self) -> int:
        """Replicas that this node may hold, beside the connections that it has."""
        connections = self._open_files.connection_count
        return min(self._room, self._limit - reserved(self._limit) // 2 - connections)

    def reserve(self, records: Iterable[MetadataRecord]) -> None:
        """Count the replicas that ``records`` add. Raises PolicyViolation, and counts none."""
        wanted: Counter[int] = Counter()
        for record in records:
            if isinstance(record, PartitionRecord):
                before = self._image.partition(record.topic_id, record.partition)
                held = () if before is None else before.replicas
                if record.replicas != held:
                    wanted.update(set(record.replicas).difference(held))
        if not wanted:
            return
        self._most += wanted.total()
        if self._most <= min(self._room, self._here) and self._held is None:
            self._added.update(wanted)
            return
        if self._held is None:
            self._held = self._count()
        for broker_id, count in wanted.items():
            mine = broker_id == self._open_files.node_id
            if self._held[broker_id] + count > (self._here if mine else self._room):
                self._refuse(broker_id, count)
        self._held.update(wanted)

    def _count(self) -> Counter[int]:
        held = self._added.copy()
        for topic in self._image.topics.values():
            for record in topic.partitions:
                held.update(record.replicas)
        return held

    def _refuse(self, broker_id: int, count: int) -> None:
        assert self._held is not None
        who = f"broker {broker_id} has {self._held[broker_id]}"
        if broker_id == self._open_files.node_id:
            who += f" and {self._open_files.connection_count} connections"
        raise PolicyViolation(
            f"{count} replicas are more than open files allow: {who}, "
            f"and may open {self._limit} files (ulimit -n, LimitNOFILE)."
        )


def check_room(open_files: OpenFiles, image: Image, records: Iterable[MetadataRecord]) -> None:
    """Refuse a decision that adds more replicas than open files allow, whoever made it; those that
    consist of parts refuse the parts before. Raises PolicyViolation.
    """
    for record in records:
        if isinstance(record, PartitionRecord):
            before = image.partition(record.topic_id, record.partition)
            if before is None or not set(record.replicas) <= set(before.replicas):
                FdQuota(open_files, image).reserve(records)
                return
