"""How internal topics are made: their replicas and settings."""

from __future__ import annotations

import uuid

import pytest

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import BrokerRecord
from kept.node.config.node_config import NodeConfig
from kept.node.metadata import internal_topics
from kept.storage.errors import InvalidConfig


def config(voters: int, roles: str = "broker,controller", *, factor: int = 3) -> NodeConfig:
    """The settings of one of ``voters`` nodes, or of another node that is a broker only."""
    return NodeConfig(
        {
            "node.id": "0" if "controller" in roles else str(voters),
            "process.roles": roles,
            "controller.quorum.voters": ",".join(f"{n}@host:{10092 + n}" for n in range(voters)),
            "listeners": "PLAINTEXT://host:9092",
            "offsets.topic.replication.factor": str(factor),
            "transaction.state.log.replication.factor": str(factor),
        }
    )


def image(*brokers: int) -> Image:
    records = [
        BrokerRecord(broker, broker + 1, uuid.UUID(int=broker), (), None, True)
        for broker in brokers
    ]
    return Image().apply(records)[0]


@pytest.mark.parametrize(
    ("brokers", "asked", "replicas"),
    [
        ((0,), config(1), 1),
        ((0,), config(3), 3),  # the others are yet to come
        ((0, 1, 2), config(3), 3),
        ((0, 1, 2), config(3, factor=2), 2),
        ((0, 1, 2, 3, 4), config(3), 3),
        ((3,), config(3, "broker"), 1),  # the voters are no brokers
        ((3, 4), config(1, "broker"), 2),
        ((0, 1), config(1), 2),
    ],
)
def test_replicas_as_far_as_there_are_brokers(brokers, asked, replicas):
    for name in internal_topics.COORDINATED:
        found = internal_topics.defaults(name, image(*brokers), asked)
        assert (found.num_partitions, found.replication_factor) == (50, replicas)


@pytest.mark.parametrize("name", sorted(internal_topics.COORDINATED))
def test_it_is_compacted_whatever_is_asked(name):
    made = internal_topics.settings(name, config(1), {"segment.bytes": "2048"})
    assert (made["cleanup.policy"], made["segment.bytes"]) == ("compact", "2048")
    with pytest.raises(InvalidConfig, match=f"{name} .* cleanup.policy must be compact"):
        internal_topics.settings(name, config(1), {"cleanup.policy": "delete"})


def test_transactions_are_not_lost_to_an_unclean_election_nor_compressed():
    name, alone = internal_topics.TRANSACTION_STATE, config(1)
    made = internal_topics.settings(name, alone, {})
    assert made == {
        "cleanup.policy": "compact",
        "compression.type": "uncompressed",
        "unclean.leader.election.enable": "false",
        "min.insync.replicas": "2",
        "segment.bytes": "104857600",
    }
    for setting, value in (
        ("compression.type", "zstd"),
        ("unclean.leader.election.enable", "true"),
    ):
        with pytest.raises(InvalidConfig, match=setting):
            internal_topics.settings(name, alone, {setting: value})


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        ("compact", "delete", "must be compact, not delete"),
        ("compact", "compact,delete", "must be compact, not compact,delete"),
        ("compact", None, "must be compact, not unset"),
        ("compact", "compact", None),
        ("compact,delete", "compact,delete", None),  # of a cluster that was taken over
        ("compact,delete", "compact", None),
        ("compact,delete", "delete", "must be compact, not delete"),
        (None, None, None),
    ],
)
@pytest.mark.parametrize("name", sorted(internal_topics.COORDINATED))
def test_no_change_takes_away_that_it_is_compacted(name, before, after, refused):
    had, has = (
        {"segment.bytes": size} | ({} if policy is None else {"cleanup.policy": policy})
        for size, policy in (("1024", before), ("2048", after))
    )
    internal_topics.check_change("orders", had, has)
    if refused is None:
        internal_topics.check_change(name, had, has)
    else:
        with pytest.raises(InvalidConfig, match=f"{name} .* cleanup.policy {refused}"):
            internal_topics.check_change(name, had, has)


@pytest.mark.parametrize("name", sorted(internal_topics.COORDINATED))
def test_the_latest_record_of_a_key_survives(name):
    """By another strategy a clock that was set back lets an older one survive."""
    strategy = "kept.compaction.strategy"
    policy, other = {"cleanup.policy": "compact"}, {strategy: "highest-version"}
    made = internal_topics.settings(name, config(1), {strategy: "latest"})
    assert made[strategy] == "latest"
    internal_topics.check_change(name, policy, policy | {strategy: "latest"})
    internal_topics.check_change(name, policy | other, policy | other | {"segment.ms": "1"})
    internal_topics.check_change("orders", policy, policy | other)
    refused = f"{name} .* {strategy} must be latest, not highest-version"
    with pytest.raises(InvalidConfig, match=refused):
        internal_topics.settings(name, config(1), other)
    with pytest.raises(InvalidConfig, match=refused):
        internal_topics.check_change(name, policy, policy | other)
