"""Clients of stage ``transactions``: producers with transactional ids, and readers of what is
committed.

An instance of a producer initializes, then begins and ends transactions; it retries as real clients
do, and ends when it is fenced, or by itself, in the middle of a transaction. Another one comes
under its id, at times while it still runs. Each record has a value of its own. Some producers add
partitions by themselves (TV1), some leave that to the leaders (TV2). Offsets of a group, whose name
is the producer's id, travel in some transactions.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from kept.storage.errors import KeptError
from kept.storage.records import build_batch
from kept.storage.types import TopicPartition
from tests.sim.batches import CONTROL, decode, rows
from tests.sim.nodes_clients import FETCH_BYTES, Client
from tests.sim.surroundings import EPOCH_S
from tests.sim.transactions_checks import TRANSACTIONAL, Transaction
from tests.support.request_values import fetch_values, produce_values

if TYPE_CHECKING:
    from tests.sim.nodes_machine import Machine
    from tests.sim.transactions_history import TransactionsHistory

TIMEOUT_MS: Final = 3000
INIT_PRODUCER_ID: Final = 22
TXN_OFFSET_COMMIT: Final = 28
AGAIN_S: Final = 0.05
COORDINATOR: Final = frozenset(
    {"not_coordinator", "coordinator_not_available", "coordinator_load_in_progress"}
)
RETRIED: Final = COORDINATOR | {
    "concurrent_transactions",
    "not_leader_or_follower",
    "not_enough_replicas",
    "request_timed_out",
    "not_enough_replicas_after_append",
    "kafka_storage_error",
    "unknown_topic_or_partition",
    "leader_not_available",
    "network_exception",
}


class Over(Exception):
    """This instance is at its end. ``api``: of the request that was refused; -1: none was."""

    def __init__(self, why: str, api: int = -1) -> None:
        super().__init__(why)
        self.api = api


class Slot(Protocol):
    """A transactional id, and what its instances need."""

    history: TransactionsHistory
    name: str
    level: int
    acknowledged_s: float


@dataclass
class Transactor:
    """A transactional id; see the module. ``acknowledged_s``: of its last commit."""

    history: TransactionsHistory
    name: str
    level: int
    acknowledged_s: float = -1.0
    instances: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def run(self) -> None:
        """Instance after instance, until the history ends its clients."""
        history = self.history
        while history.running:
            self.instances += 1
            instance = Instance(self, f"{self.name}.{self.instances}")
            life_s = history.random.uniform(*history.life_s)
            task = history.loop.create_task(instance.run(history.loop.time() + life_s))
            self.tasks.append(task)
            if history.random.random() < history.zombie_share:
                history.world.counts["instances with a successor"] += 1
                await asyncio.wait([task], timeout=history.random.uniform(0.1, 2))
            else:
                await task
        await asyncio.gather(*self.tasks)


class Instance:
    """One instance of a producer."""

    def __init__(self, slot: Slot, name: str) -> None:
        self.slot, self.name, self.history = slot, name, slot.history
        self.checks = slot.history.transaction_checks
        self.client = Client(slot.history)
        self.group = slot.name
        self.coordinators: dict[int, Machine] = {}
        """By key type: 0 of the group, 1 of the transactional id."""
        self.producer_id, self.epoch = -1, -1
        self.sequences: defaultdict[TopicPartition, int] = defaultdict(int)
        self.added: set[TopicPartition] = set()

    async def run(self, until_s: float) -> None:
        """Transactions, until then."""
        history = self.history
        try:
            await self.initialize()
            while history.running and history.loop.time() < until_s:
                await self._transaction()
                await asyncio.sleep(history.random.uniform(0, 0.1))
        except Over as over:
            history.note("producer", f"{self.name} ends: {over}")
            await asyncio.sleep(AGAIN_S)
        self.client.close()

    # Requests.

    async def _find(self, kind: int) -> Machine:
        if kind not in self.coordinators:
            history = self.history
            somebody = history.random.choice(history.machines)
            reply = await self.client.call(
                somebody,
                10,
                3,
                {"key": self.slot.name if kind else self.group, "key_type": kind},
            )
            if reply.error_code.name != "none":
                raise KeptError(reply.error_code.name)
            self.coordinators[kind] = history.machines[reply.node_id]
        return self.coordinators[kind]

    async def _ask(self, kind: int, api: int, version: int, error_of: Any, **values: Any) -> Any:
        """A request to a coordinator, again and again until it is answered. Raises Over."""
        history = self.history
        while True:
            since_s = history.loop.time()
            try:
                machine = await self._find(kind)
                if api == 26 and history.random.random() < history.hold_share:
                    reply = await self._held(machine, api, version, values)
                else:
                    reply = await self.client.call(machine, api, version, values)
            except KeptError:
                self.coordinators.pop(kind, None)
                self._check_running()
                await asyncio.sleep(AGAIN_S)
                continue
            error = error_of(reply)
            if error == "none":
                if api != INIT_PRODUCER_ID:
                    self._served(since_s, f"request {api}")
                return reply
            history.world.counts[f"producers told {error}"] += 1
            if error not in RETRIED:
                raise Over(f"{api}: {error}", api)
            if error in COORDINATOR:
                self.coordinators.pop(kind, None)
            self._check_running()
            await asyncio.sleep(AGAIN_S)

    def _served(self, since_s: float, what: str) -> None:
        self.checks.served(self.slot.name, self.producer_id, self.epoch, since_s, what)

    def _check_running(self) -> None:
        if not self.history.running:
            raise Over("the history ends")

    async def _held(self, machine: Machine, api: int, version: int, values: Any) -> Any:
        """The request stays in its connection; its sender gives that up, and comes again on a new
        one. Some time later it arrives. Raises KeptError.
        """
        history = self.history
        connection = await self.client.connect(machine)
        if history.returns is None:
            history.hold(connection)
        else:
            history.returns.hold(connection, [history.coordinated(self.slot.name)])
        history.world.counts["requests held in an old connection"] += 1
        waiting = connection.call(api, version, values, history.gives_up_s)
        self.client.abandon(machine)
        return await waiting

    # A producer's calls.

    async def initialize(self) -> None:
        """Get a producer id and an epoch. Raises Over."""
        name = self.slot.name
        known = self.checks.newest(name)
        reply = await self._ask(
            1,
            22,
            4,
            lambda r: r.error_code.name,
            transactional_id=name,
            transaction_timeout=TIMEOUT_MS,
            producer_id=-1,
            producer_epoch=-1,
        )
        self.producer_id, self.epoch = reply.producer_id, reply.producer_epoch
        now_s = self.history.loop.time()
        self.checks.initialized(name, known, self.producer_id, self.epoch, now_s)
        self.history.note("producer", f"{self.name} is {self.producer_id}/{self.epoch}")

    def begin(self) -> Transaction:
        """The next transaction."""
        self.added.clear()
        return self.checks.begins(self.slot.name)

    async def _transaction(self) -> None:
        history, random = self.history, self.history.random
        transaction = self.begin()
        for _ in range(random.choice((1, 1, 2, 3))):
            tp = random.choice(history.written)
            await self.add(tp)
            await self.produce(transaction, tp, history.make_records(self.now_ms()))
            if history.lingers_s:
                await asyncio.sleep(history.rows.uniform(0, history.lingers_s))
            if random.random() < history.crash_share:
                raise Over("it dies")
        if random.random() < 0.4:
            await self._commit_offset(transaction)
        await self.end(transaction, commit=random.random() < 0.7)

    def now_ms(self) -> int:
        """The time of day."""
        return int((EPOCH_S + self.history.loop.time()) * 1000)

    async def end(self, transaction: Transaction, *, commit: bool) -> None:
        """Commit or abort. Raises Over."""
        history = self.history
        transaction.asked = commit
        history.note("producer", f"{self.name} ends {transaction}: {commit}")
        version = 3 if self.slot.level < 2 else 5
        reply = await self._ask(
            1,
            26,
            version,
            lambda r: r.error_code.name,
            transactional_id=self.slot.name,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            committed=commit,
        )
        if version >= 5:
            self.producer_id, self.epoch = reply.producer_id, reply.producer_epoch
            self.sequences.clear()
        history.world.counts["commits" if commit else "aborts"] += 1
        history.note("producer", f"{self.name} ended {transaction}: {commit}")
        history.told("ends", self.coordinators.get(1), history.strikes)
        if not commit:
            return
        transaction.committed_s = self.slot.acknowledged_s = history.loop.time()
        if transaction.offset >= 0:
            try:
                await OffsetReader(self.client, self.slot.name).read(await self._find(0))
            except KeptError:
                self.coordinators.pop(0, None)

    async def add(self, tp: TopicPartition) -> None:
        """Before its first batch a client of version 1 adds a partition. Raises Over."""
        if self.slot.level < 2 and tp not in self.added:
            await self._ask(
                1,
                24,
                3,
                lambda r: (
                    r.results_by_topic_v3_and_below[0]
                    .results_by_partition[0]
                    .partition_error_code.name
                ),
                v3_and_below_transactional_id=self.slot.name,
                v3_and_below_producer_id=self.producer_id,
                v3_and_below_producer_epoch=self.epoch,
                v3_and_below_topics=[{"name": tp.topic, "partitions": [tp.partition]}],
            )
        self.added.add(tp)

    async def produce(
        self,
        transaction: Transaction,
        tp: TopicPartition,
        made: list[tuple[int, bytes | None, bytes | None, Any]],
    ) -> None:
        """A batch of records, until it is acknowledged. Raises Over."""
        data = bytes(
            build_batch(
                made,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                base_sequence=self.sequences[tp],
                is_transactional=True,
            )
        )
        values = [row[2] for row in made]
        self.checks.sends(transaction, [value for value in values if value is not None])
        base = await self._send(tp, data)
        self.sequences[tp] += len(made)
        if base >= 0 and tp.topic == self.history.topic:
            for offset, value in enumerate(values, base):
                if value is not None:  # a tombstone is like others
                    transaction.records[value] = (tp, offset)

    async def _send(self, tp: TopicPartition, data: bytes) -> int:
        """The batch, until it is acknowledged; its offset, -1: not known. Raises Over."""
        history = self.history
        request = produce_values(
            tp.topic,
            data,
            partition=tp.partition,
            topic_id=history.topic_id(tp.topic),
            transactional_id=self.slot.name,
            acks=-1,
            timeout=6000,
        )
        version = 9 if self.slot.level < 2 else 12
        while True:
            error, since_s = "nobody leads it", history.loop.time()
            try:
                machine = await self.client.leader(tp)
                if machine is not None:
                    reply = await self.client.call(machine, 0, version, request)
                    (found,) = reply.responses[0].partition_responses
                    error = found.error_code.name
                    if error in {"none", "duplicate_sequence_number"}:
                        if error == "none":
                            self._served(since_s, f"a batch in {tp}")
                        return int(found.base_offset) if error == "none" else -1
                    history.world.counts[f"batches refused: {error}"] += 1
                    if error not in RETRIED:
                        raise Over(f"produce: {error}")
            except KeptError:
                pass
            self.client.forget(tp)
            self._check_running()
            await asyncio.sleep(AGAIN_S)

    async def _commit_offset(self, transaction: Transaction) -> None:
        offset = self.history.next_value()
        await self.add_offsets()
        self.checks.sends_offset(transaction, offset)
        await self.commit_offsets(self.history.topic, {0: offset}, -1, "")

    async def add_offsets(self) -> None:
        """As :meth:`add`, for the offsets of its group. Raises Over."""
        if self.slot.level < 2:
            await self._ask(
                1,
                25,
                3,
                lambda r: r.error_code.name,
                transactional_id=self.slot.name,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                group_id=self.group,
            )

    async def commit_offsets(
        self, topic: str, offsets: dict[int, int], generation: int, member_id: str
    ) -> None:
        """Partition -> offset, in the transaction. Raises Over."""
        partitions = [
            {
                "partition_index": partition,
                "committed_offset": offset,
                "committed_leader_epoch": -1,
                "committed_metadata": "",
            }
            for partition, offset in offsets.items()
        ]
        await self._ask(
            0,
            TXN_OFFSET_COMMIT,
            3 if self.slot.level < 2 else 5,
            lambda r: r.topics[0].partitions[0].error_code.name,
            transactional_id=self.slot.name,
            group_id=self.group,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            generation_id=generation,
            member_id=member_id,
            group_instance_id=None,
            topics=[{"name": topic, "partitions": partitions}],
        )


@dataclass
class Reader:
    """Reads a partition from its beginning: what is committed, as consumers filter it."""

    client: Client
    tp: TopicPartition
    offset: int = 0
    aborted: set[int] = field(default_factory=set)
    held: dict[int, bytes] = field(default_factory=dict)

    async def run(self) -> None:
        """Until the history ends its clients."""
        history = self.client.history
        while history.running:
            await asyncio.sleep(history.random.uniform(0.02, 0.4))
            try:
                await self.read()
            except KeptError:
                self.client.forget(self.tp)
        self.client.close()

    async def read(self) -> int:
        """One fetch; the last stable offset. Raises KeptError."""
        client, tp = self.client, self.tp
        machine = await client.leader(tp)
        if machine is None:
            raise KeptError("nobody leads it")
        request = fetch_values(
            tp.topic,
            self.offset,
            partition=tp.partition,
            partition_max_bytes=FETCH_BYTES,
            min_bytes=0,
            isolation_level=1,
        )
        found = (await client.call(machine, 1, 12, request)).responses[0].partitions[0]
        if found.error_code.name != "none":
            raise KeptError(found.error_code.name)
        self._take(f"a reader of {tp} at n{machine.node_id}", found)
        return int(found.last_stable_offset)

    def _take(self, who: str, found: Any) -> None:
        history: Any = self.client.history
        data, position = bytes(found.records or b""), 0
        starts = sorted((a.first_offset, a.producer_id) for a in found.aborted_transactions or ())
        for batch in decode(data):
            if batch.last >= self.offset:
                while starts and starts[0][0] <= batch.last:
                    self.aborted.add(starts.pop(0)[1])
                if batch.attributes & CONTROL:
                    self.aborted.discard(batch.producer_id)
                elif not (batch.attributes & TRANSACTIONAL and batch.producer_id in self.aborted):
                    for rec in rows(data, position, batch):
                        if rec.value is not None:
                            history.transaction_checks.visible(who, self.tp, rec.offset, rec.value)
                        self.held[rec.offset] = rec.value or b""
                        history.world.counts["records read committed"] += 1
                self.offset = batch.last + 1
            position += int.from_bytes(data[position + 8 : position + 12], "big") + 12


@dataclass
class OffsetReader:
    """Reads a group's stable offset."""

    client: Client
    group: str

    async def run(self) -> None:
        """Until the history ends its clients."""
        history: Any = self.client.history
        while history.running:
            await asyncio.sleep(history.random.uniform(0.1, 0.6))
            try:
                await self.read(history.random.choice(history.machines))
            except KeptError:
                continue
        self.client.close()

    async def read(self, machine: Machine) -> bool:
        """Whether a machine says it. Raises KeptError."""
        history: Any = self.client.history
        since_s = history.loop.time()
        wanted = [{"name": history.topic, "partition_indexes": [0]}]
        group = {"group_id": self.group, "member_id": None, "member_epoch": -1, "topics": wanted}
        values = {"groups": [group], "require_stable": True}
        found = (await self.client.call(machine, 9, 9, values)).groups[0]
        if found.error_code.name != "none":
            return False
        (partition,) = found.topics[0].partitions
        if partition.error_code.name != "none":
            history.world.counts[f"offsets: {partition.error_code.name}"] += 1
            return False
        history.world.counts["stable offsets read"] += 1
        history.transaction_checks.offset_read(self.group, since_s, partition.committed_offset)
        return True
