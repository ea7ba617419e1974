from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kept.cluster.metadata import records
from kept.cluster.metadata.records import (
    AclRecord,
    BrokerChangeRecord,
    BrokerRecord,
    ClientQuotaRecord,
    ClusterRecord,
    ConfigRecord,
    Endpoint,
    FeatureRecord,
    NoOpRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveAclRecord,
    RemoveScramCredentialRecord,
    RemoveTopicRecord,
    ScramCredentialRecord,
    TopicRecord,
    UnregisterBrokerRecord,
    VotersRecord,
    decode,
    decode_batch,
    encode,
    encode_batch,
)
from kept.cluster.metadata.voters import Voter
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.cluster.security.credentials import ScramCredential, ScramMechanism
from kept.storage.errors import CorruptMessage, InvariantViolation, UnsupportedVersion

ID = UUID("00112233-4455-6677-8899-aabbccddeeff")
INCARNATION = UUID("ffeeddcc-bbaa-9988-7766-554433221100")

BINDING = AclBinding(
    AclResourceType.TOPIC,
    "orders-",
    PatternType.PREFIXED,
    "User:ada",
    "::1",
    AclOperation.READ,
    AclPermission.ALLOW,
)
SHA_512 = ScramMechanism.SCRAM_SHA_512
CREDENTIAL = ScramCredential(b"salt", b"stored-key", b"server-key", 8192)

GOLDEN = Path(__file__).parent / "golden" / "records.txt"
EXAMPLES = [
    ClusterRecord("q1Sh-9_ISia_zwGINzRvyQ"),
    FeatureRecord("metadata.version", 29),
    BrokerRecord(
        3,
        17,
        INCARNATION,
        (
            Endpoint("PLAINTEXT", "PLAINTEXT", "localhost", 9092),
            Endpoint("NODE", "PLAINTEXT", "::1", 10092),
        ),
        "rack-b",
        True,
    ),
    BrokerRecord(0, 1, INCARNATION, (), None, False),
    BrokerRecord(0, 2, INCARNATION, (), None, True, (ID, INCARNATION)),
    BrokerChangeRecord(3, 17, False, True),
    UnregisterBrokerRecord(3, 17),
    TopicRecord("orders", ID),
    PartitionRecord(ID, 2, (1, 2, 3), (1, 3), 1, 4, 9),
    PartitionRecord(ID, 0, (1,), (1,), -1, 5, 10, unclean=True),
    PartitionRecord(ID, 1, (1, 2, 3), (1, 2), 1, 4, 9, False, (3,), (1,), (2,)),
    ConfigRecord(2, "orders", "cleanup.policy", "compact"),
    ConfigRecord(4, "", "message.max.bytes", None),
    RemoveTopicRecord(ID),
    ProducerIdsRecord(3, 17, 5000),
    NoOpRecord(),
    VotersRecord((Voter(0, ID, "node-0", 10092), Voter(1, INCARNATION, "::1", 10093))),
    AclRecord(ID, BINDING),
    RemoveAclRecord(ID),
    ScramCredentialRecord("ada", SHA_512, CREDENTIAL),
    RemoveScramCredentialRecord("ada", SHA_512),
    ClientQuotaRecord((("client-id", None), ("user", "ada")), "producer_byte_rate", 1048576.0),
    ClientQuotaRecord((("ip", "::1"),), "connection_creation_rate", None),
]

texts = st.text(max_size=40)
nullable = st.none() | texts
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
ids = st.lists(int32, max_size=6).map(tuple)
endpoints = st.lists(st.builds(Endpoint, texts, texts, texts, int32), max_size=3).map(tuple)
any_record = st.one_of(
    st.builds(ClusterRecord, texts),
    st.builds(FeatureRecord, texts, st.integers(0, 2**16 - 1)),
    st.builds(
        BrokerRecord,
        int32,
        int64,
        st.uuids(),
        endpoints,
        nullable,
        st.booleans(),
        st.lists(st.uuids(), max_size=2).map(tuple),
    ),
    st.builds(BrokerChangeRecord, int32, int64, st.booleans(), st.booleans()),
    st.builds(UnregisterBrokerRecord, int32, int64),
    st.builds(TopicRecord, texts, st.uuids()),
    st.builds(RemoveTopicRecord, st.uuids()),
    st.builds(
        PartitionRecord,
        *(st.uuids(), int32, ids, ids, int32, int32, int32, st.booleans(), ids, ids, ids),
    ),
    st.builds(ConfigRecord, st.integers(0, 255), texts, texts, nullable),
    st.builds(ProducerIdsRecord, int32, int64, int64),
    st.just(NoOpRecord()),
    st.builds(AclRecord, st.uuids(), st.from_type(AclBinding)),
    st.builds(RemoveAclRecord, st.uuids()),
    st.builds(
        ScramCredentialRecord,
        texts,
        st.sampled_from(ScramMechanism),
        st.builds(ScramCredential, *(st.binary(max_size=64),) * 3, int32),
    ),
    st.builds(RemoveScramCredentialRecord, texts, st.sampled_from(ScramMechanism)),
    st.builds(
        ClientQuotaRecord,
        st.lists(st.tuples(texts, nullable), max_size=2).map(tuple),
        texts,
        st.none() | st.floats(allow_nan=False),
    ),
    st.builds(
        VotersRecord,
        st.lists(st.builds(Voter, int32, st.uuids(), texts, int32), max_size=3).map(tuple),
    ),
)


