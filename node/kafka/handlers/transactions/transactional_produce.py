"""Transactional batches of a Produce request, before they are appended.

A batch goes into the log only while its transaction is open and holds the partition. After the
first one the log knows that itself; for the first one the coordinator is asked (KIP-890): to verify
it, or, from Produce v12 on, to add the partition. Meanwhile later requests of the connection wait.

A duplicate is answered before anybody is asked (ours): a producer whose answer was lost may have
ended the transaction since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kept.node.runtime import error_codes
from kept.storage import errors
from kept.storage.errors import KeptError
from kept.storage.types import NO_LEADER_EPOCH

if TYPE_CHECKING:
    from kio.schema.errors import ErrorCode

    from kept.node.coordinator.transactions.verifier import Verifier
    from kept.node.kafka.handlers.records.produce import Outcome
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.runtime.completable_future import CompletableFuture
    from kept.node.runtime.runtime import Runtime
    from kept.replication.partition import Partition
    from kept.storage.producers.verification import VerificationGuard
    from kept.storage.records import CheckedBatch
    from kept.storage.types import TopicPartition

ADDS_SINCE: Final = 12
"""From this version of Produce on a producer does not add partitions to its transaction itself."""
ABORTABLE_SINCE: Final = 11
"""From this version of Produce on clients know TRANSACTION_ABORTABLE."""

_REFUSALS: Final[Mapping[int, type[KeptError]]] = {
    error_codes.code_for(kind()): kind
    for kind in (
        errors.UnknownTopicOrPartition,
        errors.InvalidRequest,
        errors.InvalidProducerEpoch,
        errors.InvalidTxnState,
        errors.InvalidProducerIdMapping,
        errors.ConcurrentTransactions,
        errors.TransactionalIdAuthorizationFailed,
        errors.OperationNotAttempted,
        errors.TransactionAbortable,
    )
} | {
    error_codes.code_for(errors.ProducerFenced()): errors.InvalidProducerEpoch,
    **dict.fromkeys(
        map(
            error_codes.code_for,
            (
                errors.NetworkException(),
                errors.CoordinatorLoadInProgress(),
                errors.CoordinatorNotAvailable(),
                errors.NotCoordinator(),
            ),
        ),
        errors.NotEnoughReplicas,
    ),
}
"""What a producer hears for what the coordinator said. NOT_ENOUGH_REPLICAS is the one code at which
all of them send the batch again without asking for the leader.
"""


class Verification:
    """What one request asks, and the guards of its batches by their place in the request."""

    __slots__ = ("_version", "coordinator_epoch", "guards", "places", "producers", "response")

    def __init__(self, version: int) -> None:
        self._version = version
        self.guards: dict[int, VerificationGuard] = {}
        self.places: dict[int, TopicPartition] = {}
        self.producers: dict[int, tuple[Partition, int]] = {}
        """The partition and the producer id of each batch that is verified."""
        self.coordinator_epoch = NO_LEADER_EPOCH
        """Of whoever was asked, as far as this node knew."""
        self.response: CompletableFuture[Mapping[TopicPartition, ErrorCode]] | None = None
        """None: nobody needs to be asked."""

    @property
    def is_known(self) -> bool:
        """Nobody needs to be waited for."""
        return self.response is None or self.response.done()

    def refuse(self, outcomes: list[Outcome]) -> None:
        """Put what was refused into ``outcomes``, once :attr:`response` is there. Where the answer
        is yes, markers of an earlier coordinator are too late from now on. Not before: anybody may
        name a producer id that is another's, with a transactional id of his own. The yes of a
        coordinator that is not the newest counts for nothing.
        """
        if self.response is None:
            return
        codes = self.response.result()
        for place, tp in self.places.items():
            code = int(codes[tp])
            if code != error_codes.NONE:
                outcomes[place] = _refused(code, tp, self._version)
            elif self.coordinator_epoch != NO_LEADER_EPOCH:
                partition, producer_id = self.producers[place]
                try:
                    partition.note_coordinator_epoch(producer_id, self.coordinator_epoch)
                except errors.TransactionCoordinatorFenced as error:
                    outcomes[place] = errors.NotEnoughReplicas(f"to be asked again: {error}")


def _refused(code: int, tp: TopicPartition, version: int) -> KeptError:
    kind = _REFUSALS.get(code, KeptError)
    if version < ABORTABLE_SINCE and kind is errors.TransactionAbortable:
        kind = errors.InvalidTxnState
    if version < ADDS_SINCE and kind is errors.ConcurrentTransactions:
        kind = errors.NotEnoughReplicas
    return kind(f"{tp.place}: the transaction's coordinator answered {code}")


class TransactionalBatches:
    """Finds out for the requests of all connections what their batches need."""

    def __init__(self, runtime: Runtime, verifier: Verifier) -> None:
        self._runtime = runtime
        self._verifier = verifier

    def begin(
        self,
        transactional_id: bytes | None,
        version: int,
        batches: dict[int, tuple[LocalReplica, CheckedBatch]],
        outcomes: list[Outcome],
    ) -> Verification:
        """Ask for the transactional ``batches`` of a request, by their place in ``outcomes``; into
        these goes what is refused at once.
        """
        verification = Verification(version)
        producers = {(b.producer_id, b.producer_epoch) for _, b in batches.values()}
        refusal: KeptError | None = None
        if transactional_id is None:
            refusal = errors.TransactionalIdAuthorizationFailed(
                "a transactional batch in a request without a transactional id"
            )
        elif len(producers) > 1:
            refusal = errors.InvalidProducerIdMapping(
                f"batches of {len(producers)} transactional producers in one request"
            )
        elif any(producer_id < 0 for producer_id, _ in producers):
            refusal = errors.InvalidProducerIdMapping("a transactional batch of no producer")
        if refusal is not None:
            outcomes[:] = [refusal] * len(outcomes)
            return verification
        assert transactional_id is not None
        adds = version >= ADDS_SINCE
        now_ms = self._runtime.now_ms()
        for place, (hosted, batch) in batches.items():
            try:
                guard = hosted.partition.verification_guard(
                    batch.producer_id,
                    batch.producer_epoch,
                    batch.base_sequence,
                    batch.record_count,
                    is_tv2=adds,
                    now_ms=now_ms,
                )
            except KeptError as error:
                outcomes[place] = error.without_frames()
                continue
            if guard is not None:
                verification.guards[place] = guard
                verification.places[place] = hosted.partition.topic_partition
        if verification.guards:
            text = transactional_id.decode("utf-8", "replace")
            self._ask(verification, text, batches, adds)
        return verification

    def _ask(
        self,
        verification: Verification,
        transactional_id: str,
        batches: dict[int, tuple[LocalReplica, CheckedBatch]],
        adds: bool,
    ) -> None:
        verification.coordinator_epoch = self._verifier.coordinator_epoch(transactional_id)
        for place in verification.guards:
            hosted, batch = batches[place]
            verification.producers[place] = (hosted.partition, batch.producer_id)
        partitions = frozenset(verification.places.values())
        verification.response = self._verifier.verify(
            transactional_id, batch.producer_id, batch.producer_epoch, partitions, adds=adds
        )
