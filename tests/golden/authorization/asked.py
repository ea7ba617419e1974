"""What is asked, of whom and with which bindings: every API that kept serves, in a small world.

The world: topics ``mine`` and ``secret``, groups and transactional ids of the same names; nothing
called ``fresh`` or ``missing``. Bindings are about ``mine`` and ``fresh`` only, so that ``secret``
is there and not allowed, ``fresh`` is allowed and not there, ``missing`` neither. Requests change
nothing where they can (``validate_only``); what they change is mended by :meth:`World.mend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from kept.client.protocol.messages import versions
from kept.cluster.security.acls import AclOperation as Op
from kept.cluster.security.acls import AclResourceType as Kind
from kept.storage.records import build_batch
from tests.support.request_values import topic_values

NAMES = ("mine", "fresh", "secret", "missing")
ALLOWED = ("mine", "fresh")
NOWHERE = UUID(int=77)

BINDINGS = (
    *((Kind.TOPIC, op) for op in (Op.READ, Op.WRITE, Op.CREATE, Op.DELETE, Op.ALTER, Op.DESCRIBE)),
    *((Kind.TOPIC, op) for op in (Op.DESCRIBE_CONFIGS, Op.ALTER_CONFIGS)),
    *((Kind.GROUP, op) for op in (Op.READ, Op.DELETE, Op.DESCRIBE)),
    *((Kind.GROUP, op) for op in (Op.DESCRIBE_CONFIGS, Op.ALTER_CONFIGS)),
    *((Kind.TRANSACTIONAL_ID, op) for op in (Op.WRITE, Op.DESCRIBE)),
    *((Kind.CLUSTER, op) for op in (Op.CREATE, Op.ALTER, Op.DESCRIBE, Op.CLUSTER_ACTION)),
    *((Kind.CLUSTER, op) for op in (Op.DESCRIBE_CONFIGS, Op.ALTER_CONFIGS, Op.IDEMPOTENT_WRITE)),
)

CASES = (
    "nothing",
    "all",
    *(f"{sign}{kind.name.lower()} {op.name.lower()}" for sign in "+-" for kind, op in BINDINGS),
)
"""``+topic read``: that binding alone; ``-topic read``: a DENY of it beside ALLOW of everything."""


class Case(NamedTuple):
    """Bindings that are allowed and denied, by type and operation."""

    allowed: Sequence[tuple[Kind, Op]]
    denied: Sequence[tuple[Kind, Op]]


def bindings_of(case: str) -> Case:
    """The bindings that a case's name stands for."""
    every = [(kind, Op.ALL) for kind in dict.fromkeys(kind for kind, _ in BINDINGS)]
    if case in ("nothing", "all"):
        return Case(every if case == "all" else (), ())
    kind, op = case[1:].split()
    one = (Kind[kind.upper()], Op[op.upper()])
    return Case((one,), ()) if case[0] == "+" else Case(every, (one,))


Ids = Mapping[str, UUID]
Values = dict[str, Any]


class Asked(NamedTuple):
    """A request: ``values`` of a version, with the fields of all versions."""

    name: str
    api: int
    values: Callable[[int, Ids], Values]
    since: int = 0
    until: int = 99

    def asked_in(self, served: Mapping[int, tuple[int, int]]) -> Iterator[int]:
        """The versions in which it is asked: those that are served, and known to kio."""
        low, high = served.get(self.api, (0, -1))
        known = versions(self.api)
        for version in range(max(low, self.since), min(high, self.until) + 1):
            if version in known:
                yield version


def _partitions(**values: Any) -> list[Values]:
    return [values]


def _of_topics(ids: Ids, *, by: str = "name", key: str = "partitions", **each: Any) -> list[Values]:
    """An entry for each topic, with one partition."""
    return [
        {by: name, "topic": name, "topic_id": ids[name], key: _partitions(**each)} for name in NAMES
    ]


def _ids_only(entries: list[Values]) -> list[Values]:
    return [{**entry, "name": None} for entry in entries if entry["topic"] != "fresh"]


def _batch() -> bytes:
    return build_batch([(1, None, b"v", ())])


def _produce(version: int, ids: Ids) -> Values:
    topics = [
        {"name": name, "topic_id": ids[name], "partition_data": [{"index": 0, "records": _batch()}]}
        for name in NAMES
        if version < 13 or name != "fresh"
    ]
    return {"transactional_id": None, "acks": 1, "timeout": 1000, "topic_data": topics}


