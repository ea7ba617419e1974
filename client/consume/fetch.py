"""Writing and reading records: operations without I/O (see :mod:`kept.client.admin.topics`)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kept.client.admin.topics import Operation
from kept.client.consume import positions
from kept.client.core.broker_errors import failure
from kept.client.core.calls import Anywhere, Call, Route, ToCoordinator, ToLeader, ToNode
from kept.client.core.metadata import ClusterView
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import KeptError, RequestTimedOut, UnknownTopicId
from kept.storage.types import IsolationLevel, TopicPartition

LATEST: Final = positions.LATEST
EARLIEST: Final = positions.EARLIEST
MAX_TIMESTAMP: Final = positions.MAX_TIMESTAMP

SILENT_MS: Final = 30_000
"""How long past its ``max_wait_ms`` the answer to a Fetch is waited for by default."""
TRANSACTION_TIMEOUT_MS: Final = 60_000
"""After so long its coordinator aborts a transaction, unless the producer says otherwise."""
_NO_TRANSACTIONS_V2: Final = 11
"""The newest version of Produce in which partitions do not join a transaction by being written."""
_NO_ID: Final = uuid.UUID(int=0)


class Produced(NamedTuple):
    """Where a batch went; the base offset is -1 with acks=0. ``log_append_ms``: where the topic
    stamps records itself, with that.
    """

    partition: int
    base_offset: int
    log_append_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """One partition of a Fetch response. ``records`` holds batches, the last one perhaps cut."""

    topic_partition: TopicPartition
    error: KeptError | None
    records: bytes
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: tuple[tuple[int, int], ...]


def produce(
    view: ClusterView,
    topic: str,
    batches: Mapping[int, bytes],
    *,
    acks: int,
    timeout_ms: int,
    auto_create: bool = False,
    at_most_once: bool = False,
    transactional_id: str | None = None,
) -> Operation[list[Produced]]:
    """Append one batch to each of these partitions; in a transaction, which they have joined,
    where ``transactional_id`` is given.
    """
    calls = [
        _produce_call(
            view,
            TopicPartition(topic, partition),
            batch,
            acks=acks,
            timeout_ms=timeout_ms,
            transactional_id=transactional_id,
        )
        for partition, batch in batches.items()
    ]
    for call, partition in zip(calls, batches, strict=True):
        call.route = ToLeader(topic, partition, auto_create)
        call.at_most_once, call.repeatable = at_most_once, not at_most_once
    responses = yield calls
    return [
        _produced(partition, response)
        for partition, response in zip(batches, responses, strict=True)
    ]


def _produced(partition: int, response: Any) -> Produced:
    if response is None:
        return Produced(partition, -1)
    outcome = response.responses[0].partition_responses[0]
    stamped = outcome.log_append_time
    at_ms = None if stamped is None else round(stamped.timestamp() * 1000)
    return Produced(partition, int(outcome.base_offset), at_ms)


def _produce_call(
    view: ClusterView,
    tp: TopicPartition,
    batch: bytes,
    *,
    acks: int,
    timeout_ms: int,
    transactional_id: str | None,
) -> Call:
    what = f"Produce to {tp}"

    def values(version: int) -> Mapping[str, Any]:
        del version
        data = {"index": tp.partition, "records": batch}
        named = {"name": tp.topic, "topic_id": _topic_id(view, tp.topic), "partition_data": [data]}
        return {
            "transactional_id": transactional_id,
            "acks": acks,
            "timeout": timeout_ms,
            "topic_data": [named],
        }

    def check(response: Any) -> KeptError | None:
        partition = response.responses[0].partition_responses[0]
        message = getattr(partition, "error_message", None)
        details = [
            e.batch_index_error_message
            for e in getattr(partition, "record_errors", ())
            if e.batch_index_error_message
        ]
        if details and details[0] not in (message or ""):
            message = f"{message or 'a record is refused'}: {details[0]}"
        error = failure(int(partition.error_code), what, message)
        if isinstance(error, RequestTimedOut):
            return RequestTimedOut(
                f"{error}: the leader has it, not every replica in sync has; it is committed later "
                "unless the leader is lost"
            )
        return error

    return Call(
        ApiKey.PRODUCE,
        values,
        what=what,
        timeout_ms=timeout_ms,
        check=check,
        expects_response=acks != 0,
        max_version=32767 if transactional_id is None else _NO_TRANSACTIONS_V2,
    )


def _topic_id(view: ClusterView, topic: str) -> uuid.UUID | None:
    topic_view = view.topics.get(topic)
    return topic_view.topic_id if topic_view is not None and topic_view.topic_id != _NO_ID else None


def _leader_epoch(view: ClusterView, tp: TopicPartition) -> int:
    topic_view = view.topics.get(tp.topic)
    partition = None if topic_view is None else topic_view.partitions.get(tp.partition)
    return -1 if partition is None else partition.leader_epoch


def init_producer_id(
    timeout_ms: int,
    transactional_id: str | None = None,
    transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS,
    current: tuple[int, int] = (-1, -1),
) -> Operation[tuple[int, int]]:
    """(producer id, producer epoch) for an idempotent producer, or for one of an id: that fences
    the id's producers before, and aborts their transaction. Given what a producer has as
    ``current``, its next epoch: ProducerFenced where it is not the newest any more (KIP-360).
    """
    route: Route = Anywhere()
    what = "InitProducerId"
    if transactional_id is not None:
        route, what = ToCoordinator(transactional_id, kind=1), f"{what} of {transactional_id}"
    values = {
        "transactional_id": transactional_id,
        "transaction_timeout": transaction_timeout_ms,
        "producer_id": current[0],
        "producer_epoch": current[1],
    }
    (response,) = yield [
        Call(
            ApiKey.INIT_PRODUCER_ID,
            values,
            route,
            what=what,
            timeout_ms=timeout_ms,
            check=lambda r: failure(int(r.error_code), what),
        )
    ]
    return int(response.producer_id), int(response.producer_epoch)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How much a Fetch may bring, and how long it may wait for it."""

    max_wait_ms: int = 500
    min_bytes: int = 1
    max_bytes: int = 50 * 1024 * 1024
    partition_max_bytes: int = 1024 * 1024
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED


