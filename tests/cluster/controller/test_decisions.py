"""The controller's decisions by scripted histories: ``histories/*.txt``.

A line at the margin asks for a decision; the indented lines under it are the records that it
yields, or the error. Records are applied to the image before the next line, unless the line begins
with ``try`` (:mod:`tests.support.histories`).
"""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept.cluster.controller import (
    config_changes,
    partition_election,
    reassignment,
    topics,
    unclean_recovery,
)
from kept.cluster.controller.brokers import (
    PRODUCER_ID_BLOCK,
    RegisterRequest,
    allocate_producer_ids,
    fence_brokers,
    register_broker,
    shut_down_broker,
    unfence_broker,
    unregister_broker,
)
from kept.cluster.controller.config_changes import (
    AlterConfig,
    AlterOp,
    ConfigSchema,
    incremental_alter_configs,
)
from kept.cluster.controller.partition_election import (
    AlterIsr,
    alter_isr,
    elect_preferred,
    elect_unclean,
)
from kept.cluster.controller.placement import place
from kept.cluster.controller.reassignment import finish_reassignments
from kept.cluster.controller.topics import (
    CreateTopic,
    TopicDefaults,
    create_partitions,
    create_topic,
    delete_topic,
    topic_counts,
)
from kept.cluster.metadata import image as image_module
from kept.cluster.metadata import records as kind
from kept.cluster.metadata.image import BrokerImage, Image
from kept.storage.errors import InvalidConfig, KeptError, PeerError, RetriableError
from tests.support.histories import check_history

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.txt"))
ENDPOINT = kind.Endpoint("PLAINTEXT", "PLAINTEXT", "host", 9092)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def validate(resource_type: int, name: str, values) -> None:
    for key, value in values.items():
        if key == "retention.ms" and not value.lstrip("-").isdecimal():
            raise InvalidConfig(f"retention.ms={value}: not a number")


SCHEMA = ConfigSchema(
    validate,
    lambda _, name: name == "cleanup.policy",
    lambda _, name: "delete" if name == "cleanup.policy" else None,
)


