"""Leaderships of stage ``transactions`` that move while something is on its way.

:class:`Returns`: they go to another node and come back, while something that was sent to their
leader sits in a connection that its sender has given up: it arrives when that node leads again, and
may find the next transaction (rule 50). What is held is an EndTxn of a producer, whose coordinator
moves, or markers of a coordinator, whose leader of data moves. Meanwhile the other node serves
whoever comes again.

:class:`Replaced`: a coordinator is replaced and hears nothing of it. Either its successor ends a
transaction, and a batch of that one comes late to a leader that has heard nothing either (46); or
its successor has a transaction begin, and a producer has who was replaced commit it (49).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.client.node_connection import NodeConnection
from kept.storage.errors import KeptError
from kept.storage.records import build_batch
from kept.storage.types import TopicPartition
from tests.sim.nodes_clients import REPLY_S, Client
from tests.sim.nodes_machine import VOTERS
from tests.sim.transactions_clients import Instance, Over
from tests.support.request_values import produce_values

if TYPE_CHECKING:
    from tests.sim.connections import SimTransport
    from tests.sim.nodes_machine import Machine
    from tests.sim.transactions_checks import Transaction
    from tests.sim.transactions_history import TransactionsHistory

SENT_S: Final = 2.0
"""Where nothing is sent for so long, nothing moves."""
GIVEN_UP_S: Final = 0.5
"""Whoever sent something that is held comes again after that."""
AWAY_S: Final = (0.2, 0.8)
KNOWN_S: Final = 3.0
"""What takes longer than that has failed."""
LATER_S: Final = (0.0, 0.2)
"""From then until what is held arrives."""
COMPLETE_S: Final = 0.2
"""How soon a transaction is complete."""
NEVER: Final = float("inf")


class LeaderMover(Client):
    """Moves leaderships."""

    history: TransactionsHistory

    async def lead(self, tp: TopicPartition, node_id: int) -> None:
        """Have one of its replicas lead a partition. Raises KeptError."""
        state = self.history.checks.register(tp).state
        if state is None or node_id not in state.replicas:
            raise KeptError(f"{tp} has no replica on {node_id}")
        await self.assign(tp, [node_id, *(node for node in state.replicas if node != node_id)])
        elected = [{"topic": tp.topic, "partitions": [tp.partition]}]
        values = {"election_type": 0, "topic_partitions": elected, "timeout": 3000}
        await self.call(self._controller(), 43, 2, values)
        self.history.note("operator", f"has {node_id} lead", tp)

    async def assign(self, tp: TopicPartition, replicas: list[int]) -> None:
        """Give a partition these replicas. Raises KeptError."""
        wanted = {"partition_index": tp.partition, "replicas": replicas}
        topics = [{"name": tp.topic, "partitions": [wanted]}]
        await self.call(self._controller(), 45, 0, {"timeout": 3000, "topics": topics})

    async def leads(self, tp: TopicPartition, node_id: int) -> None:
        """Return when a node knows that it leads a partition. Raises TimeoutError."""
        async with asyncio.timeout(KNOWN_S):
            while True:
                replica = self.history.machines[node_id].replicas.get(tp)
                if replica is not None and replica.partition.is_leader:
                    return
                await asyncio.sleep(0.01)

    def _controller(self) -> Machine:
        """The active controller, or somebody: it need not travel."""
        machines = self.history.machines
        return next((m for m in machines if m.controls), machines[0])


class Returns(LeaderMover):
    """Has leaderships go and come back while something is held, one at a time."""

    def __init__(self, history: TransactionsHistory) -> None:
        super().__init__(history)
        self.busy = False

    def hold(self, connection: NodeConnection, partitions: Iterable[TopicPartition]) -> None:
        """Hold what a node is sent over a connection until it has given some partitions away that
        it leads, and leads the first of them again.
        """
        history, transport = self.history, connection._transport
        if self.busy or transport is None:
            history.hold(connection)
            return
        self.busy = True
        transport.held_until_s = NEVER
        history.watch(self._go_and_return(transport, list(partitions)))

    async def _go_and_return(
        self, transport: SimTransport, partitions: list[TopicPartition]
    ) -> None:
        history, random = self.history, self.history.moves_random
        state = history.checks.register(partitions[0]).state
        try:
            if state is not None and state.leader >= 0:
                home = state.leader
                away = random.choice([node for node in state.replicas if node != home])
                async with asyncio.timeout(SENT_S):
                    while not transport.holds:
                        await asyncio.sleep(0.005)
                for tp in partitions:
                    await self.lead(tp, away)
                await asyncio.sleep(GIVEN_UP_S + random.uniform(*AWAY_S))
                await self.lead(partitions[0], home)
                await self.leads(partitions[0], home)
                history.world.counts["leaderships that came back"] += 1
                await asyncio.sleep(random.uniform(*LATER_S))
        except (KeptError, TimeoutError):
            history.world.counts["leaderships that did not come back"] += 1
        transport.held_until_s = history.loop.time()
        self.busy = False


@dataclass
class _Slot:
    """The transactional id of :class:`Replaced`."""

    history: TransactionsHistory
    name: str = "late"
    level: int = 1
    acknowledged_s: float = -1.0


class Replaced(LeaderMover):
    """Has a coordinator replaced that does not hear of it, and a client that does."""

    def __init__(self, history: TransactionsHistory) -> None:
        super().__init__(history)
        self.slot = _Slot(history)
        self.kept_in = history.coordinated(self.slot.name)
        self.every = list(range(VOTERS))

    async def run(self) -> None:
        """Again and again, until the history ends its clients."""
        history = self.history
        while history.running:
            await asyncio.sleep(history.moves_random.uniform(0.2, 1.0))
            instance = Instance(self.slot, "late")
            try:
                await self._round(instance)
            except (KeptError, TimeoutError, Over) as error:
                history.note("late", repr(error))
            instance.client.close()
        self.close()

    async def _round(self, instance: Instance) -> None:
        history, random = self.history, self.history.moves_random
        state, controller = history.checks.register(self.kept_in).state, self._controller()
        if state is None or set(state.isr) != set(self.every):
            await self.assign(self.kept_in, self.every)
            return
        home = random.choice([node for node in self.every if node != controller.node_id])
        tp = random.choice(history.data)
        is_late = random.random() < 0.5
        leader = home if is_late else controller.node_id
        for led, by in ((self.kept_in, home), (tp, leader)):
            await self.lead(led, by)
            await self.leads(led, by)
        await instance.initialize()
        if is_late:
            await self._bring_a_late_batch(instance, home, tp)
        else:
            await self._ask_whom_it_replaced(instance, home, tp)

    @asynccontextmanager
    async def _unheard(self, home: int) -> AsyncIterator[Machine]:
        """A coordinator is replaced, and hears of it in the end only; its successor."""
        history = self.history
        history.deaf.add(home)
        try:
            await self.assign(self.kept_in, [node for node in self.every if node != home])
            async with asyncio.timeout(KNOWN_S):
                while history.leader(self.kept_in) == home:
                    await asyncio.sleep(0.01)
            yield history.machines[history.leader(self.kept_in)]
        finally:
            history.deaf.clear()
            await self.assign(self.kept_in, self.every)

    async def _ask_whom_it_replaced(
        self, instance: Instance, home: int, tp: TopicPartition
    ) -> None:
        """The end of the transaction behind the one that it remembers."""
        history = self.history
        await self._write(instance, instance.begin(), tp, commit=True)
        await asyncio.sleep(COMPLETE_S)
        async with self._unheard(home) as successor:
            instance.coordinators[1] = successor
            await self._write(instance, instance.begin(), tp, commit=True, by=home)
        history.world.counts["commits asked of a coordinator that was replaced"] += 1

    async def _write(
        self,
        instance: Instance,
        transaction: Transaction,
        tp: TopicPartition,
        *,
        commit: bool,
        by: int = -1,
    ) -> None:
        """A transaction that a node is asked to end."""
        async with asyncio.timeout(KNOWN_S):
            await instance.add(tp)
            made = self.history.make_records(instance.now_ms())
            await instance.produce(transaction, tp, made)
            if by >= 0:
                instance.coordinators[1] = self.history.machines[by]
            await instance.end(transaction, commit=commit)

    async def _bring_a_late_batch(self, instance: Instance, home: int, tp: TopicPartition) -> None:
        """A batch of a transaction that its successor has aborted."""
        history, node = self.history, self.history.machines[home]
        transaction = instance.begin()
        await instance.add(tp)
        connection = await self.connect(node)
        transport = connection._transport
        assert transport is not None
        transport.held_until_s = NEVER
        made = history.make_records(instance.now_ms())
        history.transaction_checks.sends(transaction, [row[2] for row in made if row[2]])
        sending = history.loop.create_task(self._send(connection, instance, tp, made))
        try:
            async with self._unheard(home) as successor:
                instance.coordinators[1] = successor
                async with asyncio.timeout(KNOWN_S):
                    await instance.end(transaction, commit=False)
                    while not self._is_ended(node, tp, instance):
                        await asyncio.sleep(0.01)
                transport.held_until_s = history.loop.time()
                told = await sending
            history.world.counts[f"late batches told {told}"] += 1
            history.transaction_checks.late(transaction, tp, told)
        finally:
            transport.held_until_s = history.loop.time()
            self.abandon(node)
            await asyncio.wait([sending])

    @staticmethod
    def _is_ended(node: Machine, tp: TopicPartition, instance: Instance) -> bool:
        """Its marker is there, which is the first that the log has of this epoch."""
        replica = node.replicas.get(tp)
        if replica is None:
            return False
        known = replica.partition.log.producers.get(instance.producer_id)
        return known is not None and known.epoch == instance.epoch

    @staticmethod
    async def _send(
        connection: NodeConnection, instance: Instance, tp: TopicPartition, made: list[Any]
    ) -> str:
        data = build_batch(
            made,
            producer_id=instance.producer_id,
            producer_epoch=instance.epoch,
            base_sequence=0,
            is_transactional=True,
        )
        request = produce_values(
            tp.topic,
            bytes(data),
            partition=tp.partition,
            transactional_id=instance.slot.name,
            acks=-1,
            timeout=3000,
        )
        try:
            reply = await connection.call(0, 9, request, REPLY_S)
        except KeptError as error:
            return type(error).__name__
        return str(reply.responses[0].partition_responses[0].error_code.name)
