"""Records of ``__consumer_offsets``: Apache Kafka's bytes, all versions, and what does not
decode."""

from __future__ import annotations

import base64
import contextlib
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.node.coordinator.common.partitioner import java_hash, partition_for
from kept.node.coordinator.groups import group as group_module
from kept.node.coordinator.groups import records as r
from kept.node.coordinator.groups.group import Group
from kept.storage.errors import CorruptMessage
from kept.storage.records import records as read_records

KAFKA_LOG = Path(__file__).parent / "data" / "kafka-4.3.0-consumer-offsets.log"
TOPIC_ID = uuid.UUID(bytes=base64.urlsafe_b64decode("eB98FWWuQNiPanYnn3RUJQ=="))
"""The topic ``orders`` of that log."""

text = st.text(max_size=20)
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
members = st.builds(
    r.MemberMetadata,
    text,
    st.none() | text,
    text,
    text,
    int32,
    int32,
    st.binary(max_size=200),
    st.binary(max_size=20),
)
groups = st.builds(
    r.GroupMetadataValue,
    text,
    int32,
    st.none() | text,
    st.none() | text,
    int64,
    st.lists(members, max_size=3).map(tuple),
)
offsets = st.builds(
    r.OffsetCommitValue,
    int64,
    text,
    int64,
    int32,
    st.just(-1) | st.integers(0, 2**62),
    st.just(r.NO_TOPIC_ID) | st.uuids(),
)
keys = st.builds(r.OffsetCommitKey, text, text, int32) | st.builds(r.GroupMetadataKey, text)


def kafka_records() -> list[tuple[bytes, bytes | None]]:
    return [(record.key, record.value) for record in read_records(KAFKA_LOG.read_bytes())]


def test_apache_kafkas_records_are_understood() -> None:
    found = [r.decode_record(key, value) for key, value in kafka_records()]
    empty, alone, pair, *offsets, last = found[:6]
    assert empty == r.GroupRecord(
        r.GroupMetadataKey("readers"), r.GroupMetadataValue("", 0, None, None, 1795253504599, ())
    )
    assert [m.value.generation for m in (alone, pair, last)] == [1, 2, 3]
    static, dynamic = pair.value.members
    assert static.group_instance_id == "reader-1"
    assert static.member_id == "reader-1-1a703b2c-12d3-4dd6-be8f-c3ef5c4de96e"
    assert (dynamic.group_instance_id, dynamic.client_id) == (None, "golden")
    assert (static.client_host, static.session_timeout_ms) == ("/127.0.0.1", 6000)
    assert static.rebalance_timeout_ms == 300000
    assert subscribed(static.subscription) == {"orders"}
    assert [o.value for o in offsets] == [
        r.OffsetCommitValue(4, "note é\0", 1795253507992, topic_id=TOPIC_ID),
        r.OffsetCommitValue(3, "note é\0", 1795253508003, topic_id=TOPIC_ID),
    ]
    assert [o.key.partition for o in offsets] == [1, 0]
    deleted = [record.key for record in found[-3:] if record.value is None]
    assert deleted == [
        r.OffsetCommitKey("simple", "orders", 0),
        r.OffsetCommitKey("simple", "orders", 1),
        r.GroupMetadataKey("simple"),
    ]


def test_we_write_the_same_bytes_as_apache_kafka() -> None:
    for key, value in kafka_records():
        assert r.decode_record(key, value).encode() == (key, value)


def test_a_group_survives_the_way_through_its_record() -> None:
    pair = r.decode_record(*kafka_records()[2])
    group = Group.from_record("readers", pair.value)
    group.check_invariants()
    assert group.to_record() == pair
    assert group.subscribed_topics == {"orders"}


def subscription(*topics: str, version: int = 0, more: bytes = b"") -> bytes:
    names = b"".join(len(t).to_bytes(2, "big") + t.encode() for t in topics)
    return version.to_bytes(2, "big") + len(topics).to_bytes(4, "big") + names + more


def subscribed(*subscriptions: bytes) -> frozenset[str] | None:
    members = tuple(
        r.MemberMetadata(f"m{n}", None, "c", "/h", 1000, 1000, metadata, b"")
        for n, metadata in enumerate(subscriptions)
    )
    value = r.GroupMetadataValue("consumer", 1, "range", "m0", 0, members)
    return Group.from_record("g", value).subscribed_topics


