"""Histories of compaction by script: what each guard of a manifest's publication is there for.

The cluster is that of stage ``compaction`` with real logs, passes and swaps, and runs under the
same checkers; only the faults are not drawn. The seed says which script (:data:`SCRIPTS`, in turn).
They are the counterexamples of the rules' model that no draw of faults brings about: see
``tests/replication/manifests/test_counterexamples.py`` for all of them over the cores alone.

Who is cast: the leader, a follower that leads after it, and one that is away while a key is
deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kept.cluster.metadata.records import PartitionRecord
from kept.replication.manifests_events import ManifestRef
from kept.storage.records import build_batch
from kept.storage.types import TopicPartition
from tests.sim.clients import _Sending
from tests.sim.compaction import CompactionHistory, KeyedProducer
from tests.sim.machine import Machine
from tests.sim.manifests import SimManifests
from tests.sim.node import SimNode
from tests.sim.scripts import QUIET
from tests.sim.world import MS, SECOND, Violation

PULL, FETCH, ALTER = "pull_manifests", "fetch", "alter_isrs"
PATIENT_MS, SHORT_MS = 60_000, 2000
"""``replica.lag.time.max.ms``: nobody leaves the ISR for it; or soon."""


class Writer(KeyedProducer):
    """Writes what a script says, and in the end whatever it likes."""

    def start(self) -> None:
        """A script says when."""

    def put(self, key: bytes, value: bytes | None) -> None:
        """One record, in a batch of its own."""
        row = (self.history.client_clock_ms, key, value, ())
        data = build_batch(
            [row], producer_id=self.producer_id, producer_epoch=0, base_sequence=self.sequence
        )
        self.queue.append(_Sending(self.sequence, 1, data))
        self.sequence += 1
        self.send()


class ScriptedCompaction(CompactionHistory):
    """See the module."""

    stage = "compaction-scripted"

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, unclean=False, forsakes=False, rots=False, **options)
        self.script = SCRIPTS[(seed - 1) % len(SCRIPTS)]
        self.profile = self.nemesis.profile = QUIET
        for extra in self.machines[3:]:
            del self.network.machines[extra.node_id]
        del self.machines[3:]
        self.nemesis.machines, self.observers = self.machines, 0
        for machine in self.machines:
            machine.rate, machine.wall_offset_ms = 1.0, 0
        self.operator.kinds = []
        self.network.holds = 0.0
        self.sleepy = False
        self.min_isr = 1
        self.delete_retention_ms = 0
        self.lag_ms = PATIENT_MS if self.script in PATIENT else SHORT_MS
        self.partitions = [TopicPartition("t", 0)]
        self.at_will = False

    def __str__(self) -> str:
        return f"script {self.script.__name__}"

    def cleans(self, machine: Machine) -> bool:
        """Only when the script says so, until it is over."""
        return self.at_will

    def _clients(self) -> None:
        self.writer = Writer(self, -10, self.partitions[0], -1, 1, 60)
        self.producers.append(self.writer)

    def suffer(self) -> None:
        """What the script says; then everything goes on by itself."""
        self.world.counts[self.script.__name__] += 1
        self.script(self)
        self.network.blocked.clear()
        self.at_will = True
        for machine in self.machines:
            machine.start()
            if isinstance(machine.app, SimNode):
                mine = self._manifests(machine.node_id, self.tp)
                if mine is not None:
                    mine.cleans, mine.waits = True, False
        self.writer.produce()

    # For scripts.

    @property
    def tp(self) -> TopicPartition:
        return self.partitions[0]

    @property
    def state(self) -> PartitionRecord:
        """What is committed of the partition."""
        state = self.checks.register(self.tp).state
        assert state is not None
        return state

    def of(self, machine: Machine) -> SimManifests:
        """A replica's manifests."""
        found = self._manifests(machine.node_id, self.tp)
        if found is None:
            raise Violation("script", f"{machine.name} is not there: {self._state()}")
        return found

    def wait(self, milliseconds: int) -> None:
        self.world.run(self.world.now_us + milliseconds * MS)

    def soon(self, what: str, is_so: Callable[[], bool], seconds: int = 20) -> None:
        """Go on until then."""
        if not is_so() and not self.world.run(self.world.now_us + seconds * SECOND, done=is_so):
            raise Violation("script", f"{what}: not within {seconds} s: {self._state()}")

    def cast(self) -> tuple[Machine, Machine, Machine]:
        """The leader, who is the next to lead, and the third."""
        state = self.state
        leader, *others = sorted(
            state.replicas, key=lambda n: (n != state.leader, state.replicas.index(n))
        )
        machines = self.machines
        return machines[leader], machines[others[0]], machines[others[1]]

    def leads(self, machine: Machine) -> None:
        """Wait until it does, by its own word."""
        self.soon(
            f"{machine.name} leads",
            lambda: (
                self.state.leader == machine.node_id
                and self._manifests(machine.node_id, self.tp) is not None
                and self.of(machine).partition.is_leader
            ),
        )

    def follows(self, machine: Machine, leader: Machine) -> bool:
        """Whether it is there, and does."""
        found = self._manifests(machine.node_id, self.tp)
        return found is not None and found.partition.leader_id == leader.node_id

    def members(self, *machines: Machine) -> None:
        """Wait until they are the ISR."""
        wanted = {machine.node_id for machine in machines}
        self.soon(f"the ISR is {wanted}", lambda: set(self.state.isr) == wanted)

    def put(self, *rows: tuple[bytes, bytes | None]) -> None:
        """Records, each acknowledged."""
        for key, value in rows:
            self.writer.put(key, value)
        self.soon("all is acknowledged", lambda: not self.writer.queue)

    def lose(self, machine: Machine, *methods: str) -> None:
        """What it asks in that way gets lost."""
        self.network.blocked |= {(machine.node_id, method) for method in methods}

    def let(self, machine: Machine, *methods: str) -> None:
        """Not any more."""
        self.network.blocked -= {(machine.node_id, method) for method in methods}

    def level(self, machine: Machine, leader: Machine) -> None:
        """Wait until its log is as long as the leader's."""
        self.soon(
            f"{machine.name} has it all",
            lambda: (
                self._manifests(machine.node_id, self.tp) is not None
                and self.of(machine).partition.log_end_offset
                == self.of(leader).partition.log_end_offset
            ),
        )

    def away_while_deleted(self, leader: Machine, *present: Machine, away: Machine) -> None:
        """``away`` has the key, and not its tombstone, which can be compacted."""
        self.put((b"a", b"alive"))
        self.level(away, leader)
        self.lose(away, FETCH, PULL)
        if self.lag_ms == PATIENT_MS:
            away.kill()
        self.put((b"a", None), (b"z", b"1"))
        self.members(leader, *present)
        self.roll()

    def roll(self) -> None:
        """What there is can be compacted."""
        self.jump()
        self.put((b"z", b"2"))

    def resign(self, machine: Machine) -> Machine:
        """It leads no more; who does, once all are in sync again."""
        mine, before = self.of(machine), self.state
        mine.replicas.resign(self.tp, before)
        self.soon("another one leads", lambda: self.state.leader not in (-1, before.leader))
        now = self.machines[self.state.leader]
        self.leads(now)
        self.members(*self.machines)
        self.soon("it is settled", lambda: self.of(now).core.has_offered)
        return now

    def compact(self, leader: Machine) -> None:
        """Two passes, if the leader may: the tombstone gets its horizon, and goes."""
        for _ in range(2):
            self.clean(leader)
            self.jump()

    def clean(self, leader: Machine) -> ManifestRef | None:
        """A pass, if the leader may; what it holds then."""
        mine = self.of(leader)
        before, mine.cleans = mine.core.held, True
        self.world.run(
            self.world.now_us + 4 * SECOND,
            done=lambda: mine.core.held not in (before, None) and mine.core.storing is None,
        )
        mine.cleans = False
        self.wait(500)
        return mine.core.held


