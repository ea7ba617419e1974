"""What compaction must leave as it was where transactions write: the view of readers of what is
committed (I13).

The register of what is committed says which transaction each record is of, and how that ended: no
index, no marker and no state of a producer is asked, which a pass may have changed. At every swap
of a replica that may serve, and at the end:

- ``compacted-view``: the latest record of a key, of those that no transaction or a committed one
  wrote, is not there, at its offset; records of transactions that are open or were aborted replace
  nothing.

Logs are read as bytes, by no code of ``kept``. After a loss that rule 33 allows nothing is asked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from kept.cluster.metadata.records import PartitionRecord
from kept.storage.types import TopicPartition
from tests.sim.batches import CONTROL, Batch, Rec
from tests.sim.compaction_checks import CompactionChecks, View
from tests.sim.replica_checks import Copy, Register, ReplicaChecks
from tests.sim.transactions_checks import TRANSACTIONAL
from tests.sim.world import Violation

COMMITTED = 1
"""The type of a marker."""


@dataclass
class Outcomes:
    """How transactions of a partition ended. ``seen``: batches of the register that are in it."""

    seen: int = 0
    running: defaultdict[int, list[Rec]] = field(default_factory=lambda: defaultdict(list))
    """By producer id: records of its open transaction."""
    visible: dict[int, Rec] = field(default_factory=dict)
    """By offset: what a reader of what is committed finds."""

    def add(self, batch: Batch, records: list[Rec]) -> None:
        """The next committed batch."""
        if batch.attributes & CONTROL:
            ended = self.running.pop(batch.producer_id, [])
            if batch.marker is None or batch.marker[0] != COMMITTED:
                return
            records = ended
        elif batch.attributes & TRANSACTIONAL:
            self.running[batch.producer_id] += records
            return
        self.visible |= {rec.offset: rec for rec in records}

    def latest(self, up_to: int) -> dict[bytes, Rec]:
        """The latest visible record of every key below an offset."""
        found: dict[bytes, Rec] = {}
        for rec in self.visible.values():
            known = found.get(rec.key)
            if rec.offset < up_to and (known is None or known.offset < rec.offset):
                found[rec.key] = rec
        return found


class CompactedTransactionChecks(CompactionChecks):
    """One per history; see the module. ``compacted``: topics of which the cleaner makes passes."""

    def __init__(self, *args: Any, compacted: frozenset[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compacted = compacted
        self.outcomes: defaultdict[TopicPartition, Outcomes] = defaultdict(Outcomes)

    def _deleted(self, name: str) -> None:
        super()._deleted(name)
        for tp in [tp for tp in self.outcomes if tp.topic == name]:
            del self.outcomes[tp]

    def superseded(self, tp: TopicPartition, offset: int) -> bool:
        """Whether a pass may have removed what a committed transaction wrote there."""
        outcomes = self.outcomes[tp]
        rec = outcomes.visible.get(offset)
        return rec is not None and outcomes.latest(self.register(tp).end)[rec.key] != rec

    def _commit(
        self, tp: TopicPartition, node: int, copy: Copy, register: Register, hw: int
    ) -> None:
        super()._commit(tp, node, copy, register, hw)
        if tp.topic not in self.compacted:
            return
        outcomes, records = self.outcomes[tp], self.views[node, tp].records
        for batch in register.batches[outcomes.seen :]:
            first = bisect_left(records, batch.base, key=lambda rec: rec.offset)
            last = bisect_left(records, batch.last + 1, key=lambda rec: rec.offset)
            outcomes.add(batch, records[first:last])
        outcomes.seen = len(register.batches)

    def _judge(  # noqa: PLR0917
        self,
        tp: TopicPartition,
        node: int,
        view: View,
        register: Register,
        leads_in: int | None,
        hw: int,
    ) -> None:
        state = register.state
        assert state is not None
        member = node in state.isr and node in register.certain
        deposed = leads_in is not None and leads_in < state.leader_epoch
        if register.give_ups or register.rebase or not (member or leads_in is not None):
            return
        up_to = register.end if member and not deposed else min(hw, register.end)
        key = tuple(segment for segment, _ in view.seen)  # a swap or a roll: appends change nothing
        if key == view.judged:
            return
        view.judged = key
        outcomes = self.outcomes[tp]
        table = {
            rec.key: rec
            for rec in view.records
            if rec.offset < up_to and rec.offset in outcomes.visible
        }
        for name, rec in outcomes.latest(up_to).items():
            found = table.get(name)
            if found != rec and not (found is None and rec.value is None):
                raise Violation(
                    "compacted-view",
                    f"n{node} {tp}, below {up_to}: a reader of what is committed finds {found} of "
                    f"{name!r}, committed is {rec}",
                )
        self.world.counts["views compared"] += 1

    def _producers(self, tp: TopicPartition, node: int, view: View, register: Register) -> None:
        """Markers change what is known: ``TransactionChecks.producers`` judges that."""

    def _finish(self, tp: TopicPartition, register: Register, state: PartitionRecord) -> None:
        if tp.topic in self.compacted:
            super()._finish(tp, register, state)
        else:
            ReplicaChecks._finish(self, tp, register, state)
