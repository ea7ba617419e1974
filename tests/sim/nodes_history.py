"""Stage ``nodes``: three of the product's own processes, sometimes with a fourth that is a broker
alone, on one simulated loop and network.

Raft, registration, replication and failover run as they ship: the nodes speak framed protobuf and
Kafka's Fetch to each other over connections that delay bytes, break and are cut. Processes are
killed or lose power at disk calls and between them, one or all, and come back on what their disks
have; others are stopped for seconds; links are cut. Then everything heals.

The checkers of :mod:`tests.sim.replica_checks` see each replica after every callback that changed
it. And here:

- ``acknowledged``, ``lost``: what was acknowledged is not committed at its offset, or cannot be
  read there in the end;
- ``epoch-durable``: a leader appends in an epoch that a power loss may take from it;
- ``order``: a record that nobody sent, or one twice, or a gap;
- ``liveness``: a healed cluster does not come to rest (led, ISRs full, producers acknowledged);
- ``spins``: the loop of a node does something again and again while no time passes;
- ``stopped``, ``escaped``: as in :mod:`tests.sim.node_history`.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import TYPE_CHECKING, Any, Final, Protocol
from unittest import mock

from kept.cluster.metadata.metadata_node import MetadataNode
from kept.cluster.raft.ready import Role
from kept.node.kafka import api
from kept.storage.producers import cut_preparation
from kept.storage.producers.cut_preparation import CutPreparation
from kept.storage.records import records
from kept.storage.types import TopicPartition
from tests.sim import batches
from tests.sim.loop import SLOW_JOB_S, SimLoop
from tests.sim.nodes_clients import Client, Consumer, Operator, Producer, Topic, _Sending
from tests.sim.nodes_faults import AGAIN_S, RUN_S, TRIALS, Faults
from tests.sim.nodes_machine import VOTERS, Machine
from tests.sim.process import Process
from tests.sim.raft_checks import RaftChecks, View
from tests.sim.replica_checks import ReplicaChecks
from tests.sim.surroundings import simulated
from tests.sim.world import Violation, World

if TYPE_CHECKING:
    from kept.client.node_connection import NodeConnection
    from kept.cluster.raft.messages import Message
    from kept.node.replicas.local_replica import LocalReplica
    from kept.replication.partition import Partition
    from tests.sim.batches import Batch

HEAL_S: Final = 90.0
"""From the end of all faults to a cluster at rest, at most."""
PARTITIONS: Final = 2
HELD_S: Final = (0.4, 4.0)
"""How long a request stays in its connection."""
EPOCHS: Final = "leader-epoch-checkpoint"


class Writer(Protocol):
    """A client that the cluster must acknowledge something to, again and again."""

    acknowledged_s: float
    """When it last did."""


class NodesHistory:
    """One seed of stage ``nodes``."""

    topic = "t"
    durable_share = 0.5
    power_share = 0.4
    consumers = True
    replication = VOTERS
    trials = TRIALS
    again_s = AGAIN_S
    changes_voters = True
    more = True
    """Kinds of fault, settings and trials that few histories have."""

    def __init__(
        self,
        seed: int,
        *,
        tracing: bool = False,
        assertions: bool = True,
        durable: bool | None = None,
        trial: str | None = None,
        heal_s: float = HEAL_S,
        suffer_s: float = RUN_S,
        slow: bool | None = None,
        voters: bool | None = None,
        raises: bool | None = None,
    ) -> None:
        """``durable`` (power losses, and ``flush.messages=1``), ``trial``, ``slow`` (disks),
        ``voters`` (change), ``raises`` (epochs of producers): drawn if None;
        ``heal_s``: how long the cluster may take to come to rest; ``suffer_s``: how long there are
        faults.
        """
        self.heal_s = heal_s
        self.suffer_s = suffer_s
        self.world = World(seed, tracing=tracing)
        self.assertions = assertions
        self.random = random = self.world.random
        self.loop = SimLoop(random.getrandbits(32))
        if random.random() < 0.2 or slow:
            self.loop.job_s = SLOW_JOB_S
            self.world.counts["slow disks"] += 1
        self.jobs = Random(f"jobs {seed}")
        """For what threads do, and how long it takes them."""
        if self.jobs.random() < 0.3:
            self.loop.early_share = 0.5
            self.world.counts["histories with early jobs"] += 1
        power = random.random() < self.power_share or bool(durable)
        self.durable = power and (random.random() < self.durable_share or bool(durable))
        self.faults = Faults(self, power=power)
        self.checks = self.make_checks()
        self.log_dirs = self.draw_log_dirs(trial)
        if self.more:
            self.faults.draw_more(self.log_dirs, self.trials)
        self.faults.trial = self.faults.trial if trial is None else trial
        drawn = self.jobs.random() < 0.3 and self.changes_voters
        voters = drawn if voters is None else voters
        count = VOTERS + (random.random() < 0.3 or voters)
        self.may_vote = count if voters else VOTERS
        drawn = self.more and self.jobs.random() < 0.4
        self.raises_epochs = drawn if raises is None else raises
        """Idempotent producers begin anew under their id, in the next epoch."""
        self.machines = [Machine(self, i, seed * 4 + i) for i in range(count)]
        self.settings: dict[str, str] = {"log.segment.bytes": "4096"}
        self.topic_configs = {"min.insync.replicas": random.choice(("1", "2", "2"))}
        if self.more:
            self._draw_more()
        if self.durable:
            self.topic_configs["flush.messages"] = "1"
        self.partitions = [TopicPartition(self.topic, i) for i in range(PARTITIONS)]
        self.operator = self.make_operator()
        self.operator.kinds += ["voters"] * 2 * voters
        self.raft = RaftChecks()
        self.writers: list[Writer] = []
        self.sent: defaultdict[TopicPartition, set[bytes]] = defaultdict(set)
        self.acked: defaultdict[TopicPartition, dict[int, bytes]] = defaultdict(dict)
        self._tasks: list[asyncio.Task[None]] = []
        """Of the clients; what one of them finds ends the history."""
        self.running = True
        self._found: Violation | None = None
        self._durable_epochs: dict[tuple[Any, ...], int] = {}
        """Of leaders, by node, life and directory: the epoch that is known to be durable."""
        self._number = 0
        self._producer_ids = 0

    def _draw_more(self) -> None:
        """What few histories have."""
        extra = self.world.extra
        if extra.random() < 0.12:
            self.checks.unclean = True
            self.topic_configs["unclean.leader.election.enable"] = "true"
        if extra.random() < 0.2:
            self.topic_configs["retention.bytes"] = "30000"
            self.settings["log.retention.check.interval.ms"] = "1000"
        if self.faults.trial == "limp":
            self.settings["replica.lag.time.max.ms"] = "5000"
        if extra.random() < 0.3:
            for machine in self.machines:
                machine.disk.boots = None

    def draw_log_dirs(self, trial: str | None) -> int:
        """How many log directories each machine has."""
        drawn = self.world.extra.choice((1, 1, 2, 3)) if self.more else 1
        return 2 if trial == "device" else drawn

    def make_operator(self) -> Operator:
        """Who changes topics, partitions and voters."""
        return Operator(self)

    def make_checks(self) -> ReplicaChecks:
        """Who judges replicas."""
        return ReplicaChecks(self.world, durable=self.durable)

    def __repr__(self) -> str:
        return (
            f"{len(self.machines)} nodes, {self.log_dirs} log directories, {self.topic_configs}, "
            f"{self.faults}, operator: {', '.join(self.operator.kinds) or 'none'}"
        )

    def counts(self) -> dict[str, int]:
        """What happened in it."""
        give_ups = sum(register.give_ups for register in self.checks.registers.values())
        return self.world.counts | {
            "batches committed": self.checks.commits,
            "losses allowed": give_ups,
        }

    def close(self) -> None:
        """End what dead processes were at: their ``finally`` blocks reach nothing any more."""
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        for machine in self.machines:
            if machine.process is not None:
                machine.process.alive = False
        try:
            self.loop.end_tasks()
            self.machines.clear()
            self.loop.close()
            gc.collect()
        finally:
            asyncio.set_event_loop(None)
            sys.unraisablehook = hook

    def note(self, who: str, what: str, *details: object) -> None:
        """A line of the trace, and of the fingerprint."""
        self.world.now_us = int(self.loop.time() * 1e6)
        self.world.note(who, what, *details)
        self.world.mark(who, what, *details)

    # What the checkers see.

    def observe(self, machine: Machine, tp: TopicPartition, replica: LocalReplica | None) -> None:
        """A replica has changed, or is gone."""
        self.world.now_us = int(self.loop.time() * 1e6)
        if replica is None:
            self.checks.removed(machine.node_id, tp)
            return
        partition, log = replica.partition, replica.partition.log
        self.checks.look(
            machine.node_id,
            machine.life,
            tp,
            partition.topic_id,
            lambda start: batches.read(log, start),
            log.log_start_offset,
            log.written_end_offset,
            log.truncations,
            partition.high_watermark,
            partition.leader_epoch if partition.core.leading else None,
        )
        self.check_epoch(machine, partition)

    def check_epoch(self, machine: Machine, partition: Partition) -> None:
        """Who leads, and has written something in its epoch, keeps the epoch whatever happens to
        its machine (rule 24). Raises Violation.
        """
        core, log = partition.core, partition.log
        if not core.leading or log.written_end_offset <= core.epoch_start_offset:
            return
        epoch, led = core.leader_epoch, (machine.life, log.directory, partition.topic_id)
        if self._durable_epochs.get((machine.node_id, *led)) == epoch:
            return
        found = machine.disk.durable(f"{log.directory}/{EPOCHS}") or b""
        if epoch not in [int(line.split()[0]) for line in found.splitlines()[2:]]:
            raise Violation(
                "epoch-durable",
                f"{partition.topic_partition}: n{machine.node_id} appends in epoch {epoch}, of "
                f"which its disk may keep nothing: {found!r}",
            )
        self._durable_epochs[machine.node_id, *led] = epoch

    def state(self, replica: LocalReplica) -> tuple[Any, ...]:
        """Where it differs from before, a replica is judged anew."""
        partition = replica.partition
        log, core = partition.log, partition.core
        return (
            log.written_end_offset,
            log.log_start_offset,
            log.truncations,
            core.high_watermark,
            core.leading,
            core.leader_epoch,
            partition.topic_id,
            len(log.segments),
        )

    def observe_raft(self, machine: Machine, member: MetadataNode) -> None:
        """A member of the metadata's Raft has stepped."""
        self.raft.look(
            machine.node_id,
            machine.life,
            term=member.term,
            leads=member.role is Role.LEADER,
            commit=member.commit_index,
            log=View(member.core.log),
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The checkers hear of what is committed before a node acts on it, and of what a member of
        Raft says before anybody else does. In half of the histories every cut waits until a thread
        has read its producers, as that of a large segment does.
        """
        checks, original = self.checks, MetadataNode.done_in_steps
        run, counts = CutPreparation.run, self.world.counts
        seed = self.world.seed
        inline_bytes = Random(f"cuts {seed}").choice((-1, cut_preparation.INLINE_BYTES))

        def prepared(preparation: CutPreparation) -> None:
            counts["cuts that waited for their producers"] += 1
            run(preparation)

        drain_messages = MetadataNode.drain_messages

        def drained(node: MetadataNode) -> tuple[Message, ...]:
            messages = drain_messages(node)
            for message in messages:
                self.judge(self.raft.said, node.node_id, message)
            return messages

        def done_in_steps(node: MetadataNode, work: Any) -> Any:
            outcome = yield from original(node, work)
            for image, delta, _ in outcome.applied:
                self.judge(checks.metadata, image.index, image, delta)
            return outcome

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(MetadataNode, "done_in_steps", done_in_steps))
            stack.enter_context(mock.patch.object(MetadataNode, "drain_messages", drained))
            stack.enter_context(mock.patch.object(CutPreparation, "run", prepared))
            stack.enter_context(mock.patch.object(cut_preparation, "INLINE_BYTES", inline_bytes))
            yield

    def judge(self, check: Callable[..., None], *args: Any) -> None:
        """Call a checker within the product's code. What it finds is not the product's to catch, to
        log or to answer: it ends the history (:meth:`check`).
        """
        try:
            check(*args)
        except Violation as violation:
            self._found = self._found or violation

    def acknowledged(
        self, machine: Machine, tp: TopicPartition, batch: Batch, base: int, sending: _Sending
    ) -> None:
        """A producer with acks=all was told that its batch is committed."""
        checks = self.checks
        if checks.topics.get(tp.topic, (None, 0))[0] != sending.topic_id:
            return
        register = checks.register(tp)
        if register.give_ups != sending.give_ups:
            return
        if base >= register.start and not register.rebase:
            found = checks.committed_at(tp, base)
            if found is None or (found.base, found.identity) != (base, batch.identity):
                raise Violation(
                    "acknowledged",
                    f"n{machine.node_id} {tp} acknowledges {batch} at {base}; there: {found}",
                )
            register.acked[batch.identity] = (base, self.world.now_us)
        for offset, value in enumerate(sending.values, base):
            if self.acked[tp].setdefault(offset, value) != value and not register.give_ups:
                raise Violation("order", f"{tp}: offset {offset} was acknowledged twice")

    # The history.

    def run(self) -> None:
        """The whole of it. Raises Violation."""
        api.preload()
        gc.disable()
        asyncio.set_event_loop(self.loop)
        try:
            with simulated(self.loop, self.world.seed, self._line), self.watched():
                self.loop.run_until_complete(self._main())
        finally:
            gc.enable()
            self.world.now_us = int(self.loop.time() * 1e6)
            self.world.events = self.loop.turns
            self.world.mark("end", [machine.disk.calls for machine in self.machines])

    def _line(
        self, process: Process | None, level: str, event: str, fields: dict[str, Any]
    ) -> None:
        if process is not None and process.alive:
            if level == "error" and "trace" in fields:
                self.loop.escaped.append((process, f"{event}\n{fields['trace']}", None))
            shown = {name: value for name, value in fields.items() if name != "trace"}
            self.note(process.name, f"log {level}: {event}", repr(shown))

    def check(self) -> None:
        """Raises Violation for what checkers found, for what a node did not catch, and for one that
        gave up.
        """
        if self._found is not None:
            raise self._found
        for process, what, error in self.loop.escaped:
            if isinstance(error, Violation):
                raise error
            raise Violation("escaped", f"{process and process.name}: {what}: {error!r}") from error
        for client in self._tasks:
            if client.done():
                client.result()
        for machine in self.machines:
            machine.check()

    async def _main(self) -> None:
        for machine in self.machines[: VOTERS if self.may_vote > VOTERS else None]:
            machine.start()
        await self.until(lambda: all(m.ready for m in self.machines[:VOTERS]), "the first start")
        for machine in self.machines:
            machine.start()
        await self.until(lambda: all(m.ready for m in self.machines), "the first start of all")
        creating = self.loop.create_task(self.create_topics())
        await self.until(creating.done, "a topic")
        clients = self._tasks
        clients.append(self.loop.create_task(self.operator.run()))
        clients += [self.loop.create_task(one.run()) for one in self.make_clients()]
        await self.suffer()
        self.faults.heal()
        healed = self.loop.time()
        await self.until(lambda: self.led(healed), "leaders, full ISRs, acknowledged producers")
        await self.try_last()
        self.running = False
        done, late = await asyncio.wait(clients, timeout=self.heal_s)
        for client in done:
            client.result()
        if late:
            raise Violation("liveness", f"{len(late)} clients have no answer and no end")
        await self.until(self._in_sync, "equal replicas")
        self.checks.finish()
        await self.verify()
        self.world.counts["checks of all records"] += 1

    def hold(self, connection: NodeConnection) -> None:
        """What is sent over a connection from now on arrives later."""
        transport = connection._transport
        if transport is not None:
            transport.held_until_s = self.loop.time() + self.world.extra.uniform(*HELD_S)

    def told(self, what: str, machine: Machine | None, share: float) -> None:
        """A client reads an answer; by that ``share`` its machine is struck before it says more."""
        if self.faults.healed or machine is None or self.random.random() >= share:
            return
        self.world.counts[f"coordinators struck at {what}"] += 1
        self.faults.strike(machine)

    async def create_topics(self) -> None:
        """Make what clients need."""
        await self.operator.create(Topic(self.topic, PARTITIONS))

    async def suffer(self) -> None:
        """Faults for a while."""
        await self.faults.suffer()

    async def try_last(self) -> None:
        """A last trial, while clients go on."""
        await self.faults.try_last()

    def watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that happens beside; what it finds ends the history."""
        self._tasks.append(self.loop.create_task(work))

    async def until(self, done: Any, what: str) -> None:
        """Wait until ``done()``. Raises Violation."""
        deadline = self.loop.time() + self.heal_s
        while not done():
            self.check()
            if self.loop.time() > deadline:
                raise Violation(
                    "liveness", f"{what}: not within {self.heal_s} s; {self.described()}"
                )
            await asyncio.sleep(0.05)
        self.check()

    def described(self) -> str:
        """How things are."""
        registers = self.checks.registers.items()
        states = [f"{tp}: {register.state}, {register.end}" for tp, register in registers]
        return "\n".join([*states, *map(repr, self.writers)])

    # Clients.

    def make_clients(self) -> list[Any]:
        """Those of the history, not yet begun; they are among them that the cluster must serve."""
        random = self.random
        for tp in self.partitions:
            for acks in (-1, random.choice((-1, 1))):
                self.writers.append(
                    Producer(
                        Client(self),
                        tp,
                        acks,
                        random.choice((1, 1, 3)),
                        random.choice((0.02, 0.06, 0.2)),
                    )
                )
        readers = [Consumer(Client(self), tp) for tp in self.partitions if self.consumers]
        return [*self.writers, *readers]

    def moved(self) -> list[TopicPartition]:
        """Which partitions the operator reassigns."""
        return self.partitions

    def next_producer_id(self) -> int:
        """One that nobody had."""
        self._producer_ids += 1
        return self._producer_ids

    def make_records(self, now_ms: int) -> list[tuple[int, bytes | None, bytes | None, Any]]:
        """The records of a batch, each of which is written once."""
        found: list[tuple[int, bytes | None, bytes | None, Any]] = []
        for _ in range(self.random.choice((1, 1, 2))):
            self._number += 1
            value = b"%d " % self._number + b"x" * self.random.choice((0, 10, 300))
            found.append((now_ms, None, value, ()))
        return found

    # What must be true.

    def led(self, since_s: float) -> bool:
        """All partitions are led with full ISRs, and every writer was acknowledged since."""
        states = [r.state for r in self.checks.registers.values() if r.state is not None]
        return (
            all(machine.ready for machine in self.machines)
            and all(s.leader >= 0 and set(s.isr) == set(s.replicas) for s in states)
            and self.served(since_s)
        )

    def served(self, since_s: float) -> bool:
        """Every writer was acknowledged since."""
        return all(writer.acknowledged_s > since_s for writer in self.writers)

    def _in_sync(self) -> bool:
        """The replicas have caught up."""
        for tp, register in self.checks.registers.items():
            state = register.state
            if state is None:
                continue
            if state.leader < 0 or set(state.isr) != set(state.replicas):
                return False
            for node_id in state.replicas:
                held = self.machines[node_id].replicas.get(tp)
                if held is None or held.partition.log_end_offset != register.end:
                    return False
                if held.partition.high_watermark != register.end:
                    return False
        return True

    async def verify(self) -> None:
        """What was acknowledged can be read, and nothing else."""
        client = Client(self)
        for tp in self.partitions:
            register = self.checks.register(tp)
            if register.state is None:
                continue
            held = await self._fetch_all(client, self.machines[register.state.leader], tp)
            values = list(held.values())
            if len(set(values)) != len(values) or not set(values) <= self.sent[tp]:
                raise Violation("order", f"{tp}: records that nobody sent, or twice: {held}")
            for offset, value in self.acked[tp].items():
                if offset >= register.start and held.get(offset) != value:
                    if register.give_ups:
                        continue
                    raise Violation(
                        "lost", f"{tp}: {value[:20]!r} was acknowledged at {offset}: {held}"
                    )
        client.close()

    async def _fetch_all(
        self, client: Client, machine: Machine, tp: TopicPartition
    ) -> dict[int, bytes]:
        held: dict[int, bytes] = {}
        offset = self.checks.register(tp).start
        while True:
            found = await client.fetch(machine, tp, offset)
            if found.error != "none":
                raise Violation("liveness", f"{tp} cannot be read: {found}")
            for record in records(found.records):
                if record.offset == offset:
                    held[offset] = bytes(record.value or b"")
                    offset += 1
                elif record.offset > offset:
                    raise Violation("order", f"{tp}: a gap before offset {record.offset}")
            if offset >= found.high_watermark:
                return held
