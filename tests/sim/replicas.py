"""A simulated broker's partitions: what ``node/hosting``, ``roles`` and ``fetching`` are to a node.

Real logs in a real ``LogDirectory`` on the simulated disk; real partitions and fetcher cores. What
blocks on the disk takes virtual time where the order matters (epoch tickets, flushes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kept.cluster.image import Delta, Image
from kept.cluster.records import NO_LEADER, PartitionRecord, ResourceType
from kept.cluster.settings import log_config
from kept.replication.events import BrokersChanged, ProposeIsr
from kept.replication.fetcher import NEVER, FetcherCore, FetchSettings
from kept.replication.fetching import (
    FENCED_LEADER_EPOCH,
    KAFKA_STORAGE_ERROR,
    NOT_LEADER_OR_FOLLOWER,
    OFFSET_OUT_OF_RANGE,
    UNKNOWN_LEADER_EPOCH,
    FetchAnswer,
    FetchRequest,
    OffsetsAnswer,
    OffsetsRequest,
    PartitionAnswer,
    PartitionRequest,
)
from kept.replication.following import perform_all
from kept.replication.partition import Partition
from kept.replication.reports import Truncated
from kept.storage.directory import Checkpoint, LogDirectory
from kept.storage.errors import (
    FencedLeaderEpoch,
    KafkaStorageError,
    KeptError,
    MachineError,
    OffsetOutOfRange,
    UnknownLeaderEpoch,
)
from kept.storage.records import CheckRules, check
from kept.storage.types import MAX_INT64, TopicPartition
from tests.sim import batches
from tests.sim.clients import ProduceAnswer, ProduceRequest, ReadAnswer, ReadRequest

if TYPE_CHECKING:
    from tests.sim.node import SimNode

LAG_MS = 3000
FETCH = FetchSettings(max_wait_ms=200)
CHECKPOINT_MS = 2000
UPKEEP_MS = 500
RULES = CheckRules(timestamp_after_max_ms=MAX_INT64)
"""Clocks jump here by hours."""
Reply = Callable[[Any], None]


class Replicas:
    """See the module. ``serving`` and ``suspended`` as in ``kept.node.roles``."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.machine = node.machine
        self.world = node.machine.world
        self.checks = node.history.checks
        self.partitions: dict[TopicPartition, Partition] = {}
        self.serving = False
        self.suspended = False
        self.streams: dict[int, FetcherCore] = {}
        self.where: dict[TopicPartition, int] = {}
        self.wanted: dict[TopicPartition, None] = {}
        self.asking = False
        self.acks: list[tuple[TopicPartition, batches.Batch, Reply]] = []
        self.flushing: dict[TopicPartition, list[tuple[int, Callable[[], None]]]] = {}
        self.generation: dict[int, int] = {}

    @property
    def directory(self) -> LogDirectory:
        return self.node.directory

    def now_ms(self) -> int:
        return self.machine.monotonic_ms

    # From the image.

    def apply(self, image: Image, delta: Delta) -> None:
        """An entry of the metadata log."""
        for change in delta.partitions:
            tp, record = change.topic_partition, change.after
            if self.node.node_id not in record.replicas:
                continue
            if tp not in self.partitions:
                self.open(image, tp, record.topic_id)
            self.take(self.partitions[tp], record)
        if delta.brokers:
            event = self.brokers(image)
            for partition in self.partitions.values():
                if partition.is_leader and partition.replicated:
                    partition.step(event)

    def open(self, image: Image, tp: TopicPartition, topic_id: UUID) -> None:
        config = log_config(image.config(ResourceType.TOPIC, tp.topic), {})
        found = any(e.topic_partition == tp and not e.is_delete for e in self.directory.scan())
        if found:
            log = self.directory.open_log(tp, topic_id, config, now_ms=self.machine.wall_ms)
        else:
            log = self.directory.create_log(tp, topic_id, config, now_ms=self.machine.wall_ms)
        self.partitions[tp] = Partition(
            log,
            self.node.node_id,
            high_watermark=self.directory.high_watermarks.get(tp, log.log_start_offset),
            lag_time_max_ms=LAG_MS,
            on_machine_error=self.disk_error,
            on_effect=lambda effect: self.heard(tp, effect),
        )
        self.look(tp)

    def disk_error(self, error: MachineError) -> None:
        self.world.note(self.machine.name, f"its log directory fails: {error}")
        self.directory.fail(error)
        self.machine.after_us(0, self.node.die_of, error)

    @staticmethod
    def brokers(image: Image) -> BrokersChanged:
        return BrokersChanged(
            frozenset(i for i, broker in image.brokers.items() if broker.active),
            tuple((i, broker.broker_epoch) for i, broker in image.brokers.items()),
        )

    def take(self, partition: Partition, record: PartitionRecord) -> None:
        """Become to a partition what the image says."""
        if not self.serving or partition.offline is not None:
            return
        if self.suspended:
            partition.suspend()
        if record.leader == self.node.node_id:
            self.lead(partition, record)
        else:
            self.follow(partition, record)
        self.look(partition.topic_partition)

    def lead(self, partition: Partition, record: PartitionRecord) -> None:
        tp = partition.topic_partition
        self.stop_following(tp)
        before = partition.leader_epoch
        ticket = partition.become_leader(
            record.leader_epoch, record.partition_epoch, record.isr, record.replicas, self.now_ms()
        )
        partition.step(self.brokers(self.node.image))
        if record.leader_epoch != before:
            self.world.note(self.machine.name, f"leads {tp}", f"in epoch {record.leader_epoch}")
        if ticket is not None:

            def run() -> None:
                ticket.run()
                self.machine.after_us(100, ticket.done)

            self.machine.after_us(self.world.between(*self.machine.disk_us), run)

    def follow(self, partition: Partition, record: PartitionRecord) -> None:
        news = partition.become_follower(
            record.leader, record.leader_epoch, record.partition_epoch, record.isr,
            record.replicas, self.now_ms(),
        )  # fmt: skip
        tp = partition.topic_partition
        if record.leader == NO_LEADER:
            self.stop_following(tp)
        elif news:
            if self.where.get(tp) != record.leader:
                self.stop_following(tp)
            core = self.streams.setdefault(record.leader, FetcherCore(record.leader, FETCH))
            self.where[tp] = record.leader
            core.add(tp, partition.topic_id, partition, record.leader_epoch)
            self.flush(tp)
            self.stream(record.leader)

    def stop_following(self, tp: TopicPartition) -> None:
        leader = self.where.pop(tp, None)
        if leader is not None:
            self.streams[leader].remove(tp)

    def resume(self, image: Image) -> None:
        first, self.serving, self.suspended = not self.serving, True, False
        for tp, partition in self.partitions.items():
            record = image.partition(tp.topic, tp.partition)
            if record is not None:
                self.take(partition, record)
            if not first:
                partition.resume()

    def suspend(self) -> None:
        self.suspended = True
        for partition in self.partitions.values():
            partition.suspend()

    # The ISR.

    def heard(self, tp: TopicPartition, effect: Any) -> None:
        if isinstance(effect, ProposeIsr):
            self.wanted[tp] = None
            self.machine.after_us(0, self.ask_isr)
        elif isinstance(effect, Truncated):
            self.world.note(self.machine.name, f"cuts {tp} to {effect.log_end_offset}")
            points = dict(self.directory.recovery_points)
            points[tp] = min(points.get(tp, 0), effect.recovery_point)
            self.directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, points)

    def ask_isr(self) -> None:
        if self.asking or not self.wanted:
            return
        tp = next(iter(self.wanted))
        del self.wanted[tp]
        partition = self.partitions[tp]
        item = partition.alter_isr_request()
        if item is None:
            self.ask_isr()
            return
        self.asking = True

        def answered(answer: Any) -> None:
            self.asking = False
            known = answer is None or isinstance(answer, KeptError)
            if known and answer.__class__.__name__ not in ("NotController", "StaleBrokerEpoch"):
                partition.isr_answered(item, answer)
                self.look(tp)
            if partition.alter_isr_request() is not None:
                self.wanted[tp] = None
            self.machine.after_ms(50, self.ask_isr)

        self.node.ask_controller("alter_isr", (item, self.node.lifecycle.broker_epoch), answered)

    # Fetching.

    def stream(self, leader: int) -> None:
        """Go on with the stream to a leader."""
        core = self.streams[leader]
        now = self.now_ms()
        request = core.next_request(now)
        if request is None:
            wake = core.wake_at_ms()
            if wake < NEVER:
                serial = self.generation[leader] = self.generation.get(leader, 0) + 1
                self.machine.after_ms(max(1, wake - now), self.wake, leader, serial)
            return

        def answered(answer: Any) -> None:
            self.node.own_tick()
            now = self.now_ms()
            if isinstance(request, FetchRequest) and isinstance(answer, FetchAnswer):
                work = core.answered(request, answer, now)
            elif isinstance(request, OffsetsRequest) and isinstance(answer, tuple):
                work = core.offsets_answered(request, answer, now)
            else:
                core.failed(request, now)
                work = ()
            perform_all(core, work, self.partitions.get, now, now)
            for tp, _ in work:
                self.look(tp)
                self.flush(tp)
            if self.node.history.assertions:
                core.check_invariants()
            self.machine.after_us(0, self.stream, leader)

        what = "fetch" if isinstance(request, FetchRequest) else "offsets"
        self.machine.network.call(
            self.node.node_id, leader, what, (request, self.node.lifecycle.broker_epoch),
            answered, 1500,
        )  # fmt: skip

    def wake(self, leader: int, serial: int) -> None:
        if self.generation.get(leader) == serial:
            self.stream(leader)

    def nudge(self, tp: TopicPartition) -> None:
        """Look at it again, in the stream that it is in now."""
        leader = self.where.get(tp)
        if leader is not None:
            self.streams[leader].nudge(tp)
            self.stream(leader)

    def flush(self, tp: TopicPartition) -> None:
        """``flush.messages``: the fetcher asks on when what it got is durable."""
        partition = self.partitions[tp]
        if partition.awaits_flush:
            end = partition.log.written_end_offset
            self.when_durable(tp, end, lambda: self.nudge(tp))

    def when_durable(self, tp: TopicPartition, end: int, then: Callable[[], None]) -> None:
        """Fsync what is written, in a thread; then go on."""
        partition = self.partitions[tp]
        ticket = partition.flush_ticket()
        if ticket is None:
            then()
            return

        def run() -> None:
            ticket.run()
            self.machine.after_us(50, done)

        def done() -> None:
            ticket.done()
            then()

        self.machine.after_us(self.world.between(*self.machine.disk_us), run)

    def serve_fetch(self, replica: int, asked: Any, reply: Reply) -> None:
        """A follower's Fetch; every request here lists all that it knows (no session)."""
        request, broker_epoch = asked
        deadline = self.now_ms() + request.max_wait_ms
        self.try_fetch(replica, request, broker_epoch, deadline, reply)

    def try_fetch(
        self, replica: int, request: FetchRequest, broker_epoch: int, deadline: int, reply: Reply
    ) -> None:
        answers = []
        news = False
        for wanted in request.partitions:
            answer = self.fetch_one(replica, wanted, broker_epoch)
            news = news or bool(answer.records or answer.error or answer.diverging)
            answers.append(answer)
        if news or self.now_ms() >= deadline:
            reply(FetchAnswer(0, 0, tuple(answers)))
            return
        waited: list[Partition] = []
        woken = False

        def wake() -> None:
            nonlocal woken
            if woken:
                return
            woken = True
            for partition in waited:
                partition.remove_waiter(wake)
            self.machine.after_us(
                20, self.try_fetch, replica, request, broker_epoch, deadline, reply
            )

        for wanted in request.partitions:
            partition = self.partitions[wanted.tp]
            partition.add_waiter(wake, replica=True)
            waited.append(partition)
        self.machine.after_ms(max(1, deadline - self.now_ms()), wake)

    def fetch_one(
        self, replica: int, wanted: PartitionRequest, broker_epoch: int
    ) -> PartitionAnswer:
        tp = wanted.tp
        partition = self.partitions.get(tp)
        if partition is None or not self.node.may_serve():
            return PartitionAnswer(tp, NOT_LEADER_OR_FOLLOWER)
        try:
            found = partition.fetch(
                wanted.fetch_offset, 20_000, current_leader_epoch=wanted.leader_epoch,
                last_fetched_epoch=wanted.last_fetched_epoch, replica_id=replica,
                broker_epoch=broker_epoch, now_ms=self.now_ms(),
            )  # fmt: skip
        except KeptError as error:
            return PartitionAnswer(tp, code_of(error))
        finally:
            self.settle(tp)
        data = b"" if found.slice is None else self.machine.disk.pread(*found.slice)
        return PartitionAnswer(
            tp, 0, found.high_watermark, found.last_stable_offset, found.log_start_offset,
            found.diverging, None, data,
        )  # fmt: skip

    def serve_offsets(self, replica: int, asked: Any, reply: Reply) -> None:
        request, _ = asked
        answers = []
        for tp, _, epoch in request.partitions:
            partition = self.partitions.get(tp)
            try:
                if partition is None or not self.node.may_serve():
                    answers.append(OffsetsAnswer(tp, NOT_LEADER_OR_FOLLOWER))
                    continue
                start = partition.list_offset(-2, None, epoch).offset
                end = partition.list_offset(-1, None, epoch).offset
                answers.append(OffsetsAnswer(tp, 0, start, end))
            except KeptError as error:
                answers.append(OffsetsAnswer(tp, code_of(error)))
        reply(tuple(answers))

    # Clients.

    def serve_produce(self, source: int, request: ProduceRequest, reply: Reply) -> None:
        tp = request.tp
        partition = self.partitions.get(tp)
        if partition is None or not self.node.may_serve():
            reply(ProduceAnswer("NotLeaderOrFollower"))
            return
        try:
            checked = check(bytearray(request.data), RULES, self.machine.wall_ms)
            info = partition.append(checked, self.machine.wall_ms, request.acks)
            partition.write()
        except KeptError as error:
            reply(ProduceAnswer(type(error).__name__))
            self.settle(tp)
            return
        self.node.history.served(self.node, tp, partition.leader_epoch)
        end = info.last_offset + 1
        head = batches.decode(bytes(checked.data))[0]
        batch = head._replace(base=info.base_offset, last=info.last_offset)
        if request.acks != -1:
            self.settle(tp)
            reply(ProduceAnswer("", info.base_offset))
            return

        def committed(error: KeptError | None) -> None:
            if error is not None:
                reply(ProduceAnswer(type(error).__name__))
            elif partition.config.flush_messages < MAX_INT64:
                self.when_durable(tp, end, lambda: self.acknowledge(tp, batch, reply))
            else:
                self.acks.append((tp, batch, reply))

        partition.when_committed(end, committed)
        self.settle(tp)

    def acknowledge(self, tp: TopicPartition, batch: batches.Batch, reply: Reply) -> None:
        self.acks.append((tp, batch, reply))
        self.settle(tp)

    def serve_read(self, source: int, request: ReadRequest, reply: Reply) -> None:
        partition = self.partitions.get(request.tp)
        if partition is None or not self.node.may_serve():
            reply(ReadAnswer("NotLeaderOrFollower"))
            return
        try:
            found = partition.fetch(request.offset, request.max_bytes)
        except KeptError as error:
            start = partition.log_start_offset
            reply(ReadAnswer(type(error).__name__, log_start_offset=start))
            return
        data = b"" if found.slice is None else self.machine.disk.pread(*found.slice)
        reply(ReadAnswer("", data, found.high_watermark, found.log_start_offset))

    # Upkeep.

    def upkeep(self) -> None:
        """Ticks of partitions, retention, flushes; checkpoints now and then."""
        for tp, partition in self.partitions.items():
            if partition.offline is None:
                partition.tick(self.now_ms())
                partition.maybe_roll(self.machine.wall_ms)
                partition.retention(self.machine.wall_ms)
                partition.delete_expired(self.machine.wall_ms)
                self.settle(tp)
        if self.world.chance(UPKEEP_MS / CHECKPOINT_MS):
            self.checkpoint()

    def checkpoint(self) -> None:
        tps = self.partitions.items()
        flushed = {tp: p.log.recovery_point for tp, p in tps if p.offline is None}
        starts = {tp: p.log_start_offset for tp, p in tps if p.offline is None}
        marks = {tp: p.high_watermark for tp, p in tps if p.offline is None}
        self.directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, flushed)
        self.directory.write_checkpoints(Checkpoint.LOG_STARTS, starts)
        self.directory.write_checkpoints(Checkpoint.HIGH_WATERMARKS, marks)

    def close(self) -> None:
        """Stop in order."""
        for partition in self.partitions.values():
            partition.close(self.machine.wall_ms)
        self.checkpoint()

    # What is judged.

    def settle(self, tp: TopicPartition) -> None:
        """Look at the replica, then let the acknowledgements go that its HW made due."""
        self.look(tp)
        due, self.acks = self.acks, []
        for owner, batch, reply in due:
            if owner != tp:
                self.look(owner)
            self.checks.acknowledged(owner, self.node.node_id, batch)
            reply(ProduceAnswer("", batch.base))

    def look(self, tp: TopicPartition) -> None:
        partition = self.partitions[tp]
        log = partition.log
        if partition.offline is not None:
            return
        if self.node.history.assertions:
            partition.check_invariants()
        self.checks.look(
            self.node.node_id, self.node.process, tp, lambda start: batches.read(log, start),
            log.log_start_offset, log.written_end_offset, log.truncations,
            partition.high_watermark,
            partition.leader_epoch if partition.core.leading else None,
        )  # fmt: skip


def code_of(error: KeptError) -> int:
    """Kafka's code of what a fetch raises."""
    if isinstance(error, OffsetOutOfRange):
        return OFFSET_OUT_OF_RANGE
    if isinstance(error, FencedLeaderEpoch):
        return FENCED_LEADER_EPOCH
    if isinstance(error, UnknownLeaderEpoch):
        return UNKNOWN_LEADER_EPOCH
    if isinstance(error, KafkaStorageError):
        return KAFKA_STORAGE_ERROR
    return NOT_LEADER_OR_FOLLOWER
