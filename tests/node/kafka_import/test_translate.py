"""Kafka's metadata log, written by 4.3.0, and what it comes to here."""

from __future__ import annotations

from uuid import UUID

import pytest
from msgspec.structs import replace

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import (
    AclRecord,
    BrokerChangeRecord,
    ClientQuotaRecord,
    ConfigRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveTopicRecord,
    TopicRecord,
    decode_batch,
)
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.cluster.security.credentials import ScramMechanism
from kept.node.kafka_import import kafka_records
from kept.node.kafka_import.adopted_metadata import ImportedMetadata, _records
from kept.node.kafka_import.translate import Translation
from kept.storage.errors import CorruptMessage, UnsupportedVersion
from kept.storage.records import headers
from tests.node.kafka_import import fixtures

A, B = UUID(int=1), UUID(int=2)


def whole(imported: ImportedMetadata) -> Image:
    image = imported.image
    for entry in imported.entries:
        image, _ = image.apply(decode_batch(entry.data))
    assert image == imported.final_image
    return image


def partition(number: int = 0, topic_id: UUID = A, **fields: object) -> kafka_records.Partition:
    values: dict[str, object] = {
        "topic_id": topic_id,
        "partition": number,
        "replicas": (1, 2, 3),
        "isr": (1, 2, 3),
        "removing": (),
        "adding": (),
        "leader": 1,
        "recovering": False,
        "leader_epoch": 0,
        "partition_epoch": 0,
        "elr": (),
    }
    return kafka_records.Partition(**(values | fields))  # type: ignore[arg-type]


def change(number: int = 0, **fields: object) -> kafka_records.ChangePartition:
    values: dict[str, object] = dict.fromkeys(
        ("isr", "leader", "replicas", "removing", "adding", "recovering", "elr")
    )
    return kafka_records.ChangePartition(A, number, **(values | fields))  # type: ignore[arg-type]


def test_a_node_with_checkpoints_gives_all_its_topics_and_settings() -> None:
    imported = fixtures.read("one")
    image = whole(imported)
    assert (imported.image.index, imported.term) == (92, 1)  # the newest checkpoint
    assert {name: len(topic.partitions) for name, topic in image.topics.items()} == {
        "t0": 3,
        "t1": 3,
        "t3": 3,
        "t4": 5,
        "t5": 3,
        "late": 2,
    }
    assert image.config(2, "t1") == {"cleanup.policy": "compact,delete"}
    assert image.config(4, "")["log.retention.ms"] == "5000000"
    assert image.cluster_id == "rp4NgQTYSq2Wmy8ngP4D8g"
    assert list(imported.translation.left.described()) == []


def test_acls_credentials_and_quotas_say_the_same_here() -> None:
    image = whole(fixtures.read("one"))
    read, allow = AclOperation.READ, AclPermission.ALLOW
    topic, literal = AclResourceType.TOPIC, PatternType.LITERAL
    assert [*image.acls.values()] == [AclBinding(topic, "t1", literal, "User:x", "*", read, allow)]
    ((who, credential),) = image.credentials.items()
    assert who == ("alice", ScramMechanism.SCRAM_SHA_256)
    assert (credential.iterations, len(credential.stored_key)) == (4096, 32)
    assert image.quotas == {(("user", "bob"),): {"producer_byte_rate": 1024.0}}
    assert image.features["kept.security"] == 1


def test_a_quota_that_kept_would_not_take_is_named_unless_it_was_taken_back() -> None:
    """Kafka resolves the names of hosts."""
    translation = Translation()
    quota = ClientQuotaRecord((("ip", "localhost"),), "connection_creation_rate", 5.0)
    translation.add([quota])
    (problem,) = translation.problems()
    assert "connection_creation_rate of ip 'localhost': localhost is not a valid IP" in problem
    translation.add([replace(quota, value=None)])
    assert not list(translation.problems())
    assert len(translation.step()) == 2


