"""What a log knows of its producers: sequences, epochs, open transactions.

Rules are Apache Kafka's (``ProducerStateManager``, ``ProducerAppendInfo``):

- a batch of the producer's current epoch whose first and last sequence equal one of its last five
  is a duplicate and is answered with the offsets it got;
- an older epoch is refused (INVALID_PRODUCER_EPOCH); a newer one starts at sequence 0;
- within an epoch sequences follow one another and wrap after 2^31 - 1, the first is 0, also after
  a transaction's marker that brought the epoch; a producer without state here (expired, or its
  records are gone) may start anywhere (KIP-360);
- the first batch of a transaction needs a guard (:mod:`kept.storage.producers.verification`), and a
  plain batch none of its producer's transactions open; a batch of a newer epoch joins one that is;
- a marker is of no older epoch, nor of an older coordinator, than is known;
- a producer with no open transaction is forgotten ``producer.id.expiration.ms`` after its last
  batch or marker.

Batches of a coordinator (offsets that are committed in a transaction) have no sequences. What comes
from a leader is not judged at all.

Ours: anybody may invent producer ids, so a log remembers :data:`MOST_OF_A_LOG` and all logs that
share a :class:`ProducerQuota` together what that allows. One more makes its log forget one that has
been silent for long, as if its time were over: it loses the recognition of its duplicates, nothing
else.

State is rebuilt from a snapshot and the batches above it, so it never decides what is in the log.
The first unstable offset and the index of aborted transactions follow from the markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from threading import Lock
from typing import Final, NamedTuple

from kept.storage.errors import (
    InvalidProducerEpoch,
    InvalidTxnState,
    InvariantViolation,
    OutOfOrderSequenceNumber,
    TransactionCoordinatorFenced,
)
from kept.storage.producers.verification import (
    VerificationGuard,
    VerificationGuards,
    VerificationQuota,
)
from kept.storage.types import MAX_INT16, MAX_INT32, NO_LEADER_EPOCH, NO_OFFSET, NO_SEQUENCE

BATCHES_KEPT: Final = 5
"""Batches a producer may have in flight, so as many are remembered (Kafka's limit)."""

MOST_OF_A_LOG: Final = 10_000
"""Producers that a log remembers: some 5 MB, and a snapshot of them at every roll takes 30 ms."""
MOST_OF_ALL: Final = 500_000
"""``kept.producers.max``: some 250 MB."""
CANDIDATES: Final = 8
"""Of so many of a log's producers the one that has been silent longest is forgotten."""


class ProducerQuota:
    """How many producers several logs remember together: ``used`` of ``limit``. Any thread.

    A node has one (``kept.producers.max``) and hands it to its log directories, with that of
    ``verifications``.
    """

    __slots__ = ("_lock", "limit", "used", "verifications")

    def __init__(self, limit: int = MOST_OF_ALL) -> None:
        self.limit = limit
        self.used = 0
        self.verifications = VerificationQuota()
        self._lock = Lock()

    def add(self, more: int) -> None:
        """So many came, or (negative) are forgotten."""
        with self._lock:
            self.used += more


class ProducerBatch(NamedTuple):
    """A batch that may come again: where its sequence ends and where it was put."""

    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp: int

    @property
    def first_sequence(self) -> int:
        """Wraps at 2^31."""
        return (self.last_sequence - self.offset_delta) & MAX_INT32

    @property
    def first_offset(self) -> int:
        """Base offset of the batch."""
        return self.last_offset - self.offset_delta


class ProducerState:
    """One producer. ``batches`` ascends and holds at most five; all are of ``epoch``."""

    __slots__ = ("batches", "coordinator_epoch", "epoch", "last_timestamp", "txn_first_offset")

    def __init__(self, epoch: int, last_timestamp: int) -> None:
        self.epoch = epoch
        self.batches: list[ProducerBatch] = []
        self.last_timestamp = last_timestamp
        self.coordinator_epoch = NO_LEADER_EPOCH
        self.txn_first_offset: int | None = None

    @property
    def last_sequence(self) -> int:
        """Sequence of the last record; -1 when there is none in this epoch."""
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    @property
    def last_offset(self) -> int:
        """Offset of the last record; -1 when there is none."""
        return self.batches[-1].last_offset if self.batches else NO_OFFSET


class CompletedTxn(NamedTuple):
    """A transaction that a marker ended; ``last_offset`` is the marker's."""

    producer_id: int
    first_offset: int
    last_offset: int
    aborted: bool


class ProducerStates:
    """All producers of a log, by producer id."""

    __slots__ = (
        "_closed",
        "_counted",
        "_ended",
        "_open",
        "_quota",
        "_states",
        "expiration_ms",
        "guards",
    )

    def __init__(self, expiration_ms: int, quota: ProducerQuota | None = None) -> None:
        self.expiration_ms = expiration_ms
        self._quota = quota or ProducerQuota()
        self._counted = 0
        """How many of :attr:`_states` are counted there."""
        self._states: dict[int, ProducerState] = {}
        self._closed: dict[int, None] = {}
        """Those without an open transaction, in the order in which they are candidates to go."""
        self.guards = VerificationGuards(self._quota.verifications)
        self._open: dict[int, int] = {}
        """First offset of each open transaction, ascending."""
        self._ended: list[tuple[int, int]] = []
        """(first offset, marker's offset) of transactions whose marker may not be committed."""

    def __len__(self) -> int:
        return len(self._states)

    @property
    def is_empty(self) -> bool:
        """No producer is known, nor a transaction whose marker may not be committed."""
        return not self._states and not self._ended

    def __contains__(self, producer_id: int) -> bool:
        return producer_id in self._states

    def get(self, producer_id: int) -> ProducerState | None:
        """A producer's state; None when it is not known."""
        return self._states.get(producer_id)

    def items(self) -> Iterator[tuple[int, ProducerState]]:
        """(producer id, state) of all."""
        return iter(self._states.items())

    def check(
        self, producer_id: int, epoch: int, first_sequence: int, record_count: int
    ) -> ProducerBatch | None:
        """Whether a plain batch from a client may be appended; a duplicate's first writing if it is
        one.

        Raises InvalidProducerEpoch, OutOfOrderSequenceNumber, InvalidTxnState.
        """
        state = self._states.get(producer_id)
        if state is None:
            return None
        if epoch != state.epoch or first_sequence != (state.last_sequence + 1) & MAX_INT32:
            again = _check_sequence(producer_id, state, epoch, first_sequence, record_count)
            if again is not None:
                return again
        if state.txn_first_offset is not None:
            raise InvalidTxnState(
                f"producer {producer_id} has a transaction open since offset "
                f"{state.txn_first_offset}, and the batch is not part of it"
            )
        return None

    def check_transactional(
        self,
        producer_id: int,
        epoch: int,
        first_sequence: int,
        record_count: int,
        guard: VerificationGuard | None,
    ) -> ProducerBatch | None:
        """The same for a batch of a transaction; ``guard`` is proof that its coordinator was asked.

        A negative ``first_sequence``: it is of a coordinator. Raises InvalidProducerEpoch,
        InvalidTxnState, OutOfOrderSequenceNumber.
        """
        again = self.find_duplicate(producer_id, epoch, first_sequence, record_count)
        if again is not None:
            return again
        state = self._states.get(producer_id)
        if not self.is_open(producer_id, epoch):
            if guard is None or self.guards.get(producer_id) is not guard:
                raise InvalidTxnState(
                    f"producer {producer_id} epoch {epoch} has no transaction open here, and none "
                    "was verified since the last one ended"
                )
            if first_sequence > guard.lowest_sequence >= 0 or (
                guard.is_tv2 and state is None and first_sequence > 0
            ):
                raise OutOfOrderSequenceNumber(
                    f"producer {producer_id} epoch {epoch}: sequence {first_sequence} begins a "
                    f"transaction here; expected {0 if guard.is_tv2 else guard.lowest_sequence}"
                )
        if state is not None and first_sequence >= 0:
            _check_sequence(producer_id, state, epoch, first_sequence, record_count)
        return None

    def find_duplicate(
        self, producer_id: int, epoch: int, first_sequence: int, record_count: int
    ) -> ProducerBatch | None:
        """The first writing of a batch that is here already. Raises InvalidProducerEpoch."""
        state = self._states.get(producer_id)
        if state is None:
            return None
        _check_epoch(producer_id, state, epoch)
        if epoch != state.epoch or first_sequence < 0:
            return None
        return _find_duplicate(state, first_sequence, record_count)

    def is_open(self, producer_id: int, epoch: int) -> bool:
        """A transaction of that epoch is open here."""
        state = self._states.get(producer_id)
        return state is not None and state.txn_first_offset is not None and state.epoch == epoch

    def check_marker(
        self, producer_id: int, epoch: int, coordinator_epoch: int, *, is_tv2: bool
    ) -> None:
        """Whether a marker may be appended.

        In version 2 it brings a new epoch; one that is there already came twice, unless it ends
        something (that of an exhausted epoch does). Raises InvalidProducerEpoch,
        TransactionCoordinatorFenced.
        """
        state = self._states.get(producer_id)
        if state is not None:
            known, is_open = state.epoch, state.txn_first_offset is not None
            if epoch < known or (is_tv2 and is_open and epoch == known != MAX_INT16):
                raise InvalidProducerEpoch(
                    f"producer {producer_id} has epoch {known} and "
                    f"{'an open' if is_open else 'no open'} transaction, the marker epoch {epoch}"
                )
        newest = self.coordinator_epoch(producer_id)
        if coordinator_epoch < newest:
            raise TransactionCoordinatorFenced(
                f"producer {producer_id}: the marker is of coordinator epoch {coordinator_epoch}, "
                f"known is {newest}"
            )

    def coordinator_epoch(self, producer_id: int) -> int:
        """The newest epoch of a producer's coordinator that is known here; -1: none."""
        state = self._states.get(producer_id)
        known = NO_LEADER_EPOCH if state is None else state.coordinator_epoch
        return max(known, self.guards.coordinator_epoch(producer_id))

    def update(  # noqa: PLR0917
        self,
        producer_id: int,
        epoch: int,
        first_sequence: int,
        offset_delta: int,
        last_offset: int,
        timestamp: int,
        is_transactional: bool,
    ) -> None:
        """A data batch of a producer is in the log."""
        state = self._states.get(producer_id)
        if state is None:
            state = self._add(producer_id, epoch, timestamp)
        elif epoch != state.epoch:
            state.epoch = epoch
            state.batches.clear()
        batches = state.batches
        batches.append(
            ProducerBatch(
                (first_sequence + offset_delta) & MAX_INT32, last_offset, offset_delta, timestamp
            )
        )
        if len(batches) > BATCHES_KEPT:
            del batches[0]
        state.last_timestamp = timestamp
        if is_transactional:
            if state.txn_first_offset is None:
                state.txn_first_offset = self._open[producer_id] = last_offset - offset_delta
                del self._closed[producer_id]
            self.guards.appended(producer_id, epoch)

    def update_marker(  # noqa: PLR0917
        self,
        producer_id: int,
        epoch: int,
        offset: int,
        timestamp: int,
        coordinator_epoch: int,
        aborted: bool,
    ) -> CompletedTxn | None:
        """A transaction marker is in the log; the transaction it ended, if it had data here."""
        state = self._states.get(producer_id)
        if state is None:
            state = self._add(producer_id, epoch, timestamp)
        elif epoch != state.epoch:
            state.epoch = epoch
            state.batches.clear()
        self.guards.ended(producer_id, epoch)
        state.coordinator_epoch = coordinator_epoch
        state.last_timestamp = timestamp
        first, state.txn_first_offset = state.txn_first_offset, None
        self._open.pop(producer_id, None)
        self._closed[producer_id] = None
        if first is None:
            return None
        self._ended.append((first, offset))
        return CompletedTxn(producer_id, first, offset, aborted)

    @property
    def first_unstable_offset(self) -> int | None:
        """First offset of the oldest open transaction."""
        return next(iter(self._open.values()), None)

    def count_open_before(self, timestamp_ms: int) -> int:
        """Open transactions whose last batch is older than that."""
        states = self._states
        return sum(states[open_id].last_timestamp < timestamp_ms for open_id in self._open)

    def first_undecided_offset(self, high_watermark: int, log_start_offset: int) -> int | None:
        """First readable offset of the oldest transaction that is open, or whose marker is not
        committed: the next leader may not have it (Apache Kafka: ``unreplicatedTxns``).

        Never below the log start, which may have moved into the transaction.
        """
        if not self._open and not self._ended:
            return None
        self.committed_to(high_watermark)
        first = self.first_unstable_offset
        if self._ended:
            ended = min(self._ended)[0]
            first = ended if first is None else min(first, ended)
        return None if first is None else max(first, log_start_offset)

    def committed_to(self, high_watermark: int) -> None:
        """Markers below that are committed: they need not be remembered."""
        ended = self._ended
        if ended and ended[0][1] < high_watermark:
            self._ended = [entry for entry in ended if entry[1] >= high_watermark]

    def expire(self, now_ms: int) -> int:
        """Forget producers that were silent for too long; returns how many."""
        horizon = now_ms - self.expiration_ms
        self.guards.expire(horizon)
        gone = [
            producer_id
            for producer_id, state in self._states.items()
            if state.last_timestamp <= horizon and state.txn_first_offset is None
        ]
        for producer_id in gone:
            del self._states[producer_id], self._closed[producer_id]
        self._count()
        return len(gone)

    def _count(self) -> None:
        more = len(self._states) - self._counted
        self._counted += more
        self._quota.add(more)

    def _add(self, producer_id: int, epoch: int, timestamp: int) -> ProducerState:
        """One more, for which another one may have to go."""
        state = self._states[producer_id] = ProducerState(epoch, timestamp)
        self._enforce_limits()
        self._closed[producer_id] = None
        return state

    def _enforce_limits(self) -> None:
        """After one more, which is no candidate yet: keep to the limits."""
        self._count()
        states, closed = self._states, self._closed
        if len(states) <= MOST_OF_A_LOG and self._quota.used <= self._quota.limit:
            return
        first = list(islice(closed, CANDIDATES))
        if not first:
            return
        oldest = min(first, key=lambda pid: states[pid].last_timestamp)
        for producer_id in first:
            del closed[producer_id]
            if producer_id != oldest:  # to the end: others are looked at next time
                closed[producer_id] = None
        del states[oldest]
        self._count()

    def __del__(self) -> None:
        self._quota.add(-self._counted)

    def clear(self) -> None:
        """Forget everything."""
        self._states.clear()
        self._closed.clear()
        self._count()
        self._open.clear()
        self._ended.clear()

    def restore(self, producers: Iterable[tuple[int, ProducerState]]) -> None:
        """Take over the producers of a snapshot; there are no others."""
        self._states.update(producers)
        self._closed = {
            pid: None for pid, state in self._states.items() if state.txn_first_offset is None
        }
        self._count()
        began = ((pid, state.txn_first_offset) for pid, state in self._states.items())
        found = [(first, pid) for pid, first in began if first is not None]
        self._open.update((pid, first) for first, pid in sorted(found))

    def replace(self, others: ProducerStates) -> None:
        """Know what ``others`` do, which are not used any more, and nothing else."""
        self.clear()
        self.restore(others.items())
        self._ended.extend(others._ended)

    def truncate_from_start(self, log_start_offset: int) -> None:
        """The log now starts there: a transaction all of whose records are below it is forgotten,
        as if it had none. The next batch of its producer begins it anew. (A start of the log after
        that lets it begin at the log start, where nothing of it is: that hides too much, not too
        little.)
        """
        for producer_id, first in list(self._open.items()):
            state = self._states[producer_id]
            if first < log_start_offset and state.last_offset < log_start_offset:
                state.txn_first_offset = None
                del self._open[producer_id]
                self._closed[producer_id] = None

    def check_invariants(self) -> None:
        """Raises InvariantViolation."""
        if list(self._open.values()) != sorted(self._open.values()):
            raise InvariantViolation("open transactions do not ascend")
        for producer_id, state in self._states.items():
            last = NO_OFFSET
            for batch in state.batches:
                if batch.last_offset <= last:
                    raise InvariantViolation(f"producer {producer_id}: batches do not ascend")
                last = batch.last_offset
            if len(state.batches) > BATCHES_KEPT:
                raise InvariantViolation(f"producer {producer_id}: too many batches kept")
            is_open = state.txn_first_offset is not None
            if is_open != (producer_id in self._open) or is_open == (producer_id in self._closed):
                raise InvariantViolation(f"producer {producer_id}: open transactions disagree")
        if len(self._open) + len(self._closed) != len(self._states):
            raise InvariantViolation("open or closed transactions of unknown producers")


def _check_epoch(producer_id: int, state: ProducerState, epoch: int) -> None:
    if epoch < state.epoch:
        raise InvalidProducerEpoch(
            f"producer {producer_id} has epoch {state.epoch}, the batch {epoch}"
        )


def _find_duplicate(
    state: ProducerState, first_sequence: int, record_count: int
) -> ProducerBatch | None:
    last_sequence = (first_sequence + record_count - 1) & MAX_INT32
    for batch in reversed(state.batches):
        if batch.last_sequence == last_sequence and batch.first_sequence == first_sequence:
            return batch
    return None


def _check_sequence(
    producer_id: int, state: ProducerState, epoch: int, first_sequence: int, record_count: int
) -> ProducerBatch | None:
    """Whether a batch follows what is known; the first writing of one that is here."""
    _check_epoch(producer_id, state, epoch)
    if epoch > state.epoch:
        if first_sequence != 0:
            raise OutOfOrderSequenceNumber(
                f"producer {producer_id} begins epoch {epoch} with sequence "
                f"{first_sequence}; expected 0"
            )
        return None
    last = state.last_sequence
    expected = (last + 1) & MAX_INT32
    if first_sequence == expected:
        return None
    again = _find_duplicate(state, first_sequence, record_count)
    if again is None:
        raise OutOfOrderSequenceNumber(
            f"producer {producer_id} epoch {epoch}: sequence {first_sequence} after {last}; "
            f"expected {expected}"
        )
    return again
