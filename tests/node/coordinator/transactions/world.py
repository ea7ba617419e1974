"""A small world around a core and senders of markers: clients, logs of partitions, faults.

Clients are honest, and there may be two of one id. Requests and markers may be delayed beyond the
next of their client; appends commit late, or are lost with their coordinator; leaders and clocks
move. What partitions and the state's log hold is judged by checks that know nothing of the core:

I1 an acknowledged end is in every log, whole. I2 the ends of one transaction are of one kind.
I3 a decision that is committed, or was acknowledged, stays. I4 no log has an open transaction that
the state lacks. I5 all that ends, ends. I6 who is fenced writes no more. I7 a producer id belongs
to one id, and its epochs grow. I8 nobody is fenced before its time.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kio.schema.errors import ErrorCode
from msgspec import Struct
from msgspec.structs import replace

from kept.node.coordinator.common.events import (
    AppendCommitted,
    AppendRecords,
    AppendRejected,
    AppendStaged,
    AppendTimedOut,
    EndMarker,
    Response,
)
from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions import markers as mk
from kept.node.coordinator.transactions.connection_order import ConnectionOrder
from kept.node.coordinator.transactions.core import TransactionCore
from kept.node.coordinator.transactions.records import (
    TransactionMetadata,
    TransactionRecord,
    TransactionState,
    decode_record,
)
from kept.steps import run_to_end
from kept.storage.types import TopicPartition

IDS = ("bank", "shop")
PARTITIONS = [TopicPartition("orders", n) for n in range(3)]
LEADERS = (1, 2, 2, -1)
TIMEOUT_MS = 20_000
RETRIABLE = {
    ErrorCode.concurrent_transactions,
    ErrorCode.coordinator_not_available,
    ErrorCode.not_coordinator,
    ErrorCode.coordinator_load_in_progress,
}


class Broken(AssertionError):
    """A check failed; its name comes first."""


class Entry(Struct, frozen=True):
    """Of a partition's log: data of (client, nth transaction, n), or a marker."""

    producer_id: int
    epoch: int
    data: tuple[int, int, int] | None = None
    marker: EndMarker | None = None


@dataclass
class Partition:
    """A log, what its leader knows of producers, and who leads."""

    leader: int = 1
    log: list[Entry] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)
    coordinators: dict[int, int] = field(default_factory=dict)
    floors: dict[int, int] = field(default_factory=dict)
    open: dict[int, int] = field(default_factory=dict)
    ended: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def write(self, entry: Entry) -> None:
        self.log.append(entry)
        self.epochs[entry.producer_id] = entry.epoch
        self.open[entry.producer_id] = entry.epoch

    def end(self, marker: EndMarker) -> ErrorCode:
        """As a leader does it (KIP-890, KAFKA-19999)."""
        pid, epoch = marker.producer_id, marker.epoch
        known = self.epochs.get(pid, -1)
        bumped = epoch > known or (epoch == known and pid not in self.open) or epoch == 32767
        if epoch < known or (marker.version >= 2 and not bumped):
            return ErrorCode.invalid_producer_epoch
        floor = max(self.coordinators.get(pid, -1), self.floors.get(pid, -1))
        if marker.coordinator_epoch < floor:
            return ErrorCode.transaction_coordinator_fenced
        self.log.append(Entry(pid, epoch, marker=marker))
        self.epochs[pid], self.coordinators[pid] = epoch, marker.coordinator_epoch
        self.open.pop(pid, None)
        self.ended[pid] += 1
        return ErrorCode.none


