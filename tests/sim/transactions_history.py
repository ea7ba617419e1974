"""Stage ``transactions``: the stage ``nodes`` with transactional producers and readers of what is
committed (:mod:`tests.sim.transactions_clients`), judged by :mod:`tests.sim.transactions_checks`.

Coordinators, leaders, markers and verification are the product's own. In some histories machines
lose power: with ``flush.messages=1`` for all topics nothing may be lost, without it nothing more is
asked of what was acknowledged once rule 33 gives something up. The operator reassigns partitions of
``__transaction_state`` and ``__consumer_offsets``, too (:mod:`tests.sim.transactions_operator`).
Beside the faults of ``nodes`` the network holds an EndTxn in its connection, and delivers it after
its sender came again on a new one (T24), and a coordinator dies at the moment at which a producer
reads that its transaction ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

from kept.node.metadata.internal_topics import CONSUMER_OFFSETS
from kept.storage.errors import KeptError
from kept.storage.types import TopicPartition
from tests.sim import batches
from tests.sim.groups_checks import GroupChecks
from tests.sim.groups_clients import UNSTABLE, GroupClient
from tests.sim.nodes_clients import Client, Producer, Topic
from tests.sim.nodes_history import HEAL_S, NodesHistory
from tests.sim.passes import passes_run_here
from tests.sim.replica_checks import INTERNAL
from tests.sim.transactions_checks import TransactionChecks
from tests.sim.transactions_clients import OffsetReader, Reader, Transactor
from tests.sim.transactions_movers import GROUP, SOURCE, Mover
from tests.sim.transactions_operator import Ghost, TransactionOperator
from tests.sim.world import Violation

IDS: Final = 3
STATE_PARTITIONS: Final = 2
MOVERS: Final = 3


class TransactionsHistory(NodesHistory):
    """See the module."""

    power_share = 0.3
    durable_share = 0.7
    trials = ("return", "")
    """Not ``limp``: a producer whose coordinator and whose leader do not reach each other waits,
    and goes on as soon as they do."""
    changes_voters = False
    again_s = 20.0
    consumers = False
    subscribed = (SOURCE, 2)

    def __init__(
        self,
        seed: int,
        *,
        holds: float | None = None,
        strikes: float | None = None,
        fences: bool | None = None,
        hangs: bool | None = None,
        moves: bool | None = None,
        naps: float = 0.03,
        **options: Any,
    ) -> None:
        """``holds``: how often an EndTxn is held; ``strikes``: how often a coordinator is struck
        as one is answered; ``fences``: an operator does; ``hangs``: transactions do, until an
        operator ends them; ``moves``: records are moved in transactions; drawn if None.
        ``naps``: how often a mover sleeps for longer than its session.
        """
        super().__init__(seed, **options)
        random = self.random
        self.strikes = random.choice((0.0, 0.02, 0.1)) if strikes is None else strikes
        self.hold_share = random.choice((0.0, 0.05, 0.2)) if holds is None else holds
        self.zombie_share = random.choice((0.0, 0.3))
        self.crash_share = random.choice((0.0, 0.05))
        self.checks.unclean = False
        for name in ("retention.bytes", "unclean.leader.election.enable"):
            self.topic_configs.pop(name, None)
        self.settings |= {
            "log.cleaner.enable": "false",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.num.partitions": str(STATE_PARTITIONS),
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
        }
        if fences:
            self.operator.kinds = ["fence", "describe"]
        self.hangs = (self.jobs.random() < 0.2) if hangs is None else hangs
        if self.hangs:
            self.settings["transaction.partition.verification.enable"] = "false"
            self.operator.kinds += ["hanging"] * 2
        if self.durable:
            self.settings["log.flush.interval.messages"] = "1"
        self.moves = (self.jobs.random() < 0.4) if moves is None else moves
        self.nap_share, self.leave_share = naps, 0.7
        self.group_checks = GroupChecks(self._offsets_lost, self.loop.time)
        self.settings |= {
            "group.min.session.timeout.ms": "1000", "group.initial.rebalance.delay.ms": "0",
        }  # fmt: skip
        self.data = self.partitions
        self.transaction_checks = TransactionChecks(self.may_lose)
        self.readers: list[Reader] = []
        self.transactors: list[Transactor] = []
        self._values = 0

    def _offsets_lost(self, _: str) -> int:
        return self.checks.register(TopicPartition(CONSUMER_OFFSETS, 0)).give_ups

    async def create_topics(self) -> None:
        """See :meth:`NodesHistory.create_topics`."""
        await super().create_topics()
        if self.moves:
            await self.operator.create(Topic(*self.subscribed))

    def make_operator(self) -> TransactionOperator:
        """See :meth:`NodesHistory.make_operator`."""
        return TransactionOperator(self)

    def may_lose(self) -> bool:
        """Rule 33 gave something up that was not flushed."""
        registers = self.checks.registers.values()
        return not self.durable and any(register.give_ups for register in registers)

    def moved(self) -> list[TopicPartition]:
        """See :meth:`NodesHistory.moved`."""
        internal = [tp for tp in self.checks.registers if tp.topic in INTERNAL]
        return [*self.data, *sorted(internal)]

    def next_value(self) -> int:
        """An offset that nobody committed."""
        self._values += 1
        return self._values

    def topic_id(self, topic: str) -> UUID | None:
        """The id of a topic."""
        return self.checks.topics.get(topic, (None, 0))[0]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See :meth:`NodesHistory.watched`: replicas of internal topics make manifests."""
        with super().watched(), passes_run_here(self):
            yield

    def make_clients(self) -> list[Any]:
        """See :meth:`NodesHistory.make_clients`."""
        offsets = []
        for number in range(IDS):
            name = f"id-{number}"
            self.transactors.append(Transactor(self, name, self.random.choice((1, 1, 2))))
            offsets.append(OffsetReader(Client(self), name))
        self.readers = [Reader(Client(self), tp) for tp in self.data]
        self.writers.extend(self.transactors)
        self.watch(self._audit())
        ghosts = [Ghost(self)] * self.hangs
        movers = []
        if self.moves:
            movers = [
                Mover(self, f"mover-{slot}", self.random.choice((1, 2))) for slot in range(MOVERS)
            ]
            for number in range(self.subscribed[1]):
                tp = TopicPartition(self.subscribed[0], number)
                self.writers.append(Producer(Client(self), tp, -1, 1, 0.2))
        return [*self.writers, *self.readers, *offsets, *ghosts, *movers]

    async def verify(self) -> None:
        """Nothing is open, and readers find all that was committed, whole."""
        deadline = self.loop.time() + HEAL_S
        if self.hangs:
            await self._end_hanging(deadline)
        there: dict[TopicPartition, dict[int, bytes]] = {}
        for tp in self.data:
            register = self.checks.register(tp)
            reader = Reader(Client(self), tp)
            stable = -1
            while stable < register.end or reader.offset < stable:
                if self.loop.time() > deadline:
                    raise Violation("hanging", f"{tp}: LSO {stable}, {register.end} are committed")
                try:
                    stable = await reader.read()
                except KeptError:
                    reader.client.forget(tp)
                register = self.checks.register(tp)
                await asyncio.sleep(0.05)
            there[tp] = reader.held
            reader.client.close()
            self.transaction_checks.log(tp, register.batches)
        self._verify_producers()
        self.transaction_checks.finish(there)
        if self.moves:
            await self._verify_moves(deadline)
        for transactor in self.transactors:
            await self._verify_offset(transactor.name, deadline)
        for number in range(STATE_PARTITIONS):
            await self._verify_states(TopicPartition("__transaction_state", number), deadline)

    async def _verify_moves(self, deadline: float) -> None:
        """All that the group committed is among what readers found."""
        client = GroupClient(self, GROUP)  # type: ignore[arg-type]
        committed: dict[int, int] | str = ""
        while not isinstance(committed, dict) or UNSTABLE in committed.values():
            if self.loop.time() > deadline:
                raise Violation("hanging", f"{GROUP}: its offsets are not stable: {committed}")
            try:
                committed = await client.committed(await client.find(), stable=True)
            except KeptError:
                client.coordinator = None
            await asyncio.sleep(0.05)
        client.close()
        for number, offset in committed.items():
            tp = TopicPartition(self.subscribed[0], number)
            state = self.checks.register(tp).state
            if state is not None:
                log = self.machines[state.leader].hosted[tp].partition.log
                self.transaction_checks.all_moved(tp, offset, batches.records(log))

    async def _end_hanging(self, deadline: float) -> None:
        """Once those of live producers have timed out, an operator ends all that hangs."""
        operator = TransactionOperator(self)
        while True:
            try:
                await operator.end_hanging()
                break
            except KeptError:
                if self.loop.time() > deadline:
                    raise
                await asyncio.sleep(0.1)
        operator.close()

    def _verify_producers(self) -> None:
        """What every replica knows of producers follows from its log."""
        for machine in self.machines:
            if not machine.ready or machine.troubled:
                continue
            for tp, replica in machine.hosted.items():
                log = replica.partition.log
                if tp not in self.data or replica.partition.offline is not None:
                    continue
                if log.log_end_offset != log.written_end_offset:
                    continue  # batches are staged
                known = {
                    producer_id: (
                        state.epoch, state.last_sequence, state.coordinator_epoch,
                        state.txn_first_offset,
                    )
                    for producer_id, state in log.producers.items()
                }  # fmt: skip
                found = batches.read(log, log.log_start_offset)
                self.transaction_checks.producers(f"n{machine.node_id}", tp, found, known)
                self.world.counts["producer states compared"] += 1

    async def _audit(self) -> None:
        """The same while there are faults."""
        while self.running:
            await asyncio.sleep(self.jobs.uniform(0.3, 1.5))
            self._verify_producers()

    async def _verify_states(self, tp: TopicPartition, deadline: float) -> None:
        """What its leader has; the last completion may be under way."""
        register = self.checks.register(tp)
        while True:
            try:
                if register.state is not None:
                    held = self.machines[register.state.leader].hosted[tp]
                    self.transaction_checks.states(tp, batches.records(held.partition.log))
                return
            except Violation:
                if self.loop.time() > deadline:
                    raise
            await asyncio.sleep(0.05)

    async def _verify_offset(self, group: str, deadline: float) -> None:
        client = Client(self)
        reader = OffsetReader(client, group)
        machines = [*self.machines]
        while True:
            for machine in machines:
                try:
                    if await reader.read(machine):
                        client.close()
                        return
                except KeptError:
                    continue
            if self.loop.time() > deadline:
                raise Violation("hanging", f"{group}: its offset is not stable")
            await asyncio.sleep(0.05)
