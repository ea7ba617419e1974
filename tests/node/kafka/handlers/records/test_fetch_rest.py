"""Sessions whose partitions rest: nothing is missed, and nothing is read for nothing.

Random histories of real partitions, two followers and a consumer, without sockets. After every
step: whoever is parked could read nothing, what rests has no news, every answer tells all that
there is to tell, and a follower that was at the end is known to have been there.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from random import Random
from typing import Any

import pytest

from kept.node.kafka import fetch_sessions
from kept.node.kafka.codec.fetch import FetchRequest
from kept.node.kafka.fetch_sessions import FetchSessions
from kept.node.kafka.handlers.records import fetch as handler
from kept.node.kafka.handlers.records.woken_fetches import WokenFetches
from kept.node.kafka.response_slot import ResponseSlot
from kept.node.metadata.serving_lease import ServingLease
from kept.node.replicas.replica_table import ReplicaTable
from kept.node.runtime.counters import Counters
from kept.node.runtime.memory_budget import MemoryBudget
from kept.node.runtime.time_slices import IN_PLACE_STEPS, TURN_S, TimeSlices
from kept.node.security.session import node_session
from kept.replication.events import EligibleBrokersChanged
from kept.replication.fetch_messages import FetchPartition
from kept.replication.partition import Partition
from kept.replication.partition_core import PartitionCore
from kept.replication.quota import ReplicationQuotas
from kept.storage.records import records
from tests.support import partitions as tools
from tests.support.given import Given
from tests.support.simulated_disk import SimulatedDisk

TOPIC = bytes(16)
VERSION = 17
NODES = (0, 1, 2)
COUNT = 4
BROKER_EPOCH = 7


class Loop:
    """A loop whose time passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.soon: list = []
        self.timers: list = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback, *args, context=None) -> None:
        self.soon.append(partial(callback, *args))

    def get_debug(self) -> bool:
        return False

    def call_at(self, when: float, callback, *args):
        timer = Given(at=when, callback=partial(callback, *args))
        timer.cancel = lambda: self.timers.remove(timer) if timer in self.timers else None
        self.timers.append(timer)
        return timer

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()

    def run(self) -> None:
        while self.soon or any(timer.at <= self.now for timer in self.timers):
            due = [timer for timer in self.timers if timer.at <= self.now]
            self.timers = [timer for timer in self.timers if timer.at > self.now]
            soon, self.soon = self.soon, []
            for callback in (*soon, *(timer.callback for timer in due)):
                callback()


class Reader:
    """A follower, or a consumer (-1): what it asked and was told; also its connection."""

    def __init__(self, world: World, replica_id: int) -> None:
        self.client, self.throttle_ms = None, 0
        self.world = world
        self.replica_id = replica_id
        self.parked: dict = {}
        self.session = node_session("P")
        self.listener = Given(name="P")
        self.transport = object()
        self.session_id = 0
        self.epoch = 0
        self.offsets = dict.fromkeys(range(COUNT), 0)
        self.changed = set(self.offsets)
        self.forgotten: set[int] = set()
        self.told: dict[int, tuple] = {}
        self.waiting = False
        self.blocked = False
        self.asked_ms = 0

    # What a PendingFetch needs of a connection.

    def reply(self, answer) -> None:
        self.waiting = True
        self.complete(None, answer)

    def reserve_response(self) -> ResponseSlot:
        return ResponseSlot()

    def complete(self, _, answer) -> None:
        session_id, grouped = answer
        assert self.waiting
        self.waiting = False
        self.session_id = session_id
        self.epoch += 1
        for _, several in grouped:
            for data in several:
                self.take(data)
        for index in self.offsets:
            if index in self.told and self.world.at_once:
                assert self.told[index] == self.world.state(index), (self.replica_id, index)

    def block(self, *, lent: bool) -> None:
        assert not lent
        self.blocked = True

    def unblock(self) -> None:
        self.blocked = False

    # The rest of it.

    def ask(self, random: Random) -> None:
        if self.waiting:
            return
        world = self.world
        if random.random() < 0.05:
            self.session_id = self.epoch = 0
        named = set(self.offsets) if self.epoch == 0 else self.changed & set(self.offsets)
        wanted = [
            FetchPartition(
                i,
                self.offsets[i],
                random.choice((10, 1 << 20)),
                world.partitions[i].leader_epoch if self.replica_id >= 0 else -1,
                world.partitions[i].latest_epoch if self.replica_id >= 0 else -1,
            )
            for i in named
        ]
        request = FetchRequest(
            self.replica_id,
            500,
            1,
            random.choice((150, 1 << 20)),
            0,
            self.session_id,
            self.epoch,
            [(TOPIC, wanted)],
            [(TOPIC, [*self.forgotten])],
            b"",
            BROKER_EPOCH,
        )
        self.changed.clear()
        self.forgotten.clear()
        self.asked_ms = world.now_ms()
        error, session = world.sessions.open(request, True, self.asked_ms)
        assert error == 0
        self.waiting = True
        handler.PendingFetch(world.resources, self, VERSION, 1, request, session).start()

    def take(self, data) -> None:
        index = data.partition
        if index not in self.offsets:
            return
        self.told.pop(index, None)
        if data.error_code or data.diverging:
            self.changed.add(index)
            self.offsets[index] = max(
                self.offsets[index], self.world.partitions[index].log_start_offset
            )
            return
        self.told[index] = data[2:5]
        if data.records is not None:
            disk = self.world.partitions[index].log.disk
            self.offsets[index] = list(records(disk.pread(*data.records)))[-1].offset + 1
            self.changed.add(index)

    def end(self, index: int) -> int:
        partition = self.world.partitions[index]
        return partition.log_end_offset if self.replica_id >= 0 else partition.high_watermark

    def forget_or_add(self, index: int) -> None:
        if self.waiting:
            return
        if index in self.offsets and len(self.offsets) > 1:
            del self.offsets[index]
            self.told.pop(index, None)
            self.forgotten.add(index)
        else:
            self.offsets[index] = self.world.partitions[index].log_start_offset
            self.forgotten.discard(index)
            self.changed.add(index)


