"""Guards of transactions that a log has not seen a batch of yet (KIP-890).

The first batch of a transaction is appended only after its coordinator was asked whether the
transaction is open, and holds this partition. Until the answer is here the transaction may have
ended, its marker may be in the log, and the next one may have begun: an old answer must not count
for that one. So whoever asks holds a :class:`VerificationGuard`, by its identity; what settles the
matter lets it go, and an append with a guard that is gone is refused.

Ours: whoever asks knows in which leader epoch the coordinator is. A marker of an older one was sent
by its predecessor, and would end a transaction that began since.

Guards are in the memory of a leader only. Kafka: ``VerificationStateEntry``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from kept.storage.types import NO_LEADER_EPOCH

MOST_OF_A_LOG: Final = 10_000
"""Guards of a log, and epochs of coordinators; one more makes the oldest go."""
MOST_OF_ALL: Final = 100_000
"""Of all logs of a node, guards and epochs together: some 40 MB."""


class VerificationQuota:
    """What several logs hold together: one more than ``limit`` makes the oldest of all go, for what
    is asked now is young. On the loop, but for what the last of a log does.
    """

    __slots__ = ("_entries", "limit")

    def __init__(self, limit: int = MOST_OF_ALL) -> None:
        self.limit = limit
        self._entries: OrderedDict[tuple[int, int], dict[int, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, table: dict[int, Any], producer_id: int) -> None:
        """A log's table has one more entry."""
        self._entries[id(table), producer_id] = table
        while len(self._entries) > self.limit:
            (_, oldest), its = self._entries.popitem(last=False)
            its.pop(oldest, None)

    def remove(self, table: dict[int, Any], producer_id: int) -> None:
        """It has that entry no more."""
        self._entries.pop((id(table), producer_id), None)


class VerificationGuard:
    """One producer whose coordinator is asked. The object itself is the proof, not its values.

    ``lowest_sequence``: of the batches that were asked for in ``epoch``; -1 for batches of a
    coordinator, which have none. A batch that was refused while a later one was verified would
    otherwise never fit. ``leader_epoch``: of the leader that made it. ``is_tv2``: the producer's
    epoch grows with every transaction (transaction version 2).
    """

    __slots__ = ("created_ms", "epoch", "is_tv2", "leader_epoch", "lowest_sequence")

    def __init__(
        self, epoch: int, sequence: int, *, is_tv2: bool, leader_epoch: int, now_ms: int
    ) -> None:
        self.epoch = epoch
        self.lowest_sequence = sequence
        self.is_tv2 = is_tv2
        self.leader_epoch = leader_epoch
        self.created_ms = now_ms


class VerificationGuards:
    """The guards of a log by producer id, the oldest first; ``quota``: what it shares with other
    logs.
    """

    __slots__ = ("_coordinator_epochs", "_guards", "_quota")

    def __init__(self, quota: VerificationQuota | None = None) -> None:
        self._quota = VerificationQuota() if quota is None else quota
        self._guards: dict[int, VerificationGuard] = {}
        self._coordinator_epochs: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._guards)

    def get(self, producer_id: int) -> VerificationGuard | None:
        """The guard of a producer; None: nobody asked since it was settled."""
        return self._guards.get(producer_id)

    def obtain(
        self,
        producer_id: int,
        epoch: int,
        sequence: int,
        *,
        is_tv2: bool,
        leader_epoch: int,
        now_ms: int,
    ) -> VerificationGuard:
        """The guard to ask with: the one that is there, unless ``epoch`` is newer."""
        guard = self._guards.get(producer_id)
        if guard is None or epoch > guard.epoch or guard.leader_epoch != leader_epoch:
            guard = VerificationGuard(
                epoch, sequence, is_tv2=is_tv2, leader_epoch=leader_epoch, now_ms=now_ms
            )
            self._put(self._guards, producer_id, guard)
        elif epoch == guard.epoch:
            guard.lowest_sequence = min(guard.lowest_sequence, sequence)
            self._put(self._guards, producer_id, guard)
        return guard

    def note_coordinator_epoch(self, producer_id: int, epoch: int) -> None:
        """A producer's coordinator said yes, which is known to be in that leader epoch."""
        epoch = max(epoch, self.coordinator_epoch(producer_id))
        self._put(self._coordinator_epochs, producer_id, epoch)

    def coordinator_epoch(self, producer_id: int) -> int:
        """The leader epoch below which markers of a producer are outdated; -1: not known."""
        return self._coordinator_epochs.get(producer_id, NO_LEADER_EPOCH)

    def appended(self, producer_id: int, epoch: int) -> None:
        """A batch of a transaction is in the log: it is open here, and nobody needs to ask."""
        guard = self._guards.get(producer_id)
        if guard is not None and guard.epoch <= epoch:
            self._pop(self._guards, producer_id)

    def ended(self, producer_id: int, epoch: int) -> None:
        """A marker is in the log: what was asked was asked of the transaction that it ended, or of
        none. In version 2 the marker has the epoch of the next one, which may have been asked for.
        """
        guard = self._guards.get(producer_id)
        if guard is not None and not (guard.is_tv2 and guard.epoch == epoch):
            self._pop(self._guards, producer_id)

    def expire(self, horizon_ms: int) -> None:
        """Let go of guards that are as old as ``horizon_ms``."""
        old = [pid for pid, guard in self._guards.items() if guard.created_ms <= horizon_ms]
        for producer_id in old:
            self._pop(self._guards, producer_id)

    def clear(self) -> None:
        """Let all go: this node does not lead any more."""
        for table in (self._guards, self._coordinator_epochs):
            for producer_id in tuple(table):
                self._pop(table, producer_id)

    def __del__(self) -> None:
        self.clear()

    def _put(self, table: dict[int, Any], producer_id: int, entry: Any) -> None:
        """As the youngest of a table."""
        self._pop(table, producer_id)
        if len(table) >= MOST_OF_A_LOG:
            self._pop(table, next(iter(table)))
        table[producer_id] = entry
        self._quota.add(table, producer_id)

    def _pop(self, table: dict[int, Any], producer_id: int) -> None:
        if table.pop(producer_id, None) is not None:
            self._quota.remove(table, producer_id)
