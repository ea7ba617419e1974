"""Compaction on demand, and questions about it, at any node: for each partition's leader.

Partitions that are led here are cleaned here; the other leaders are asked, side by side, over the
connections between nodes (:mod:`kept.node.admin.peer_http`). A partition whose leader is not
known, does not answer or has changed meanwhile says so by itself, and hinders no other one. A
question about one partition goes the same way, but for what replicas know apart
(:func:`better_journal`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kept.compaction.cleaner.removal_log import Fate, Reason
from kept.node.admin import compaction_status
from kept.node.admin.peer_http import ASK_S, ask_json
from kept.storage.errors import (
    InvalidRequest,
    KeptError,
    NetworkException,
    RequestTimedOut,
    RetriableError,
)
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.admin.context import AdminContext

WAIT_S: Final = 3600.0
"""How long ``compact now --wait`` waits for one topic."""
PATH: Final = "/api/v1/compaction/now"
WHY_MISSING: Final = "/api/v1/compaction/why-missing"


@dataclass(slots=True)
class _Said:
    """What became of partitions by their number: started, or an outcome."""

    started: set[int] = field(default_factory=set)
    outcomes: dict[int, Mapping[str, Any]] = field(default_factory=dict)


async def compact(
    context: AdminContext, topic: str, numbers: Sequence[int], *, wait: bool, here: bool
) -> dict[str, Any]:
    """Have partitions of a compacted topic compacted, whatever their dirty ratio.

    With ``here`` by this node alone. Without ``wait`` the answer is what was ``started``, and
    ``partitions`` that could not be; else ``partitions`` with what each pass came to. Raises
    RequestTimedOut when passes here go on for too long.
    """
    led: dict[int, list[int]] = {}
    for number in numbers:
        leader = _leader(context, topic, number)
        led.setdefault(context.identity.node_id if here else leader, []).append(number)
    parts = await asyncio.gather(
        *(_at(context, leader, topic, wanted, wait) for leader, wanted in led.items())
    )
    started = set().union(*(part.started for part in parts))
    outcomes = {number: one for part in parts for number, one in part.outcomes.items()}
    answer: dict[str, Any] = {}
    if not wait:
        answer["started"] = [_named(topic, number) for number in sorted(started)]
    if wait or outcomes:
        answer["partitions"] = [{**_named(topic, n), **outcomes[n]} for n in sorted(outcomes)]
    return answer


def _named(topic: str, number: int) -> dict[str, Any]:
    return {"topic": topic, "partition": number}


def _leader(context: AdminContext, topic: str, number: int) -> int:
    return context.metadata.image.topics[topic].partitions[number].leader


async def ask_leader(
    context: AdminContext,
    tp: TopicPartition,
    path: str,
    given: Mapping[str, str] | None = None,
    *,
    here: bool,
    post: bool = False,
) -> dict[str, Any] | None:
    """What the leader of a partition says to a request for it; None: this node is to say it.

    That is so with ``here``, where it leads, and where nobody does and a replica is here. Raises
    InvalidRequest when there is neither, UnknownTopicOrPartition, NetworkException,
    RequestTimedOut.
    """
    leader = _leader(context, tp.topic, tp.partition)
    if here or leader == context.identity.node_id or (leader < 0 and tp in context.table.hosted):
        return None
    if leader < 0:
        raise InvalidRequest(f"{tp} has no leader now: its replicas are not available")
    said = {"topic": tp.topic, "partition": str(tp.partition), **(given or {})}
    try:
        answer: dict[str, Any] = await ask_json(
            context, leader, path, None if post else said, body=said if post else None
        )
    except RetriableError as error:
        raise NetworkException(f"{tp} is led by node {leader}, which was asked: {error}") from error
    return answer


async def better_journal(
    context: AdminContext, tp: TopicPartition, answer: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What another replica knows better of an offset that is missing: who only followed, or keeps
    less history, has no reason of its own; the one that led the pass has. Where none that is there
    knows, those that are away and may are named.
    """
    if answer["fate"] not in (Fate.REMOVED, Fate.BEFORE_HISTORY):
        return {}
    if answer["reason"] not in (None, Reason.FOLLOWED):
        return {}
    topic = context.metadata.image.topics.get(tp.topic)
    away: list[int] = []
    for replica in () if topic is None else topic.partitions[tp.partition].replicas:
        broker = context.metadata.image.brokers.get(replica)
        if broker is None or broker.fenced:
            away.append(replica)
            continue
        try:
            other = await _journal_of(context, replica, tp, answer["offset"])
        except KeptError:  # it has just gone, or its replica has
            away.append(replica)
            continue
        if other["fate"] == Fate.REMOVED and other["reason"] != Reason.FOLLOWED:
            said = f"{other['explanation']}, by the journal of node {replica}"
            known = {name: other[name] for name in ("fate", "reason", "generation")}
            return {**known, "explanation": said}
    if not away:
        return {}
    which = f"node{'s' * (len(away) > 1)} {', '.join(map(str, away))}"
    said = f"{which} {'are' if len(away) > 1 else 'is'} away and may know more"
    return {"explanation": f"{answer['explanation']}; {said}"}


