"""What compaction must never take away, and never bring back: rules 1, 11-19 and 30 over a history.

The register of what is committed is the one of :mod:`.replica_checks`; here it has records, too, in
the order in which a leader's high watermark passed them. What a replica must show follows from it:

- ``value-lost``: whoever may serve (a leader below its high watermark, a member of the ISR below
  what is committed) has the latest value of every key, at its offset, also half way through a swap;
- ``resurrection``: there no key lives whose latest committed record is a tombstone;
- ``generation-differs``: replicas that have applied one generation hold the same batches and
  records below its end;
- ``survivor-missing``, ``tombstones`` (in :mod:`.nodes_compaction`): a replica lacks a survivor
  only after something was given up; tombstones go with a replica away;
- ``producer-state``: in the end each replica knows the last sequence of every producer, also one
  that has fetched nothing but what was compacted;
- ``log-unreadable``: what a log lists is there, unless its device is gone;
- ``log-start-back``: while a process lives, a replica's log start does not go back.

Below the log start nothing is asked for.

Logs are read as bytes, by no code of ``kept``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any
from uuid import UUID

from kept.cluster.metadata.records import NO_LEADER, PartitionRecord
from kept.replication.manifests_events import ManifestRef
from kept.storage.errors import MachineError
from kept.storage.log.log import Log
from kept.storage.types import TopicPartition
from tests.sim.batches import Batch, Rec, decode, rows
from tests.sim.replica_checks import Copy, Register, ReplicaChecks
from tests.sim.world import Violation


@dataclass
class _Segment:
    """What was read of a segment so far."""

    segment: Any
    size: int = 0
    batches: list[Batch] = field(default_factory=list)
    records: list[Rec] = field(default_factory=list)


@dataclass
class View:
    """A replica's log as it was seen last."""

    process: int
    segments: dict[int, _Segment] = field(default_factory=dict)
    seen: tuple[Any, ...] = ()
    records: list[Rec] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    judged: tuple[Any, ...] = ()
    compared: tuple[Any, ...] = ()
    start: int = 0
    log: Log | None = None


