from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kept.cluster.metadata import image as image_module
from kept.cluster.metadata.image import Image, PartitionChange
from kept.cluster.metadata.records import (
    RECORDS_PER_STEP,
    AclRecord,
    BrokerChangeRecord,
    BrokerRecord,
    ClientQuotaRecord,
    ClusterRecord,
    ConfigRecord,
    Endpoint,
    FeatureRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveAclRecord,
    RemoveScramCredentialRecord,
    RemoveTopicRecord,
    ResourceType,
    ScramCredentialRecord,
    TopicRecord,
    UnregisterBrokerRecord,
)
from kept.cluster.metadata.snapshot import difference
from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.cluster.security.credentials import ScramCredential, ScramMechanism
from kept.storage.errors import InvariantViolation
from kept.storage.types import TopicPartition

TOPIC = ResourceType.TOPIC
A, B = UUID(int=1), UUID(int=2)
ENDPOINT = Endpoint("PLAINTEXT", "PLAINTEXT", "localhost", 9092)


SHA_256, SHA_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512
ADA = (("user", "ada"),)
ADA_BY_DEFAULT = (("client-id", None), ("user", "ada"))


def binding(number: int) -> AclBinding:
    allow = AclPermission(2 + number % 2)
    read, literal = AclOperation.READ, PatternType.LITERAL
    return AclBinding(AclResourceType.TOPIC, f"t{number}", literal, "User:ada", "*", read, allow)


def credential(number: int) -> ScramCredential:
    return ScramCredential(bytes([number]), b"stored", b"server", 4096)


def part(topic_id: UUID, number: int, version: int = 0, **fields) -> PartitionRecord:
    return replace(PartitionRecord(topic_id, number, (0,), (0,), 0, 0, version), **fields)


def built(*entries) -> Image:
    image = Image()
    for entry in entries:
        image, _ = image.apply(entry)
    return image


def with_topic(partitions: int = 2) -> Image:
    return built([TopicRecord("a", A), *(part(A, n) for n in range(partitions))])


def test_a_topic_is_found_by_name_and_by_id() -> None:
    image = with_topic()
    assert image.topic("a") is image.topic(A)
    assert image.partition("a", 1) == image.partition(A, 1) == part(A, 1)
    assert image.partition("a", 2) is image.partition("a", -1) is None
    assert image.partition("b", 0) is image.topic(B) is None


def test_the_delta_of_a_new_topic() -> None:
    image, delta = Image().apply([TopicRecord("a", A), part(A, 0), part(A, 1)])
    assert delta.topics_created == (image.topics["a"],)
    assert delta.partitions == (
        PartitionChange(TopicPartition("a", 0), None, part(A, 0)),
        PartitionChange(TopicPartition("a", 1), None, part(A, 1)),
    )
    assert not delta.topics_deleted and not delta.configs and not delta.brokers


def test_the_delta_of_a_partition_that_changes_twice_has_it_once() -> None:
    image, delta = with_topic().apply([part(A, 1, 1), part(A, 1, 2, leader=-1)])
    (change,) = delta.partitions
    assert change == PartitionChange(TopicPartition("a", 1), part(A, 1), part(A, 1, 2, leader=-1))
    assert image.partition("a", 0) == part(A, 0)
    assert not delta.topics_created


def test_deleting_a_topic_takes_its_settings() -> None:
    image, _ = with_topic().apply([ConfigRecord(TOPIC, "a", "cleanup.policy", "compact")])
    gone, delta = image.apply([RemoveTopicRecord(A)])
    assert not gone.topics and not gone.topics_by_id and not gone.configs
    assert delta.topics_deleted == (image.topics["a"],)
    assert delta.configs == {(TOPIC, "a")}
    assert image.config(TOPIC, "a") == {"cleanup.policy": "compact"}, "the old image stays"


def test_deleted_and_created_again_in_one_entry() -> None:
    before = with_topic()
    image, delta = before.apply([RemoveTopicRecord(A), TopicRecord("a", B), part(B, 0)])
    assert delta.topics_deleted == (before.topics["a"],)
    assert delta.topics_created == (image.topics["a"],)
    assert image.topics["a"].topic_id == B and A not in image.topics_by_id
    assert [change.after.topic_id for change in delta.partitions] == [B]


def test_created_and_deleted_in_one_entry_leaves_no_trace() -> None:
    image, delta = Image().apply([TopicRecord("a.b", A), part(A, 0), RemoveTopicRecord(A)])
    assert image == Image(index=1)
    assert delta.topics_created == delta.topics_deleted == delta.partitions == ()


def test_names_that_collide_are_known() -> None:
    image = built([TopicRecord("a.b", A)], [TopicRecord("plain", B)])
    assert image.colliding == {"a_b": "a.b"}
    assert built([TopicRecord("a.b", A)], [RemoveTopicRecord(A)]).colliding == {}


