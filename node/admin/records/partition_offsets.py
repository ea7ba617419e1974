"""Where partitions of the cluster begin and end, as their leaders say: one request a leader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from kept.client.consume.leader_offsets import offsets_of_node
from kept.node.runtime.tasks import gather_or_cancel
from kept.storage.errors import KeptError
from kept.storage.types import IsolationLevel, TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image
    from kept.node.admin.cluster_client import ClusterClient

TOGETHER: Final = 300
"""Partitions of one ListOffsets: a request is made, and its answer read, at a stretch."""
CALL_MS: Final = 5_000


@dataclass(slots=True)
class LeaderOffsets:
    """Offsets by partition, without those that nobody said; why not, by node."""

    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


async def offsets_from_leaders(
    client: ClusterClient,
    image: Image,
    wanted: Mapping[TopicPartition, int],
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> LeaderOffsets:
    """The first offset of each partition at a time (ms) or later, -1 for none; or of EARLIEST or
    LATEST. A leader that does not answer is named. LATEST of READ_COMMITTED is the last stable
    offset.
    """
    found, by_leader = LeaderOffsets(), leaders_of(image, wanted)
    await gather_or_cancel(
        _from_leader(client, leader, {tp: wanted[tp] for tp in its}, isolation, found)
        for leader, its in by_leader.items()
    )
    return found


def leaders_of(image: Image, tps: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]]:
    """The partitions that exist and have a leader, by leader."""
    by_leader: dict[int, list[TopicPartition]] = {}
    for tp in tps:
        topic = image.topics.get(tp.topic)
        if topic is not None and tp.partition < len(topic.partitions):
            by_leader.setdefault(topic.partitions[tp.partition].leader, []).append(tp)
    by_leader.pop(-1, None)
    return by_leader


async def _from_leader(
    client: ClusterClient,
    leader: int,
    wanted: Mapping[TopicPartition, int],
    isolation: IsolationLevel,
    found: LeaderOffsets,
) -> None:
    left = iter(wanted.items())
    while chunk := dict(islice(left, TOGETHER)):
        operation = offsets_of_node(leader, chunk, CALL_MS, isolation)
        try:
            offsets = await client.run(
                operation, patience_s=CALL_MS / 1000, node=leader, retry=False
            )
        except KeptError as error:
            found.errors[leader] = error.client_message
            return
        found.offsets.update({tp: at.offset for tp, at in offsets.items()})
