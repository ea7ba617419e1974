"""Laws of the controller's decisions, over random histories of a small cluster."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from kept.cluster.controller import partition_election, unclean_recovery
from kept.cluster.controller.brokers import (
    RegisterRequest,
    fence_brokers,
    register_broker,
    shut_down_broker,
    unfence_broker,
    unregister_broker,
)
from kept.cluster.controller.heartbeats import ReplicaLog
from kept.cluster.controller.partition_election import (
    AlterIsr,
    alter_isr,
    alter_isrs,
    balance_preferred,
    elect_preferred,
    elect_unclean,
)
from kept.cluster.controller.reassignment import finish_reassignments, reassign
from kept.cluster.controller.topics import (
    CreateTopic,
    create_partitions,
    create_topic,
    delete_topic,
)
from kept.cluster.controller.unclean_recovery import clear_elr
from kept.cluster.metadata.image import Image, is_pending
from kept.cluster.metadata.records import NO_LEADER, PartitionRecord
from kept.storage.errors import PeerError, RetriableError

BROKERS = 4
OPS = (
    "register",
    "register-clean",
    "fence",
    "unfence",
    "shut-down",
    "unregister",
    "create",
    "delete",
    "grow",
    "isr",
    "isr-stale",
    "preferred",
    "unclean",
    "clear-elr",
    "longest",
    "reassign",
    "cancel",
    "finish",
    "balance",
    "offline",
    "batch",
)
steps = st.lists(
    st.tuples(st.sampled_from(OPS), st.integers(0, BROKERS - 1), st.integers(0, 2**12)), max_size=60
)


class World:
    """An image and what may happen to it."""

    def __init__(self, unclean: bool) -> None:
        self.image = Image()
        self.ids = 0
        self.allowed = lambda _topic: unclean
        for broker_id in range(BROKERS):
            self.apply("register", broker_id, 1)
            self.apply("unfence", broker_id, 0)

    def pick(self, number: int) -> tuple[str, PartitionRecord] | None:
        every = [(t.name, p) for t in self.image.topics.values() for p in t.partitions]
        return every[number % len(every)] if every else None

    def apply(self, op: str, broker_id: int, number: int):
        """The decision's records, applied; its errors change nothing."""
        before = self.image
        try:
            records = self.decide(op, broker_id, number)
        except (PeerError, RetriableError):
            records = []
        self.image, delta = before.apply(records)
        return before, delta

    def decide(self, op: str, broker_id: int, number: int):
        image = self.image
        known = image.brokers.get(broker_id)
        epoch = known.broker_epoch if known else -1
        match op:
            case "register" | "register-clean":
                clean = epoch if op == "register-clean" else -1
                self.ids += 1
                who = RegisterRequest(broker_id, UUID(int=self.ids), (), None, clean)
                return register_broker(image, who, unclean_allowed=self.allowed)
            case "fence":
                return fence_brokers(image, {broker_id: epoch}, self.allowed)
            case "unfence":
                return unfence_broker(image, broker_id, epoch, self.allowed)
            case "shut-down":
                return shut_down_broker(image, broker_id, epoch)
            case "unregister":
                return unregister_broker(image, broker_id)
            case "create":
                self.ids += 1
                wanted = CreateTopic(
                    f"t{number % 3}", UUID(int=self.ids), 1 + number % 2, 1 + number % BROKERS
                )
                return create_topic(image, wanted)
            case "offline":
                return partition_election.elect_offline(image, self.allowed)
            case "balance":
                return balance_preferred(image, percentage=0)
            case "finish":
                return finish_reassignments(image)
            case "longest":
                return unclean_recovery.elect_longest(image, image.recovering, self.reports(number))
            case "clear-elr":
                keys = {key: image.partition(*key).partition_epoch for key in image.pending}
                return clear_elr(image, keys)
        found = self.pick(number)
        if found is None:
            return []
        return self.decide_partition(op, number, *found)

    def decide_partition(self, op: str, number: int, topic: str, state: PartitionRecord):
        image = self.image
        match op:
            case "delete":
                return delete_topic(image, topic)
            case "grow":
                return create_partitions(image, topic, state.partition + 2)
            case "isr" | "isr-stale" | "batch":
                request = self.alter(state, number, stale=op == "isr-stale")
                if op == "batch":
                    return alter_isrs(image, [request, request]).records
                return alter_isr(image, request)
            case "preferred":
                return elect_preferred(image, topic, state.partition)
            case "unclean":
                return elect_unclean(image, topic, state.partition)
            case "reassign":
                ring = [(number + i * (1 + number // 7 % 3)) % BROKERS for i in range(BROKERS)]
                target = list(dict.fromkeys(ring))[: 1 + number // 5 % 3]
                return reassign(image, topic, state.partition, target)
            case "cancel":
                return reassign(image, topic, state.partition, None) if state.reassigning else []
        raise AssertionError(op)

    def alter(self, state: PartitionRecord, number: int, stale: bool) -> AlterIsr:
        leader = self.image.brokers.get(state.leader)
        isr = [b for i, b in enumerate(state.replicas) if number >> i & 1 or b == state.leader]
        return AlterIsr(
            state.topic_id,
            state.partition,
            state.leader,
            leader.broker_epoch if leader else -1,
            state.leader_epoch,
            state.partition_epoch - stale,
            tuple((b, -1) for b in isr),
            base_published=bool(number & 64),
        )

    def reports(self, number: int):
        found = {}
        for key in self.image.recovering:
            state = self.image.partition(*key)
            found[key] = {
                b: (
                    self.image.brokers[b].broker_epoch,
                    ReplicaLog(*key, state.leader_epoch, number % 3, (number >> b) % 5),
                )
                for b in state.replicas
                if b in self.image.brokers and (number >> b) % 4
            }
        return found


def check_state(image: Image, state: PartitionRecord) -> None:
    isr = set(state.isr)
    assert state.isr and isr <= set(state.replicas), "the ISR: somebody, of the replicas"
    for members in (state.replicas, state.isr, state.adding, state.removing, state.elr):
        assert len(set(members)) == len(members)
    assert set(state.adding) | set(state.removing) <= set(state.replicas)
    assert not set(state.adding) & set(state.removing)
    assert set(state.replicas) - set(state.adding), "what was before can be returned to"
    assert set(state.elr) <= set(state.replicas)
    active = {b for b in state.replicas if b in image.brokers and image.brokers[b].active}
    if state.leader != NO_LEADER:
        assert state.leader in isr and state.leader not in state.elr
        leaving = image.brokers[state.leader].in_controlled_shutdown
        assert state.leader in active or (leaving and isr == {state.leader})
        assert isr <= active | {state.leader}
    else:
        assert not isr & active or state.recovering, "an ISR that lives has a leader"


def check_indexes(image: Image) -> None:
    """Derived maps are what a scan of everything finds."""
    hosted: dict[int, dict[UUID, set[int]]] = {}
    states = [p for topic in image.topics.values() for p in topic.partitions]
    for state in states:
        for b in state.replicas:
            hosted.setdefault(b, {}).setdefault(state.topic_id, set()).add(state.partition)
    found = {b: {t: set(n) for t, n in topics.items()} for b, topics in image.hosted.items()}
    assert found == hosted
    assert set(image.pending) == {p.key for p in states if is_pending(p)}
    assert set(image.recovering) == {p.key for p in states if p.recovering}


def check_change(op: str, unclean: bool, before, change, image: Image) -> None:
    old, new = change.before, change.after
    if old is None:
        return
    assert new.partition_epoch == old.partition_epoch + 1
    assert new.leader_epoch - old.leader_epoch in (0, 1)
    if new.leader != old.leader:
        assert new.leader_epoch == old.leader_epoch + 1, "a new leader is a new epoch"
    if set(old.replicas) - set(new.replicas):
        assert new.leader_epoch == old.leader_epoch + 1, "who is gone must notice"
    grown = set(new.isr) - set(old.isr)
    elected = new.leader not in (old.leader, NO_LEADER)
    if elected and new.leader not in old.isr:
        if op in ("isr", "batch"):
            assert old.leader in old.removing or len(old.isr) == 1, "let in, and led to, at once"
        elif op == "longest":
            assert old.recovering and new.leader in old.elr
        else:
            assert new.unclean and (unclean or op == "unclean")
        assert new.isr == (new.leader,) or op in ("isr", "batch")
    elif grown:
        assert op in ("isr", "batch") and not (old.unclean and new.unclean)
        assert all(image.brokers[b].active for b in grown)
    if old.unclean and not new.unclean:
        assert op in ("isr", "batch"), "only the leader takes the mark off"
    if elected and old.recovering:
        assert op in ("longest", "unclean"), "what restarted unclean is not elected in passing"


@settings(max_examples=150, deadline=None)
@given(st.booleans(), steps)
def test_laws_of_every_decision(unclean, history) -> None:
    world = World(unclean)
    world.apply("create", 0, 2)
    leaders: dict[tuple[UUID, int, int], int] = {}
    for op, broker_id, number in history:
        before, delta = world.apply(op, broker_id, number)
        for change in delta.partitions:
            check_change(op, unclean, before, change, world.image)
            state = change.after
            if state.leader != NO_LEADER:
                term = (*state.key, state.leader_epoch)
                assert leaders.setdefault(term, state.leader) == state.leader
        if op == "isr-stale":
            assert not delta.partitions
        for topic in world.image.topics.values():
            for state in topic.partitions:
                check_state(world.image, state)
        check_indexes(world.image)
        restored, _ = Image().apply(world.image.records())
        assert restored.hosted.keys() == world.image.hosted.keys()
        check_indexes(restored)


@settings(max_examples=200, deadline=None)
@given(st.booleans(), steps)
def test_whoever_is_registered_comes_back_to_lead(unclean, history) -> None:
    """Heal: all brokers register, catch up and report; then every partition has a leader."""
    world = World(unclean)
    world.apply("create", 0, 2)
    for op, broker_id, number in history:
        world.apply(op, broker_id, number)
    for broker_id in range(BROKERS):
        world.apply("register", broker_id, 0)
        world.apply("unfence", broker_id, 0)
    world.apply("longest", 0, 0b1111_1111)
    states = [p for topic in world.image.topics.values() for p in topic.partitions]
    assert not [state for state in states if state.leader == NO_LEADER]
