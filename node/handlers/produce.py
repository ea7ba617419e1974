"""Produce: check each batch, append it to its partition's leader, answer when it counts.

Rule 37: the kernel checks a batch in one pass; large compressed ones are checked in a thread, and
the connection's later requests wait. Appends are staged; the connection writes them at the end of
its readiness event with one ``writev`` per partition, and only then do answers leave: acks=1 after
the write, acks=-1 when the high watermark passes, either after the fsync where ``flush.messages``
asks for it. acks=0 answers nothing, and an error then closes the connection (rule 41). Rule 40: no
transactions yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kept.node import error_codes
from kept.node.hot import produce as codec
from kept.node.logging import log
from kept.node.reply import Reply
from kept.storage.errors import (
    InvalidRecord,
    InvalidTxnState,
    KeptError,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from kept.storage.records import check

if TYPE_CHECKING:
    from kept.node.connection import Connection
    from kept.node.hosting import HostedPartition
    from kept.replication.partition import Partition
    from kept.storage.log import AppendInfo

IN_THREAD_BYTES: Final = 256 * 1024
"""Compressed batches above this are checked in a thread: inflating 1 MiB holds the loop for ms."""
ACKS: Final = (-1, 0, 1)
LONGEST_SHORT_NAME: Final = 126
"""Topic names whose length is one byte as a varint: what the short encoder writes."""
_CODEC_BYTE: Final = 22
"""Where in a batch the low byte of its attributes is."""


class Produced:
    """One request, from its append to its answer."""

    __slots__ = (
        "_appended",
        "_connection",
        "_correlation_id",
        "_reply",
        "_timer",
        "_topics",
        "_version",
        "_waits",
        "acks",
        "timeout_ms",
    )

    def __init__(  # noqa: PLR0917
        self,
        connection: Connection,
        version: int,
        correlation_id: int,
        acks: int,
        timeout_ms: int,
        reply: Reply | None = None,
    ) -> None:
        self._connection = connection
        self._version = version
        self._correlation_id = correlation_id
        self.acks = acks
        self.timeout_ms = timeout_ms
        self._topics: list[tuple[bytes, list[codec.PartitionResult]]] = []
        self._appended: list[tuple[HostedPartition, int, int, int]] = []
        """(partition, its end offset after the append, topic's place, result's place)"""
        self._waits = 0
        self._timer: Any = None
        self._reply = reply
        if reply is None and acks != 0:
            self._reply = connection.expect()

    def topic(self, name: bytes) -> list[codec.PartitionResult]:
        """Begin the results of a topic."""
        results: list[codec.PartitionResult] = []
        self._topics.append((name, results))
        return results

    def appended(self, hosted: HostedPartition, index: int, info: AppendInfo) -> None:
        """A batch was staged."""
        results = self._topics[-1][1]
        self._appended.append((hosted, info.last_offset + 1, len(self._topics) - 1, len(results)))
        results.append(
            codec.PartitionResult(
                index, 0, info.base_offset, info.log_append_time, info.log_start_offset
            )
        )

    def written(self, failed: dict[Partition, KeptError]) -> None:
        """The event's writes are done, except for ``failed`` ones: wait for what is still due."""
        # One for this loop: a waiter that is called at once must not answer for those to come.
        self._waits = 1
        for hosted, end_offset, topic, place in self._appended:
            partition = hosted.partition
            if failed and partition in failed:
                self._set_error(topic, place, failed[partition])
                continue
            if self.acks == -1 and partition.high_watermark < end_offset:
                self._waits += 1
                partition.when_committed(end_offset, self._waiter(topic, place))
            if hosted.sync and self.acks != 0:
                self._waits += 1
                hosted.flush(end_offset, self._waiter(topic, place))
        self._waits -= 1
        if self._waits == 0:
            self._answer()
        elif self._reply is not None:
            loop = self._connection.node.loop
            self._timer = loop.call_later(max(self.timeout_ms, 0) / 1000, self._expire)

    def _waiter(self, topic: int, place: int) -> Any:
        def done(error: BaseException | None) -> None:
            if error is not None:
                self._set_error(topic, place, error)
            self._waits -= 1
            if self._waits == 0:
                self._answer()

        return done

    def _set_error(self, topic: int, place: int, error: BaseException) -> None:
        results = self._topics[topic][1]
        results[place] = failure(results[place].partition, error)

    def _expire(self) -> None:
        """Not committed in the request's own time: say so for every partition that waited."""
        self._timer = None
        if self._waits > 0:
            self._waits = -1
            for _, _, topic, place in self._appended:
                results = self._topics[topic][1]
                if results[place].error_code == 0:
                    results[place] = codec.PartitionResult(
                        results[place].partition, error_codes.REQUEST_TIMED_OUT
                    )
            self._answer()

    def _answer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        connection = self._connection
        if self._reply is not None:
            frame = codec.encode(self._version, self._correlation_id, self._topics)
            connection.complete(self._reply, [frame])
            return
        for name, results in self._topics:
            for result in results:
                if result.error_code:
                    connection.abort(
                        "produce with acks=0 failed",
                        topic=name.decode("utf-8", "replace"),
                        partition=result.partition,
                        error_code=result.error_code,
                        error=result.error_message or "",
                    )
                    return


