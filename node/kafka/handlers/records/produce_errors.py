"""What a producer hears of a batch that is not taken.

**Sequences, epochs, transactions.** That a sequence is out of order is final to a producer, and
librdkafka then begins a new epoch and writes again what is in the log. It is true only of the log
of whoever leads, so it is said of a replicated partition once it is proven that this node did
(:mod:`kept.node.metadata.leadership_barrier`); else the producer is sent to look for the leader,
which may hold the batches that are missing here. And where a batch was turned away, those that were
sent behind it before the producer knew are turned away alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kept.node.kafka.codec import produce as codec
from kept.node.runtime import error_codes
from kept.storage.errors import (
    ConcurrentTransactions,
    CorruptMessage,
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidTopicException,
    InvalidTxnState,
    KafkaStorageError,
    KeptError,
    MessageTooLarge,
    NotEnoughReplicas,
    NotLeaderOrFollower,
    OutOfOrderSequenceNumber,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
    UnknownProducerId,
    UnknownTopicId,
    UnknownTopicOrPartition,
)

if TYPE_CHECKING:
    from kept.node.kafka.connection import Connection
    from kept.node.replicas.local_replica import LocalReplica

_NOT_JUDGED: Final = (
    UnknownTopicOrPartition,
    UnknownTopicId,
    NotLeaderOrFollower,
    MessageTooLarge,
    CorruptMessage,
    KafkaStorageError,
    InvalidTopicException,
    InvalidTxnState,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
)
"""Refusals that do not come from what is in the log: they say nothing of its start, as Kafka's."""


_OF_PRODUCERS: Final = (
    OutOfOrderSequenceNumber,
    InvalidProducerEpoch,
    UnknownProducerId,
    InvalidTxnState,
)
"""Final to a producer; true only of the log of whoever leads now."""
_COMES_AGAIN: Final = (NotLeaderOrFollower, NotEnoughReplicas, ConcurrentTransactions)
"""Refusals after which a producer sends the batch again."""
BEHIND_S: Final = 30.0
"""What was sent behind a refused batch has come after so long."""


def refusal(
    connection: Connection, index: int, error: KeptError, hosted: LocalReplica | None, now_s: float
) -> codec.PartitionResult:
    """The result of a batch that ``hosted`` did not take; it says where the log starts."""
    if hosted is not None:
        error = after_refused(connection, error, hosted, now_s)
    return refused_result(index, error, hosted)


def refused_result(
    index: int, error: KeptError, hosted: LocalReplica | None
) -> codec.PartitionResult:
    """As :func:`refusal`, of an error from :func:`after_refused`. Given to that again, a refusal
    that stands for another would keep itself alive, and a producer send its batch for ever.
    """
    result = failure(codec.PartitionResult(index, error_codes.NONE), error)
    if hosted is None or isinstance(error, _NOT_JUDGED):
        return result
    return result._replace(log_start_offset=hosted.partition.log_start_offset)


def needs_proof(error: KeptError, hosted: LocalReplica) -> bool:
    """Whether ``error`` may be said only by a leader that was not replaced unawares."""
    return hosted.partition.replicated and isinstance(error, _OF_PRODUCERS)


def after_refused(
    connection: Connection, error: KeptError, hosted: LocalReplica, now_s: float
) -> KeptError:
    """``error``, or that of a batch before it which comes again."""
    partition = hosted.partition
    if isinstance(error, _COMES_AGAIN):
        connection.turned_away[partition] = type(error), now_s + BEHIND_S
    elif isinstance(error, OutOfOrderSequenceNumber):
        kind, until_s = connection.turned_away.get(partition, (None, 0.0))
        if kind is not None and now_s < until_s:
            place = partition.topic_partition.place
            return kind(f"{place}: a batch before this one was refused; {error}")
    return error


def failure(result: codec.PartitionResult, error: BaseException) -> codec.PartitionResult:
    """The result of a batch that is not acknowledged. It keeps the offset that the batch was given,
    as Kafka's does: after NOT_LEADER_OR_FOLLOWER that tells a batch which may be in the log of the
    next leader from one that was not taken.
    """
    return result._replace(
        error_code=error_codes.code_for(error, "produce failed", partition=result.partition),
        record_errors=error.record_errors if isinstance(error, InvalidRecord) else (),
        error_message=error_codes.message_for(error),
    )