def test_topics_of_all_members_are_known_unless_they_are_very_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_module, "MAX_SUBSCRIPTIONS", 5)
    ab, abc = subscription("a", "b"), subscription("a", "b", "c")
    assert subscribed(ab, abc) == {"a", "b", "c"}
    newer = subscription("a", "b", version=1, more=b"what it owns")
    assert subscribed(ab, newer, ab, newer) == {"a", "b"}, "the same one is read once"
    assert subscribed(ab, subscription("c"), newer, subscription("c")) == {"a", "b", "c"}, (
        "and so are two that take turns"
    )
    assert subscribed(ab, abc, subscription("d")) is None
    assert subscribed(subscription(*"abcdef")) is None
    assert subscribed(ab, b"\0\0\0\0\0\2\0\1a") is None, "it ends early"


@given(keys)
def test_keys_come_back(key: r.Key) -> None:
    assert r.decode_key(r.encode_key(key)) == key


@given(offsets, st.sampled_from(r.OFFSET_COMMIT_VALUE_VERSIONS))
def test_offsets_come_back_in_every_version(value: r.OffsetCommitValue, version: int) -> None:
    back = r.decode_offset_commit(r.encode_offset_commit(value, version))
    assert (back.offset, back.metadata) == (value.offset, value.metadata)
    assert back.commit_timestamp == value.commit_timestamp
    assert back.leader_epoch == (value.leader_epoch if version >= 3 else -1)
    assert back.expire_timestamp == (value.expire_timestamp if version == 1 else -1)
    assert back.topic_id == (value.topic_id if version >= 4 else r.NO_TOPIC_ID)


@given(groups, st.sampled_from(r.GROUP_METADATA_VALUE_VERSIONS))
def test_groups_come_back_in_every_version(value: r.GroupMetadataValue, version: int) -> None:
    back = r.decode_group_metadata(r.encode_group_metadata(value, version))
    if version >= 3:
        assert back == value
    assert [m.assignment for m in back.members] == [m.assignment for m in value.members]
    assert back.current_state_timestamp == (value.current_state_timestamp if version >= 2 else -1)


def test_versions_are_those_that_kafka_writes() -> None:
    assert r.encode_offset_commit(r.OffsetCommitValue(1, "", 2))[:2] == b"\0\4"
    assert r.encode_offset_commit(r.OffsetCommitValue(1, "", 2, expire_timestamp=3))[:2] == b"\0\1"
    assert r.encode_group_metadata(r.GroupMetadataValue("", 0, None, None, -1, ()))[:2] == b"\0\3"
    # Keys of type 0 are offsets too.
    legacy = b"\0\0" + r.encode_key(r.OffsetCommitKey("g", "t", 1))[2:]
    assert r.decode_key(legacy) == r.OffsetCommitKey("g", "t", 1)


def test_other_types_are_left_alone() -> None:
    for kind in (3, 4, 8, 17, 32767, -1):
        assert r.decode_record(kind.to_bytes(2, "big", signed=True) + b"anything", b"") is None


@given(st.binary(max_size=60))
def test_garbage_is_refused_not_more(data: bytes) -> None:
    for decode in (r.decode_key, r.decode_offset_commit, r.decode_group_metadata):
        with contextlib.suppress(CorruptMessage):
            decode(data)


@given(groups)
def test_no_prefix_of_a_group_is_a_group(value: r.GroupMetadataValue) -> None:
    data = r.encode_group_metadata(value)
    for size in range(0, len(data), max(1, len(data) // 20)):
        with pytest.raises(CorruptMessage):
            r.decode_group_metadata(data[:size])


def test_newer_versions_are_refused() -> None:
    with pytest.raises(CorruptMessage, match="version 5"):
        r.decode_offset_commit(b"\0\5" + bytes(40))


# Values of Java's String.hashCode(); the last but one is the smallest int32.
@pytest.mark.parametrize(
    ("group", "hashed"),
    [("", 0), ("a", 97), ("hello", 99162322), ("polygenelubricants", -(2**31)), ("😀", 1772899)],
)
def test_hash_is_javas(group: str, hashed: int) -> None:
    assert java_hash(group) == hashed
    assert partition_for(group, 50) == (0 if hashed == -(2**31) else abs(hashed) % 50)


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 1000])
def test_hash_of_a_long_name_is_the_same_by_each_unit(length: int) -> None:
    text = "".join(chr(0x20 + 7 * place % 0xD000) for place in range(length))
    value = 0
    for character in text:
        value = (31 * value + ord(character)) % (1 << 32)
    assert java_hash(text) % (1 << 32) == value


def test_length_is_javas() -> None:
    assert [r.utf16_length(t) for t in ("", "abc", "é", "😀")] == [0, 3, 1, 2]
