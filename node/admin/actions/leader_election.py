"""Election of a partition's preferred leader, requested of the controller as any client does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kept.client.admin.cluster import PREFERRED, elect_leaders
from kept.node.admin.results import PartitionResult
from kept.storage.errors import ElectionNotNeeded

if TYPE_CHECKING:
    from kept.node.admin.cluster_client import ClusterClient
    from kept.node.admin.topic_lookup import TopicLookup

ELECT_MS: Final = 10_000


class Elected(PartitionResult, frozen=True):
    """The preferred replica leads the partition."""

    elected: bool


@dataclass(frozen=True, slots=True)
class LeaderElection:
    """Has preferred replicas lead."""

    lookup: TopicLookup
    new_client: Callable[[], ClusterClient]

    async def elect_preferred(self, topic: str, partition: int) -> Elected:
        """Have the first replica of a partition lead it.

        Raises UnknownTopicOrPartition, ElectionNotNeeded, PreferredLeaderNotAvailable, and what the
        way there raises.
        """
        tp = self.lookup.partition(topic, partition)
        client = self.new_client()
        try:
            operation = elect_leaders(PREFERRED, [tp], ELECT_MS)
            outcomes = await client.run(operation, patience_s=ELECT_MS / 1000, retry=False)
        finally:
            client.close()
        for of_partition in outcomes:
            if not of_partition.needed:
                raise ElectionNotNeeded(
                    f"ElectLeaders of {tp.place}: its preferred replica leads it"
                )
            if of_partition.error is not None:
                raise of_partition.error
        return Elected(*tp, elected=True)
