"""DescribeQuorum: who leads the metadata log, and how far everybody's copy of it is (KIP-595).

Only the active controller knows, so it answers, whoever was asked (``api.FORWARDED``). Kafka's
first offset is 0, our first index 1: as a log end offset, which is exclusive, the index of the last
entry is what Kafka would say. Ours: a follower's ``last_caught_up_timestamp`` is when it was last
heard of if it has all that is committed, else -1 (unknown).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.client.protocol.messages import Values
from kept.cluster.controller.topics import CLUSTER_METADATA_TOPIC
from kept.cluster.metadata.wal import NO_DIRECTORY
from kept.node.metadata.metadata_log import TICK_S
from kept.node.runtime.error_codes import error_values
from kept.storage.errors import NotController, UnknownTopicOrPartition

if TYPE_CHECKING:
    from uuid import UUID

    from kept.node.config.live_config import LiveConfig
    from kept.node.kafka.api import RequestContext
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.runtime.runtime import Runtime
    from kept.steps import Steps

UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class QuorumHandler:
    """The state of the metadata quorum."""

    runtime: Runtime
    config: LiveConfig
    metadata: MetadataLog
    addresses: AddressBook

    def describe_quorum(self, _ctx: RequestContext, request: Any) -> Steps[Values]:
        """DescribeQuorum v0-2: leader, term, commit index; log ends of voters and observers.

        Raises NotController where this node does not lead: the request is sent on then.
        """
        if not self.metadata.leads:
            leader_id = self.metadata.leader_id
            raise NotController(
                f"node {self.config.current.node_id} is not the active controller",
                UNKNOWN if leader_id is None else leader_id,
            )
        topics = []
        for topic in request.topics:
            partitions = []
            for entry in topic.partitions:
                partitions.append(self._partition(topic.topic_name, entry.partition_index))
                yield
            topics.append({"topic_name": topic.topic_name, "partitions": partitions})
            yield
        return {"error_code": 0, "error_message": None, "topics": topics, "nodes": self._nodes()}

    def _partition(self, topic: str, number: int) -> Values:
        member = self.metadata.raft_node
        unknown: dict[str, Any] = {
            "partition_index": number,
            "error_code": 0,
            "error_message": None,
            "leader_id": UNKNOWN,
            "leader_epoch": UNKNOWN,
            "high_watermark": UNKNOWN,
            "current_voters": (),
            "observers": (),
        }
        if (topic, number) != (CLUSTER_METADATA_TOPIC, 0):
            error = UnknownTopicOrPartition(
                f"{topic}:{number} is no metadata log: it is {CLUSTER_METADATA_TOPIC}:0"
            )
            return {**unknown, **error_values(error)}
        voters = sorted((voter.node_id, voter.directory_id) for voter in member.voters)
        observers = sorted(
            (node_id, member.progress[node_id].directory_id) for node_id in member.observers
        )
        return {
            **unknown,
            "leader_id": self.config.current.node_id,
            "leader_epoch": member.term,
            "high_watermark": member.commit_index,
            "current_voters": [self._replica(*replica) for replica in voters],
            "observers": [self._replica(*replica) for replica in observers],
        }

    def _replica(self, node_id: int, directory_id: UUID) -> Values:
        member = self.metadata.raft_node
        now_ms = self.runtime.now_ms()
        end, heard_ms = UNKNOWN, UNKNOWN
        if node_id == self.config.current.node_id:
            end, heard_ms, directory_id = member.last_index, now_ms, member.directory_id
        elif (progress := member.progress.get(node_id)) and progress.directory_id == directory_id:
            follower = member.progress[node_id]
            match_index, last_contact = follower.match_index, follower.last_contact
            if match_index:  # 0: it has not answered in this term
                end = match_index
                heard_ms = now_ms - round((member.ticks - last_contact) * TICK_S * 1000)
        return {
            "replica_id": node_id,
            "replica_directory_id": None if directory_id == NO_DIRECTORY else directory_id,
            "log_end_offset": end,
            "last_fetch_timestamp": heard_ms,
            "last_caught_up_timestamp": heard_ms if end >= member.commit_index else UNKNOWN,
        }

    def _nodes(
        self,
    ) -> list[Values]:
        """Where voters are reached by other nodes; a lone voter is by none."""
        listener = self.config.current.node_listener
        if listener is None:
            return []
        nodes: list[Values] = []
        for voter in sorted(self.metadata.raft_node.voters, key=lambda voter: voter.node_id):
            address = (
                (voter.host, voter.port)
                if voter.host
                else self.addresses.node_address(voter.node_id)
            )
            if address is not None:
                endpoint = {"name": listener.name, "host": address[0], "port": address[1]}
                nodes.append({"node_id": voter.node_id, "listeners": [endpoint]})
        return nodes
