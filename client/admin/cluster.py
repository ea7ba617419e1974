"""The cluster itself: its quorum, who leads what, where replicas are. Operations without I/O.

As in :mod:`kept.client.admin.topics`, an operation is a generator that yields lists of calls. They
speak Kafka's own APIs (DescribeCluster, DescribeQuorum, ElectLeaders, AlterPartitionReassignments,
ListPartitionReassignments, UnregisterBroker), so they work on Apache Kafka too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kept.client.admin.topics import Operation
from kept.client.core.broker_errors import failure
from kept.client.core.calls import Call, ToController
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import KeptError, RetriableError, UnsupportedVersion
from kept.storage.types import TopicPartition

ELECTION_MS: Final = 6_000
"""Within this a controller is elected, if there can be one."""

METADATA_TOPIC: Final = "__cluster_metadata"
PREFERRED: Final = 0
UNCLEAN: Final = 1
ELECTION_NOT_NEEDED: Final = 84
NO_REASSIGNMENT: Final = 85


class Member(NamedTuple):
    """A node as the controller knows it; ``fenced`` None where the cluster does not tell."""

    node_id: int
    host: str
    port: int
    rack: str | None
    fenced: bool | None


class Replica(NamedTuple):
    """A node's copy of the metadata log; times in milliseconds, -1 where unknown."""

    node_id: int
    log_end_offset: int
    last_fetch_ms: int
    last_caught_up_ms: int


class Quorum(NamedTuple):
    """The controller and those who follow its log."""

    leader_id: int
    term: int
    high_watermark: int
    voters: tuple[Replica, ...]
    observers: tuple[Replica, ...]

    def lag(self, node_id: int) -> int | None:
        """How many entries of the metadata log a node lacks; None when it is not known."""
        copies = (*self.voters, *self.observers)
        ends = {r.node_id: r.log_end_offset for r in copies if r.log_end_offset >= 0}
        newest = ends.get(self.leader_id, self.high_watermark)
        end = ends.get(node_id, -1)
        return None if end < 0 else max(0, newest - end)


class ClusterDescription(NamedTuple):
    """The cluster; ``quorum`` is None where DescribeQuorum is not served."""

    cluster_id: str
    controller_id: int
    members: tuple[Member, ...]
    quorum: Quorum | None
    unknown: KeptError | None = None
    """Why the quorum is not known, where the nodes could tell it."""


