"""The transitions of one transactional id: each takes a frozen state and returns the next one.

:data:`VALID_PREVIOUS_STATES` says what may follow what; anything else is a bug of ours. Times are
of the wall clock, in ms. Source: Kafka's ``TransactionMetadata``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from kept.node.coordinator.transactions.records import (
    NO_PRODUCER_EPOCH,
    TransactionMetadata,
    TransactionState,
)
from kept.storage.errors import InvariantViolation
from kept.storage.types import NO_PRODUCER_ID, NO_TIMESTAMP, TopicPartition

EMPTY = TransactionState.EMPTY
ONGOING = TransactionState.ONGOING
PREPARE_COMMIT = TransactionState.PREPARE_COMMIT
PREPARE_ABORT = TransactionState.PREPARE_ABORT
COMPLETE_COMMIT = TransactionState.COMPLETE_COMMIT
COMPLETE_ABORT = TransactionState.COMPLETE_ABORT

LAST_EPOCH: Final = 2**15 - 1
"""Markers may have it, batches never: it fences whoever had the one before."""
EXHAUSTED_EPOCH: Final = LAST_EPOCH - 1
"""From this epoch on a producer gets a new id before it gets another epoch."""
TV2: Final = 2
"""The ``transaction.version`` at which the epoch grows with each transaction (KIP-890)."""

_IDLE: Final = frozenset({EMPTY, COMPLETE_COMMIT, COMPLETE_ABORT})

VALID_PREVIOUS_STATES: Final = {
    EMPTY: _IDLE,
    ONGOING: _IDLE | {ONGOING},
    PREPARE_COMMIT: frozenset({ONGOING}),
    PREPARE_ABORT: frozenset({ONGOING}),
    COMPLETE_COMMIT: frozenset({PREPARE_COMMIT}),
    COMPLETE_ABORT: frozenset({PREPARE_ABORT}),
}
"""A state, and those from which it is reached. Aborting needs no transaction under TV2: then
:data:`PREPARE_ABORT` follows an idle state, too."""


def is_idle(metadata: TransactionMetadata) -> bool:
    """No transaction is open and none is ending."""
    return metadata.state in _IDLE


def is_exhausted(metadata: TransactionMetadata) -> bool:
    """Its producer id has no further epoch for batches."""
    return metadata.epoch >= EXHAUSTED_EPOCH


def check_transition(before: TransactionMetadata | None, after: TransactionMetadata | None) -> None:
    """Raise InvariantViolation unless ``after`` may follow ``before``; None: no such id."""
    if before is None:
        if after is None or after.state is not EMPTY:
            raise InvariantViolation(f"a transactional id begins with {after}")
        return
    if after is None:
        if not is_idle(before):
            raise InvariantViolation(f"a transactional id is forgotten in {before.state.name}")
        return
    valid = before.state in VALID_PREVIOUS_STATES[after.state] or (
        after.state is PREPARE_ABORT and after.client_version >= TV2 and is_idle(before)
    )
    if not valid:
        raise InvariantViolation(f"{after.state.name} after {before.state.name}")
    grown = after.epoch - before.epoch if after.producer_id == before.producer_id else after.epoch
    if grown not in (0, 1) or after.epoch > LAST_EPOCH:
        raise InvariantViolation(f"epoch {after.epoch} after {before.epoch}")


def prepare_first(producer_id: int, timeout_ms: int, now_ms: int) -> TransactionMetadata:
    """A new transactional id, with a fresh producer id."""
    return TransactionMetadata(
        producer_id,
        0,
        timeout_ms,
        EMPTY,
        last_update_ms=now_ms,
        previous_producer_id=producer_id,
    )


def prepare_epoch(
    before: TransactionMetadata, epoch: int, last_epoch: int, timeout_ms: int, now_ms: int
) -> TransactionMetadata:
    """InitProducerId: the producer goes on with ``epoch``."""
    return replace(
        before,
        epoch=epoch,
        last_epoch=last_epoch,
        timeout_ms=timeout_ms,
        state=EMPTY,
        partitions=frozenset(),
        start_ms=NO_TIMESTAMP,
        last_update_ms=now_ms,
        previous_producer_id=before.producer_id,
    )


def prepare_rotation(
    before: TransactionMetadata, producer_id: int, last_epoch: int, timeout_ms: int, now_ms: int
) -> TransactionMetadata:
    """InitProducerId: epochs are exhausted, the producer gets a new id."""
    empty = prepare_epoch(before, 0, last_epoch, timeout_ms, now_ms)
    return replace(empty, producer_id=producer_id)


def prepare_partitions(
    before: TransactionMetadata,
    partitions: Iterable[TopicPartition],
    client_version: int,
    now_ms: int,
) -> TransactionMetadata:
    """Partitions join the transaction, which begins unless it is open."""
    return replace(
        before,
        state=ONGOING,
        partitions=before.partitions.union(partitions),
        start_ms=before.start_ms if before.state is ONGOING else now_ms,
        last_update_ms=now_ms,
        previous_producer_id=before.producer_id,
        client_version=client_version,
    )


def prepare_end(
    before: TransactionMetadata,
    *,
    is_commit: bool,
    client_version: int,
    now_ms: int,
    next_producer_id: int = NO_PRODUCER_ID,
) -> TransactionMetadata:
    """The transaction is to end. Under TV2 the epoch grows; ``next_producer_id`` takes over when it
    is complete.
    """
    bumps = client_version >= TV2
    return replace(
        before,
        state=PREPARE_COMMIT if is_commit else PREPARE_ABORT,
        epoch=min(before.epoch + 1, LAST_EPOCH) if bumps else before.epoch,
        last_epoch=before.epoch if bumps else before.last_epoch,
        start_ms=before.start_ms if before.state is ONGOING else now_ms,
        last_update_ms=now_ms,
        previous_producer_id=before.producer_id,
        next_producer_id=next_producer_id,
        client_version=client_version,
    )


def prepare_fence(
    before: TransactionMetadata,
    *,
    server_version: int,
    now_ms: int,
    next_producer_id: int = NO_PRODUCER_ID,
) -> TransactionMetadata:
    """The open transaction is to be aborted, and its producer fenced by one further epoch.

    Once, also under TV2 (KAFKA-19367), where its producer knows the epoch as its last.
    """
    aborted = prepare_end(
        before,
        is_commit=False,
        client_version=TV2 if server_version >= TV2 else 0,
        now_ms=now_ms,
        next_producer_id=next_producer_id,
    )
    if server_version >= TV2 or before.epoch == LAST_EPOCH:
        return aborted
    return replace(aborted, epoch=before.epoch + 1, last_epoch=NO_PRODUCER_EPOCH)


def prepare_complete(before: TransactionMetadata, now_ms: int) -> TransactionMetadata:
    """All markers are written; a next producer id takes over."""
    rotates = before.next_producer_id != NO_PRODUCER_ID
    return replace(
        before,
        state=COMPLETE_COMMIT if before.state is PREPARE_COMMIT else COMPLETE_ABORT,
        producer_id=before.next_producer_id if rotates else before.producer_id,
        epoch=0 if rotates else before.epoch,
        partitions=frozenset(),
        last_update_ms=now_ms,
        previous_producer_id=before.producer_id,
        next_producer_id=NO_PRODUCER_ID,
    )
