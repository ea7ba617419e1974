"""Formats that members of a group exchange, and the range assignment."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.static.constants import EntityType

from kept.client.admin import groups
from kept.client.admin.group_survey import groups_and_offsets
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import build, message_type
from kept.storage.errors import CorruptMessage, RetriableError, UnsupportedVersion
from kept.storage.types import TopicPartition

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


GROUP = "app: eu"
OFFSETS = {TopicPartition("t", 0): 1}
DENIED = {"error_code": 30}
DENIED_GROUP = {
    **DENIED,
    "group_id": GROUP,
    "group_state": "",
    "protocol_type": "",
    "protocol_data": "",
    "members": (),
    "topics": (),
}
PER_PARTITION = [{"name": "t", "partitions": [{"partition_index": 0, **DENIED}]}]


@pytest.mark.parametrize(
    ("operation", "version", "values", "right"),
    [
        (groups.describe_group(GROUP), 5, {"groups": [DENIED_GROUP]}, "describe"),
        (groups.delete_group(GROUP), 2, {"results": [DENIED_GROUP]}, "delete"),
        (groups.fetch_offsets(GROUP), 8, {"groups": [DENIED_GROUP]}, "describe"),
        (groups.commit_offsets(GROUP, OFFSETS), 8, {"topics": PER_PARTITION}, "read"),
        (groups.delete_offsets(GROUP, OFFSETS), 0, {**DENIED, "topics": ()}, "delete"),
        (
            groups.delete_offsets(GROUP, OFFSETS),
            0,
            {"error_code": 0, "topics": PER_PARTITION},
            "delete",
        ),
    ],
)
def test_who_may_not_reach_a_group_is_told_which(operation, version, values, right):
    (call,) = next(operation)
    answer = response(call.api_key, version, **values)
    error = call.check(answer)
    if error is None:
        with pytest.raises(StopIteration) as ended:
            operation.send([answer])
        (error,) = ended.value.value.values()
    assert str(error).endswith(f"kept acl add User:NAME {right} group:{GROUP})")


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


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">hihhih", 0, 2**31 - 1, 0, 0, 0, -6),
        struct.pack(">hih", 0, 2**31 - 1, -6) + bytes(14),
        struct.pack(">hih", 0, 2**31 - 1, -2) + bytes(14),
        struct.pack(">hi", 0, -1),
        struct.pack(">hih", 0, 1, -1) + bytes(8),
        struct.pack(">hih1s", 0, 1, 2, b"t"),
        struct.pack(">hih1s", 0, 2, 1, b"t"),
        struct.pack(">hih", 0, 2**31 - 1, 0) + bytes(1000),
    ],
)
@pytest.mark.parametrize("decode", [groups.decode_assignment, groups.decode_subscription])
def test_sizes_that_cannot_be_are_refused(decode, data):
    with pytest.raises(CorruptMessage, match="group metadata that is not readable"):
        decode(data)


@pytest.mark.parametrize("count", [-1, -(2**31), 3, 2**31 - 1])
def test_a_number_of_partitions_that_cannot_be_is_refused(count):
    data = struct.pack(">hih1si2i", 0, 1, 1, b"t", count, 0, 1)
    with pytest.raises(CorruptMessage, match=f"{count} partitions where 8 bytes are left"):
        groups.decode_assignment(data)


_SIZES = st.sampled_from([-(2**15), -6, -4, -2, -1, 0, 1, 2, 6, 2**15 - 1])
_COUNTS = st.sampled_from([-(2**31), -1, 0, 1, 2, 1000, 2**31 - 1])
_FIELDS = st.one_of(
    _SIZES.map(struct.Struct(">h").pack), _COUNTS.map(struct.Struct(">i").pack), st.binary()
)


@given(_COUNTS, st.lists(_FIELDS, max_size=20))
def test_no_more_is_read_than_there_is(count, fields):
    """Whatever the sizes say: what comes out has no more items than there are bytes for."""
    data = struct.pack(">hi", 0, count) + b"".join(fields)
    with suppress(CorruptMessage):
        assert len(groups.decode_subscription(data)) <= len(data) // 2
    with suppress(CorruptMessage):
        assert len(groups.decode_assignment(data)) <= len(data) // 4


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


def response(api_key: int, version: int, **values: Any) -> Any:
    return build(message_type(api_key, version, EntityType.response), values)


def committed(*codes: int) -> Any:
    partitions = [{"partition_index": n, "error_code": code} for n, code in enumerate(codes)]
    return response(ApiKey.OFFSET_COMMIT, 8, topics=[{"name": "t", "partitions": partitions}])


def test_what_is_not_committed_is_told_by_partition():
    t0, t1 = TopicPartition("t", 0), TopicPartition("t", 1)
    operation = groups.commit_each("g", {t0: 5, t1: 6}, 1_000)
    (call,) = next(operation)
    assert call.check is not None
    assert call.check(committed(0, 3)) is None, "one of two is done: that is no failure of all"
    assert isinstance(call.check(committed(15, 15)), RetriableError)
    assert call.check(committed(29, 29)) is None, "trying again does not mend that"
    with pytest.raises(StopIteration) as end:
        operation.send([committed(0, 29)])
    assert list(end.value.value) == [t1]
    assert "OffsetCommit of g: t:1: TOPIC_AUTHORIZATION_FAILED" in str(end.value.value[t1])


def member_of_classic_group(member_id: str, assignment: bytes) -> dict[str, Any]:
    return {
        "member_id": member_id,
        "group_instance_id": None,
        "client_id": "c",
        "client_host": "/h",
        "member_metadata": b"",
        "member_assignment": assignment,
    }


def test_a_member_whose_assignment_is_not_readable_hides_nobody():
    """Neither the other members nor the other groups of the response."""
    t0 = TopicPartition("t", 0)
    readable = groups.encode_assignment([t0])
    assignments = {"g": [bytes.fromhex("0000000000057a7a"), readable], "other": [readable]}
    described = [
        {
            "error_code": 0,
            "group_id": name,
            "group_state": "Stable",
            "protocol_type": "consumer",
            "protocol_data": "range",
            "members": [member_of_classic_group(f"m{n}", data) for n, data in enumerate(its)],
            "authorized_operations": 0,
        }
        for name, its in assignments.items()
    ]
    listings = [
        groups.GroupListing(name, "consumer", "Stable", "classic", 0) for name in assignments
    ]
    operation = groups_and_offsets(listings, 1_000)
    next(operation)
    operation.send([response(ApiKey.DESCRIBE_GROUPS, 5, groups=described)])
    with pytest.raises(StopIteration) as end:
        operation.send([RetriableError("not now")] * 2)
    found, _ = end.value.value
    assert [m.partitions for m in found["g"].members] == [(), (t0,)]
    assert [m.partitions for m in found["other"].members] == [(t0,)]


def test_a_group_of_the_newer_protocol_is_described():
    member = {
        "member_id": "m",
        "instance_id": "i",
        "rack_id": None,
        "member_epoch": 3,
        "client_id": "c",
        "client_host": "/h",
        "subscribed_topic_names": ("t",),
        "subscribed_topic_regex": None,
        "assignment": {
            "topic_partitions": [{"topic_id": None, "topic_name": "t", "partitions": (2, 4)}]
        },
        "target_assignment": {"topic_partitions": []},
    }
    described = {
        "error_code": 0,
        "group_id": "g",
        "group_state": "Stable",
        "group_epoch": 3,
        "assignment_epoch": 3,
        "assignor_name": "uniform",
        "members": [member],
    }
    missing = {**described, "error_code": 69, "group_id": "x", "members": []}
    group, absent = groups.descriptions(response(69, 1, groups=[described, missing]))
    assert (group.state, group.protocol_type, group.protocol) == ("Stable", "consumer", "uniform")
    assert group.members == (
        groups.GroupMember("m", "i", "c", "/h", (TopicPartition("t", 2), TopicPartition("t", 4))),
    )
    assert absent.state == groups.DEAD


def test_the_newer_protocol_is_asked_about_a_group_that_is_not_of_the_old_one():
    dead = response(
        ApiKey.DESCRIBE_GROUPS,
        5,
        groups=[
            {
                "error_code": 0,
                "group_id": "g",
                "group_state": "Dead",
                "protocol_type": "",
                "protocol_data": "",
                "members": [],
            }
        ],
    )
    operation = groups.describe_group("g")
    next(operation)
    (newer,) = operation.send([dead])
    assert newer.api_key == 69
    with pytest.raises(StopIteration) as end:
        operation.throw(UnsupportedVersion("kept has no such groups"))
    assert end.value.value.state == groups.DEAD
