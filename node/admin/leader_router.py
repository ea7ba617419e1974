"""Operations about partitions, at any node: each is done by the partition's leader.

Partitions that are led here are compacted here; the other leaders are called side by side, over the
connections between nodes (:mod:`kept.node.admin.peer_http`). A partition whose leader is not known,
does not answer or has changed meanwhile says so by itself, and hinders no other one. A request
about one partition goes the same way, but for what replicas know apart
(:meth:`LeaderRouter.better_journal`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from msgspec.structs import replace

from kept.compaction.cleaner.removal_log import Fate, Reason
from kept.node.admin.compaction.compaction_status import PassOutcome, outcome
from kept.node.admin.peer_http import CALL_S
from kept.node.admin.results import OMITTED, Omitted, PartitionResult, Remote
from kept.node.runtime.tasks import gather_or_cancel
from kept.node.runtime.time_slices import checkpoint
from kept.storage.errors import (
    InvalidRequest,
    KeptError,
    NetworkException,
    RequestTimedOut,
    RetriableError,
)
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.admin.compaction.compaction_status import CompactionView, MissingRecord
    from kept.node.admin.peer_http import PeerHttp
    from kept.node.admin.topic_lookup import TopicLookup
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.replicas.replica_table import ReplicaTable

WAIT_S: Final = 3600.0
"""How long ``compact now --wait`` waits for one topic."""
COMPACT_NOW: Final = "/api/v1/compaction/now"
WHY_MISSING: Final = "/api/v1/compaction/why-missing"


class Passes(Struct, frozen=True):
    """Passes that were ``started``, and ``partitions`` with what each pass came to."""

    started: list[PartitionResult] | Omitted = OMITTED
    partitions: list[PassOutcome | Remote] | Omitted = OMITTED


@dataclass(slots=True)
class _Progress:
    """What became of partitions by their number: started, or an outcome."""

    started: set[int] = field(default_factory=set)
    outcomes: dict[int, PassOutcome | Remote] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderRouter:
    """Has the leaders of partitions do what operators want."""

    metadata: MetadataLog
    lookup: TopicLookup
    table: ReplicaTable
    view: CompactionView
    peer_http: PeerHttp

    async def from_leader(
        self,
        tp: TopicPartition,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        here: bool,
        post: bool = False,
        timeout_s: float = CALL_S,
    ) -> dict[str, Any] | None:
        """The JSON that the leader of a partition answers; None: it is this node's to answer.

        That is so with ``here``, where it leads, and where nobody does and a replica is here.
        Raises InvalidRequest when there is neither, UnknownTopicOrPartition, NetworkException,
        RequestTimedOut.
        """
        leader = self.lookup.leader(tp)
        no_leader_but_here = leader < 0 and tp in self.table.replicas
        if here or leader == self.lookup.node_id or no_leader_but_here:
            return None
        if leader < 0:
            raise InvalidRequest(f"{tp.place} has no leader now: its replicas are not available")
        wanted = {"topic": tp.topic, "partition": str(tp.partition), **(query or {})}
        call = self.peer_http.post if post else self.peer_http.get
        try:
            answer: dict[str, Any] = await call(leader, path, wanted, timeout_s)
        except RetriableError as error:
            raise NetworkException(
                f"{tp.place} is led by node {leader}, which was asked: {error.client_message}"
            ) from error
        return answer

    # Why an offset is missing.

    async def better_journal(self, tp: TopicPartition, missing: MissingRecord) -> MissingRecord:
        """What another replica knows better of an offset that is missing: one that only followed,
        or keeps less history, has no reason of its own; the one that led the pass has. Where none
        that is there knows, those that are away and may know are named.
        """
        better = await self._better(
            tp, missing.offset, missing.fate, missing.reason, missing.explanation
        )
        return replace(missing, **better)

    async def better_remote_journal(self, tp: TopicPartition, missing: Mapping[str, Any]) -> Remote:
        """The same for what the partition's leader answered."""
        better = await self._better(
            tp, missing["offset"], missing["fate"], missing["reason"], missing["explanation"]
        )
        return Remote({**missing, **better})

    async def _better(
        self, tp: TopicPartition, offset: int, fate: str, reason: str | None, explanation: str
    ) -> dict[str, Any]:
        if fate not in (Fate.REMOVED, Fate.BEFORE_HISTORY):
            return {}
        if reason not in (None, Reason.FOLLOWED):
            return {}
        image = self.metadata.image
        topic = image.topics.get(tp.topic)
        away: list[int] = []
        for replica in () if topic is None else topic.partitions[tp.partition].replicas:
            broker = image.brokers.get(replica)
            if broker is None or broker.fenced:
                away.append(replica)
                continue
            try:
                other = await self._journal_of(replica, tp, offset)
            except KeptError:  # it has just gone, or its replica has
                away.append(replica)
                continue
            if other["fate"] == Fate.REMOVED and other["reason"] != Reason.FOLLOWED:
                text = f"{other['explanation']}, by the journal of node {replica}"
                fields = {name: other[name] for name in ("fate", "reason", "generation")}
                return {**fields, "explanation": text}
        if not away:
            return {}
        which = f"node{'s' * (len(away) > 1)} {', '.join(map(str, away))}"
        text = f"{which} {'are' if len(away) > 1 else 'is'} away and may know more"
        return {"explanation": f"{explanation}; {text}"}

    async def _journal_of(self, replica: int, tp: TopicPartition, offset: int) -> Mapping[str, Any]:
        if replica == self.lookup.node_id:
            own = await self.view.why_missing(self.lookup.replica(tp), offset, None)
            names = ("fate", "explanation", "reason", "generation")
            return {name: getattr(own, name) for name in names}
        query = {"topic": tp.topic, "partition": str(tp.partition), "offset": str(offset)}
        answer: Mapping[str, Any] = await self.peer_http.get(replica, WHY_MISSING, query)
        return answer

    # Compaction on demand.

    async def compact(
        self, topic: str, numbers: Sequence[int], *, wait: bool, here: bool
    ) -> Passes:
        """Have partitions of a compacted topic compacted, whatever their dirty ratio.

        With ``here`` by this node alone. Without ``wait`` the answer is what was ``started``, and
        ``partitions`` that could not be; else ``partitions`` with what each pass came to. Raises
        RequestTimedOut when passes here go on for too long.
        """
        led: dict[int, list[int]] = {}
        for number in numbers:
            leader = self.lookup.leader(TopicPartition(topic, number))
            led.setdefault(self.lookup.node_id if here else leader, []).append(number)
        parts = await gather_or_cancel(
            self._compact_at(leader, topic, its, wait) for leader, its in led.items()
        )
        started = sorted(set().union(*(part.started for part in parts)))
        outcomes = {number: result for part in parts for number, result in part.outcomes.items()}
        return Passes(
            OMITTED if wait else [PartitionResult(topic, number) for number in started],
            [outcomes[n] for n in sorted(outcomes)] if wait or outcomes else OMITTED,
        )

    async def _compact_at(
        self, leader: int, topic: str, numbers: list[int], wait: bool
    ) -> _Progress:
        if leader == self.lookup.node_id:
            return await self._compact_here(topic, numbers, wait)
        if leader < 0:
            why = f"{topic} has no leader for it now: its replicas are not available"
            return _failed(topic, numbers, why)
        return await self._compact_elsewhere(leader, topic, numbers, wait)

    async def _compact_here(self, topic: str, numbers: list[int], wait: bool) -> _Progress:
        progress, passes = _Progress(), {}
        for position, number in enumerate(numbers):
            await checkpoint(position)
            tp = TopicPartition(topic, number)
            hosted = self.table.replicas.get(tp)
            if hosted is None or not hosted.partition.is_leader:
                progress.outcomes[number] = PassOutcome(*tp, done=False, error=self._not_led(tp))
                continue
            try:
                passes[number] = self.view.start_pass(tp)
            except KeptError as error:
                progress.outcomes[number] = PassOutcome(*tp, done=False, error=error.client_message)
                continue
            passes[number].add_done_callback(_retrieve)
        if not wait:
            progress.started.update(passes)
        elif passes:
            _, late = await asyncio.wait(passes.values(), timeout=WAIT_S)
            if late:
                raise RequestTimedOut(
                    f"{len(late)} of {len(passes)} partitions are still being compacted"
                )
            for number, finished in passes.items():
                progress.outcomes[number] = outcome(TopicPartition(topic, number), finished)
        return progress

    def _not_led(self, tp: TopicPartition) -> str:
        leader = self.lookup.leader(tp)
        leads = "nobody does now" if leader < 0 else f"node {leader} does"
        return f"node {self.lookup.node_id} does not lead it: {leads}"

    async def _compact_elsewhere(
        self, leader: int, topic: str, numbers: list[int], wait: bool
    ) -> _Progress:
        body: dict[str, Any] = {"topic": topic, "wait": wait}
        if len(numbers) == 1:
            body["partition"] = numbers[0]
        timeout_s = WAIT_S if wait else CALL_S
        try:
            answer = await self.peer_http.post(leader, COMPACT_NOW, body, timeout_s)
        except KeptError as error:
            return _failed(
                topic, numbers, f"its leader, node {leader}, was asked: {error.client_message}"
            )
        wanted = set(numbers)
        progress = _Progress({entry["partition"] for entry in answer.get("started", ())} & wanted)
        for entry in answer.get("partitions", ()):
            if entry["partition"] in wanted:
                progress.outcomes[entry["partition"]] = Remote(entry)
        lost = sorted(wanted - progress.started - progress.outcomes.keys())
        why = f"node {leader} leads it no longer; ask again"
        progress.outcomes |= _failed(topic, lost, why).outcomes
        return progress


def _failed(topic: str, numbers: Sequence[int], why: str) -> _Progress:
    return _Progress(outcomes={n: PassOutcome(topic, n, done=False, error=why) for n in numbers})


def _retrieve(finished: asyncio.Future[Any]) -> None:
    """Retrieve an outcome that nobody waits for; the cleaner has logged it."""
    if not finished.cancelled():
        finished.exception()
