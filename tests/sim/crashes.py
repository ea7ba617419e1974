"""Stage ``crashes``: all nodes are killed together, again and again.

What an operator sees when a whole rack is restarted: every process dies at once, or within moments,
in the middle of whatever it writes; two are back soon, the third sometimes much later. Producers do
what librdkafka's idempotent one does with a message that nobody acknowledged in time: it fails the
message, raises its own producer epoch, and sends what is left again from sequence 0. Whatever is
acknowledged must be there; under one producer id and epoch nothing may be there twice
(``replica_checks``). What had been written and not acknowledged before the epoch was raised is
there twice then; no broker can know that, and it is only counted.

Where all were only killed, at once, and the machines can show it (``Disk.boot_id``), two of three
must be enough: acknowledgements come again within :data:`AGAIN_US` of the second one's start,
whoever is away. In a third of the histories some machines lose power instead; then rule 33 may
demand all.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.clients import Producer
from tests.sim.cluster import ClusterHistory
from tests.sim.faults import Profile
from tests.sim.world import MS, SECOND, Violation

if TYPE_CHECKING:
    from tests.sim.machine import Machine

QUIET = Profile(frozenset(), 1000, False, (20, 200))
TIMEOUT_US = 1500 * MS
"""A producer's ``message.timeout.ms``: shorter than most outages here."""
AGAIN_US = 2 * SECOND
"""From the start of the second node to an acknowledgement of every producer, at most. An election
takes up to a second here, registration some round trips; a session of a broker lasts 3 s.
"""


class ImpatientProducer(Producer):
    """Gives up a batch that is not acknowledged in time, as librdkafka does: the application hears
    that it failed, and the producer goes on in its next epoch, with what is left in the queue.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.made_us: dict[int, int] = {}
        self.timed_out = 0
        self.again = 0
        self.twice = 0

    def produce(self) -> None:
        self._expire()
        super().produce()

    def _make(self) -> Any:
        self.made_us[self.sequence] = self.world.now_us
        return super()._make()

    def _expire(self) -> None:
        """The oldest is too old: what is in flight is forgotten, and its sequences with it."""
        while self.queue and self.queue[0].answered:
            self.queue.pop(0)
        if not self.queue:
            return
        if self.world.now_us - self.made_us[self.queue[0].sequence] < TIMEOUT_US:
            return
        limit = self.world.now_us - TIMEOUT_US
        left = [one for one in self.queue if self.made_us[one.sequence] > limit]
        self.timed_out += len(self.queue) - len(left)
        self.again += len(left)
        has = self.history.checks.has
        self.twice += sum(
            has(self.tp, self.producer_id, one.sequence, self.producer_epoch) for one in left
        )
        self.world.note(f"p{self.producer_id}", f"gives up {len(self.queue) - len(left)} batches")
        self.producer_epoch += 1
        self.sequence, self.first_is_there = 0, False
        self.made_us.clear()
        self.queue = [self._make() for _ in left]
        self._retry()


class CrashesHistory(ClusterHistory):
    """One seed; see the module."""

    stage = "crashes"
    kinds = ("all_kill",)

    def __init__(self, seed: int, **given: Any) -> None:
        super().__init__(seed, **given)
        self.profile = self.nemesis.profile = QUIET
        self.draw = Random(f"crashes {seed}")
        self.operator.kinds = []
        self.unclean = self.checks.unclean = self.sleepy = self.limps = False
        self.network.holds = 0.0
        self.min_isr = 2
        self.boot_ids = self.draw.random() < 0.8
        self.power = self.draw.random() < 0.33
        self.rounds = self.draw.randint(3, 6)
        for machine in self.machines:
            machine.disk.boots = 0 if self.boot_ids else None
            machine.on_death[:] = [self._died]  # nobody starts them but the rounds

    def __str__(self) -> str:
        return (
            f"{len(self.machines)} nodes die together {self.rounds} times, "
            f"{'' if self.boot_ids else 'no '}boot ids{', some lose power' if self.power else ''}, "
            f"{len(self.partitions)} partitions"
        )

    def _clients(self) -> None:
        for tp in self.partitions:
            for window in (1, 3):
                producer = ImpatientProducer(self, -10 - len(self.producers), tp, -1, window, 40)
                self.producers.append(producer)
                producer.start()

    def suffer(self) -> None:
        """All die; two of the replicas come back, then the rest; again."""
        for _ in range(self.rounds):
            self._round()

    def _round(self) -> None:
        world, draw, since = self.world, self.draw, self.world.now_us
        if not world.run(since + 30 * SECOND, done=lambda: self._led(since)):
            raise Violation("liveness", f"not well after a round: {self._state()}")
        world.run(world.now_us + draw.randint(50, 800) * MS)
        together = self._all_die()
        order = [machine for machine in self.machines if machine.node_id < self.replication]
        draw.shuffle(order)
        rest = [machine for machine in self.machines if machine not in order]
        for machine in [*order[:2], *rest]:
            world.run(world.now_us + draw.choice((5, 300, 1200)) * MS)
            machine.start()
        world.counts["times all died"] += 1
        if self.boot_ids and together:
            self._serves_without(order[2])
        world.run(world.now_us + draw.choice((5, 300, 4000)) * MS)
        order[2].start()

    def _all_die(self) -> bool:
        """At once, or within moments. True if it was at once, and all were only killed.

        A controller that lives some moments longer may fence the others: then only who was left in
        an ISR is known to have what is acknowledged, and has to be waited for.
        """
        staggered = self.draw.random() < 0.3
        only_killed = True
        for machine in self.draw.sample(self.machines, len(self.machines)):
            if staggered:
                self.world.run(self.world.now_us + self.draw.randint(1, 40) * MS)
            if self.power and self.draw.random() < 0.3:
                machine.power_loss()
                only_killed = False
            else:
                machine.kill()
        return only_killed and not staggered

    def _serves_without(self, third: Machine) -> None:
        """Two of three are enough: every producer is acknowledged again, soon."""
        world = self.world
        since = world.now_us

        def acknowledged() -> bool:
            return all(producer.acknowledged_us > since for producer in self.producers)

        if not world.run(since + AGAIN_US, done=acknowledged):
            raise Violation(
                "slow-return",
                f"{AGAIN_US // MS} ms after two of three were back not all is acknowledged "
                f"(n{third.node_id} is away): {self._state()}",
            )
        world.counts["times two went on"] += 1

    def counts(self) -> dict[str, int]:
        producers = [p for p in self.producers if isinstance(p, ImpatientProducer)]
        return super().counts() | {
            "batches that timed out": sum(p.timed_out for p in producers),
            "batches sent again in another epoch": sum(p.again for p in producers),
            "batches written before, too": sum(p.twice for p in producers),
        }
