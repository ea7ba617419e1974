"""What a node counts of the cluster's life: ISRs, elections of the controller, failovers.

Times are those of the node's loop, in seconds. A *failover* of a partition begins when this node
hears that its leader is gone (its process is found dead, or the controller has fenced it) and ends
when this node, the new leader, takes appends. An *election* begins when no controller is known any
more, or the known one is found dead, and ends when the next one is known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kept.node.runtime.histogram import Histogram

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Delta, Image

ELECTION_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds. A dead process is noticed and replaced in less than half of one."""


class ClusterCounters:
    """Counts ISR changes, elections of the controller, and failovers."""

    def __init__(self) -> None:
        self.isr_shrinks = 0
        self.isr_expands = 0
        self.elections = 0
        self.unclean_elections = 0
        self.lost_records = 0
        self.election_seconds = Histogram(ELECTION_BUCKETS)
        self.failover_seconds = Histogram(ELECTION_BUCKETS)
        self._controller: int | None = None
        self._term = 0
        self._searching_since: float | None = None
        self._gone: dict[int, float] = {}
        """Nodes found dead, and when."""

    # The controller.

    def controller_is(self, node_id: int | None, term: int, now: float) -> None:
        """Who is known to lead the metadata log."""
        if node_id is None:
            if self._searching_since is None:
                self._searching_since = now
        elif (node_id, term) != (self._controller, self._term):
            self.elections += 1
            if self._searching_since is not None:
                self.election_seconds.observe(now - self._searching_since)
            self._controller, self._term, self._searching_since = node_id, term, None

    def node_gone(self, node_id: int, now: float) -> None:
        """A node's process was found dead."""
        self._gone[node_id] = now
        if node_id == self._controller and self._searching_since is None:
            self._searching_since = now

    # Partitions.

    def acting_on(self, image: Image, delta: Delta, node_id: int) -> None:
        """An entry of the metadata log is about to be acted on."""
        for broker_id in delta.brokers:
            broker = image.brokers.get(broker_id)
            if broker is not None and broker.active:
                self._gone.pop(broker_id, None)
        for change in delta.partitions:
            if change.before is not None and change.after.leader == node_id:
                self._isr_changed(change.before.isr, change.after.isr)

    def _isr_changed(self, before: Iterable[int], after: Iterable[int]) -> None:
        left, entered = set(before) - set(after), set(after) - set(before)
        self.isr_shrinks += len(left)
        self.isr_expands += len(entered)

    def failover(self, image: Image, leader_id: int, now: float) -> float | None:
        """When it was noticed that a partition's last leader is gone; None if it is not."""
        broker = image.brokers.get(leader_id)
        if broker is None or not broker.fenced:
            return None
        return self._gone.get(leader_id, now)

    def failed_over(self, noticed: float | None, now: float) -> None:
        """A partition takes appends here, whose last leader was gone."""
        if noticed is not None:
            self.failover_seconds.observe(now - noticed)
