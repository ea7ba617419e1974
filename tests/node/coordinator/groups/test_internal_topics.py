"""``__consumer_offsets``: how many replicas it gets."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import BrokerRecord
from kept.node.metadata import internal_topics
from kept.storage.errors import InvalidConfig


def config(voters: int, *roles: str, factor: int = 3) -> Any:
    return SimpleNamespace(
        process_roles=roles or ("broker", "controller"),
        controller_quorum_voters=tuple(SimpleNamespace(node_id=i) for i in range(voters)),
        offsets_topic_replication_factor=factor,
        offsets_topic_num_partitions=50,
        offsets_topic_segment_bytes=1 << 20,
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
    found = internal_topics.defaults(image(*brokers), asked)
    assert (found.num_partitions, found.replication_factor) == (50, replicas)


def test_it_is_compacted_whatever_is_asked():
    made = internal_topics.settings(config(1), {"segment.bytes": "2048"})
    assert (made["cleanup.policy"], made["segment.bytes"]) == ("compact", "2048")
    with pytest.raises(InvalidConfig):
        internal_topics.settings(config(1), {"cleanup.policy": "delete"})
