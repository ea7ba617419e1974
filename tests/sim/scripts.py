"""Histories by script: what needs so many things in a row that no draw of faults brings it about.

The cluster is that of stage ``cores`` or ``storage`` and runs under the same checkers; only the
faults are not drawn. The seed says which script (:data:`SCRIPTS`, in turn) and everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kept.cluster.metadata.records import NO_LEADER, PartitionRecord
from kept.storage.types import TopicPartition
from tests.sim.cluster import CoresHistory
from tests.sim.faults import Profile
from tests.sim.machine import Machine
from tests.sim.node import SimNode
from tests.sim.world import MS, SECOND, Violation

QUIET = Profile(frozenset(), 1000, False, (3_600_000, 3_600_000))
"""No fault of itself, and nobody starts what a script has ended."""
LATE_MS = 5000


class ScriptedHistory(CoresHistory):
    """See the module."""

    stage = "scripted"

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.script = SCRIPTS[(seed - 1) % len(SCRIPTS)]
        self.profile = self.nemesis.profile = QUIET
        for machine in self.machines:
            machine.rate, machine.wall_offset_ms = 1.0, 0
        self.operator.kinds = []
        self.network.holds = 0.0
        self.sleepy = self.limps = self.unclean = self.checks.unclean = False
        self.retention_bytes = -1
        self.min_isr = 1
        self.lag_ms = 1500
        self.partitions = [TopicPartition("t", i) for i in range(3)]
        self.on_registered: Callable[[int], None] = lambda node: None
        if self.script is a_follower_acknowledges_what_is_durable:
            self.durable = self.checks.durable = True
            self.replication = 2

    def __str__(self) -> str:
        return f"script {self.script.__name__}, {len(self.machines)} nodes"

    def suffer(self) -> None:
        """What the script says."""
        self.world.counts[self.script.__name__] += 1
        self.script(self)

    def registered(self, node: int) -> None:
        """A broker is registered at the controller, which has not told it yet."""
        super().registered(node)
        self.on_registered(node)

    # For scripts.

    def until(self, what: str, is_so: Callable[[], bool], seconds: int = 20) -> None:
        """Go on until then."""
        if not is_so() and not self.world.run(self.world.now_us + seconds * SECOND, done=is_so):
            raise Violation("script", f"{what}: not within {seconds} s: {self._state()}")

    def state(self, tp: TopicPartition) -> PartitionRecord:
        """What is committed of a partition."""
        state = self.checks.register(tp).state
        assert state is not None
        return state

    def cast(self, apart: int = 3) -> tuple[TopicPartition, Machine, Machine, Machine]:
        """A partition, its leader, the controller, and a follower; the first two are ``apart``, or
        all three.
        """
        self.until("a controller", lambda: self.leader() is not None)
        controller = self.leader()
        assert controller is not None
        machines = self.machines
        for tp in self.partitions:
            state = self.state(tp)
            others = sorted(set(state.isr) - {state.leader})
            if apart == 3:
                others = [broker for broker in others if broker != controller.node_id]
            if state.leader not in (controller.node_id, NO_LEADER) and others:
                return tp, machines[state.leader], controller, machines[others[0]]
        raise Violation("script", f"the controller leads everything: {self._state()}")

    def isolate(self, one: Machine, other: Machine) -> None:
        """Cut both ways between two."""
        self.network.isolate({one.node_id}, {other.node_id})

    def join(self, one: Machine, other: Machine) -> None:
        """Whole again."""
        pair = one.node_id, other.node_id
        self.network.cuts -= {pair, pair[::-1]}

    def drop_out(self, tp: TopicPartition, leader: Machine, follower: Machine) -> None:
        """A follower does not reach its leader until it is out of the ISR."""
        self.isolate(leader, follower)
        self.until(f"{follower.name} lags", lambda: follower.node_id not in self.state(tp).isr)
        self.until("the leader knows", lambda: not self.proposes(tp, leader))

    def proposes(self, tp: TopicPartition, leader: Machine) -> bool:
        """It waits for another ISR."""
        app = leader.app
        return isinstance(app, SimNode) and app.replicas.partitions[tp].core.pending_isr is not None

    def wait(self, milliseconds: int) -> None:
        self.world.run(self.world.now_us + milliseconds * MS)

    def rest(self) -> None:
        """Producers stop; all that they sent is acknowledged."""
        for producer in self.producers:
            producer.stopped = True
        self.until("all is acknowledged", lambda: not any(p.queue for p in self.producers))

    def go_on(self) -> None:
        for producer in self.producers:
            producer.stopped = False
            producer.produce()


def an_isr_change_comes_late(history: ScriptedHistory) -> None:
    """A proposal to let a follower in is held up, and arrives after that has left again."""
    tp, leader, _, follower = history.cast()
    network = history.network
    history.drop_out(tp, leader, follower)
    network.late_ms, network.late_next = (LATE_MS, LATE_MS), (leader.node_id, "alter_isrs")
    history.join(leader, follower)
    history.until("it is in", lambda: follower.node_id in history.state(tp).isr)
    history.drop_out(tp, leader, follower)
    history.wait(LATE_MS)


def a_proposal_is_lost_in_a_stall(history: ScriptedHistory) -> None:
    """A leader that has just proposed an ISR sleeps; it hears that nobody answered when it wakes,
    before it may serve again.
    """
    tp, leader, controller, follower = history.cast()
    history.drop_out(tp, leader, follower)
    history.isolate(leader, controller)
    history.join(leader, follower)
    history.until("a proposal", lambda: history.proposes(tp, leader))
    history.wait(10)
    leader.stall()
    history.wait(1200)
    leader.resume()
    history.wait(100)
    history.join(leader, controller)


def a_follower_acknowledges_what_is_durable(history: ScriptedHistory) -> None:
    """``flush.messages=1``: the leader is gone for good, and so is what its follower had in memory
    when power failed there: that must be nothing.
    """
    tp, leader, _, follower = history.cast(apart=2)
    history.rest()
    history.wait(1500)  # whatever was rolled is flushed
    history.go_on()
    history.wait(50)
    history.rest()
    leader.kill()
    history.until("it is settled who leads", lambda: _leads_alone(history.state(tp), follower))
    history.wait(1000)
    follower.power_loss()
    history.wait(500)
    follower.start()
    history.until("it leads again", lambda: _leads_alone(history.state(tp), follower))
    history.wait(500)
    leader.start()
    history.go_on()


def _leads_alone(state: PartitionRecord, node: Machine) -> bool:
    return (state.leader, state.isr, state.elr) == (node.node_id, (node.node_id,), ())


def a_register_of_the_dead_comes_late(history: ScriptedHistory) -> None:
    """The Register of a process that was killed is taken after that of the next one, which has not
    heard yet that it is registered.
    """
    _, _, controller, broker = history.cast()
    network = history.network
    broker.kill()
    history.wait(500)
    network.holds, network.late_ms = 1.0, (2000, 2000)
    network.cut(broker.node_id, controller.node_id)
    broker.start()
    history.wait(1000)
    broker.kill()
    network.holds = 0.0
    history.join(controller, broker)
    history.wait(100)
    history.on_registered = lambda node: network.cut(controller.node_id, node)
    broker.start()
    history.wait(3000)
    history.on_registered = lambda node: None


SCRIPTS = (
    an_isr_change_comes_late,
    a_proposal_is_lost_in_a_stall,
    a_follower_acknowledges_what_is_durable,
    a_register_of_the_dead_comes_late,
)
