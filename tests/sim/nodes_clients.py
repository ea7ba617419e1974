"""Clients of the stages ``nodes``: idempotent producers, consumers, and an operator.

A producer writes one partition: a few batches at a time, which it sends again, in order, until each
is acknowledged. Refused for its sequence, it begins anew as another producer, or in a higher epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from kept.client.node_connection import NodeConnection
from kept.storage.errors import KeptError
from kept.storage.records import build_batch
from kept.storage.types import TopicPartition
from tests.sim.batches import Batch, decode
from tests.sim.nodes_machine import PORT, Machine
from tests.sim.surroundings import EPOCH_S
from tests.sim.world import Violation
from tests.support.request_values import fetch_values, produce_values

if TYPE_CHECKING:
    from tests.sim.nodes_history import NodesHistory

REPLY_S: Final = 8.0
FETCH_BYTES: Final = 65_536
LAST_EPOCH: Final = 32_767
RAISES: Final = 0.05
"""How often a producer whose batches are acknowledged raises its epoch."""
LATE: Final = 0.01
"""How often what one sends stays in its connection."""
UNANSWERED: Final = {"NetworkException", "RequestTimedOut", "request_timed_out"}
GIVES_UP: Final = 0.3
"""How often one gives up its batches that has no answer, and raises it."""
NO_TOPICS: Final = {
    "allow_auto_topic_creation": False,
    "include_cluster_authorized_operations": False,
    "include_topic_authorized_operations": False,
}


@dataclass
class Topic:
    """What clients know of a topic. ``exists``: its creation was acknowledged."""

    name: str
    partitions: int
    exists: bool = False


class Fetched(NamedTuple):
    """A partition in an answer to a fetch."""

    error: str
    records: bytes
    high_watermark: int
    log_start_offset: int


class Client:
    """Finds leaders, and keeps a connection to each node that it speaks to."""

    def __init__(self, history: NodesHistory) -> None:
        self.history = history
        self._connections: dict[int, NodeConnection] = {}
        self._abandoned: list[NodeConnection] = []
        self._leaders: dict[TopicPartition, Machine] = {}

    async def call(self, machine: Machine, api: int, version: int, values: Any) -> Any:
        """A request to a node. Raises KeptError."""
        connection = await self.connect(machine)
        return await connection.call(api, version, values, REPLY_S)

    async def connect(self, machine: Machine) -> NodeConnection:
        """The connection to a node. Raises KeptError."""
        connection = self._connections.get(machine.node_id)
        if connection is None or connection.closed:
            connection = await NodeConnection.open(
                machine.host, PORT, client_id="sim", timeout_s=REPLY_S
            )
            self._connections[machine.node_id] = connection
        return connection

    def abandon(self, machine: Machine) -> None:
        """Come on a new connection from now on; what the old one was given may still arrive."""
        self._abandoned.append(self._connections.pop(machine.node_id))

    def close(self) -> None:
        """End all connections."""
        for connection in (*self._connections.values(), *self._abandoned):
            connection.close()

    async def leader(self, tp: TopicPartition) -> Machine | None:
        """Who leads, as somebody says. Raises KeptError."""
        if tp not in self._leaders:
            history = self.history
            somebody = history.random.choice(history.machines)
            reply = await self.call(somebody, 3, 9, {"topics": None, **NO_TOPICS})
            self._leaders = {
                TopicPartition(topic.name, one.partition_index): history.machines[one.leader_id]
                for topic in reply.topics
                for one in topic.partitions
                if one.leader_id >= 0
            }
        return self._leaders.get(tp)

    def forget(self, tp: TopicPartition) -> None:
        """Another one may lead."""
        self._leaders.pop(tp, None)

    async def fetch(self, machine: Machine, tp: TopicPartition, offset: int) -> Fetched:
        """Records from an offset on. Raises KeptError."""
        request = fetch_values(
            tp.topic,
            offset,
            partition=tp.partition,
            partition_max_bytes=FETCH_BYTES,
            min_bytes=0,
        )
        reply = await self.call(machine, 1, 12, request)
        found = reply.responses[0].partitions[0]
        return Fetched(
            found.error_code.name,
            bytes(found.records or b""),
            found.high_watermark,
            found.log_start_offset,
        )


@dataclass
class _Sending:
    """A batch that is not acknowledged. ``give_ups``: what was given up before it was sent."""

    data: bytes
    batch: Batch
    values: Sequence[bytes]
    topic_id: UUID | None
    give_ups: int = 0
    acknowledged: bool = False


@dataclass
class Producer:
    """One idempotent producer of a history."""

    client: Client
    tp: TopicPartition
    acks: int
    in_flight: int
    pause_s: float
    producer_id: int = 0
    epoch: int = 0
    sequence: int = 0
    queue: list[_Sending] = field(default_factory=list)
    acknowledged_s: float = -1.0

    async def run(self) -> None:
        """Until the history ends its clients, and all is acknowledged."""
        history = self.client.history
        self._begin()
        while history.running or self.queue:
            await asyncio.sleep(history.random.uniform(0, self.pause_s))
            while len(self.queue) < self.in_flight and history.running:
                self.queue.append(self._make())
            try:
                await self._send_all()
            except KeptError:
                history.world.counts["requests without an answer"] += 1
                self.client.forget(self.tp)
                self._give_up()
                await asyncio.sleep(0.05)
            if history.checks.there(self.tp.topic) == 0 and not history.running:
                break
        self.client.close()

    def _give_up(self) -> None:
        """Some producers wait no longer for what is under way, which may still arrive."""
        history = self.client.history
        if self.queue and history.raises_epochs and history.jobs.random() < GIVES_UP:
            history.world.counts["batches given up"] += len(self.queue)
            self.queue = []
            self._begin()

    def _begin(self) -> None:
        """As another producer, or in some histories as the same in its next epoch (KIP-360)."""
        history = self.client.history
        self.sequence = 0
        if history.raises_epochs and self.producer_id and self.epoch < LAST_EPOCH:
            self.epoch += 1
            history.world.counts["producer epochs raised"] += 1
            return
        self.producer_id, self.epoch = history.next_producer_id(), 0
        if self.acks == -1:
            history.checks.strict.add(self.producer_id)

    def _make(self) -> _Sending:
        history = self.client.history
        if history.raises_epochs and not self.queue and history.jobs.random() < RAISES:
            self._begin()
        now_ms = int((EPOCH_S + history.loop.time()) * 1000)
        rows = history.make_records(now_ms)
        data = bytes(
            build_batch(
                rows,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                base_sequence=self.sequence,
            )
        )
        self.sequence += len(rows)
        values = [row[2] or b"" for row in rows]
        (batch,) = decode(data)
        topic_id = history.checks.topics.get(self.tp.topic, (None, 0))[0]
        give_ups = history.checks.register(self.tp).give_ups
        return _Sending(data, batch, values, topic_id, give_ups)

    async def _send_all(self) -> None:
        machine = await self.client.leader(self.tp)
        if machine is None:
            raise KeptError(f"nobody leads {self.tp}")
        connection = await self.client.connect(machine)
        history = self.client.history
        if history.raises_epochs and history.running and history.jobs.random() < LATE:
            self._send_late(connection, machine)
            return
        create_task = history.loop.create_task
        tasks = [create_task(self._send(connection, machine, one)) for one in self.queue]
        errors = [error for task in tasks if (error := await _outcome(task)) is not None]
        self.queue = [one for one in self.queue if not one.acknowledged]
        if errors:
            self.client.forget(self.tp)
            if set(errors) & UNANSWERED:
                self._give_up()
            refused = {"out_of_order_sequence_number", "unknown_producer_id"}
            if self.queue and errors[0] in refused:
                self._refused(errors[0])
            await asyncio.sleep(0.05)

    def _send_late(self, connection: NodeConnection, machine: Machine) -> None:
        """What is under way stays in its connection for a while; its producer gives that up, and
        goes on over another one, in its next epoch.
        """
        history, late = self.client.history, self.queue
        history.hold(connection)
        self.client.abandon(machine)
        history.world.counts["batches that came late"] += len(late)

        async def send(one: _Sending) -> None:
            with suppress(KeptError):
                await self._send(connection, machine, one)

        for one in late:
            history.watch(send(one))
        self.queue = []
        self._begin()

    async def _send(
        self, connection: NodeConnection, machine: Machine, one: _Sending
    ) -> str | None:
        history, tp = self.client.history, self.tp
        history.sent[tp].update(one.values)
        request = produce_values(
            tp.topic, one.data, partition=tp.partition, acks=self.acks, timeout=6000
        )
        reply = await connection.call(0, 9, request, REPLY_S)
        found = reply.responses[0].partition_responses[0]
        error: str = found.error_code.name
        if error not in {"none", "duplicate_sequence_number"}:
            history.world.counts[f"batches refused: {error}"] += 1
            return error
        one.acknowledged = True
        self.acknowledged_s = history.loop.time()
        history.world.counts["batches acknowledged"] += 1
        history.note("client", "acknowledged", tp, found.base_offset, one.batch)
        if self.acks == -1 and error == "none" and found.base_offset >= 0:
            history.acknowledged(machine, tp, one.batch, found.base_offset, one)
        return None

    def _refused(self, error: str) -> None:
        """The first batch that is not acknowledged does not fit: something before it is gone, or it
        is there itself, and its producer's last batch is all that the leader remembers.
        """
        history, first = self.client.history, self.queue[0]
        checks, tp, (producer, epoch, sequence) = history.checks, self.tp, first.batch.identity
        overtaken = checks.forgotten(tp, producer, epoch, sequence) and any(
            checks.has(tp, producer, one.batch.sequence, epoch) for one in self.queue[1:]
        )
        if (
            not checks.has(tp, producer, sequence, epoch)
            and not overtaken
            and self.acks == -1
            and first.topic_id == checks.topics.get(tp.topic, (None, 0))[0]
            and not checks.register(tp).give_ups
        ):
            raise Violation(
                "sequence-refused",
                f"{tp}: producer {producer}/{epoch} is refused #{sequence} with {error}; "
                "all before it is acknowledged",
            )
        history.world.counts["producers that began anew"] += 1
        self._begin()
        self.queue = []


async def _outcome(task: asyncio.Task[str | None]) -> str | None:
    try:
        return await task
    except KeptError as error:
        return type(error).__name__


@dataclass
class Consumer:
    """Reads a partition from its beginning, and finds only what is committed, without a gap."""

    client: Client
    tp: TopicPartition
    offset: int = 0

    async def run(self) -> None:
        """Until the history ends its clients."""
        history = self.client.history
        while history.running:
            await asyncio.sleep(history.random.uniform(0.02, 0.4))
            try:
                machine = await self.client.leader(self.tp)
                if machine is not None:
                    self._read(machine, await self.client.fetch(machine, self.tp, self.offset))
            except KeptError:
                self.client.forget(self.tp)
        self.client.close()

    def _read(self, machine: Machine, found: Fetched) -> None:
        checks = self.client.history.checks
        register = checks.register(self.tp)
        given_up = register.give_ups > 0
        if found.error == "offset_out_of_range":
            if not given_up and register.start <= self.offset < register.end:
                raise Violation(
                    "consumer-out-of-range",
                    f"{self.tp}: offset {self.offset} is out of range at n{machine.node_id}, "
                    f"{register.end} are committed",
                )
            self.offset = max(0, found.log_start_offset)
        elif found.error != "none":
            self.client.forget(self.tp)
        for batch in decode(found.records):
            if batch.last < self.offset:
                continue
            committed = checks.committed_at(self.tp, batch.base)
            if committed != batch and not given_up and batch.base >= register.start:
                raise Violation(
                    "consumer-uncommitted",
                    f"{self.tp}: a consumer read {batch} from n{machine.node_id}; committed: "
                    f"{committed}",
                )
            if batch.base > self.offset and not given_up and register.start == 0:
                raise Violation("consumer-gap", f"{self.tp}: {batch} follows {self.offset}")
            self.offset = batch.last + 1
            self.client.history.world.counts["records consumed"] += batch.count


class Operator(Client):
    """Creates topics; some operators reassign partitions, delete records, and delete a topic that
    they then create again.
    """

    VOLATILE: Final = "volatile"

    def __init__(self, history: NodesHistory) -> None:
        super().__init__(history)
        kinds = ("reassign", "delete records", "volatile")
        self.kinds = [kind for kind in kinds if history.random.random() < 0.4]
        self.busy = False
        self.volatile = Topic(self.VOLATILE, 1)

    async def create(self, topic: Topic) -> None:
        """Until it is there."""
        history = self.history
        wanted = {
            "name": topic.name,
            "num_partitions": topic.partitions,
            "replication_factor": history.replication,
            "assignments": (),
            "configs": [{"name": k, "value": v} for k, v in history.topic_configs.items()],
        }
        values = {"topics": [wanted], "timeout": 20_000, "validate_only": False}
        while not topic.exists:
            try:
                somebody = history.random.choice(history.machines)
                (result,) = (await self.call(somebody, 19, 7, values)).topics
            except KeptError:
                await asyncio.sleep(0.1)
                continue
            topic.exists = result.error_code.name in {"none", "topic_already_exists"}
            if result.error_code.name == "none":
                history.world.counts["topics created"] += 1
            await asyncio.sleep(0 if topic.exists else 0.1)

    async def run(self) -> None:
        """Until the history ends its clients."""
        history = self.history
        while history.running:
            await asyncio.sleep(history.random.uniform(0.3, 3))
            if not self.kinds or not history.running:
                continue
            kind = history.random.choice(self.kinds)
            self.busy = True
            try:
                await self.act(kind)
            except (KeptError, TimeoutError):
                history.world.counts["requests of the operator that failed"] += 1
            self.busy = False
        self.close()

    async def act(self, kind: str) -> None:
        """Do one thing. Raises KeptError, TimeoutError."""
        if kind == "reassign":
            await self._reassign()
        elif kind == "delete records":
            await self._delete_records()
        elif kind == "voters":
            await self._change_voters()
        elif self.volatile.exists:
            await self._delete(self.volatile)
        else:
            await asyncio.wait_for(self.create(self.volatile), REPLY_S)

    async def _reassign(self) -> None:
        history = self.history
        tp = history.random.choice(history.moved())
        replicas = history.random.sample(range(len(history.machines)), history.replication)
        wanted = {"partition_index": tp.partition, "replicas": replicas}
        values = {
            "timeout": 6000,
            "topics": [{"name": tp.topic, "partitions": [wanted]}],
        }
        somebody = history.random.choice(history.machines)
        reply = await self.call(somebody, 45, 0, values)
        found = reply.responses[0].partitions[0] if reply.responses else reply
        history.note("operator", "reassigns", tp, replicas, found.error_code.name)
        history.world.counts["reassignments"] += found.error_code.name == "none"

    async def _change_voters(self) -> None:
        """Somebody votes no more, or from now on; over the listener between nodes."""
        history = self.history
        controller = next((m for m in history.machines if m.controls), None)
        if controller is None:
            return
        voters = {voter.node_id: voter.directory_id for voter in controller.voters}
        chosen = history.random.choice([m for m in history.machines if m.ready] or [controller])
        somebody = history.random.choice(history.machines)
        change: dict[str, Any] = {"cluster_id": None, "voter_id": chosen.node_id}
        add = chosen.node_id not in voters
        if not add and len(voters) == 2:
            return  # a lone voter may be one that no other node's settings name
        if add:
            assert chosen.node is not None
            change |= {
                "voter_directory_id": chosen.node.parts.metadata.raft_node.directory_id,
                "timeout": 6000,
                "listeners": [{"name": "NODE", "host": chosen.host, "port": PORT + 1000}],
            }
        else:
            change |= {"voter_directory_id": voters[chosen.node_id]}
        connection = await NodeConnection.open(
            somebody.host, PORT + 1000, client_id="sim", timeout_s=REPLY_S
        )
        try:
            found = await connection.call(80 if add else 81, 0, change, REPLY_S)
        finally:
            connection.close()
        what = "adds voter" if add else "removes voter"
        history.note("operator", what, chosen.node_id, found.error_code.name)
        history.world.counts["voters changed"] += found.error_code.name == "none"
        history.world.counts[f"voters: {found.error_code.name}"] += 1

    async def _delete_records(self) -> None:
        history = self.history
        tp = history.random.choice(history.partitions)
        register = history.checks.register(tp)
        machine = await self.leader(tp)
        if machine is None or register.end == register.start:
            return
        offset = history.random.randint(register.start, register.end)
        values = {
            "topics": [
                {
                    "name": tp.topic,
                    "partitions": [{"partition_index": tp.partition, "offset": offset}],
                }
            ],
            "timeout": 6000,
        }
        self.forget(tp)
        found = (await self.call(machine, 21, 2, values)).topics[0].partitions[0]
        history.note("operator", "deletes records below", tp, offset, found.error_code.name)
        history.world.counts["records deleted"] += found.error_code.name == "none"

    async def _delete(self, topic: Topic) -> None:
        history = self.history
        somebody = history.random.choice(history.machines)
        values = {"topics": [{"name": topic.name, "topic_id": None}], "timeout": 6000}
        found = (await self.call(somebody, 20, 6, values)).responses[0]
        topic.exists = found.error_code.name not in {"none", "unknown_topic_or_partition"}
        history.world.counts["topics deleted"] += found.error_code.name == "none"
