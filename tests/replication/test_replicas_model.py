"""Three replicas on real logs and simulated disks, in random histories of clean elections.

A controller of twenty lines decides; every node hears of it when it hears of it. Requests and
answers are delayed, lost, repeated and replayed; processes are killed, power is lost while another
member of the ISR keeps its disk (rule 33). After every step: replicas agree on what is committed,
every acknowledged batch is in every member of the ISR, nothing committed was cut away. In the end
all are the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept.replication.effects import Losing, Truncated
from kept.replication.events import BrokersChanged
from kept.replication.fetcher import RequestFailed
from kept.storage.errors import IneligibleReplica, InvalidUpdateVersion, KeptError
from tests.replication.trio import Node
from tests.support import partitions as tools

REPLICAS = (0, 1, 2)
LAG_MS = 30_000
WHO = st.integers(0, 2)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("produce"), st.integers(1, 4)),
        st.tuples(st.just("step"), WHO),
        st.tuples(st.just("step"), WHO),
        st.tuples(st.just("step"), WHO),
        st.tuples(st.just("lose"), WHO),
        st.tuples(st.just("repeat"), WHO),
        st.tuples(st.just("replay"), WHO),
        st.tuples(st.just("image"), WHO),
        st.tuples(st.just("image"), WHO),
        st.tuples(st.just("isr"), st.integers(0, 2)),
        st.tuples(st.just("elect"), WHO),
        st.tuples(st.just("kill"), WHO),
        st.tuples(st.just("power"), WHO),
        st.tuples(st.just("flush"), WHO),
        st.tuples(st.just("checkpoint"), WHO),
        st.tuples(st.just("delete"), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.sampled_from([10, 1000, 40_000])),
        st.tuples(st.just("roll"), WHO),
    ),
    max_size=80,
)


@dataclass
class Controller:
    leader: int = 0
    epoch: int = 1
    version: int = 0
    isr: tuple[int, ...] = REPLICAS
    brokers: dict[int, int] = field(default_factory=lambda: dict.fromkeys(REPLICAS, 1))

    def lead(self, leader: int) -> None:
        self.leader, self.epoch, self.version = leader, self.epoch + 1, self.version + 1

    def crashed(self, node: int) -> None:
        """Kafka's fencing: out of the ISR unless it is the last; another leads."""
        others = tuple(member for member in self.isr if member != node)
        if node in self.isr and others:
            self.isr, self.version = others, self.version + 1
        if self.leader == node:
            self.lead(self.isr[0])
        self.brokers[node] += 1

    def alter(self, leader: int, item) -> KeptError | None:
        if (leader, item.leader_epoch, item.partition_epoch) != (
            self.leader, self.epoch, self.version,
        ):  # fmt: skip
            return InvalidUpdateVersion()
        for member, epoch in item.isr:
            if member not in self.isr and epoch not in (-1, self.brokers[member]):
                return IneligibleReplica()
        self.isr = tuple(member for member, _ in item.isr)
        self.version += 1
        return None


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_ms = 0
        self.controller = Controller()
        self.nodes = [Node(i) for i in REPLICAS]
        self.known: list[dict] = [{} for _ in REPLICAS]
        self.wire: list = [None, None, None]
        self.past: list[list] = [[], [], []]
        self.acked: list[tuple[int, int, int]] = []
        self.points = [dict.fromkeys(("recovery_point", "log_start_offset"), 0) for _ in REPLICAS]
        self.terms: dict[int, int] = {}
        self.deleted = 0
        for i in REPLICAS:
            self.image(i)

    # What happens.

    def produce(self, count: int) -> None:
        node = self.nodes[self.controller.leader]
        if not node.partition.is_leader:
            return
        info = tools.produce(node.partition, count)
        batch = (info.base_offset, info.last_offset + 1, node.partition.leader_epoch)

        def committed(error: KeptError | None) -> None:
            if error is None:
                self.acked.append(batch)

        node.partition.when_committed(info.last_offset + 1, committed)

    def image(self, i: int) -> None:
        """Node ``i`` hears what the controller decided."""
        node, controller = self.nodes[i], self.controller
        args = (controller.epoch, REPLICAS, controller.isr, controller.version)
        if controller.leader == i:
            node.lead(*args, now_ms=self.now_ms)
        else:
            node.follow(controller.leader, *args)
        brokers = tuple(controller.brokers.items())
        node.partition.step(BrokersChanged(frozenset(REPLICAS), brokers), 0)

    def step(self, i: int) -> None:
        """A request is made, or served, or answered."""
        node, wire = self.nodes[i], self.wire[i]
        if node.fetcher is None:
            self.wire[i] = None
        elif wire is None or wire[0] is not node.fetcher:
            request = node.fetcher.next_request(self.now_ms)
            if request is not None:
                self.wire[i] = (node.fetcher, request, node.epoch, None)
        elif wire[3] is None:
            answer = self.serve(wire[0].leader_id, wire[1], i, wire[2])
            self.wire[i] = (*wire[:3], answer)
        else:
            node.take(wire[1], wire[3], self.now_ms)
            self.past[i].append(wire)
            self.wire[i] = None

    def serve(self, leader: int, request, who: int, epoch: int):
        return self.nodes[leader].serve(request, who, epoch, self.now_ms)

    def lose(self, i: int) -> None:
        wire = self.wire[i]
        if wire is not None:
            wire[0].step(RequestFailed(wire[1]), self.now_ms)
            self.past[i].append(wire)
            self.wire[i] = None

    def repeat(self, i: int) -> None:
        """An old answer arrives again."""
        if self.past[i]:
            _, request, _, answer = self.past[i][self.seed % len(self.past[i])]
            if answer is not None:
                self.nodes[i].take(request, answer, self.now_ms)

    def replay(self, i: int) -> None:
        """An old request arrives again; whatever its answer, nobody waits for it."""
        if self.past[i]:
            fetcher, request, epoch, _ = self.past[i][self.seed % len(self.past[i])]
            if epoch == self.nodes[i].epoch:
                self.serve(fetcher.leader_id, request, i, epoch)

    def isr(self, how: int) -> None:
        node = self.nodes[self.controller.leader]
        item = node.partition.alter_isr_request()
        if item is not None:
            error = self.controller.alter(node.node_id, item) if how else InvalidUpdateVersion()
            if how != 2:
                node.partition.alter_isr_completed(
                    item, error if how else None or KeptError("lost")
                )

    def crash(self, i: int, power: bool) -> None:
        node = self.nodes[i]
        if power and self.controller.isr == (i,):
            return
        self.controller.crashed(i)
        disk = node.disk.after_power_loss(self.seed) if power else node.disk.after_kill()
        node.disk = disk
        node.epoch = self.controller.brokers[i]
        node.sessions.clear()
        node.fetcher = None
        self.wire[i] = None
        self.past[i].clear()
        node.open(**self.points[i])
        self.terms.pop(i, None)

    def checkpoint(self, i: int) -> None:
        partition = self.nodes[i].partition
        self.nodes[i].high_watermark = partition.high_watermark
        self.points[i]["recovery_point"] = partition.log.recovery_point
        self.points[i]["log_start_offset"] = partition.log_start_offset

    def delete(self, offset: int) -> None:
        partition = self.nodes[self.controller.leader].partition
        if partition.is_leader and offset <= partition.high_watermark:
            partition.delete_records(offset, self.now_ms)
            partition.retention(tools.NOW)

    def do(self, action: str, value: int) -> None:
        match action:
            case "kill" | "power":
                self.crash(value, action == "power")
            case "elect":
                isr = self.controller.isr
                self.controller.lead(isr[value % len(isr)])
            case "flush":
                self.nodes[value].partition.log.flush()
            case "roll":
                self.nodes[value].partition.log.roll(tools.NOW)
            case "wait":
                self.now_ms += value
                for node in self.nodes:
                    node.partition.tick(self.now_ms)
            case _:
                getattr(self, action)(value)
        self.check()

    # What must hold.

    def check(self) -> None:
        for i, node in enumerate(self.nodes):
            node.partition.check_invariants()
            if node.fetcher is not None:
                node.fetcher.check_invariants()
            for effect in node.effects:
                assert not isinstance(effect, Losing), f"{node.node_id}: {effect}"
                if isinstance(effect, Truncated):
                    if effect.log_start_offset == effect.log_end_offset:
                        self.terms[i] = effect.log_end_offset
                    self.points[i]["recovery_point"] = min(
                        self.points[i]["recovery_point"], effect.recovery_point
                    )
            node.effects.clear()
            known = self.terms.get(i, 0)
            assert node.partition.high_watermark >= known, "HW went back"
            self.terms[i] = node.partition.high_watermark
        logs = [set(node.batches()) for node in self.nodes]
        for i in REPLICAS:
            for j in range(i):
                self.agree(i, j, logs)
        for member in self.controller.isr:
            start = self.nodes[member].partition.log_start_offset
            lost = [b for b in self.acked if b[1] > start and b not in logs[member]]
            assert not lost, f"acknowledged, not in {member} of ISR {self.controller.isr}: {lost}"

    def agree(self, i: int, j: int, logs: list[set]) -> None:
        a, b = self.nodes[i].partition, self.nodes[j].partition
        # A crash may take a log start back to its checkpoint; what was deleted promises nothing.
        self.deleted = max(self.deleted, a.log_start_offset, b.log_start_offset)
        start = self.deleted
        end = min(a.high_watermark, b.high_watermark)
        if start >= end:
            return
        common = [{x for x in logs[k] if x[1] > start and x[0] < end} for k in (i, j)]
        assert common[0] == common[1], f"{i} and {j} differ below {end}"

    def heal(self) -> None:
        """No more faults: everybody catches up, and joins the ISR."""
        for _ in range(12):
            for i in REPLICAS:
                self.image(i)
                for _ in range(6):
                    self.step(i)
            self.isr(1)
            self.now_ms += 2000
            self.check()
        leader = self.nodes[self.controller.leader].partition
        assert set(self.controller.isr) == set(REPLICAS)
        for node in self.nodes:
            assert node.partition.log_end_offset == leader.log_end_offset
            assert node.partition.high_watermark == leader.high_watermark
            # A leader that was killed may have forgotten how far records were deleted.
            start = self.deleted
            assert node.partition.log_start_offset >= leader.log_start_offset
            mine, theirs = (
                [b for b in n.batches() if b[1] > start]
                for n in (node, self.nodes[self.controller.leader])
            )
            assert mine == theirs
        assert leader.high_watermark == leader.log_end_offset


