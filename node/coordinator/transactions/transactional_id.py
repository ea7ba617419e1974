"""What a core holds of one transactional id, and of an append that is not committed yet."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct

from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions import transaction as txn
from kept.node.coordinator.transactions.records import TransactionMetadata
from kept.storage.errors import InvariantViolation
from kept.storage.types import MAX_INT32, NO_PRODUCER_ID, TopicPartition

ID_BYTES: Final = 384
"""What an id holds in memory beside its text, which is there twice; 150 bytes more once it has had
a transaction since this node started.
"""
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
    return ID_BYTES + 2 * sys.getsizeof(name) + PARTITION_BYTES * partitions


class TransactionalId(Struct, gc=False):
    """What is held of one id; ``committed`` None until its first record is committed.

    ``pending`` is the append of its pending transition, of the newer one where a transaction begins
    behind the completion of the one before. ``unwritten`` are the partitions of a
    transaction that ends which have no marker yet. ``deadline_ms``: when an open one times out.
    Empty collections are those that all ids share: there may be a million ids.
    """

    committed: TransactionMetadata | None = None
    pending: int | None = None
    unwritten: frozenset[TopicPartition] = frozenset()
    deadline_ms: int | None = None
    parked: tuple[ev.AddPartitions, ...] = ()
    counted: int = -1
    """With so many partitions it is counted in the memory of the node's ids; -1: it is not."""

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


@dataclass(slots=True)
class PendingTransition:
    """Transitions of ids (None: forgotten) that are appended, and the request that waits for them,
    with its result. ``completes``: it is the completion of a transaction.
    """

    changes: Mapping[str, TransactionMetadata | None]
    request: ev.ClientRequest | None = None
    result: Any = None
    completes: bool = False
