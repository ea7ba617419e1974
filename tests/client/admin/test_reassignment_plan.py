"""Plans of moves: replicas go where there is room, nothing goes where it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.client.admin.cluster import Member
from kept.client.admin.reassignment_plan import (
    away_from,
    counts,
    find_unhealthy,
    leaders_away_from,
    spread,
)
from kept.client.core.metadata import PartitionMetadata, TopicMetadata
from kept.storage.errors import InvalidReplicaAssignment
from kept.storage.types import TopicPartition


def topic(name, *replicas, isr=None, leader=None, internal=False):
    partitions = {
        number: PartitionMetadata(
            number,
            one[0] if leader is None else leader,
            0,
            tuple(one),
            tuple(one if isr is None else isr),
        )
        for number, one in enumerate(replicas)
    }
    return TopicMetadata(name, None, internal, partitions)


def members(*ids, racks=None, fenced=()):
    return [Member(n, "h", 1, (racks or {}).get(n), n in fenced) for n in ids]


def test_a_topic_is_spread_in_turn_and_keeps_its_number_of_replicas():
    plan = spread(topic("t", (0, 1), (0, 1), (0, 1)), (1, 2, 3))
    assert plan == {
        TopicPartition("t", 0): (1, 2),
        TopicPartition("t", 1): (2, 3),
        TopicPartition("t", 2): (3, 1),
    }
    assert spread(topic("t", (1, 2), (2, 1)), (1, 2)) == {}
    with pytest.raises(InvalidReplicaAssignment, match="t:0 has 2 replicas and --to names 1 node;"):
        spread(topic("t", (0, 1)), (3,))


def test_replicas_leave_for_a_rack_without_one_then_for_the_emptiest_node():
    racks = {0: "a", 1: "b", 2: "b", 3: "c"}
    plan = away_from([0], [topic("t", (0, 1))], members(0, 1, 2, 3, racks=racks))
    assert plan == {TopicPartition("t", 0): (3, 1)}
    plan = away_from([0], [topic("t", (0,), (0,), (2,), (2,))], members(0, 1, 2))
    assert set(plan.values()) == {(1,)}


def test_a_fenced_node_is_given_nothing():
    with pytest.raises(
        InvalidReplicaAssignment, match="t:0 on node 0 has nowhere to go: each other"
    ):
        away_from([0], [topic("t", (0, 1))], members(0, 1, 2, fenced=(2,)))


@given(
    st.integers(2, 6),
    st.integers(1, 3),
    st.lists(st.integers(1, 4), min_size=1, max_size=12),
    st.data(),
)
def test_drained_nodes_are_empty_and_nobody_else_moves(nodes, leaving, factors, data):
    gone = range(min(leaving, nodes - 1))
    replicas = [
        tuple(data.draw(st.permutations(range(nodes)))[: min(factor, nodes - len(gone))])
        for factor in factors
    ]
    plan = away_from(gone, [topic("t", *replicas)], members(*range(nodes)))
    for number, before in enumerate(replicas):
        after = plan.get(TopicPartition("t", number), before)
        assert not set(after) & set(gone)
        assert len(set(after)) == len(before)
        assert [n for n in before if n not in gone] == [n for n in after if n in before]


def test_leadership_moves_to_the_next_replica():
    plan = leaders_away_from([0], [topic("t", (0, 1, 2), (1, 0), (0,))])
    assert plan == {TopicPartition("t", 0): (1, 2, 0)}
    plan = leaders_away_from([0, 1], [topic("t", (0, 1, 2), (1, 0), (2, 0))])
    assert plan == {TopicPartition("t", 0): (2, 0, 1)}


def test_what_lacks_a_leader_or_a_replica():
    topics = {
        "ok": topic("ok", (0, 1)),
        "under": topic("under", (0, 1), isr=(0,)),
        "off": topic("off", (0, 1), isr=(0,), leader=-1),
    }
    under, offline = find_unhealthy(topics)
    assert under == [TopicPartition("under", 0)]
    assert offline == [TopicPartition("off", 0)]
    replicas, leaders = counts(topics.values())
    assert replicas == {0: 3, 1: 3}
    assert leaders == {0: 2, -1: 1}


def test_what_is_wrong_with_internal_topics_comes_last():
    topics = {
        "__a": topic("__a", (0, 1), (1, 0), isr=(0,), internal=True),
        "a": topic("a", (0, 1), (1, 0), isr=(0,)),
        "b": topic("b", (0, 1), isr=(0,)),
    }
    under, _ = find_unhealthy(topics)
    assert [tp.place for tp in under] == ["a:0", "a:1", "b:0", "__a:0", "__a:1"]
