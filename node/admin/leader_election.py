"""Election of a partition's preferred leader, requested of the controller as any client does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kept.client.core.broker_errors import failure
from kept.client.protocol.api_keys import ApiKey
from kept.node.admin.results import OfPartition

if TYPE_CHECKING:
    from kept.node.admin.cluster_client import ClusterClient
    from kept.node.admin.topic_lookup import TopicLookup

ELECT_LEADERS: Final = ApiKey.ELECT_LEADERS, 2
PREFERRED: Final = 0
ELECT_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Elected(OfPartition):
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
        wanted = {"topic": tp.topic, "partitions": [tp.partition]}
        values = {"election_type": PREFERRED, "topic_partitions": [wanted], "timeout": 10_000}
        client = self.new_client()
        try:
            answer = await client.call(self.lookup.node_id, *ELECT_LEADERS, values, ELECT_S)
        finally:
            client.close()
        for result in answer.replica_election_results:
            for one in result.partition_result:
                error = failure(int(one.error_code), f"ElectLeaders of {tp}", one.error_message)
                if error is not None:
                    raise error
        return Elected(*tp, elected=True)