def the_first_acts_before_it_is_published(h: ScriptedCompaction) -> None:
    """C2: nobody has heard of what the leader has put into place."""
    leader, follower, away = h.cast()
    h.away_while_deleted(leader, follower, away=away)
    h.lose(follower, PULL)
    h.compact(leader)
    _comes_back_and_follows(h, leader, follower, away)


def one_who_is_joining_is_not_asked(h: ScriptedCompaction) -> None:
    """C1: the leader has proposed a member, which the controller accepts later."""
    leader, follower, away = h.cast()
    h.away_while_deleted(leader, follower, away=away)
    h.lose(follower, FETCH, PULL)
    h.put((b"y", b"1"))
    h.members(leader)
    h.lose(leader, ALTER)
    h.let(follower, FETCH)
    core = h.of(leader).partition.core
    h.soon("it is proposed", lambda: core.pending_isr is not None)
    h.compact(leader)
    h.let(away, FETCH)
    h.level(away, leader)
    h.let(leader, ALTER)
    h.soon("it is in", lambda: follower.node_id in h.state.isr)
    _leads_next(h, leader, follower)


def one_who_is_dropped_is_not_asked(h: ScriptedCompaction) -> None:
    """C1, the mirror: the leader wants to drop a member, of which nobody has heard."""
    leader, follower, away = h.cast()
    h.away_while_deleted(leader, follower, away=away)
    h.lose(follower, PULL)
    h.lose(leader, ALTER)
    h.clean(leader)
    core = h.of(leader).partition.core
    h.world.run(h.world.now_us + 6 * SECOND, done=lambda: core.pending_isr is not None)
    h.wait(1000)
    h.jump()
    h.clean(leader)
    _comes_back_and_follows(h, leader, follower, away)


def what_was_published_is_discarded(h: ScriptedCompaction) -> None:
    """C3: the next leader holds what the first has applied, and has not applied it itself."""
    leader, follower, away = h.cast()
    h.away_while_deleted(leader, follower, away=away)
    mine = h.of(follower)
    mine.waits = True
    for _ in range(2):
        h.clean(leader)
        h.soon("it is held", lambda: mine.core.held == h.of(leader).core.applied)
        h.jump()
        h.wait(3500)  # so long is given to it to apply it
    h.let(away, FETCH)
    away.start()
    h.level(away, leader)
    leader.kill()
    h.leads(follower)
    mine.waits = False
    h.network.blocked.clear()
    h.wait(4000)


