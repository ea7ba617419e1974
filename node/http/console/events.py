"""Server-sent events: what moves on the page, once a second at most, and only when it moved.

A stream is of the node, or of one partition as well: then its leader is asked, every other second
if it is another node. An event is one JSON object; the page fetches what it draws when something in
it is another than before. While nothing moves a comment every :data:`COMMENT_S` keeps proxies calm.

Limits: ``kept.console.max.streams`` at a time; one more is refused with 503, and the page asks
from time to time instead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from kept.node.admin import compaction_status
from kept.storage.errors import KeptError, RetriableError

if TYPE_CHECKING:
    from kept.node.admin.context import AdminContext
    from kept.storage.types import TopicPartition

CONTENT_TYPE: Final = "text/event-stream; charset=utf-8"
LOOK_S: Final = 1.0
LOOK_ELSEWHERE_S: Final = 2.0
COMMENT_S: Final = 15.0
MAX_RUNNING: Final = 50
"""Passes that are told at once."""


class TooManyStreams(RetriableError):
    """There are as many streams as ``kept.console.max.streams`` allows."""


class EventStreams:
    """The streams of one node."""

    def __init__(self, context: AdminContext) -> None:
        self._context = context
        self._open = 0

    def admit(self) -> None:
        """Raises TooManyStreams."""
        limit = self._context.config.current.console_max_streams
        if self._open >= limit:
            raise TooManyStreams(f"{limit} streams are open; see kept.console.max.streams")

    async def stream(self, tp: TopicPartition | None) -> AsyncIterator[bytes]:
        """The events, until the reader leaves."""
        self._open += 1
        try:
            sent, quiet_s = "", 0.0
            while self._context.readiness.started:
                value = pulse(self._context)
                poll_s = LOOK_S
                if tp is not None:
                    value["partition"], poll_s = await _partition(self._context, tp)
                text = json.dumps(value, separators=(",", ":"))
                if text != sent:
                    sent, quiet_s = text, 0.0
                    yield f"data: {text}\n\n".encode()
                elif quiet_s >= COMMENT_S:
                    quiet_s = 0.0
                    yield b":\n\n"
                await asyncio.sleep(poll_s)
                quiet_s += poll_s
        finally:
            self._open -= 1


def pulse(context: AdminContext) -> dict[str, Any]:
    """What moves on a node; cheap to say."""
    metadata, metrics, cleaner = context.metadata, context.counters, context.cleaner.started
    running = []
    for tp, one in list(cleaner.running.items())[:MAX_RUNNING]:
        total = one.work.total_bytes
        progress = round(one.work.done_bytes / total, 3) if total else 0.0
        running.append({"topic": tp.topic, "partition": tp.partition, "progress": progress})
    return {
        "image": metadata.image.index,
        "controller_id": -1 if metadata.leader_id is None else metadata.leader_id,
        "term": metadata.member.term,
        "records_in": metrics.records_in,
        "bytes_in": metrics.bytes_in,
        "bytes_out": metrics.bytes_out,
        "compactions": metrics.compactions,
        "running": running,
    }


def partition_pulse(context: AdminContext, tp: TopicPartition) -> dict[str, Any] | None:
    """What moves in a partition, if it is here."""
    hosted = context.table.hosted.get(tp)
    if hosted is None:
        return None
    log = hosted.partition.log
    found: dict[str, Any] = {
        "node": context.identity.node_id,
        "log_start_offset": log.log_start_offset,
        "high_watermark": hosted.partition.high_watermark,
        "log_end_offset": log.log_end_offset,
        "size_bytes": log.size_bytes,
        "segments": len(log.segments),
    }
    if log.config.compact:
        status = compaction_status.status(context, hosted)
        found |= {
            "state": status.state,
            "progress": status.progress,
            "dirty_ratio": status.dirty_ratio,
            "generation": status.generation,
            "tombstones_pending": status.tombstones_pending,
            "behind": [one.replica for one in status.replicas if one.behind],
        }
    return found


async def _partition(
    context: AdminContext, tp: TopicPartition
) -> tuple[dict[str, Any] | None, float]:
    topic = context.metadata.image.topics.get(tp.topic)
    if topic is None or tp.partition >= len(topic.partitions):
        return None, LOOK_S
    leader = topic.partitions[tp.partition].leader
    if leader in (context.identity.node_id, -1):
        return partition_pulse(context, tp), LOOK_S
    from kept.node.admin.peer_http import ask_json

    query = {"topic": tp.topic, "partition": str(tp.partition)}
    try:
        found: dict[str, Any] | None = await ask_json(context, leader, "/api/v1/pulse", query)
    except KeptError:
        # The node is gone or on its way: the page shows what is known here, and so does this.
        return partition_pulse(context, tp), LOOK_ELSEWHERE_S
    return found, LOOK_ELSEWHERE_S
