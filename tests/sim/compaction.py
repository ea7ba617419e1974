"""Stage compaction: replicas follow the leader's result, under every fault, while hours pass.

The cluster of stage ``storage`` with compacted topics: keyed producers that delete a lot, a cleaner
on every leader, manifests that travel (:mod:`.manifests`), segments that are swapped step by step,
and a clock that jumps hours, on all machines at once or on one. :mod:`.compaction_checks` judges.

In the end one replica of half of the histories stays down for ever, as it seems: all others must
come to rest, go on cleaning, and lose every tombstone. Then it comes back, with the keys that were
deleted meanwhile, and must end as the others, at their generation.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import NO_LEADER, PartitionRecord, ResourceType
from kept.node.config.topic_config import log_config
from kept.node.replicas.manifests import recover
from kept.replication.effects import Losing, Truncated
from kept.replication.events import ProposeIsr
from kept.replication.isr import AlterIsrItem
from kept.replication.manifests import ManifestCore
from kept.replication.manifests_events import ManifestRef
from kept.replication.partition import Partition
from kept.storage.errors import MachineError, NotLeaderOrFollower
from kept.storage.records import build_batch
from kept.storage.types import TopicPartition
from tests.sim.clients import Producer, _Sending
from tests.sim.cluster import PATIENCE_US, ClusterHistory
from tests.sim.compaction_checks import CompactionChecks
from tests.sim.machine import Machine
from tests.sim.manifests import SimManifests
from tests.sim.node import SimNode
from tests.sim.raft_cluster import RaftApp
from tests.sim.replicas import Listener, Replicas, Reply
from tests.sim.world import MS, SECOND, Violation
from tests.support.logs import create_log

HOUR_MS = 3_600_000
KEYS = 4
TOMBSTONES_US = 20 * SECOND
"""How long tombstones may stay once all is well; two passes with a jump in between."""


class CompactingReplicas(Replicas):
    """Partitions whose leaders clean."""

    awaits_offer = True

    def __init__(self, node: SimNode) -> None:
        super().__init__(node)
        self.manifests: dict[TopicPartition, SimManifests] = {}

    def open(self, image: Image, tp: TopicPartition, topic_id: UUID) -> None:
        config = log_config(image.config(ResourceType.TOPIC, tp.topic), {})
        record = image.partition(tp.topic, tp.partition)
        assert record is not None
        disk, now_ms = self.machine.disk, self.machine.wall_ms
        state, known = None, recover.ManifestStatus()
        directory, found = self.directories.place(tp)
        if directory.offline is not None:
            return
        if found:
            path, alone = directory.log_path(tp), record.replicas == (self.node.node_id,)
            state, known = recover.before(path, disk, alone)
            log = directory.open_log(
                tp, topic_id, config, now_ms=now_ms,
                unfinished_swap=None if state is None else state.unfinished,
                compacted_to=None if state is None or state.applied is None else state.end_offset,
            )  # fmt: skip
            if state is not None:
                state, known = recover.after(path, disk, state, alone, log.log_end_offset)
        else:
            log = create_log(directory, tp, topic_id, config, now_ms=now_ms)
        self.partitions[tp] = partition = Partition(
            log,
            self.node.node_id,
            high_watermark=directory.high_watermarks.get(tp, log.log_start_offset),
            applied_end=0 if state is None else state.end_offset,
            lag_time_max_ms=self.node.history.lag_ms,
            manifests=ManifestCore(self.node.node_id, known.held, known.applied, known.lost),
            listener=Listener(self, tp),
        )
        self.manifests[tp] = SimManifests(self, partition, state)
        self.world.counts["manifests lost"] += known.lost
        self.look(tp)

    def remove(self, tp: TopicPartition) -> None:
        if self.attempt(self.manifests[tp].close):
            del self.manifests[tp]
            super().remove(tp)

    def disk_error(self, error: MachineError) -> None:
        super().disk_error(error)
        for tp in self.manifests.keys() - self.partitions.keys():
            self.world.counts["replicas that cleaned, offline"] += 1
            self.manifests.pop(tp).abandon()

    def give_up(self, error: MachineError) -> None:
        """What is done step by step has failed: as :meth:`attempt`."""

        def again() -> None:
            raise error

        self.attempt(again)

    def close(self) -> None:
        for manifests in self.manifests.values():
            manifests.close()
        super().close()

    # Roles.

    def lead(self, partition: Partition, record: PartitionRecord) -> None:
        super().lead(partition, record)
        self.manifests[partition.topic_partition].lead(record)

    def follow(self, partition: Partition, record: PartitionRecord) -> None:
        partition.unclean_epoch = record.leader_epoch if record.unclean else -1
        super().follow(partition, record)
        self.manifests[partition.topic_partition].follow(record)

    def resign(self, tp: TopicPartition, record: PartitionRecord) -> None:
        """Another one is to lead (``node/isr_changes``)."""
        rest = tuple((member, -1) for member in record.isr if member != self.node.node_id)
        item = AlterIsrItem(
            record.topic_id, record.partition, record.leader_epoch, record.partition_epoch, rest,
            base_published=not record.unclean,
        )  # fmt: skip
        self.world.counts["leaders that resign"] += 1

        def answered(answer: Any) -> None:
            now = self.node.image.partition(tp.topic, tp.partition)
            if not isinstance(answer, dict) and now == record:
                self.machine.after_ms(100, self.resign, tp, record)

        request = ((item,), self.node.lifecycle.broker_epoch)
        self.node.ask_controller("alter_isrs", request, answered)

    def fetched(self, tp: TopicPartition, leader_epoch: int, agreed: bool) -> None:
        manifests = self.manifests.get(tp)
        if manifests is not None:
            manifests.fetched(leader_epoch, agreed)

    def perform(self, tp: TopicPartition, effect: Any) -> None:
        super().perform(tp, effect)
        if tp in self.manifests and not isinstance(effect, ProposeIsr | Truncated | Losing):
            self.manifests[tp].perform(effect)

    def check_cut(self, tp: TopicPartition) -> None:
        self.manifests[tp].check_cut()

    def missing(self, tp: TopicPartition, ref: ManifestRef, offset: int) -> None:
        """A survivor is not here: only what was given up explains it."""
        self.world.counts["survivors missing"] += 1
        self.world.note(self.machine.name, f"{tp}: {offset} of {ref} is missing")
        checks, topic_id = self.checks, self.partitions[tp].topic_id
        assert isinstance(checks, CompactionChecks)
        if not checks.may_miss(tp) and not checks.had_dropped(tp, topic_id, ref, offset):
            raise Violation(
                "survivor-missing", f"{self.machine.name} {tp}: {offset} of generation {ref}"
            )

    def base_begun(self, tp: TopicPartition, leader_epoch: int) -> None:
        """A leader begins anew."""
        assert isinstance(self.checks, CompactionChecks)
        self.checks.bases.setdefault(tp, leader_epoch)

    # Manifests.

    def serve_pull_manifests(self, asked: Any, reply: Reply) -> None:
        tp, topic_id, request = asked
        manifests = self.manifests.get(tp)
        if (
            manifests is None
            or manifests.partition.topic_id != topic_id
            or not self.node.may_serve()
        ):
            reply(NotLeaderOrFollower(f"{tp}: no replica here"))
            return
        manifests.serve_pull(request, reply)
        self.settle(tp)

    def hear_news(self, leader: int, tp: TopicPartition) -> None:
        """A leader has something."""
        manifests = self.manifests.get(tp)
        if manifests is not None and manifests.partition.leader_id == leader:
            manifests.ask()

    def upkeep(self) -> None:
        super().upkeep()
        for manifests in list(self.manifests.values()):
            if manifests.partition.offline is None and self.attempt(manifests.clean):
                manifests.announce()
                self.settle(manifests.tp)

    # What is judged.

    def look(self, tp: TopicPartition) -> None:
        partition, manifests = self.partitions.get(tp), self.manifests.get(tp)
        if partition is None or manifests is None or partition.offline is not None:
            return
        if self.node.history.assertions:
            partition.check_invariants()
        checks = self.checks
        assert isinstance(checks, CompactionChecks)
        state = None if manifests.placing else manifests.state
        checks.look_at(
            self.node.node_id, self.node.process, tp, partition.topic_id, partition.log,
            partition.high_watermark,
            partition.leader_epoch if partition.core.leading else None,
            None if state is None or state.applied is None else (state.applied, state.end_offset),
        )  # fmt: skip


class CompactingNode(SimNode):
    """A node with manifests."""

    def serve_pull_manifests(self, source: int, request: Any, reply: Reply) -> None:
        assert isinstance(self.replicas, CompactingReplicas)
        self.replicas.serve_pull_manifests(request, reply)

    def serve_manifest_news(self, source: int, tp: TopicPartition, reply: Reply) -> None:
        assert isinstance(self.replicas, CompactingReplicas)
        self.replicas.hear_news(source, tp)
        reply(None)


class KeyedProducer(Producer):
    """Writes a few keys, and deletes them."""

    transactional = False

    def _make(self) -> _Sending:
        world, history = self.world, self.history
        count, now = world.random.choice((1, 1, 2, 4)), history.client_clock_ms
        records = []
        for i in range(count):
            value = f"{self.producer_id}-{self.sequence + i}".encode()
            key = b"%d" % world.random.randrange(KEYS)
            if world.chance(0.5):  # for a second, and never again: it stays as it is left
                key = b"%d at %d" % (world.random.randrange(KEYS), world.now_us // SECOND)
            records.append((now, key, None if world.chance(0.45) else value.ljust(60, b"."), ()))
        data = build_batch(
            records, producer_id=self.producer_id, producer_epoch=0, base_sequence=self.sequence,
            is_transactional=self.transactional,
        )  # fmt: skip
        made = _Sending(self.sequence, count, data)
        self.sequence += count
        return made


class CompactionHistory(ClusterHistory):
    """See the module."""

    stage = "compaction"

    def __init__(
        self, seed: int, *, unclean: bool | None = None, forsakes: bool | None = None,
        rots: bool | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """``unclean``, ``forsakes``, ``rots``: for planted bugs that show only there."""
        super().__init__(seed, **options)
        world = self.world
        self.unclean = self.unclean if unclean is None else unclean
        self.checks = CompactionChecks(world)
        self.checks.unclean = self.unclean
        self.retention_bytes = -1
        self.partitions = self.partitions[:2]
        self.operator.kinds = [k for k in self.operator.kinds if k in ("reassign", "cancel")]
        self.limps = False
        self.fault_us = min(self.fault_us, 8 * SECOND)
        extra = world.extra
        self.delete_retention_ms = extra.choice((HOUR_MS, HOUR_MS, 0))
        self.hours_every_ms = extra.choice((400, 1500, 4000))
        self.rots = extra.random() < 0.2 if rots is None else rots
        self.forsakes = extra.random() < 0.5 if forsakes is None else forsakes
        self.jumped_ms = 0

    def __str__(self) -> str:
        return (
            f"{super().__str__()}, delete.retention.ms {self.delete_retention_ms}, two hours pass "
            f"every {self.hours_every_ms} ms{', rot' if self.rots else ''}"
        )

    def boot(self, machine: Machine) -> RaftApp:
        if self.rots and self.world.extra.random() < 0.3:
            self._rot(machine, "/held-manifest")
        return CompactingNode(machine, self)

    def replicas_of(self, node: SimNode) -> Replicas:
        return CompactingReplicas(node)

    def cleans(self, machine: Machine) -> bool:
        """Whether its leaders clean whenever there is something to clean."""
        return True

    def _rot_while_it_runs(self) -> None:
        """A manifest that is held or applied, and not being put into place, is damaged."""
        if self.nemesis.healed:
            return
        self.world.after(self.world.extra.randint(200, 3000) * MS, self._rot_while_it_runs)
        machine = self.world.extra.choice(self.machines)
        if not isinstance(machine.app, CompactingNode):
            return
        replicas = machine.app.replicas
        assert isinstance(replicas, CompactingReplicas)
        if all(m.work is None and m.core.storing is None for m in replicas.manifests.values()):
            self._rot(machine, "/held-manifest", "/told-manifest", "/manifest-")

    def _rot(self, machine: Machine, *kinds: str) -> None:
        """Manifests that no swap needs are damaged."""
        sizes = {
            path: len(inode.data)
            for path, inode in machine.disk.files()
            if any(kind in path for kind in kinds)
            and not path.endswith(".tmp")
            and len(inode.data) > 20
        }
        for path, size in sizes.items():
            self.world.counts["manifests damaged"] += 1
            machine.disk.flip_bit(path, 7 * size // 11)

    @property
    def client_clock_ms(self) -> int:
        return super().client_clock_ms + self.jumped_ms

    def topic_configs(self) -> dict[str, str | None]:
        return super().topic_configs() | {
            "cleanup.policy": "compact",
            "delete.retention.ms": str(self.delete_retention_ms),
            "min.cleanable.dirty.ratio": "0.05",
            "segment.bytes": "1024",
            "segment.ms": "1800000",
        }

    def _clients(self) -> None:
        world = self.world
        for tp in self.partitions:
            for _ in range(2):
                producer = KeyedProducer(
                    self, -10 - len(self.producers), tp, -1, world.random.choice((1, 1, 3)),
                    world.random.choice((20, 60)),
                )  # fmt: skip
                self.producers.append(producer)
                producer.start()

    # Time.

    def suffer(self) -> None:
        self._hours_pass()
        if self.rots:
            self._rot_while_it_runs()
        super().suffer()

    def _hours_pass(self) -> None:
        if not self.nemesis.healed:
            self.jump()
            pause = self.world.extra.randint(self.hours_every_ms // 2, 2 * self.hours_every_ms)
            self.world.after(pause * MS, self._hours_pass)

    def jump(self) -> None:
        """Two hours later."""
        self.world.counts["hours that passed"] += 2
        self.jumped_ms += 2 * HOUR_MS
        for machine in self.machines:
            machine.wall_offset_ms += 2 * HOUR_MS

    # The end.

    def _live(self) -> None:
        world, limit = self.world, self.world.now_us + PATIENCE_US
        healed = world.now_us
        forsaken = None
        if self.forsakes:
            forsaken = world.extra.choice(self.machines)
            forsaken.retired = True
            forsaken.kill("is down for ever")
            self.until("led", lambda: self._led_without(forsaken, healed), limit)
            self._tombstones_go(forsaken)
            forsaken.retired = False
            forsaken.start()
        limit = world.now_us + PATIENCE_US
        self.until("well", lambda: self._led(healed), limit)
        self._tombstones_go(None)
        for producer in self.producers:
            producer.stopped = True
        limit = world.now_us + PATIENCE_US
        self.until("at rest", lambda: self.settled() and self._at_one_generation(), limit)
        self.checks.finish()

    def until(self, what: str, is_so: Any, limit_us: int) -> None:
        """Go on until then."""
        world = self.world
        while not is_so():
            if world.now_us >= limit_us:
                raise Violation("liveness", f"healed, and not {what}: {self._state()}")
            world.run(world.now_us + 250 * MS)

    def _led_without(self, forsaken: Machine, since_us: int) -> bool:
        for tp in self.partitions:
            state = self.checks.register(tp).state
            assert state is not None
            others = set(state.replicas) - {forsaken.node_id}
            if state.leader == NO_LEADER or not set(state.isr) >= others:
                return self._only_it(state, forsaken)
        return all(producer.acknowledged_us > since_us for producer in self.producers)

    def _only_it(self, state: PartitionRecord, forsaken: Machine) -> bool:
        """It was all there is, or a suspect that must be heard: it may not stay away."""
        if forsaken.node_id in (*state.isr, *state.elr) and state.leader == NO_LEADER:
            forsaken.retired = False
            forsaken.start()
        return False

    def _tombstones_go(self, forsaken: Machine | None) -> None:
        """Whatever is deleted now is gone from all that live, however long one is away."""
        until = {tp: self.checks.register(tp).end for tp in self.partitions}

        def gone() -> bool:
            self.jump()
            return not any(self._left(tp, end, forsaken) for tp, end in until.items())

        world, first = self.world, True
        limit_us = world.now_us + TOMBSTONES_US
        while first or not gone():
            first = False
            if world.now_us >= limit_us:
                left = {str(tp): self._left(tp, end, forsaken) for tp, end in until.items()}
                raise Violation("tombstones", f"they stay: {left}: {self._state()}")
            world.run(world.now_us + 1 * SECOND)

    def _left(self, tp: TopicPartition, end: int, forsaken: Machine | None) -> list[Any]:
        state, checks = self.checks.register(tp).state, self.checks
        assert state is not None and isinstance(checks, CompactionChecks)
        away = None if forsaken is None or forsaken.alive else forsaken.node_id
        nodes = [node for node in state.replicas if node != away]
        return [(node, rec) for node in nodes for rec in checks.tombstones(tp, node, end)]

    def _manifests(self, node: int, tp: TopicPartition) -> SimManifests | None:
        app = self.machines[node].app
        if not isinstance(app, CompactingNode):
            return None
        assert isinstance(app.replicas, CompactingReplicas)
        return app.replicas.manifests.get(tp)

    def _at_one_generation(self) -> bool:
        for tp in self.partitions:
            state = self.checks.register(tp).state
            assert state is not None
            found = [self._manifests(node, tp) for node in state.replicas]
            if any(m is None or m.core.held != m.core.applied or m.placing for m in found):
                return False
            if len({m.core.applied for m in found if m is not None}) != 1:
                return False
        return True

    def _state(self) -> str:
        parts = [super()._state()]
        for tp in self.partitions:
            for machine in self.machines:
                manifests = self._manifests(machine.node_id, tp)
                if manifests is not None:
                    parts.append(f"{tp} n{machine.node_id}: {manifests.core}")
        return "\n  ".join(parts)