def encoded(*given: Any) -> Any:
    """In the place of the codec's steps: what it is given of the session and the partitions."""
    yield
    return given[3:5]


class World:
    """A leader of some partitions, and who reads them."""

    def __init__(self, monkeypatch) -> None:
        self.loop = Loop()
        self.at_once = True
        """An answer tells what is so when it is made: it was not read in slices."""
        self.partitions = [self._partition(i) for i in range(COUNT)]
        self.versions = [0] * COUNT
        hosted = {
            i: Given(partition=partition, throttled_as_leader=False)
            for i, partition in enumerate(self.partitions)
        }
        self.table = ReplicaTable()
        self.table.by_id[TOPIC] = Given(partitions=hosted, bytes_out=0)
        ids = iter(range(1, 1 << 20))
        self.sessions = FetchSessions(lambda: next(ids))
        self.resources: Any = Given(
            runtime__loop=self.loop,
            runtime__slices=TimeSlices(self.loop, lambda: self.loop.now),
            config__current__fetch_max_bytes=1 << 20,
            config__current__replica_selector_class="",
            table=self.table,
            quota=ReplicationQuotas().leader,
            counters=Counters(),
            lease=ServingLease(),
            sessions=self.sessions,
            hints__current_leader=lambda *_: None,
            hints__endpoints=lambda *_: [],
            responses=MemoryBudget(1 << 30),
        )
        self.resources.woken = WokenFetches(self.resources.runtime)
        monkeypatch.setattr(handler, "monotonic_ms", self.now_ms)
        monkeypatch.setattr(handler, "encode_fetch", lambda *given: given[3:])
        monkeypatch.setattr(handler.codec, "encode_steps", encoded)
        self.readers = [Reader(self, 1), Reader(self, 2), Reader(self, -1)]

    def _partition(self, index: int) -> Partition:
        disk = SimulatedDisk(seed=index)
        disk.mkdir("/d")
        disk.mkdir("/d/t-0")
        partition = Partition(tools.open_log(disk))
        ticket = partition.become_leader(0, 0, NODES, NODES, self.now_ms())
        assert ticket is not None
        ticket.run()
        ticket.done()
        epochs = tuple((node, BROKER_EPOCH) for node in NODES)
        partition.step(EligibleBrokersChanged(frozenset(), epochs), 0)
        return partition

    def now_ms(self) -> int:
        return int(self.loop.now * 1000)

    def state(self, index: int) -> tuple:
        partition = self.partitions[index]
        return partition.high_watermark, partition.last_stable_offset, partition.log_start_offset

    # What happens.

    def append(self, random: Random, index: int) -> None:
        partition = self.partitions[index]
        end = partition.log_end_offset
        tools.produce(partition, random.randint(1, 3))
        for reader in self.readers:
            if reader.blocked:
                continue  # this partition may not be read yet
            if reader.replica_id in partition.isr and reader.offsets.get(index) == end:
                follower = partition.core.followers[reader.replica_id]
                if follower.log_end_offset == end and index not in reader.changed:
                    assert follower.caught_up_ms >= reader.asked_ms

    def change(self, random: Random, index: int) -> None:
        """The controller decides on another ISR, or another epoch."""
        partition = self.partitions[index]
        self.versions[index] += 1
        isr = tuple(n for n in NODES if n == 0 or random.random() < 0.7)
        epoch = partition.leader_epoch + random.choice((0, 0, 1))
        ticket = partition.become_leader(epoch, self.versions[index], isr, NODES, self.now_ms())
        if ticket is not None:
            ticket.run()
            ticket.done()

    def cut_start(self, random: Random, index: int) -> None:
        partition = self.partitions[index]
        partition.delete_records(random.randint(0, partition.high_watermark))

    def step(self, random: Random) -> None:
        index = random.randrange(COUNT)
        match random.randrange(12):
            case 0 | 1 | 2:
                self.append(random, index)
            case 3:
                self.change(random, index)
            case 4:
                self.cut_start(random, index)
            case 5:
                self.loop.now += random.choice((0.01, 0.3, 0.6))
            case 6:
                random.choice(self.readers).forget_or_add(index)
            case _:
                random.choice(self.readers).ask(random)
        self.loop.run()

    def check(self) -> None:
        for session in self.sessions._sessions.values():
            for (_, index), cached in session.partitions.items():
                if (TOPIC, index) not in session.due:
                    assert cached.last_response == (0, *self.state(index))
                    # Who is out of sync joins by fetching.
                    assert (
                        session.replica_id < 0 or session.replica_id in self.partitions[index].isr
                    )
        for reader in self.readers:
            if reader.waiting:
                behind = {i for i, offset in reader.offsets.items() if offset < reader.end(i)}
                assert not behind, f"{reader.replica_id} is parked, and could read {behind}"


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_missed(monkeypatch, seed):
    random = Random(seed)
    world = World(monkeypatch)
    for _ in range(300):
        world.step(random)
        world.check()


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_missed_while_partitions_are_read_in_slices(monkeypatch, seed):
    """One partition a turn of the loop, read or answered, and everything happens in between."""
    monkeypatch.setattr(handler, "ITEMS_PER_SLICE", 1)
    random = Random(seed)
    world = World(monkeypatch)
    world.resources.runtime.slices = TimeSlices(
        world.loop, lambda: world.loop.time() + random.random(), in_place=1
    )
    world.at_once = False
    run = world.loop.run
    monkeypatch.setattr(world.loop, "run", lambda: None)
    sliced = 0
    for _ in range(600):
        world.step(random)
        sliced += any(reader.blocked for reader in world.readers)
        if random.random() < 0.5:
            world.loop.turn()
        if random.random() < 0.1:
            run()
            world.check()
            assert not any(reader.blocked for reader in world.readers)
            assert not world.resources.responses.used_bytes
    assert sliced > 20


