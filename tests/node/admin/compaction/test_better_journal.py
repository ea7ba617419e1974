"""Which replicas are asked why a record is missing, once the leader does not know."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, cast

from msgspec.structs import asdict

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import (
    BrokerChangeRecord,
    BrokerRecord,
    PartitionRecord,
    TopicRecord,
)
from kept.compaction.cleaner.removal_log import Fate, Reason
from kept.node.admin.compaction.compaction_status import MissingRecord
from kept.node.admin.leader_router import LeaderRouter
from kept.node.admin.topic_lookup import TopicLookup
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.replicas.replica_table import ReplicaTable
from kept.storage.errors import KeptError, NetworkException
from kept.storage.types import TopicPartition
from tests.support.replicas import FixedMetadata

TP = TopicPartition("t", 0)
TOPIC = uuid.UUID(int=7)
UNKNOWN = MissingRecord(
    *TP,
    offset=7,
    fate=Fate.REMOVED.value,
    explanation="removed in generation 3.7 as the leader decided",
    reason=Reason.FOLLOWED.value,
    generation=None,
)


def asked(*replicas: int, refusal: KeptError | None = None) -> tuple[list[int], dict[str, Any]]:
    """Whom node 9 asks of a topic's replicas, when 0 is fenced, 1 unknown and 2 there; and what
    comes of it. Without replicas there is no topic.
    """
    found: list[int] = []

    class Peers:
        async def get(self, replica: int, *_: Any) -> dict[str, str]:
            found.append(replica)
            if refusal is not None:
                raise refusal
            known = {"fate": "removed", "reason": "a newer record", "generation": "g"}
            return {**known, "explanation": "x"}

    known = [BrokerRecord(number, number, uuid.UUID(int=number), ()) for number in (0, 2)]
    image, _ = Image().apply([*known, BrokerChangeRecord(2, 2, fenced=False)])
    if replicas:
        partition = PartitionRecord(TOPIC, 0, replicas, replicas, replicas[0], 0, 0)
        image, _ = image.apply([TopicRecord("t", TOPIC), partition])
    metadata: Any = FixedMetadata()
    metadata.image = image
    table, view, peers = ReplicaTable(), cast("Any", None), cast("Any", Peers())
    lookup = TopicLookup(NodeIdentity(9), metadata, table)
    routing = LeaderRouter(
        metadata=metadata, lookup=lookup, table=table, view=view, peer_http=peers
    )
    return found, asdict(asyncio.run(routing.better_journal(TP, UNKNOWN)))


def test_a_replica_that_is_away_is_not_waited_for():
    found, answer = asked(0, 1, 2)
    assert found == [2]
    assert answer["reason"] == "a newer record"


def test_a_topic_that_was_deleted_meanwhile_has_no_replicas():
    assert asked() == ([], asdict(UNKNOWN))


def test_where_nobody_knows_those_that_are_away_are_named():
    gone = NetworkException("it has just gone")
    found, answer = asked(0, 2, refusal=gone)
    assert found == [2] and answer["explanation"] == (
        "removed in generation 3.7 as the leader decided; nodes 0, 2 are away and may know more"
    )
    _, answer = asked(0, refusal=gone)
    assert answer["explanation"].endswith("; node 0 is away and may know more")