def test_settings_come_and_go() -> None:
    image = built(
        [ConfigRecord(4, "", "x", "1"), ConfigRecord(4, "", "y", "2")],
        [ConfigRecord(4, "", "x", None)],
    )
    assert image.config(4, "") == {"y": "2"}
    image, delta = image.apply([ConfigRecord(4, "", "y", None)])
    assert image.configs == {} and delta.configs == {(4, "")}
    assert image.config(2, "nobody") == {}


def test_brokers() -> None:
    image = built([BrokerRecord(1, 1, A, (ENDPOINT,), "r")])
    assert not image.brokers[1].active
    assert image.brokers[1].endpoint("PLAINTEXT") == ENDPOINT
    assert image.brokers[1].endpoint("OTHER") is None
    image, delta = image.apply([BrokerChangeRecord(1, 1, False)])
    assert image.brokers[1].active and delta.brokers == {1}
    image, _ = image.apply([BrokerChangeRecord(1, 1, False, True)])
    assert not image.brokers[1].active
    image, _ = image.apply([UnregisterBrokerRecord(1, 1)])
    assert image.brokers == {}


def test_features() -> None:
    image = built([FeatureRecord("f", 3), FeatureRecord("g", 1)], [FeatureRecord("g", 0)])
    assert image.features == {"f": 3}


def test_acls_credentials_and_quotas_come_and_go() -> None:
    image, delta = Image().apply(
        [
            AclRecord(A, binding(1)),
            AclRecord(B, binding(2)),
            ScramCredentialRecord("ada", SHA_512, credential(1)),
            ScramCredentialRecord("ada", SHA_256, credential(2)),
            ClientQuotaRecord(ADA, "producer_byte_rate", 1000.0),
            ClientQuotaRecord(ADA, "request_percentage", 12.5),
            ClientQuotaRecord(ADA_BY_DEFAULT, "producer_byte_rate", 1.0),
        ]
    )
    assert image.acls == {A: binding(1), B: binding(2)} and delta.acls == {A, B}
    assert delta.credentials == image.credentials.keys() == {("ada", SHA_256), ("ada", SHA_512)}
    assert image.quotas[ADA] == {"producer_byte_rate": 1000.0, "request_percentage": 12.5}
    assert delta.quotas == {ADA, ADA_BY_DEFAULT}

    before, (image, delta) = (
        image,
        image.apply(
            [
                RemoveAclRecord(A),
                ScramCredentialRecord("ada", SHA_512, credential(3)),
                RemoveScramCredentialRecord("ada", SHA_256),
                ClientQuotaRecord(ADA, "producer_byte_rate", None),
                ClientQuotaRecord(ADA_BY_DEFAULT, "producer_byte_rate", None),
                ClientQuotaRecord(ADA_BY_DEFAULT, "never_set", None),
            ]
        ),
    )
    assert image.acls == {B: binding(2)} and delta.acls == {A}
    assert image.credentials == {("ada", SHA_512): credential(3)}
    assert image.quotas == {ADA: {"request_percentage": 12.5}}
    assert difference(before, image) == delta


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ([TopicRecord("a", B)], "topic a"),
        ([TopicRecord("b", A)], "exists"),
        ([part(B, 0)], "no topic has id"),
        ([RemoveTopicRecord(B)], "no topic has id"),
        ([RemoveTopicRecord(A), part(A, 0, 1)], "no topic has id"),
        ([part(A, 3)], "2 is next"),
        ([part(A, -1)], "2 is next"),
        ([part(A, 1, 0)], "partition epoch 0 after 0"),
        ([BrokerChangeRecord(7, 1, True)], "no broker 7"),
        ([UnregisterBrokerRecord(7, 1)], "no broker 7"),
        ([BrokerRecord(7, 5, A, ()), BrokerRecord(7, 5, B, ())], "epoch 5 after 5"),
        ([ProducerIdsRecord(0, 1, 10), ProducerIdsRecord(0, 1, 10)], "were given away"),
        ([ClusterRecord("x"), ClusterRecord("y")], "cannot become"),
        ([AclRecord(A, binding(1)), AclRecord(A, binding(1))], "exists"),
        ([RemoveAclRecord(A)], "no such"),
        ([RemoveScramCredentialRecord("ada", SHA_256)], "'ada' has no credential of SCRAM-SHA-256"),
    ],
)
def test_what_contradicts_the_image_is_refused(entry, why) -> None:
    image = with_topic()
    with pytest.raises(InvariantViolation, match=why):
        image.apply(entry)
    assert image == with_topic(), "nothing of it was applied"


def test_an_untouched_topic_is_shared_between_images() -> None:
    """Applying one record must not copy 10,000 partitions of others."""
    image = built(
        [TopicRecord("big", A), *(part(A, n) for n in range(10_000))],
        [TopicRecord("b", B), part(B, 0)],
    )
    after, _ = image.apply([part(B, 0, 1)])
    assert after.topics["big"] is image.topics["big"]
    assert after.configs is image.configs and after.brokers is image.brokers
    after, _ = image.apply([part(A, 5, 1)])
    assert after.topics["big"].partitions[6] is image.topics["big"].partitions[6]