class Cluster:
    """The image of a history, and the words of its lines."""

    def __init__(self) -> None:
        self.image = Image()
        self.ids = 0

    def decide(self, name: str, words: dict[str, str], plain: list[str]):
        image = self.image
        match name:
            case "create":
                self.ids += 1
                spread = int(words.get("spread", 0))
                configs = {
                    key.removeprefix("config."): None if value == "null" else value
                    for key, value in words.items()
                    if key.startswith("config.")
                }
                request = CreateTopic(
                    plain[0] if plain else "",
                    UUID(int=self.ids << 16 | spread),
                    int(words.get("partitions", -1)),
                    int(words.get("factor", -1)),
                    {
                        int(key.removeprefix("p")): numbers(value)
                        for key, value in words.items()
                        if key[0] == "p" and key[1:].isdecimal()
                    },
                    configs,
                )
                defaults = TopicDefaults(num_partitions=3, replication_factor=1)
                return create_topic(
                    image, request, defaults, lambda values: validate(2, "", values)
                )
            case "delete":
                return delete_topic(image, plain[0])
            case "partitions":
                manual = [numbers(p) for p in words["on"].split(";")] if "on" in words else None
                return create_partitions(image, plain[0], int(plain[1]), manual)
            case "alter":
                changes = [
                    AlterConfig(key, AlterOp[op], value or None)
                    for op, key, value in (word.split(":", 2) for word in plain[2:])
                ]
                return incremental_alter_configs(
                    image, int(plain[0]), plain[1].strip('"'), changes, SCHEMA
                )
            case "set-all":
                return config_changes.alter_configs(
                    image, int(plain[0]), plain[1].strip('"'), words, SCHEMA
                )
            case "register":
                return self.register(int(plain[0]), words, plain)
            case "fence" | "unfence" | "shut-down":
                broker_id, epoch = int(plain[0]), int(words.get("epoch", self.epoch(plain[0])))
                if name == "fence":
                    return fence_brokers(image, {broker_id: epoch})
                decide = unfence_broker if name == "unfence" else shut_down_broker
                return decide(image, broker_id, epoch)
            case "unregister":
                return unregister_broker(image, int(plain[0]))
            case "producer-ids":
                made, ids = allocate_producer_ids(image, int(plain[0]), self.epoch(plain[0]))
                assert len(ids) == PRODUCER_ID_BLOCK
                return made
            case "isr":
                return self.alter_isr(words, plain)
            case "elect":
                act = elect_unclean if "unclean" in plain else elect_preferred
                return act(image, plain[0], int(plain[1]))
        return self.move(name, words, plain)

    def move(self, name: str, words: dict[str, str], plain: list[str]):
        image = self.image
        match name:
            case "reassign":
                target = None if "cancel" in plain else numbers(words["to"])
                return reassignment.reassign(
                    image,
                    plain[0],
                    int(plain[1]),
                    target,
                    allow_replication_factor_change="same-factor" not in plain,
                )
            case "finish":
                return finish_reassignments(image)
            case "clear-elr":
                keys = {key: image.partition(*key).partition_epoch for key in image.pending}
                return unclean_recovery.clear_elr(image, keys)
        raise AssertionError(f"unknown decision: {name}")

    def epoch(self, broker: str) -> int:
        found = self.image.brokers.get(int(broker))
        return found.broker_epoch if found else -1

    def register(self, broker_id: int, words: dict[str, str], plain: list[str]):
        incarnation = UUID(int=int(words.get("incarnation", 1)))
        clean_epoch = self.epoch(plain[0]) if "clean" in plain else -1
        return register_broker(
            self.image,
            RegisterRequest(broker_id, incarnation, (ENDPOINT,), words.get("rack"), clean_epoch),
            fenced="active" not in plain,
            session_live="alive" in plain,
            unclean_allowed=lambda topic: topic == words.get("unclean"),
        )

    def alter_isr(self, words: dict[str, str], plain: list[str]):
        topic = self.image.topic(plain[0])
        state = self.image.partition(plain[0], int(plain[1]))
        leader = int(words.get("by", state.leader if state else 0))
        request = AlterIsr(
            topic.topic_id if topic else UUID(int=0),
            int(plain[1]),
            leader,
            int(words.get("broker-epoch", self.epoch(str(leader)))),
            int(words.get("epoch", state.leader_epoch if state else 0)),
            int(words.get("version", state.partition_epoch if state else 0)),
            tuple((member, int(words.get("member-epoch", -1))) for member in numbers(words["to"])),
            "base-published" in plain,
            int(words.get("last-epoch", 0)),
        )
        return alter_isr(self.image, request)

    def show(self, record) -> str:
        match record:
            case kind.TopicRecord(name):
                return f"topic {name}"
            case kind.RemoveTopicRecord(topic_id):
                return f"no topic {self.image.topics_by_id[topic_id].name}"
            case kind.PartitionRecord():
                known = self.image.topics_by_id.get(record.topic_id)
                return (
                    f"{known.name if known else 'new'}-{record.partition}: "
                    f"replicas {','.join(map(str, record.replicas))} "
                    f"isr {','.join(map(str, record.isr))} leader {record.leader} "
                    f"epoch {record.leader_epoch} version {record.partition_epoch}"
                    + (" unclean" if record.unclean else "")
                    + "".join(
                        f" {name} {','.join(map(str, members))}"
                        for name in ("adding", "removing", "elr")
                        if (members := getattr(record, name))
                    )
                )
            case kind.ConfigRecord(resource_type, resource, name, value):
                return f"config {resource_type} {resource!r}: {name}={value}"
            case kind.BrokerRecord():
                state = "fenced" if record.fenced else "active"
                return f"broker {record.broker_id} epoch {record.broker_epoch} {state}"
            case kind.BrokerChangeRecord():
                state = "fenced" if record.fenced else "unfenced"
                last = ", shutting down" if record.in_controlled_shutdown else ""
                return f"broker {record.broker_id} {state}{last}"
            case kind.UnregisterBrokerRecord(broker_id):
                return f"no broker {broker_id}"
            case kind.ProducerIdsRecord(broker_id, _, end):
                return f"broker {broker_id} has producer ids below {end}"
        raise AssertionError(f"unknown record: {record}")

    def line(self, text: str) -> list[str]:
        words = text.split()
        dry = words[0] == "try"
        name, *rest = words[1:] if dry else words
        given = dict(word.split("=", 1) for word in rest if "=" in word and ":" not in word)
        plain = [word for word in rest if "=" not in word or ":" in word]
        try:
            made = self.decide(name, given, plain)
        except (PeerError, RetriableError) as error:
            return [f"{type(error).__name__}: {error}"]
        shown = [self.show(record) for record in made] or ["nothing"]
        if not dry:
            self.image, _ = self.image.apply(made)
        return shown


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_history(path: Path) -> None:
    check_history(path, Cluster().line, indent="    ")


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 249, "...", "__consumer_offsets", "-"])
def test_legal_names(name) -> None:
    topics.check_topic_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "x" * 250, "a b", "a/b", "a\n", "é", "a:b", "a\0", "a,b", "٣"]
)
def test_illegal_names(name) -> None:
    with pytest.raises(KeptError, match="Topic name is invalid"):
        topics.check_topic_name(name)


