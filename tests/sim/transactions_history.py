"""Stage ``transactions``: the stage ``nodes`` with transactional producers and readers of what is
committed (:mod:`tests.sim.transactions_clients`), judged by :mod:`tests.sim.transactions_checks`.

Coordinators, leaders, markers and verification are the product's own. In some histories machines
lose power: with ``flush.messages=1`` for all topics nothing may be lost, without it nothing more is
asked of what was acknowledged once rule 33 gives something up. The operator reassigns partitions of
``__transaction_state`` and ``__consumer_offsets``, too (:mod:`tests.sim.transactions_operator`).
Beside the faults of ``nodes`` the network holds an EndTxn in its connection, and delivers it after
its sender came again on a new one (T24), and a coordinator dies at the moment at which a producer
reads that its transaction ended.

In some a WriteTxnMarkers of a coordinator is held, too, until its coordinator has given the
connection up and has sent the markers over another one (T25). In some what is held arrives when the
leadership that it was sent for has gone and come back (:mod:`tests.sim.transactions_returns`).

In some histories the records have few keys, and the cleaner makes passes of the topic while
transactions are open, end and are aborted (:mod:`tests.sim.transactions_compaction`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import TYPE_CHECKING, Any, Final
from unittest import mock
from uuid import UUID

from kept.cluster.raft.messages import AppendEntries, Message
from kept.node.coordinator.common.partitioner import partition_for
from kept.node.coordinator.transactions import marker_channel
from kept.node.internode.peers import Peers
from kept.node.metadata.internal_topics import CONSUMER_OFFSETS, TRANSACTION_STATE
from kept.node.replicas import maintenance
from kept.storage.errors import KeptError
from kept.storage.types import TopicPartition
from tests.sim import batches
from tests.sim.groups_checks import GroupChecks
from tests.sim.groups_clients import UNSTABLE, GroupClient
from tests.sim.nodes_clients import Client, Producer, Topic
from tests.sim.nodes_compaction import observe_compacted
from tests.sim.nodes_history import HEAL_S, NodesHistory
from tests.sim.passes import passes_run_here
from tests.sim.replica_checks import INTERNAL, ReplicaChecks
from tests.sim.transactions_checks import TransactionChecks
from tests.sim.transactions_clients import OffsetReader, Reader, Transactor
from tests.sim.transactions_compaction import CompactedTransactionChecks
from tests.sim.transactions_copiers import GROUP, SOURCE, Copier
from tests.sim.transactions_operator import Ghost, TransactionOperator
from tests.sim.transactions_returns import GIVEN_UP_S, Replaced, Returns
from tests.sim.world import Violation

if TYPE_CHECKING:
    from kept.node.replicas.local_replica import LocalReplica
    from tests.sim.nodes_machine import Machine

IDS: Final = 3
STATE_PARTITIONS: Final = 2
OWN_IDS: Final = 1 << 40
COPIERS: Final = 3
KEYS: Final = 6
COMPACTS: Final = 0.3
TOMBSTONES: Final = 0.2
LATE_MARKERS: Final = 0.2
RETURNS: Final = 0.2
LIFE_S: Final = (0.5, 6.0)
STEADY_S: Final = (60.0, 60.0)
"""How long an instance of a producer lives."""
GIVES_UP_S: Final = 0.3
"""After that a client takes a connection for dead that holds its request."""
MARKERS_ANSWER_S: Final = 1.0
"""How long a coordinator waits for an answer where its markers are held."""
PAUSE_S: Final = (0.3, 1.5)
EXPIRY_TICK_MS: Final = 500


class TransactionsHistory(NodesHistory):
    """One seed of stage ``transactions``."""

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
        compacts: bool | None = None,
        late_markers: bool | None = None,
        returns: bool | None = None,
        recreates: bool = False,
        expires: bool = False,
        naps: float = 0.03,
        levels: tuple[int, ...] = (1, 1, 2),
        lingers_s: float = 0.0,
        replaces: bool = False,
        steady: bool = False,
        faults: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        """``holds``: how often an EndTxn is held; ``strikes``: how often a coordinator is struck
        as one is answered; ``fences``: an operator does; ``hangs``: transactions do, until an
        operator ends them; ``moves``: records are moved in transactions; ``compacts``: the cleaner
        makes passes of the topic; ``late_markers``: markers are held; ``returns``: leaderships go
        and come back meanwhile; drawn if None.
        ``recreates``: a topic is deleted and made anew; ``expires``: producers are forgotten that
        were silent for two seconds; ``naps``: how often a copier sleeps for longer than its
        session; ``levels``: the versions of transactions that producers have; ``lingers_s``: how
        long they may wait after each of their batches; ``replaces``: coordinators are, and do not
        hear of it; ``steady``: instances live long, and nobody fences them; ``faults``: the only
        kinds.
        """
        self.rows = Random(f"compacts {seed}")
        """For what is in histories with passes, and no other."""
        drawn = self.rows.random() < COMPACTS and not (hangs or moves)
        self.compacts = drawn if compacts is None else compacts
        late = self.rows.random() < LATE_MARKERS
        self.late_markers = late if late_markers is None else late_markers
        self._draw_moves(seed, returns, replaces)
        self.recreates, self.expires = recreates, expires
        self.levels, self.lingers_s = levels, lingers_s
        super().__init__(seed, **options)
        random = self.random
        self.strikes = random.choice((0.0, 0.02, 0.1)) if strikes is None else strikes
        self.hold_share = random.choice((0.0, 0.05, 0.2)) if holds is None else holds
        self.zombie_share = random.choice((0.0, 0.3))
        self.crash_share = random.choice((0.0, 0.05))
        self._calm(steady, faults)
        if fences:
            self.operator.kinds = ["fence", "describe"]
        self.hangs = (self.jobs.random() < 0.2 and not self.compacts) if hangs is None else hangs
        self.moves = (self.jobs.random() < 0.4 and not self.compacts) if moves is None else moves
        self.nap_share, self.leave_share = naps, 0.7
        self.group_checks = GroupChecks(self._offsets_lost, self.loop.time)
        self.data = self.partitions
        self.written = list(self.data)
        """What producers write to: readers judge :attr:`data`."""
        self._configure()
        self.transaction_checks = TransactionChecks(self.may_lose)
        self.readers: list[Reader] = []
        self.transactors: list[Transactor] = []
        self._values = 0

    def _draw_moves(self, seed: int, returns: bool | None, replaces: bool) -> None:
        """Which leaderships move while something is on its way."""
        self.moves_random = Random(f"returns {seed}")
        drawn = self.moves_random.random() < RETURNS
        self.returns = Returns(self) if (drawn if returns is None else returns) else None
        self.replaced = Replaced(self) if replaces else None
        self.deaf: set[int] = set()
        """Nodes that get no entries of the metadata log."""
        self.gives_up_s = GIVES_UP_S if self.returns is None else GIVEN_UP_S

    def _calm(self, steady: bool, faults: tuple[str, ...]) -> None:
        """Let fewer things happen than were drawn."""
        if faults:
            self.faults.kinds, self.faults.pace_s = list(faults), 2.0
        self.life_s = STEADY_S if steady else LIFE_S
        if steady:
            self.zombie_share = self.crash_share = 0.0
            self.operator.kinds = []

    def _configure(self) -> None:
        """The settings, and what the operator does, that follow from what was drawn."""
        self.checks.unclean = False
        for name in ("retention.bytes", "unclean.leader.election.enable"):
            self.topic_configs.pop(name, None)
        self.settings |= {
            "log.cleaner.enable": "false",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.num.partitions": str(STATE_PARTITIONS),
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
            "group.min.session.timeout.ms": "1000",
            "group.initial.rebalance.delay.ms": "0",
        }
        if self.hangs:
            self.settings["transaction.partition.verification.enable"] = "false"
            self.operator.kinds += ["hanging"] * 2
        if self.durable:
            self.settings["log.flush.interval.messages"] = "1"
        if self.compacts:
            self._compact()
        if self.expires:
            self.settings["producer.id.expiration.ms"] = "2000"
        if self.recreates:
            self.operator.kinds += ["volatile"] * 2
            self.written.append(TopicPartition(self.operator.VOLATILE, 0))

    def _compact(self) -> None:
        """The cleaner makes passes, as often as it can."""
        self.world.counts["histories with passes"] += 1
        self.settings |= {
            "log.cleaner.enable": "true",
            "log.cleaner.backoff.ms": "300",
            "offsets.topic.segment.bytes": "2048",
            "transaction.state.log.segment.bytes": "2048",
        }
        self.topic_configs |= {
            "cleanup.policy": "compact",
            "segment.bytes": "1024",
            "min.cleanable.dirty.ratio": "0.01",
            "delete.retention.ms": self.rows.choice(("0", "1500")),
            "file.delete.delay.ms": "1000",
        }

    def make_checks(self) -> ReplicaChecks:
        """See :meth:`NodesHistory.make_checks`."""
        if not self.compacts:
            return super().make_checks()
        topics = {self.topic, TransactionOperator.VOLATILE, *INTERNAL}
        return CompactedTransactionChecks(
            self.world, durable=self.durable, compacted=frozenset(topics)
        )

    def make_records(self, now_ms: int) -> list[tuple[int, bytes | None, bytes | None, Any]]:
        """See :meth:`NodesHistory.make_records`: with passes of few keys, and some tombstones."""
        made = super().make_records(now_ms)
        if not self.compacts:
            return made
        return [
            (
                timestamp_ms,
                b"%d" % self.rows.randrange(KEYS),
                None if self.rows.random() < TOMBSTONES else value,
                headers,
            )
            for timestamp_ms, _, value, headers in made
        ]

    # What the checkers see.

    def state(self, replica: LocalReplica) -> tuple[Any, ...]:
        """See :meth:`NodesHistory.state`."""
        if not self.compacts:
            return super().state(replica)
        return super().state(replica), replica.manifests.busy, id(replica.compaction)

    def observe(self, machine: Machine, tp: TopicPartition, replica: LocalReplica | None) -> None:
        """See :meth:`NodesHistory.observe`."""
        checks = self.checks
        compacted = isinstance(checks, CompactedTransactionChecks) and tp.topic in checks.compacted
        if replica is None or not compacted:
            super().observe(machine, tp, replica)
        else:
            assert isinstance(checks, CompactedTransactionChecks)
            observe_compacted(self, checks, machine, replica)

    def superseded(self, tp: TopicPartition, offset: int) -> bool:
        """Whether a pass may have removed a record that was committed there."""
        checks = self.checks
        return isinstance(checks, CompactedTransactionChecks) and checks.superseded(tp, offset)

    def _offsets_lost(self, _: str) -> int:
        return self.checks.register(TopicPartition(CONSUMER_OFFSETS, 0)).give_ups

    async def create_topics(self) -> None:
        """See :meth:`NodesHistory.create_topics`."""
        await super().create_topics()
        if self.moves:
            await self.operator.create(Topic(*self.subscribed))

    def next_producer_id(self) -> int:
        """See :meth:`NodesHistory.next_producer_id`: nor one that the cluster gives."""
        return OWN_IDS + super().next_producer_id()

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

    def leader(self, tp: TopicPartition) -> int:
        """Who leads a partition, as the newest metadata have it; -1: nobody."""
        state = self.checks.register(tp).state
        return -1 if state is None else state.leader

    def coordinated(self, name: str) -> TopicPartition:
        """The partition that keeps a transactional id."""
        return TopicPartition(TRANSACTION_STATE, partition_for(name, STATE_PARTITIONS))

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
        with ExitStack() as stack:
            stack.enter_context(super().watched())
            stack.enter_context(passes_run_here(self))
            stack.enter_context(mock.patch.object(Peers, "send", self._unless_deaf(Peers.send)))
            if self.late_markers:
                answer_s = MARKERS_ANSWER_S if self.returns is None else GIVEN_UP_S
                stack.enter_context(mock.patch.object(marker_channel, "ANSWER_S", answer_s))
            if self.expires:
                stack.enter_context(
                    mock.patch.object(maintenance, "EXPIRY_TICK_MS", EXPIRY_TICK_MS)
                )
            yield

    def _unless_deaf(self, original: Any) -> Any:
        def send(peers: Peers, message: Message) -> None:
            if not (message.to in self.deaf and isinstance(message, AppendEntries)):
                original(peers, message)

        return send

    async def _hold_markers(self) -> None:
        """What coordinators send to leaders stays in its connection until they have given that up,
        and arrives then.
        """
        while self.running and not self.faults.healed:
            await asyncio.sleep(self.rows.uniform(*PAUSE_S))
            nodes = [one.node for one in self.machines if one.ready and one.node is not None]
            opened = [
                (node_id, connection)
                for node in nodes
                for node_id, connection in node.parts.marker_requests._connections.items()
                if not connection.closed
            ]
            if opened:
                node_id, connection = self.rows.choice(opened)
                led = [tp for tp in self.moved() if self.leader(tp) == node_id]
                led = [tp for tp in led if tp.topic != TRANSACTION_STATE]
                connection._transport.arrives_whole = True
                if self.returns is None or not led:
                    self.hold(connection)
                else:
                    self.returns.hold(connection, self.moves_random.sample(led, len(led)))
                self.world.counts["connections of markers held"] += 1

    def make_clients(self) -> list[Any]:
        """See :meth:`NodesHistory.make_clients`."""
        offsets = []
        for number in range(IDS):
            name = f"id-{number}"
            self.transactors.append(Transactor(self, name, self.random.choice(self.levels)))
            offsets.append(OffsetReader(Client(self), name))
        self.readers = [Reader(Client(self), tp) for tp in self.data]
        self.writers.extend(self.transactors)
        self.watch(self._audit())
        if self.late_markers:
            self.watch(self._hold_markers())
        ghosts = [Ghost(self)] * self.hangs
        copiers = []
        if self.moves:
            copiers = [
                Copier(self, f"mover-{slot}", self.random.choice((1, 2))) for slot in range(COPIERS)
            ]
            for number in range(self.subscribed[1]):
                tp = TopicPartition(self.subscribed[0], number)
                self.writers.append(Producer(Client(self), tp, -1, 1, 0.2))
        replaced = [] if self.replaced is None else [self.replaced]
        return [*self.writers, *self.readers, *offsets, *ghosts, *copiers, *replaced]

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
            self.transaction_checks.log(tp, register.batches, self._records(tp))
        self._verify_producers()
        self.transaction_checks.finish(there, self.superseded)
        if self.moves:
            await self._verify_moves(deadline)
        for transactor in self.transactors:
            await self._verify_offset(transactor.name, deadline)
        for number in range(STATE_PARTITIONS):
            await self._verify_states(TopicPartition("__transaction_state", number), deadline)

    def _records(self, tp: TopicPartition) -> list[batches.Rec]:
        """What the leader of a partition holds."""
        state = self.checks.register(tp).state
        replica = None if state is None else self.machines[state.leader].replicas.get(tp)
        return [] if replica is None else batches.records(replica.partition.log)

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
            self.transaction_checks.all_moved(tp, offset, self._records(tp))

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
            for tp, replica in machine.replicas.items():
                log = replica.partition.log
                whole = tp in self.data and not self.compacts  # a pass takes batches away
                if replica.partition.offline is not None:
                    continue
                if self.expires or (not whole and tp.topic != CONSUMER_OFFSETS):
                    continue
                if log.log_end_offset != log.written_end_offset:
                    continue  # batches are staged
                known = {
                    producer_id: (
                        state.epoch,
                        state.last_sequence,
                        state.coordinator_epoch,
                        state.txn_first_offset,
                    )
                    for producer_id, state in log.producers.items()
                }
                found = batches.read(log, log.log_start_offset)
                self.transaction_checks.producers(f"n{machine.node_id}", tp, found, known)
                what = "producer states" if tp in self.data else "producer states of offsets"
                self.world.counts[f"{what} compared"] += 1

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
                    held = self.machines[register.state.leader].replicas[tp]
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