def _produce_with_id(version: int, ids: Ids) -> Values:
    batch = build_batch(
        [(1, None, b"v", ())],
        producer_id=999,
        producer_epoch=0,
        base_sequence=0,
        is_transactional=True,
    )
    asked = _produce(version, ids)
    for topic in asked["topic_data"]:
        topic["partition_data"] = [{"index": 0, "records": batch}]
    return {**asked, "transactional_id": "secret"}


def _fetch(replica: int) -> Callable[[int, Ids], Values]:
    def values(version: int, ids: Ids) -> Values:
        topics = [
            {
                "topic": name,
                "topic_id": ids[name],
                "partitions": _partitions(
                    partition=0,
                    current_leader_epoch=-1,
                    fetch_offset=0,
                    last_fetched_epoch=-1,
                    log_start_offset=-1,
                    partition_max_bytes=1000,
                    high_watermark=0,
                ),
            }
            for name in NAMES
            if version < 13 or name != "fresh"
        ]
        return {
            "replica_id": replica,
            "replica_state": {"replica_id": replica, "replica_epoch": -1},
            "max_wait": 0,
            "min_bytes": 0,
            "max_bytes": 1000,
            "isolation_level": 0,
            "session_id": 0,
            "session_epoch": -1,
            "topics": topics,
            "forgotten_topics_data": [],
            "rack_id": "",
            "cluster_id": None,
        }

    return values


def _names(_: int, ids: Ids) -> Values:
    topics = [{"name": name, "topic_id": UUID(int=0)} for name in NAMES]
    return {"topics": topics, **_metadata_rest()}


def _metadata_rest() -> Values:
    return {
        "allow_auto_topic_creation": False,
        "include_cluster_authorized_operations": True,
        "include_topic_authorized_operations": True,
    }


def _metadata_ids(_: int, ids: Ids) -> Values:
    topics = [{"name": None, "topic_id": ids[n]} for n in NAMES if n != "fresh"]
    return {"topics": topics, **_metadata_rest()}


def _groups_fetched(topics: Callable[[Ids], list[Values] | None]) -> Callable[[int, Ids], Values]:
    def values(version: int, ids: Ids) -> Values:
        asked = topics(ids)
        if version >= 10 and asked is not None:
            asked = _ids_only(asked)
        groups = [
            {"group_id": group, "member_id": None, "member_epoch": -1, "topics": asked}
            for group in ("mine", "secret", "missing")
        ]
        return {"group_id": "mine", "topics": asked, "groups": groups, "require_stable": False}

    return values


def _one_partition(ids: Ids) -> list[Values]:
    return [{"name": n, "topic": n, "topic_id": ids[n], "partition_indexes": [0]} for n in NAMES]


def _group(name: str) -> Callable[[int, Ids], Values]:
    member = {"member_id": "nobody", "group_instance_id": None, "reason": None}

    def values(_: int, __: Ids) -> Values:
        return {
            "group_id": name,
            "generation_id": 1,
            "session_timeout": 10_000,
            "rebalance_timeout": 10_000,
            **member,
            "protocol_type": "consumer",
            "protocol_name": "range",
            "protocols": [{"name": "range", "metadata": b""}],
            "assignments": [],
            "members": [member],
        }

    return values


def _commit(group: str) -> Callable[[int, Ids], Values]:
    def values(version: int, ids: Ids) -> Values:
        topics = _of_topics(
            ids,
            partition_index=0,
            committed_offset=0,
            committed_leader_epoch=-1,
            committed_metadata=None,
            commit_timestamp=-1,
        )
        return {
            "group_id": group,
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "group_instance_id": None,
            "retention_time": -1,
            "topics": _ids_only(topics) if version >= 10 else topics,
        }

    return values


def _coordinator(kind: int) -> Callable[[int, Ids], Values]:
    return lambda _, __: {
        "key": "secret",
        "key_type": kind,
        "coordinator_keys": ["mine", "secret", "missing"],
    }


def _create(_: int, __: Ids) -> Values:
    topics = [topic_values(name) for name in NAMES]
    return {"topics": topics, "timeout": 1000, "validate_only": True}


