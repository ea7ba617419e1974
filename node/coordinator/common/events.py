"""Events and effects that every :class:`~.core.ShardCore` has: its appends and its responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from kio.schema.errors import ErrorCode
from msgspec import Struct

if TYPE_CHECKING:
    from kept.storage.producers.verification import VerificationGuard

TV2: Final = 2
"""The version of transactions from which on each end brings a new epoch of the producer."""


class Record(Protocol):
    """A record of the log."""

    def encode(self) -> tuple[bytes, bytes | None]:
        """Key and value; a tombstone has no value."""
        ...


class TransactionalProducer(Struct, frozen=True):
    """In whose open transaction records are appended: as a transactional batch. ``guard``: proof
    that the transaction is open, where the log does not know it yet.
    """

    producer_id: int
    epoch: int
    guard: VerificationGuard | None = None


class EndMarker(Struct, frozen=True):
    """The end of a producer's transaction, as WriteTxnMarkers brings it.

    ``version`` is that of the transaction, 0 or 2; ``coordinator_epoch`` the leader epoch of who
    coordinates it.
    """

    producer_id: int
    epoch: int
    coordinator_epoch: int
    is_commit: bool
    version: int = 0

    @property
    def is_tv2(self) -> bool:
        """Whether its epoch is a new one."""
        return self.version >= TV2


# Events.


class AppendStaged(Struct, frozen=True):
    """The records of an :class:`AppendRecords` have offsets from ``base_offset`` on, but are not
    written yet. Comes before any other event after it.
    """

    append: int
    base_offset: int


class AppendRejected(Struct, frozen=True):
    """The records of an :class:`AppendRecords` were not written, and are undone. Comes before any
    other event after it.
    """

    append: int
    error: ErrorCode


class AppendCommitted(Struct, frozen=True):
    """The records of an :class:`AppendRecords` are safe."""

    append: int


class AppendTimedOut(Struct, frozen=True):
    """The records were written but not committed in time (yet); the client gets ``error``."""

    append: int
    error: ErrorCode


AppendEvent = AppendStaged | AppendRejected | AppendCommitted | AppendTimedOut


# Effects.


class AppendRecords(Struct, frozen=True):
    """Append these records, or a marker alone; then step AppendStaged or AppendRejected at once,
    and AppendCommitted or AppendTimedOut later, with this number.

    ``atomic``: in one batch. The others may be spread over several. ``producer``: the batch is
    part of its transaction. ``lazy``: nobody waits for it, so it may be staged for a moment, to be
    written with what comes next.
    """

    append: int
    records: tuple[Record, ...] = ()
    atomic: bool = True
    producer: TransactionalProducer | None = None
    marker: EndMarker | None = None
    lazy: bool = False


class Response(Struct, frozen=True):
    """Respond to a request; what ``result`` may be is the matter of the core.

    ``unproven``: what to say in its stead unless it is proven that this node leads the partition
    still; None: no proof is needed. What is committed proves itself, what is said from memory
    alone does not: another node may have led meanwhile.
    """

    request: int
    result: Any
    unproven: Any = None
