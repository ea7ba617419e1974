"""Where replicas should go: pure plans for ``kept cluster reassign`` and ``drain``.

A plan is the replicas of each partition that changes, the preferred leader first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from kept.client.admin.cluster import Member
from kept.client.core.metadata import PartitionMetadata, TopicMetadata
from kept.storage.errors import InvalidReplicaAssignment
from kept.storage.types import TopicPartition

Plan = dict[TopicPartition, tuple[int, ...]]


def spread(topic: TopicMetadata, nodes: Sequence[int]) -> Plan:
    """Every partition of a topic to ``nodes`` in turn, with as many replicas as it has now.

    Raises InvalidReplicaAssignment when there are too few nodes for that.
    """
    plan: Plan = {}
    for number, view in sorted(topic.partitions.items()):
        count = len(view.replicas)
        if count > len(nodes):
            named = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
            raise InvalidReplicaAssignment(
                f"{topic.name}:{number} has {count} replicas and --to names {named}; "
                f"name more, or one partition as {topic.name}:{number} to change how many it has"
            )
        chosen = tuple(nodes[(number + i) % len(nodes)] for i in range(count))
        if chosen != view.replicas:
            plan[TopicPartition(topic.name, number)] = chosen
    return plan


def away_from(
    node_ids: Collection[int], topics: Iterable[TopicMetadata], members: Sequence[Member]
) -> Plan:
    """Every replica on a node of ``node_ids`` to one that stays: one in a rack without a replica if
    there is one, then the one with the fewest.

    Raises InvalidReplicaAssignment when there are not enough nodes that stay for a partition.
    """
    topics = list(topics)
    racks = {m.node_id: m.rack for m in members}
    stay = [m.node_id for m in members if m.node_id not in node_ids and not m.fenced]
    load = dict.fromkeys(stay, 0)
    for _, view in _partitions(topics):
        for replica in view.replicas:
            if replica in load:
                load[replica] += 1
    plan: Plan = {}
    for tp, view in _partitions(topics):
        replicas = list(view.replicas)
        for place, node_id in enumerate(view.replicas):
            if node_id not in node_ids:
                continue
            free = [n for n in stay if n not in replicas]
            if not free:
                others = "each other node has one already" if stay else "there is no other node"
                raise InvalidReplicaAssignment(
                    f"the replica of {tp.place} on node {node_id} has nowhere to "
                    f"go: {others}; add a node, or move leaders alone with --leaders"
                )
            taken = {racks.get(n) for n in replicas if n not in node_ids}
            chosen = min(free, key=lambda n: (_shared(racks.get(n), taken), load[n], n))
            load[chosen] += 1
            replicas[place] = chosen
        if replicas != list(view.replicas):
            plan[tp] = tuple(replicas)
    return plan


def _shared(rack: str | None, taken: set[str | None]) -> bool:
    return rack is not None and rack in taken


def leaders_away_from(node_ids: Collection[int], topics: Iterable[TopicMetadata]) -> Plan:
    """Where one of ``node_ids`` is the preferred leader, they become the last choices."""
    plan: Plan = {}
    for tp, view in _partitions(topics):
        stay = [n for n in view.replicas if n not in node_ids]
        if stay and view.replicas[0] in node_ids:
            plan[tp] = (*stay, *(n for n in view.replicas if n in node_ids))
    return plan


def _partitions(topics: Iterable[TopicMetadata]) -> list[tuple[TopicPartition, PartitionMetadata]]:
    return [
        (TopicPartition(topic.name, number), view)
        for topic in sorted(topics, key=lambda topic: topic.name)
        for number, view in sorted(topic.partitions.items())
    ]


def counts(topics: Iterable[TopicMetadata]) -> tuple[dict[int, int], dict[int, int]]:
    """(replicas, leaders) by node."""
    replicas: dict[int, int] = {}
    leaders: dict[int, int] = {}
    for _, view in _partitions(topics):
        leaders[view.leader] = leaders.get(view.leader, 0) + 1
        for node in view.replicas:
            replicas[node] = replicas.get(node, 0) + 1
    return replicas, leaders


def find_unhealthy(
    topics: Mapping[str, TopicMetadata],
) -> tuple[list[TopicPartition], list[TopicPartition]]:
    """(under-replicated partitions, partitions without a leader), those of internal topics last:
    there are 50 of each, and a list of some would show nothing else.
    """
    under, offline = [], []
    parts = _partitions(topics.values())
    for tp, view in sorted(parts, key=lambda part: topics[part[0].topic].internal):
        if view.leader < 0:
            offline.append(tp)
        elif len(view.isr) < len(view.replicas):
            under.append(tp)
    return under, offline
