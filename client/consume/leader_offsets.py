"""What leaders say of their logs, and where these begin: offsets, the ends of epochs, where
partitions stand; records are deleted up to an offset.

Operations without I/O (see :mod:`kept.client.admin.topics`). Each leader is asked once about all
of its partitions, or in a few requests where they are many. What one cannot say of some of them
(it leads them no more, say) is asked of whoever leads them next; a request goes again as a whole,
by the rules of :mod:`kept.client.core.client_core`, when it brought nothing at all. So every round
brings something, and nobody is asked twice for what he has told. Errors name the topic and
partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kept.client.admin.topics import Operation, log_sizes, run_concurrently
from kept.client.consume.fetch import partition_list
from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.core.broker_errors import RetriableBrokerError, failure
from kept.client.core.calls import Call, ToLeader, ToNode
from kept.client.core.metadata import ClusterMetadata, Endpoint, TopicMetadata
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import KeptError, RetriableError
from kept.storage.types import IsolationLevel, TopicPartition

MOST_PARTITIONS: Final = 500
"""Of one request. A node answers nobody else meanwhile, and by timestamp it looks into its logs."""


class OffsetAt(NamedTuple):
    """An answer of ListOffsets; offset -1 means that there is none."""

    offset: int
    timestamp: int
    leader_epoch: int


class PartitionState(NamedTuple):
    """Where a partition stands, by its leader; None is what that one did not say."""

    log_start_offset: int | None
    high_watermark: int | None
    size_bytes: int | None
    unknown: KeptError | None = None
    """Why it did not say the offsets."""


@dataclass(frozen=True, slots=True)
class _Query:
    """A request to leaders: its name, the fields of the whole, of a topic's name, of a partition's
    number, and of each partition.
    """

    api_key: int
    name: str
    whole: Mapping[str, Any]
    topic: str
    partition: str
    each: Mapping[TopicPartition, Mapping[str, Any]]
    timeout_ms: int
    optional: bool = False
    partial: bool = False
    """An error of a single partition that trying again does not mend is its result."""

    def call(self, tps: Sequence[TopicPartition]) -> Call:
        """To the leader of the first of these partitions."""
        topics: dict[str, list[Mapping[str, Any]]] = {}
        for tp in tps:
            topics.setdefault(tp.topic, []).append({self.partition: tp.partition, **self.each[tp]})
        values = {
            **self.whole,
            "topics": [{self.topic: name, "partitions": all_} for name, all_ in topics.items()],
        }

        def check(response: Any) -> KeptError | None:
            errors = [
                result
                for result in self.results(tps, response)
                if isinstance(result, RetriableError if self.partial else KeptError)
            ]
            final = (result for result in errors if not isinstance(result, RetriableError))
            return next(final, errors[0] if len(errors) == len(tps) else None)

        call = Call(
            self.api_key, values, ToLeader(*tps[0]), what=f"{self.name} of {partition_list(tps)}"
        )
        call.check, call.timeout_ms, call.optional = check, self.timeout_ms, self.optional
        return call

    def results(self, tps: Sequence[TopicPartition], response: Any) -> list[Any]:
        """What a response says of each of these partitions, or the error."""
        there = {
            (str(getattr(topic, self.topic)), int(getattr(partition, self.partition))): partition
            for topic in response.topics
            for partition in topic.partitions
        }
        by_partition = []
        for tp in tps:
            what, partition = f"{self.name} of {tp.place}", there.get(tp)
            error: KeptError | None = RetriableBrokerError(f"{what}: the answer lacks it")
            if partition is not None:
                error = failure(int(partition.error_code), what)
            by_partition.append(error or partition)
        return by_partition


def _query(view: ClusterMetadata, query: _Query) -> Operation[dict[TopicPartition, Any]]:
    """The answer about each partition; where the query is optional, perhaps a RetriableError, and
    where it is partial, perhaps another error.
    """
    results: dict[TopicPartition, Any] = {}
    left = list(query.each)
    while left:
        groups: dict[Endpoint | str, list[TopicPartition]] = {}
        for tp in left:
            groups.setdefault(view.leader(*tp) or tp.topic, []).append(tp)
        calls = [
            tps[at : at + MOST_PARTITIONS]
            for tps in groups.values()
            for at in range(0, len(tps), MOST_PARTITIONS)
        ]
        for tps, response in zip(calls, (yield [query.call(tps) for tps in calls]), strict=True):
            if isinstance(response, KeptError):
                results.update(dict.fromkeys(tps, response))
                continue
            for tp, result in zip(tps, query.results(tps, response), strict=True):
                if not isinstance(result, RetriableError if query.partial else KeptError):
                    results[tp] = result
        was_led = {tp: leader for leader, tps in groups.items() for tp in tps}
        left = [tp for tp in left if tp not in results]
        for tp in left:
            if view.leader(*tp) == was_led[tp]:
                view.forget_topic(tp.topic)
    return {tp: results[tp] for tp in query.each}


def _offsets_query(
    asked: Mapping[TopicPartition, int],
    timeout_ms: int,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    *,
    optional: bool = False,
    partial: bool = False,
) -> _Query:
    whole = {"replica_id": -1, "isolation_level": int(isolation), "timeout": timeout_ms}
    each = {tp: {"timestamp": timestamp} for tp, timestamp in asked.items()}
    return _Query(
        ApiKey.LIST_OFFSETS,
        "ListOffsets",
        whole,
        "name",
        "partition_index",
        each,
        timeout_ms,
        optional,
        partial,
    )


def list_offsets(
    view: ClusterMetadata,
    asked: Mapping[TopicPartition, int],
    isolation: IsolationLevel,
    timeout_ms: int,
) -> Operation[dict[TopicPartition, OffsetAt]]:
    """The offset for a timestamp (or LATEST, EARLIEST, MAX_TIMESTAMP) of each partition."""
    results = yield from _query(view, _offsets_query(asked, timeout_ms, isolation))
    return {tp: _offset_at(result) for tp, result in results.items()}


def known_ends(
    view: ClusterMetadata, partitions: Sequence[TopicPartition], patience_ms: int
) -> Operation[dict[TopicPartition, int]]:
    """The high watermarks of partitions that have a leader, without those that it does not say."""
    if not partitions:
        return {}
    asked = dict.fromkeys(partitions, LATEST)
    query = _offsets_query(asked, patience_ms, optional=True, partial=True)
    results = yield from _query(view, query)
    return {
        tp: int(result.offset)
        for tp, result in results.items()
        if not isinstance(result, KeptError)
    }


def offsets_of_node(
    node_id: int,
    asked: Mapping[TopicPartition, int],
    timeout_ms: int,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> Operation[dict[TopicPartition, OffsetAt]]:
    """The same of partitions that a node is known to lead, without those that it cannot say."""
    query, tps = _offsets_query(asked, timeout_ms, isolation), list(asked)
    call = query.call(tps)
    call.route, call.check = ToNode(node_id), None
    (response,) = yield [call]
    said = zip(tps, query.results(tps, response), strict=True)
    return {tp: _offset_at(result) for tp, result in said if not isinstance(result, KeptError)}


def _offset_at(one: Any) -> OffsetAt:
    return OffsetAt(int(one.offset), int(one.timestamp), int(getattr(one, "leader_epoch", -1)))


def epoch_ends(
    view: ClusterMetadata, asked: Mapping[TopicPartition, int], timeout_ms: int
) -> Operation[dict[TopicPartition, int]]:
    """Where that leader epoch (or the last one before it) ends in each leader's log, -1 where it
    cannot say. Below an offset that was read in that epoch: the log was cut back since (KIP-320).
    """
    each = {tp: {"current_leader_epoch": -1, "leader_epoch": e} for tp, e in asked.items()}
    results = yield from _query(
        view,
        _Query(
            ApiKey.OFFSET_FOR_LEADER_EPOCH,
            "OffsetForLeaderEpoch",
            {"replica_id": -1},
            "topic",
            "partition",
            each,
            timeout_ms,
        ),
    )
    return {tp: int(result.end_offset) for tp, result in results.items()}


def delete_records(
    view: ClusterMetadata, before: Mapping[TopicPartition, int], timeout_ms: int
) -> Operation[dict[TopicPartition, int | KeptError]]:
    """Delete the records below an offset of each partition; the least log start among its live
    replicas then, or why it was refused.
    """
    results = yield from _query(
        view,
        _Query(
            ApiKey.DELETE_RECORDS,
            "DeleteRecords",
            {"timeout": timeout_ms},
            "name",
            "partition_index",
            {tp: {"offset": offset} for tp, offset in before.items()},
            timeout_ms,
            partial=True,
        ),
    )
    return {
        tp: result if isinstance(result, KeptError) else int(result.low_watermark)
        for tp, result in results.items()
    }


def partition_states(
    view: ClusterMetadata, topic: TopicMetadata, patience_ms: int
) -> Operation[dict[int, PartitionState]]:
    """Where each partition that has a leader stands; a leader is waited for so long at most."""
    led = [number for number, one in topic.partitions.items() if one.leader >= 0]

    def offsets(when: int) -> Operation[dict[TopicPartition, Any]]:
        wanted = {TopicPartition(topic.name, number): when for number in led}
        return _query(view, _offsets_query(wanted, patience_ms, optional=True))

    starts, ends, sizes = yield from run_concurrently(
        offsets(EARLIEST), offsets(LATEST), log_sizes(topic, patience_ms)
    )
    by_partition = {}
    for number in led:
        both = starts[topic.name, number], ends[topic.name, number]
        start, end = (None if isinstance(one, KeptError) else int(one.offset) for one in both)
        unknown = next((one for one in both if isinstance(one, KeptError)), None)
        by_partition[number] = PartitionState(start, end, sizes.get(number), unknown)
    return by_partition