class Client:
    """One instance of a producer."""

    def __init__(self, world: World, number: int, transactional_id: str, *, tv2: bool) -> None:
        self.world, self.number, self.id, self.tv2 = world, number, transactional_id, tv2
        self.pid = self.epoch = -1
        self.phase = "new"
        self.connection = world.accept()
        self.waiting: Callable[[Any], None] | None = None
        self.resend: Callable[[], None] | None = None
        self.nth = self.n = 0
        self.registered: set[TopicPartition] = set()
        self.is_commit = True

    def act(self) -> None:
        chance, world = self.world.random.random, self.world
        if self.phase == "dead":
            return
        if self.waiting is not None:
            if chance() < 0.4 and self.resend is not None:
                # No answer: again, over a new connection.
                self.connection = world.accept()
                self.resend()
            return
        if self.phase == "new":
            self.request(lambda: ev.InitProducerId(0, self.id, TIMEOUT_MS), self.initialized)
        elif self.phase == "idle":
            self.nth, self.phase = self.nth + 1, "open"
            self.registered.clear()
        elif self.phase == "ending" or chance() < 0.25:
            if self.phase == "open":
                if not self.registered:
                    return
                self.phase, self.is_commit = "ending", chance() < 0.6
            self.end()
        else:
            tp = world.random.choice(PARTITIONS)
            if self.tv2:
                self.write_tv2(tp)
            elif tp in self.registered:
                self.write(tp)
            else:
                self.add(tp)

    def request(self, make: Callable[[], ev.ClientRequest], then: Callable[[Any], None]) -> None:
        """Send a request; ``then`` gets its result, unless it is sent again meanwhile."""

        def send() -> None:
            self.waiting = answered
            self.world.send(make(), answered)

        def answered(result: Any) -> None:
            stale = isinstance(result, ev.StaleConnection)
            if self.waiting is answered_now[0] and not stale:
                self.waiting = self.resend = None
                then(result)

        answered_now = [answered]
        self.resend = send
        send()

    def on(self, api_key: int) -> ev.ClientConnection | None:
        return None if self.tv2 else ev.ClientConnection(self.connection, api_key)

    def lives(self, error: ErrorCode) -> bool:
        """Whether it goes on after an error; it may try again after some."""
        if error is not ev.NO_ERROR and error not in RETRIABLE:
            self.phase = "dead"
        return error is ev.NO_ERROR

    def initialized(self, result: ev.InitProducerIdResult) -> None:
        if self.lives(result.error):
            self.pid, self.epoch, self.phase = result.producer_id, result.epoch, "idle"
            self.world.fenced(self.id, self.pid, self.epoch)

    def add(self, tp: TopicPartition) -> None:
        def added(result: ev.AddPartitionsResult) -> None:
            if self.lives(result.error):
                self.registered.add(tp)

        self.request(
            lambda: ev.AddPartitions(
                0, self.id, self.pid, self.epoch, frozenset({tp}), 0, self.on(24)
            ),
            added,
        )

    def write(self, tp: TopicPartition) -> None:
        error = self.world.verified(self, tp)
        if error is ev.NO_ERROR:
            self.written(tp)
        elif error not in RETRIABLE:
            self.phase = "dead"

    def write_tv2(self, tp: TopicPartition) -> None:
        """The leader has the partition added by a request of its own."""
        partition = self.world.partitions[tp]
        if partition.leader < 0:
            return
        if partition.open.get(self.pid) == self.epoch:
            self.written(tp)
            return
        ended = partition.ended[self.pid]
        partition.floors[self.pid] = self.world.coordinator_epoch

        def added(result: ev.AddPartitionsResult) -> None:
            if self.lives(result.error) and partition.ended[self.pid] == ended:
                if self.epoch < partition.epochs.get(self.pid, -1):
                    self.phase = "dead"
                else:
                    self.written(tp)

        self.request(
            lambda: ev.AddPartitions(0, self.id, self.pid, self.epoch, frozenset({tp}), 2), added
        )

    def written(self, tp: TopicPartition) -> None:
        self.n += 1
        self.registered.add(tp)
        entry = Entry(self.pid, self.epoch, (self.number, self.nth, self.n))
        self.world.check_writer(self, entry)
        self.world.partitions[tp].write(entry)

    def end(self) -> None:
        pid, epoch, is_commit, nth = self.pid, self.epoch, self.is_commit, self.nth

        def ended(result: ev.EndTransactionResult) -> None:
            if not self.lives(result.error):
                return
            self.world.acknowledged(self, nth, is_commit)
            self.phase = "idle"
            if self.tv2:
                self.pid, self.epoch = result.producer_id, result.epoch

        if is_commit:
            self.world.commits.add((self.number, nth))
        version = 2 if self.tv2 else 0
        self.request(
            lambda: ev.EndTransaction(0, self.id, pid, epoch, is_commit, version, self.on(26)),
            ended,
        )


