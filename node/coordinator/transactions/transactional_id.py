"""What a core holds of its transactional ids, and of an append that is not committed yet.

Most ids have no transaction: of such a one :class:`TransactionalIds` keeps 43 bytes, whether it was
read from the log or was in use a moment ago.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct

from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions import transaction as txn
from kept.node.coordinator.transactions.records import TransactionMetadata, TransactionState
from kept.steps import Steps
from kept.storage.errors import InvariantViolation
from kept.storage.types import MAX_INT32, NO_PRODUCER_ID, TopicPartition

ID_BYTES: Final = 310
"""What an id holds in memory beside its text, which is there twice, once it has had a transaction
since this node started; half of it before. All are counted so: an id that was let in may be used.
"""
OPEN_BYTES: Final = 450
"""What one holds beside that whose transaction has partitions."""
PARTITION_BYTES: Final = 128
PARTITIONS_SHARE: Final = 8
"""Partitions of transactions may take this fraction of the limit above it."""


@dataclass(slots=True)
class IdMemory:
    """What the transactional ids of all cores of a node hold, about."""

    used_bytes: int = 0


def size_bytes(name: str, partitions: int) -> int:
    """What an id holds in memory, about, with so many partitions; nothing with -1."""
    if partitions < 0:
        return 0
    open_bytes = OPEN_BYTES + PARTITION_BYTES * partitions if partitions else 0
    return ID_BYTES + 2 * sys.getsizeof(name) + open_bytes


class TransactionalId(Struct, gc=False):
    """One id; ``committed`` None until its first record is committed.

    ``pending`` is the append of its pending transition, of the newer one where a transaction begins
    behind the completion of the one before. ``unwritten`` are the partitions of a
    transaction that ends which have no marker yet. ``deadline_ms``: when an open one times out.
    """

    committed: TransactionMetadata | None = None
    pending: int | None = None
    unwritten: frozenset[TopicPartition] = frozenset()
    deadline_ms: int | None = None
    parked: tuple[ev.AddPartitions, ...] = ()
    counted: int = -1
    """With so many partitions it is counted in the memory of the node's ids; -1: it is not."""

    @property
    def rests(self) -> bool:
        """No transaction is open, nothing is under way."""
        metadata = self.committed
        return (
            metadata is not None
            and txn.is_idle(metadata)
            and not metadata.partitions
            and metadata.next_producer_id == NO_PRODUCER_ID
            and self.pending is None
            and self.deadline_ms is None
            and not (self.unwritten or self.parked or self.counted)
        )

    @property
    def is_pending(self) -> bool:
        """No request may change it now."""
        ending = self.committed is not None and self.committed.state.is_prepared
        return ending or self.pending is not None

    def describe(self, name: str) -> ev.DescribedTransaction | None:
        """It in full; None before its first record is committed."""
        metadata = self.committed
        if metadata is None:
            return None
        return ev.DescribedTransaction(
            name,
            metadata.state,
            metadata.timeout_ms,
            metadata.producer_id,
            metadata.epoch,
            self.unwritten if metadata.state.is_prepared else metadata.partitions,
            metadata.start_ms,
        )

    def check_invariants(self, name: str) -> None:
        """Raise InvariantViolation when its state contradicts itself."""
        metadata = self.committed
        if self.parked and not self.is_pending:
            raise InvariantViolation(f"requests of {name!r} are parked for nothing")
        if metadata is None:
            if self.pending is None:
                raise InvariantViolation(f"{name!r} is held without a state")
            return
        state = metadata.state
        if state is txn.EMPTY and (metadata.partitions or metadata.start_ms >= 0):
            raise InvariantViolation(f"{name!r} is empty, yet has {metadata}")
        if self.unwritten and not (state.is_prepared and self.unwritten <= metadata.partitions):
            raise InvariantViolation(f"{name!r} writes markers in {state.name}")
        times_out = state is txn.ONGOING and metadata.timeout_ms != MAX_INT32
        if times_out != (self.deadline_ms is not None):
            raise InvariantViolation(f"{name!r} in {state.name} has the wrong deadline")
        rotates = metadata.next_producer_id != NO_PRODUCER_ID
        if rotates and not (state.is_prepared and metadata.epoch == txn.LAST_EPOCH):
            raise InvariantViolation(f"{name!r} has a next producer id: {metadata}")


_RESTING: Final = struct.Struct(">qqqqihhhb")
"""Producer id, previous one, begin, last update, timeout, epoch, last epoch, client's version,
state."""


class TransactionalIds(MutableMapping[str, TransactionalId]):
    """Ids by name. One that rests is packed: what is got of it is a copy. Whoever changes an id
    takes it with :meth:`hold`, and says :meth:`let_rest` in the end.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[str, TransactionalId | bytes] = {}

    def __getitem__(self, name: str) -> TransactionalId:
        held = self._held[name]
        return held if isinstance(held, TransactionalId) else _unpacked(held)

    def __setitem__(self, name: str, held: TransactionalId) -> None:
        self._held[name] = _packed(held) if held.rests else held

    def __delitem__(self, name: str) -> None:
        del self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def hold(self, name: str) -> TransactionalId:
        """An id that is to be changed; a new one, if there is none of that name."""
        held = self._held.get(name)
        if not isinstance(held, TransactionalId):
            held = self._held[name] = TransactionalId() if held is None else _unpacked(held)
        return held

    def let_rest(self, name: str) -> None:
        """An id was changed, or is gone."""
        held = self._held.get(name)
        if isinstance(held, TransactionalId):
            self[name] = held

    def states(self) -> Iterator[TransactionState]:
        """That of each id, as they are now: they may change meanwhile."""
        for held in tuple(self._held.values()):
            if not isinstance(held, TransactionalId):
                yield _STATES[held[-1]]
            elif held.committed is not None:
                yield held.committed.state

    def release(self, memory: IdMemory) -> Steps[None]:
        """Forget all, and count them out of the memory of the node's ids."""
        while self._held:
            name, held = self._held.popitem()
            partitions = held.counted if isinstance(held, TransactionalId) else 0
            memory.used_bytes -= size_bytes(name, partitions)
            yield


_STATES: Final = tuple(TransactionState)


def _packed(held: TransactionalId) -> bytes:
    metadata = held.committed
    assert metadata is not None
    return _RESTING.pack(
        metadata.producer_id,
        metadata.previous_producer_id,
        metadata.start_ms,
        metadata.last_update_ms,
        metadata.timeout_ms,
        metadata.epoch,
        metadata.last_epoch,
        metadata.client_version,
        metadata.state,
    )


def _unpacked(resting: bytes) -> TransactionalId:
    (
        producer_id,
        previous_producer_id,
        start_ms,
        last_update_ms,
        timeout_ms,
        epoch,
        last_epoch,
        client_version,
        state,
    ) = _RESTING.unpack(resting)
    metadata = TransactionMetadata(
        producer_id,
        epoch,
        timeout_ms,
        _STATES[state],
        start_ms=start_ms,
        last_update_ms=last_update_ms,
        previous_producer_id=previous_producer_id,
        last_epoch=last_epoch,
        client_version=client_version,
    )
    return TransactionalId(metadata, counted=0)


@dataclass(slots=True)
class PendingTransition:
    """Transitions of ids (None: forgotten) that are appended, and the request that waits for them,
    with its result. ``completes``: it is the completion of a transaction.
    """

    transitions: Mapping[str, TransactionMetadata | None]
    request: ev.ClientRequest | None = None
    result: Any = None
    completes: bool = False