class CompactionChecks(ReplicaChecks):
    """Judges what compaction removes and brings back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.views: dict[tuple[int, TopicPartition], View] = {}
        self.rows: dict[TopicPartition, list[Rec]] = {}
        """Every committed record."""
        self.tables: dict[TopicPartition, dict[bytes, Rec]] = {}
        self.generations: dict[Any, tuple[Any, int, int]] = {}
        """What each has, who had it first, and where it ends."""
        self.starts: dict[Any, int] = {}
        """Where the log began of who had it first."""
        self.bases: dict[TopicPartition, int] = {}
        """The first epoch in which a base generation was begun."""
        self.by_length: set[TopicPartition] = set()

    def _changed(self, tp: TopicPartition, state: PartitionRecord) -> None:
        before = self.register(tp).state
        super()._changed(tp, state)
        if before is not None and state.leader not in (NO_LEADER, before.leader, *before.isr):
            self.by_length.add(tp)

    def may_miss(self, tp: TopicPartition) -> bool:
        """A replica that is not in the ISR may lack a survivor: something was given up, or a
        suspect was elected by the length of its log (rule 33), which knew an older generation.
        """
        return tp in self.by_length or self.register(tp).give_ups > 0

    def had_dropped(
        self, tp: TopicPartition, topic_id: UUID, ref: ManifestRef, offset: int
    ) -> bool:
        """A base generation lists all that its maker has. Nothing was lost where a replica lacks
        what a generation has dropped that the maker had not applied.
        """
        if ref.leader_epoch < self.bases.get(tp, ref.leader_epoch + 1):
            return False
        return any(
            offset < end
            and all(batch.base != offset for batch in batches)
            and all(rec.offset != offset for rec in records)
            for (topic, index, identity), ((batches, records), _, end) in self.generations.items()
            if (topic, index) == (topic_id, tp.partition) and identity != ref.generation
        )

    def _deleted(self, name: str) -> None:
        super()._deleted(name)
        for held in (self.rows, self.tables, self.bases):
            for tp in [tp for tp in held if tp.topic == name]:
                del held[tp]
        for key in [key for key in self.views if key[1].topic == name]:
            del self.views[key]

    def removed(self, node: int, tp: TopicPartition) -> None:
        super().removed(node, tp)
        self.views.pop((node, tp), None)

    # A replica as it is.

    def look_at(  # noqa: PLR0917
        self,
        node: int,
        process: int,
        tp: TopicPartition,
        topic_id: UUID,
        log: Log,
        hw: int,
        leads_in: int | None,
        generation: tuple[Any, int] | None,
        broken: Container[str] = (),
    ) -> None:
        """Judge a replica after something happened to it. ``generation``: (identity, end) of what
        it has applied; None in the middle of a swap. ``broken``: paths below which nothing is read.
        """
        if self.topics.get(tp.topic, (None, 0))[0] != topic_id:
            return
        view = self.views.get((node, tp))
        if view is None or view.process != process:
            view = self.views[node, tp] = View(process)
        try:
            self._read_log(view, log)
        except MachineError as error:
            if not any(str(path) in broken for path in (error.path, *PurePath(error.path).parents)):
                raise Violation("log-unreadable", f"n{node} {tp}: {error}") from error
            return  # its device is gone, and nobody can say what it has
        view.start, view.log = log.log_start_offset, log
        register, copy = self.register(tp), self._copy(node, process, tp, view, log)
        if register.state is None:
            return
        if leads_in is not None:
            self._leading(tp, node, copy, view, register, leads_in, hw)
        copy.leads_in, copy.high_watermark = leads_in, hw
        self._judge(tp, node, view, register, leads_in, hw)
        if generation is not None:
            self._compare(tp, topic_id, node, view, generation)

    def _copy(self, node: int, process: int, tp: TopicPartition, view: View, log: Log) -> Copy:
        copy = self.copies.get((node, tp))
        end, register = log.written_end_offset, self.register(tp)
        if copy is None or copy.process != process:
            old, copy = copy, Copy(process)
            self.copies[node, tp] = copy
            if old is not None and end < min(old.end, register.end) and node in register.certain:
                raise Violation("kill-lost", f"n{node} {tp}: {old.end} before, {end} now")
        elif log.log_start_offset < copy.start and not self.may_miss(tp):
            start = log.log_start_offset
            raise Violation("log-start-back", f"n{node} {tp}: {start}, {copy.start} before")
        copy.batches, copy.start, copy.end = view.batches, log.log_start_offset, end
        return copy

    @staticmethod
    def _read_log(view: View, log: Log) -> None:
        """Raises MachineError; the view is as it was then."""
        seen = tuple((id(segment), segment.size_bytes) for segment in log.segments)
        if seen == view.seen:
            return
        segments: dict[int, _Segment] = {}
        for segment in log.segments:
            found = view.segments.get(id(segment))
            if found is None or found.segment is not segment or found.size > segment.size_bytes:
                found = _Segment(segment)
            if found.size < segment.size_bytes:
                data = log.disk.pread(segment.file, found.size, segment.size_bytes - found.size)
                position = 0
                for batch in decode(data):
                    found.batches.append(batch)
                    found.records += rows(data, position, batch)
                    position += int.from_bytes(data[position + 8 : position + 12], "big") + 12
                found.size = segment.size_bytes
            segments[id(segment)] = found
        view.segments, view.seen = segments, seen
        view.batches = [batch for found in segments.values() for batch in found.batches]
        view.records = [rec for found in segments.values() for rec in found.records]

    # Leaders.

    def _leading(  # noqa: PLR0917
        self,
        tp: TopicPartition,
        node: int,
        copy: Copy,
        view: View,
        register: Register,
        epoch: int,
        hw: int,
    ) -> None:
        known = register.leaders.setdefault(epoch, (node, copy.process))
        if known != (node, copy.process):
            raise Violation("one-leader", f"{tp}: n{node} leads in epoch {epoch}, as {known} did")
        if copy.leads_in == epoch and hw < copy.high_watermark:
            raise Violation("high-watermark-back", f"n{node} {tp}: {hw}, {copy.high_watermark}")
        state = register.state
        assert state is not None
        now = state.leader_epoch == epoch
        copy.exempt = not now and register.give_ups > 0
        if copy.exempt or (register.rebase and not now):
            return
        if register.rebase:
            self._begin_anew(tp, register, view, hw)
        elif now and copy.leads_in != epoch and copy.end < register.end:
            raise Violation(
                "committed-lost", f"{tp}: n{node} leads, ends at {copy.end}, not {register.end}"
            )
        if now:
            register.start = max(register.start, copy.start)
        before = register.end
        if hw > before:
            self._commit(tp, node, copy, register, hw)
            if register.end > before:
                table = self.tables.setdefault(tp, {})
                first = bisect_left(view.records, before, key=lambda rec: rec.offset)
                for rec in view.records[first:]:
                    if rec.offset < register.end:
                        self.rows.setdefault(tp, []).append(rec)
                        table[rec.key] = rec

    def _sequence(self, tp: TopicPartition, register: Register, batch: Batch) -> None:
        """After a loss a leader commits what it fetched when it was cleaned already: with gaps."""
        key = batch.producer_id, batch.producer_epoch
        if register.give_ups and batch.sequence > register.sequences.get(key, -1):
            register.sequences[key] = batch.sequence
        super()._sequence(tp, register, batch)

    def _begin_anew(self, tp: TopicPartition, register: Register, view: View, hw: int) -> None:
        """Something was given up: what the new leader has committed counts from here on."""
        register.rebase = register.by_election = False
        register.batches = [batch for batch in view.batches if batch.last < hw]
        register.end, register.start = hw, min(view.start, hw)
        register.epochs.clear()
        register.sequences.clear()  # what was cleaned has left gaps in what there is
        register.acked.clear()
        self.rows[tp] = [rec for rec in view.records if rec.offset < hw]
        self.tables[tp] = {rec.key: rec for rec in self.rows[tp]}
        for key, other in self.views.items():
            if key[1] == tp:
                other.judged = ()

    # What a reader sees.

    def expected(self, tp: TopicPartition, up_to: int) -> dict[bytes, Rec]:
        """The latest committed record of every key below an offset."""
        if up_to >= self.register(tp).end:
            return self.tables.get(tp, {})
        return {rec.key: rec for rec in self.rows.get(tp, []) if rec.offset < up_to}

    def _judge(  # noqa: PLR0917
        self,
        tp: TopicPartition,
        node: int,
        view: View,
        register: Register,
        leads_in: int | None,
        hw: int,
    ) -> None:
        state = register.state
        assert state is not None
        member = node in state.isr and node in register.certain
        deposed = leads_in is not None and leads_in < state.leader_epoch
        if (
            register.rebase
            or (deposed and register.give_ups)
            or not (member or leads_in is not None)
        ):
            return
        up_to = register.end if member and not deposed else min(hw, register.end)
        low = max(register.start, view.start)
        key = (view.seen, up_to, leads_in, low)
        if key == view.judged:
            return
        view.judged = key
        who = f"n{node} {tp} ({'leader' if leads_in is not None else 'member'}), below {up_to}"
        table = {rec.key: rec for rec in view.records if rec.offset < up_to}
        want = self.expected(tp, up_to)
        if low:
            table = {name: rec for name, rec in table.items() if rec.offset >= low}
            want = {name: rec for name, rec in want.items() if rec.offset >= low}
        for name, rec in want.items():
            found = table.pop(name, None)
            if rec.value is None:
                if found is not None and found.value is not None:
                    raise Violation("resurrection", f"{who}: {found} after {rec}")
            elif found != rec:
                raise Violation("value-lost", f"{who}: {found}, committed is {rec}")
        if table:
            raise Violation("prefix", f"{who}: {table} is not committed")

    def _compare(
        self, tp: TopicPartition, topic_id: UUID, node: int, view: View, generation: tuple[Any, int]
    ) -> None:
        identity, end = generation
        key = (view.seen, identity)
        if key == view.compared:
            return
        view.compared = key
        content = (
            [batch._replace(crc=0) for batch in view.batches if batch.last < end],
            [rec for rec in view.records if rec.offset < end],
        )
        name = topic_id, tp.partition, identity
        known, who, _ = self.generations.setdefault(name, (content, node, end))
        low = max(self.starts.setdefault(name, view.start), view.start)
        if low:
            known, content = _above(known, low), _above(content, low)
        if known != content:
            odd = [
                (mine, theirs)
                for ours, others in zip(content, known, strict=True)
                for mine, theirs in zip(ours, others, strict=False)
                if mine != theirs
            ]
            raise Violation(
                "generation-differs",
                f"{tp} at {identity}, below {end}: n{node} has {len(content[0])} batches, n{who} "
                f"had {len(known[0])}; {odd[:1]}",
            )

    def tombstones(self, tp: TopicPartition, node: int, below: int) -> list[Rec]:
        """Those that a replica still has."""
        view = self.views.get((node, tp))
        records = [] if view is None else view.records
        return [rec for rec in records if rec.value is None and rec.offset < below]

    def _finish(self, tp: TopicPartition, register: Register, state: PartitionRecord) -> None:
        """All replicas show the same table, the committed one."""
        for node in state.replicas:
            view = self.views.get((node, tp))
            if view is None:
                raise Violation("liveness", f"{tp}: n{node} has no replica, state {state}")
            view.judged = ()
            register.certain.add(node)
            self._judge(tp, node, view, register, None, register.end)
            self._producers(tp, node, view, register)

    def _producers(self, tp: TopicPartition, node: int, view: View, register: Register) -> None:
        """A batch that comes again would be there twice, where its producer is not known."""
        if self.may_miss(tp) or view.log is None:
            return
        low = max(view.start, register.start)
        last = {batch.producer_id: batch for batch in register.batches}
        there = {batch.base for batch in view.batches}
        for producer, batch in last.items():
            if batch.base >= low and batch.base not in there:
                raise Violation("producer-state", f"n{node} {tp}: {batch} is gone, the last")
            state = view.log.producers.get(producer)
            known = -1 if state is None else state.last_sequence
            if batch.base >= low and known != batch.last_sequence:
                raise Violation(
                    "producer-state", f"n{node} {tp}: of {batch} it knows sequence {known}"
                )


def _above(content: tuple[list[Batch], list[Rec]], low: int) -> tuple[list[Batch], list[Rec]]:
    """What a generation has from an offset on."""
    batches, records = content
    return [one for one in batches if one.last >= low], [r for r in records if r.offset >= low]
