"""Stage compaction-wide: what compaction meets beside faults.

The cluster of stage ``compaction``; each history has some of these, drawn from its seed:

- *transactions*: half of the producers write in them, and a coordinator's twin on each leader ends
  what is open, one way or the other, now and then. Passes stop at the last stable offset, aborted
  data goes, markers stay as long as they are needed;
- *log starts that move*: ``cleanup.policy=compact,delete`` with a small ``retention.bytes``, and
  records deleted by an operator, while passes compute and manifests are put into place;
- *a producer that leaves*: its last batch is all that tells a new replica of its sequence;
- *several log directories*: devices fail in the middle of all that, and are put in order. A replica
  that was moved away and comes back may be made in another directory than before.
"""

from __future__ import annotations

from functools import partial
from random import Random
from struct import pack
from typing import Any

from kept.replication.partition import Partition
from kept.storage.errors import KeptError
from kept.storage.records import build_batch
from kept.storage.types import TopicPartition
from tests.sim.compaction import CompactingReplicas, CompactionHistory, KeyedProducer
from tests.sim.directories import BrokenDirectories
from tests.sim.node import SimNode
from tests.sim.replicas import Replicas
from tests.sim.rows import ABORT, COMMIT
from tests.sim.world import MS

RETAINED_BYTES = (6000, 12_000, -1)


class Coordinating(CompactingReplicas):
    """Partitions whose leaders end transactions: there is no coordinator."""

    def upkeep(self) -> None:
        super().upkeep()
        for tp, partition in list(self.partitions.items()):
            if self.serving and not self.suspended and self.node.may_serve():
                self.attempt(partial(self._end_transactions, tp, partition))

    def _end_transactions(self, tp: TopicPartition, partition: Partition) -> None:
        history = self.node.history
        assert isinstance(history, WideHistory)
        if partition.offline is not None or not partition.is_leader:
            return
        known = [(p, s.epoch) for p, s in partition.log.producers.items()
                 if s.txn_first_offset is not None]  # fmt: skip
        for producer_id, epoch in known:
            if history.random.random() < 0.4:
                continue
            kind = history.random.choice((ABORT, COMMIT))
            try:
                end_transaction(partition, producer_id, epoch, kind, self.machine.wall_ms)
            except KeptError as error:
                self.world.note(self.machine.name, f"{tp}: no marker: {error}")
                return
            self.world.counts[("transactions aborted", "transactions committed")[kind]] += 1
        if known:
            self.settle(tp)


def end_transaction(
    partition: Partition, producer_id: int, epoch: int, kind: int, now_ms: int
) -> None:
    """What a leader does whom a coordinator sends a marker."""
    log = partition.log
    partition.write()
    marker = build_batch(
        [(now_ms, pack(">hh", 0, kind), pack(">hi", 0, 0), ())], producer_id=producer_id,
        producer_epoch=epoch, base_sequence=-1, is_transactional=True, is_control=True,
        leader_epoch=partition.leader_epoch, base_offset=log.log_end_offset,
    )  # fmt: skip
    log.append_as_follower(marker, now_ms)
    partition.write()


class WideHistory(CompactionHistory):
    """See the module."""

    stage = "compaction-wide"

    def __init__(
        self, seed: int, *, transactions: bool | None = None, moves: bool | None = None,
        log_dirs: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """``transactions``, ``moves``, ``log_dirs``: for planted bugs that show only there."""
        super().__init__(seed, **options)
        self.random = random = Random(f"wide {seed}")
        drawn = random.random() < 0.7, random.random() < 0.5, random.choice((1, 2, 2, 3))
        self.checks.transactions = drawn[0] if transactions is None else transactions
        self.moves = drawn[1] if moves is None else moves
        self.log_dirs = drawn[2] if log_dirs is None else log_dirs
        self.retention_bytes = random.choice(RETAINED_BYTES) if self.moves else -1
        self.devices = BrokenDirectories(self, Random(f"devices {seed}"))
        if self.moves:
            self.operator.kinds.append("delete_records")

    def __str__(self) -> str:
        return (
            f"{super().__str__()}{', transactions' if self.checks.transactions else ''}"
            f"{f', retention.bytes {self.retention_bytes}' if self.moves else ''}, "
            f"{self.log_dirs} log directories"
        )

    def replicas_of(self, node: SimNode) -> Replicas:
        return Coordinating(node)

    def topic_configs(self) -> dict[str, str | None]:
        policy = "compact,delete" if self.moves else "compact"
        return super().topic_configs() | {"cleanup.policy": policy, "retention.ms": "-1"}

    def _clients(self) -> None:
        super()._clients()
        for producer in self.producers[::2] if self.checks.transactions else ():
            assert isinstance(producer, KeyedProducer)
            producer.transactional = True
        for number, tp in enumerate(self.partitions):
            visitor = KeyedProducer(self, -200 - number, tp, -1, 1, 60)
            visitor.start()
            self.world.after(self.random.randint(800, 3000) * MS, visitor.give_up)

    def suffer(self) -> None:
        """With devices that fail, too."""
        if self.log_dirs > 1:
            self.devices.start()
        super().suffer()

    def heal(self) -> None:
        """No fault any more, nor of devices."""
        super().heal()
        self.devices.heal()
