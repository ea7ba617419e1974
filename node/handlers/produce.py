"""Produce: check each batch, append it to its partition's leader, answer when it counts.

Rule 37: the kernel checks a batch in one pass; large compressed ones are checked in a thread, and
the connection's later requests wait. Appends are staged; the connection writes them at the end of
its readiness event with one ``writev`` per partition, and only then do answers go their way
(``kept.node.handlers.produced``). acks=0 answers nothing, and an error then closes the connection
(rule 41). Rule 40: no transactions yet.

:func:`handle_run` is the short way, for requests of one plain batch; :func:`handle` serves all.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from kept.node import error_codes
from kept.node.handlers.produced import Produced, ProducedRun, write
from kept.node.hot import produce as codec
from kept.node.logging import log
from kept.storage.errors import (
    InvalidRecord,
    InvalidTxnState,
    KeptError,
    UnknownTopicId,
    UnknownTopicOrPartition,
    UnsupportedCompressionType,
)
from kept.storage.records import check

if TYPE_CHECKING:
    from kept.node.connection import Connection
    from kept.node.hosting import HostedPartition

ACKS: Final = (-1, 0, 1)
_CODEC_BYTE: Final = 22
"""Where in a batch the low byte of its attributes is."""


def handle(
    connection: Connection, version: int, correlation_id: int, frame: memoryview, position: int
) -> None:
    """Serve one Produce request, whose body starts at ``position`` of ``frame``."""
    request = codec.parse(frame, position, version)
    produced = Produced(connection, version, correlation_id, request.acks, request.timeout_ms)
    if request.acks not in ACKS or request.transactional_id is not None:
        _refuse(produced, request)
        connection.unwritten.append(produced)
        return
    for _, partitions in request.topics:
        for data in partitions:
            if (
                data.end - data.start > codec.IN_THREAD_BYTES
                and frame[data.start + _CODEC_BYTE] & 7
            ):
                _check_in_thread(connection, produced, request, frame, version)
                return
    now_ms = connection.node.now_ms()
    for name, partitions in request.topics:
        produced.topic(name)
        for data in partitions:
            hosted = None
            try:
                hosted = find(connection, name, data.partition, version)
                checked = check(_batch(frame, data, version), hosted.rules, now_ms)
                _append(connection, produced, hosted, data.partition, checked, now_ms)
            except KeptError as error:
                produced.refused(data.partition, error, hosted)
    connection.unwritten.append(produced)


def handle_run(
    connection: Connection, ones: list[codec.One], buffer: memoryview, now_ms: int
) -> int:
    """Append the one plain batch of each request, in order; how many were served.

    The first of another kind, or all after one that closed the connection, are not.
    """
    hosting = connection.node.hosting
    dirty, run = connection.dirty, connection.run
    served = appended = records = size = 0
    for one in ones:
        version, _, acks, timeout_ms, name, index, start, end = one
        try:
            topic = hosting.by_id[name] if version >= codec.TOPIC_IDS else hosting.by_name[name]
            hosted = topic.partitions[index]
        except KeyError:
            break
        partition = hosted.partition
        served += 1
        try:
            checked = check(buffer[start:end], hosted.rules, now_ms)
            info = partition.append(checked, now_ms, acks)
        except KeptError as error:
            _refuse_one(connection, one, hosted, error)
            run = None
            if connection.blocked:
                break
            continue
        dirty[partition] = None
        appended += 1
        records += checked.record_count
        size += checked.size_bytes
        if run is None or run.acks != acks or run.timeout_ms != timeout_ms:
            run = connection.open_run(ProducedRun(connection, acks, timeout_ms))
        run.entries.append((one, hosted, info))
        if hosted.sync:
            run.sync = True
    connection.node.metrics.produced(appended, records, size)
    return served


def _refuse_one(
    connection: Connection, one: codec.One, hosted: HostedPartition, error: KeptError
) -> None:
    failed = Produced(connection, one[0], one[1], one[2], one[3])
    failed.topic(one[4])
    failed.refused(one[5], error, hosted)
    connection.node.metrics.refused()
    connection.unwritten.append(failed)


def find(connection: Connection, name: bytes, index: int, version: int) -> HostedPartition:
    """The partition that a request names; raises UnknownTopicOrPartition, UnknownTopicId..."""
    hosting = connection.node.hosting
    if version >= codec.TOPIC_IDS:
        topic = hosting.by_id.get(name)
        if topic is None:
            raise UnknownTopicId("no topic has this id")
    else:
        topic = hosting.by_name.get(name)
        if topic is None:
            raise UnknownTopicOrPartition(f"no topic {name.decode('utf-8', 'replace')!r}")
    hosted = topic.partitions.get(index)
    if hosted is None:
        raise topic.absent(index)
    return hosted


def _batch(frame: memoryview, data: codec.PartitionData, version: int) -> memoryview:
    if data.start < 0 or data.start == data.end:
        raise InvalidRecord("a Produce request needs records")
    batch = frame[data.start : data.end]
    if version < codec.ZSTD_SINCE and codec.is_zstd(batch):
        raise UnsupportedCompressionType(
            f"Produce v{version} knows no zstd: v{codec.ZSTD_SINCE} is the first that does"
        )
    return batch


def _append(  # noqa: PLR0917
    connection: Connection,
    produced: Produced,
    hosted: HostedPartition,
    index: int,
    checked: Any,
    now_ms: int,
) -> None:
    if checked.is_transactional:
        raise InvalidTxnState("this node has no transaction coordinator")
    partition = hosted.partition
    info = partition.append(checked, now_ms, produced.acks)
    connection.dirty[partition] = None
    connection.node.metrics.produced(1, checked.record_count, checked.size_bytes)
    produced.appended(hosted, index, info)


def _refuse(produced: Produced, request: codec.ProduceRequest) -> None:
    """Answer every partition with what is wrong with the whole request."""
    if request.acks not in ACKS:
        code = error_codes.INVALID_REQUIRED_ACKS
        message = f"acks is -1, 0 or 1, not {request.acks}"
    else:
        code = error_codes.code_for(InvalidTxnState())
        message = "this node has no transaction coordinator"
    for name, partitions in request.topics:
        results = produced.topic(name)
        for data in partitions:
            results.append(codec.PartitionResult(data.partition, code, error_message=message))


def _check_in_thread(
    connection: Connection,
    produced: Produced,
    request: codec.ProduceRequest,
    frame: memoryview,
    version: int,
) -> None:
    """Check a large request's batches in the pool, append when back; the connection waits."""
    node = connection.node
    now_ms = node.now_ms()
    jobs: list[tuple[memoryview, Any] | KeptError] = []
    for name, partitions in request.topics:
        for data in partitions:
            try:
                hosted = find(connection, name, data.partition, version)
                jobs.append((_batch(frame, data, version), hosted.rules))
            except KeptError as error:
                jobs.append(error)
    connection.block()
    future = node.in_pool(_check_all, jobs, now_ms)

    def checked(finished: Any) -> None:
        failed = finished.exception()
        if failed is not None:
            # A bug of ours, or no memory: whoever waits for this answer must not wait for ever.
            log.exception("checking a batch failed", failed, peer=connection.peer)
            connection.abort()
            return
        if perf_counter() >= node.serve_until:
            node.look_up()
        outcomes = iter(finished.result())
        for name, partitions in request.topics:
            produced.topic(name)
            for data in partitions:
                outcome = next(outcomes)
                hosted = None
                try:
                    hosted = find(connection, name, data.partition, version)
                    if isinstance(outcome, KeptError):
                        raise outcome
                    _append(connection, produced, hosted, data.partition, outcome, now_ms)
                except KeptError as error:
                    produced.refused(data.partition, error, hosted)
        connection.unwritten.append(produced)
        write(connection)
        connection.unblock()

    future.add_done_callback(checked)


def _check_all(jobs: list[Any], now_ms: int) -> list[Any]:
    outcomes: list[Any] = []
    for job in jobs:
        if isinstance(job, KeptError):
            outcomes.append(job)
            continue
        try:
            outcomes.append(check(job[0], job[1], now_ms))
        except KeptError as error:
            outcomes.append(error)
    return outcomes
