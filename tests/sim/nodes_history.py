"""Stage ``nodes``: three of the product's own processes, on one simulated loop and network.

Raft, registration, replication and failover run as they ship: the nodes speak framed protobuf and
Kafka's Fetch to each other over connections that delay bytes, break and are cut. Producers look for
leaders with Metadata and write with acks=all; every topic has three replicas, two of which must
have what is acknowledged. Processes are killed at disk calls and between them, one or several, and
come back on what their disks have; links between two nodes are cut for a while. Then everything
heals. Checks:

- ``lost``: a record that was acknowledged is not at its offset, or a created topic is gone;
- ``order``: a record that nobody sent, or one twice, or a gap;
- ``replicas``: after the end three replicas of a partition differ below the high watermark;
- ``liveness``: a healed cluster does not come to three replicas in sync, or does not answer;
- ``spins``: the loop of a node does something again and again while no time passes;
- ``stopped``, ``escaped``: as in :mod:`tests.sim.node_history`.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import defaultdict
from contextlib import suppress
from typing import Any, Final

from kept.client.node_connection import NodeConnection
from kept.node.config.node_config import NodeConfig
from kept.node.kafka import api
from kept.node.node import Node
from kept.storage.errors import KeptError
from kept.storage.records import build_batch, records
from kept.storage.types import TopicPartition
from kept.testing.simulated_disk import SimulatedDisk
from tests.sim import batches
from tests.sim.loop import SLOW_JOB_S, SimLoop
from tests.sim.node_history import FETCH_BYTES, Partition, Topic
from tests.sim.process import Process
from tests.sim.surroundings import EPOCH_S, ProcessDisk, SimRuntime, simulated
from tests.sim.world import Violation, World

NODES: Final = 3
PORT: Final = 9092
RUN_S: Final = 12.0
HEAL_S: Final = 90.0
"""From the end of all faults to three replicas in sync, at most."""
REPLY_S: Final = 8.0
CALLS: Final = 200
TOPICS: Final = 3
PARTITIONS: Final = 2


class Machine:
    """A node, its disk, and its process while there is one."""

    def __init__(self, history: NodesHistory, node_id: int, seed: int) -> None:
        self.node_id = node_id
        self.host = f"10.0.0.{node_id + 1}"
        self.disk = SimulatedDisk(seed=seed)
        self.process: Process | None = None
        self.node: Node | None = None
        self.starting: asyncio.Task[None] | None = None
        self.dead: list[Process] = []
        self._history = history
        self._lives = 0

    @property
    def alive(self) -> bool:
        """Its process runs."""
        return self.process is not None and self.process.alive

    @property
    def ready(self) -> bool:
        """It has started."""
        return self.alive and self.starting is not None and self.starting.done()

    def start(self) -> None:
        """A new process, if there is none."""
        if self.alive:
            return
        loop = self._history.loop
        self._lives += 1
        process = self.process = Process(f"n{self.node_id}.{self._lives}", self.host)
        disk = self.disk = ProcessDisk(self.disk, self._history.random.getrandbits(30), process)
        process.on_death = self._died

        async def start() -> None:
            self.node = Node(self._config(), SimRuntime(disk, process))
            await self.node.start()

        self._history.note(process.name, "starts")
        self.starting = loop.spawn(process, start)

    def _died(self, process: Process) -> None:
        history = self._history
        history.note(process.name, "dies", self.disk.trace[-1] if self.disk.trace else "")
        history.loop.network.forget(process)
        history.loop.keep_tasks(process)
        self.dead.append(process)
        self.node = self.starting = None
        self.disk = self.disk.after_kill()

    def _config(self) -> NodeConfig:
        voters = ",".join(f"{i}@10.0.0.{i + 1}:{PORT + 1000}" for i in range(NODES))
        settings = {
            "node.id": str(self.node_id),
            "listeners": f"PLAINTEXT://{self.host}:{PORT}",
            "controller.quorum.voters": voters,
            "default.replication.factor": str(NODES),
            "min.insync.replicas": "2",
            "log.dirs": "/data/log",
            "metadata.log.dir": "/data/meta",
            "log.segment.bytes": "16384",
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "300",
        }
        return NodeConfig.load(None, settings, {})


class NodesHistory:
    """See the module."""

    def __init__(self, seed: int, *, tracing: bool = False, assertions: bool = True) -> None:
        self.world = World(seed, tracing=tracing)
        self.assertions = assertions
        self.random = self.world.random
        self.loop = SimLoop(self.random.getrandbits(32))
        if self.random.random() < 0.3:
            self.loop.job_s = SLOW_JOB_S
            self.world.counts["slow disks"] += 1
        self.machines = [Machine(self, i, seed * NODES + i) for i in range(NODES)]
        self._topics: list[Topic] = []
        self._sent: defaultdict[Partition, set[bytes]] = defaultdict(set)
        self._acknowledged: defaultdict[Partition, dict[int, bytes]] = defaultdict(dict)
        self._number = 0
        self._running = True

    def __repr__(self) -> str:
        return f"{NODES} nodes"

    def counts(self) -> dict[str, int]:
        """What happened in it."""
        return dict(self.world.counts)

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

    # The history.

    def run(self) -> None:
        """The whole of it. Raises Violation."""
        api.preload()
        gc.disable()
        asyncio.set_event_loop(self.loop)
        try:
            with simulated(self.loop, self.world.seed, self._line):
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

    def _check(self) -> None:
        for process, what, error in self.loop.escaped:
            raise Violation("escaped", f"{process and process.name}: {what}: {error!r}") from error
        for machine in self.machines:
            node = machine.node
            if node is not None and (failure := node.parts.shutdown.failure):
                raise Violation("stopped", f"node {machine.node_id} stops by itself: {failure}")
            starting = machine.starting
            if starting is not None and starting.done() and starting.exception() is not None:
                why = repr(starting.exception())
                raise Violation("stopped", f"node {machine.node_id} does not start: {why}")

    async def _main(self) -> None:
        for machine in self.machines:
            machine.start()
        await self._until(lambda: all(m.ready for m in self.machines), "the first start")
        clients = [self.loop.create_task(self._create_topics())]
        clients += [self.loop.create_task(self._produce()) for _ in range(3)]
        await self._break_things()
        self._running = False
        self.loop.network.cuts.clear()
        self.note("all", "heals")
        for machine in self.machines:
            machine.disk.crash_at(0)
            machine.start()
        done, late = await asyncio.wait(clients, timeout=HEAL_S)
        if late:
            raise Violation("liveness", f"{len(late)} clients have no answer and no end")
        for client in done:
            client.result()
        await self._until(self._in_sync, "three replicas in sync")
        await self._verify()

    async def _until(self, done: Any, what: str) -> None:
        deadline = self.loop.time() + HEAL_S
        while not done():
            self._check()
            if self.loop.time() > deadline:
                raise Violation("liveness", f"{what}: not within {HEAL_S} s")
            await asyncio.sleep(0.05)
        self._check()

    # Faults.

    async def _break_things(self) -> None:
        random, network, counts = self.random, self.loop.network, self.world.counts
        end = self.loop.time() + RUN_S
        while self.loop.time() < end:
            await asyncio.sleep(random.uniform(0.05, 1.5))
            self._check()
            machine = random.choice(self.machines)
            what = random.choice(("kill", "disk call", "start", "start", "cut", "isolate", "join"))
            if what == "kill" and machine.alive and machine.process is not None:
                machine.process.die()
                counts["processes killed between two disk calls"] += 1
            elif what == "disk call" and machine.alive:
                machine.disk.crash_at(machine.disk.calls + random.randint(1, CALLS))
                counts["processes to die within a disk call"] += 1
            elif what == "start":
                counts["processes started again"] += not machine.alive
                machine.start()
            elif what == "cut":
                other = random.choice([m for m in self.machines if m is not machine])
                network.cuts.add(frozenset((machine.host, other.host)))
                self.note("links", f"{machine.node_id} and {other.node_id} are cut off")
                counts["links cut"] += 1
            elif what == "isolate":
                others = [m for m in self.machines if m is not machine]
                network.cuts |= {frozenset((machine.host, other.host)) for other in others}
                self.note("links", f"{machine.node_id} is cut off from both")
                counts["nodes isolated"] += 1
            elif what == "join":
                network.cuts.clear()
                self.note("links", "are whole")

    # Clients.

    async def _connect(self, machine: Machine) -> NodeConnection:
        return await NodeConnection.open(machine.host, PORT, client_id="sim", timeout_s=REPLY_S)

    async def _create_topics(self) -> None:
        while self._running or len(self._topics) < 1:
            if len(self._topics) >= TOPICS:
                return
            topic = Topic(f"t{len(self._topics)}", PARTITIONS, synced=False)
            self._topics.append(topic)
            wanted = {
                "name": topic.name,
                "num_partitions": PARTITIONS,
                "replication_factor": NODES,
                "assignments": (),
                "configs": (),
            }
            values = {"topics": [wanted], "timeout": 20_000, "validate_only": False}
            with suppress(KeptError):
                connection = await self._connect(self.random.choice(self.machines))
                (result,) = (await connection.call(19, 7, values, REPLY_S)).topics
                if result.error_code.name == "none":
                    topic.exists = True
                    self.world.counts["topics created"] += 1
                connection.close()
            await asyncio.sleep(self.random.uniform(0.1, 2))

    async def _produce(self) -> None:
        """Write to leaders, one batch at a time each; look again for the leader after an error."""
        leaders: dict[Partition, Machine] = {}
        connections: dict[int, NodeConnection] = {}
        while self._running:
            await asyncio.sleep(self.random.uniform(0, 0.05))
            if not self._topics:
                continue
            topic = self.random.choice(self._topics)
            where = (topic.name, self.random.randrange(topic.partitions))
            try:
                if where not in leaders:
                    leaders.update(await self._leaders())
                    if where not in leaders:
                        continue
                machine = leaders[where]
                connection = connections.get(machine.node_id)
                if connection is None or connection.closed:
                    connection = connections[machine.node_id] = await self._connect(machine)
                if not await self._send(connection, where):
                    leaders.pop(where, None)
            except KeptError:
                self.world.counts["requests without an answer"] += 1
                leaders.pop(where, None)
        for connection in connections.values():
            connection.close()

    async def _leaders(self) -> dict[Partition, Machine]:
        connection = await self._connect(self.random.choice(self.machines))
        values = {
            "topics": None,
            "allow_auto_topic_creation": False,
            "include_cluster_authorized_operations": False,
            "include_topic_authorized_operations": False,
        }
        try:
            reply = await connection.call(3, 9, values, REPLY_S)
        finally:
            connection.close()
        return {
            (topic.name, partition.partition_index): self.machines[partition.leader_id]
            for topic in reply.topics
            for partition in topic.partitions
            if partition.leader_id >= 0
        }

    async def _send(self, connection: NodeConnection, where: Partition) -> bool:
        random = self.random
        self._number += 1
        value = b"%d " % self._number + b"x" * random.choice((0, 10, 300))
        self._sent[where].add(value)
        now_ms = int((EPOCH_S + self.loop.time()) * 1000)
        name, index = where
        produced = {"index": index, "records": build_batch([(now_ms, None, value, ())])}
        request = {
            "transactional_id": None,
            "acks": -1,
            "timeout": 6000,
            "topic_data": [{"name": name, "partition_data": [produced]}],
        }
        reply = await connection.call(0, 9, request, REPLY_S)
        found = reply.responses[0].partition_responses[0]
        if found.error_code.name != "none":
            self.world.counts[f"batches refused: {found.error_code.name}"] += 1
            return False
        self.note("client", "acknowledged", name, index, found.base_offset, value)
        self.world.counts["batches acknowledged"] += 1
        before = self._acknowledged[where].setdefault(found.base_offset, value)
        if before != value:
            raise Violation("order", f"{where}: offset {found.base_offset} acknowledged twice")
        return True

    # What must be true.

    def _hosted(self, machine: Machine) -> dict[TopicPartition, Any]:
        return {} if machine.node is None else machine.node.parts.table.hosted

    def _in_sync(self) -> bool:
        """All are ready, each partition is led by one, and all are in its ISR."""
        if not all(machine.ready for machine in self.machines):
            return False
        for topic in self._topics:
            for index in range(topic.partitions):
                tp = TopicPartition(topic.name, index)
                held = [self._hosted(machine).get(tp) for machine in self.machines]
                if not topic.exists and all(one is None for one in held):
                    continue
                if any(one is None for one in held):
                    return False
                leading = [one.partition for one in held if one.partition.is_leader]
                if len(leading) != 1 or len(leading[0].isr) != NODES:
                    return False
                ends = {one.partition.log_end_offset for one in held}
                if ends != {leading[0].high_watermark}:
                    return False
        return True

    async def _verify(self) -> None:
        for topic in self._topics:
            for index in range(topic.partitions):
                where = (topic.name, index)
                tp = TopicPartition(*where)
                hosted = [self._hosted(machine).get(tp) for machine in self.machines]
                if hosted[0] is None:
                    continue
                logs = [batches.read(one.partition.log, 0) for one in hosted]
                if any(log != logs[0] for log in logs):
                    raise Violation("replicas", f"{where}: {logs}")
                (leader,) = (
                    machine
                    for machine, one in zip(self.machines, hosted, strict=True)
                    if one.partition.is_leader
                )
                self._compare(where, await self._fetch_all(leader, where))
        self.world.counts["checks of all records"] += 1

    def _compare(self, where: Partition, held: list[bytes]) -> None:
        if len(set(held)) != len(held) or not set(held) <= self._sent[where]:
            raise Violation("order", f"{where}: records that nobody sent, or twice: {held}")
        for offset, value in self._acknowledged[where].items():
            if held[offset : offset + 1] != [value]:
                raise Violation(
                    "lost",
                    f"{where}: {value[:20]!r} was acknowledged at offset {offset}, "
                    f"where {[v[:20] for v in held[offset : offset + 1]]} is; end {len(held)}",
                )

    async def _fetch_all(self, leader: Machine, where: Partition) -> list[bytes]:
        connection = await self._connect(leader)
        held: list[bytes] = []
        while True:
            asked = {
                "partition": where[1],
                "fetch_offset": len(held),
                "partition_max_bytes": FETCH_BYTES,
            }
            request = {
                "max_wait": 0,
                "min_bytes": 0,
                "topics": [{"topic": where[0], "partitions": [asked]}],
                "forgotten_topics_data": (),
                "rack_id": "",
            }
            reply = await connection.call(1, 12, request, REPLY_S)
            found = reply.responses[0].partitions[0]
            if found.error_code.name != "none":
                raise Violation("liveness", f"{where} cannot be read: {found}")
            for record in records(bytes(found.records or b"")):
                if record.offset == len(held):
                    held.append(bytes(record.value or b""))
                elif record.offset > len(held):
                    raise Violation("order", f"{where}: a gap before offset {record.offset}")
            if len(held) >= found.high_watermark:
                connection.close()
                return held
