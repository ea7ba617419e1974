"""Events and effects of a :class:`~.core.TransactionCore`, and the results of its requests.

Events go into :meth:`.core.TransactionCore.step`, effects come out, in the order in which the
shell must carry them out. Appends and responses are those of
:mod:`kept.node.coordinator.common.events`.
``request`` is the number that the shell gave the request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

from kio.schema.errors import ErrorCode
from msgspec import Struct

from kept.node.coordinator.common.events import AppendEvent, AppendRecords, EndMarker, Response
from kept.node.coordinator.transactions.id_pattern import IdPattern
from kept.node.coordinator.transactions.records import NO_PRODUCER_EPOCH, TransactionState
from kept.storage.types import NO_PRODUCER_ID, NO_TIMESTAMP, TopicPartition

NO_ERROR: Final = ErrorCode.none


class TransactionSettings(Struct, frozen=True):
    """The node's settings for transactions; names, units and defaults are Kafka's.

    ``transaction_version`` is the finalized level of the feature. ``closes_stale_connections`` and
    ``ids_max_bytes`` are ours: ``kept.transaction.stale.connections=close``,
    ``kept.transactional.ids.max.bytes``.
    """

    transaction_max_timeout_ms: int = 900_000
    abort_timed_out_interval_ms: int = 10_000
    remove_expired_interval_ms: int = 3_600_000
    transactional_id_expiration_ms: int = 604_800_000
    add_partitions_retry_backoff_max_ms: int = 100
    transaction_version: int = 0
    closes_stale_connections: bool = True
    ids_max_bytes: int = 512 << 20


class ClientConnection(Struct, frozen=True):
    """Which connection carried a request of a client: its ordinal of accept in this process, and
    the request's API key.
    """

    ordinal: int
    api_key: int


# Events of clients.


class InitProducerId(Struct, frozen=True):
    """An InitProducerId with a transactional id; ``producer_id`` and ``epoch`` from v3 on, -1 where
    the producer has none.
    """

    request: int
    transactional_id: str
    timeout_ms: int
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH


class AddPartitions(Struct, frozen=True):
    """Partitions, all of which exist, to add to the transaction: AddPartitionsToTxn, and
    AddOffsetsToTxn with the partition of ``__consumer_offsets``.

    ``client_version`` is 2 from AddPartitionsToTxn v4 on, which brokers send, else 0.
    ``connection``: of a TV1 client, None where staleness does not matter.
    """

    request: int
    transactional_id: str
    producer_id: int
    epoch: int
    partitions: frozenset[TopicPartition]
    client_version: int = 0
    connection: ClientConnection | None = None


class VerifyPartitions(Struct, frozen=True):
    """An AddPartitionsToTxn that only verifies: are the partitions in the open transaction?"""

    request: int
    transactional_id: str
    producer_id: int
    epoch: int
    partitions: frozenset[TopicPartition]


class EndTransaction(Struct, frozen=True):
    """An EndTxn. ``client_version`` is 2 from v5 on, else 0."""

    request: int
    transactional_id: str
    producer_id: int
    epoch: int
    is_commit: bool
    client_version: int = 0
    connection: ClientConnection | None = None


Change = InitProducerId | AddPartitions | EndTransaction
ClientRequest = Change | VerifyPartitions

# Events of the node.


class ProducerIdAllocated(Struct, frozen=True):
    """What a :class:`AllocateProducerId` wanted."""

    producer_id: int


class ProducerIdAllocationFailed(Struct, frozen=True):
    """A :class:`AllocateProducerId` failed; the client gets ``error``."""

    error: ErrorCode


class MarkersWritten(Struct, frozen=True):
    """Partitions that have the marker, or need none: an effect of :class:`~.markers.MarkerSender`,
    and an event of the core of partition ``state_partition`` of ``__transaction_state``.
    """

    state_partition: int
    marker: EndMarker
    partitions: frozenset[TopicPartition]


Event = (
    ClientRequest | ProducerIdAllocated | ProducerIdAllocationFailed | MarkersWritten | AppendEvent
)


# Effects.


class AllocateProducerId(Struct, frozen=True):
    """Draw a fresh producer id, then step ProducerIdAllocated or ProducerIdAllocationFailed."""


class WriteMarkers(Struct, frozen=True):
    """Have the marker written to the partitions: an event of the :class:`~.markers.MarkerSender`
    of the node. MarkersWritten says, piece by piece, that it is.
    """

    state_partition: int
    marker: EndMarker
    partitions: frozenset[TopicPartition]


class NoteTransaction(Struct, frozen=True):
    """Something for the node's log: a transactional id, or a producer, and what happened."""

    subject: str
    text: str


Effect = AppendRecords | Response | AllocateProducerId | WriteMarkers | NoteTransaction


# Results.


class InitProducerIdResult(Struct, frozen=True):
    """Response to :class:`InitProducerId`."""

    error: ErrorCode = NO_ERROR
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH


class AddPartitionsResult(Struct, frozen=True):
    """Response to :class:`AddPartitions`, for all of its partitions."""

    error: ErrorCode = NO_ERROR


class VerifyPartitionsResult(Struct, frozen=True):
    """Response to :class:`VerifyPartitions`; ``absent`` partitions are not in the transaction, and
    get TRANSACTION_ABORTABLE.
    """

    error: ErrorCode = NO_ERROR
    absent: frozenset[TopicPartition] = frozenset()

    @property
    def is_yes(self) -> bool:
        """All of the partitions are in the open transaction."""
        return self.error is NO_ERROR and not self.absent

    def errors(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, ErrorCode]:
        """What each of the partitions that were asked for gets, in their order."""
        errors = dict.fromkeys(partitions, self.error)
        if self.error is NO_ERROR:
            errors |= dict.fromkeys(self.absent, ErrorCode.transaction_abortable)
        return errors


class EndTransactionResult(Struct, frozen=True):
    """Response to :class:`EndTransaction`; the producer id and epoch to go on with (v5)."""

    error: ErrorCode = NO_ERROR
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH


class StaleConnection(Struct, frozen=True):
    """Response to a request whose client has come again over a newer connection: nothing was done,
    and nothing is to be said; close the connection.
    """


def failed(event: ClientRequest, error: ErrorCode) -> Any:
    """The result of a request that failed as a whole."""
    match event:
        case InitProducerId():
            return InitProducerIdResult(error)
        case AddPartitions():
            return AddPartitionsResult(error)
        case VerifyPartitions():
            return VerifyPartitionsResult(error)
    return EndTransactionResult(error)


# Queries.


class TransactionFilter(Struct, frozen=True):
    """What a ListTransactions asks for; what is empty, None or negative asks for all.

    ``pattern`` must match a whole id; ``longer_than_ms`` compares with the wall clock.
    """

    states: Collection[TransactionState] = ()
    producer_ids: Collection[int] = ()
    longer_than_ms: int = -1
    pattern: IdPattern | None = None


class ListedTransaction(Struct, frozen=True):
    """A transactional id in a list."""

    transactional_id: str
    producer_id: int
    state: TransactionState


class DescribedTransaction(Struct, frozen=True):
    """A transactional id in full; ``partitions`` are those without a marker yet."""

    transactional_id: str
    state: TransactionState
    timeout_ms: int
    producer_id: int
    epoch: int
    partitions: frozenset[TopicPartition] = frozenset()
    start_ms: int = NO_TIMESTAMP
