"""The state machine of one partition of ``__transaction_state``: its transactional ids.

A :class:`~kept.node.coordinator.common.core.ShardCore`. A transition is *pending* from the moment
it is decided until its record is committed; only then does it count, and only then do responses and
markers leave. One that the log refuses is undone. A transaction whose end is committed stays
pending, as it were, until all of its markers are written and its completion is committed.

Where we differ from Kafka's ``TransactionStateManager`` and ``TransactionCoordinator``:

* An append that is late stays pending until it is committed, or this node leads no more: Kafka
  forgets it, though the log may have it, and decides anew.
* What follows a transaction waits until its completion is in the log, not until that is committed:
  how it ended is committed before, and what is decided now goes behind it. So the completion is
  written with the beginning of the next transaction, or a moment later by itself.
* A transaction times out by a clock that never jumps, from the commit of its first record on; what
  a stall took is given back.
* Requests of a TV1 client that come over a connection older than its newest are stale, and dropped:
  they would end, or begin, a later transaction of the same epoch (KAFKA-17754).
* Partitions that join while a transition is pending, as those of the next transaction do when the
  markers of the one before are on their way, wait for its end, up to
  ``add.partitions.to.txn.retry.backoff.max.ms``. Kafka lets only brokers wait; clients come again
  after their back-off.
* What ends a producer, and what is said to be done already, is said once it is proven that this
  node still coordinates the id: Kafka answers from memory, also where another node has led since.
* No event and no timer walks all ids: those without a transaction may be a million.

Long because all events of one state are here; what they decide is in :mod:`.requests`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from kio.schema.errors import ErrorCode
from msgspec import Struct

from kept.node.coordinator.common.events import (
    AppendCommitted,
    AppendRecords,
    AppendRejected,
    AppendStaged,
    AppendTimedOut,
    EndMarker,
    Response,
)
from kept.node.coordinator.common.timers import Timers
from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions import requests as rq
from kept.node.coordinator.transactions import transaction as txn
from kept.node.coordinator.transactions.connection_order import ConnectionOrder
from kept.node.coordinator.transactions.records import (
    TransactionMetadata,
    TransactionRecord,
)
from kept.node.coordinator.transactions.transactional_id import (
    PARTITIONS_SHARE,
    IdMemory,
    PendingTransition,
    TransactionalId,
    TransactionalIds,
    size_bytes,
)
from kept.node.runtime.counters import REQUEST_BUCKETS
from kept.node.runtime.histogram import Histogram
from kept.steps import Steps, clear_in_steps
from kept.storage.errors import InvariantViolation
from kept.storage.types import MAX_INT32, NO_PRODUCER_ID, TopicPartition

TOMBSTONES_PER_APPEND: Final = 500
IDS_PER_TICK: Final = 1000
"""How many ids are checked for expiry at once: a million hold up no request."""
ABORTS_PER_TICK: Final = 100
"""How many transactions that are open for too long are aborted at once: each takes 50 us."""
NEXT_IDS_MS: Final = 5
"""Until the next so many are."""
NOISE_INTERVAL_MS: Final = 60_000
"""At most one line about requests refused for memory in this time."""
COMPLETION_RETRY_MS: Final = 100
"""Until a completion that the log refused is tried again."""


# Timers.


class AbortTimedOut(Struct, frozen=True):
    """Look for transactions that are open for too long."""


class RemoveExpired(Struct, frozen=True):
    """Look for ids that nobody has used for too long."""


class ParkedTooLong(Struct, frozen=True):
    """A parked request gets its refusal."""

    transactional_id: str
    request: int


class RetryCompletion(Struct, frozen=True):
    """Append the completion of a transaction again."""

    transactional_id: str


class Timeout(Struct, frozen=True):
    """A transaction that timed out waits for a fresh producer id."""

    transactional_id: str


Timer = AbortTimedOut | RemoveExpired | ParkedTooLong | RetryCompletion

ABORT_KEY: Final = ("abort-timed-out",)
EXPIRE_KEY: Final = ("remove-expired",)


class TransactionCore:
    """The ids of partition ``state_partition``; markers carry ``coordinator_epoch``, in which this
    node leads it. ``connections`` are those of this partition on this node, of earlier epochs, too;
    ``end_seconds`` gets how long each transaction took from its decision to its end; ``memory``
    counts the ids of other partitions, too.
    """

    def __init__(
        self,
        settings: ev.TransactionSettings,
        state_partition: int,
        coordinator_epoch: int,
        connections: ConnectionOrder | None = None,
        end_seconds: Histogram | None = None,
        *,
        memory: IdMemory | None = None,
    ) -> None:
        self.settings = settings
        self.state_partition = state_partition
        self.coordinator_epoch = coordinator_epoch
        self.now_ms = 0
        """When the present event happens."""
        self.wall_offset_ms = 0
        self.ids = TransactionalIds()
        self.timers: Timers[Timer] = Timers()
        self._memory = IdMemory() if memory is None else memory
        self._next_noise_ms = 0
        self._unfinished: dict[str, TransactionalId] = {}
        """Those of the ids whose transaction is open or ends."""
        self._unchecked: Iterator[str] | None = None
        """Ids that are still to be checked for expiry, while that goes on."""
        self._overdue: Iterator[str] | None = None
        """Ids whose transaction is still to be aborted, while that goes on."""
        self.pending: dict[int, PendingTransition] = {}
        self.counts: Counter[str] = Counter()
        """Transactions ``started``, ``committed``, ``aborted``, ``timed_out`` since the load."""
        self._connections = ConnectionOrder() if connections is None else connections
        self._end_seconds = Histogram(REQUEST_BUCKETS) if end_seconds is None else end_seconds
        self._ending: dict[tuple[int, int], str] = {}
        """Ids whose transaction ends, by producer id and epoch of the marker."""
        self._completing: dict[str, int] = {}
        """Ids with a completion that is in the log and not committed yet, and its append."""
        self._awaiting_producer_id: deque[ev.ClientRequest | Timeout] = deque()
        self._fresh_producer_id: int | None = None
        self._given_up: tuple[dict[Any, Any], ...] = ()
        self._released_ids = TransactionalIds()
        self._last_append = 0
        self._effects: list[ev.Effect] = []

    # Loading.

    def replay(self, record: TransactionRecord) -> None:
        """Apply one committed record of the log."""
        transactional_id, metadata = record.transactional_id, record.metadata
        self._unfinished.pop(transactional_id, None)
        before = self.ids.get(transactional_id)
        if before is not None:
            self._count(transactional_id, before, None)
        if metadata is None:
            self.ids.pop(transactional_id, None)
            return
        held = TransactionalId(metadata)
        self._count(transactional_id, held, metadata)
        self.ids[transactional_id] = held
        if _is_unfinished(metadata):
            self._unfinished[transactional_id] = held

    def loaded(self, now_ms: int) -> Steps[tuple[ev.Effect, ...]]:
        """All records are replayed: timeouts begin, and transactions that were ending go on."""
        self.now_ms = now_ms
        yield from self._connections.retain(self.ids)
        for transactional_id, held in self._unfinished.items():
            metadata = held.committed
            if metadata is None:
                continue
            yield
            if metadata.state is txn.ONGOING and metadata.timeout_ms != MAX_INT32:
                open_ms = max(0, self.wall_ms - metadata.start_ms)
                remaining_ms = metadata.timeout_ms - open_ms
                least_ms = self.settings.abort_timed_out_interval_ms
                held.deadline_ms = now_ms + max(remaining_ms, least_ms)
            elif metadata.state.is_prepared:
                self._write_markers(transactional_id, held, metadata)
        self._schedule(ABORT_KEY)
        self._schedule(EXPIRE_KEY)
        return self._drain_effects()

    def unload(self) -> tuple[ev.Effect, ...]:
        """Another node leads the partition now: whoever waits gets NOT_COORDINATOR."""
        waiting = [p.request for p in self.pending.values() if p.request is not None]
        waiting += [e for held in self._pending_ids() for e in held.parked]
        waiting += [e for e in self._awaiting_producer_id if not isinstance(e, Timeout)]
        for event in waiting:
            self._respond_failed(event, ErrorCode.not_coordinator)
        self.pending.clear()
        self._awaiting_producer_id.clear()
        self._given_up = self._unfinished, self._ending, self._completing
        self._unfinished, self._ending, self._completing = {}, {}, {}
        self._released_ids, self.ids = self.ids, TransactionalIds()
        return self._drain_effects()

    def _pending_ids(self) -> Iterator[TransactionalId]:
        """Those that may have parked requests."""
        changing = (name for pending in self.pending.values() for name in pending.transitions)
        for name in dict.fromkeys((*self._unfinished, *changing)):
            if name in self.ids:
                yield self.ids[name]

    def release(self) -> Steps[None]:
        """See :meth:`.core.ShardCore.release`."""
        given_up, self._given_up = self._given_up, ()
        ids, self._released_ids = self._released_ids, TransactionalIds()
        self._unchecked = self._overdue = None
        yield from self.timers.release()
        for table in given_up:
            yield from clear_in_steps(table)
        yield from ids.release(self._memory)

    def restart_timeouts(self, now_ms: int) -> tuple[ev.Effect, ...]:
        """This process did not run for a while: open transactions get the time back."""
        due_ms = self.timers.next_deadline_ms
        ran_ms = self.now_ms if due_ms is None else min(self.now_ms, due_ms)
        self.now_ms = now_ms
        for held in self._unfinished.values():
            if held.deadline_ms is not None:
                held.deadline_ms += max(0, now_ms - ran_ms)
        return ()

    # Events.

    def step(self, event: ev.Event, now_ms: int) -> tuple[ev.Effect, ...]:
        """Handle an event; the effects, in the order in which to carry them out."""
        self.now_ms = now_ms
        match event:
            case AppendStaged():
                self._append_staged(event)
            case AppendCommitted():
                self._append_committed(event)
            case AppendRejected():
                self._append_rejected(event)
            case AppendTimedOut():
                self._append_timed_out(event)
            case ev.MarkersWritten():
                self._markers_written(event)
            case ev.ProducerIdAllocated():
                self._producer_id_drawn(event)
            case ev.ProducerIdAllocationFailed():
                self._producer_id_not_drawn(event)
            case _:
                self._request(event)
        return self._drain_effects()

    def tick(self, now_ms: int) -> tuple[ev.Effect, ...]:
        """Fire the timers that are due."""
        self.now_ms = now_ms
        while (timer := self.timers.pop_due(now_ms)) is not None:
            match timer:
                case AbortTimedOut():
                    self._abort_timed_out()
                case RemoveExpired():
                    self._remove_expired()
                case ParkedTooLong():
                    held = self.ids[timer.transactional_id]
                    (event,) = (e for e in held.parked if e.request == timer.request)
                    held.parked = tuple(e for e in held.parked if e is not event)
                    self._respond_failed(event, rq.CONCURRENT)
                case RetryCompletion():
                    held = self.ids[timer.transactional_id]
                    self._complete_if_written(timer.transactional_id, held)
        return self._drain_effects()

    @property
    def next_deadline_ms(self) -> int | None:
        """When to call :meth:`tick` next."""
        return self.timers.next_deadline_ms

    @property
    def wall_ms(self) -> int:
        """The wall clock at ``now_ms``."""
        return self.now_ms + self.wall_offset_ms

    # Requests.

    def _request(self, event: ev.ClientRequest) -> None:
        refused = rq.refuse_malformed(event, self.settings.transaction_max_timeout_ms)
        if refused is not None:
            self._respond_failed(event, refused.error)
            return
        held = self.ids.get(event.transactional_id) or TransactionalId()
        patience_ms = self.settings.add_partitions_retry_backoff_max_ms
        if isinstance(event, ev.VerifyPartitions):
            verified = rq.decide_verify(event, held.committed)
            if verified.is_yes:
                self._respond(event.request, verified)
            else:
                self._respond_if_proven(event, verified)
        elif self._is_stale(event, held):
            self._respond(event.request, ev.StaleConnection())
        elif (
            isinstance(event, ev.AddPartitions) and patience_ms > 0 and self._must_wait(event, held)
        ):
            key = _parked_key(event.request)
            deadline_ms = self.now_ms + patience_ms
            held.parked += (event,)
            self.timers.set(key, deadline_ms, ParkedTooLong(event.transactional_id, event.request))
        else:
            self._decide(event, held)

    def _decide(
        self,
        event: ev.Change,
        held: TransactionalId,
    ) -> None:
        decision = self._decision(event, held)
        if isinstance(decision, rq.Transition) and not self._admits(event, held, decision.metadata):
            self._respond_failed(event, ErrorCode.coordinator_not_available)
        elif isinstance(decision, rq.Transition):
            self._use_producer_id(decision.metadata)
            self._append(
                {event.transactional_id: decision.metadata},
                event,
                _result(event, decision.metadata, decision.error),
            )
        elif isinstance(decision, rq.ProducerIdNeeded):
            self._awaiting_producer_id.append(event)
            self._effects.append(ev.AllocateProducerId())
        elif isinstance(decision, rq.Refused) and decision.error in rq.FINAL:
            self._respond_if_proven(event, ev.failed(event, decision.error))
        elif isinstance(decision, rq.Refused):
            self._respond_failed(event, decision.error)
        elif (newest := self._newest(event.transactional_id, held)) is not None:
            self._respond_if_proven(event, _result(event, newest, ev.NO_ERROR))

    def _decision(
        self,
        event: ev.Change,
        held: TransactionalId,
    ) -> rq.Decision:
        pending, now_ms = self._must_wait(event, held), self.wall_ms
        newest = self._newest(event.transactional_id, held)
        if isinstance(event, ev.AddPartitions):
            return rq.decide_add(event, newest, pending=pending, now_ms=now_ms)
        fresh = self._fresh_producer_id
        if isinstance(event, ev.EndTransaction):
            return rq.decide_end(
                event, newest, pending=pending, fresh_producer_id=fresh, now_ms=now_ms
            )
        return rq.decide_init(
            event,
            newest,
            pending=pending,
            fresh_producer_id=fresh,
            server_version=self.settings.transaction_version,
            now_ms=now_ms,
        )

    def _is_stale(
        self,
        event: ev.Change,
        held: TransactionalId,
    ) -> bool:
        """Whether its producer has come again over a newer connection than this request came."""
        if isinstance(event, ev.InitProducerId) or event.connection is None:
            return False
        producer = (event.producer_id, event.epoch)
        metadata = held.committed
        if metadata is None or producer != (metadata.producer_id, metadata.epoch):
            return False
        stale = self._connections.is_stale(event.transactional_id, producer, event.connection)
        return stale and self.settings.closes_stale_connections

    def _must_wait(self, event: ev.Change, held: TransactionalId) -> bool:
        """A transition is pending, and no completion that another one may be put behind."""
        completion = self._completing.get(event.transactional_id)
        return held.is_pending if completion is None else held.pending != completion

    def _newest(self, transactional_id: str, held: TransactionalId) -> TransactionMetadata | None:
        """What the next transition is decided on: what is committed, or its completion."""
        completion = self._completing.get(transactional_id)
        if completion is None:
            return held.committed
        return self.pending[completion].transitions[transactional_id]

    def _unpark(self, held: TransactionalId) -> None:
        """Decide what was parked, as far as nothing is pending again."""
        while held.parked and not self._must_wait(held.parked[0], held):
            event, *rest = held.parked
            held.parked = tuple(rest)
            self.timers.cancel(_parked_key(event.request))
            self._request(event)

    # Memory.

    def _admits(
        self, event: ev.Change, held: TransactionalId, metadata: TransactionMetadata
    ) -> bool:
        """Whether there is room for a new id, or for more partitions. Kafka has no limit."""
        limit_bytes = self.settings.ids_max_bytes
        if isinstance(event, ev.AddPartitions):
            limit_bytes += limit_bytes // PARTITIONS_SHARE
        elif held.committed is not None:
            return True
        name = event.transactional_id
        more_bytes = size_bytes(name, len(metadata.partitions)) - size_bytes(name, held.counted)
        admits = more_bytes <= 0 or self._memory.used_bytes + more_bytes <= limit_bytes
        if not admits and self.now_ms >= self._next_noise_ms:
            self._next_noise_ms = self.now_ms + NOISE_INTERVAL_MS
            text = "refused: kept.transactional.ids.max.bytes is reached"
            self._effects.append(ev.NoteTransaction(event.transactional_id, text))
        return admits

    def _count(
        self, transactional_id: str, held: TransactionalId, metadata: TransactionMetadata | None
    ) -> None:
        before_bytes = size_bytes(transactional_id, held.counted)
        held.counted = -1 if metadata is None else len(metadata.partitions)
        self._memory.used_bytes += size_bytes(transactional_id, held.counted) - before_bytes

    # Fresh producer ids.

    def _use_producer_id(self, metadata: TransactionMetadata) -> None:
        if self._fresh_producer_id in (metadata.producer_id, metadata.next_producer_id):
            self._fresh_producer_id = None

    def _producer_id_drawn(self, event: ev.ProducerIdAllocated) -> None:
        self._fresh_producer_id = event.producer_id
        if self._awaiting_producer_id:
            waiting = self._awaiting_producer_id.popleft()
            if isinstance(waiting, Timeout):
                self._fence_timed_out(waiting.transactional_id)
            else:
                self._request(waiting)

    def _producer_id_not_drawn(self, event: ev.ProducerIdAllocationFailed) -> None:
        if self._awaiting_producer_id:
            waiting = self._awaiting_producer_id.popleft()
            if not isinstance(waiting, Timeout):
                self._respond_failed(waiting, event.error)

    # Appends.

    def _append(
        self,
        changes: Mapping[str, TransactionMetadata | None],
        request: ev.ClientRequest | None = None,
        result: Any = None,
        *,
        completes: bool = False,
    ) -> None:
        """Emit an append; the changes are pending until it is committed. ``completes``: it ends a
        transaction all of whose markers are written.
        """
        self._last_append += 1
        version = 1 if self.settings.transaction_version >= 1 else 0
        for transactional_id, metadata in changes.items():
            held = self.ids.hold(transactional_id)
            if held.pending != self._completing.get(transactional_id):
                raise InvariantViolation(f"{transactional_id!r} has two pending transitions")
            txn.check_transition(self._newest(transactional_id, held), metadata)
            held.pending = self._last_append
            self._count(transactional_id, held, metadata or held.committed)
        self.pending[self._last_append] = PendingTransition(changes, request, result, completes)
        records = tuple(TransactionRecord(i, m, version) for i, m in changes.items())
        self._effects.append(
            AppendRecords(self._last_append, records, atomic=len(records) == 1, lazy=completes)
        )

    def _append_staged(self, event: AppendStaged) -> None:
        """A completion is in the log: nothing but the loss of the leadership undoes it, so the next
        transaction may begin behind it.
        """
        pending = self.pending[event.append]
        if pending.completes:
            (transactional_id,) = pending.transitions
            self._completing[transactional_id] = event.append
            self._unpark(self.ids[transactional_id])

    def _append_committed(self, event: AppendCommitted) -> None:
        pending = self.pending.pop(event.append)
        if pending.request is not None:
            self._respond(pending.request.request, pending.result)
        for transactional_id, metadata in pending.transitions.items():
            held = self.ids[transactional_id]
            self._end_pending(transactional_id, held, event.append)
            self._commit(transactional_id, held, metadata)
            self._unpark(held)
            self.ids.let_rest(transactional_id)

    def _append_rejected(self, event: AppendRejected) -> None:
        pending = self.pending.pop(event.append)
        if pending.request is not None:
            self._respond_failed(pending.request, event.error)
        for transactional_id in pending.transitions:
            held = self.ids[transactional_id]
            self._end_pending(transactional_id, held, event.append)
            self._count(transactional_id, held, self._newest(transactional_id, held))
            if pending.completes:
                self.counts["append_retries"] += 1
                retry = RetryCompletion(transactional_id)
                deadline_ms = self.now_ms + COMPLETION_RETRY_MS
                self.timers.set(_completion_key(transactional_id), deadline_ms, retry)
            elif held.committed is None:
                del self.ids[transactional_id]
            self._unpark(held)
            self.ids.let_rest(transactional_id)

    def _end_pending(self, transactional_id: str, held: TransactionalId, append: int) -> None:
        """An append is committed or refused: pending is what was put behind, or before it."""
        if self._completing.get(transactional_id) == append:
            del self._completing[transactional_id]
        if held.pending == append:
            held.pending = self._completing.get(transactional_id)

    def _append_timed_out(self, event: AppendTimedOut) -> None:
        """It may still be committed, so it stays pending; who waits for it does not."""
        pending = self.pending.get(event.append)
        if pending is not None and pending.request is not None:
            self._respond_failed(pending.request, event.error)
            pending.request = None

    def _commit(
        self, transactional_id: str, held: TransactionalId, metadata: TransactionMetadata | None
    ) -> None:
        """A transition is committed: memory takes it, and what follows from it happens."""
        before, held.committed = held.committed, metadata
        if metadata is None:
            del self.ids[transactional_id]
            self._count(transactional_id, held, None)
            self._unfinished.pop(transactional_id, None)
            self._connections.forget(transactional_id)
            return
        if _is_unfinished(metadata):
            self._unfinished[transactional_id] = held
        else:
            self._unfinished.pop(transactional_id, None)
        began = metadata.state is txn.ONGOING
        if before is not None and before.state is txn.ONGOING and not began:
            held.deadline_ms = None
        elif began and (before is None or before.state is not txn.ONGOING):
            self.counts["started"] += 1
            if metadata.timeout_ms != MAX_INT32:
                held.deadline_ms = self.now_ms + metadata.timeout_ms
        if metadata.state.is_prepared:
            self._write_markers(transactional_id, held, metadata)
        elif before is not None and before.state.is_prepared:
            del self._ending[before.producer_id, before.epoch]
            committed = metadata.state is txn.COMPLETE_COMMIT
            self.counts["committed" if committed else "aborted"] += 1
            self._end_seconds.observe(max(0, self.wall_ms - before.last_update_ms) / 1000)

    # Ends.

    def _write_markers(
        self, transactional_id: str, held: TransactionalId, metadata: TransactionMetadata
    ) -> None:
        self._ending[metadata.producer_id, metadata.epoch] = transactional_id
        held.unwritten = metadata.partitions
        if metadata.partitions:
            marker = EndMarker(
                metadata.producer_id,
                metadata.epoch,
                self.coordinator_epoch,
                metadata.state is txn.PREPARE_COMMIT,
                metadata.client_version,
            )
            self._effects.append(ev.WriteMarkers(self.state_partition, marker, metadata.partitions))
        self._complete_if_written(transactional_id, held)

    def _markers_written(self, event: ev.MarkersWritten) -> None:
        marker = event.marker
        transactional_id = self._ending.get((marker.producer_id, marker.epoch))
        if transactional_id is not None and marker.coordinator_epoch == self.coordinator_epoch:
            held = self.ids[transactional_id]
            held.unwritten -= event.partitions
            self._complete_if_written(transactional_id, held)

    def _complete_if_written(self, transactional_id: str, held: TransactionalId) -> None:
        metadata = held.committed
        if metadata is None or not metadata.state.is_prepared:
            return
        if not held.unwritten and held.pending is None:
            complete = txn.prepare_complete(metadata, self.wall_ms)
            self._append({transactional_id: complete}, completes=True)

    # Timeouts and expiry.

    def _abort_timed_out(self) -> None:
        if self._overdue is None:
            self._overdue = iter(
                [
                    transactional_id
                    for transactional_id, held in self._unfinished.items()
                    if held.deadline_ms is not None and held.deadline_ms < self.now_ms
                ]
            )
        overdue = tuple(islice(self._overdue, ABORTS_PER_TICK))
        if len(overdue) == ABORTS_PER_TICK:
            self.timers.set(ABORT_KEY, self.now_ms + NEXT_IDS_MS, AbortTimedOut())
        else:
            self._overdue = None
            self._schedule(ABORT_KEY)
        for transactional_id in overdue:
            self._fence_timed_out(transactional_id)

    def _fence_timed_out(self, transactional_id: str) -> None:
        held = self.ids.get(transactional_id)
        if held is None or held.pending is not None or held.committed is None:
            return
        if held.deadline_ms is None or held.deadline_ms >= self.now_ms:
            return
        version = self.settings.transaction_version
        decision = rq.decide_fence(held.committed, self._fresh_producer_id, version, self.wall_ms)
        if isinstance(decision, rq.Transition):
            self._use_producer_id(decision.metadata)
            self.counts["timed_out"] += 1
            self._effects.append(ev.NoteTransaction(transactional_id, "its transaction timed out"))
            self._append({transactional_id: decision.metadata})
        elif (waiting := Timeout(transactional_id)) not in self._awaiting_producer_id:
            self._awaiting_producer_id.append(waiting)
            self._effects.append(ev.AllocateProducerId())

    def _remove_expired(self) -> None:
        if self._unchecked is None:
            self._unchecked = iter(tuple(self.ids))
        checked = tuple(islice(self._unchecked, IDS_PER_TICK))
        if len(checked) == IDS_PER_TICK:
            self.timers.set(EXPIRE_KEY, self.now_ms + NEXT_IDS_MS, RemoveExpired())
        else:
            self._unchecked = None
            self._schedule(EXPIRE_KEY)
        oldest_ms = self.wall_ms - self.settings.transactional_id_expiration_ms
        expired = [
            transactional_id
            for transactional_id in checked
            if (held := self.ids.get(transactional_id)) is not None
            and held.committed is not None
            and not held.is_pending
            and txn.is_idle(held.committed)
            and held.committed.last_update_ms < oldest_ms
        ]
        for start in range(0, len(expired), TOMBSTONES_PER_APPEND):
            self._append(dict.fromkeys(expired[start : start + TOMBSTONES_PER_APPEND]))

    def _schedule(self, key: tuple[str, ...]) -> None:
        settings = self.settings
        if key is ABORT_KEY:
            deadline_ms = self.now_ms + settings.abort_timed_out_interval_ms
            self.timers.set(key, deadline_ms, AbortTimedOut())
        else:
            deadline_ms = self.now_ms + settings.remove_expired_interval_ms
            self.timers.set(key, deadline_ms, RemoveExpired())

    # Queries of what is committed.

    def partitions(self) -> Iterator[TopicPartition]:
        """Those of all transactions that are open or ending."""
        for held in self._unfinished.values():
            if held.committed is not None:
                yield from held.committed.partitions

    def list_transactions(
        self, wanted: ev.TransactionFilter, now_ms: int
    ) -> Iterator[ev.ListedTransaction | None]:
        """Ids that ``wanted`` lets through, None for each other one, so that a caller can pause;
        ``now_ms`` is of the wall clock. Those that there are when the first is taken; one that is
        gone since is left out.
        """
        for transactional_id in tuple(self.ids):
            held = self.ids.get(transactional_id)
            metadata = None if held is None else held.committed
            if (
                metadata is not None
                and (not wanted.states or metadata.state in wanted.states)
                and (not wanted.producer_ids or metadata.producer_id in wanted.producer_ids)
                and (
                    wanted.longer_than_ms < 0 or now_ms - metadata.start_ms > wanted.longer_than_ms
                )
                and (wanted.pattern is None or wanted.pattern.matches(transactional_id))
            ):
                yield ev.ListedTransaction(transactional_id, metadata.producer_id, metadata.state)
            else:
                yield None

    def describe(self, transactional_id: str) -> ev.DescribedTransaction | None:
        """An id in full; None if there is no such id."""
        held = self.ids.get(transactional_id)
        return None if held is None else held.describe(transactional_id)

    # The rest.

    def _respond(self, request: int, result: Any) -> None:
        self._effects.append(Response(request, result))

    def _respond_if_proven(self, event: ev.ClientRequest, result: Any) -> None:
        """Nothing was appended for it that would have been refused where another node leads."""
        unproven = ev.failed(event, ErrorCode.not_coordinator)
        self._effects.append(Response(event.request, result, unproven))

    def _respond_failed(self, event: ev.ClientRequest, error: ErrorCode) -> None:
        self._respond(event.request, ev.failed(event, error))

    def _drain_effects(self) -> tuple[ev.Effect, ...]:
        effects, self._effects = self._effects, []
        return tuple(effects)

    def check_invariants(self) -> None:
        """Raise InvariantViolation when the state contradicts itself."""
        pending = {i: n for n, append in self.pending.items() for i in append.transitions}
        if pending != {i: h.pending for i, h in self.ids.items() if h.pending is not None}:
            raise InvariantViolation("pending appends and pending transitions differ")
        producers = Counter(
            p
            for h in self.ids.values()
            if (m := h.committed) is not None
            for p in {m.producer_id, m.next_producer_id} - {NO_PRODUCER_ID}
        )
        if producers and producers.most_common(1)[0][1] > 1:
            raise InvariantViolation(f"two ids share a producer id: {producers.most_common(1)}")
        ending = {
            (m.producer_id, m.epoch): i
            for i, h in self.ids.items()
            if (m := h.committed) is not None and m.state.is_prepared
        }
        if ending != self._ending:
            raise InvariantViolation(f"ending are {ending}, not {self._ending}")
        for transactional_id, held in self.ids.items():
            held.check_invariants(transactional_id)
            newest = held.committed
            if held.pending is not None:
                newest = self.pending[held.pending].transitions[transactional_id] or newest
            if held.counted != (-1 if newest is None else len(newest.partitions)):
                raise InvariantViolation(
                    f"{transactional_id!r} is counted with {held.counted} partitions: {newest}"
                )
        for transactional_id, append in self._completing.items():
            committed = self.ids[transactional_id].committed
            if append not in self.pending or committed is None or not committed.state.is_prepared:
                raise InvariantViolation(f"{transactional_id!r} completes, and is {committed}")
        unfinished = {i for i, h in self.ids.items() if _is_unfinished(h.committed)}
        if unfinished != self._unfinished.keys():
            raise InvariantViolation(f"unfinished are {unfinished}, not {set(self._unfinished)}")


def _result(
    event: ev.Change,
    metadata: TransactionMetadata,
    error: ErrorCode,
) -> Any:
    """The result of a request once ``metadata`` is what is held."""
    if error is not ev.NO_ERROR:
        return ev.failed(event, error)
    if isinstance(event, ev.AddPartitions):
        return ev.AddPartitionsResult()
    if isinstance(event, ev.InitProducerId):
        return ev.InitProducerIdResult(ev.NO_ERROR, metadata.producer_id, metadata.epoch)
    if metadata.state.is_prepared:
        metadata = txn.prepare_complete(metadata, metadata.last_update_ms)
    return ev.EndTransactionResult(ev.NO_ERROR, metadata.producer_id, metadata.epoch)


def _is_unfinished(metadata: TransactionMetadata | None) -> bool:
    """A transaction is open, or ends."""
    return metadata is not None and (metadata.state is txn.ONGOING or metadata.state.is_prepared)


def _parked_key(request: int) -> tuple[str, ...]:
    return ("parked", str(request))


def _completion_key(transactional_id: str) -> tuple[str, ...]:
    return ("completion", transactional_id)