names = st.sampled_from(["a", "b", "a.b", "c_d"])
steps = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "create",
                "delete",
                "grow",
                "change",
                "config",
                "broker",
                "ids",
                "acl",
                "credential",
                "quota",
            ]
        ),
        names,
        st.integers(0, 3),
    ),
    max_size=40,
)


def entry_for(image: Image, step, number: int):
    kind, name, extra = step
    topic = image.topics.get(name)
    match kind:
        case "create" if topic is None:
            made = UUID(int=number + 1)
            return [TopicRecord(name, made), *(part(made, n) for n in range(extra))]
        case "delete" if topic:
            return [RemoveTopicRecord(topic.topic_id)]
        case "grow" if topic:
            return [part(topic.topic_id, len(topic.partitions))]
        case "change" if topic and topic.partitions:
            old = topic.partitions[extra % len(topic.partitions)]
            return [replace(old, leader=-1, partition_epoch=old.partition_epoch + 1)]
        case "config" if topic:
            return [ConfigRecord(TOPIC, name, f"k{extra}", None if number % 3 == 0 else "v")]
        case "broker":
            return [BrokerRecord(extra, image.index + 1, A, (ENDPOINT,), None, number % 2 == 0)]
        case "acl" if number % 3 and image.acls:
            return [RemoveAclRecord(next(iter(image.acls)))]
        case "acl":
            return [AclRecord(UUID(int=number), binding(extra))]
        case "credential" if (name, SHA_256) in image.credentials and extra == 0:
            return [RemoveScramCredentialRecord(name, SHA_256)]
        case "credential":
            return [ScramCredentialRecord(name, SHA_256, credential(extra))]
        case "quota":
            entity = (("client-id", name if extra % 2 else None), ("user", "ada"))
            return [ClientQuotaRecord(entity, f"k{extra}", None if number % 3 == 0 else 1.5)]
        case "ids":
            return [ProducerIdsRecord(0, 1, image.next_producer_id + 1000)]
    return []


@settings(max_examples=200, deadline=None)
@given(steps, st.integers(0, 40))
def test_snapshot_and_deltas_are_the_replay_of_everything(history, cut) -> None:
    image = snapshot = Image()
    later = []
    for number, step in enumerate(history):
        entry = entry_for(image, step, number)
        image, _ = image.apply(entry)
        if number < cut:
            snapshot, later = image, []
        else:
            later.append(entry)
    restored, _ = Image().apply(snapshot.records())
    restored = replace(restored, index=snapshot.index)
    assert restored == snapshot
    for entry in later:
        restored, _ = restored.apply(entry)
    assert restored == image


@settings(max_examples=200, deadline=None)
@given(steps)
def test_deltas_tell_a_follower_everything(history) -> None:
    """Whoever acts on deltas alone ends up with the partitions of the image."""
    image = Image()
    mine: dict[TopicPartition, PartitionRecord] = {}
    for number, step in enumerate(history):
        image, delta = image.apply(entry_for(image, step, number))
        for topic in delta.topics_deleted:
            for n in range(len(topic.partitions)):
                del mine[TopicPartition(topic.name, n)]
        for change in delta.partitions:
            assert mine.get(change.topic_partition) == change.before
            mine[change.topic_partition] = change.after
    assert mine == {
        TopicPartition(name, n): state
        for name, topic in image.topics.items()
        for n, state in enumerate(topic.partitions)
    }
    assert image.acl_index == AclIndex().with_changes(image.acls.values())


def most_in_a_step(monkeypatch: pytest.MonkeyPatch, steps: Any, owner: Any, name: str) -> int:
    """How often a function is called between two yields, at most."""
    calls, most, work = 0, 0, getattr(owner, name)

    def counted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return work(*given)

    monkeypatch.setattr(owner, name, counted)
    for _ in steps:
        most, calls = max(most, calls), 0
    return max(most, calls)


def test_a_topic_of_many_partitions_is_removed_in_steps(monkeypatch) -> None:
    partitions = [PartitionRecord(A, n, (0, 1), (0, 1), 0, 0, 0) for n in range(100)]
    image, _ = Image().apply([TopicRecord("t", A), *partitions])
    steps = image.apply_in_steps([RemoveTopicRecord(A)])
    most = most_in_a_step(monkeypatch, steps, image_module._Step, "_watch")
    assert 1 <= most <= RECORDS_PER_STEP + 1


def test_a_change_of_one_partition_of_each_of_many_topics_is_told_in_steps(monkeypatch) -> None:
    """Whatever its number."""
    ids = [UUID(int=n) for n in range(1, 101)]
    records: list[Any] = []
    for topic_id in ids:
        records.append(TopicRecord(f"t{topic_id.int}", topic_id))
        records += [PartitionRecord(topic_id, n, (0, 1), (0, 1), 0, 0, 0) for n in range(2)]
    image, _ = Image().apply(records)
    moved = [PartitionRecord(topic_id, 1, (0, 1), (0, 1), 1, 1, 1) for topic_id in ids]
    steps = image.apply_in_steps(moved)
    most = most_in_a_step(monkeypatch, steps, image_module, "PartitionChange")
    assert 1 <= most <= RECORDS_PER_STEP + 1
