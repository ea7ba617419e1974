"""A simulated broker's partitions: what ``node/hosting``, ``roles`` and ``fetching`` are to a node.

Real logs in a real ``LogDirectory`` on the simulated disk; real partitions and fetcher cores. What
blocks on the disk takes virtual time where the order matters (epoch tickets, flushes).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kept.cluster.metadata.image import Delta, Image
from kept.cluster.metadata.records import NO_LEADER, PartitionRecord, ResourceType
from kept.node.config.topic_config import log_config
from kept.replication.effects import Truncated
from kept.replication.events import BrokersChanged, ProposeIsr
from kept.replication.fetch_messages import (
    FENCED_LEADER_EPOCH,
    KAFKA_STORAGE_ERROR,
    NOT_LEADER_OR_FOLLOWER,
    OFFSET_OUT_OF_RANGE,
    UNKNOWN_LEADER_EPOCH,
    FetchAnswer,
    FetchRequest,
    OffsetsAnswer,
    PartitionAnswer,
    PartitionRequest,
)
from kept.replication.isr import AlterIsrItem
from kept.replication.partition import Partition
from kept.storage.directory import Checkpoint, LogDirectory
from kept.storage.errors import (
    FencedLeaderEpoch,
    InvalidProducerEpoch,
    KafkaStorageError,
    KeptError,
    MachineError,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    OutOfOrderSequenceNumber,
    UnknownLeaderEpoch,
    UnknownProducerId,
)
from kept.storage.records import CheckRules, check
from kept.storage.types import MAX_INT64, LogConfig, TopicPartition
from tests.sim import batches
from tests.sim.clients import ProduceAnswer, ProduceRequest, ReadAnswer, ReadRequest
from tests.sim.directories import Directories, resignation
from tests.sim.flushes import Flushes, nothing
from tests.sim.streams import Streams
from tests.sim.world import check_disk_error
from tests.support.logs import create_log

if TYPE_CHECKING:
    from tests.sim.node import SimNode

CHECKPOINT_MS = 2000
UPKEEP_MS = 500
RULES = CheckRules(timestamp_after_max_ms=MAX_INT64)
"""Clocks jump here by hours."""
OF_SEQUENCES = (OutOfOrderSequenceNumber, InvalidProducerEpoch, UnknownProducerId)
"""Final to a producer: a leader in doubt does not say so (``node/kafka/handlers/produced``)."""
Reply = Callable[[Any], None]
OffsetOf = Callable[[Partition], int | None]


def inner_start(partition: Partition) -> int | None:
    """A log start needs words only inside of the first segment."""
    log = partition.log
    start = log.log_start_offset
    return start if start > log.segments[0].base_offset else None


CHECKPOINTS: dict[Checkpoint, OffsetOf] = {
    Checkpoint.RECOVERY_POINTS: lambda partition: partition.log.recovery_point,
    Checkpoint.LOG_STARTS: inner_start,
    Checkpoint.HIGH_WATERMARKS: lambda partition: partition.high_watermark,
}


class Listener:
    """What a partition of a simulated node calls (:class:`kept.replication.replica`)."""

    def __init__(self, replicas: Replicas, tp: TopicPartition) -> None:
        self.replicas, self.tp = replicas, tp

    def perform(self, effect: Any) -> None:
        self.replicas.perform(self.tp, effect)

    def machine_failed(self, error: MachineError) -> None:
        self.replicas.disk_error(error)

    def check_cut(self) -> None:
        self.replicas.check_cut(self.tp)


class Replicas:
    """See the module. ``serving`` and ``suspended`` as in ``kept.node.replicas.role_changes``.

    ``awaits_offer``: a leader says later which manifest it holds.
    """

    awaits_offer = False

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.machine = node.machine
        self.world = node.machine.world
        self.checks = node.history.checks
        self.partitions: dict[TopicPartition, Partition] = {}
        self.offline: set[TopicPartition] = set()
        """Replicas whose log directory failed."""
        self.resigning: dict[TopicPartition, AlterIsrItem] = {}
        self.serving = False
        self.suspended = False
        self.flushes = Flushes(self.machine, self.attempt)
        self.streams = Streams(self)
        self.wanted: dict[TopicPartition, None] = {}
        self.asking = False
        self.acks: list[tuple[TopicPartition, batches.Batch, Reply]] = []

    @property
    def directories(self) -> Directories:
        return self.node.directories

    @property
    def directory(self) -> LogDirectory:
        """The only one, where there is one."""
        return self.directories.all[0]

    def now_ms(self) -> int:
        return self.machine.monotonic_ms

    # From the image.

    def apply(self, image: Image, delta: Delta) -> None:
        """An entry of the metadata log."""
        for gone in delta.topics_deleted:
            self.offline -= {tp for tp in self.offline if tp.topic == gone.name}
            for tp, partition in list(self.partitions.items()):
                if tp.topic == gone.name and partition.topic_id == gone.topic_id:
                    self.remove(tp)
        for change in delta.partitions:
            tp, record = change.topic_partition, change.after
            if self.node.node_id not in record.replicas:
                if tp in self.partitions:
                    self.remove(tp)
                continue
            if tp in self.offline:
                self.lost(tp, record)
                continue
            if tp not in self.partitions:
                self.attempt(partial(self.open, image, tp, record.topic_id))
            if tp in self.partitions:
                self.take(self.partitions[tp], record)
            else:
                self.offline.add(tp)
                self.lost(tp, record)
        if delta.brokers:
            event = self.brokers(image)
            for partition in self.partitions.values():
                if partition.is_leader and partition.replicated:
                    partition.step(event, self.now_ms())
                    self.settle(partition.topic_partition)

    def open(self, image: Image, tp: TopicPartition, topic_id: UUID) -> None:
        config = log_config(image.config(ResourceType.TOPIC, tp.topic), {})
        directory, found = self.directories.place(tp)
        if directory.offline is not None:
            return
        make = LogDirectory.open_log if found else create_log
        log = make(directory, tp, topic_id, config, now_ms=self.machine.wall_ms)
        self.partitions[tp] = Partition(
            log,
            self.node.node_id,
            high_watermark=directory.high_watermarks.get(tp, log.log_start_offset),
            lag_time_max_ms=self.node.history.lag_ms,
            listener=Listener(self, tp),
        )
        self.look(tp)

    def remove(self, tp: TopicPartition) -> None:
        """A replica is not to be here any more."""
        partition = self.partitions.pop(tp)
        self.wanted.pop(tp, None)
        self.streams.stop_following(tp)
        partition.resign()
        self.world.counts["replicas removed"] += 1
        self.checks.removed(self.node.node_id, tp)
        home, unique = self.directories.home(tp), self.unique()
        self.directories.forget(tp)
        self.attempt(partial(home.mark_deleted, partition.log, unique, self.machine.wall_ms))

    def unique(self) -> UUID:
        return UUID(int=self.world.random.getrandbits(128))

    def remove_strays(self, image: Image) -> None:
        """Logs of topics that were deleted, or that moved away, while no process was here."""
        for directory, entry in list(self.directories.scan()):
            tp = entry.topic_partition
            record = image.partition(tp.topic, tp.partition)
            mine = record is not None and record.topic_id == entry.topic_id
            if (
                directory.offline is not None
                or entry.is_delete
                or (mine and self.node.node_id in record.replicas)
            ):
                continue
            if directory.remove_unborn(tp):
                self.world.counts["creations interrupted"] += 1
                continue
            stray = directory.open_log(tp, None, LogConfig(), now_ms=self.machine.wall_ms)
            self.world.note(self.machine.name, f"removes {tp}, which is nobody's")
            self.world.counts["strays removed"] += 1
            directory.mark_deleted(stray, self.unique(), self.machine.wall_ms)

    def disk_error(self, error: MachineError) -> None:
        """A directory goes offline with its replicas; with the last one the process ends."""
        check_disk_error(error)
        directory = self.directories.of(error.path)
        if directory is None or directory.offline is not None:
            return
        self.world.note(self.machine.name, f"its log directory fails: {error}")
        directory.fail(error)
        for one in self.directories.all:
            one.forget_running()
        if not self.directories.online:
            self.machine.after_us(0, self.node.die_of, error)
            return
        self.world.counts["log directories offline"] += 1
        for tp in [tp for tp in self.partitions if self.directories.home(tp) is directory]:
            partition = self.partitions.pop(tp)
            self.wanted.pop(tp, None)
            self.offline.add(tp)
            partition.mark_offline(str(error))
            self.lost(tp, self.node.image.partition(tp.topic, tp.partition))

    def lost(self, tp: TopicPartition, record: PartitionRecord | None) -> None:
        """A replica here is offline: fetch it no more, leave its ISR, let another one lead."""
        self.streams.stop_following(tp)
        item = None if record is None else resignation(tp, record, self.node.node_id)
        if self.serving and item is not None:
            self.resigning[tp] = item
            self.machine.after_us(0, self.ask_isr)

    def attempt(self, action: Callable[[], None]) -> bool:
        """Do something on a disk; False: its directory failed, and others are there."""
        try:
            action()
        except MachineError as error:
            if len(self.directories.all) == 1:
                raise
            self.disk_error(error)
            return False
        return True

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
        self.settle(partition.topic_partition)

    def lead(self, partition: Partition, record: PartitionRecord) -> None:
        tp = partition.topic_partition
        self.streams.stop_following(tp)
        before = partition.leader_epoch
        ticket = partition.become_leader(
            record.leader_epoch, record.partition_epoch, record.isr, record.replicas,
            self.now_ms(), awaits_offer=self.awaits_offer,
        )  # fmt: skip
        partition.step(self.brokers(self.node.image), self.now_ms())
        if record.leader_epoch != before:
            self.world.note(self.machine.name, f"leads {tp}", f"in epoch {record.leader_epoch}")
        if ticket is not None:

            def run() -> None:
                if self.attempt(ticket.run):
                    self.machine.after_us(100, ticket.done)

            self.machine.after_us(self.world.between(*self.machine.disk_us), run)

    def follow(self, partition: Partition, record: PartitionRecord) -> None:
        news = partition.become_follower(
            record.leader, record.leader_epoch, record.partition_epoch, record.isr,
            record.replicas, self.now_ms(),
        )  # fmt: skip
        if record.leader == NO_LEADER:
            self.streams.stop_following(partition.topic_partition)
        elif news:
            self.streams.follow(partition, record.leader, record.leader_epoch)

    def resume(self, image: Image) -> None:
        first, self.serving, self.suspended = not self.serving, True, False
        for tp, partition in self.partitions.items():
            record = image.partition(tp.topic, tp.partition)
            if record is not None:
                self.take(partition, record)
            if not first:
                partition.resume()
        for tp in self.offline:
            self.lost(tp, image.partition(tp.topic, tp.partition))

    def suspend(self) -> None:
        self.suspended = True
        for partition in self.partitions.values():
            partition.suspend()

    def fetched(self, tp: TopicPartition, leader_epoch: int, agreed: bool) -> None:
        """An answer to a fetch was acted on."""

    # The ISR.

    def check_cut(self, tp: TopicPartition) -> None:
        """Nothing keeps a log from being cut here."""

    def perform(self, tp: TopicPartition, effect: Any) -> None:
        if isinstance(effect, ProposeIsr):
            self.wanted[tp] = None
            self.machine.after_us(0, self.ask_isr)
        elif isinstance(effect, Truncated):
            self.world.note(self.machine.name, f"cuts {tp} to {effect.log_end_offset}")
            home = self.directories.home(tp)
            self.attempt(partial(home.state_recovery_point, tp, effect.recovery_point))

    def ask_isr(self) -> None:
        """One call for all that is wanted, one at a time (``node/isr_changes``)."""
        if self.asking:
            return
        asking: dict[Partition, AlterIsrItem] = {}
        for tp in self.wanted:
            partition = self.partitions.get(tp)
            item = None if partition is None else partition.alter_isr_request()
            if partition is not None and item is not None:
                asking[partition] = item
        self.wanted.clear()
        resigning, self.resigning = self.resigning, {}
        if not asking and not resigning:
            return
        self.asking = True

        def answered(answer: Any) -> None:
            self.asking = False
            known = isinstance(answer, dict)
            for partition, item in asking.items():
                if known:
                    partition.alter_isr_completed(item, answer.get((item.topic_id, item.partition)))
                if partition.alter_isr_request() is not None:
                    self.wanted[partition.topic_partition] = None
                self.look(partition.topic_partition)
            if not known:
                self.resigning = {**resigning, **self.resigning}
            self.machine.after_ms(1 if known else 50, self.ask_isr)

        items = (*asking.values(), *resigning.values())
        request = (items, self.node.lifecycle.broker_epoch)
        self.node.ask_controller("alter_isrs", request, answered)

    # Followers here.

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
            partition = self.partitions.get(wanted.tp)
            if partition is None:
                continue
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
        data = self.read(found.slice)
        if data is None:
            return PartitionAnswer(tp, KAFKA_STORAGE_ERROR)
        return PartitionAnswer(
            tp, 0, found.high_watermark, found.last_stable_offset, found.log_start_offset,
            found.diverging, None, data,
        )  # fmt: skip

    def read(self, where: Any) -> bytes | None:
        """What a fetch found; None when its directory fails now."""
        found: list[bytes] = [b""]
        if where is not None and not self.attempt(
            lambda: found.append(self.machine.disk.pread(*where))
        ):
            return None
        return found[-1]

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
            if isinstance(error, OF_SEQUENCES):
                self.node.confirm(self._proven(partition, error, reply))
            else:
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
                self.flushes.flush(partition, end, lambda: self.acknowledge(tp, batch, reply))
            else:
                self.acks.append((tp, batch, reply))

        partition.when_committed(end, committed)
        self.settle(tp)

    def acknowledge(self, tp: TopicPartition, batch: batches.Batch, reply: Reply) -> None:
        self.acks.append((tp, batch, reply))
        self.settle(tp)

    def _proven(self, partition: Partition, error: KeptError, reply: Reply) -> Callable[..., None]:
        """What is final goes out if this node leads what it led when it said so."""
        epoch = partition.leader_epoch

        def then(confirmed: bool) -> None:
            if confirmed and partition.is_leader and partition.leader_epoch == epoch:
                reply(ProduceAnswer(type(error).__name__))
            else:
                reply(ProduceAnswer("NotLeaderOrFollower"))

        return then

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
        data = self.read(found.slice)
        if data is None:
            reply(ReadAnswer("KafkaStorageError"))
            return
        reply(ReadAnswer("", data, found.high_watermark, found.log_start_offset))

    def serve_delete_records(self, source: int, request: Any, reply: Reply) -> None:
        tp, offset = request
        partition = self.partitions.get(tp)
        if partition is None or not self.node.may_serve():
            reply(NotLeaderOrFollower(f"{tp}"))
            return
        try:
            reply(partition.delete_records(offset, self.machine.wall_ms))
        except KeptError as error:
            reply(error)
        self.settle(tp)

    # Upkeep.

    def upkeep(self) -> None:
        """The jobs of ``node/timers``, more often; checkpoints now and then."""
        for tp, partition in list(self.partitions.items()):
            if partition.offline is None:
                self.attempt(partial(self.keep, partition))
                self.settle(tp)
        for directory in self.directories.online:
            self.attempt(partial(self.purge, directory))
        for kind, offset_of in CHECKPOINTS.items():
            if self.world.chance(UPKEEP_MS / CHECKPOINT_MS):
                self.checkpoint(kind, offset_of)

    def keep(self, partition: Partition) -> None:
        """The jobs on one partition."""
        log = partition.log
        partition.tick(self.now_ms())
        partition.maybe_roll(self.machine.wall_ms)
        partition.retention(self.machine.wall_ms)
        partition.delete_expired(self.machine.wall_ms)
        if log.recovery_point < log.active_segment.base_offset:
            self.flushes.flush(partition, log.written_end_offset, nothing)

    def purge(self, directory: LogDirectory) -> None:
        """Remove what was deleted a while ago."""
        directory.purge(self.machine.wall_ms)

    def checkpoint(self, kind: Checkpoint, offset_of: OffsetOf) -> None:
        """Collect now, write in a thread: what is cut meanwhile is in the file all the same."""
        for directory in self.directories.online:
            changes = directory.changes
            offsets = self.collect(offset_of, directory)
            write = partial(directory.write_checkpoints, kind, offsets, changes)
            delay = self.world.between(*self.machine.disk_us)
            self.machine.after_us(delay, self.attempt, write)

    def collect(
        self, offset_of: OffsetOf, directory: LogDirectory | None = None
    ) -> dict[TopicPartition, int]:
        """What a checkpoint says of every partition, of those of one directory if given."""
        found = {
            tp: offset_of(partition)
            for tp, partition in self.partitions.items()
            if partition.offline is None and directory in (None, self.directories.home(tp))
        }
        return {tp: offset for tp, offset in found.items() if offset is not None}

    def close(self) -> None:
        """Stop in order."""
        for partition in self.partitions.values():
            partition.close(self.machine.wall_ms)
        for kind, offset_of in CHECKPOINTS.items():
            for directory in self.directories.online:
                directory.write_checkpoints(kind, self.collect(offset_of, directory))

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
        partition = self.partitions.get(tp)
        if partition is None or partition.offline is not None:
            return
        log = partition.log
        if self.node.history.assertions:
            partition.check_invariants()
        self.checks.look(
            self.node.node_id, self.node.process, tp, partition.topic_id,
            lambda start: batches.read(log, start),
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