def fetch(
    view: ClusterView,
    positions: Mapping[TopicPartition, int],
    limits: FetchLimits,
    silent_ms: int = SILENT_MS,
) -> Operation[list[Fetched]]:
    """Fetch from these partitions at these offsets: one request to each leader.

    The leaders must be known (:func:`kept.client.admin.topics.metadata`); partitions without
    one are left out. An error comes with its partition. Where a leader is not there, or says
    nothing for ``silent_ms`` after ``max_wait_ms``, each of its partitions comes with that error.
    """
    by_node: dict[int, list[TopicPartition]] = {}
    for tp in positions:
        topic_view = view.topics.get(tp.topic)
        partition = None if topic_view is None else topic_view.partitions.get(tp.partition)
        if partition is not None and partition.leader in view.nodes:
            by_node.setdefault(partition.leader, []).append(tp)
    calls = [
        _fetch_call(view, ToNode(node), tps, positions, limits) for node, tps in by_node.items()
    ]
    for call in calls:
        call.patient, call.optional = False, True
        call.timeout_ms, call.while_heard = limits.max_wait_ms + silent_ms, True
    responses = yield calls
    out: list[Fetched] = []
    for response, tps in zip(responses, by_node.values(), strict=True):
        if isinstance(response, KeptError):
            out += [Fetched(tp, response, b"", -1, -1, -1, ()) for tp in tps]
        else:
            out += _fetched(view, response)
    return out


