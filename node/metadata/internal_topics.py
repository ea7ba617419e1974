"""``__consumer_offsets``: how it is made, whoever asks for it first.

The node makes it when a group first needs it; an administrator may make it before. Either way it
has the settings that keep committed offsets: compacted and nothing else, in segments that are soon
cleaned. Apache Kafka takes what the administrator says, and a topic made with its defaults loses
offsets after a week.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kept.cluster.controller.topics import TopicDefaults
from kept.storage.errors import InvalidConfig

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image
    from kept.node.config.node_config import NodeConfig

CONSUMER_OFFSETS: Final = "__consumer_offsets"
POLICY: Final = "cleanup.policy"


def defaults(image: Image, config: NodeConfig) -> TopicDefaults:
    """Partitions, and replicas as far as there are brokers for them.

    Brokers that are down count, and so do the voters of a node that is both voter and broker, as
    they will be, too: who comes first does not make a topic with one replica for ever. Until so
    many have registered the topic is not made, and groups wait.
    """
    both = {"broker", "controller"} <= set(config.process_roles)
    voters = {voter.node_id for voter in config.controller_quorum_voters} if both else set()
    brokers = len(voters | image.brokers.keys())
    factor = min(config.offsets_topic_replication_factor, max(brokers, 1))
    return TopicDefaults(config.offsets_topic_num_partitions, factor)


def settings(config: NodeConfig, given: Mapping[str, str | None]) -> dict[str, str | None]:
    """Its settings, with those given over them. Raises InvalidConfig for another policy."""
    policy = given.get(POLICY, "compact")
    if policy != "compact":
        raise InvalidConfig(
            f"{CONSUMER_OFFSETS} holds committed offsets: its {POLICY} must be compact, "
            f"not {policy}"
        )
    return {
        POLICY: "compact",
        "compression.type": "producer",
        "segment.bytes": str(config.offsets_topic_segment_bytes),
        **given,
    }
