"""The last hour of the whole cluster: samples of all nodes (:mod:`.activity_history`) added up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from kept.node.admin.history.activity_history import INTERVAL_MS, SAMPLES
from kept.node.admin.results import Unanswered
from kept.node.runtime.tasks import gather_or_cancel
from kept.storage.errors import KeptError

if TYPE_CHECKING:
    from kept.node.admin.history.activity_history import ActivityHistory, Throughput
    from kept.node.admin.peer_http import PeerHttp
    from kept.node.admin.topic_lookup import TopicLookup
    from kept.node.metadata.metadata_log import MetadataLog

THROUGHPUT: Final = "/api/v1/history/throughput"
LAG: Final = "/api/v1/history/lag"
CALL_S: Final = 5.0
_SECONDS: Final = INTERVAL_MS / 1000


class ThroughputSample(Struct, frozen=True):
    """Rates in the interval before ``at_ms``."""

    at_ms: int
    bytes_in_per_second: float
    records_in_per_second: float
    bytes_out_per_second: float
    size_bytes: int


class ThroughputHistory(Struct, frozen=True):
    """Samples of a topic or of all, added up over ``nodes``, the oldest first."""

    topic: str | None
    interval_ms: int
    samples: list[ThroughputSample]
    nodes: list[int]
    unanswered: list[Unanswered]


class LagSample(Struct, frozen=True):
    """The lag of a group at a time."""

    at_ms: int
    lag: int | None
    partitions_unknown: int


class LagHistory(Struct, frozen=True):
    """Samples of a group, the oldest first. ``groups_left_out``: so many groups of the nodes that
    answered were not in the last sample, which has room for so many groups and commits.
    """

    group: str
    interval_ms: int
    samples: list[LagSample]
    groups_left_out: int
    unanswered: list[Unanswered]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityView:
    """Adds up the samples of all nodes."""

    metadata: MetadataLog
    lookup: TopicLookup
    history: ActivityHistory
    peer_http: PeerHttp

    async def throughput(self, topic: str | None, *, here: bool) -> ThroughputHistory:
        """Of a topic or of the cluster; with ``here`` this node's samples alone. Raises
        UnknownTopicOrPartition.
        """
        if topic is not None:
            self.lookup.topic(topic)
        own = self.history.of_node() if topic is None else self.history.of_topic(topic)
        by_node = [[_sample(one) for one in own]]
        nodes = [self.lookup.node_id]
        unanswered: list[Unanswered] = []
        query = {} if topic is None else {"topic": topic}
        if not here:
            answers, unanswered = await self._from_others(THROUGHPUT, query)
            for node, answer in answers.items():
                nodes.append(node)
                by_node.append([ThroughputSample(**one) for one in answer["samples"]])
        return ThroughputHistory(
            topic=topic,
            interval_ms=INTERVAL_MS,
            samples=_added_up(by_node)[-SAMPLES:],
            nodes=sorted(nodes),
            unanswered=unanswered,
        )

    async def lag(self, group: str, *, here: bool) -> LagHistory:
        """Of a group: its coordinator's samples, and those of coordinators before."""
        samples = {one.at_ms: LagSample(*one) for one in self.history.of_group(group)}
        unanswered: list[Unanswered] = []
        left_out = self.history.groups_left_out
        if not here:
            answers, unanswered = await self._from_others(LAG, {"group": group})
            for answer in answers.values():
                left_out += answer["groups_left_out"]
                for one in answer["samples"]:
                    samples[one["at_ms"]] = LagSample(**one)
        ordered = [samples[at_ms] for at_ms in sorted(samples)][-SAMPLES:]
        return LagHistory(group, INTERVAL_MS, ordered, left_out, unanswered)

    async def _from_others(
        self, path: str, query: Mapping[str, str]
    ) -> tuple[dict[int, Any], list[Unanswered]]:
        """What the other nodes that take part answer, and who does not and why."""
        brokers = self.metadata.image.brokers
        others = sorted(
            node
            for node, broker in brokers.items()
            if node != self.lookup.node_id and not broker.fenced
        )
        answers: dict[int, Any] = {}
        unanswered: list[Unanswered] = []

        async def ask(node: int) -> None:
            try:
                answers[node] = await self.peer_http.get(node, path, query, CALL_S)
            except KeptError as error:
                unanswered.append(Unanswered(node, error.client_message))

        await gather_or_cancel(ask(node) for node in others)
        unanswered += [
            Unanswered(node, f"node {node} takes no part now")
            for node, broker in brokers.items()
            if broker.fenced
        ]
        return answers, sorted(unanswered, key=lambda one: one.node)


def _sample(one: Throughput) -> ThroughputSample:
    return ThroughputSample(
        at_ms=one.at_ms,
        bytes_in_per_second=round(one.bytes_in / _SECONDS, 1),
        records_in_per_second=round(one.records_in / _SECONDS, 2),
        bytes_out_per_second=round(one.bytes_out / _SECONDS, 1),
        size_bytes=one.size_bytes,
    )


def _added_up(by_node: Iterable[list[ThroughputSample]]) -> list[ThroughputSample]:
    """The samples of all nodes, those of one time as one, the oldest first; but not the newest
    while a node has still to take it: the sum would seem to fall.
    """
    added: dict[int, ThroughputSample] = {}
    ends: set[int] = set()
    for samples in by_node:
        ends.update(one.at_ms for one in samples[-1:])
        for one in samples:
            before = added.get(one.at_ms)
            added[one.at_ms] = one if before is None else _sum(before, one)
    if ends and max(ends) - INTERVAL_MS in ends:
        del added[max(ends)]
    return [added[at_ms] for at_ms in sorted(added)]


def _sum(one: ThroughputSample, other: ThroughputSample) -> ThroughputSample:
    return ThroughputSample(
        at_ms=one.at_ms,
        bytes_in_per_second=round(one.bytes_in_per_second + other.bytes_in_per_second, 1),
        records_in_per_second=round(one.records_in_per_second + other.records_in_per_second, 2),
        bytes_out_per_second=round(one.bytes_out_per_second + other.bytes_out_per_second, 1),
        size_bytes=one.size_bytes + other.size_bytes,
    )
