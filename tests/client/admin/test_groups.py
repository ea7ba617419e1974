"""Formats that members of a group exchange, and the range assignment."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.client.admin import groups
from kept.storage.errors import CorruptMessage
from kept.storage.types import TopicPartition

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(st.lists(NAMES, max_size=5, unique=True))
def test_a_subscription_survives(topics):
    assert groups.decode_subscription(groups.encode_subscription(topics)) == topics


@given(st.lists(st.builds(TopicPartition, NAMES, st.integers(0, 999)), max_size=20, unique=True))
def test_an_assignment_survives(partitions):
    decoded = groups.decode_assignment(groups.encode_assignment(partitions))
    assert sorted(decoded) == sorted(partitions)


def test_newer_versions_are_read_up_to_what_is_known():
    newer = struct.pack(">hih1si", 3, 1, 1, b"t", -1) + b"more to come"
    assert groups.decode_subscription(newer) == ["t"]
    assert groups.decode_assignment(b"") == []


@pytest.mark.parametrize("data", [b"\0", b"\0\0\0\0\0\5", b"\0\0\0\0\0\1\0\1\xff\0\0\0\0"])
def test_damage_is_refused(data):
    with pytest.raises(CorruptMessage):
        groups.decode_assignment(data)


def test_range_assignment_is_kafkas():
    """The example of RangeAssignor's javadoc: two members, two topics of three partitions."""
    wishes = {"C1": ["t1", "t0"], "C0": ["t0", "t1"]}
    assigned = groups.range_assignment(wishes, lambda _: 3)
    assert assigned == {
        "C0": [TopicPartition(t, p) for t in ("t0", "t1") for p in (0, 1)],
        "C1": [TopicPartition(t, 2) for t in ("t0", "t1")],
    }


@given(
    st.dictionaries(NAMES, st.lists(st.sampled_from(["a", "b", "c"]), unique=True), min_size=1),
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 12)),
)
def test_every_partition_goes_to_exactly_one_member_that_wants_it(wishes, counts):
    assigned = groups.range_assignment(wishes, lambda t: counts.get(t, 0))
    everything = [tp for tps in assigned.values() for tp in tps]
    wanted = {t for topics in wishes.values() for t in topics}
    assert sorted(everything) == sorted(
        TopicPartition(t, p) for t in wanted for p in range(counts.get(t, 0))
    )
    for member, tps in assigned.items():
        assert {tp.topic for tp in tps} <= set(wishes[member])
