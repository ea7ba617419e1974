"""A machine of the stages ``nodes``: a disk, and a process of the product while there is one.

After each callback of the process the checkers see its replicas, where one has changed.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from kept.cluster.raft.ready import Role
from kept.node.config.node_config import NodeConfig
from kept.node.node import Node
from tests.sim.process import Process
from tests.sim.surroundings import ProcessDisk, SimRuntime
from tests.sim.world import Violation, World
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk

if TYPE_CHECKING:
    from kept.cluster.metadata.metadata_node import MetadataNode
    from kept.cluster.metadata.voters import Voter
    from kept.node.replicas.local_replica import LocalReplica
    from kept.storage.types import TopicPartition
    from tests.sim.loop import SimLoop
    from tests.sim.replica_checks import ReplicaChecks

VOTERS: Final = 3
PORT: Final = 9092


class History(Protocol):
    """What a machine needs of its history."""

    world: World
    loop: SimLoop
    checks: ReplicaChecks
    assertions: bool
    settings: dict[str, str]
    log_dirs: int
    may_vote: int

    def note(self, who: str, what: str, *details: object) -> None: ...
    def state(self, replica: LocalReplica) -> tuple[Any, ...]: ...
    def observe(
        self, machine: Machine, tp: TopicPartition, replica: LocalReplica | None
    ) -> None: ...
    def observe_raft(self, machine: Machine, member: MetadataNode) -> None: ...


class WatchedProcess(Process):
    """Shows its replicas after each callback; may be held up (SIGSTOP)."""

    def __init__(self, name: str, host: str, after: Callable[[], None]) -> None:
        super().__init__(name, host)
        self.held: list[tuple[contextvars.Context, Callable[..., None], tuple[Any, ...]]] = []
        self.stopped = False
        self.told_to_end = False
        """It got SIGTERM: another one changes nothing."""
        self._after = after

    def run(self, callback: Callable[..., Any], *args: Any) -> None:
        """See :meth:`Process.run`."""
        if self.stopped and self.alive:
            self.held.append((contextvars.copy_context(), callback, args))
            return
        super().run(callback, *args)
        if self.alive:
            self._after()

    def resume(self, loop: SimLoop) -> None:
        """What was due meanwhile runs now, in its order."""
        self.stopped = False
        held, self.held = self.held, []
        for context, callback, args in held:
            loop.call_soon(callback, *args, context=context)


class Machine:
    """A node, its disk, and its process while there is one. The fourth is a broker alone."""

    def __init__(self, history: History, node_id: int, seed: int) -> None:
        self.node_id = node_id
        self.host = f"10.0.0.{node_id + 1}"
        self.disk = SimulatedDisk(seed=seed)
        self.process: WatchedProcess | None = None
        self.node: Node | None = None
        self.starting: asyncio.Task[None] | None = None
        self.dead: list[Process] = []
        self.life = 0
        self.log_dirs = ["/data/log", "/data/log2", "/data/log3"][: history.log_dirs]
        self.clock_s = 0.0
        self.troubled = False
        """A device of it failed, or was full: its process may give up."""
        self.watched = False
        """A checker looks at what becomes of that: nobody mends it meanwhile."""
        self.loses_power = False
        """The death that comes takes what was not synced."""
        self._history = history
        self._seen: dict[TopicPartition, tuple[Any, ...]] = {}
        self._seen_raft: tuple[Any, ...] = ()

    @property
    def alive(self) -> bool:
        """Its process runs."""
        return self.process is not None and self.process.alive

    @property
    def ready(self) -> bool:
        """It has started."""
        return self.alive and self.starting is not None and self.starting.done()

    @property
    def replicas(self) -> dict[TopicPartition, LocalReplica]:
        """Its replicas."""
        return {} if self.node is None else self.node.parts.table.replicas

    def start(self) -> None:
        """A new process, if there is none."""
        if self.alive:
            return
        history = self._history
        self.life += 1
        self._seen, self._seen_raft = {}, ()
        self.loses_power = False
        process = WatchedProcess(f"n{self.node_id}.{self.life}", self.host, self._watch)
        self.process = process
        process.clock_s = self.clock_s
        disk = self.disk = ProcessDisk(self.disk, history.world.random.getrandbits(30), process)
        process.on_death = self._died

        async def start() -> None:
            node = Node(self._config(), SimRuntime(disk, process))
            self.node = node
            await node.start()

        history.note(process.name, "starts")
        self.starting = history.loop.spawn(process, start)

    @property
    def voters(self) -> tuple[Voter, ...]:
        """Who votes on the metadata, as it knows."""
        return () if self.node is None else self.node.parts.metadata.raft_node.voters

    @property
    def controls(self) -> bool:
        """It leads the metadata's Raft."""
        return (
            self.ready
            and self.node is not None
            and self.node.parts.metadata.raft_node.role is Role.LEADER
        )

    def set_clock(self, ahead_s: float) -> None:
        """Its wall clock jumps."""
        self.clock_s = ahead_s
        if self.process is not None:
            self.process.clock_s = ahead_s

    def break_device(self, path: str) -> None:
        """The device of a log directory is gone."""
        self.troubled = True
        self.disk.broken.add(path)

    def fill(self, left_bytes: int) -> None:
        """There is room for so much."""
        self.troubled = True
        self.disk.capacity_bytes = self.disk.used_bytes() + left_bytes

    def repair(self) -> None:
        """Its devices are there, and have room."""
        self.troubled = self.watched = False
        self.disk.broken.clear()
        self.disk.capacity_bytes = None

    def kill(self, *, power: bool = False) -> None:
        """The process dies between two disk calls."""
        if self.process is not None and self.process.alive:
            self.loses_power = power
            self.process.die()

    def kill_within_disk_call(self, calls: int, *, power: bool = False) -> None:
        """The process dies in the middle of a disk call that is so many calls away."""
        self.loses_power = power
        self.disk.crash_at(self.disk.calls + calls)

    def _died(self, process: Process) -> None:
        history, counts = self._history, self._history.world.counts
        how = "loses power" if self.loses_power else "dies"
        history.note(process.name, how, self.disk.trace[-1] if self.disk.trace else "")
        history.loop.network.forget(process)
        history.loop.keep_tasks(process)
        self.dead.append(process)
        self.node = self.starting = None
        broken, capacity_bytes = self.disk.broken, self.disk.capacity_bytes
        if self.loses_power:
            counts["power losses"] += 1
            counts["power losses with writes not synced"] += any(
                inode.pending for _, inode in self.disk.files()
            )
            self.disk = self.disk.after_power_loss(history.world.random.getrandbits(30))
        else:
            self.disk = self.disk.after_kill()
        self.disk.broken, self.disk.capacity_bytes = broken, capacity_bytes
        history.checks.died(self.node_id, "power" if self.loses_power else "kill")

    def _watch(self) -> None:
        """Show what has changed of its replicas."""
        if self.node is None:
            return
        self._watch_raft(self.node)
        seen, hosted = self._seen, self.node.parts.table.replicas
        for tp, replica in hosted.items():
            now = self._history.state(replica)
            if seen.get(tp) != now and replica.partition.offline is None:
                seen[tp] = now
                if self._history.assertions:
                    replica.partition.check_invariants()
                try:
                    self._history.observe(self, tp, replica)
                except SimulatedCrash:
                    return
        if len(seen) != len(hosted):
            for tp in seen.keys() - hosted.keys():
                del seen[tp]
                self._history.observe(self, tp, None)

    def _watch_raft(self, node: Node) -> None:
        member: MetadataNode | None = getattr(node.parts.metadata, "raft_node", None)
        if member is None:
            return
        log = member.core.log
        now = member.term, member.role, log.commit_index, log.last_index, log.last_term
        if now != self._seen_raft:
            self._seen_raft = now
            self._history.observe_raft(self, member)

    def _config(self) -> NodeConfig:
        listed = range(VOTERS)
        if self.node_id < self._history.may_vote:
            listed = range(max(VOTERS, self.node_id + 1))  # it names itself: it may vote later
        voters = ",".join(f"{i}@10.0.0.{i + 1}:{PORT + 1000}" for i in listed)
        settings = {
            "node.id": str(self.node_id),
            "process.roles": (
                "broker,controller" if self.node_id < self._history.may_vote else "broker"
            ),
            "listeners": f"PLAINTEXT://{self.host}:{PORT}",
            "controller.quorum.voters": voters,
            "default.replication.factor": str(VOTERS),
            "log.dirs": ",".join(self.log_dirs),
            "metadata.log.dir": "/data/meta",
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "300",
            **self._history.settings,
        }
        return NodeConfig.load(None, settings, {})

    def check(self) -> None:
        """Raises Violation when it gave up by itself, but for a device that failed."""
        if self.troubled and self._gave_up():
            self._history.note(f"n{self.node_id}", "gives up")
            self.kill()
        if self.node is not None and (failure := self.node.parts.shutdown.failure):
            raise Violation("stopped", f"node {self.node_id} stops by itself: {failure}")
        starting = self.starting
        if starting is not None and starting.done() and starting.exception() is not None:
            raise Violation(
                "stopped", f"node {self.node_id} does not start: {starting.exception()!r}"
            )

    def _gave_up(self) -> bool:
        starting = self.starting
        return (self.node is not None and bool(self.node.parts.shutdown.failure)) or (
            starting is not None and starting.done() and starting.exception() is not None
        )
