"""Replicas of one partition on nodes with simulated disks, joined by real cores.

``Node`` is what the node will be around the cores, in forty lines: a partition, a fetcher, and a
server of fetch sessions. Nothing happens but by a call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from kept.replication.events import EligibleBrokersChanged
from kept.replication.fetch_messages import (
    FENCED_LEADER_EPOCH,
    FETCH_SESSION_ID_NOT_FOUND,
    INVALID_FETCH_SESSION_EPOCH,
    KAFKA_STORAGE_ERROR,
    NOT_LEADER_OR_FOLLOWER,
    OFFSET_OUT_OF_RANGE,
    UNKNOWN_LEADER_EPOCH,
    FetchRequest,
    FetchResponse,
    OffsetsRequest,
    OffsetsResponse,
    PartitionRequest,
    PartitionResponse,
)
from kept.replication.fetcher import FetcherCore, FetchResponseReceived, OffsetsListed
from kept.replication.follower_replica import perform_all
from kept.replication.partition import Partition
from kept.storage import errors
from kept.storage.records import headers
from tests.support import partitions as tools
from tests.support.listener import RecordedListener
from tests.support.simulated_disk import SimulatedDisk

SESSION_IDS = count(1)
"""Drawn at random by real servers: one that restarts must not know sessions of its former life."""

FIRST_EPOCH = 1
"""Broker epoch of every node, as leaders have it from the image."""

CODES = {
    errors.OffsetOutOfRange: OFFSET_OUT_OF_RANGE,
    errors.FencedLeaderEpoch: FENCED_LEADER_EPOCH,
    errors.UnknownLeaderEpoch: UNKNOWN_LEADER_EPOCH,
    errors.NotLeaderOrFollower: NOT_LEADER_OR_FOLLOWER,
    errors.KafkaStorageError: KAFKA_STORAGE_ERROR,
}


@dataclass
class Session:
    epoch: int = 1
    wanted: dict = field(default_factory=dict)


class Node:
    """One node; ``epoch`` is its broker epoch."""

    def __init__(self, node_id: int, disk: SimulatedDisk | None = None) -> None:
        if disk is None:
            disk = SimulatedDisk(seed=node_id)
            disk.mkdir("/d")
            disk.fsync_dir("/")
        self.node_id = node_id
        self.disk = disk
        self.epoch = FIRST_EPOCH
        self.effects: list = []
        self.checkpoint: dict[str, int] = {}
        self.sessions: dict[int, Session] = {}
        self.fetcher: FetcherCore | None = None
        self.high_watermark = 0
        self.open()

    def open(self, **known) -> None:
        log = tools.open_log(self.disk, **known)
        self.partition = Partition(
            log,
            self.node_id,
            high_watermark=self.high_watermark,
            listener=RecordedListener(self.effects),
        )

    @property
    def tp(self):
        return self.partition.topic_partition

    # Roles.

    def lead(self, epoch: int, replicas, isr=None, version: int = 0, now_ms: int = 0) -> None:
        self.fetcher = None
        ticket = self.partition.become_leader(epoch, version, isr or replicas, replicas, now_ms)
        if ticket is not None:
            ticket.run()
            ticket.done()
        brokers = tuple((replica, FIRST_EPOCH) for replica in replicas)
        self.partition.step(EligibleBrokersChanged(frozenset(), brokers), 0)

    def follow(self, leader: int, epoch: int, replicas, isr=None, version: int = 0) -> None:
        partition = self.partition
        partition.become_follower(leader, epoch, version, isr or replicas, replicas, 0)
        if self.fetcher is None or self.fetcher.leader_id != leader:
            self.fetcher = FetcherCore(leader)
        self.fetcher.add(self.tp, partition.topic_id, partition.follower, epoch)

    # Serving fetches.

    def serve(self, request: FetchRequest, replica_id: int, broker_epoch: int, now_ms: int):
        if isinstance(request, OffsetsRequest):
            return tuple(self._offsets(*asked) for asked in request.partitions)
        if request.session_epoch == 0:
            self.sessions.pop(request.session_id, None)
            session_id = next(SESSION_IDS)
            session = self.sessions[session_id] = Session(0)
        else:
            session_id = request.session_id
            known = self.sessions.get(session_id)
            if known is None:
                return FetchResponse(FETCH_SESSION_ID_NOT_FOUND)
            session = known
            if session.epoch != request.session_epoch:
                return FetchResponse(INVALID_FETCH_SESSION_EPOCH)
        session.epoch += 1
        for tp, _ in request.forgotten:
            session.wanted.pop(tp, None)
        session.wanted.update({wanted.tp: wanted for wanted in request.partitions})
        answers = tuple(
            self._answer(wanted, replica_id, broker_epoch, now_ms)
            for wanted in session.wanted.values()
        )
        return FetchResponse(0, session_id, answers)

    def _answer(self, wanted: PartitionRequest, replica_id, broker_epoch, now_ms):
        partition = self.partition
        try:
            found = partition.fetch(
                wanted.fetch_offset,
                wanted.max_bytes,
                current_leader_epoch=wanted.leader_epoch,
                last_fetched_epoch=wanted.last_fetched_epoch,
                replica_id=replica_id,
                broker_epoch=broker_epoch,
                now_ms=now_ms,
            )
        except errors.KeptError as error:
            hint = (partition.leader_id, partition.leader_epoch)
            return PartitionResponse(wanted.tp, CODES[type(error)], current_leader=hint)
        data = b"" if found.slice is None else partition.log.disk.pread(*found.slice)
        return PartitionResponse(
            wanted.tp,
            0,
            found.high_watermark,
            found.last_stable_offset,
            found.log_start_offset,
            found.diverging,
            None,
            memoryview(data),
        )

    def _offsets(self, tp, _topic_id, epoch) -> OffsetsResponse:
        try:
            end = self.partition.list_offset(-1, None, epoch).offset
            return OffsetsResponse(tp, 0, self.partition.log_start_offset, end)
        except errors.KeptError as error:
            return OffsetsResponse(tp, CODES[type(error)])

    # Fetching.

    def take(self, request, answer, now_ms: int) -> None:
        fetcher = self.fetcher
        if fetcher is None:
            return
        if isinstance(request, OffsetsRequest):
            work = fetcher.step(OffsetsListed(request, answer), now_ms)
        else:
            work = fetcher.step(FetchResponseReceived(request, answer), now_ms)
        perform_all(fetcher, work, {tp: self.partition for tp, _ in work}, now_ms, now_ms)
        fetcher.check_invariants()
        self.partition.check_invariants()

    def fetch(self, leader: Node, now_ms: int = 0, rounds: int = 1) -> None:
        """Whole rounds of request and answer."""
        for _ in range(rounds):
            assert self.fetcher is not None
            request = self.fetcher.next_request(now_ms)
            if request is None:
                return
            self.take(request, leader.serve(request, self.node_id, self.epoch, now_ms), now_ms)

    # Looking at it.

    def batches(self) -> list[tuple[int, int, int]]:
        """(base offset, next offset, leader epoch) of all batches."""
        log = self.partition.log
        found: list[tuple[int, int, int]] = []
        for segment in log.segments:
            data = segment.read(0, segment.size_bytes)
            found += [
                (header.base_offset, header.next_offset, header.partition_leader_epoch)
                for _, header in headers(data)
            ]
        return found