class ProducedOne(Reply):
    """One request of one partition, the common case: its own place in the order of responses.

    Anything but a plain success goes on as a :class:`Produced`.
    """

    __slots__ = ("_connection", "_correlation_id", "_hosted", "_info", "_request", "_version")

    def __init__(  # noqa: PLR0917
        self,
        connection: Connection,
        version: int,
        correlation_id: int,
        request: codec.ProduceRequest,
        hosted: HostedPartition,
        info: AppendInfo,
    ) -> None:
        self.segments = None
        self._connection = connection
        self._version = version
        self._correlation_id = correlation_id
        self._request = request
        self._hosted = hosted
        self._info = info

    def written(self, failed: dict[Partition, KeptError]) -> None:
        """As :meth:`Produced.written`."""
        hosted = self._hosted
        info = self._info
        request = self._request
        name, (data,) = request.topics[0]
        if (
            hosted.sync
            or failed
            or request.acks == 0
            or len(name) > LONGEST_SHORT_NAME
            or (request.acks == -1 and hosted.partition.high_watermark <= info.last_offset)
        ):
            general = Produced(
                self._connection,
                self._version,
                self._correlation_id,
                request.acks,
                request.timeout_ms,
                self if request.acks else None,
            )
            general.topic(name)
            general.appended(hosted, data.partition, info)
            general.written(failed)
            return
        frame = codec.encode_one(
            self._version,
            self._correlation_id,
            name,
            data.partition,
            info.base_offset,
            info.log_append_time,
            info.log_start_offset,
        )
        self._connection.complete(self, [frame])


def failure(index: int, error: BaseException) -> codec.PartitionResult:
    """The result of a batch that was refused."""
    code = error_codes.code_for(error)
    if code == error_codes.UNKNOWN_SERVER_ERROR:
        log.exception("produce failed", error)
    records = error.record_errors if isinstance(error, InvalidRecord) else ()
    return codec.PartitionResult(
        index, code, record_errors=records, error_message=error_codes.message_for(error)
    )


def handle(
    connection: Connection, version: int, correlation_id: int, frame: memoryview, position: int
) -> None:
    """Serve one Produce request, whose body starts at ``position`` of ``frame``."""
    request = codec.parse(frame, position, version)
    topics = request.topics
    if len(topics) == 1 and len(topics[0][1]) == 1 and request.transactional_id is None:
        name, (data,) = topics[0]
        size = data.end - data.start
        plain = size <= IN_THREAD_BYTES or not frame[data.start + _CODEC_BYTE] & 7
        if plain and data.start >= 0 and request.acks in ACKS:
            _handle_one(connection, version, correlation_id, frame, request)
            return
    produced = Produced(connection, version, correlation_id, request.acks, request.timeout_ms)
    if request.acks not in ACKS or request.transactional_id is not None:
        _refuse(produced, request)
        connection.unwritten.append(produced)
        return
    for _, partitions in request.topics:
        for data in partitions:
            if data.end - data.start > IN_THREAD_BYTES and frame[data.start + _CODEC_BYTE] & 7:
                _check_in_thread(connection, produced, request, frame, version)
                return
    now_ms = connection.node.now_ms()
    for name, partitions in request.topics:
        results = produced.topic(name)
        for data in partitions:
            try:
                hosted = find(connection, name, data.partition, version)
                checked = check(_batch(frame, data), hosted.rules, now_ms)
                _append(connection, produced, hosted, data.partition, checked, now_ms)
            except KeptError as error:
                results.append(failure(data.partition, error))
    connection.unwritten.append(produced)


def _handle_one(
    connection: Connection,
    version: int,
    correlation_id: int,
    frame: memoryview,
    request: codec.ProduceRequest,
) -> None:
    """A request of one plain batch."""
    name, (data,) = request.topics[0]
    node = connection.node
    now_ms = node.now_ms()
    try:
        hosted = find(connection, name, data.partition, version)
        checked = check(frame[data.start : data.end], hosted.rules, now_ms)
        if checked.is_transactional:
            raise InvalidTxnState("this node has no transaction coordinator")
        partition = hosted.partition
        info = partition.append(checked, now_ms, request.acks)
    except KeptError as error:
        failed = Produced(connection, version, correlation_id, request.acks, request.timeout_ms)
        failed.topic(name).append(failure(data.partition, error))
        node.metrics.refused()
        connection.unwritten.append(failed)
        return
    connection.dirty[partition] = None
    metrics = node.metrics
    metrics.produced_batches += 1
    metrics.records_in += checked.record_count
    metrics.bytes_in += checked.size_bytes
    produced = ProducedOne(connection, version, correlation_id, request, hosted, info)
    if request.acks:
        connection.expect_as(produced)
    connection.unwritten.append(produced)


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


def _batch(frame: memoryview, data: codec.PartitionData) -> memoryview:
    if data.start < 0:
        raise InvalidRecord("a Produce request needs records")
    return frame[data.start : data.end]


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
                jobs.append((_batch(frame, data), hosted.rules))
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
        outcomes = iter(finished.result())
        for name, partitions in request.topics:
            results = produced.topic(name)
            for data in partitions:
                outcome = next(outcomes)
                try:
                    if isinstance(outcome, KeptError):
                        raise outcome
                    hosted = find(connection, name, data.partition, version)
                    _append(connection, produced, hosted, data.partition, outcome, now_ms)
                except KeptError as error:
                    results.append(failure(data.partition, error))
        connection.unwritten.append(produced)
        node.write_dirty(connection)
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
