"""Throughput, sizes and lag of the last hour, sampled by the node itself: no Prometheus is needed.

Every :data:`INTERVAL_MS`, at its multiples, so that samples of several nodes belong together, a
node looks at the partitions that it leads: what was appended since, and how large they are; at what
it sent to consumers of each topic; and at the groups that it coordinates: how far their commits are
behind. Samples are numbered by a clock that nobody sets, and have the times that the wall clock
says now. A partition at rest is one comparison, and a topic has samples only since something was
appended to it, or read, within the hour.

What is kept is :data:`SAMPLES` samples of the node, of up to :data:`TOPICS` topics and of up to
:data:`GROUPS` groups: 5 KB a topic, 3 KB a group. It is gone when the process ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from kept.client.admin.group_lag import group_lag, partition_lag
from kept.node.admin.history.time_series import NO_SAMPLE, TimeSeries
from kept.node.runtime.clock import elapsed_ms
from kept.node.runtime.tasks import PeriodicTask
from kept.node.runtime.time_slices import Pace
from kept.storage.errors import KeptError
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from uuid import UUID

    from kept.cluster.metadata.image import TopicImage
    from kept.node.coordinator.groups.coordinator import GroupCoordinator
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.runtime import Runtime
    from kept.storage.log.log import Log

INTERVAL_MS: Final = 15_000
EARLY_MS: Final = 1_000
"""A timer may be early by less."""
SAMPLES: Final = 240
TOPICS: Final = 500
GROUPS: Final = 200
COMMITS: Final = 20_000
"""Committed offsets that a sample looks at; a group that has more than are left is left out."""
UNKNOWN: Final = -1

Ends = Callable[[Iterable[TopicPartition]], Awaitable[Mapping[TopicPartition, int]]]


class Throughput(NamedTuple):
    """A sample: what came in and went out in the interval before ``at_ms``, and the bytes there
    are.
    """

    at_ms: int
    bytes_in: float
    records_in: float
    bytes_out: float
    size_bytes: int


class Lag(NamedTuple):
    """A sample of a group; ``lag`` is None where no high watermark was known."""

    at_ms: int
    lag: int | None
    partitions_unknown: int


class _Mark(NamedTuple):
    """Where a log was at the last sample."""

    end_offset: int
    active_offset: int
    active_bytes: int


EMPTY: Final = _Mark(0, 0, 0)
"""Where a log was that is new. Followers' logs are marked, too: they may lead next time."""


class _Topic:
    """What a sample adds up of a topic."""

    __slots__ = ("bytes_in", "bytes_out", "records_in", "size_bytes")

    def __init__(self) -> None:
        self.bytes_in = self.records_in = self.bytes_out = self.size_bytes = 0

    @property
    def is_active(self) -> bool:
        """Whether something was appended or sent."""
        return bool(self.records_in or self.bytes_out)