def test_a_number_without_a_name_is_refused() -> None:
    """As a newer Kafka may write it."""
    acl = b"\1\x12\0" + bytes(16) + b"\2\2t\3\2x\2*"
    assert isinstance(kafka_records.decode(acl + b"\3\3\0"), AclRecord)
    with pytest.raises(UnsupportedVersion, match="type 18: 99 is not a valid AclOperation"):
        kafka_records.decode(acl + b"\x63\3\0")


def test_nodes_whose_logs_end_apart_agree_as_far_as_both_go() -> None:
    """What Raft's log matching asks for, and what makes adopting three nodes safe."""
    longest, _, shortest = (fixtures.read(f"n{i}") for i in range(3))
    assert longest.image.index == shortest.image.index == 1
    assert longest.image == shortest.image
    assert len(longest.entries) == len(shortest.entries) + 1
    assert longest.entries[: len(shortest.entries)] == shortest.entries
    assert [e.index for e in longest.entries] == list(range(2, 133))
    # Kafka elected node 1 in that term: nobody may be elected in it once more.
    assert (longest.hard_state.term, longest.hard_state.vote) == (1, 1)


def test_an_empty_isr_becomes_the_eligible_leaders() -> None:
    image = whole(fixtures.read("n0"))
    state = image.partition("table", 2)
    assert state is not None
    assert (state.replicas, state.isr, state.leader) == ((2, 0, 1), (2, 0), -1)
    assert {broker.broker_epoch for broker in image.brokers.values()} == {10, 11, 17}
    assert image.next_producer_id == 1000
    assert image.config(2, "table")["cleanup.policy"] == "compact"
    assert "gone" not in image.topics


def test_the_prefix_of_a_log_is_read_the_same_after_a_checkpoint() -> None:
    """A node that kept more of its log has more entries and a lower base, not another image."""
    whole_one = whole(fixtures.read("one"))
    translation = Translation()
    # the log from offset 0 alone, as a node without checkpoints would read it
    path = fixtures.HERE / "one" / "__cluster_metadata-0" / f"{0:020d}.log"
    data = path.read_bytes()
    records = []
    for position, header in headers(data):
        found, _ = _records(data[position : position + header.size_bytes], header)
        translation.add(found)
        records += translation.step()
    image, _ = Image().apply(records)
    assert image.topics == whole_one.topics
    assert image.configs == whole_one.configs
    assert image.brokers == whole_one.brokers


def test_a_transaction_counts_as_a_whole_or_not_at_all() -> None:
    translation = Translation()
    topic = kafka_records.Topic("a", A)
    translation.add([kafka_records.Transaction("begin"), topic, partition()])
    assert translation.step() == []
    translation.add([kafka_records.Transaction("end")])
    assert [type(one) for one in translation.step()] == [TopicRecord, PartitionRecord]
    translation.add([kafka_records.Transaction("begin"), kafka_records.Topic("b", B)])
    translation.add([kafka_records.Transaction("abort")])
    assert translation.step() == []
    assert set(translation.topics) == {A}


def test_a_change_of_leader_bumps_its_epoch_and_another_does_not() -> None:
    translation = Translation()
    translation.add([kafka_records.Topic("a", A), partition()])
    translation.step()
    translation.add([change(isr=(1, 2)), change(leader=2, isr=(2,), elr=(1,))])
    (record,) = translation.step()
    assert isinstance(record, PartitionRecord)
    assert (record.leader, record.leader_epoch, record.partition_epoch) == (2, 1, 2)
    assert record.isr == (2,)


def test_partitions_wait_for_those_before_them() -> None:
    translation = Translation()
    translation.add([kafka_records.Topic("a", A), partition(1)])
    assert [type(one) for one in translation.step()] == [TopicRecord]
    translation.add([partition(0)])
    numbers = [one.partition for one in translation.step() if isinstance(one, PartitionRecord)]
    assert numbers == [0, 1]


