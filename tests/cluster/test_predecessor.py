"""What a leader knows of the one before it: the controller judges that one's silence by it."""

from __future__ import annotations

from kept.cluster.metadata.metadata_node import MetadataNode
from tests.support.metadata_cluster import Cluster


def next_leader(cluster: Cluster, before: MetadataNode) -> MetadataNode:
    for _ in range(200):
        for member in cluster.members.values():
            if member is not before and member.controller_ready:
                return member
        cluster.tick()
    raise AssertionError("nobody leads")


def test_a_leader_knows_for_how_long_the_one_before_it_was_not_heard() -> None:
    cluster = Cluster()
    cluster.start(0, 1, 2)
    first = cluster.leader()
    assert first.predecessor == {}, "nobody led before it"
    cluster.cut.add(first.node_id)
    second = next_leader(cluster, first)
    patience = second.core.state.settings.election_ticks
    assert list(second.predecessor) == [first.node_id]
    assert second.predecessor[first.node_id] >= patience

    cluster.cut.clear()
    cluster.tick(5)
    second.transfer(first.node_id)
    cluster.deliver()
    assert first.controller_ready
    heartbeat = first.core.state.settings.heartbeat_ticks
    assert first.predecessor[second.node_id] <= heartbeat, "it was heard until it handed over"


def test_who_led_itself_before_knows_of_no_other() -> None:
    cluster = Cluster()
    cluster.start(0, 1, 2)
    first = cluster.leader()
    cluster.cut.update(cluster.members)
    cluster.tick(50)
    assert not any(m.controller_ready for m in cluster.members.values())
    cluster.cut.clear()
    again = cluster.leader()
    assert again.predecessor.keys() == {first.node_id} - {again.node_id}