class ActivityHistory:
    """The samples of one node. ``ends`` are high watermarks that other nodes are asked for."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        metadata: MetadataLog,
        identity: NodeIdentity,
        table: ReplicaTable,
        counters: Counters,
        groups: GroupCoordinator,
        ends: Ends,
    ) -> None:
        self._runtime = runtime
        self._metadata = metadata
        self._identity = identity
        self._table = table
        self._counters = counters
        self._groups = groups
        self._ends = ends
        self._marks: dict[TopicPartition, _Mark] = {}
        self._node_samples: TimeSeries | None = None
        self._bytes_out: dict[UUID, int] = {}
        """What had been sent of each topic at the last sample."""
        self._known: Mapping[UUID, TopicImage] = {}
        """Topics at the last sample."""
        self._ahead_ms = runtime.now_ms() - elapsed_ms()
        """Of the clock that numbers samples the wall clock was so far when the node started."""
        self._counted = (0, 0, 0)
        self._topic_samples: dict[str, TimeSeries] = {}
        self._lag_samples: dict[str, TimeSeries] = {}
        self.groups_left_out = 0
        """Groups of this node whose lag the last sample has no room for."""
        self.sampling = PeriodicTask(
            runtime.loop, self.sample, self._until_next_s, failure=NO_SAMPLE
        )

    def _until_next_s(self) -> float:
        return (INTERVAL_MS - self._steady_ms() % INTERVAL_MS) / 1000

    def _steady_ms(self) -> int:
        """The wall clock's time as if nobody had set it since the node started."""
        return elapsed_ms() + self._ahead_ms

    def _clock_was_set_by(self) -> int:
        """By so many ms the wall clock was set since the node started, in whole intervals."""
        return INTERVAL_MS * round((self._runtime.now_ms() - self._steady_ms()) / INTERVAL_MS)

    async def sample(self) -> None:
        """Take one sample of everything; the second within an interval takes none."""
        number = (self._steady_ms() + EARLY_MS) // INTERVAL_MS
        if self._node_samples is not None and number < self._node_samples.next:
            return
        await self._sample_logs(number)
        await self._sample_groups(number)

    # Logs.

    async def _sample_logs(self, number: int) -> None:
        topics_now = self._metadata.image.topics_by_id
        pace, size_bytes, is_first = Pace(), 0, self._node_samples is None
        by_topic: dict[str, _Topic] = {}
        marks: dict[TopicPartition, _Mark] = {}
        for tp, hosted in list(self._table.replicas.items()):
            await pace.checkpoint()
            if self._table.replicas.get(tp) is not hosted:
                continue
            log, leads = hosted.partition.log, hosted.partition.is_leader
            before = self._marks.get(tp) or self._first_mark(tp, log)
            topic = by_topic.get(tp.topic)
            if leads:
                if topic is None:
                    topic = by_topic[tp.topic] = _Topic()
                topic.size_bytes += log.size_bytes
                size_bytes += log.size_bytes
            if before.end_offset == log.log_end_offset:
                marks[tp] = before
                continue
            marks[tp] = _mark(log)
            if leads and topic is not None and not is_first:
                topic.records_in += max(0, log.log_end_offset - before.end_offset)
                topic.bytes_in += _appended_bytes(log, before)
        await self._add_bytes_out(by_topic, is_first)
        self._marks, self._known = marks, topics_now
        self._add_node(number, size_bytes)
        self._add_topics(number, by_topic)

    async def _add_bytes_out(self, by_topic: dict[str, _Topic], is_first: bool) -> None:
        """What was sent of each topic since the last sample, also by a replica that does not
        lead.
        """
        sent: dict[UUID, int] = {}
        pace = Pace()
        for topic in list(self._table.by_name.values()):
            await pace.checkpoint()
            if not topic.bytes_out:
                continue
            sent[topic.topic_id] = topic.bytes_out
            since = topic.bytes_out - self._bytes_out.get(topic.topic_id, 0)
            if since > 0 and not is_first:
                by_topic.setdefault(topic.name, _Topic()).bytes_out = since
        self._bytes_out = sent

    def _first_mark(self, tp: TopicPartition, log: Log) -> _Mark:
        """From where a log counts that was not here at the last sample: its present end, where its
        partition is older than that.
        """
        topic = self._metadata.image.topics.get(tp.topic)
        known = None if topic is None else self._known.get(topic.topic_id)
        if topic is None or (known is not None and tp.partition < len(known.partitions)):
            return _mark(log)
        return EMPTY

    def _add_node(self, number: int, size_bytes: int) -> None:
        counters = self._counters
        now = (counters.bytes_in, counters.records_in, counters.bytes_out)
        since = [new - old for new, old in zip(now, self._counted, strict=True)]
        self._counted = now
        if self._node_samples is None:
            self._node_samples, since = TimeSeries(number, "fffq", UNKNOWN), [0, 0, 0]
        self._node_samples.add(number, (*since, size_bytes), SAMPLES)

    def _add_topics(self, number: int, by_topic: Mapping[str, _Topic]) -> None:
        for name, series in list(self._topic_samples.items()):
            if name not in by_topic:  # it is not led here any more, or deleted
                if series.next <= number - SAMPLES:
                    del self._topic_samples[name]
            elif not by_topic[name].is_active and not any(map(any, series.columns[1:3])):
                del self._topic_samples[name]  # nothing for an hour: its size alone says all
        for name, topic in by_topic.items():
            if name not in self._topic_samples:
                if not topic.is_active or len(self._topic_samples) >= TOPICS:
                    continue
                self._topic_samples[name] = TimeSeries(number, "fffq", UNKNOWN)
            values = (topic.bytes_in, topic.records_in, topic.bytes_out, topic.size_bytes)
            self._topic_samples[name].add(number, values, SAMPLES)

    def of_node(self) -> list[Throughput]:
        """The samples of this node, the oldest first."""
        if self._node_samples is None:
            return []
        set_by = self._clock_was_set_by()
        return [
            Throughput(
                number * INTERVAL_MS + set_by, values[0], values[1], values[2], int(values[3])
            )
            for number, values in self._node_samples.items()
        ]

    def of_topic(self, topic: str) -> list[Throughput]:
        """The samples of a topic, as far as this node leads it or sent of it. While nothing was
        appended and nothing sent there are none but those of its size.
        """
        series, node = self._topic_samples.get(topic), self._node_samples
        led = [
            hosted.partition
            for tp, hosted in self._table.replicas.items()
            if tp.topic == topic and hosted.partition.is_leader
        ]
        if node is None or (series is None and not led):
            return []
        known = {} if series is None else dict(series.items())
        size_bytes = sum(partition.log.size_bytes for partition in led)
        if known:
            size_bytes = int(next(iter(known.values()))[3])
        samples, set_by = [], self._clock_was_set_by()
        for number, _ in node.items():
            if number in known:
                bytes_in, records_in, bytes_out, size = known[number]
                size_bytes = int(size)
            elif series is not None and number >= series.next and not led:
                break
            else:
                bytes_in = records_in = bytes_out = 0.0
                if series is not None and series.first <= number < series.next:
                    size_bytes = 0  # another node led it then
            at_ms = number * INTERVAL_MS + set_by
            samples.append(Throughput(at_ms, bytes_in, records_in, bytes_out, size_bytes))
        return samples

    # Groups.

    async def _sample_groups(self, number: int) -> None:
        commits, left_out = self._commits_of_whole_groups()
        ends, pace = await self._known_ends(commits), Pace()
        by_group: dict[str, list[int | None]] = {}
        for group, topic, partition, offset in commits:
            await pace.checkpoint()
            lag = partition_lag(offset, ends.get(TopicPartition(topic, partition)))
            by_group.setdefault(group, []).append(lag)
        for name, series in list(self._lag_samples.items()):
            if name not in by_group and series.next <= number - SAMPLES:
                del self._lag_samples[name]
        for name, lags in by_group.items():
            if name not in self._lag_samples:
                if len(self._lag_samples) >= GROUPS:
                    left_out += 1
                    continue
                self._lag_samples[name] = TimeSeries(number, "qq", UNKNOWN)
            series = self._lag_samples[name]
            lag, unknown = group_lag(lags)
            # The first column tells what was sampled; so the one that may be unknown is second.
            series.add(number, (unknown, UNKNOWN if lag is None else lag), SAMPLES)
        self.groups_left_out = left_out

    def _commits_of_whole_groups(self) -> tuple[list[tuple[str, str, int, int]], int]:
        """(group, topic, partition, offset) of groups as far as :data:`COMMITS` reach, each with
        all that it committed, but for topics that had the names before, and how many groups do not
        fit.
        """
        commits: list[tuple[str, str, int, int]] = []
        left_out = 0
        for group, topics in self._groups.committed_by_group():
            if len(commits) + sum(map(len, topics.values())) > COMMITS:
                left_out += 1
                continue
            for topic, partitions in topics.items():
                for partition, stored in partitions.items():
                    if not self._groups.is_of_namesake(topic, stored):
                        commits.append((group, topic, partition, stored.value.offset))
        return commits, left_out

    async def _known_ends(
        self, commits: Iterable[tuple[str, str, int, int]]
    ) -> dict[TopicPartition, int]:
        """High watermarks: of replicas in sync here, else as their leaders say."""
        topics, node_id = self._metadata.image.topics, self._identity.node_id
        ends: dict[TopicPartition, int] = {}
        elsewhere: set[TopicPartition] = set()
        pace = Pace()
        for _, name, number, _ in commits:
            await pace.checkpoint()
            tp, topic = TopicPartition(name, number), topics.get(name)
            if topic is None or number >= len(topic.partitions):
                continue
            record, here = topic.partitions[number], self._table.partitions.get(tp)
            if here is not None and node_id in record.isr and record.leader >= 0:
                ends[tp] = here.high_watermark
            elif record.leader >= 0 and record.leader != node_id:
                elsewhere.add(tp)
        if elsewhere:
            with suppress(KeptError):  # they are unknown in this sample
                ends.update(await self._ends(elsewhere))
        return ends

    def of_group(self, group: str) -> list[Lag]:
        """The samples of a group that this node coordinates, the oldest first."""
        series = self._lag_samples.get(group)
        if series is None:
            return []
        set_by = self._clock_was_set_by()
        return [
            Lag(number * INTERVAL_MS + set_by, None if lag == UNKNOWN else int(lag), int(unknown))
            for number, (unknown, lag) in series.items()
        ]


def _mark(log: Log) -> _Mark:
    active = log.active_segment
    return _Mark(log.log_end_offset, active.base_offset, active.size_bytes)


def _appended_bytes(log: Log, before: _Mark) -> int:
    """Bytes that were appended to a log since; segments may have been rolled meanwhile."""
    size_bytes = 0
    for segment in reversed(log.segments):
        if segment.base_offset <= before.active_offset:
            if segment.base_offset == before.active_offset:
                size_bytes += max(0, segment.size_bytes - before.active_bytes)
            break
        size_bytes += segment.size_bytes
    return size_bytes
