"""Reading one range of offsets of a partition, and never taking less for the whole.

A range was planned while every offset in it was there: below the high watermark (or the last stable
offset), at or above the log start. :class:`RangeReader` brings its batches from whoever leads the
partition, until :attr:`RangeReader.position` has reached its end. Offsets that compaction removed
are gaps: the next batch is simply further on. Offsets are *lost* only when the log start has passed
them, the log ends before them, an uncleanly elected leader has other records where the reader has
been (KIP-320), or the topic is gone or another one under the same name; then :class:`OffsetsLost`
says which, unless the reader was told to go on with what is there.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from kept.client.consume.aborted_filter import aborted_batches
from kept.client.consume.fetch import FetchLimits
from kept.client.consume.positions import EARLIEST, LATEST
from kept.storage.errors import (
    CorruptMessage,
    OffsetOutOfRange,
    PeerError,
    RequestTimedOut,
    UnknownTopicOrPartition,
)
from kept.storage.types import IsolationLevel, TopicPartition

if TYPE_CHECKING:
    from kept.client.client import Client
    from kept.client.consume.fetch import Fetched


UNKNOWN_TOPIC_OR_PARTITION: Final = 3
BEHIND_S: Final = 0.05
"""Pause before one is asked again that does not know yet of an offset which is there."""


class OffsetsLost(PeerError):
    """Offsets of the range are no longer in the log, and not by compaction."""


class Chunk(NamedTuple):
    """Batches as they came. The last may be cut off; ``hidden`` are positions of aborted ones."""

    records: bytes
    hidden: Collection[int]


class RangeReader:
    """The batches from ``start`` to ``end`` of a partition.

    ``timeout_ms`` is for each step, a new leader's election included. ``topic_id`` None takes
    whichever topic has the name at the first fetch. ``node`` reads from the replica there (KIP-392)
    instead of from the leader.

    ``until_caught_up`` moves ``end`` on to wherever the log ends while it is read, so that the
    reader stops when an answer has brought all there was. Without that, a log that is compacted
    meanwhile loses keys: their records before ``end`` are removed for newer ones after it.
    """

    def __init__(
        self,
        client: Client,
        tp: TopicPartition,
        start: int,
        end: int,
        limits: FetchLimits,
        *,
        timeout_ms: int,
        fail_on_data_loss: bool = True,
        topic_id: uuid.UUID | None = None,
        node: int | None = None,
        until_caught_up: bool = False,
    ) -> None:
        self.client, self.tp = client, tp
        self.position, self.end = start, end
        self._start, self._epoch = start, -1
        self.topic_id = topic_id
        self.lost: list[str] = []
        self._limits, self._timeout_ms = limits, timeout_ms
        self._fail = fail_on_data_loss
        self._node = node
        self._until_caught_up = until_caught_up

    def chunks(self) -> Iterator[Chunk]:
        """What the leader sends. Whoever takes a chunk moves ``position`` past what it has read.
        Raises CorruptMessage for an answer without what was asked for.
        """
        since = time.monotonic()
        while self.position < self.end:
            fetched = self._fetch(since)
            if fetched is None:
                continue
            if not fetched.records:
                self._nothing_came(fetched, since)
                continue
            if self._cut_back():
                continue
            committed = self._limits.isolation is IsolationLevel.READ_COMMITTED
            hidden: Collection[int] = ()
            if committed:
                hidden = aborted_batches(fetched.records, fetched.aborted)
            if self._until_caught_up:
                last = fetched.last_stable_offset if committed else fetched.high_watermark
                self.end = max(self.end, last)
            before = self.position
            yield Chunk(fetched.records, hidden)
            if self.position <= before:
                raise CorruptMessage(
                    f"Fetch of {self.tp.place} at offset {before}: the answer has nothing at or "
                    "after it"
                )
            since = time.monotonic()

    def _fetch(self, since: float) -> Fetched | None:
        """An answer, or None when there is none: what was wanted is lost and the position has been
        moved, or the node does not know of it yet.
        """
        try:
            if not self._same_topic():
                return None
            fetched = self.client.fetch_partition(
                self.tp, self.position, self._limits, self._timeout_ms, node=self._node
            )
            return fetched if self._same_topic() else None
        except OffsetOutOfRange as error:
            self._out_of_range(error, since)
        except UnknownTopicOrPartition:
            if self._is_there():
                raise
            self._lose(self.end, "the topic was deleted")
        return None

    def _is_there(self) -> bool:
        topic = self.client.metadata([self.tp.topic]).topics.get(self.tp.topic)
        if topic is None or topic.error_code == UNKNOWN_TOPIC_OR_PARTITION:
            return False
        return bool(topic.error_code) or self.tp.partition in topic.partitions

    def _same_topic(self) -> bool:
        """False: it is another one, and the rest of the range is lost."""
        topic_id = self.client.topic(self.tp.topic).topic_id
        if self.topic_id is None:
            self.topic_id = topic_id
        elif topic_id != self.topic_id and self._known_now() != self.topic_id:
            self._lose(self.end, "the topic was deleted and created again")
            return False
        return True

    def _known_now(self) -> uuid.UUID | None:
        """The topic's id by fresh metadata: what this client remembered may be older than the plan
        that the range comes from.
        """
        self.client.metadata([self.tp.topic])
        return self.client.topic(self.tp.topic).topic_id

    def _out_of_range(self, error: OffsetOutOfRange, since: float) -> None:
        first = self.client.list_offsets({self.tp: EARLIEST})[self.tp].offset
        if self.position < first:
            self._lose(min(first, self.end), f"the log starts at {first} now")
            return
        last = self.client.list_offsets({self.tp: LATEST})[self.tp].offset
        if self.position > last:
            self._lose(self.end, f"the log ends at {last}, it was cut back or created again")
        elif self.position >= first:  # the leader has it, a replica not yet
            if (time.monotonic() - since) * 1000 >= self._timeout_ms:
                raise error
            time.sleep(BEHIND_S)

    def _cut_back(self) -> bool:
        """Whether the log was cut back below the position, and grew past it again: the epoch in
        which the position was reached ends before it. Asked when the leader's epoch has changed.
        What the new leader has there is read when the reader goes on.
        """
        partition = self.client.topic(self.tp.topic).partitions.get(self.tp.partition)
        before, self._epoch = self._epoch, -1 if partition is None else partition.leader_epoch
        if before < 0 or self._epoch in (-1, before) or self.position == self._start:
            return False
        end = self.client.epoch_ends({self.tp: before})[self.tp]
        if not 0 <= end < self.position:
            return False
        cut, last = max(end, self._start), self.position - 1
        why = f"a leader without them was elected, and has others from offset {end} on"
        self._report_loss(f"{self.tp.place}: offsets {cut} to {last} are lost: {why}")
        self.position = cut
        return True

    def _nothing_came(self, fetched: Fetched, since: float) -> None:
        """Below its high watermark a leader has batches: this is a new one that does not know its
        own yet, or one that has lost them. Only time tells.
        """
        waited = time.monotonic() - since
        if waited * 1000 < self._timeout_ms:
            self.client.view.forget_topic(self.tp.topic)
            time.sleep(BEHIND_S)
            return
        last = self.client.list_offsets({self.tp: LATEST})[self.tp].offset
        if last < self.end:
            self._lose(self.end, f"the log has ended at {last} for {waited:.3g} s")
            return
        why = f"the high watermark is {fetched.high_watermark}"
        if 0 <= fetched.last_stable_offset < min(self.end, fetched.high_watermark):
            why += f", from offset {fetched.last_stable_offset} on a transaction is still open"
        raise RequestTimedOut(
            f"Fetch of {self.tp.place} at offset {self.position}: no batch within {waited:.3g} s "
            f"(the range ends at {self.end}, {why})"
        )

    def _lose(self, go_on_at: int, why: str) -> None:
        last = min(go_on_at, self.end) - 1
        self._report_loss(f"{self.tp.place}: offsets {self.position} to {last} are lost: {why}")
        self.position = go_on_at

    def _report_loss(self, text: str) -> None:
        if self._fail:
            raise OffsetsLost(f"{text} (failOnDataLoss=false goes on without them)")
        self.lost.append(text)