def what_is_held_is_taken_for_published(h: ScriptedCompaction) -> None:
    """C5: the next leader holds what the last member has never heard of."""
    leader, follower, last = h.cast()
    h.put((b"a", b"alive"), (b"a", None), (b"z", b"1"))
    h.roll()
    h.lose(last, PULL)
    found = h.clean(leader)
    h.soon("the follower holds it", lambda: h.of(follower).core.held == found)
    leader.kill()
    h.leads(follower)
    h.wait(1500)
    h.lose(leader, FETCH)
    leader.start()
    h.wait(1500)
    follower.kill()
    h.leads(last)
    h.let(last, PULL)
    follower.start()
    h.wait(3000)


def an_answer_of_another_epoch_counts(h: ScriptedCompaction) -> None:
    """Who acknowledged has since given it up; its word comes late, to one that leads again."""
    leader, follower, last = h.cast()
    h.put((b"a", b"alive"), (b"a", None), (b"z", b"1"))
    h.roll()
    h.lose(follower, PULL)
    mine = h.of(leader)
    mine.cleans = True
    h.soon("the last one stores it", lambda: h.of(last).core.storing is not None)
    mine.cleans = False
    h.network.late_ms = (9000, 9000)
    h.network.late_next = (last.node_id, PULL)
    h.soon("it says so", lambda: h.network.late_next is None)
    leader.kill()
    h.leads(follower)
    h.let(follower, PULL)
    h.soon("it is given up", lambda: h.of(last).core.held is None)
    h.lose(leader, PULL)
    leader.start()
    h.members(leader, follower, last)
    h.lose(last, PULL)
    h.lose(follower, FETCH, PULL)
    follower.kill()
    h.leads(leader)
    h.wait(9000)
    follower.start()
    h.wait(1500)
    leader.kill()
    h.leads(last)
    h.let(leader, PULL)
    leader.start()
    h.wait(3000)


def a_tail_of_its_own_is_compacted_before_it_is_cut(h: ScriptedCompaction) -> None:
    """C11: what was deposed has records that nobody else has, and asks before it has fetched."""
    leader, follower, last = h.cast()
    h.put((b"a", b"alive"))
    h.level(follower, leader)
    h.level(last, leader)
    h.lose(follower, FETCH)
    h.lose(last, FETCH)
    h.wait(600)  # what was asked before is answered
    alone = Writer(h, -11, h.tp, 1, 9, 60)
    for number in range(5):
        alone.put(b"b%d" % number, b"of it alone")
    h.soon("it has a tail", lambda: not alone.queue)
    leader.kill()
    h.leads(follower)
    h.let(last, FETCH)
    h.lose(leader, FETCH)
    h.put((b"a", None), (b"z", b"1"))
    h.roll()
    h.compact(follower)
    leader.start()
    h.soon("it follows", lambda: h.follows(leader, follower))
    for _ in range(4):
        h.of(leader).ask()
        h.wait(500)
    h.let(leader, FETCH)
    h.wait(3000)


def a_pass_is_told_of_in_a_later_term(h: ScriptedCompaction) -> None:
    """Rule 13: meanwhile another one led, and all have applied what it made."""
    leader, *_ = h.cast()
    h.put((b"a", b"alive"), (b"a", None), (b"z", b"1"))
    h.roll()
    mine = h.of(leader)
    mine.dawdles = mine.cleans = True
    h.soon("it computes", lambda: mine.computing is not None)
    mine.cleans = False
    h.wait(1000)
    other = h.resign(leader)
    h.compact(other)
    theirs = h.of(other).core
    h.soon("it has applied that", lambda: mine.core.applied == theirs.applied is not None)
    while other is not leader:
        other = h.resign(other)
    mine.dawdles = False
    h.wait(3000)


def _comes_back_and_follows(
    h: ScriptedCompaction, leader: Machine, follower: Machine, away: Machine
) -> None:
    """It fetches from the leader, which dies; then it follows the next one."""
    h.let(away, FETCH)
    away.start()
    h.level(away, leader)
    _leads_next(h, leader, follower)


def _leads_next(h: ScriptedCompaction, leader: Machine, follower: Machine) -> None:
    leader.kill()
    h.leads(follower)
    h.network.blocked.clear()
    h.wait(4000)


SCRIPTS = (
    the_first_acts_before_it_is_published,
    one_who_is_joining_is_not_asked,
    one_who_is_dropped_is_not_asked,
    what_was_published_is_discarded,
    what_is_held_is_taken_for_published,
    an_answer_of_another_epoch_counts,
    a_tail_of_its_own_is_compacted_before_it_is_cut,
    a_pass_is_told_of_in_a_later_term,
)
PATIENT = (
    a_pass_is_told_of_in_a_later_term,
    the_first_acts_before_it_is_published,
    what_was_published_is_discarded,
    what_is_held_is_taken_for_published,
    an_answer_of_another_epoch_counts,
    a_tail_of_its_own_is_compacted_before_it_is_cut,
)