async def _journal_of(
    context: AdminContext, replica: int, tp: TopicPartition, offset: int
) -> Mapping[str, Any]:
    if replica == context.identity.node_id:
        context.table.partition(tp)
        return await compaction_status.why_missing(context, context.table.hosted[tp], offset, None)
    query = {"topic": tp.topic, "partition": str(tp.partition), "offset": str(offset)}
    found: Mapping[str, Any] = await ask_json(context, replica, WHY_MISSING, query)
    return found


def _failed(why: str) -> dict[str, Any]:
    return {"done": False, "error": why}


async def _at(
    context: AdminContext, leader: int, topic: str, numbers: list[int], wait: bool
) -> _Said:
    if leader == context.identity.node_id:
        return await _here(context, topic, numbers, wait)
    if leader < 0:
        why = f"{topic} has no leader for it now: its replicas are not available"
        return _Said(outcomes=dict.fromkeys(numbers, _failed(why)))
    return await _elsewhere(context, leader, topic, numbers, wait)


async def _here(context: AdminContext, topic: str, numbers: list[int], wait: bool) -> _Said:
    said, passes = _Said(), {}
    for number in numbers:
        tp = TopicPartition(topic, number)
        hosted = context.table.hosted.get(tp)
        if hosted is None or not hosted.partition.is_leader:
            said.outcomes[number] = _failed(_not_led(context, topic, number))
            continue
        try:
            passes[number] = context.cleaner.started.request(tp)
        except KeptError as error:
            said.outcomes[number] = _failed(str(error))
            continue
        passes[number].add_done_callback(_look_at)
    if not wait:
        said.started.update(passes)
    elif passes:
        _, late = await asyncio.wait(passes.values(), timeout=WAIT_S)
        if late:
            raise RequestTimedOut(
                f"{len(late)} of {len(passes)} partitions are still being compacted"
            )
        said.outcomes |= {number: compaction_status.outcome(one) for number, one in passes.items()}
    return said


def _not_led(context: AdminContext, topic: str, number: int) -> str:
    leader = _leader(context, topic, number)
    known = "nobody does now" if leader < 0 else f"node {leader} does"
    return f"node {context.identity.node_id} does not lead it: {known}"


def _look_at(finished: asyncio.Future[Any]) -> None:
    """Take note of an outcome that nobody waits for; the cleaner has logged it."""
    if not finished.cancelled():
        finished.exception()


async def _elsewhere(
    context: AdminContext, leader: int, topic: str, numbers: list[int], wait: bool
) -> _Said:
    said, body = _Said(), {"topic": topic, "wait": wait}
    asked = {**body, "partition": numbers[0]} if len(numbers) == 1 else body
    try:
        answer = await ask_json(
            context, leader, PATH, body=asked, timeout_s=WAIT_S if wait else ASK_S
        )
    except KeptError as error:
        why = f"its leader, node {leader}, was asked: {error}"
        return _Said(outcomes=dict.fromkeys(numbers, _failed(why)))
    wanted = set(numbers)
    said.started = {one["partition"] for one in answer.get("started", ())} & wanted
    for one in answer.get("partitions", ()):
        if one["partition"] in wanted:
            said.outcomes[one["partition"]] = one
    for number in wanted - said.started - said.outcomes.keys():
        said.outcomes[number] = _failed(f"node {leader} leads it no longer; ask again")
    return said
