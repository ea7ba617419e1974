"""Replicas of this node that there are too few open files for (:mod:`kept.node.runtime.fd_quota`).

They are offline, and opened or created when there are files for them: when others have gone, or
the limit was raised (:mod:`.log_lifecycle`). What is on the disk of them stays as it is, until the
image does not want them here any more.
"""

from __future__ import annotations

from collections.abc import Sized
from itertools import islice
from typing import TYPE_CHECKING

from kept.node.metadata.internal_topics import COORDINATED
from kept.node.replicas.log_opener import Opening
from kept.node.runtime.fd_quota import file_limit, replica_limit
from kept.node.runtime.logging import log
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.replicas.local_replica import LocalDirectory


class ClosedReplicas(dict[TopicPartition, Opening]):
    """They, also those that are being tried again."""

    def __init__(self, open_replicas: Sized) -> None:
        super().__init__()
        self._open_replicas = open_replicas
        self.begun: set[Opening] = set()
        """What threads open or create now, whether it was left closed before or not."""

    @property
    def free_slots(self) -> int:
        """Replicas that may be opened beside those that are open, or being opened: a start that
        takes long is not over when the others are tried again.
        """
        return max(replica_limit() - len(self._open_replicas) - len(self.begun), 0)

    def may_open(self) -> list[TopicPartition]:
        """Those that there are open files for now, and that no thread opens."""
        idle = (tp for tp, closed in self.items() if closed not in self.begun)
        return list(islice(idle, self.free_slots))

    def within_limit(self, openings: list[Opening]) -> tuple[list[Opening], list[Opening], str]:
        """Those that the limit leaves room for (coordinators' first, then what no other node has);
        the others, which stay closed, as is said; and why.
        """
        room = self.free_slots
        if len(openings) <= room:
            return openings, [], ""
        openings.sort(
            key=lambda one: (one.tp.topic not in COORDINATED, len(one.record.replicas) > 1)
        )
        opened, closed = openings[:room], openings[room:]
        self.update((opening.tp, opening) for opening in closed)
        not_open = self.keys() | {opening.tp for opening in (*opened, *self.begun)}
        count = len(self._open_replicas) + len(not_open)
        why = (
            f"left closed: {count} replicas are here, and {file_limit()} open files leave "
            f"room for {replica_limit()}; raise LimitNOFILE (ulimit -n) and start this node again, "
            "or remove others"
        )
        for opening in closed:
            log.warning("log left closed", topic=opening.tp.topic, partition=opening.tp.partition)
        log.error("logs left closed", count=len(closed), why=why)
        return opened, closed, why

    def directory_failed(self, directory: LocalDirectory) -> list[TopicPartition]:
        """A directory is offline: those in it are not waited for; which they were."""
        gone = [tp for tp, closed in self.items() if closed.directory is directory]
        for tp in gone:
            del self[tp]
        return gone
