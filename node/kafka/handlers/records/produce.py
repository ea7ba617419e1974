"""Produce: check each batch, append it to its partition's leader, answer when it counts.

Rule 37: the kernel checks a batch in one pass; what is large, or inflates to much, is checked in a
thread (``batch_checks``), and the connection's later requests wait. Appends are staged; the
connection writes them at the end of its readiness event with one ``writev`` per partition, and only
then do answers go their way (``delayed_produce``). acks=0 answers nothing, and an error then closes
the connection (rule 41). Batches of transactions may have to wait for their coordinator
(``handlers.transactions.transactional_produce``).

:func:`handle_run` is the short way, for requests of one plain batch; :func:`handle` serves all.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Final

from kept.cluster.controller.topics import INTERNAL_TOPICS
from kept.cluster.security.acls import AclOperation, AclResourceType
from kept.node.kafka import api
from kept.node.kafka.codec import parse_produce
from kept.node.kafka.codec import produce as codec
from kept.node.kafka.handlers.records.batch_checks import BatchChecks, CheckResources, Job
from kept.node.kafka.handlers.records.delayed_produce import (
    DelayedProduce,
    DelayedProduceContext,
    DelayedProduceRun,
    write,
    write_staged,
)
from kept.node.kafka.handlers.transactions.transactional_produce import Verification
from kept.node.replicas.replica_table import no_topic
from kept.node.runtime import error_codes
from kept.node.runtime.logging import bugs
from kept.node.runtime.time_slices import IN_PLACE_STEPS, LOOP_BYTES, LOOP_TOTAL_BYTES, SlicedTask
from kept.node.security.access import AUTHORIZATION_MESSAGES
from kept.steps import Steps
from kept.storage.errors import (
    InflatesBeyondLimit,
    InvalidRecord,
    InvalidRequest,
    InvalidTopicException,
    KeptError,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
    UnknownTopicId,
    UnsupportedCompressionType,
)
from kept.storage.records import check

if TYPE_CHECKING:
    from kept.node.kafka.connection import Connection
    from kept.node.kafka.handlers.transactions.transactional_produce import TransactionalBatches
    from kept.node.metadata.serving_lease import ServingLease
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.counters import Counters
    from kept.node.security.session import Grants, Session
    from kept.replication.partition import Partition
    from kept.storage.producers.verification import VerificationGuard
    from kept.storage.records import CheckedBatch

    Outcome = CheckedBatch | KeptError
    """What the check of a batch gave."""

ENTRY_BYTES: Final = 2
"""No entry of a request takes less."""
ACKS: Final = (-1, 0, 1)
NOT_ALLOWED: Final = (TopicAuthorizationFailed, TransactionalIdAuthorizationFailed)
"""Of such a batch nothing else is said, also not whether its partition is here."""
_CODEC_BYTE: Final = 22
"""Where in a batch the low byte of its attributes is."""


def check_entries(
    connection: Connection, key: int, version: int, frame: memoryview, position: int
) -> None:
    """Raises InvalidRequest for a request with more entries than ``kept.request.max.entries``, of
    which a short frame cannot have so many.
    """
    most = connection.listener.max_entries
    if len(frame) - position > ENTRY_BYTES * most:
        from kept.client.protocol import messages as protocol

        try:
            protocol.check_request(key, version, frame, position, most)
        except InvalidRequest as error:
            raise InvalidRequest(f"{error} (kept.request.max.entries)") from None


class ProduceHandler:
    """Serves Produce requests."""

    def __init__(
        self,
        table: ReplicaTable,
        lease: ServingLease,
        counters: Counters,
        checks: CheckResources,
        delayed: DelayedProduceContext,
        *,
        transactional: TransactionalBatches,
    ) -> None:
        self._runtime = checks.runtime
        self._table = table
        self._lease = lease
        self._counters = counters
        self._checks = checks
        self._delayed = delayed
        self._transactional = transactional

    def handle(
        self,
        connection: Connection,
        version: int,
        correlation_id: int,
        frame: memoryview,
        position: int,
    ) -> None:
        """Serve one Produce request, whose body starts at ``position`` of ``frame``."""
        check_entries(connection, api.PRODUCE, version, frame, position)
        request = parse_produce(frame, position, version)
        size = len(frame) - position
        if size > connection.listener.max_decoded_bytes:
            records = (data.end - data.start for _, parts in request.topics for data in parts)
            connection.listener.check_decoded(size - sum(records))
        produced = DelayedProduce(
            self._delayed, connection, version, correlation_id, request.acks, request.timeout_ms
        )
        if request.acks not in ACKS:
            _refuse(produced, request)
            connection.unwritten.append(produced)
            return
        outcomes: list[Outcome] = []
        for _, partitions in request.topics:
            for data in partitions:
                if (
                    data.end - data.start > codec.IN_THREAD_BYTES
                    and frame[data.start + _CODEC_BYTE] & 7
                ):
                    self._check_in_thread(connection, produced, request, frame, outcomes)
                    return
        failed: dict[Partition, KeptError] = {}

        def finish(unfinished: int | Verification | None) -> None:
            if unfinished is None:
                _finish(connection, produced, failed)
            elif isinstance(unfinished, Verification):
                self._append_verified(connection, produced, request, outcomes, unfinished)
            else:
                self._check_in_thread(connection, produced, request, frame, outcomes, unfinished)

        def done(finished: SlicedTask[int | Verification | None]) -> None:
            error = finished.failure()
            if error is None:
                finish(finished.result())
            else:
                _give_up(connection, error)

        work = self._runtime.slices.run(
            self._check_and_append(connection, produced, request, frame, outcomes, failed)
        )
        if work is None:
            connection.unwritten.append(produced)
            return
        # Later requests of this connection wait; it may be gone by the end: what was read counts.
        connection.block()
        if isinstance(work, SlicedTask):
            work.add_done_callback(done)
        else:
            finish(work)

    def _check_and_append(  # noqa: PLR0917
        self,
        connection: Connection,
        produced: DelayedProduce,
        request: codec.ProduceRequest,
        frame: memoryview,
        outcomes: list[Outcome],
        failed: dict[Partition, KeptError],
    ) -> Steps[int | Verification | None]:
        """Check the batches here as far as that may be done on the loop, into ``outcomes``, and
        append them if these are all. Gives None then; else the bytes that the next one needs, as
        far as it says, or what is to be waited for.
        """
        walked = 0
        now_ms = self._runtime.now_ms()
        for name, partitions in request.topics:
            for data in partitions:
                if walked > LOOP_TOTAL_BYTES:
                    return 0
                try:
                    hosted = self._find(connection, name, data.partition, produced.version)
                    batch = _batch(frame, data, produced.version, hosted)
                    checked = check(batch, hosted.loop_rules, now_ms)
                except InflatesBeyondLimit as error:
                    return error.told_bytes or 0
                except KeptError as error:
                    outcomes.append(error.without_frames())  # which would hold this frame
                else:
                    walked += checked.area_bytes
                    outcomes.append(checked)
                yield
        verification = self._verify(connection, request, produced.version, outcomes)
        if verification is not None:
            if not verification.is_known:
                return verification
            verification.refuse(outcomes)
        yield from self._append_all(connection, produced, request, outcomes, failed, verification)
        return None

    def _find(self, connection: Connection, name: bytes, index: int, version: int) -> LocalReplica:
        """The partition that a request names. Raises as :func:`find`, and TopicAuthorizationFailed
        where the connection's session may not write the topic.
        """
        session = connection.session
        if name not in session.writable:
            may = AclOperation.WRITE
            grant(self._table, session, session.writable, may, name, version)
        return find(self._table, name, index, version)

    def _verify(
        self,
        connection: Connection,
        request: codec.ProduceRequest,
        version: int,
        outcomes: list[Outcome],
    ) -> Verification | None:
        """What the batches of transactions among ``outcomes`` need; None: there are none, or all
        are refused, because the session may not write by the transactional id.
        """
        if not any(
            not isinstance(outcome, KeptError) and outcome.is_transactional for outcome in outcomes
        ):
            return None
        transactional_id = (request.transactional_id or b"").decode("utf-8", "replace")
        if request.transactional_id is not None and not connection.session.may(
            AclOperation.WRITE, AclResourceType.TRANSACTIONAL_ID, transactional_id, api="produce"
        ):
            refused = TransactionalIdAuthorizationFailed(transactional_id)
            outcomes[:] = [refused] * len(outcomes)
            return None
        batches = {}
        place = 0
        for name, partitions in request.topics:
            for data in partitions:
                outcome = outcomes[place]
                if not isinstance(outcome, KeptError) and outcome.is_transactional:
                    try:
                        hosted = find(self._table, name, data.partition, version)
                    except KeptError as error:  # it may have gone since it was checked
                        outcomes[place] = error.without_frames()
                    else:
                        batches[place] = hosted, outcome
                place += 1
        return self._transactional.begin(request.transactional_id, version, batches, outcomes)

    def _append_verified(
        self,
        connection: Connection,
        produced: DelayedProduce,
        request: codec.ProduceRequest,
        outcomes: list[Outcome],
        verification: Verification | None,
    ) -> None:
        """Append batches that were checked, once their coordinator has answered; the connection
        waits.

        They are appended in a turn of their own: the answer may come within the Fetch that commits
        it, and a Fetch that reads misses what is appended meanwhile.
        """
        failed: dict[Partition, KeptError] = {}

        def append() -> None:
            try:
                if verification is not None:
                    verification.refuse(outcomes)
                if perf_counter() >= self._lease.until:
                    self._lease.check()
                work = self._runtime.slices.run(
                    self._append_all(connection, produced, request, outcomes, failed, verification)
                )
                if isinstance(work, SlicedTask):
                    work.add_done_callback(appended)
                else:
                    _finish(connection, produced, failed)
            except Exception as error:  # noqa: BLE001
                _give_up(connection, error)

        def answered(_: object) -> None:
            self._runtime.loop.call_soon(append)

        def appended(finished: SlicedTask[None]) -> None:
            error = finished.failure()
            if error is None:
                _finish(connection, produced, failed)
            else:
                _give_up(connection, error)

        if verification is not None and verification.response is not None:
            verification.response.add_done_callback(answered)
        else:
            append()

    def _append_all(  # noqa: PLR0917
        self,
        connection: Connection,
        produced: DelayedProduce,
        request: codec.ProduceRequest,
        outcomes: list[Outcome],
        failed: dict[Partition, KeptError],
        verification: Verification | None,
    ) -> Steps[None]:
        """Append the batches of a request, one a step. Where it goes on in a later turn of the
        loop, what was staged is written first, as at the end of every readiness event.
        """
        now_ms = self._runtime.now_ms()
        guards = {} if verification is None else verification.guards
        done = 0
        for name, partitions in request.topics:
            produced.topic(name)
            for data in partitions:
                outcome, hosted = outcomes[done], None
                if not isinstance(outcome, NOT_ALLOWED):
                    try:
                        hosted = find(self._table, name, data.partition, produced.version)
                    except KeptError as error:  # it may have gone since it was checked
                        outcome = error.without_frames()
                guard = guards.get(done)
                self._append(connection, produced, hosted, data.partition, outcome, guard, now_ms)
                done += 1
                if done >= IN_PLACE_STEPS:
                    write_staged(connection, failed)
                yield
                if done >= IN_PLACE_STEPS and perf_counter() >= self._lease.until:
                    self._lease.check()

    def handle_run(
        self,
        connection: Connection,
        requests: list[codec.PlainRequest],
        buffer: memoryview,
        now_ms: int,
    ) -> int:
        """Append the one plain batch of each request, in order; how many were served.

        The first of another kind, or all after one that closed the connection, are not.
        """
        table, writable = self._table, connection.session.writable
        dirty, run = connection.dirty, connection.run
        served = appended = records = size = walked = 0
        allowed = None
        for request in requests:
            version, _, acks, timeout_ms, name, index, start, end = request
            if name != allowed:
                if name not in writable:
                    break  # the long way asks
                allowed = name
            try:
                topic = table.by_id[name] if version >= codec.TOPIC_IDS else table.by_name[name]
                hosted = topic.partitions[index]
            except KeyError:
                break
            partition = hosted.partition
            served += 1
            try:
                checked = check(buffer[start:end], hosted.loop_rules, now_ms)
                info = partition.append(checked, now_ms, acks)
            except InflatesBeyondLimit:
                served -= 1  # perhaps: the long way finds out, in a thread
                break
            except KeptError as error:
                self._refuse_plain(connection, request, hosted, error)
                run = None
                if connection.blocked:
                    break
                continue
            dirty[partition] = None
            appended += 1
            records += checked.record_count
            size += checked.size_bytes
            if run is None or run.acks != acks or run.timeout_ms != timeout_ms:
                run = connection.open_run(
                    DelayedProduceRun(self._delayed, connection, acks, timeout_ms)
                )
            run.entries.append((request, hosted, info))
            if hosted.sync:
                run.sync = True
            walked += checked.area_bytes
            if walked > LOOP_BYTES:
                break
        if connection.throttle_ms and run is not None:
            run.throttle_ms = connection.throttle_ms  # of the only one, the last there
        self._counters.produced(appended, records, size)
        return served

    @staticmethod
    def write(connection: Connection) -> None:
        """End of a readiness event: write what was staged, then let responses go on their way."""
        write(connection)

    def _refuse_plain(
        self,
        connection: Connection,
        request: codec.PlainRequest,
        hosted: LocalReplica,
        error: KeptError,
    ) -> None:
        version, correlation_id, acks, timeout_ms, topic, partition, _, _ = request
        failed = DelayedProduce(
            self._delayed, connection, version, correlation_id, acks, timeout_ms
        )
        failed.topic(topic)
        failed.refused(partition, error, hosted)
        self._counters.refused()
        connection.unwritten.append(failed)

    def _append(  # noqa: PLR0917
        self,
        connection: Connection,
        produced: DelayedProduce,
        hosted: LocalReplica | None,
        index: int,
        checked: CheckedBatch | KeptError,
        guard: VerificationGuard | None,
        now_ms: int,
    ) -> None:
        """Stage a batch that passed its check, or note why it is refused."""
        if isinstance(checked, KeptError):
            produced.refused(index, checked, hosted)
            return
        assert hosted is not None
        partition = hosted.partition
        try:
            info = partition.append(checked, now_ms, produced.acks, guard)
        except KeptError as error:
            produced.refused(index, error, hosted)
            return
        connection.dirty[partition] = None
        self._counters.produced(1, checked.record_count, checked.size_bytes)
        produced.appended(hosted, index, info)

    def _jobs(
        self,
        connection: Connection,
        request: codec.ProduceRequest,
        frame: memoryview,
        version: int,
    ) -> list[Job | KeptError]:
        """Every batch of a request and where it goes, or why it goes nowhere."""
        jobs: list[Job | KeptError] = []
        for name, partitions in request.topics:
            for data in partitions:
                try:
                    hosted = self._find(connection, name, data.partition, version)
                    jobs.append((_batch(frame, data, version, hosted), hosted))
                except KeptError as error:
                    jobs.append(error.without_frames())
        return jobs

    def _check_in_thread(  # noqa: PLR0917
        self,
        connection: Connection,
        produced: DelayedProduce,
        request: codec.ProduceRequest,
        frame: memoryview,
        outcomes: list[Outcome],
        needed_bytes: int = 0,
    ) -> None:
        """Check the batches behind ``outcomes`` in the pool, append all when back; the connection
        waits.
        """
        connection.block()

        def checked(outcomes: list[Outcome], error: BaseException | None) -> None:
            if error is not None:
                _give_up(connection, error)
                return
            verification = self._verify(connection, request, produced.version, outcomes)
            self._append_verified(connection, produced, request, outcomes, verification)

        jobs = self._jobs(connection, request, frame, produced.version)
        BatchChecks(self._checks, jobs, self._runtime.now_ms(), outcomes, needed_bytes).start(
            checked
        )


def grant(  # noqa: PLR0917
    table: ReplicaTable,
    session: Session,
    granted: Grants,
    operation: AclOperation,
    name: bytes,
    version: int,
) -> None:
    """Ask whether ``session`` may do ``operation`` with a topic as it is named on the wire; if so,
    and if there is such a topic, that is remembered in ``granted``.

    Raises TopicAuthorizationFailed. An id that no topic has is not asked about.
    """
    by_id = version >= codec.TOPIC_IDS
    topic = table.by_id.get(name) if by_id else table.by_name.get(name)
    if topic is None and by_id:
        return
    text = name.decode("utf-8", "replace") if topic is None else topic.name
    api = "produce" if operation is AclOperation.WRITE else "fetch"
    if not session.may(operation, AclResourceType.TOPIC, text, api=api):
        raise TopicAuthorizationFailed(
            AUTHORIZATION_MESSAGES[error_codes.TOPIC_AUTHORIZATION_FAILED]
        )
    if topic is not None:
        granted.add(name)


def find(table: ReplicaTable, name: bytes, index: int, version: int) -> LocalReplica:
    """The partition that a request names; raises UnknownTopicOrPartition, UnknownTopicId..."""
    if version >= codec.TOPIC_IDS:
        topic = table.by_id.get(name)
        if topic is None:
            raise UnknownTopicId("no topic has this id")
    else:
        topic = table.by_name.get(name)
        if topic is None:
            raise no_topic(name.decode("utf-8", "replace"))
    hosted = topic.partitions.get(index)
    if hosted is None:
        raise topic.not_served_error(index)
    return hosted


def _batch(
    frame: memoryview, data: codec.PartitionData, version: int, hosted: LocalReplica
) -> memoryview:
    topic = hosted.partition.topic_partition.topic
    if topic in INTERNAL_TOPICS:
        raise InvalidTopicException(f"{topic} is internal: only its coordinators write to it")
    if data.start < 0 or data.start == data.end:
        raise InvalidRecord("a Produce request needs records")
    batch = frame[data.start : data.end]
    if version < codec.ZSTD_SINCE and codec.is_zstd(batch):
        raise UnsupportedCompressionType(
            f"Produce v{version} knows no zstd: v{codec.ZSTD_SINCE} is the first that does"
        )
    return batch


def _refuse(produced: DelayedProduce, request: codec.ProduceRequest) -> None:
    """Answer every partition with what is wrong with the whole request."""
    code = error_codes.INVALID_REQUIRED_ACKS
    message = f"acks is -1, 0 or 1, not {request.acks}"
    for name, partitions in request.topics:
        results = produced.topic(name)
        for data in partitions:
            results.append(codec.PartitionResult(data.partition, code, error_message=message))


def _finish(
    connection: Connection, produced: DelayedProduce, failed: dict[Partition, KeptError]
) -> None:
    """All that could be appended is staged: write, answer, and serve what waited."""
    connection.unwritten.append(produced)
    write(connection, failed)
    connection.unblock()


def _give_up(connection: Connection, error: BaseException) -> None:
    """A bug of ours, or no memory: whoever waits for this answer must not wait for ever."""
    bugs.report("produce failed", error, peer=connection.peer)
    connection.abort()
    connection.unblock()
