"""``__consumer_offsets`` and ``__transaction_state``: how they are made, whoever asks first.

The node makes one when it first needs it; an administrator may make it before. Either way it has
the settings that keep what coordinators wrote: compacted and nothing else, in segments that are
soon cleaned, and no change of settings takes that away. Apache Kafka takes what the administrator
says, and a topic made with its defaults loses offsets after a week.
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
TRANSACTION_STATE: Final = "__transaction_state"
COORDINATED: Final = frozenset((CONSUMER_OFFSETS, TRANSACTION_STATE))
"""The topics whose leaders coordinate: their names."""

POLICY: Final = "cleanup.policy"
_STRATEGY: Final = "kept.compaction.strategy"
_LATEST: Final = "latest"
"""Coordinators read the last record of a key."""
_FIXED: Final[Mapping[str, Mapping[str, str]]] = {
    CONSUMER_OFFSETS: {POLICY: "compact"},
    # A lost record here is a transaction that half its partitions know as ended.
    TRANSACTION_STATE: {
        POLICY: "compact",
        "compression.type": "uncompressed",
        "unclean.leader.election.enable": "false",
    },
}


def defaults(name: str, image: Image, config: NodeConfig) -> TopicDefaults:
    """Partitions, and replicas as far as there are brokers for them.

    Brokers that are down count, and so do the voters of a node that is both voter and broker, as
    they will be, too: who comes first does not make a topic with one replica for ever. Until so
    many have registered the topic is not made, and clients wait.
    """
    if name == CONSUMER_OFFSETS:
        wanted = config.offsets_topic_replication_factor
        partitions = config.offsets_topic_num_partitions
    else:
        wanted = config.transaction_state_log_replication_factor
        partitions = config.transaction_state_log_num_partitions
    both = {"broker", "controller"} <= set(config.process_roles)
    voters = {voter.node_id for voter in config.controller_quorum_voters} if both else set()
    brokers = len(voters | image.brokers.keys())
    return TopicDefaults(partitions, min(wanted, max(brokers, 1)))


def settings(
    name: str, config: NodeConfig, given: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Its settings, with those given over them. Raises InvalidConfig for what must not differ."""
    fixed = _FIXED[name]
    for setting, value in fixed.items():
        if given.get(setting, value) != value:
            raise _must_be(name, setting, value, given[setting])
    _check_strategy(name, {}, given)
    if name == CONSUMER_OFFSETS:
        usual = {
            "compression.type": "producer",
            "segment.bytes": str(config.offsets_topic_segment_bytes),
        }
    else:
        usual = {
            "min.insync.replicas": str(config.transaction_state_log_min_isr),
            "segment.bytes": str(config.transaction_state_log_segment_bytes),
        }
    return {**fixed, **usual, **given}


def check_change(name: str, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Whether a topic's settings may change so; any topic's. Raises InvalidConfig where one is set
    to what it must not be, or unset. What differs already may stay: a cluster that was taken over
    has what its administrator said.
    """
    for setting, value in _FIXED.get(name, {}).items():
        changed = after.get(setting)
        if changed not in {value, before.get(setting)}:
            raise _must_be(name, setting, value, "unset" if changed is None else changed)
    if name in COORDINATED:
        _check_strategy(name, before, after)


def _check_strategy(name: str, before: Mapping[str, str], given: Mapping[str, str | None]) -> None:
    strategy = given.get(_STRATEGY)
    if strategy not in {None, _LATEST, before.get(_STRATEGY)}:
        raise _must_be(name, _STRATEGY, _LATEST, strategy)


def _must_be(name: str, setting: str, value: str, given: str | None) -> InvalidConfig:
    return InvalidConfig(
        f"{name} holds what coordinators must not lose: its {setting} must be {value}, not {given}"
    )