def test_a_topic_that_is_removed_and_made_again_in_one_batch() -> None:
    translation = Translation()
    translation.add(
        [kafka_records.Topic("a", A), partition(), kafka_records.Config(2, "a", "segment.ms", "5")]
    )
    translation.step()
    translation.add(
        [kafka_records.RemoveTopic(A), kafka_records.Topic("a", B), partition(topic_id=B)]
    )
    translation.add([kafka_records.Config(2, "a", "segment.ms", "7")])
    kinds = [type(one) for one in translation.step()]
    assert kinds == [RemoveTopicRecord, TopicRecord, PartitionRecord, ConfigRecord]


def test_producer_ids_only_grow() -> None:
    translation = Translation()
    translation.add([kafka_records.ProducerIds(2000), kafka_records.ProducerIds(1000)])
    (record,) = translation.step()
    assert record == ProducerIdsRecord(-1, -1, 2000)
    translation.add([kafka_records.ProducerIds(2000)])
    assert translation.step() == []


def test_a_broker_that_shuts_down_and_an_unknown_one() -> None:
    translation = Translation()
    translation.add([kafka_records.RegisterBroker(1, A, 5, None, True, False, ())])
    translation.step()
    translation.add([kafka_records.ChangeBroker(1, 5, False, None, ())])
    translation.add([kafka_records.ChangeBroker(1, 5, None, True, ())])
    assert translation.step() == [BrokerChangeRecord(1, 5, False, True)]
    with pytest.raises(CorruptMessage, match="broker 9 changes and is not registered"):
        translation.add([kafka_records.ChangeBroker(9, 5, True, None, ())])


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (kafka_records.Feature("metadata.version", 31), "newer than that of Apache Kafka 4.3"),
        (kafka_records.Config(2, "a", "remote.storage.enable", "true"), "remote storage"),
        (kafka_records.Config(2, "a", "segment.bytes", "7"), "segment.bytes"),
        (change(isr=(), leader=-1), "a:0 has no replica that is in sync"),
    ],
)
def test_what_cannot_be_kept_true_is_a_problem(
    record: kafka_records.KafkaRecord, problem: str
) -> None:
    translation = Translation()
    translation.add([kafka_records.Topic("a", A), partition()])
    assert list(translation.problems()) == []
    translation.add([record])
    (said,) = translation.problems()
    assert problem in said


def test_settings_that_are_not_known_are_left_and_told() -> None:
    translation = Translation()
    translation.add(
        [
            kafka_records.Config(2, "a", "future.setting", "1"),
            kafka_records.Config(16, "m", "x", "2"),
        ]
    )
    assert translation.step() == []
    assert list(translation.left.described()) == [
        "topic a: future.setting=1",
        "client metrics m: x=2",
    ]
    translation.add([kafka_records.Config(16, "m", "x", None)])
    assert list(translation.left.described()) == ["topic a: future.setting=1"]


def test_passwords_among_settings_that_are_not_known_are_not_told() -> None:
    """Kafka keeps what is set of a listener in its metadata log, as it was typed."""
    translation = Translation()
    of_listener = "listener.name.outside.scram-sha-512.sasl.jaas.config"
    translation.add(
        [
            kafka_records.Config(4, "1", of_listener, 'ScramLoginModule password="hunter2";'),
            kafka_records.Config(4, "", "listener.name.outside.ssl.key.password", "hunter2"),
        ]
    )
    assert list(translation.left.described()) == [
        "broker (all): listener.name.outside.ssl.key.password=[hidden]",
        f"broker 1: {of_listener}=[hidden]",
    ]


@pytest.mark.parametrize("value", [b"\x01\x7f\x00", b"\x01\x03\x03", b"\x02\x02\x00"])
def test_a_record_that_4_3_does_not_write_is_refused(value: bytes) -> None:
    with pytest.raises(UnsupportedVersion, match=r"Apache Kafka 4\.3 does not write"):
        kafka_records.decode(value)


def test_a_record_that_ends_early_is_damage() -> None:
    with pytest.raises(CorruptMessage, match="ends 16 bytes early"):
        kafka_records.decode(b"\x01\x02\x00\x02a")
