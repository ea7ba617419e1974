"""Stage ``node``: the product's own process, lone, on a simulated loop, disk and network.

What ``kept serve`` runs is started in a simulated process: listeners, connections, handlers, the
metadata log, flushes, recovery. Producers speak Kafka's protocol to it over connections that cut
and delay bytes. The process dies at a disk call that the seed chooses, between two of them, or is
stopped; it is started anew on what the disk has then. Whatever a client was told that it holds must
be there, at its offset, in every later life:

- ``lost``: an acknowledged record, or a created topic, is gone or is another one;
- ``order``: offsets of a partition have a gap, or a record is there that nobody sent, or twice;
- ``stopped``: the node gave up by itself, or does not start; ``escaped``: an exception of the
  product reached its loop or its log; ``silence``: a node that runs does not answer.

With power losses only what ``flush.messages=1`` makes durable is demanded, and the metadata.
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
from tests.sim.loop import SLOW_JOB_S, SimLoop
from tests.sim.process import Process
from tests.sim.surroundings import EPOCH_S, ProcessDisk, SimRuntime, simulated
from tests.sim.world import Violation, World
from tests.support.request_values import fetch_values, produce_values, topic_values
from tests.support.simulated_disk import SimulatedDisk

HOST: Final = "10.0.0.1"
PORT: Final = 9092
LIVES: Final = 6
LIFE_S: Final = (0.2, 3.0)
"""How long a process lives, if no disk call ends it."""
START_S: Final = 60.0
"""A start that takes longer has come to a halt."""
REPLY_S: Final = 30.0
CALLS: Final = 300
"""A process dies within so many disk calls, if it dies at one."""
IN_FLIGHT: Final = 5
FETCH_BYTES: Final = 1 << 20

Partition = tuple[str, int]


class Topic:
    """One that was created, or may have been. ``synced``: with ``flush.messages=1``."""

    def __init__(self, name: str, partitions: int, *, synced: bool) -> None:
        self.name = name
        self.partitions = partitions
        self.synced = synced
        self.exists = False
        """A client was told so."""


class NodeHistory:
    """One seed of stage ``node``."""

    def __init__(self, seed: int, *, tracing: bool = False, assertions: bool = True) -> None:
        self.world = World(seed, tracing=tracing)
        self.assertions = assertions
        self._random = self.world.random
        self._power = self._random.random() < 0.5
        self._loop = SimLoop(self._random.getrandbits(32))
        if self._random.random() < 0.3:
            self._loop.job_s = SLOW_JOB_S
            self.world.counts["slow disks"] += 1
        self._disk = SimulatedDisk(seed=seed)
        self._node: Node | None = None
        self._process: Process | None = None
        self._generation = 0
        self._topics: list[Topic] = []
        self._sent: defaultdict[Partition, set[bytes]] = defaultdict(set)
        self._acknowledged: defaultdict[Partition, dict[int, bytes]] = defaultdict(dict)
        self._doubtful: set[Partition] = set()
        """Acknowledged records of it may be gone: power was lost, and nothing was flushed."""
        self._number = 0
        self._producing = False
        self._kept: list[Process] = []

    def __repr__(self) -> str:
        return f"lone node, {'power losses' if self._power else 'kills only'}"

    def counts(self) -> dict[str, int]:
        """What happened in it."""
        return dict(self.world.counts)

    def close(self) -> None:
        """End what dead processes were at: their ``finally`` blocks reach nothing any more."""
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        if self._process is not None:
            self._process.alive = False
        try:
            self._loop.end_tasks()
            self._node = self._process = None
            self._kept.clear()
            self._loop.close()
            gc.collect()
        finally:
            asyncio.set_event_loop(None)
            sys.unraisablehook = hook

    # The history.

    def run(self) -> None:
        """The whole of it. Raises Violation."""
        api.preload()
        gc.disable()
        asyncio.set_event_loop(self._loop)
        try:
            with simulated(self._loop, self.world.seed, self._line):
                self._loop.run_until_complete(self._main())
        finally:
            gc.enable()
            self.world.now_us = int(self._loop.time() * 1e6)
            self.world.events = self._loop.turns
            self.world.mark("end", self._disk.calls)

    async def _main(self) -> None:
        for life in range(LIVES):
            last = life == LIVES - 1
            if await self._start(mortal=not last):
                await self._verify()
                if not last:
                    await self._live()
            self._check()
        await self._stop()

    def _note(self, what: str, *details: object) -> None:
        self.world.now_us = int(self._loop.time() * 1e6)
        self.world.note(f"life {self._generation}", what, *details)
        self.world.mark(what, *details)

    def _line(
        self, process: Process | None, level: str, event: str, fields: dict[str, Any]
    ) -> None:
        if process is not None and process.alive:
            if level == "error" and "trace" in fields:
                self._loop.escaped.append((process, f"{event}\n{fields['trace']}", None))
            shown = {name: value for name, value in fields.items() if name != "trace"}
            self._note(f"log {level}: {event}", repr(shown))

    def _check(self) -> None:
        for _, what, error in self._loop.escaped:
            if isinstance(error, Violation):
                raise error
            raise Violation("escaped", f"{what}: {error!r}") from error
        node = self._node
        if node is not None and node.parts.shutdown.failure:
            raise Violation("stopped", f"the node stops by itself: {node.parts.shutdown.failure}")

    # Lives.

    async def _start(self, *, mortal: bool) -> bool:
        """A new process on the disk; False when it died before it was ready."""
        self._generation += 1
        process = Process(f"life {self._generation}", HOST)
        disk = ProcessDisk(self._disk, self._random.getrandbits(30), process)
        self._disk, self._process = disk, process
        died = self._loop.create_future()
        process.on_death = lambda _: died.done() or died.set_result(None)
        if mortal and self._random.random() < 0.3:
            disk.crash_at(self._random.randint(1, CALLS // 4))
        self._note("starts")

        async def start() -> None:
            self._node = Node(self._config(), SimRuntime(disk, process))
            await self._node.start()

        starting = self._loop.spawn(process, start)
        await asyncio.wait([starting, died], timeout=START_S, return_when="FIRST_COMPLETED")
        if died.done():
            self._ended("dies at its start, within a disk call")
            return False
        if not starting.done():
            raise Violation("stopped", f"a start takes longer than {START_S} s")
        error = starting.exception()
        if error is not None:
            raise Violation("stopped", f"the node does not start: {error!r}") from error
        self.world.counts["starts"] += 1
        self._died = died
        return True

    async def _live(self) -> None:
        """Serve clients until the process ends."""
        random, process, disk = self._random, self._process, self._disk
        assert process is not None
        end = random.choice(("disk call", "disk call", "moment", "stop"))
        if end == "disk call":
            disk.crash_at(disk.calls + random.randint(1, CALLS))
        self._producing = True
        clients = [self._loop.create_task(self._create_topics())]
        clients += [self._loop.create_task(self._produce()) for _ in range(random.randint(1, 4))]
        await asyncio.wait([self._died], timeout=random.uniform(*LIFE_S))
        self._producing = False
        if self._died.done():
            self._ended("dies within a disk call")
        elif end == "stop":
            await self._stop()
        else:
            process.die()
            self._ended("is killed between two disk calls")
        done, late = await asyncio.wait(clients, timeout=REPLY_S * 2)
        if late:
            raise Violation("silence", f"{len(late)} clients have no answer and no end")
        for client in done:
            client.result()

    async def _stop(self) -> None:
        """Stop the node cleanly; it may die meanwhile."""
        node, process = self._node, self._process
        assert node is not None and process is not None
        stopping = self._loop.spawn(process, node.stop)
        await asyncio.wait([stopping, self._died], timeout=START_S, return_when="FIRST_COMPLETED")
        if self._died.done():
            self._ended("dies while it stops")
            return
        if not stopping.done():
            raise Violation("stopped", f"a stop takes longer than {START_S} s")
        stopping.result()
        self._check()
        process.die()
        self._ended("stops")

    def _ended(self, how: str) -> None:
        """Take the disk as the process left it."""
        process, old = self._process, self._disk
        assert process is not None
        self._note(how, old.trace[-1] if old.trace else "")
        self.world.counts[f"processes: {how}"] += 1
        self._loop.network.forget(process)
        self._loop.keep_tasks(process)
        self._kept.append(process)
        self._check()
        self._node = None
        if self._power and self._random.random() < 0.7:
            unsynced = any(inode.pending for _, inode in old.files())
            self.world.counts["power losses"] += 1
            self.world.counts["power losses with writes not synced"] += unsynced
            self._disk = old.after_power_loss(self._random.getrandbits(30))
            for topic in self._topics:
                if not topic.synced:
                    self._doubtful |= {(topic.name, i) for i in range(topic.partitions)}
            self._note("power loss")
        else:
            self._disk = old.after_kill()

    def _config(self) -> NodeConfig:
        settings = {
            "listeners": f"PLAINTEXT://{HOST}:{PORT}",
            "log.dirs": "/data/log",
            "metadata.log.dir": "/data/meta",
            "log.segment.bytes": "4096",
        }
        return NodeConfig.load(None, settings, {})

    # Clients.

    async def _connect(self) -> NodeConnection:
        return await NodeConnection.open(HOST, PORT, client_id="sim")

    async def _create_topics(self) -> None:
        """Create a topic now and then."""
        with suppress(KeptError):
            connection = await self._connect()
            while self._producing:
                if len(self._topics) < 8:
                    await self._create(connection)
                await asyncio.sleep(self._random.uniform(0.01, 0.5))
            connection.close()

    async def _create(self, connection: NodeConnection) -> None:
        random = self._random
        synced = random.random() < (0.8 if self._power else 0.4)
        topic = Topic(f"t{len(self._topics)}", random.randint(1, 3), synced=synced)
        self._topics.append(topic)
        configs = {"flush_messages": "1"} if synced else {}
        wanted = topic_values(topic.name, topic.partitions, **configs)
        values = {"topics": [wanted], "timeout": 20_000, "validate_only": False}
        (result,) = (await connection.call(19, 7, values, REPLY_S)).topics
        if result.error_code.name != "none":
            raise Violation("refused", f"{topic.name} is not created: {result}")
        self._note("created", topic.name)
        topic.exists = True
        self.world.counts["topics created"] += 1

    async def _produce(self) -> None:
        """Send batches, several at a time, on one connection."""
        random = self._random
        with suppress(KeptError):
            connection = await self._connect()
            waiting: set[asyncio.Task[None]] = set()
            while self._producing:
                if self._topics:
                    topic = random.choice(self._topics)
                    where = (topic.name, random.randrange(topic.partitions))
                    waiting.add(self._loop.create_task(self._send(connection, where)))
                if len(waiting) >= IN_FLIGHT or random.random() < 0.3:
                    await _all(waiting)
                    waiting.clear()
                await asyncio.sleep(random.choice((0, 0, random.uniform(0, 0.02))))
                if connection.closed:
                    break
            await _all(waiting)
            connection.close()

    async def _send(self, connection: NodeConnection, where: Partition) -> None:
        random = self._random
        values = [self._value() for _ in range(random.randint(1, 3))]
        self._sent[where].update(values)
        now_ms = int((EPOCH_S + self._loop.time()) * 1000)
        batch = build_batch([(now_ms, None, value, ()) for value in values])
        name, index = where
        acks = random.choice((1, -1))
        request = produce_values(name, batch, partition=index, acks=acks, timeout=20_000)
        try:
            reply = await connection.call(0, 9, request, REPLY_S)
        except KeptError:
            self.world.counts["batches without an answer"] += 1
            return
        found = reply.responses[0].partition_responses[0]
        if found.error_code.name != "none":
            self.world.counts[f"batches refused: {found.error_code.name}"] += 1
            return
        self._note("acknowledged", name, index, found.base_offset, values[0])
        self.world.counts["batches acknowledged"] += 1
        acknowledged = self._acknowledged[where]
        for offset, value in enumerate(values, found.base_offset):
            if acknowledged.setdefault(offset, value) != value and where not in self._doubtful:
                raise Violation("order", f"{where}: offset {offset} was acknowledged twice")
            acknowledged[offset] = value

    def _value(self) -> bytes:
        self._number += 1
        return b"%d " % self._number + b"x" * self._random.choice((0, 10, 300))

    # What must be true.

    async def _verify(self) -> None:
        """All that was acknowledged is there."""
        try:
            connection = await self._connect()
            for topic in self._topics:
                for index in range(topic.partitions):
                    await self._verify_partition(connection, topic, index)
            connection.close()
        except KeptError as error:
            if not self._died.done():
                raise Violation("silence", f"a node that runs does not answer: {error}") from error
        self.world.counts["checks of all records"] += 1

    async def _verify_partition(self, connection: NodeConnection, topic: Topic, index: int) -> None:
        where = (topic.name, index)
        held = await self._fetch_all(connection, where)
        if held is None:
            if topic.exists:
                raise Violation("lost", f"topic {topic.name} was created, and is gone")
            return
        topic.exists = True  # whether or not its creator heard of it
        values = list(held.values())
        if len(set(values)) != len(values) or not set(values) <= self._sent[where]:
            raise Violation("order", f"{where}: records that nobody sent, or twice: {held}")
        acknowledged = self._acknowledged[where]
        if where in self._doubtful:
            self._acknowledged[where] = {o: v for o, v in acknowledged.items() if held.get(o) == v}
            self._doubtful.discard(where)
            return
        for offset, value in acknowledged.items():
            if held.get(offset) != value:
                raise Violation(
                    "lost",
                    f"{where}: {value[:20]!r} was acknowledged at offset {offset}, "
                    f"where {held.get(offset, b'nothing')[:20]!r} is; end {len(held)}",
                )

    async def _fetch_all(
        self, connection: NodeConnection, where: Partition
    ) -> dict[int, bytes] | None:
        """All records of a partition by offset; None: there is no such topic."""
        name, index = where
        held: dict[int, bytes] = {}
        deadline = self._loop.time() + START_S
        while True:
            request = fetch_values(
                name, len(held), partition=index, partition_max_bytes=FETCH_BYTES, min_bytes=0
            )
            reply = await connection.call(1, 12, request, REPLY_S)
            found = reply.responses[0].partitions[0]
            if found.error_code.name == "unknown_topic_or_partition":
                return None
            if found.error_code.name in {"not_leader_or_follower", "offset_not_available"}:
                if self._loop.time() > deadline:
                    raise Violation("silence", f"{where} is not led: {found.error_code.name}")
                await asyncio.sleep(0.05)
                continue
            if found.error_code.name != "none":
                raise Violation("lost", f"{where} cannot be read: {found}")
            for record in records(bytes(found.records or b"")):
                if record.offset == len(held):
                    held[record.offset] = bytes(record.value or b"")
                elif record.offset > len(held):
                    raise Violation("order", f"{where}: a gap before offset {record.offset}")
            if len(held) >= found.high_watermark:
                return held


async def _all(tasks: set[asyncio.Task[None]]) -> None:
    """Wait for all, in the order of their making; the first error is raised."""
    for task in sorted(tasks, key=lambda one: int(one.get_name().rpartition("-")[2])):
        await task
