"""What no node knows alone, put together by the one that is asked: for ``kept.node.admin.service``.

Leaders are asked over the connections between nodes (:mod:`kept.node.admin.peer_http`). Who
does not answer is told with the reason, and what is known here stands in for it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from kept.client.failures import failure
from kept.node.metadata.metadata_log import TICK_S
from kept.storage.errors import KeptError

if TYPE_CHECKING:
    from kept.node.admin.context import AdminContext
    from kept.replication.partition import Partition
    from kept.storage.types import TopicPartition

ELECT_LEADERS: Final = 43, 2
PREFERRED: Final = 0
ELECT_S: Final = 15.0


# The metadata log.


async def quorum(context: AdminContext, local: bool) -> dict[str, Any]:
    """Who leads the metadata log and how far each copy of it is, as the active controller knows.

    With ``local`` as this node knows: members only if it is the controller.
    """
    metadata, member = context.metadata, context.metadata.member
    why = None
    if (
        not metadata.leads
        and not local
        and metadata.leader_id not in (None, context.identity.node_id)
    ):
        from kept.node.admin.peer_http import ask_json

        try:
            leader = metadata.leader_id
            assert leader is not None
            found: dict[str, Any] = await ask_json(
                context, leader, "/api/v1/quorum", {"local": "true"}
            )
        except KeptError as error:
            why = str(error)
        else:
            return found
    return {
        "leader_id": -1 if metadata.leader_id is None else metadata.leader_id,
        "term": member.term,
        "commit_index": member.commit_index,
        "said_by": context.identity.node_id,
        "members": _members(context) if metadata.leads else [],
        "reason": why,
    }


def _members(context: AdminContext) -> list[dict[str, Any]]:
    member = context.metadata.member
    voters = {voter.node_id for voter in member.voters}
    found = []
    for node_id in sorted({*voters, *member.followers, context.identity.node_id}):
        index, heard_ms = None, None
        if node_id == context.identity.node_id:
            index, heard_ms = member.last_index, 0
        elif node_id in member.followers:
            match_index, heard_at = member.followers[node_id]
            if match_index:  # 0: it has not answered in this term
                index = match_index
                heard_ms = round((member.ticks - heard_at) * TICK_S * 1000)
        found.append(
            {
                "node_id": node_id,
                "voter": node_id in voters,
                "last_index": index,
                "lag": None if index is None else max(0, member.last_index - index),
                "heard_ms_ago": heard_ms,
            }
        )
    return found


# Partitions.


def followers(partition: Partition) -> list[dict[str, Any]]:
    """How far the other replicas are, as their leader knows; empty at a follower."""
    if not partition.is_leader:
        return []
    from kept.replication.events import UNKNOWN_OFFSET

    core: Any = partition.core
    found = []
    for node_id, follower in sorted(core.followers.items()):
        end = follower.log_end_offset
        known = end != UNKNOWN_OFFSET
        found.append(
            {
                "node": node_id,
                "log_end_offset": end if known else None,
                "lag": max(0, partition.log_end_offset - end) if known else None,
            }
        )
    return found


async def from_leaders(
    context: AdminContext, local: dict[str, Any], path: str, query: dict[str, str]
) -> dict[str, Any]:
    """A topic as its leaders see it: partitions that are led elsewhere are theirs to describe."""
    leaders = {one["leader"] for one in local["partitions"]} - {context.identity.node_id}
    wanted = sorted(leader for leader in leaders if leader in context.metadata.image.brokers)
    answers = await asyncio.gather(*(_described(context, one, path, query) for one in wanted))
    told = dict(zip(wanted, answers, strict=True))
    partitions = []
    for one in local["partitions"]:
        described, why = told.get(one["leader"], ({}, None))
        better = described.get(one["partition"])
        if better is not None and better.get("log_end_offset") is not None:
            partitions.append(better)
        else:
            partitions.append({**one, "unanswered": why})
    return {**local, "partitions": partitions}


async def _described(
    context: AdminContext, leader: int, path: str, query: dict[str, str]
) -> tuple[dict[int, dict[str, Any]], str | None]:
    from kept.node.admin.peer_http import ask_json

    try:
        found = await ask_json(context, leader, path, query)
    except KeptError as error:
        return {}, str(error)
    return {one["partition"]: one for one in found["partitions"]}, None


async def elect_preferred(context: AdminContext, tp: TopicPartition) -> None:
    """Have the first replica of a partition lead it.

    Raises ElectionNotNeeded, PreferredLeaderNotAvailable, and what the way there raises.
    """
    from kept.node.admin.cluster_client import ClusterClient

    gateway = ClusterClient(context)
    wanted = {"topic": tp.topic, "partitions": [tp.partition]}
    values = {"election_type": PREFERRED, "topic_partitions": [wanted], "timeout": 10_000}
    try:
        answer = await gateway.call(context.identity.node_id, *ELECT_LEADERS, values, ELECT_S)
    finally:
        gateway.close()
    for topic in answer.replica_election_results:
        for one in topic.partition_result:
            error = failure(int(one.error_code), f"ElectLeaders of {tp}", one.error_message)
            if error is not None:
                raise error
