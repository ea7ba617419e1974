"""Server-sent events: what moves on the page, once a second at most, and only when it moved.

A stream is of the node, or of one partition as well: then its leader is called, every other
second if it is another node. An event is one JSON object; the page fetches what it draws when
something in it is another than before. While nothing moves a comment every :data:`COMMENT_S` keeps
proxies calm.

Limits: ``kept.console.max.streams`` at a time; one more is refused with 503, and the page asks
from time to time instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from msgspec import Struct

from kept.cluster.security.acls import AclResourceType
from kept.node.admin.records.record_tail import POLL_S
from kept.node.admin.results import OMITTED, Omitted, PartitionResult, Remote
from kept.node.http.json_results import dumps
from kept.node.http.route_access import DESCRIBE, may_describe_cluster
from kept.storage.errors import KeptError, RetriableError

if TYPE_CHECKING:
    from kept.node.admin.compaction.compaction_status import CompactionView
    from kept.node.admin.peer_http import PeerHttp
    from kept.node.admin.readiness import NodeHealth
    from kept.node.admin.records.record_tail import RecordTail
    from kept.node.admin.topic_lookup import TopicLookup
    from kept.node.compaction.lazy_cleaner import LazyCleaner
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.runtime.counters import Counters
    from kept.node.security.session import Session
    from kept.storage.types import TopicPartition

CONTENT_TYPE: Final = "text/event-stream; charset=utf-8"
POLL_ELSEWHERE_S: Final = 2.0
COMMENT_S: Final = 15.0
COMMENT: Final = b":\n\n"
MAX_RUNNING: Final = 50
"""Passes that are shown at once."""


class TooManyStreams(RetriableError):
    """There are as many streams as ``kept.console.max.streams`` allows."""


class PassProgress(PartitionResult, frozen=True):
    """A pass that runs; ``progress`` is 0 to 1."""

    progress: float


class CompactionPulse(Struct, frozen=True):
    """What moves in the compaction of a partition."""

    state: str
    progress: float | None
    dirty_ratio: float
    generation: str | None
    tombstones_pending: int
    behind: list[int]


class PartitionPulse(Struct, frozen=True):
    """What moves in a partition, as node ``node`` knows."""

    INLINED: ClassVar = frozenset({"compaction"})

    node: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    size_bytes: int
    segments: int
    compaction: CompactionPulse | Omitted = OMITTED


class NodePulse(Struct, frozen=True, kw_only=True):
    """What moves on a node; its totals for those who may describe the cluster."""

    image: int
    controller_id: int
    term: int
    records_in: int | Omitted = OMITTED
    bytes_in: int | Omitted = OMITTED
    bytes_out: int | Omitted = OMITTED
    compactions: int | Omitted = OMITTED
    running: list[PassProgress]
    partition: PartitionPulse | Remote | Omitted | None = OMITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulses:
    """What moves on one node; cheap to collect."""

    metadata: MetadataLog
    counters: Counters
    cleaner: LazyCleaner
    lookup: TopicLookup
    compaction: CompactionView

    def of_node(
        self,
        session: Session,
        partition: PartitionPulse | Remote | Omitted | None = OMITTED,
    ) -> NodePulse:
        """What moves on the node and ``session`` may see, with a ``partition`` that is looked at as
        well.
        """
        metadata, counters = self.metadata, self.counters
        running = list(self.cleaner.started.running.items())[:MAX_RUNNING]
        totals: dict[str, int] = {}
        sees_all = may_describe_cluster(session)
        if sees_all:
            totals = {
                "records_in": counters.records_in,
                "bytes_in": counters.bytes_in,
                "bytes_out": counters.bytes_out,
                "compactions": counters.compactions,
            }
        return NodePulse(
            image=metadata.image.index,
            controller_id=-1 if metadata.leader_id is None else metadata.leader_id,
            term=metadata.raft_node.term,
            running=[
                PassProgress(*tp, run.progress)
                for tp, run in running
                if sees_all or session.may(DESCRIBE, AclResourceType.TOPIC, tp.topic, audited=False)
            ],
            partition=partition,
            **totals,
        )

    def of_partition(self, tp: TopicPartition) -> PartitionPulse | None:
        """What moves in a partition, if it is here."""
        hosted = self.lookup.replica_or_none(tp)
        if hosted is None:
            return None
        log, status = hosted.partition.log, self.compaction.status_of(tp)
        compaction: CompactionPulse | Omitted = OMITTED
        if status is not None:
            compaction = CompactionPulse(
                state=status.state,
                progress=status.progress,
                dirty_ratio=status.dirty_ratio,
                generation=status.generation,
                tombstones_pending=status.tombstones_pending,
                behind=[replica.replica for replica in status.replicas if replica.behind],
            )
        return PartitionPulse(
            node=self.lookup.node_id,
            log_start_offset=log.log_start_offset,
            high_watermark=hosted.partition.high_watermark,
            log_end_offset=log.log_end_offset,
            size_bytes=log.size_bytes,
            segments=len(log.segments),
            compaction=compaction,
        )

    def leader_elsewhere(self, tp: TopicPartition) -> int | None:
        """The other node that leads a partition, if one does."""
        topic = self.metadata.image.topics.get(tp.topic)
        if topic is None or tp.partition >= len(topic.partitions):
            return None
        leader = topic.partitions[tp.partition].leader
        return None if leader in (self.lookup.node_id, -1) else leader


@dataclass(eq=False, repr=False, kw_only=True)
class EventStreams:
    """The streams of one node: of what moves, and tails of topics."""

    config: LiveConfig
    health: NodeHealth
    pulses: Pulses
    peer_http: PeerHttp

    def __post_init__(self) -> None:
        self._open = 0

    def admit(self) -> None:
        """Raises TooManyStreams."""
        limit = self.config.current.console_max_streams
        if self._open >= limit:
            raise TooManyStreams(f"{limit} streams are open; see kept.console.max.streams")

    async def follow(self, tail: RecordTail) -> AsyncIterator[bytes]:
        """The records of a tail as they come, until the reader leaves or the topic goes. While the
        reader takes nothing, nothing is read.
        """
        self._open += 1
        try:
            yield _event(dumps(await tail.begin()))
            quiet_s = 0.0
            while self.health.started:
                await asyncio.sleep(POLL_S)
                quiet_s += POLL_S
                event = await tail.poll()
                if event is None:
                    return
                if event.records or event.left_out:
                    quiet_s = 0.0
                    yield _event(dumps(event))
                elif quiet_s >= COMMENT_S:
                    quiet_s = 0.0
                    yield COMMENT
        finally:
            self._open -= 1
            tail.close()

    async def stream(self, session: Session, tp: TopicPartition | None) -> AsyncIterator[bytes]:
        """The events that ``session`` may see, until the reader leaves."""
        self._open += 1
        try:
            sent, quiet_s = b"", 0.0
            while self.health.started:
                poll_s = POLL_S
                partition: PartitionPulse | Remote | Omitted | None = OMITTED
                if tp is not None:
                    partition, poll_s = await self._partition(tp)
                text = dumps(self.pulses.of_node(session, partition))
                if text != sent:
                    sent, quiet_s = text, 0.0
                    yield _event(text)
                elif quiet_s >= COMMENT_S:
                    quiet_s = 0.0
                    yield COMMENT
                await asyncio.sleep(poll_s)
                quiet_s += poll_s
        finally:
            self._open -= 1

    async def _partition(self, tp: TopicPartition) -> tuple[PartitionPulse | Remote | None, float]:
        leader = self.pulses.leader_elsewhere(tp)
        if leader is None:
            return self.pulses.of_partition(tp), POLL_S
        query = {"topic": tp.topic, "partition": str(tp.partition)}
        try:
            pulse: Mapping[str, Any] | None = await self.peer_http.get(
                leader, "/api/v1/pulse", query
            )
        except KeptError:
            # The node is gone or on its way: the page shows what is known here, and so does this.
            return self.pulses.of_partition(tp), POLL_ELSEWHERE_S
        return None if pulse is None else Remote(pulse), POLL_ELSEWHERE_S


def _event(text: bytes) -> bytes:
    return b"data: " + text + b"\n\n"
