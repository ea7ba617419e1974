"""What a TxnOffsetCommit needs before its offsets are appended: is its transaction open?

The log of the group's partition knows it once it holds records of the transaction. Before, the
transaction's coordinator is asked (KIP-890): to verify that the group was added to it or, from v5
on, to add it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from kept.node.coordinator.common.events import TransactionalProducer
from kept.storage.errors import TransactionCoordinatorFenced
from kept.storage.types import NO_LEADER_EPOCH, NO_SEQUENCE

if TYPE_CHECKING:
    from kept.node.coordinator.common.shard import Shard
    from kept.node.coordinator.transactions.verifier import Verifier
    from kept.node.runtime.runtime import Runtime

ADDS_SINCE: Final = 5
"""From this version on a producer does not add the group to its transaction itself."""
ABORTABLE_SINCE: Final = 4
"""From this version on clients know TRANSACTION_ABORTABLE."""
LOADING_SINCE: Final = 2
"""From this version on clients know COORDINATOR_LOAD_IN_PROGRESS here."""


@dataclass(frozen=True, slots=True)
class CommitVerification:
    """Verifies the transactions of TxnOffsetCommits."""

    runtime: Runtime
    verifier: Verifier

    async def producer_of(
        self, request: Any, version: int, shard: Shard[Any]
    ) -> TransactionalProducer | ErrorCode:
        """Whose batch the offsets are, or why the transaction's coordinator refuses them. Raises
        NotLeaderOrFollower, KafkaStorageError, InvalidProducerEpoch.
        """
        adds = version >= ADDS_SINCE
        producer_id, epoch = request.producer_id, request.producer_epoch
        guard = shard.partition.verification_guard(
            producer_id, epoch, NO_SEQUENCE, is_tv2=adds, now_ms=self.runtime.now_ms()
        )
        producer = TransactionalProducer(producer_id, epoch, guard)
        if guard is None:
            return producer
        transactional_id = request.transactional_id
        coordinator_epoch = self.verifier.coordinator_epoch(transactional_id)
        answers = await self.verifier.verify(
            transactional_id, producer_id, epoch, frozenset({shard.tp}), adds=adds
        )
        code = ErrorCode(answers[shard.tp])
        if code is ErrorCode.none and coordinator_epoch != NO_LEADER_EPOCH:
            try:
                shard.partition.note_coordinator_epoch(producer_id, coordinator_epoch)
            except TransactionCoordinatorFenced:
                return ErrorCode.coordinator_load_in_progress
        if code is ErrorCode.producer_fenced:
            return ErrorCode.invalid_producer_epoch
        if code is ErrorCode.transaction_abortable and version < ABORTABLE_SINCE:
            return ErrorCode.invalid_txn_state
        if code is ErrorCode.network_exception:
            return ErrorCode.coordinator_load_in_progress
        return producer if code is ErrorCode.none else code


def known_to(version: int, error: ErrorCode) -> ErrorCode:
    """The error as clients of that version of TxnOffsetCommit know it."""
    if error is ErrorCode.coordinator_load_in_progress and version < LOADING_SINCE:
        return ErrorCode.coordinator_not_available
    return error