class Reassignment(NamedTuple):
    """A partition whose replicas are being moved; ``replicas`` holds the old and the new ones."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]

    @property
    def target(self) -> tuple[int, ...]:
        """The replicas when it is done."""
        return tuple(n for n in self.replicas if n not in self.removing)


class Outcome(NamedTuple):
    """What became of one partition; ``error`` None when it was done, or there was nothing to do."""

    topic_partition: TopicPartition
    error: KeptError | None
    needed: bool = True


def describe_cluster() -> Operation[ClusterDescription]:
    """The nodes, fenced ones too, the controller, and its quorum, where one answers."""
    cluster, members = yield from describe_members()
    quorum = unknown = None
    try:
        quorum = yield from describe_quorum(ELECTION_MS)
    except UnsupportedVersion:
        pass
    except RetriableError as error:
        unknown = error
    controller_id = -1
    if unknown is None:
        controller_id = int(cluster.controller_id) if quorum is None else quorum.leader_id
    return ClusterDescription(str(cluster.cluster_id), controller_id, members, quorum, unknown)


def describe_members() -> Operation[tuple[Any, tuple[Member, ...]]]:
    """The answer to DescribeCluster, and the nodes in it, fenced ones too."""
    values = {
        "include_cluster_authorized_operations": False,
        "endpoint_type": 1,
        "include_fenced_brokers": True,
    }
    (cluster,) = yield [
        Call(ApiKey.DESCRIBE_CLUSTER, values, what="DescribeCluster", check=_top("DescribeCluster"))
    ]
    return cluster, tuple(
        Member(int(b.broker_id), b.host, int(b.port), b.rack, getattr(b, "is_fenced", None))
        for b in sorted(cluster.brokers, key=lambda b: int(b.broker_id))
    )


def describe_quorum(patience_ms: int) -> Operation[Quorum]:
    """Who leads the metadata log, in which term, and how far everybody is. Raises RetriableError
    when no controller has answered for so long.
    """
    values = {"topics": [{"topic_name": METADATA_TOPIC, "partitions": [{"partition_index": 0}]}]}
    call = Call(ApiKey.DESCRIBE_QUORUM, values, what="DescribeQuorum", check=_quorum_error)
    call.optional, call.timeout_ms = True, patience_ms
    (response,) = yield [call]
    if isinstance(response, KeptError):
        raise response
    partition = response.topics[0].partitions[0]
    return Quorum(
        int(partition.leader_id),
        int(partition.leader_epoch),
        int(partition.high_watermark),
        _replicas(partition.current_voters),
        _replicas(partition.observers),
    )


def _quorum_error(response: Any) -> KeptError | None:
    error = failure(int(response.error_code), "DescribeQuorum")
    if error is not None or not response.topics:
        return error
    partition = response.topics[0].partitions[0]
    return failure(
        int(partition.error_code), "DescribeQuorum", getattr(partition, "error_message", None)
    )


def _replicas(states: Iterable[Any]) -> tuple[Replica, ...]:
    return tuple(
        Replica(
            int(state.replica_id),
            int(state.log_end_offset),
            int(getattr(state, "last_fetch_timestamp", -1)),
            int(getattr(state, "last_caught_up_timestamp", -1)),
        )
        for state in sorted(states, key=lambda state: int(state.replica_id))
    )


def elect_leaders(
    kind: int, partitions: Sequence[TopicPartition] | None, timeout_ms: int
) -> Operation[list[Outcome]]:
    """Elect the preferred leader, or any replica (UNCLEAN: acknowledged records may be lost).

    None means all partitions that need it.
    """
    topics = None
    if partitions is not None:
        topics = [
            {"topic": topic, "partitions": tuple(numbers)}
            for topic, numbers in _by_topic(partitions).items()
        ]
    what = "ElectLeaders"
    values = {"election_type": kind, "topic_partitions": topics, "timeout": timeout_ms}
    (response,) = yield [_once(ApiKey.ELECT_LEADERS, values, what, timeout_ms)]
    return [
        _outcome(TopicPartition(str(r.topic), int(p.partition_id)), what, p, ELECTION_NOT_NEEDED)
        for r in response.replica_election_results
        for p in r.partition_result
    ]


def _once(key: ApiKey, values: dict[str, Any], what: str, timeout_ms: int) -> Call:
    """A change by the controller that is not asked for again where it may have been made."""
    return Call(
        key,
        values,
        ToController(),
        what=what,
        timeout_ms=timeout_ms,
        check=_top(what),
        repeatable=False,
    )


def _outcome(tp: TopicPartition, what: str, result: Any, not_needed: int) -> Outcome:
    code = int(result.error_code)
    if code == not_needed:
        return Outcome(tp, None, needed=False)
    return Outcome(tp, failure(code, f"{what} of {tp.place}", result.error_message))


def reassign(
    replicas: Mapping[TopicPartition, Sequence[int] | None], timeout_ms: int
) -> Operation[list[Outcome]]:
    """Move partitions to these replicas, the preferred leader first; None cancels a move."""
    topics = [
        {
            "name": topic,
            "partitions": [
                {"partition_index": n, "replicas": _tuple(replicas[TopicPartition(topic, n)])}
                for n in numbers
            ],
        }
        for topic, numbers in _by_topic(replicas).items()
    ]
    what = "AlterPartitionReassignments"
    values = {"timeout": timeout_ms, "allow_replication_factor_change": True, "topics": topics}
    (response,) = yield [_once(ApiKey.ALTER_PARTITION_REASSIGNMENTS, values, what, timeout_ms)]
    return [
        _outcome(TopicPartition(str(t.name), int(p.partition_index)), what, p, NO_REASSIGNMENT)
        for t in response.responses
        for p in t.partitions
    ]


def list_reassignments(timeout_ms: int) -> Operation[dict[TopicPartition, Reassignment]]:
    """The partitions whose replicas are being moved."""
    what = "ListPartitionReassignments"
    values = {"timeout": timeout_ms, "topics": None}
    (response,) = yield [
        Call(
            ApiKey.LIST_PARTITION_REASSIGNMENTS, values, ToController(), what=what, check=_top(what)
        )
    ]
    return {
        TopicPartition(str(t.name), int(p.partition_index)): Reassignment(
            _numbers(p.replicas), _numbers(p.adding_replicas), _numbers(p.removing_replicas)
        )
        for t in response.topics
        for p in t.partitions
    }


def unregister(node_id: int) -> Operation[None]:
    """Forget a node that is gone for good."""
    what = f"UnregisterBroker of node {node_id}"
    yield [
        Call(
            ApiKey.UNREGISTER_BROKER,
            {"broker_id": node_id},
            ToController(),
            what=what,
            check=_top(what),
        )
    ]


def _top(what: str) -> Any:
    """A check of the error code at the top of a response; v0 of some APIs has none."""

    def check(response: Any) -> KeptError | None:
        code = int(getattr(response, "error_code", 0))
        return failure(code, what, getattr(response, "error_message", None))

    return check


def _by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    by_topic: dict[str, list[int]] = {}
    for tp in sorted(partitions):
        by_topic.setdefault(tp.topic, []).append(tp.partition)
    return by_topic


def _tuple(replicas: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if replicas is None else tuple(replicas)


def _numbers(ids: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(int, ids))
