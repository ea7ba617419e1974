"""What a request does to one transactional id: decisions as functions of its committed state.

Whether a transition is pending comes as an argument: a state whose end is decided counts as
pending all the time, since its completion is under way. Source: Kafka's
``TransactionCoordinator``; KIP-360, KIP-890. Ours: a retry of InitProducerId at an exhausted epoch
is answered; a retry of an end is known only behind a TV2 transaction, since a TV1 producer's next
epoch says nothing of an end.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode
from msgspec import Struct

from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions import transaction as txn
from kept.node.coordinator.transactions.records import NO_PRODUCER_EPOCH, TransactionMetadata
from kept.storage.types import NO_PRODUCER_ID

FENCED = ErrorCode.producer_fenced
INVALID_STATE = ErrorCode.invalid_txn_state
INVALID_MAPPING = ErrorCode.invalid_producer_id_mapping
CONCURRENT = ErrorCode.concurrent_transactions
FINAL = frozenset({FENCED, INVALID_STATE, INVALID_MAPPING})
"""What ends a producer, or its transaction."""


class Refused(Struct, frozen=True):
    """The request is refused, and nothing changes."""

    error: ErrorCode


class Unchanged(Struct, frozen=True):
    """The request is as good as done: its producer goes on with what is held now."""


class Transition(Struct, frozen=True):
    """The state changes to ``metadata``; once that is committed the response has ``error``."""

    metadata: TransactionMetadata
    error: ErrorCode = ev.NO_ERROR


class ProducerIdNeeded(Struct, frozen=True):
    """It cannot be decided without a fresh producer id."""


Decision = Refused | Unchanged | Transition | ProducerIdNeeded


def refuse_malformed(event: ev.ClientRequest, max_timeout_ms: int) -> Refused | None:
    """What is wrong with a request whatever the state."""
    if not event.transactional_id:
        return Refused(ErrorCode.invalid_request)
    if isinstance(event, ev.InitProducerId):
        if (event.producer_id == NO_PRODUCER_ID) != (event.epoch == NO_PRODUCER_EPOCH):
            return Refused(ErrorCode.invalid_request)
        if not 0 < event.timeout_ms <= max_timeout_ms:
            return Refused(ErrorCode.invalid_transaction_timeout)
    return None


def decide_init(
    event: ev.InitProducerId,
    present: TransactionMetadata | None,
    *,
    pending: bool,
    fresh_producer_id: int | None,
    server_version: int,
    now_ms: int,
) -> Decision:
    """InitProducerId: a producer begins, or goes on, with an epoch of its own.

    ``server_version``: a transaction that is still open is fenced by it.
    """
    if pending:
        return Refused(CONCURRENT)
    if present is None:
        if fresh_producer_id is None:
            return ProducerIdNeeded()
        return Transition(txn.prepare_first(fresh_producer_id, event.timeout_ms, now_ms))
    given = event.epoch if event.producer_id != NO_PRODUCER_ID else None
    if given is not None and event.producer_id != present.producer_id:
        lost_response = (
            event.producer_id == present.previous_producer_id and given >= txn.EXHAUSTED_EPOCH
        )
        if not lost_response:
            return Refused(FENCED)
    if present.state is txn.ONGOING:
        fence = decide_fence(present, fresh_producer_id, server_version, now_ms)
        return Transition(fence.metadata, CONCURRENT) if isinstance(fence, Transition) else fence
    if txn.is_exhausted(present) and given in (None, present.epoch):
        if fresh_producer_id is None:
            return ProducerIdNeeded()
        last_epoch = NO_PRODUCER_EPOCH if given is None else present.epoch
        return Transition(
            txn.prepare_rotation(present, fresh_producer_id, last_epoch, event.timeout_ms, now_ms)
        )
    if given is None:
        epoch, last_epoch = present.epoch + 1, NO_PRODUCER_EPOCH
    elif given == present.epoch:
        epoch, last_epoch = present.epoch + 1, present.epoch
    elif given == present.last_epoch:
        epoch, last_epoch = present.epoch, present.last_epoch
    else:
        return Refused(FENCED)
    return Transition(txn.prepare_epoch(present, epoch, last_epoch, event.timeout_ms, now_ms))


def decide_fence(
    present: TransactionMetadata,
    fresh_producer_id: int | None,
    server_version: int,
    now_ms: int,
) -> Transition | ProducerIdNeeded:
    """An open transaction is aborted in its producer's stead, who is fenced."""
    rotates = server_version >= txn.TV2 and txn.is_exhausted(present)
    if rotates and fresh_producer_id is None:
        return ProducerIdNeeded()
    return Transition(
        txn.prepare_fence(
            present,
            server_version=server_version,
            now_ms=now_ms,
            next_producer_id=fresh_producer_id
            if rotates and fresh_producer_id is not None
            else NO_PRODUCER_ID,
        )
    )


