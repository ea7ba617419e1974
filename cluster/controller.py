"""The controller's decisions, in one place: pure functions from an image to records.

Each returns the records of one proposal or raises the error that the client gets. They live in
``topics``, ``config_changes``, ``brokers`` and ``election``; callers import them from here.
"""

from __future__ import annotations

from kept.cluster.brokers import (
    PRODUCER_ID_BLOCK,
    Registration,
    allocate_producer_ids,
    fence_broker,
    register_broker,
    shut_down_broker,
    unfence_broker,
    unregister_broker,
)
from kept.cluster.config_changes import (
    AlterConfig,
    AlterOp,
    ConfigSchema,
    alter_configs,
    check_resource,
    incremental_alter_configs,
)
from kept.cluster.election import AlterIsr, alter_isr, elect_preferred, elect_unclean
from kept.cluster.topics import (
    CLUSTER_METADATA_TOPIC,
    INTERNAL_TOPICS,
    MAX_PARTITIONS_PER_REQUEST,
    MAX_TOPIC_NAME_LENGTH,
    CreateTopic,
    TopicDefaults,
    check_topic_name,
    create_partitions,
    create_topic,
    delete_topic,
    topic_counts,
)

__all__ = [
    "CLUSTER_METADATA_TOPIC",
    "INTERNAL_TOPICS",
    "MAX_PARTITIONS_PER_REQUEST",
    "MAX_TOPIC_NAME_LENGTH",
    "PRODUCER_ID_BLOCK",
    "AlterConfig",
    "AlterIsr",
    "AlterOp",
    "ConfigSchema",
    "CreateTopic",
    "Registration",
    "TopicDefaults",
    "allocate_producer_ids",
    "alter_configs",
    "alter_isr",
    "check_resource",
    "check_topic_name",
    "create_partitions",
    "create_topic",
    "delete_topic",
    "elect_preferred",
    "elect_unclean",
    "fence_broker",
    "incremental_alter_configs",
    "register_broker",
    "shut_down_broker",
    "topic_counts",
    "unfence_broker",
    "unregister_broker",
]