def _delete(_: int, __: Ids) -> Values:
    by_name = [{"name": name, "topic_id": UUID(int=0)} for name in NAMES]
    return {"topics": by_name, "topic_names": NAMES, "timeout": 1000}


def _delete_ids(_: int, ids: Ids) -> Values:
    by_id = [{"name": None, "topic_id": ids[name]} for name in NAMES if name != "fresh"]
    return {"topics": by_id, "timeout": 1000}


def _txn(transactional_id: str) -> Values:
    return {
        "transactional_id": transactional_id,
        "v3_and_below_transactional_id": transactional_id,
        "producer_id": 999,
        "producer_epoch": 0,
        "v3_and_below_producer_id": 999,
        "v3_and_below_producer_epoch": 0,
        "committed": True,
        "group_id": "mine",
    }


def _add_partitions(transactional_id: str) -> Callable[[int, Ids], Values]:
    topics = [{"name": name, "partitions": [0]} for name in NAMES]

    def values(_: int, __: Ids) -> Values:
        one = {**_txn(transactional_id), "verify_only": False, "topics": topics}
        return {**one, "transactions": [one], "v3_and_below_topics": topics}

    return values


def _commit_in_transaction(transactional_id: str, group: str) -> Callable[[int, Ids], Values]:
    def values(_: int, ids: Ids) -> Values:
        topics = _of_topics(
            ids,
            partition_index=0,
            committed_offset=0,
            committed_leader_epoch=-1,
            committed_metadata=None,
        )
        return {
            **_txn(transactional_id),
            "group_id": group,
            "generation_id": -1,
            "member_id": "",
            "group_instance_id": None,
            "topics": topics,
        }

    return values


def _markers(_: int, __: Ids) -> Values:
    topics = [{"name": name, "partition_indexes": [0]} for name in ("mine", "secret", "missing")]
    marker = {
        "producer_id": 4242,
        "producer_epoch": 0,
        "transaction_result": True,
        "topics": topics,
        "coordinator_epoch": 0,
        "transaction_version": 1,
    }
    return {"markers": [marker]}


def _init(transactional_id: str | None) -> Callable[[int, Ids], Values]:
    return lambda _, __: {
        "transactional_id": transactional_id,
        "transaction_timeout": 60_000,
        "producer_id": -1,
        "producer_epoch": -1,
        "enable_2_pc": False,
        "keep_prepared_txn": False,
    }


def _acl(name: str = "zed") -> Values:
    return {
        "resource_type": 2,
        "resource_name": name,
        "resource_pattern_type": 3,
        "principal": "User:zed",
        "host": "*",
        "operation": 3,
        "permission_type": 3,
    }


def _acl_filter(*_: object) -> Values:
    one = {
        "resource_type_filter": 2,
        "resource_name_filter": "zed",
        "pattern_type_filter": 3,
        "principal_filter": "User:zed",
        "host_filter": None,
        "operation": 1,
        "permission_type": 1,
    }
    return {**one, "filters": [one]}


RESOURCES = (
    *((2, name) for name in NAMES),
    *((32, name) for name in ("mine", "secret", "missing")),
    (4, "0"),
)
"""Topics, groups and the broker."""


def _configs(_: int, __: Ids) -> Values:
    resources = [
        {"resource_type": kind, "resource_name": name, "configuration_keys": []}
        for kind, name in RESOURCES
    ]
    return {"resources": resources, "include_synonyms": False, "include_documentation": False}


def _alter_configs(_: int, __: Ids) -> Values:
    change = {"name": "retention.ms", "config_operation": 0, "value": "1000"}
    resources = [
        {"resource_type": kind, "resource_name": name, "configs": [change] if kind == 2 else []}
        for kind, name in RESOURCES
        if kind in (2, 4)
    ]
    return {"resources": resources, "validate_only": True}


def _elect(_: int, __: Ids) -> Values:
    topics = [{"topic": name, "partitions": [0]} for name in NAMES]
    return {"election_type": 0, "topic_partitions": topics, "timeout": 1000}


def _reassign(_: int, __: Ids) -> Values:
    partitions = [{"partition_index": 0, "replicas": None}]
    topics = [{"name": name, "partitions": partitions} for name in ("mine", "secret", "missing")]
    return {"timeout": 1000, "allow_replication_factor_change": True, "topics": topics}