def decide_add(
    event: ev.AddPartitions, present: TransactionMetadata | None, *, pending: bool, now_ms: int
) -> Decision:
    """AddPartitionsToTxn and AddOffsetsToTxn.

    Pending comes first: when epochs overflow, the client already has the producer id to come.
    """
    if pending:
        return Refused(CONCURRENT)
    refused = _refuse_stranger(event, present)
    if refused is not None or present is None:
        return refused or Refused(INVALID_MAPPING)
    if present.state is txn.ONGOING and event.partitions <= present.partitions:
        return Unchanged()
    return Transition(
        txn.prepare_partitions(present, event.partitions, event.client_version, now_ms)
    )


def decide_verify(
    event: ev.VerifyPartitions, present: TransactionMetadata | None
) -> ev.VerifyPartitionsResult:
    """Whether partitions are in the open transaction. A pending transition does not matter: no
    marker is sent before it is committed.
    """
    refused = _refuse_stranger(event, present)
    if refused is not None or present is None:
        return ev.VerifyPartitionsResult((refused or Refused(INVALID_MAPPING)).error)
    if present.state.is_prepared:
        return ev.VerifyPartitionsResult(CONCURRENT)
    return ev.VerifyPartitionsResult(absent=event.partitions - present.partitions)


def decide_end(
    event: ev.EndTransaction,
    present: TransactionMetadata | None,
    *,
    pending: bool,
    fresh_producer_id: int | None,
    now_ms: int,
) -> Decision:
    """EndTxn, of a TV1 producer, whose epoch stays, or of a TV2 one, whose epoch grows."""
    if event.client_version >= txn.TV2:
        return _decide_end_tv2(event, present, pending, fresh_producer_id, now_ms)
    refused = _refuse_stranger(event, present)
    if refused is not None or present is None:
        return refused or Refused(INVALID_MAPPING)
    if pending:
        return Refused(CONCURRENT)
    if present.state is txn.ONGOING:
        return Transition(
            txn.prepare_end(present, is_commit=event.is_commit, client_version=0, now_ms=now_ms)
        )
    return Unchanged() if _ended_as(event, present) else Refused(INVALID_STATE)


def _decide_end_tv2(
    event: ev.EndTransaction,
    present: TransactionMetadata | None,
    pending: bool,
    fresh_producer_id: int | None,
    now_ms: int,
) -> Decision:
    if pending:
        return Refused(CONCURRENT)
    if present is None:
        return Refused(INVALID_MAPPING)
    ended = present.client_version >= txn.TV2 and present.state is not txn.ONGOING
    overflowed = (
        ended
        and event.producer_id == present.previous_producer_id != present.producer_id
        and event.epoch == txn.EXHAUSTED_EPOCH
        and present.epoch == 0
    )
    if event.producer_id != present.producer_id and not overflowed:
        return Refused(INVALID_MAPPING)
    if overflowed or (ended and event.epoch == present.epoch - 1):
        if present.state is txn.EMPTY:
            return Refused(FENCED)
        return Unchanged() if _ended_as(event, present) else Refused(INVALID_STATE)
    if event.epoch != present.epoch:
        return Refused(FENCED)
    if present.state is not txn.ONGOING and event.is_commit:
        return Refused(INVALID_STATE)
    next_producer_id = NO_PRODUCER_ID
    if txn.is_exhausted(present):
        if fresh_producer_id is None:
            return ProducerIdNeeded()
        next_producer_id = fresh_producer_id
    return Transition(
        txn.prepare_end(
            present,
            is_commit=event.is_commit,
            client_version=txn.TV2,
            now_ms=now_ms,
            next_producer_id=next_producer_id,
        )
    )


def _ended_as(event: ev.EndTransaction, present: TransactionMetadata) -> bool:
    return present.state is (txn.COMPLETE_COMMIT if event.is_commit else txn.COMPLETE_ABORT)


def _refuse_stranger(
    event: ev.AddPartitions | ev.VerifyPartitions | ev.EndTransaction,
    present: TransactionMetadata | None,
) -> Refused | None:
    """Who is not the id's present producer in its present epoch."""
    if present is None or event.producer_id != present.producer_id:
        return Refused(INVALID_MAPPING)
    return Refused(FENCED) if event.epoch != present.epoch else None
