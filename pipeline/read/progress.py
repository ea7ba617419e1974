"""What a streaming read follows: what there is, what a trigger takes of it, what has been lost.

Lives on the driver as long as the query runs, and knows nothing of Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING

from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.consume.range_reader import OffsetsLost
from kept.pipeline.options import AtOffsets, ReadOptions
from kept.pipeline.read import offsets
from kept.pipeline.read.admission import available, limited
from kept.pipeline.read.batch import divide
from kept.pipeline.read.plan import Range, ReadBounds, plan
from kept.storage.types import IsolationLevel, TopicPartition

if TYPE_CHECKING:
    from kept.client.client import Client

logger = logging.getLogger("kept.pipeline")

Offsets = dict[TopicPartition, int]


class StreamProgress:
    """A stream's view of its partitions, from trigger to trigger."""

    def __init__(self, client: Client, options: ReadOptions) -> None:
        self.client = client
        self.options = options
        self.target: Offsets | None = None
        self._begun: Offsets | None = None
        self._at_end: Offsets = {}
        self._first_newest: Offsets = {}
        self.leader_epochs: dict[TopicPartition, int] = {}
        self._topic_ids: dict[str, str | None] = {}
        self._reached_in: dict[TopicPartition, int] = {}
        self._compared: dict[TopicPartition, tuple[int, int]] = {}
        self._taken_at = monotonic()

    def begin(self) -> Offsets:
        """Where a new query starts, the same whenever it is asked.

        Spark notes where the first batch ends, not where it starts: when that batch is repeated,
        this is asked anew. So the first batch takes nothing of partitions that begin at their end.
        """
        if self._begun is None:
            tps = offsets.find_partitions(self.client, self.options.topics)
            newest = self._first_newest or self._at(tps, LATEST)
            begun = offsets.starts(self.client, tps, self.options)
            for tp in tps:
                if begun[tp] >= newest.get(tp, begun[tp]) and not self._has_given_start(tp):
                    begun[tp] = self._at_end[tp] = newest.get(tp, begun[tp])
            self._begun = begun
        return dict(self._begun)

    def _has_given_start(self, tp: TopicPartition) -> bool:
        """Whether the options say at which offset a partition begins."""
        where = self.options.starting
        return isinstance(where, AtOffsets) and (where.by_partition or {}).get(tp, LATEST) >= 0

    def newest(self) -> Offsets:
        """Where every partition ends now."""
        must = self.options.fail_on_data_loss
        tps = offsets.find_partitions(self.client, self.options.topics, all_must_be_there=must)
        newest = self._at(tps, LATEST)
        if not self._first_newest:
            self._first_newest = dict(newest)  # Spark 4.1 asks for this before it asks for begin
        return newest

    def stop_at_newest(self) -> None:
        """From now on nothing newer than this exists (AvailableNow)."""
        self.target = self.newest()

    def topic_ids(self, tps: Iterable[TopicPartition]) -> dict[str, str | None]:
        """Topic -> the id of the topic that these offsets belong to, where the broker has ids."""
        return offsets.topic_ids(self.client, tps)

    def remember(
        self,
        topic_ids: Mapping[str, str],
        leader_epochs: Mapping[TopicPartition, int] | None = None,
    ) -> None:
        """The topics that the next start's offsets belong to, and the epochs in which they were
        there, as its checkpoint says.
        """
        self._topic_ids.update(topic_ids)
        self._reached_in = dict(leader_epochs or {})

    def next_end(self, start: Offsets, most: int | None, least: int | None) -> Offsets:
        """Where the next trigger ends; ``start`` when it should not take anything yet."""
        if self.target is not None:
            self.target = self._still_there(self.target)
        newest = self.target if self.target is not None else self.newest()
        if self._at_end:
            held = {tp: at for tp, at in self._at_end.items() if start.get(tp) == at}
            newest = {tp: held.get(tp, at) for tp, at in newest.items()}
            self._at_end = {}
        since = self._from(start, newest)
        newest = {tp: max(at, since[tp]) for tp, at in newest.items()}
        waiting = available(since, newest)
        delayed = (monotonic() - self._taken_at) * 1000 >= self.options.max_trigger_delay_ms
        moved = any(since.get(tp) != start[tp] for tp in start)  # a loss that is gone on without
        if least is not None and waiting < least and not (self.target or delayed or moved):
            return start
        if waiting:
            self._taken_at = monotonic()
        return newest if most is None else limited(since, newest, most)

    def ranges(
        self, start: Offsets, end: Offsets, topic_ids: Mapping[str, str] | None = None
    ) -> list[Range]:
        """The tasks of a trigger; ``topic_ids`` are of the topics that ``end`` belongs to, where
        its checkpoint says. Of one that was deleted since it was planned, nothing is left to read;
        one that replaced it is read by the next trigger.
        """
        planned, end = end, self._still_there(end)
        now = self.topic_ids(end)
        for topic, number in (topic_ids or {}).items():
            if now.get(topic, number) != number:
                self._lose(f"{topic}: everything not read yet", "it was deleted and created again")
                end = {tp: at for tp, at in end.items() if tp.topic != topic}
        start = {tp: at for tp, at in start.items() if tp in end or tp not in planned}
        if self._begun is not None and start == self._begun:  # the first batch, perhaps repeated
            start = {tp: min(at, end.get(tp, at)) for tp, at in start.items()}
        since = self._from(start, end)
        there = self._at([tp for tp in sorted(end) if tp in since], EARLIEST)
        for tp, first in there.items():
            if since[tp] < first and since[tp] < end[tp]:
                gone = min(first, end[tp])
                why = f"its log starts at {first}"
                self._lose(f"{tp.place}: offsets {since[tp]} to {gone - 1}", why)
                since[tp] = gone
        ids = self.topic_ids(there)
        ranges = plan(since, {tp: end[tp] for tp in there}, ids, ReadBounds())
        return divide(self.client, ranges, self.options)

    def _still_there(self, planned: Offsets) -> Offsets:
        there = offsets.still_there(self.client, planned)
        for tp in sorted(planned.keys() - there):
            what = f"{tp.place}: everything up to offset {planned[tp]}"
            self._lose(what, "the partition is gone")
        return {tp: at for tp, at in planned.items() if tp in there}

    def _at(self, tps: list[TopicPartition], when: int) -> Offsets:
        answers = self.client.list_offsets(dict.fromkeys(tps, when), self.options.isolation)
        if when == LATEST:
            self.leader_epochs.update({tp: at.leader_epoch for tp, at in answers.items()})
        return {tp: at.offset for tp, at in answers.items()}

    def _from(self, start: Offsets, end: Offsets) -> Offsets:
        """Where each partition goes on: new ones, and those of a topic that replaced another of its
        name, from their beginning. What is no longer there, or ends before the offset that was
        reached, is lost.
        """
        since = dict(start)
        for tp in sorted(start.keys() - end.keys()):
            self._lose(f"{tp.place}: everything from offset {start[tp]}", "the partition is gone")
            del since[tp]
        replaced = self._replaced(sorted(start.keys() & end.keys()))
        both = [tp for tp in sorted(start.keys() & end.keys()) if tp.topic not in replaced]
        since = {tp: at for tp, at in since.items() if tp.topic not in replaced}
        cut = self._cut_back({tp: start[tp] for tp in both})
        for tp in both:
            if tp in cut:
                why = f"a leader without them was elected, and has others from offset {cut[tp]} on"
                self._lose(f"{tp.place}: offsets {cut[tp]} to {start[tp] - 1}", why)
                since[tp] = cut[tp]
            elif end[tp] < start[tp] and not self._reaches(tp, start[tp]):
                why = f"the log ends at {end[tp]}, it was cut back or created again"
                self._lose(f"{tp.place}: everything up to offset {start[tp]}", why)
                since[tp] = end[tp]
        since.update(self._at(sorted(end.keys() - since.keys()), EARLIEST))
        return since

    def _cut_back(self, start: Offsets) -> Offsets:
        """Where logs were cut back below the offset that was reached, and have perhaps grown again:
        where the epoch in which that offset was there ends now. Asked when the leader changed.
        """
        changed = {}
        for tp in start:
            epoch, now = self._reached_in.get(tp, -1), self.leader_epochs.get(tp)
            if 0 <= epoch != now and self._compared.get(tp) != (epoch, now):
                changed[tp] = epoch
        ends = self.client.epoch_ends(changed) if changed else {}
        for tp, epoch in changed.items():
            if tp in self.leader_epochs and ends[tp] >= start[tp]:
                self._compared[tp] = epoch, self.leader_epochs[tp]
        return {tp: end for tp, end in ends.items() if 0 <= end < start[tp]}

    def _reaches(self, tp: TopicPartition, offset: int) -> bool:
        """Whether the log goes on to an offset after the last stable one, where a read at the other
        isolation level has been, or the options say to begin.
        """
        if self.options.isolation is IsolationLevel.READ_UNCOMMITTED:
            return False
        return offsets.all_at(self.client, [tp], LATEST)[tp] >= offset

    def _replaced(self, tps: list[TopicPartition]) -> set[str]:
        replaced = set()
        for topic, number in self.topic_ids(tps).items():
            if self._topic_ids.setdefault(topic, number) != number:
                self._lose(f"{topic}: everything not read yet", "it was deleted and created again")
                self._topic_ids[topic] = number
                replaced.add(topic)
        return replaced

    def _lose(self, what: str, why: str) -> None:
        if self.options.fail_on_data_loss:
            raise OffsetsLost(f"{what} lost: {why} (failOnDataLoss=false goes on without)")
        logger.warning("%s lost: %s", what, why)
