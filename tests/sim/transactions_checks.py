"""What transactions must be, judged by what producers were told and what readers find.

- ``torn``: of a transaction a reader of what is committed finds some records and misses others
  (I1);
- ``aborted-read``: it finds a record of a transaction whose commit nobody asked for (I1, I9);
- ``commit-lost``: a commit was acknowledged, and a record of it is not there (I1);
- ``offset-torn``: a group's offset is that of a transaction that did not commit, or is older than
  that of one that did (I12);
- ``producer-id``: a producer id has two transactional ids, or an epoch comes twice (I7);
- ``markers``: a marker lies within a transaction, a coordinator epoch falls (I2, I8), a record
  lies behind a marker of a later epoch, or behind that of its own transaction (I6);
- ``state``: in ``__transaction_state`` another end follows what was decided, or none (I3), a
  producer id or an epoch falls (I7);
- ``fenced``: what an instance sends is taken after a newer one was given an epoch (I6);
- ``producer-state``: what a replica knows of producers is not what follows from its log (I11);
- ``moved``: what copiers read is in what they wrote, once: all below the offsets that they
  committed in their transactions, and nothing twice (I10);
- ``described``: an operator is told what can't be;
- ``hanging``: at rest a transaction is open (I4, I5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from kept.storage.types import TopicPartition
from tests.sim.batches import Batch, Rec
from tests.sim.world import Violation

TRANSACTIONAL, CONTROL = 0x10, 0x20
MOVED: Final = b"moved "
NEVER: Final = float("inf")
PREPARED: Final = {2: 4, 3: 5}
"""PrepareCommit and PrepareAbort, and what must follow them."""
_STATE: Final = Struct(">hqhib")
"""How a value of ``__transaction_state`` begins: version, producer id, epoch, timeout, status."""


def moved(value: bytes, attempt: int) -> bytes:
    """What a copier makes of a record, unlike what it made of it in another transaction."""
    return MOVED + b"%d %s" % (attempt, value)


def source_of(value: bytes) -> bytes:
    """What :func:`moved` was made of."""
    return value.split(b" ", 2)[2]


@dataclass(eq=False)
class Transaction:
    """One transaction of a producer. ``number``: within its transactional id, it only grows.

    ``asked``: a commit was sent; ``committed_s``: when it was first known to be committed.
    """

    transactional_id: str
    number: int
    records: dict[bytes, tuple[TopicPartition, int]] = field(default_factory=dict)
    """Value -> where its acknowledgement says that it is."""
    offset: int = -1
    """What it commits for its group; -1: nothing."""
    asked: bool = False
    committed_s: float = NEVER

    def __repr__(self) -> str:
        return f"transaction {self.number} of {self.transactional_id}"


class TransactionChecks:
    """One per history; see the module. ``may_lose``: rule 33 gave something up."""

    def __init__(self, may_lose: Callable[[], bool]) -> None:
        self._may_lose = may_lose
        self.transactions: list[Transaction] = []
        self._by_value: dict[bytes, Transaction] = {}
        self._by_offset: dict[int, Transaction] = {}
        self._numbers: dict[str, int] = {}
        self._owners: dict[int, str] = {}
        self._newest: dict[str, tuple[int, int]] = {}
        self._moved: dict[bytes, tuple[TopicPartition, int]] = {}
        """What copiers read -> where it is among what they wrote."""
        self._given: dict[str, list[tuple[float, tuple[int, int]]]] = {}
        """By transactional id: when each producer id and epoch was given to an instance."""

    # Producers.

    def newest(self, transactional_id: str) -> tuple[int, int]:
        """The newest producer id and epoch that a transactional id was given."""
        return self._newest.get(transactional_id, (-1, -1))

    def initialized(
        self,
        transactional_id: str,
        known: tuple[int, int],
        producer_id: int,
        epoch: int,
        now_s: float,
    ) -> None:
        """InitProducerId was answered; ``known``: the newest when it was sent."""
        owner = self._owners.setdefault(producer_id, transactional_id)
        if owner != transactional_id and not self._may_lose():
            raise Violation("producer-id", f"{producer_id} is {owner}'s and {transactional_id}'s")
        given = producer_id, epoch
        if given <= known and not self._may_lose():
            raise Violation("producer-id", f"{transactional_id}: {given} after {known}")
        self._newest[transactional_id] = max(self.newest(transactional_id), given)
        self._given.setdefault(transactional_id, []).append((now_s, given))

    def served(
        self, transactional_id: str, producer_id: int, epoch: int, since_s: float, what: str
    ) -> None:
        """Something of an instance was taken that it sent at a time."""
        for given_s, given in self._given.get(transactional_id, ()):
            if given_s <= since_s and given > (producer_id, epoch) and not self._may_lose():
                raise Violation(
                    "fenced",
                    f"{transactional_id}: {what} of {producer_id}/{epoch} is taken, after {given}",
                )

    def late(self, transaction: Transaction, tp: TopicPartition, told: str) -> None:
        """A batch came when its transaction had ended there, and its sender was told this."""
        if told == "none" and not self._may_lose():
            raise Violation("markers", f"{tp}: a batch of {transaction} is taken behind its marker")

    def described(self, transactional_id: str, producer_id: int, epoch: int) -> None:
        """A coordinator says who an id's producer is; -1 an epoch that was not given yet."""
        owner = self._owners.get(producer_id, transactional_id)
        if owner != transactional_id and not self._may_lose():
            raise Violation("described", f"{producer_id}/{epoch} is {owner}'s")

    def begins(self, transactional_id: str) -> Transaction:
        """A producer begins a transaction."""
        number = self._numbers.get(transactional_id, 0) + 1
        self._numbers[transactional_id] = number
        made = Transaction(transactional_id, number)
        self.transactions.append(made)
        return made

    def sends(self, transaction: Transaction, values: Iterable[bytes]) -> None:
        """Values that are sent in it."""
        self._by_value.update(dict.fromkeys(values, transaction))

    def sends_offset(self, transaction: Transaction, offset: int) -> None:
        """An offset that is sent in it."""
        transaction.offset = offset
        self._by_offset[offset] = transaction

    # Readers.

    def visible(self, who: str, tp: TopicPartition, offset: int, value: bytes) -> None:
        """A reader of what is committed finds a record."""
        transaction = self._by_value.get(value)
        if (transaction is None or not transaction.asked) and not self._may_lose():
            raise Violation("aborted-read", f"{who} reads {value[:30]!r} of {transaction}")
        if value.startswith(MOVED):
            source = source_of(value)
            known = self._moved.setdefault(source, (tp, offset))
            if known != (tp, offset) and not self._may_lose():
                raise Violation("moved", f"{source[:30]!r} is at {known} and {(tp, offset)}")

    def all_moved(self, tp: TopicPartition, committed: int, records: Iterable[Rec]) -> None:
        """What copiers read below the offset that they committed is in what they wrote."""
        for rec in records:
            source = rec.value or b""
            if rec.offset < committed and source not in self._moved and not self._may_lose():
                raise Violation("moved", f"{tp}: {rec} is below {committed}, and was not moved")

    def offset_read(self, group: str, since_s: float, offset: int) -> None:
        """A read of a group's stable offset, which began at a time, found one; -1: none."""
        if self._may_lose():
            return
        found = self._by_offset.get(offset)
        if offset >= 0 and (found is None or not found.asked):
            raise Violation("offset-torn", f"{group} has {offset} of {found}")
        number = -1 if found is None else found.number
        for other in self.transactions:
            due = other.transactional_id == group and other.offset >= 0
            if due and other.committed_s <= since_s and other.number > number:
                raise Violation("offset-torn", f"{group} has {offset}, {other} has {other.offset}")

    def finish(
        self,
        there: dict[TopicPartition, dict[int, bytes]],
        superseded: Callable[[TopicPartition, int], bool],
    ) -> None:
        """At the end: what readers of each partition find. ``superseded``: a pass may have removed
        what was committed there.
        """
        for one in self.transactions:
            held = {
                value: there[tp].get(at) == value or superseded(tp, at)
                for value, (tp, at) in one.records.items()
            }
            gone = [value[:30] for value, is_there in held.items() if not is_there]
            if self._may_lose() or not gone or not one.asked:
                continue
            if one.committed_s < NEVER:
                raise Violation("commit-lost", f"{one} was committed; missing: {gone}")
            if len(gone) < len(held):
                raise Violation("torn", f"{one}: missing: {gone} of {len(held)}")

    def states(self, tp: TopicPartition, records: Iterable[Rec]) -> None:
        """The committed records of a partition of ``__transaction_state``, at rest."""
        held: dict[bytes, tuple[int, int, int]] = {}
        for rec in records:
            if rec.value is None:
                held.pop(rec.key, None)
                continue
            _, pid, epoch, _, status = _STATE.unpack_from(rec.value)
            before = held.get(rec.key, (-1, -1, 0))
            must = PREPARED.get(before[2], status)
            back = status not in (must, before[2]) or (pid, epoch) < before[:2]
            if back and not self._may_lose():
                raise Violation("state", f"{tp}: {(pid, epoch, status)} of {rec} after {before}")
            held[rec.key] = pid, epoch, status
        for key, state in held.items():
            if state[2] in PREPARED:
                raise Violation("state", f"{tp}: {key!r} stays in {state}")

    def producers(
        self,
        who: str,
        tp: TopicPartition,
        batches: list[Batch],
        known: dict[int, tuple[int, int, int, int | None]],
    ) -> None:
        """All batches of a replica, and what it knows: producer id -> (epoch, last sequence, epoch
        of its coordinator, where its open transaction begins).
        """
        follows: dict[int, tuple[int, int, int, int | None]] = {}
        for batch in batches:
            pid, epoch = batch.producer_id, batch.producer_epoch
            if pid < 0:
                continue
            before, last, coordinator, first = follows.get(pid, (epoch, -1, -1, None))
            last = last if epoch == before else -1
            if batch.attributes & CONTROL:
                assert batch.marker is not None
                coordinator, first = batch.marker[1], None
            else:
                last = batch.last_sequence
                if batch.attributes & TRANSACTIONAL and first is None:
                    first = batch.base
            follows[pid] = epoch, last, coordinator, first
        if follows != known:
            odd = {
                pid for pid in follows.keys() | known.keys() if follows.get(pid) != known.get(pid)
            }
            shown = [(pid, follows.get(pid), known.get(pid)) for pid in sorted(odd)[:3]]
            raise Violation("producer-state", f"{who} {tp}: (id, by its log, known): {shown}")

    def log(self, tp: TopicPartition, batches: list[Batch], records: Iterable[Rec]) -> None:
        """The committed batches of a partition, and those of their records that are still there."""
        if self._may_lose():
            return
        owners = {rec.offset: self._by_value.get(rec.value or b"") for rec in records}
        coordinators: dict[int, int] = {}
        ended: dict[int, int] = {}
        newest: dict[int, Transaction] = {}
        over: dict[int, Transaction] = {}
        for batch in batches:
            pid = batch.producer_id
            if batch.attributes & CONTROL and batch.marker is not None:
                _, coordinator_epoch = batch.marker
                if coordinator_epoch < coordinators.get(pid, -1):
                    raise Violation("markers", f"{tp}: {batch}: coordinator {coordinator_epoch}")
                coordinators[pid] = coordinator_epoch
                ended[pid] = max(batch.producer_epoch, ended.get(pid, -1))
                if pid in newest:
                    over[pid] = newest[pid]
            elif batch.attributes & TRANSACTIONAL:
                if batch.producer_epoch < ended.get(pid, -1):
                    raise Violation(
                        "markers", f"{tp}: {batch} of epoch {batch.producer_epoch} is late"
                    )
                held = (owners.get(offset) for offset in range(batch.base, batch.last + 1))
                owner = next((one for one in held if one is not None), None)
                if owner is not None and owner is over.get(pid):
                    raise Violation("markers", f"{tp}: a marker lies within {owner}, at {batch}")
                if owner is not None:
                    newest[pid] = owner