def _list_reassignments(_: int, __: Ids) -> Values:
    topics = [{"name": name, "partition_indexes": [0]} for name in ("mine", "secret", "missing")]
    return {"timeout": 1000, "topics": topics}


def _records_to_delete(_: int, __: Ids) -> Values:
    topics = [{"name": n, "partitions": [{"partition_index": 0, "offset": 0}]} for n in NAMES]
    return {"topics": topics, "timeout": 1000}


def _more_partitions(_: int, __: Ids) -> Values:
    topics = [{"name": name, "count": 2, "assignments": None} for name in NAMES]
    return {"topics": topics, "timeout": 1000, "validate_only": True}


def _epochs(replica: int) -> Callable[[int, Ids], Values]:
    return lambda _, ids: {
        "replica_id": replica,
        "topics": _of_topics(
            ids, by="topic", partition=0, partition_index=0, current_leader_epoch=-1, leader_epoch=0
        ),
    }


def _quota(*_: object) -> Values:
    entity = {
        "entity": [{"entity_type": "user", "entity_name": "zed"}],
        "ops": [{"key": "producer_byte_rate", "value": 9.0, "remove": False}],
    }
    return {"entries": [entity], "validate_only": True}


def _voter(*_: object) -> Values:
    return {
        "cluster_id": None,
        "timeout": 1000,
        "voter_id": 77,
        "voter_directory_id": NOWHERE,
        "listeners": [{"name": "CONTROLLER", "host": "127.0.0.1", "port": 1}],
        "ack_when_committed": True,
    }


