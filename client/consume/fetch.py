"""Reading records: operations without I/O (see :mod:`kept.client.admin.topics`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kept.client.admin.topics import Operation
from kept.client.consume import positions
from kept.client.core.broker_errors import failure
from kept.client.core.calls import Call, Route, ToLeader, ToNode
from kept.client.core.metadata import ClusterMetadata
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import KeptError, UnknownTopicId
from kept.storage.types import IsolationLevel, TopicPartition

LATEST: Final = positions.LATEST
EARLIEST: Final = positions.EARLIEST

SILENT_MS: Final = 30_000
"""How long past its ``max_wait_ms`` the answer to a Fetch is waited for by default."""


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


def _leader_epoch(view: ClusterMetadata, tp: TopicPartition) -> int:
    topic_view = view.topics.get(tp.topic)
    partition = None if topic_view is None else topic_view.partitions.get(tp.partition)
    return -1 if partition is None else partition.leader_epoch


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How much a Fetch may bring, and how long it may wait for it."""

    max_wait_ms: int = 500
    min_bytes: int = 1
    max_bytes: int = 50 * 1024 * 1024
    partition_max_bytes: int = 1024 * 1024
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED


def fetch(
    view: ClusterMetadata,
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
    view: ClusterMetadata,
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
    errors are raised, and UnknownTopicId where another topic has the name. The topic must be known.
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
    view: ClusterMetadata,
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
    ids_known = all(view.topic_id(tp.topic) is not None for tp in tps)
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
    """Partitions as a message names them: ``orders:0, orders:1, orders:2 and more``."""
    return f"{', '.join(tp.place for tp in tps[:3])}{' and more' if len(tps) > 3 else ''}"


def _fetch_values(
    view: ClusterMetadata,
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
            {"topic": name, "topic_id": view.topic_id(name), "partitions": partitions}
            for name, partitions in topics.items()
        ],
        "forgotten_topics_data": (),
        "rack_id": "",
    }


def _fetched(view: ClusterMetadata, response: Any) -> list[Fetched]:
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
                    failure(int(partition.error_code), f"Fetch of {tp.place}"),
                    bytes(partition.records or b""),
                    int(partition.high_watermark),
                    int(getattr(partition, "last_stable_offset", -1)),
                    int(getattr(partition, "log_start_offset", -1)),
                    tuple((int(a.producer_id), int(a.first_offset)) for a in aborted),
                )
            )
    return out