def test_golden_bytes() -> None:
    """The format of 0.1.0; every later version must read these."""
    lines = GOLDEN.read_text().splitlines()
    assert [f"{encode(record).hex(' ')}  {record}" for record in EXAMPLES] == lines


def test_golden_bytes_decode() -> None:
    for line, record in zip(GOLDEN.read_text().splitlines(), EXAMPLES, strict=True):
        assert decode(bytes.fromhex(line.split("  ")[0])) == record


def test_a_partition_that_needs_nothing_new_is_written_as_version_0() -> None:
    """What 0.1.0 can read stays readable to it, and most records stay short."""
    plain = PartitionRecord(ID, 1, (1, 2), (1, 2), 1, 0, 0)
    assert encode(plain)[1] == 0
    for field in ("adding", "removing", "elr"):
        assert encode(replace(plain, **{field: (2,)}))[1] == 1


def test_every_kind_of_record_is_in_the_golden_file() -> None:
    assert {type(example) for example in EXAMPLES} == set(records._BY_CLASS)


@given(st.lists(any_record, max_size=6))
def test_decode_after_encode_is_identity(batch) -> None:
    assert decode_batch(encode_batch(batch)) == batch


@given(any_record, st.data())
def test_a_cut_record_is_refused(record, data) -> None:
    whole = encode(record)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CorruptMessage):
        decode(whole[:cut])


@given(st.lists(any_record, min_size=1, max_size=3), st.data())
def test_a_cut_batch_is_refused(batch, data) -> None:
    whole = encode_batch(batch)
    with pytest.raises(CorruptMessage):
        decode_batch(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda r: type(r).__name__)
def test_trailing_bytes_are_refused(record) -> None:
    with pytest.raises(CorruptMessage, match="1 bytes too many"):
        decode(encode(record) + b"\0")


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda r: type(r).__name__)
def test_a_newer_version_is_refused(record) -> None:
    data = bytearray(encode(record))
    data[1] = 1 + bool(records._BY_NUMBER[data[0]].added)
    with pytest.raises(UnsupportedVersion, match="newer kept"):
        decode(bytes(data))


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(UnsupportedVersion, match="type 200 version 0"):
        decode(b"\xc8\0")


def test_a_number_without_a_name_is_refused() -> None:
    data = encode(AclRecord(ID, BINDING))
    with pytest.raises(UnsupportedVersion, match=r"200 is not a valid AclPermission.*newer kept"):
        decode(data[:-1] + b"\xc8")


def test_nothing_shows_what_a_credential_holds() -> None:
    shown = repr(ScramCredentialRecord("ada", SHA_512, CREDENTIAL))
    assert "ada" in shown and "8192" in shown
    assert not any(secret in shown for secret in ("salt", "stored", "server"))


def test_text_that_is_not_utf8_is_refused() -> None:
    data = encode(ClusterRecord("abc")).replace(b"abc", b"\xff\xfe\xfd")
    with pytest.raises(CorruptMessage, match="type 64"):
        decode(data)


def test_null_where_a_string_must_be_is_refused() -> None:
    data = encode(ClusterRecord(""))
    with pytest.raises(CorruptMessage, match="null"):
        decode(data[:-2] + b"\xff\xff")


def test_a_string_that_does_not_fit_is_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="65535 bytes"):
        encode(ClusterRecord("x" * 65535))


def test_records_are_immutable() -> None:
    with pytest.raises(AttributeError):
        EXAMPLES[0].cluster_id = "other"  # type: ignore[misc,union-attr]
