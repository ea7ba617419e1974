"""How many replicas the open files of this process leave room for.

Each replica keeps its active segment open. Without descriptors no connection is accepted and no
segment rolled, so a topic that would take the last ones is refused before it is made: once made, it
would keep the node from starting, too.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kept.cluster.records import MetadataRecord, PartitionRecord
from kept.storage.errors import PolicyViolation

if TYPE_CHECKING:
    from kept.cluster.image import Image
    from kept.node.server import Node

RESERVED_FILES: Final = 1000
"""For connections, closed segments that are read, indexes and the cleaner; a quarter of the limit
where that is less."""


class FileRoom:
    """What one request may still create. Brokers are taken to have the limit of this one."""

    def __init__(self, node: Node, image: Image) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._limit = limit
        self._here = len(node.hosting.hosted)
        brokers = sum(broker.active for broker in image.brokers.values())
        self._left = float("inf")
        if limit != resource.RLIM_INFINITY:
            reserved = min(RESERVED_FILES, limit // 4)
            self._left = (limit - reserved - self._here) * max(brokers, 1)

    def take(self, records: Iterable[MetadataRecord]) -> None:
        """Count the replicas that ``records`` create. Raises PolicyViolation."""
        wanted = sum(len(one.replicas) for one in records if isinstance(one, PartitionRecord))
        if wanted > self._left:
            raise PolicyViolation(
                f"{wanted} replicas are more than open files allow: this node has {self._here} "
                f"and may open {self._limit} files (ulimit -n, LimitNOFILE)."
            )
        self._left -= wanted