def test_a_reading_that_goes_on_in_later_turns_looks_at_the_lease_in_each_step(monkeypatch):
    """This node may have been replaced as a leader meanwhile."""
    world = World(monkeypatch)
    world.resources.runtime.slices = TimeSlices(world.loop, lambda: world.loop.now, in_place=1)
    lease, checks = world.resources.lease, []
    lease.check = lambda: checks.append(world.loop.now)
    consumer = world.readers[2]
    consumer.ask(Given(random=lambda: 1.0, choice=max))
    assert consumer.blocked and not checks
    lease.until = 0.0
    world.loop.run()
    assert not consumer.blocked
    assert len(checks) == COUNT - 1


class Consumer(Reader):
    """One whose answers take a tenth of a turn's time; ``fails``: a bug meets it."""

    def __init__(self, world: World, answers: list[Consumer], *, fails: bool = False) -> None:
        super().__init__(world, -1)
        self.answers, self.fails = answers, fails

    def complete(self, reply, answer) -> None:
        self.world.loop.now += TURN_S / 10
        self.answers.append(self)
        if self.fails:
            raise KeyError("a bug of ours")
        super().complete(reply, answer)


def test_very_many_consumers_that_one_batch_wakes_are_answered_in_slices(monkeypatch, capsys):
    """Each once and in order, and a follower, whom producers wait for, is not behind them."""
    world, calm = World(monkeypatch), Given(random=lambda: 1.0, choice=max)
    partition = world.partitions[0]
    partition.become_leader(0, 1, (0,), NODES, world.now_ms())
    answers: list[Consumer] = []
    consumers = [Consumer(world, answers, fails=number == 40) for number in range(300)]
    follower = world.readers[0]
    for reader in (*consumers, follower):
        reader.ask(calm)
    world.loop.run()
    assert not answers and follower.waiting
    tools.produce(partition)
    assert not answers and follower.waiting, "within the call that woke them"
    world.loop.turn()
    assert len(answers) == IN_PLACE_STEPS and not follower.waiting
    turns = 1
    while len(answers) < len(consumers):
        turns += 1
        before = len(answers)
        world.loop.turn()
        assert 1 <= len(answers) - before <= 11
    world.loop.run()
    assert answers == consumers and turns > 20
    assert "a bug of ours" in capsys.readouterr().err
    assert not any(consumer.waiting for consumer in consumers if not consumer.fails)
    consumers[0].ask(calm)
    assert consumers[0].waiting
    tools.produce(partition)
    world.loop.run()
    assert consumers[0].offsets[0] == 2, "and later ones wake as ever"