class Image:
    """Leaders of all partitions."""

    def __init__(self, partitions: dict[TopicPartition, Partition]) -> None:
        self.leaders = {tp: Leader(p.leader) for tp, p in partitions.items()}

    def partition(self, topic: str, number: int) -> Leader | None:
        return self.leaders.get(TopicPartition(topic, number))


class Leader(Struct, frozen=True):
    """Who leads a partition."""

    leader: int


class World:
    """One seed, one history. Planted bugs replace the classes, or the last two."""

    core_class = TransactionCore
    sender_class = mk.MarkerSender
    loads_what_is_not_committed = False
    closes_stale_connections = True
    expiration_ms = 2**40

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.settings = ev.TransactionSettings(
            transaction_version=2,
            abort_timed_out_interval_ms=5_000,
            remove_expired_interval_ms=30_000,
            transactional_id_expiration_ms=self.expiration_ms,
            closes_stale_connections=self.closes_stale_connections,
        )
        self.now, self.wall_offset = 1_000, 10**9
        self.connections = self.requests = 0
        self.last_producer_id = 100
        self.partitions = {tp: Partition() for tp in PARTITIONS}
        self.log: list[TransactionRecord] = []
        self.committed = 0
        self.in_flight: deque[tuple[int, int]] = deque()
        """(append, its end in the log)."""
        self.waiting: dict[int, Callable[[Any], None]] = {}
        self.delayed: list[tuple[int, ev.ClientRequest, Callable[[Any], None]]] = []
        """With the node that it goes to: a request comes to no other."""
        self.under_way: list[tuple[int, mk.SendMarkers]] = []
        """Requests of (node of a coordinator): to its sender goes the answer."""
        self.stepping: ev.Event | None = None
        self.commits: set[tuple[int, int]] = set()
        """(client, nth transaction) that its client wanted committed."""
        self.acknowledgements: dict[tuple[int, int], bool] = {}
        self.fences: dict[str, tuple[int, int]] = {}
        self.told: dict[int, str] = {}
        self.began: dict[str, int] = {}
        self.coordinator_epoch = 0
        self.active = 0
        self.connection_orders = [ConnectionOrder(), ConnectionOrder()]
        self.senders = [self.sender_class(), self.sender_class()]
        for sender in self.senders:
            sender.step(mk.ImageChanged(Image(self.partitions)), self.now)
        # An id that is near its last epoch, as after many transactions.
        old = TransactionMetadata(
            50, 32_764, TIMEOUT_MS, TransactionState.EMPTY, last_update_ms=self.wall
        )
        self.log.append(TransactionRecord(IDS[1], old))
        self.committed = 1
        self.load()
        self.clients = [
            Client(self, n, IDS[n % 2], tv2=self.random.random() < 0.5) for n in range(2)
        ]

    @property
    def wall(self) -> int:
        return self.now + self.wall_offset

    def accept(self) -> int:
        """The ordinal of a new connection."""
        self.connections += 1
        return self.connections

    # The coordinator and its senders.

    def load(self) -> None:
        self.coordinator_epoch += 1
        connections = self.connection_orders[self.active]
        if self.coordinator_epoch > 1:
            connections.lead_again(self.connections)
        self.core = self.core_class(self.settings, 0, self.coordinator_epoch, connections)
        self.core.wall_offset_ms = self.wall_offset
        if not self.loads_what_is_not_committed:
            # The high watermark has come to where the log ended at the election.
            self.committed = len(self.log)
        for record in self.log:
            back = decode_record(*record.encode())
            assert back is not None
            self.core.replay(back)
        # When those began whose coordinator this is not: long ago, for all we check.
        ongoing = ev.TransactionFilter([TransactionState.ONGOING])
        listed = self.core.list_transactions(ongoing, self.wall)
        self.began = {t.transactional_id: -(2**40) for t in listed if t is not None}
        self.perform(run_to_end(self.core.loaded(self.now)))

    def fail_over(self) -> None:
        """The next leader has what is committed, and of the rest a beginning."""
        waiting, self.waiting = self.waiting, {}
        self.perform([e for e in self.core.unload() if not isinstance(e, Response)])
        self.perform(self.senders[self.active].step(mk.StatePartitionUnloaded(0), self.now))
        self.log = self.log[: self.random.randint(self.committed, len(self.log))]
        self.in_flight.clear()
        self.active = self.random.randint(0, 1)
        self.load()
        for answered in waiting.values():
            answered(ev.InitProducerIdResult(ErrorCode.not_coordinator))

    def step(self, event: ev.Event) -> None:
        self.stepping = event
        self.core.wall_offset_ms = self.wall_offset
        self.perform(self.core.step(event, self.now))
        self.core.check_invariants()

    def perform(self, effects: Any) -> None:
        for effect in effects:
            match effect:
                case Response():
                    answered = self.waiting.pop(effect.request, None)
                    if answered is not None:
                        answered(effect.result)
                case AppendRecords():
                    self.append(effect)
                case ev.AllocateProducerId():
                    self.last_producer_id += 1
                    self.step(ev.ProducerIdAllocated(self.last_producer_id))
                case ev.WriteMarkers():
                    self.step_sender(self.active, effect)
                case ev.MarkersWritten():
                    self.step(effect)
                case mk.SendMarkers():
                    self.under_way.append((self.active, effect))
                case mk.ConfirmLeadership():
                    self.step_sender(self.active, mk.LeadershipConfirmed(0, is_leader=True))
                case ev.NoteTransaction() if "timed out" in effect.text:
                    self.check_timeout(effect.subject)

    def step_sender(self, node: int, event: mk.Event) -> None:
        effects = self.senders[node].step(event, self.now)
        if node == self.active:
            self.perform(effects)
        else:
            self.under_way += [(node, e) for e in effects if isinstance(e, mk.SendMarkers)]
        self.senders[node].check_invariants()

    def append(self, effect: AppendRecords) -> None:
        self.check_fence(effect)
        if self.random.random() < 0.05:
            self.step(AppendRejected(effect.append, ErrorCode.coordinator_not_available))
            return
        self.log += effect.records
        self.in_flight.append((effect.append, len(self.log)))
        self.step(AppendStaged(effect.append, len(self.log) - len(effect.records)))

    def commit(self) -> None:
        if not self.in_flight:
            return
        append, end = self.in_flight.popleft()
        for record in self.log[self.committed : end]:
            self.note_commit(record)
        self.committed = end
        self.step(AppendCommitted(append))

    def note_commit(self, record: TransactionRecord) -> None:
        name, metadata = record.transactional_id, record.metadata
        if metadata is None or metadata.state is not TransactionState.ONGOING:
            self.began.pop(name, None)
        else:
            self.began.setdefault(name, self.now)

    # What reaches it.

    def send(self, event: ev.ClientRequest, answered: Callable[[Any], None]) -> None:
        if self.random.random() < 0.15:
            self.delayed.append((self.active, event, answered))
        else:
            self.deliver(event, answered)

    def deliver(self, event: ev.ClientRequest, answered: Callable[[Any], None]) -> None:
        self.requests += 1
        self.waiting[self.requests] = answered
        self.step(replace(event, request=self.requests))

    def verified(self, client: Client, tp: TopicPartition) -> ErrorCode:
        """What the leader of a partition says to a batch of a TV1 client."""
        partition = self.partitions[tp]
        if client.epoch < partition.epochs.get(client.pid, -1):
            return ErrorCode.invalid_producer_epoch
        if partition.leader < 0:
            return ErrorCode.not_coordinator
        if partition.open.get(client.pid) == client.epoch:
            return ErrorCode.none
        partition.floors[client.pid] = self.coordinator_epoch
        said: list[ev.VerifyPartitionsResult] = []
        self.deliver(
            ev.VerifyPartitions(0, client.id, client.pid, client.epoch, frozenset({tp})),
            said.append,
        )
        error, absent = said[0].error, said[0].absent
        return ErrorCode.transaction_abortable if absent else error

    def deliver_markers(self, *, healthy: bool = False) -> None:
        node, sent = self.under_way.pop(self.random.randrange(len(self.under_way)))
        kind = 1.0 if healthy else self.random.random()
        answers = []
        if kind >= 0.15:
            for entry in sent.entries:
                for tp in sorted(entry.partitions):
                    error = self.marker_at(sent.node, tp, entry.marker, healthy=healthy)
                    answers.append((entry.marker.producer_id, tp, error))
        if kind < 0.3:
            self.step_sender(node, mk.MarkersFailed(sent.node))
        else:
            self.step_sender(node, mk.MarkersResponseReceived(sent.node, tuple(answers)))

    def marker_at(
        self, node: int, tp: TopicPartition, marker: EndMarker, *, healthy: bool
    ) -> ErrorCode:
        if self.partitions[tp].leader != node:
            return ErrorCode.not_leader_or_follower
        if not healthy and self.random.random() < 0.1:
            return ErrorCode.not_enough_replicas
        return self.partitions[tp].end(marker)

    # Time and faults.

    def pass_time(self, milliseconds: int) -> None:
        until = self.now + milliseconds
        self.core.wall_offset_ms = self.wall_offset
        machines = (self.core, *self.senders)
        while (due := min(d for m in machines if (d := m.next_deadline_ms) is not None)) <= until:
            self.now = max(self.now, due)
            self.stepping = None
            self.perform(self.core.tick(self.now))
            for node, sender in enumerate(self.senders):
                effects = sender.tick(self.now)
                if node == self.active:
                    self.perform(effects)
                else:
                    self.under_way += [(node, e) for e in effects]
        self.now = until

    def stall(self) -> None:
        took = self.random.randint(1_000, 60_000)
        self.now += took
        self.began = {name: began + took for name, began in self.began.items()}
        self.perform(self.core.restart_timeouts(self.now))
        self.perform(self.core.tick(self.now))

    def move_leaders(self, *, healthy: bool = False) -> None:
        for partition in self.partitions.values():
            if healthy:
                partition.leader = max(partition.leader, 1)
            elif self.random.random() < 0.5:
                partition.leader = self.random.choice(LEADERS)
        for node in range(len(self.senders)):
            self.step_sender(node, mk.ImageChanged(Image(self.partitions)))

    def run(self, steps: int) -> None:
        """Faults, then peace, then the checks."""
        for _ in range(steps):
            self.some_action()
        self.heal()
        self.check()

    def some_action(self) -> None:
        kind, chance = self.random.random(), self.random.random
        if kind < 0.5:
            self.random.choice(self.clients).act()
        elif kind < 0.68:
            if self.in_flight and chance() < 0.1:
                append, error = self.in_flight[0][0], ErrorCode.coordinator_not_available
                self.step(AppendTimedOut(append, error))
            else:
                self.commit()
        elif kind < 0.80:
            if self.under_way:
                self.deliver_markers()
        elif kind < 0.82:
            if self.delayed:
                late = self.delayed.pop(self.random.randrange(len(self.delayed)))
                if late[0] == self.active:
                    self.deliver(*late[1:])
        elif kind < 0.92:
            self.pass_time(self.random.choice((10, 100, 1_000, 3_000)))
        elif kind < 0.95:
            self.move_leaders()
        elif kind < 0.96:
            self.wall_offset += self.random.choice((-3_600_000, 3_600_000))
        elif kind < 0.97:
            self.stall()
        elif kind < 0.985:
            self.fail_over()
        elif len(self.clients) < 8 and chance() < 0.4:
            number = len(self.clients)
            tv2 = chance() < 0.5
            self.clients.append(Client(self, number, self.random.choice(IDS), tv2=tv2))

    def heal(self) -> None:
        """Faults end, clients are silent: what is decided ends, what is open times out."""
        self.move_leaders(healthy=True)
        for _ in range(40):
            while self.in_flight or self.under_way:
                while self.in_flight:
                    self.commit()
                if self.under_way:
                    self.deliver_markers(healthy=True)
            self.pass_time(1_000)

    # Checks.

    def fenced(self, name: str, pid: int, epoch: int) -> None:
        if self.told.setdefault(pid, name) != name:
            raise Broken(f"I7 producer id {pid} is of {self.told[pid]} and of {name}")
        self.fences[name] = (pid, epoch)

    def check_writer(self, client: Client, entry: Entry) -> None:
        """Whoever has the id now is not told of an earlier epoch than a writer's."""
        pid, epoch = self.fences[client.id]
        if entry.epoch >= 32_767 or (entry.producer_id == pid and entry.epoch < epoch):
            raise Broken(f"I6 {entry} is written after a fence by epoch {epoch}")

    def acknowledged(self, client: Client, nth: int, is_commit: bool) -> None:
        state = self.last_committed(client.id)
        word = "COMMIT" if is_commit else "ABORT"
        if state is None or not state.name.endswith(word):
            raise Broken(f"I3 {word} of {client.id} is acknowledged, committed is {state!r}")
        self.acknowledgements[client.number, nth] = is_commit

    def last_committed(self, name: str) -> TransactionState | None:
        for record in reversed(self.log[: self.committed]):
            if record.transactional_id == name:
                return None if record.metadata is None else record.metadata.state
        return None

    def check_fence(self, effect: AppendRecords) -> None:
        """An abort that its producer did not ask for has a further epoch."""
        for record in effect.records:
            before, after = self.core.ids[record.transactional_id].committed, record.metadata
            if before is None or after is None or isinstance(self.stepping, ev.EndTransaction):
                continue
            aborts = after.state is TransactionState.PREPARE_ABORT
            if aborts and after.epoch == before.epoch:
                raise Broken(f"I6 {record.transactional_id} is aborted, and not fenced: {after}")

    def check_timeout(self, name: str) -> None:
        began = self.began.get(name)
        if began is not None and self.now - began < TIMEOUT_MS:
            raise Broken(f"I8 {name} timed out {self.now - began} ms after it began")

    def check(self) -> None:
        self.check_state()
        self.check_ends()
        self.check_open()
        self.check_liveness()

    def check_ends(self) -> None:
        outcomes: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        for partition in self.partitions.values():
            for index, entry in enumerate(partition.log):
                if entry.data is not None:
                    end = next(
                        (
                            e.marker
                            for e in partition.log[index:]
                            if e.marker is not None and e.producer_id == entry.producer_id
                        ),
                        None,
                    )
                    word = "open" if end is None else "commit" if end.is_commit else "abort"
                    outcomes[entry.data[:2]].add(word)
        for transaction, words in outcomes.items():
            acknowledged = self.acknowledgements.get(transaction)
            wanted = "commit" if acknowledged else "abort"
            if acknowledged is not None and words != {wanted}:
                raise Broken(f"I1 {transaction} was acknowledged as {wanted}, and is {words}")
            if "commit" in words and transaction not in self.commits:
                raise Broken(f"I1 {transaction} is committed, and its client never asked for it")
            if {"commit", "abort"} <= words:
                raise Broken(f"I2 {transaction} is torn: {words}")

    def check_state(self) -> None:
        for name in IDS:
            records = [r.metadata for r in self.log if r.transactional_id == name]
            for before, after in pairwise(records):
                if before is None or after is None:
                    continue
                if before.state.is_prepared and after.state != before.state + 2:
                    raise Broken(f"I3 {name}: {after.state.name} after {before.state.name}")
            grown = [(m.producer_id, m.epoch) for m in records if m is not None]
            if grown != sorted(grown):
                raise Broken(f"I7 producers of {name} do not grow: {grown}")
            going_on = [m.epoch for m in records if m is not None and not m.state.is_prepared]
            if max(going_on, default=0) > 32_766:
                raise Broken(f"I7 {name} goes on with the last epoch")

    def check_open(self) -> None:
        known = {
            (m.producer_id, tp)
            for held in self.core.ids.values()
            if (m := held.committed) is not None
            for tp in m.partitions
        }
        for tp, partition in self.partitions.items():
            for pid in partition.open:
                if (pid, tp) not in known:
                    raise Broken(f"I4 {tp} has an open transaction of producer {pid}")

    def check_liveness(self) -> None:
        for name, held in self.core.ids.items():
            state = held.committed.state if held.committed is not None else None
            if state is TransactionState.ONGOING or held.is_pending:
                raise Broken(f"I5 {name} does not end: {held}")