def fetch_partition(
    view: ClusterView,
    tp: TopicPartition,
    offset: int,
    limits: FetchLimits,
    timeout_ms: int,
    *,
    node: int | None = None,
) -> Operation[Fetched]:
    """Fetch one partition from whoever leads it, in the epoch that is known, or from the replica on
    ``node`` (KIP-392), in whatever epoch that is.

    A new leader, a fenced epoch and a broken connection are tried again until ``timeout_ms``; other
    errors are raised. The topic must be known.
    """
    route = ToLeader(*tp) if node is None else ToNode(node)
    call = _fetch_call(view, route, [tp], {tp: offset}, limits, any_epoch=node is not None)

    def check(response: Any) -> KeptError | None:
        error = failure(int(getattr(response, "error_code", 0)), call.what)
        results = () if error is not None else _fetched(view, response)
        return next((fetched.error for fetched in results), error)

    call.check, call.timeout_ms = check, timeout_ms
    (response,) = yield [call]
    for fetched in _fetched(view, response):
        if fetched.topic_partition == tp:
            return fetched
    raise UnknownTopicId(f"{call.what}: the answer is about another topic")


def _fetch_call(
    view: ClusterView,
    route: Route,
    tps: Sequence[TopicPartition],
    positions: Mapping[TopicPartition, int],
    limits: FetchLimits,
    *,
    any_epoch: bool = False,
) -> Call:
    def values(version: int) -> Mapping[str, Any]:
        del version
        return _fetch_values(view, tps, positions, limits, any_epoch=any_epoch)

    what = f"Fetch of {partition_list(tps)}"
    ids_known = all(_topic_id(view, tp.topic) is not None for tp in tps)
    return Call(
        ApiKey.FETCH,
        values,
        route,
        what=what,
        timeout_ms=limits.max_wait_ms + SILENT_MS,
        check=lambda r: failure(int(getattr(r, "error_code", 0)), what),
        max_version=32767 if ids_known else 12,
    )


def partition_list(tps: Sequence[TopicPartition]) -> str:
    """Partitions as a message names them: ``orders-0, orders-1, orders-2 and more``."""
    return f"{', '.join(map(str, tps[:3]))}{' and more' if len(tps) > 3 else ''}"


def _fetch_values(
    view: ClusterView,
    tps: Sequence[TopicPartition],
    positions: Mapping[TopicPartition, int],
    limits: FetchLimits,
    *,
    any_epoch: bool,
) -> Mapping[str, Any]:
    topics: dict[str, list[Mapping[str, Any]]] = {}
    for tp in tps:
        partition = {
            "partition": tp.partition,
            "current_leader_epoch": -1 if any_epoch else _leader_epoch(view, tp),
            "fetch_offset": positions[tp],
            "partition_max_bytes": limits.partition_max_bytes,
        }
        topics.setdefault(tp.topic, []).append(partition)
    return {
        "replica_id": -1,
        "max_wait": limits.max_wait_ms,
        "min_bytes": limits.min_bytes,
        "max_bytes": limits.max_bytes,
        "isolation_level": int(limits.isolation),
        "topics": [
            {"topic": name, "topic_id": _topic_id(view, name), "partitions": partitions}
            for name, partitions in topics.items()
        ],
        "forgotten_topics_data": (),
        "rack_id": "",
    }


def _fetched(view: ClusterView, response: Any) -> list[Fetched]:
    out = []
    for topic in response.responses:
        name = str(topic.topic) if hasattr(topic, "topic") else view.topic_name(topic.topic_id)
        if name is None:
            continue
        for partition in topic.partitions:
            tp = TopicPartition(name, int(partition.partition_index))
            aborted = getattr(partition, "aborted_transactions", None) or ()
            out.append(
                Fetched(
                    tp,
                    failure(int(partition.error_code), f"Fetch of {tp}"),
                    bytes(partition.records or b""),
                    int(partition.high_watermark),
                    int(getattr(partition, "last_stable_offset", -1)),
                    int(getattr(partition, "log_start_offset", -1)),
                    tuple((int(a.producer_id), int(a.first_offset)) for a in aborted),
                )
            )
    return out
