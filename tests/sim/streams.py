"""Whom a simulated node follows: the twin of ``node/fetching``, with its fetcher cores.

One stream to a leader: it flushes what must be durable, asks, performs the answer on the logs, and
asks again. New partitions do not wait long behind a request that the leader holds.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kept.cluster.metadata.records import NO_LEADER
from kept.replication.fetch_messages import FetchAnswer, FetchRequest, OffsetsRequest
from kept.replication.fetcher import (
    NEVER,
    FetchAnswered,
    FetcherCore,
    FetchSettings,
    OffsetsListed,
    RequestAbandoned,
    RequestFailed,
)
from kept.replication.follower_replica import perform_all
from kept.replication.partition import Partition
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from tests.sim.replicas import Replicas

FETCH = FetchSettings(max_wait_ms=200)
PATIENCE_MS = 1500
"""How long an answer may take."""


class Streams:
    """See the module."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.node = replicas.node
        self.machine = replicas.machine
        self.cores: dict[int, FetcherCore] = {}
        self.where: dict[TopicPartition, int] = {}
        self.flushing: set[FetcherCore] = set()
        self.serials: dict[int, int] = {}

    def now_ms(self) -> int:
        return self.machine.monotonic_ms

    # Membership.

    def follow(self, partition: Partition, leader: int, leader_epoch: int) -> None:
        """Fetch a partition from that leader, from now on."""
        tp = partition.topic_partition
        if self.where.get(tp) != leader:
            self.stop_following(tp)
        if leader == NO_LEADER:
            return
        core = self.cores.setdefault(leader, FetcherCore(leader, FETCH))
        self.where[tp] = leader
        core.add(tp, partition.topic_id, partition.follower, leader_epoch, now_ms=self.now_ms())
        self.lose_patience(core)
        self.run(core)

    def stop_following(self, tp: TopicPartition) -> None:
        """Fetch it no more."""
        leader = self.where.pop(tp, None)
        if leader is not None:
            self.cores[leader].remove(tp)
            if not len(self.cores[leader]):
                del self.cores[leader]

    def lose_patience(self, core: FetcherCore) -> None:
        """New partitions wait behind a request that the leader may hold: not for long."""
        if core.impatient_at_ms < NEVER:
            wait_ms = max(0, core.impatient_at_ms - self.now_ms())
            self.machine.after_ms(wait_ms, self.give_up, core, core.in_flight)

    def give_up(self, core: FetcherCore, request: FetchRequest | OffsetsRequest) -> None:
        """End the wait for an answer; when it comes, nobody hears it."""
        if core.in_flight is request and isinstance(request, FetchRequest):
            core.step(RequestAbandoned(request), self.now_ms())
            self.run(core)

    # Work.

    def run(self, core: FetcherCore) -> None:
        """Go on with a stream, if it is still there."""
        leader = core.leader_id
        if self.cores.get(leader) is not core or core in self.flushing:
            return
        unflushed = core.unflushed() if core.in_flight is None else []
        if unflushed:
            self.flush(core, unflushed)
            return
        now = self.now_ms()
        request = core.next_request(now)
        if request is None:
            wake = core.wake_at_ms()
            if wake < NEVER:
                serial = self.serials[leader] = self.serials.get(leader, 0) + 1
                self.machine.after_ms(max(1, wake - now), self.wake, core, serial)
            return
        what = "fetch" if isinstance(request, FetchRequest) else "offsets"
        self.machine.network.call(
            self.node.node_id, leader, what, (request, self.node.lifecycle.broker_epoch),
            lambda answer: self.answered(core, request, answer), PATIENCE_MS,
        )  # fmt: skip

    def flush(self, core: FetcherCore, unflushed: list[TopicPartition]) -> None:
        """``flush.messages``: the leader may count only what is durable here."""
        self.flushing.add(core)
        waiting = set(unflushed)

        def flushed(tp: TopicPartition) -> None:
            waiting.discard(tp)
            if not waiting:
                self.flushing.discard(core)
                self.machine.after_us(0, self.run, core)

        for tp in unflushed:
            partition = self.replicas.partitions[tp]
            end = partition.log_end_offset
            go_on = partial(flushed, tp)
            self.replicas.flushes.flush(partition, end, go_on, go_on)

    def answered(
        self, core: FetcherCore, request: FetchRequest | OffsetsRequest, answer: Any
    ) -> None:
        now = self.now_ms()
        if isinstance(request, FetchRequest) and isinstance(answer, FetchAnswer):
            work = core.step(FetchAnswered(request, answer), now)
        elif isinstance(request, OffsetsRequest) and isinstance(answer, tuple):
            work = core.step(OffsetsListed(request, answer), now)
        else:
            core.step(RequestFailed(request), now)
            work = ()
        perform_all(core, work, self.replicas.partitions, now, self.machine.wall_ms)
        for tp, _ in work:
            follower = core.core(tp)
            if follower is not None:
                self.replicas.fetched(tp, follower.leader_epoch, follower.agreed)
            self.replicas.look(tp)
        if self.node.history.assertions:
            core.check_invariants()
        self.machine.after_us(0, self.run, core)

    def wake(self, core: FetcherCore, serial: int) -> None:
        if self.serials.get(core.leader_id) == serial:
            self.run(core)
