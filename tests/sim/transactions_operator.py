"""The operator of stage ``transactions``: reassigns, fences transactional ids, describes
transactions and producers, and ends transactions that hang.

A :class:`Ghost` makes transactions that hang: where ``transaction.partition.verification.enable``
is off, its batches are appended though it told no coordinator, as those of clients before KIP-890
that came late. The operator finds one as ``kafka-transactions.sh find-hanging`` does: a leader has
it open, and no coordinator knows its producer id; it ends it by WriteTxnMarkers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from kept.storage.errors import KeptError
from kept.storage.records import build_batch
from kept.storage.types import TopicPartition
from tests.sim.nodes_clients import Client, Operator
from tests.sim.surroundings import EPOCH_S
from tests.sim.world import Violation
from tests.support.request_values import produce_values

if TYPE_CHECKING:
    from tests.sim.nodes_machine import Machine
    from tests.sim.transactions_history import TransactionsHistory

STATES: Final = frozenset(
    {"Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort"}
)
FENCE_TIMEOUT_MS: Final = 3000
FENCE_TIMES: Final = 20
"""How often an administrator comes again while the transaction that is fenced is being ended."""


class TransactionOperator(Operator):
    """The operator of one history. Some fence, some describe; all end what hangs where a ghost is
    about.
    """

    history: TransactionsHistory

    def __init__(self, history: TransactionsHistory) -> None:
        super().__init__(history)
        jobs = history.jobs
        self.kinds = [kind for kind in self.kinds if kind == "reassign"]
        self.kinds += [kind for kind in ("fence", "describe") if jobs.random() < 0.4]

    async def act(self, kind: str) -> None:
        """See :meth:`Operator.act`."""
        if kind == "fence":
            await self._fence()
        elif kind == "describe":
            await self._describe()
        elif kind == "hanging":
            await self.end_hanging()
        else:
            await super().act(kind)

    async def _coordinator(self, name: str) -> Machine:
        somebody = self.history.random.choice(self.history.machines)
        reply = await self.call(somebody, 10, 3, {"key": name, "key_type": 1})
        if reply.error_code.name != "none":
            raise KeptError(reply.error_code.name)
        return self.history.machines[reply.node_id]

    async def _fence(self) -> None:
        """As ``fenceProducers``: another one under the id, which never produces."""
        history = self.history
        checks = history.transaction_checks
        name = history.jobs.choice([one.name for one in history.transactors])
        known = checks.newest(name)
        values = {
            "transactional_id": name,
            "transaction_timeout": FENCE_TIMEOUT_MS,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        for _ in range(FENCE_TIMES):
            reply = await self.call(await self._coordinator(name), 22, 4, values)
            history.note("operator", "fences", name, reply.error_code.name)
            if reply.error_code.name != "concurrent_transactions":
                break
            await asyncio.sleep(0.05)
        if reply.error_code.name == "none":
            history.world.counts["producers fenced"] += 1
            now_s = history.loop.time()
            checks.initialized(name, known, reply.producer_id, reply.producer_epoch, now_s)

    async def _describe(self) -> None:
        """What coordinators say of a transaction, and leaders of producers, makes sense."""
        history = self.history
        name = history.jobs.choice([one.name for one in history.transactors])
        machine = await self._coordinator(name)
        reply = await self.call(machine, 65, 0, {"transactional_ids": [name]})
        (found,) = reply.transaction_states
        if found.error_code.name == "none":
            history.world.counts["transactions described"] += 1
            if found.transaction_state not in STATES:
                raise Violation("described", f"{name} is {found.transaction_state}")
            history.transaction_checks.described(name, found.producer_id, found.producer_epoch)
        await self._open_producers(history.jobs.choice(history.data))

    async def _open_producers(self, tp: TopicPartition) -> dict[int, tuple[int, int]]:
        """Producer id -> (epoch, coordinator epoch) of those with an open transaction."""
        machine = await self.leader(tp)
        if machine is None:
            raise KeptError(f"nobody leads {tp}")
        values = {"topics": [{"name": tp.topic, "partition_indexes": [tp.partition]}]}
        found = (await self.call(machine, 61, 0, values)).topics[0].partitions[0]
        if found.error_code.name != "none":
            self.forget(tp)
            raise KeptError(found.error_code.name)
        self.history.world.counts["producers described"] += 1
        return {
            one.producer_id: (one.producer_epoch, one.coordinator_epoch)
            for one in found.active_producers
            if one.current_txn_start_offset >= 0
        }

    async def _coordinated(self) -> set[int]:
        """Producer ids that some coordinator knows. Raises KeptError where one does not answer."""
        known: set[int] = set()
        for machine in self.history.machines:
            values: dict[str, Any] = {
                "state_filters": (),
                "producer_id_filters": (),
                "duration_filter": -1,
            }
            reply = await self.call(machine, 66, 1, values)
            if reply.error_code.name != "none":
                raise KeptError(reply.error_code.name)
            known |= {one.producer_id for one in reply.transaction_states}
        return known

    async def end_hanging(self) -> int:
        """How many hung, and were ended. Raises KeptError."""
        ended = 0
        for tp in self.history.data:
            is_open = await self._open_producers(tp)
            hanging = is_open.keys() - await self._coordinated() if is_open else set()
            for producer_id in sorted(hanging):
                epoch, coordinator_epoch = is_open[producer_id]
                marker = {
                    "producer_id": producer_id,
                    "producer_epoch": epoch,
                    "transaction_result": False,
                    "coordinator_epoch": max(coordinator_epoch, 0),
                    "topics": [{"name": tp.topic, "partition_indexes": [tp.partition]}],
                }
                machine = await self.leader(tp)
                if machine is None:
                    raise KeptError(f"nobody leads {tp}")
                reply = await self.call(machine, 27, 1, {"markers": [marker]})
                error = reply.markers[0].topics[0].partitions[0].error_code.name
                self.history.note("operator", f"ends {producer_id}, which hangs: {error}", tp)
                if error != "none":
                    self.forget(tp)
                    raise KeptError(error)
                self.history.world.counts["hanging transactions ended"] += 1
                ended += 1
        return ended


class Ghost:
    """Makes transactions that hang. Each of its batches is a transaction of a producer id of its
    own.
    """

    def __init__(self, history: TransactionsHistory) -> None:
        self.history = history
        self.client = Client(history)

    async def run(self) -> None:
        """Until the history ends its clients."""
        history = self.history
        while history.running:
            await asyncio.sleep(history.jobs.uniform(0.5, 3))
            try:
                await self._appear()
            except KeptError:
                self.client.forget(history.data[0])
        self.client.close()

    async def _appear(self) -> None:
        history, tp = self.history, self.history.jobs.choice(self.history.data)
        machine = await self.client.leader(tp)
        if machine is None:
            return
        values = {
            "transactional_id": None,
            "transaction_timeout": 1000,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        given = await self.client.call(machine, 22, 4, values)
        if given.error_code.name != "none":
            return
        now_ms = int((EPOCH_S + history.loop.time()) * 1000)
        data = build_batch(
            [(now_ms, None, b"ghost", ())],
            producer_id=given.producer_id,
            producer_epoch=0,
            base_sequence=0,
            is_transactional=True,
        )
        request = produce_values(
            tp.topic,
            bytes(data),
            partition=tp.partition,
            transactional_id="ghost",
            acks=-1,
            timeout=3000,
        )
        reply = await self.client.call(machine, 0, 9, request)
        error = reply.responses[0].partition_responses[0].error_code.name
        history.world.counts["transactions that hang"] += error == "none"
        history.world.counts[f"ghosts told {error}"] += 1