def test_what_rests_is_not_read(monkeypatch):
    """One record in one of the partitions: the others are not looked at."""
    world = World(monkeypatch)
    random = Random(0)
    follower = world.readers[0]
    for _ in range(3):
        follower.ask(random)
        world.loop.now += 1
        world.loop.run()
    read = []
    fetch = Partition.fetch

    def counted(self, *args, **more):
        read.append(self)
        return fetch(self, *args, **more)

    monkeypatch.setattr(Partition, "fetch", counted)
    for index in (2, 1):
        world.append(random, index)
        follower.ask(random)
        follower.ask(random)
        world.loop.run()
    assert set(map(id, read)) == {id(world.partitions[2]), id(world.partitions[1])}


def test_what_a_follower_has_is_noted_without_a_reading(monkeypatch):
    world = World(monkeypatch)
    steady = Given(random=lambda: 1.0, choice=max)
    followers, partition = world.readers[:2], world.partitions[0]
    for wait in (1, 0):
        for follower in followers:
            follower.ask(steady)
        world.loop.now += wait
        world.loop.run()
    tools.produce(partition)
    world.loop.run()
    assert [follower.offsets[0] for follower in followers] == [1, 1]
    assert partition.high_watermark == 0
    monkeypatch.setattr(Partition, "fetch", None)
    for follower in followers:
        follower.ask(steady)
    assert partition.high_watermark == 1
    assert all(follower.waiting for follower in followers)


@pytest.mark.parametrize("end", ["a record comes", "its time is up"])
def test_what_a_follower_has_is_noted_once_a_request(monkeypatch, end):
    world = World(monkeypatch)
    steady = Given(random=lambda: 1.0, choice=max)
    follower, partition = world.readers[0], world.partitions[0]
    follower.ask(steady)
    follower.ask(steady)
    known = partition.core.followers[1]
    assert follower.waiting
    assert (known.log_end_offset, known.end_at_fetch) == (0, 0)
    with monkeypatch.context() as later:
        later.setattr(PartitionCore, "fetched", None)
        if end == "a record comes":
            tools.produce(partition)
        else:
            world.loop.now += 1
        world.loop.run()
    assert not follower.waiting
    assert known.end_at_fetch == 0
    follower.ask(steady)
    assert known.log_end_offset == known.end_at_fetch == partition.log_end_offset


def test_nobody_starves(monkeypatch):
    """Each answer has room for one batch: those that got one wait for the others."""
    world = World(monkeypatch)
    random = Given(random=lambda: 1.0, choice=min)
    follower = world.readers[0]
    for index in range(COUNT):
        for _ in range(10):
            tools.produce(world.partitions[index])
    for asked in range(1, 10 * COUNT + 1):
        follower.ask(random)
        assert sum(follower.offsets.values()) == asked
        assert max(follower.offsets.values()) - min(follower.offsets.values()) <= 1


def test_a_session_that_is_closed_watches_nothing(monkeypatch):
    world = World(monkeypatch)
    random = Random(0)
    for _ in range(2):
        for reader in world.readers:
            reader.ask(random)
        world.loop.now += 1
        world.loop.run()
    assert all(partition._end_waiters for partition in world.partitions)
    assert all(partition._waiters for partition in world.partitions)
    for reader in world.readers:
        request = FetchRequest(reader.replica_id, 0, 1, 1, 0, reader.session_id, -1, [], [], b"", 7)
        world.sessions.open(request, True, world.now_ms())
    assert not any(partition._end_waiters or partition._waiters for partition in world.partitions)


class WatchedSession(fetch_sessions.Session):
    """One that may be referred to weakly."""


@pytest.mark.parametrize("end", ["its connection is gone", "it is answered"])
def test_a_session_that_was_closed_is_gone_once_its_request_does_not_wait(monkeypatch, end):
    monkeypatch.setattr(fetch_sessions, "Session", WatchedSession)
    world = World(monkeypatch)
    follower = world.readers[0]
    for _ in range(2):  # the first one is answered
        follower.ask(Given(random=lambda: 1.0, choice=max))
    (session,) = map(weakref.ref, world.sessions._sessions.values())
    (waiting,) = follower.parked
    world.sessions.close(session())
    assert len(world.loop.timers) == 1, "it is answered when its time is up"
    if end == "it is answered":
        tools.produce(world.partitions[0])
        waiting.access_changed()
        world.loop.turn()
        assert not follower.waiting
    else:
        waiting.cancel()
        follower.parked.clear()
    assert not world.loop.timers
    del waiting
    gc.collect()
    assert session() is None
