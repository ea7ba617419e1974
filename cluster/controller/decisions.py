"""The controller's decisions, in one place: pure functions from an image to records.

Each returns the records of one proposal or raises the error that the client gets. They live in
``topics``, ``config_changes``, ``brokers``, ``election``, ``recovery`` and ``reassignment``;
callers import them from here. What is decided unasked, because of who lives: ``sessions``.
"""

from __future__ import annotations

from kept.cluster.controller.brokers import (
    PRODUCER_ID_BLOCK,
    Registration,
    allocate_producer_ids,
    fence_broker,
    leads,
    register_broker,
    shut_down_broker,
    unfence_broker,
    unregister_broker,
)
from kept.cluster.controller.config_changes import (
    AlterConfig,
    AlterOp,
    ConfigSchema,
    alter_configs,
    check_resource,
    incremental_alter_configs,
    settings_given,
    was_compacted,
)
from kept.cluster.controller.partition_election import (
    AlterIsr,
    Batch,
    alter_isr,
    alter_isrs,
    balance_preferred,
    elect_offline,
    elect_preferred,
    elect_unclean,
)
from kept.cluster.controller.reassignment import (
    OngoingReassignment,
    finish_reassignments,
    list_reassignments,
    reassign,
    reassign_all,
    throttle,
    throttled,
    unthrottle,
)
from kept.cluster.controller.topics import (
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
from kept.cluster.controller.unclean_recovery import (
    UncleanElection,
    awaiting,
    elect_longest,
    settle,
    unclean_elections,
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
    "Batch",
    "ConfigSchema",
    "CreateTopic",
    "OngoingReassignment",
    "Registration",
    "TopicDefaults",
    "UncleanElection",
    "allocate_producer_ids",
    "alter_configs",
    "alter_isr",
    "alter_isrs",
    "awaiting",
    "balance_preferred",
    "check_resource",
    "check_topic_name",
    "create_partitions",
    "create_topic",
    "delete_topic",
    "elect_longest",
    "elect_offline",
    "elect_preferred",
    "elect_unclean",
    "fence_broker",
    "finish_reassignments",
    "incremental_alter_configs",
    "leads",
    "list_reassignments",
    "reassign",
    "reassign_all",
    "register_broker",
    "settings_given",
    "settle",
    "shut_down_broker",
    "throttle",
    "throttled",
    "topic_counts",
    "unclean_elections",
    "unfence_broker",
    "unregister_broker",
    "unthrottle",
    "was_compacted",
]
