"""Stage B: whole clusters. Three combined nodes, sometimes a fourth that is a broker alone.

A history: topics with one to three partitions and three replicas, producers (acks=all and acks=1),
a consumer per partition; faults for a while; then everything is healed, and there must come a
moment when all partitions are led with full ISRs, every producer is acknowledged again, and all
replicas hold the same (:meth:`ClusterHistory.settled`).

``cores`` suffers no fault of disks; ``storage`` has power losses, torn writes and full disks, half
of the time with ``flush.messages=1``, when even a loss of power everywhere may lose nothing.
"""

from __future__ import annotations

from random import Random
from typing import Any
from uuid import UUID

from kept.cluster.controller.topics import CreateTopic, create_topic
from kept.cluster.metadata.metadata_node import Outcome
from kept.cluster.metadata.records import NO_LEADER
from kept.storage.errors import TopicAlreadyExists
from kept.storage.types import TopicPartition
from tests.sim.clients import Consumer, Producer
from tests.sim.directories import BrokenDirectories
from tests.sim.faults import KINDS, Nemesis, Profile
from tests.sim.machine import Machine
from tests.sim.node import LIFECYCLE, SimNode
from tests.sim.operator import Operator
from tests.sim.raft_cluster import RaftApp, RaftHistory
from tests.sim.replica_checks import ReplicaChecks
from tests.sim.replicas import Replicas
from tests.sim.world import MS, SECOND, Violation

CORE_KINDS = (
    "kill", "all_kill", "term", "partition", "one_way", "isolate_leader", "flaky", "stall", "jump",
    "slow_disk",
)  # fmt: skip
PATIENCE_US = 60 * SECOND
LIMP_US = 20 * SECOND
LAST_NAP_US = 2 * SECOND
"""In some histories leaders sleep through the return of those that are started at the end."""
TOPIC = "t"


