"""Whoever runs a simulated cluster: topics come and go, replicas move, records are deleted.

Every history draws what its operator does. Each request goes to the active controller (or to a
partition's leader) once; whether it was carried out, nobody is told. When the faults are over, the
operator stops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kept.cluster.controller.reassignment import reassign
from kept.cluster.controller.topics import (
    CreateTopic,
    create_partitions,
    create_topic,
    delete_topic,
)
from kept.cluster.metadata.image import Image
from kept.storage.errors import KeptError
from kept.storage.types import TopicPartition
from tests.sim.clients import Producer
from tests.sim.network import NO_ANSWER, REFUSED
from tests.sim.world import MS

if TYPE_CHECKING:
    from tests.sim.cluster import ClusterHistory

KINDS = ("reassign", "cancel", "topics", "grow", "delete_records")
VOLATILE = "u"
"""The topic that is created and deleted under its one name."""
CLIENT = -300


class Operator:
    """See the module."""

    def __init__(self, history: ClusterHistory) -> None:
        self.history = history
        self.world = world = history.world
        share = world.random.choice((0.0, 0.3, 0.8))
        self.kinds = [kind for kind in KINDS if world.chance(share)]
        self.pace_ms = world.random.choice((150, 400, 1000))
        self.made = 0

    def start(self) -> None:
        if self.kinds:
            self._next()

    def _next(self) -> None:
        self.world.after(self.world.between(self.pace_ms // 4, 2 * self.pace_ms) * MS, self._act)

    def _act(self) -> None:
        if not self.history.nemesis.healed:
            getattr(self, f"_{self.world.random.choice(self.kinds)}")()
            self._next()

    def decide(self, what: str, change: Callable[[Image], Sequence[Any]]) -> None:
        """Ask whoever leads the controllers."""
        leader = self.history.leader()
        if leader is None:
            return

        def answered(error: Any) -> None:
            if error is None:
                self.world.counts[what] += 1

        self.history.network.call(CLIENT, leader.node_id, "change", change, answered, 2000)

    def _reassign(self) -> None:
        tp = self.world.random.choice(self.history.partitions)
        nodes = [machine.node_id for machine in self.history.machines]
        target = self.world.random.sample(nodes, 3)
        self.decide("reassignments", lambda image: reassign(image, tp.topic, tp.partition, target))

    def _cancel(self) -> None:
        tp = self.world.random.choice(self.history.partitions)
        self.decide(
            "reassignments cancelled", lambda image: reassign(image, tp.topic, tp.partition, None)
        )

    def _topics(self) -> None:
        if self.history.checks.there(VOLATILE):
            self.decide("topics deleted", lambda image: delete_topic(image, VOLATILE))
            return
        self.made += 1
        configs = self.history.topic_configs()
        request = CreateTopic(VOLATILE, UUID(int=100 + self.made), 2, 3, configs=configs)
        self.decide("topics created", lambda image: create_topic(image, request))
        for number in range(2):
            tp = TopicPartition(VOLATILE, number)
            producer = Producer(self.history, CLIENT - self.made, tp, -1, 3, 40)
            producer.unclaimed = True
            self.history.checks.strict.discard(producer.producer_id)
            producer.start()
            self.world.after(self.world.between(500, 3000) * MS, producer.give_up)

    def _grow(self) -> None:
        image_count = self.history.checks.there(VOLATILE)
        if 0 < image_count < 4:
            self.decide(
                "partitions added",
                lambda image: create_partitions(image, VOLATILE, image_count + 1),
            )

    def _delete_records(self) -> None:
        tp = self.world.random.choice(self.history.partitions)
        state = self.history.checks.register(tp).state
        if state is None or state.leader < 0:
            return
        register = self.history.checks.register(tp)
        offset = self.world.between(register.start, register.end)

        def answered(answer: Any) -> None:
            told = answer is NO_ANSWER or answer is REFUSED or isinstance(answer, KeptError)
            self.world.counts["records deleted"] += not told

        self.history.network.call(
            CLIENT, state.leader, "delete_records", (tp, offset), answered, 2000
        )