EXAMPLES = int(os.environ.get("KEPT_HISTORIES", "150"))


@settings(max_examples=EXAMPLES, deadline=None)
@given(ACTIONS, st.integers(0, 2**16))
def test_three_replicas(actions, seed) -> None:
    world = World(seed)
    for action, value in actions:
        world.do(action, value)
    world.heal()


@pytest.mark.parametrize("seed", [*range(12), 207, 275, 368, 1069, 5101, 5424, 6700, 7928])
def test_long_histories(seed) -> None:
    """Those above 200 found something once: epochs forgotten with a log start that went back, a
    proposed member that restarted empty before the controller decided (KIP-903), epochs of lost
    records that came back from their file, batches of the leader that reach over our end.
    """
    random = Random(seed)
    world = World(seed)
    names = ["produce"] * 6 + ["step"] * 24 + ["image"] * 6 + ["isr"] * 4
    names += ["lose", "repeat", "replay", "elect", "kill", "power", "flush", "checkpoint"]
    names += ["delete", "wait", "roll"]
    for _ in range(400):
        name = random.choice(names)
        value = random.randrange(3)
        if name == "produce":
            value += 1
        elif name == "wait":
            value = random.choice([10, 1000, 40_000])
        elif name == "delete":
            value = random.randrange(200)
        world.do(name, value)
    world.heal()