ASKED = (
    Asked("Produce", 0, _produce, since=3),
    Asked("Produce with a transactional id", 0, _produce_with_id, since=3),
    Asked("Fetch", 1, _fetch(-1)),
    Asked("Fetch of a replica", 1, _fetch(0)),
    Asked(
        "ListOffsets",
        2,
        lambda _, ids: {
            "replica_id": -1,
            "isolation_level": 0,
            "timeout": 1000,
            "topics": _of_topics(
                ids, partition_index=0, current_leader_epoch=-1, timestamp=-1, max_num_offsets=1
            ),
        },
    ),
    Asked("Metadata of names", 3, _names, since=4),
    Asked("Metadata of ids", 3, _metadata_ids, since=12),
    Asked("Metadata of all", 3, lambda v, _: {"topics": None if v else [], **_metadata_rest()}),
    Asked("OffsetCommit", 8, _commit("mine")),
    Asked("OffsetCommit of another's group", 8, _commit("secret")),
    Asked("OffsetFetch", 9, _groups_fetched(_one_partition)),
    Asked("OffsetFetch of all topics", 9, _groups_fetched(lambda _: None), since=2),
    Asked("FindCoordinator of groups", 10, _coordinator(0)),
    Asked("FindCoordinator of transactional ids", 10, _coordinator(1), since=1),
    *[
        Asked(f"{title}{' of another' if name == 'secret' else ''}", key, _group(name))
        for title, key in (
            ("JoinGroup", 11),
            ("Heartbeat", 12),
            ("LeaveGroup", 13),
            ("SyncGroup", 14),
        )
        for name in ("mine", "secret")
    ],
    Asked(
        "DescribeGroups",
        15,
        lambda *_: {"groups": ["mine", "secret", "missing"], "include_authorized_operations": True},
    ),
    Asked("ListGroups", 16, lambda *_: {"states_filter": [], "types_filter": []}),
    Asked("CreateTopics", 19, _create),
    Asked("DeleteRecords", 21, _records_to_delete),
    Asked("InitProducerId", 22, _init(None)),
    Asked("InitProducerId of an id", 22, _init("mine")),
    Asked("InitProducerId of another's id", 22, _init("secret")),
    Asked("OffsetForLeaderEpoch", 23, _epochs(-1)),
    Asked("OffsetForLeaderEpoch of a replica", 23, _epochs(-2), since=3),
    Asked("AddPartitionsToTxn", 24, _add_partitions("mine")),
    Asked("AddPartitionsToTxn of another's id", 24, _add_partitions("secret")),
    Asked("AddOffsetsToTxn", 25, lambda *_: _txn("mine")),
    Asked(
        "AddOffsetsToTxn of another's group", 25, lambda *_: {**_txn("mine"), "group_id": "secret"}
    ),
    Asked("AddOffsetsToTxn of another's id", 25, lambda *_: _txn("secret")),
    Asked("EndTxn", 26, lambda *_: _txn("mine")),
    Asked("EndTxn of another's id", 26, lambda *_: _txn("secret")),
    Asked("WriteTxnMarkers", 27, _markers),
    Asked("TxnOffsetCommit", 28, _commit_in_transaction("mine", "mine")),
    Asked("TxnOffsetCommit of another's group", 28, _commit_in_transaction("mine", "secret")),
    Asked("TxnOffsetCommit of another's id", 28, _commit_in_transaction("secret", "mine")),
    Asked("DescribeAcls", 29, _acl_filter),
    Asked("CreateAcls", 30, lambda *_: {"creations": [_acl(), _acl("")]}),
    Asked("DeleteAcls", 31, _acl_filter),
    Asked("DescribeConfigs", 32, _configs),
    Asked("AlterConfigs", 33, _alter_configs),
    Asked(
        "DescribeLogDirs",
        35,
        lambda *_: {"topics": [{"topic": name, "partitions": [0]} for name in ("mine", "secret")]},
    ),
    Asked("CreatePartitions", 37, _more_partitions),
    Asked("ElectLeaders", 43, _elect),
    Asked("IncrementalAlterConfigs", 44, _alter_configs),
    Asked("AlterPartitionReassignments", 45, _reassign),
    Asked("ListPartitionReassignments", 46, _list_reassignments),
    Asked("DescribeClientQuotas", 48, lambda *_: {"components": [], "strict": False}),
    Asked("AlterClientQuotas", 49, _quota),
    Asked("DescribeUserScramCredentials", 50, lambda *_: {"users": [{"name": "zed"}]}),
    Asked(
        "AlterUserScramCredentials",
        51,
        lambda *_: {"deletions": [{"name": "zed", "mechanism": 1}], "upsertions": []},
    ),
    Asked(
        "DescribeQuorum",
        55,
        lambda *_: {
            "topics": [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]
        },
    ),
    Asked(
        "UpdateFeatures",
        57,
        lambda *_: {"timeout": 1000, "feature_updates": [], "validate_only": True},
    ),
    Asked(
        "DescribeCluster",
        60,
        lambda *_: {
            "include_cluster_authorized_operations": True,
            "endpoint_type": 1,
            "include_fenced_brokers": False,
        },
    ),
    Asked(
        "DescribeProducers",
        61,
        lambda *_: {"topics": [{"name": name, "partition_indexes": [0]} for name in NAMES]},
    ),
    Asked("UnregisterBroker", 64, lambda *_: {"broker_id": 99}),
    Asked(
        "DescribeTransactions", 65, lambda *_: {"transactional_ids": ["mine", "secret", "missing"]}
    ),
    Asked(
        "ListTransactions",
        66,
        lambda *_: {
            "state_filters": [],
            "producer_id_filters": [],
            "duration_filter": -1,
            "transactional_id_pattern": None,
        },
    ),
    Asked("ListConfigResources", 74, lambda *_: {"resource_types": [2]}),
    Asked(
        "DescribeTopicPartitions",
        75,
        lambda *_: {
            "topics": [{"name": name} for name in NAMES],
            "response_partition_limit": 100,
            "cursor": None,
        },
    ),
    Asked(
        "DescribeTopicPartitions of all",
        75,
        lambda *_: {"topics": [], "response_partition_limit": 100, "cursor": None},
    ),
    Asked("AddRaftVoter", 80, _voter),
    Asked("RemoveRaftVoter", 81, _voter),
    # What they do is mended.
    Asked(
        "OffsetDelete",
        47,
        lambda *_: {
            "group_id": "mine",
            "topics": [{"name": name, "partitions": [{"partition_index": 0}]} for name in NAMES],
        },
    ),
    Asked(
        "OffsetDelete of another's group",
        47,
        lambda *_: {
            "group_id": "secret",
            "topics": [{"name": name, "partitions": [{"partition_index": 0}]} for name in NAMES],
        },
    ),
    Asked("DeleteGroups", 42, lambda *_: {"groups_names": ["mine", "secret", "missing"]}),
    Asked("DeleteTopics", 20, _delete),
    Asked("DeleteTopics of ids", 20, _delete_ids, since=6),
)

MENDED = (42, 47, 20)
"""APIs after which the world is mended."""