def test_producer_ids_are_never_given_twice() -> None:
    cluster = Cluster()
    cluster.line("register 0 active")
    seen: set[int] = set()
    for _ in range(5):
        made, ids = allocate_producer_ids(cluster.image, 0, 1)
        assert seen.isdisjoint(ids)
        seen.update(ids)
        after, _ = cluster.image.apply(made)
        cluster.image, _ = Image().apply(after.records())  # also across a snapshot
    assert seen == set(range(5000))


def test_counts_of_what_was_decided() -> None:
    cluster = Cluster()
    cluster.line("register 0 active")
    request = CreateTopic("t", UUID(int=1), 7, 1)
    assert topic_counts(create_topic(cluster.image, request)) == (7, 1)


brokers = st.lists(
    st.tuples(st.sampled_from([None, "a", "b", "c"]), st.booleans()), min_size=1, max_size=8
)


@settings(max_examples=200)
@given(brokers, st.integers(1, 20), st.data())
def test_placement_is_balanced_and_keeps_racks_apart(given_brokers, count, data) -> None:
    known = [
        BrokerImage(i, i, UUID(int=i), (), rack, fenced and i > 0)
        for i, (rack, fenced) in enumerate(given_brokers)
    ]
    factor = data.draw(st.integers(1, len(known)))
    placed = place(known, range(count), factor, data.draw(st.integers(0, 100)))
    assert len(placed) == count
    active = [broker.broker_id for broker in known if broker.active]
    racks = {broker.broker_id: broker.rack for broker in known}
    leads = dict.fromkeys(active, 0)
    for replicas in placed:
        assert len(set(replicas)) == len(replicas) == factor
        leads[replicas[0]] += 1
        assert set(replicas) <= set(active) or set(active) <= set(replicas), "fenced ones last"
        live = [racks[replica] for replica in replicas if replica in active]
        distinct = {racks[broker_id] for broker_id in active}
        assert len(set(live)) == min(len(live), len(distinct)), "as many racks as there are"
    assert max(leads.values()) - min(leads.values()) <= 1, "leaders are spread evenly"


@pytest.mark.parametrize(("strayed", "elections"), [(1, 0), (2, 2), (5, 5)])
def test_leaders_come_back_only_when_too_many_have_strayed(strayed, elections) -> None:
    cluster = Cluster()
    cluster.line("register 1 active")
    cluster.line("register 2 active incarnation=2")
    cluster.line("create t " + " ".join(f"p{n}=1,2" for n in range(10)))
    for number in range(strayed):
        cluster.line(f"reassign t {number} to=2,1")
        cluster.line(f"elect t {number}")
        cluster.line(f"reassign t {number} to=1,2")
    assert len(partition_election.balance_preferred(cluster.image, percentage=10)) == elections
    assert len(partition_election.balance_preferred(cluster.image, percentage=10, limit=3)) == min(
        3, elections
    )


@pytest.mark.parametrize(("gone", "applied"), [((1,), 0), ((1, 2), 10)])
def test_only_what_others_that_are_fenced_build_on_is_applied(monkeypatch, gone, applied) -> None:
    """For one broker of very many partitions that would be nearly half of the decision."""
    cluster = Cluster()
    for broker_id in range(3):
        cluster.line(f"register {broker_id} active incarnation={broker_id + 1}")
    cluster.line("create t " + " ".join(f"p{n}=1,2,0" for n in range(10)))
    epochs = {b: cluster.image.brokers[b].broker_epoch for b in gone}
    added, add = [], image_module._Step.add

    def counted(step, record) -> None:
        added.append(record)
        add(step, record)

    monkeypatch.setattr(image_module._Step, "add", counted)
    records = fence_brokers(cluster.image, epochs)
    assert sum(isinstance(record, kind.PartitionRecord) for record in added) == applied
    led = [record.leader for record in records if isinstance(record, kind.PartitionRecord)]
    assert led == [2 if gone == (1,) else 0] * 10