class ClusterHistory(RaftHistory):
    """One seed; see the module."""

    stage = "cluster"
    kinds: tuple[str, ...] = KINDS
    durable_share = 0.0
    replication = 3
    log_dirs = 1
    """Of each node."""

    def __init__(
        self, seed: int, *, tracing: bool = False, kinds: tuple[str, ...] | None = None,
        assertions: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(seed, tracing=tracing, kinds=kinds or self.kinds, assertions=assertions)
        world = self.world
        self.durable = world.chance(self.durable_share)
        self.checks = ReplicaChecks(world, durable=self.durable)
        self.network.machines.clear()
        count = 3 + world.chance(0.5)
        self.voter_ids = frozenset(range(3))
        self.voters = tuple(v for v in self.voters if v.node_id < 3)
        self.observers = count - 3
        self.machines = [Machine(world, self.network, i, self.boot) for i in range(count)]
        self.profile = Profile.draw(world, kinds or self.kinds)
        self.nemesis = Nemesis(world, self.network, self.machines, self.profile, self.victim)
        self.fault_us = world.between(4, 14) * SECOND
        self.min_isr = world.random.choice((1, 2))
        self.unclean = world.chance(0.12)
        self.retention_bytes = world.random.choice((-1, -1, -1, 4500))
        self.checks.unclean = self.unclean
        self.operator = Operator(self)
        self.partitions = [TopicPartition(TOPIC, i) for i in range(world.between(1, 3))]
        self.producers: list[Producer] = []
        self.consumers: list[Consumer] = []
        self.created = False
        self.producer_ids = 0
        extra = world.extra
        self.network.holds = extra.choice((0.0, 0.0, 0.7))
        self.lag_ms = extra.choice((3000, 3000, 1500))
        self.sleepy = extra.random() < 0.2
        self.awake_from_us = 0
        self.limps = extra.random() < 0.15
        self.boot_ids = Random(f"boot ids {seed}").random() < 0.5
        """Whether machines name their boots: a killed node can show then that it lost nothing."""
        for machine in self.machines:
            machine.on_death.append(self._died)
            machine.on_wake = self.epochs
            machine.disk.boots = 0 if self.boot_ids else None

    def epochs(self, machine: Machine) -> dict[TopicPartition, int]:
        """The leader epochs that are committed now."""
        states = {tp: self.checks.register(tp).state for tp in self.partitions}
        return {tp: state.leader_epoch for tp, state in states.items() if state is not None}

    def boot(self, machine: Machine) -> RaftApp:
        return SimNode(machine, self)

    def replicas_of(self, node: SimNode) -> Replicas:
        """A node's partitions."""
        return Replicas(node)

    def __str__(self) -> str:
        profile = self.profile
        return (
            f"{len(self.machines)} nodes, {len(self.partitions)} partitions, min.insync.replicas "
            f"{self.min_isr}{', flush.messages 1' if self.durable else ''}"
            f"{', unclean elections' if self.unclean else ''}"
            f"{', retention' if self.retention_bytes > 0 else ''}, operator: "
            f"{', '.join(self.operator.kinds) or 'none'}, faults for "
            f"{self.fault_us // SECOND} s: {', '.join(sorted(profile.kinds))}, every "
            f"{profile.pace_ms} ms"
        )

    def victim(self) -> Machine | None:
        """The controller, or who leads a partition."""
        if self.world.chance(0.5):
            return self.leader()
        tp = self.world.random.choice(self.partitions)
        state = self.checks.register(tp).state
        if state is None or state.leader == NO_LEADER:
            return None
        return self.machines[state.leader]

    def next_producer_id(self, acks: int) -> int:
        self.producer_ids += 1
        if acks == -1:
            self.checks.strict.add(self.producer_ids)
        return self.producer_ids

    @property
    def client_clock_ms(self) -> int:
        return 1_700_000_000_000 + self.world.now_ms

    def _died(self, machine: Machine, kind: str) -> None:
        super()._died(machine, kind)
        if hasattr(self, "checks"):
            self.checks.died(machine.node_id, kind)

    # The run.

    def run(self) -> None:
        """Raises Violation."""
        world = self.world
        world.note("history", str(self))
        for machine in self.machines:
            world.after(world.between(0, 300) * MS, machine.start)
        world.after(500 * MS, self._create)
        if not world.run(30 * SECOND, done=self._is_up):
            raise Violation("liveness", f"no topic 30 s after the start: {self._state()}")
        self._clients()
        world.run(world.now_us + 1 * SECOND)
        self.suffer()
        self.heal()
        self._live()

    def suffer(self) -> None:
        """What happens before everything is healed."""
        world = self.world
        self.nemesis.start()
        self.operator.start()
        self.awake_from_us = world.now_us + self.fault_us + LAST_NAP_US
        world.run(world.now_us + self.fault_us)

    def heal(self) -> None:
        """No fault any more."""
        self.nemesis.heal()

    def _is_up(self) -> bool:
        return all(self.checks.register(tp).state is not None for tp in self.partitions)

    def _create(self) -> None:
        if self._is_up():
            return
        self.world.after(500 * MS, self._create)
        leader = self.leader()
        if leader is None or not isinstance(leader.app, SimNode):
            return
        configs = self.topic_configs()
        request = CreateTopic(
            TOPIC, UUID(int=77), len(self.partitions), self.replication, configs=configs
        )
        active = [b for b in leader.app.image.brokers.values() if b.active]
        if len(active) < len(self.machines):
            return

        def change(image: Any) -> Any:
            try:
                return create_topic(image, request)
            except TopicAlreadyExists:
                return []

        leader.deliver("serve_create", -1, change, lambda _: None)

    def topic_configs(self) -> dict[str, str | None]:
        """Settings of every topic of this history."""
        configs: dict[str, str | None] = {
            "min.insync.replicas": str(self.min_isr),
            "segment.bytes": "1500",
            "index.interval.bytes": "300",
            "file.delete.delay.ms": "1000",
            "retention.bytes": str(self.retention_bytes),
            "unclean.leader.election.enable": "true" if self.unclean else "false",
        }
        if self.durable:
            configs["flush.messages"] = "1"
        return configs

    def _clients(self) -> None:
        world = self.world
        for number, tp in enumerate(self.partitions):
            for acks in (-1, world.random.choice((-1, 1))):
                producer = Producer(
                    self, -10 - len(self.producers), tp, acks, world.random.choice((1, 1, 3)),
                    world.random.choice((20, 60, 200)),
                )  # fmt: skip
                self.producers.append(producer)
                producer.start()
            consumer = Consumer(self, -100 - number, tp)
            self.consumers.append(consumer)
            consumer.start()

    def _live(self) -> None:
        world = self.world
        limit = world.now_us + PATIENCE_US
        healed = world.now_us
        while not self._led(healed):
            if world.now_us >= limit:
                raise Violation("liveness", f"healed, and not well: {self._state()}")
            world.run(world.now_us + 250 * MS)
        if self.limps:
            self._limp()
        self.once_more()
        for producer in self.producers:
            producer.stopped = True
        while not self.settled():
            if world.now_us >= limit:
                raise Violation("liveness", f"healed, and not settled: {self._state()}")
            world.run(world.now_us + 250 * MS)
        self.checks.finish()

    def once_more(self) -> None:
        """A last trial, while producers produce."""

    def _limp(self) -> None:
        """A follower lives and does not reach its leader: it leaves the ISR, and holds up nobody.

        Where both are in touch with the controller, which neither of them is.
        """
        world, controller = self.world, self.leader()
        state = self.checks.register(self.partitions[0]).state
        if controller is None or state is None or state.leader in (NO_LEADER, controller.node_id):
            return
        others = [b for b in state.isr if b not in (state.leader, controller.node_id)]
        if not others:
            return
        leader, slow = state.leader, others[0]
        world.counts["followers that limp"] += 1
        world.note("network", f"cuts n{leader} from n{slow}, nothing else")
        self.network.isolate({leader}, {slow})
        since, limit = world.now_us, world.now_us + LIMP_US
        while not all(producer.acknowledged_us > since for producer in self.producers):
            if world.now_us >= limit:
                raise Violation("liveness", f"n{slow} limps, and others wait: {self._state()}")
            world.run(world.now_us + 250 * MS)
        self.network.heal()
        while not self._led(since):
            if world.now_us >= limit + PATIENCE_US:
                raise Violation("liveness", f"it limps no more, and not well: {self._state()}")
            world.run(world.now_us + 250 * MS)

    def registered(self, node: int) -> None:
        """A broker came back: in some histories who leads sleeps through its return."""
        world = self.world
        if not self.sleepy or world.now_us > self.awake_from_us or world.extra.random() < 0.3:
            return
        leaders = {r.state.leader for r in self.checks.registers.values() if r.state is not None}
        for leader in sorted(leaders - {NO_LEADER, node}):
            machine = self.machines[leader]
            delay = world.extra.randint(10, 400) * MS
            world.counts["leaders that slept"] += 1
            world.after(delay, machine.stall)
            world.after(delay + world.extra.randint(900, 2700) * MS, machine.resume)

    def _led(self, since_us: int) -> bool:
        """All partitions are led with full ISRs, and every producer was heard since then."""
        states = [r.state for r in self.checks.registers.values() if r.state is not None]
        return all(s.leader >= 0 and set(s.isr) == set(s.replicas) for s in states) and all(
            producer.acknowledged_us > since_us for producer in self.producers
        )

    def settled(self) -> bool:
        """Nobody waits for an answer, and the replicas have caught up."""
        if any(producer.queue for producer in self.producers):
            return False
        for tp, register in self.checks.registers.items():
            state = register.state
            if state is None:
                continue
            copies = [self.checks.copies.get((node, tp)) for node in state.replicas]
            if any(c is None or c.end != register.end for c in copies):
                return False
        return True

    def _state(self) -> str:
        parts = [super()._state()]
        for tp in self.partitions:
            register = self.checks.register(tp)
            state = register.state
            if state is None:
                parts.append(f"{tp}: not there")
                continue
            ends = {
                node: (copy.end, copy.high_watermark)
                for node in state.replicas
                if (copy := self.checks.copies.get((node, tp)))
            }
            parts.append(
                f"{tp}: leader {state.leader} epoch {state.leader_epoch} ISR {state.isr} elr "
                f"{state.elr}, committed {register.end}, (end, HW) {ends}"
            )
        for producer in self.producers:
            parts.append(f"producer {producer.producer_id} waits for {len(producer.queue)}")
        parts += [
            f"n{app.node_id} {app.lifecycle.state.value}"
            for app in self.apps()
            if isinstance(app, SimNode)
        ]
        return "\n  ".join(parts)

    # What is judged.

    def outcome(self, app: RaftApp, outcome: Outcome) -> None:
        world = self.world
        for image, _, index in outcome.applied:
            world.mark("applied", app.node_id, index)
            content = [topic.partitions for topic in image.topics.values()]
            self.raft.applied(
                app.node_id, app.process, index, (content, sorted(image.brokers.items()))
            )

    def decides(self, app: SimNode) -> None:
        """A decision is taken on an image that holds all that was committed in earlier terms."""
        term, needed = app.member.term, self.raft.committed_to
        while needed and self.raft.committed[needed][0] >= term:
            needed -= 1
        if app.image.index < needed:
            raise Violation(
                "decided-on-old-image",
                f"n{app.node_id} decides on entry {app.image.index}, {needed} were committed "
                f"before term {term}",
            )

    def served(self, app: SimNode, tp: TopicPartition, leader_epoch: int) -> None:
        """Whoever served as leader had not slept through the end of its leadership."""
        slept = app.machine.slept_us
        woke, epochs = app.machine.woke
        if slept > 1000 * LIFECYCLE.session_timeout_ms and epochs.get(tp, -1) > leader_epoch:
            raise Violation(
                "stalled-leader",
                f"n{app.node_id} slept {slept // MS} ms, woke at {woke // MS} ms and serves {tp} "
                f"in epoch {leader_epoch}; epoch {epochs[tp]} had begun",
            )

    def counts(self) -> dict[str, int]:
        found = super().counts()
        del found["reads"], found["proposals acknowledged"]
        registers = self.checks.registers.values()
        return found | {
            "late duplicates refused": sum(p.late_duplicates for p in self.producers),
            "batches acknowledged": sum(p.acknowledged for p in self.producers),
            "batches committed": self.checks.commits,
            "records consumed": sum(c.read for c in self.consumers),
            "leader epochs": sum(len(r.leaders) for r in registers),
            "losses allowed": sum(r.give_ups for r in registers),
        }


class CoresHistory(ClusterHistory):
    """No fault of disks."""

    stage = "cores"
    kinds = CORE_KINDS


class StorageHistory(ClusterHistory):
    """Every fault."""

    stage = "storage"
    durable_share = 0.5


class DirectoriesHistory(ClusterHistory):
    """Every fault, and nodes with several log directories, one of which fails now and then.

    At the end one fails of a leader that is well otherwise: others lead what it led, though it
    lives, and nobody waits for it.
    """

    stage = "directories"
    durable_share = 0.5

    def __init__(self, seed: int, **given: Any) -> None:
        super().__init__(seed, **given)
        self.log_dirs = self.world.extra.choice((2, 2, 3))
        self.devices = BrokenDirectories(self, Random(f"devices {seed}"))

    def suffer(self) -> None:
        """With devices that fail, too."""
        self.devices.start()
        super().suffer()

    def heal(self) -> None:
        """No fault any more, nor of devices."""
        super().heal()
        self.devices.heal()

    def once_more(self) -> None:
        """The device fails to which a leader writes."""
        world, tp = self.world, self.partitions[0]
        state = self.checks.register(tp).state
        leader = NO_LEADER if state is None else state.leader
        app = None if leader == NO_LEADER else self.machines[leader].app
        if not isinstance(app, SimNode) or tp not in app.replicas.partitions:
            return
        since, limit = world.now_us, world.now_us + LIMP_US
        self.devices.break_one(app.machine, app.directories.home(tp).path)
        while not all(producer.acknowledged_us > since + SECOND for producer in self.producers):
            if world.now_us >= limit:
                raise Violation("liveness", f"a device failed, others wait: {self._state()}")
            world.run(world.now_us + 250 * MS)
        world.counts["leaders whose device failed"] += 1
        self.devices.mend(app.machine)
        while not self._led(since):
            if world.now_us >= limit + PATIENCE_US:
                raise Violation("liveness", f"it is in order, and not well: {self._state()}")
            world.run(world.now_us + 250 * MS)
