"""What replicas must hold, judged from outside: rules 24-33 over every log of a history.

The checkers see each replica's batches as bytes (``batches.py``), its role and high watermark, and
the metadata as it is committed. They keep a register of what is committed: the batches below the
high watermark of a leader, in order. From it follow the names of the checks:

- ``epoch-matching``: a (leader epoch, offset) has one content on all replicas;
- ``one-leader``: one process leads a partition in an epoch;
- ``high-watermark-back``, ``prefix``: on a leader it never goes back; below it all replicas agree;
- ``isr-holds``: what is committed is on every ISR member that has not lost power since it had it;
- ``committed-lost``: who leads holds all of it, unless rule 33 gives it up;
- ``acknowledged``: an acknowledged batch is committed, where the answer says;
- ``sequence``: a producer's committed batches are there once, in order, without a gap;
- ``producer-epoch``: none of an older epoch is committed after one of a newer;
- ``kill-lost``: a killed process finds all that it had written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

from kept.cluster.metadata.image import Delta, Image
from kept.cluster.metadata.records import NO_LEADER, PartitionRecord
from kept.storage.types import TopicPartition
from tests.sim.batches import CONTROL, Batch
from tests.sim.world import Violation, World

INTERNAL = frozenset({"__consumer_offsets", "__transaction_state"})
"""Their batches have sequences of no meaning, or none."""

MAX_SEQUENCE = 2**31 - 1

Read = Callable[[int], list[Batch]]
"""The batches of a replica from an offset on."""


@dataclass
class Copy:
    """One replica as it was seen last. ``checked``: it agrees with the register below that."""

    process: int
    batches: list[Batch] = field(default_factory=list)
    start: int = 0
    end: int = 0
    truncations: int = 0
    checked: int = 0
    high_watermark: int = 0
    leads_in: int | None = None
    exempt: bool = False

    def index_of(self, offset: int) -> int:
        """Position of the first batch that ends above ``offset``."""
        return bisect_left(self.batches, offset, key=lambda batch: batch.last)

    def last_epoch(self) -> int:
        return self.batches[-1].epoch if self.batches else -1


@dataclass
class Register:
    """What is committed in a partition; ``give_ups``: how often acknowledged records may have been
    lost (rule 33: no ISR member kept its disk's content).
    """

    state: PartitionRecord | None = None
    batches: list[Batch] = field(default_factory=list)
    start: int = 0
    end: int = 0
    certain: set[int] = field(default_factory=set)
    give_ups: int = 0
    sequences: dict[tuple[int, int], int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    """By producer id: its highest epoch with a committed batch."""
    leaders: dict[int, tuple[int, int]] = field(default_factory=dict)
    acked: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    rebase: bool = False
    by_election: bool = False


class ReplicaChecks:
    """One per history; see the module. ``durable``: topics whose appends are flushed at once."""

    def __init__(self, world: World, *, durable: bool = False) -> None:
        self.world = world
        self.durable = durable
        self.copies: dict[tuple[int, TopicPartition], Copy] = {}
        self.registers: dict[TopicPartition, Register] = {}
        self.contents: dict[tuple[TopicPartition, int, int], Batch] = {}
        self.image_index = 0
        self.dark: set[int] = set()
        self.broker_epochs: dict[int, int] = {}
        self.strict: set[int] = set()
        """Producer ids of acks=all: nothing of theirs may be missing."""
        self.commits = 0
        self.unclean = False
        """Unclean elections are allowed."""
        self.topics: dict[str, tuple[UUID, int]] = {}
        """Topic -> its id, number of partitions."""

    def register(self, tp: TopicPartition) -> Register:
        return self.registers.setdefault(tp, Register())

    # What becomes of machines.

    def died(self, node: int, kind: str) -> None:
        """A process ended; a power loss may have taken what was not flushed."""
        for (owner, _), copy in self.copies.items():
            if owner == node:
                copy.leads_in = None
        if kind == "power":
            self.dark.add(node)
            for tp, register in self.registers.items():
                self.copies.pop((node, tp), None)
                register.certain.discard(node)
                self._consider_giving_up(tp, register)

    def _consider_giving_up(self, tp: TopicPartition, register: Register) -> None:
        if register.state is not None and not register.certain and not register.rebase:
            register.give_ups += 1
            register.rebase = True
            self.world.note("checks", f"{tp}: every ISR member lost power, losses are allowed")

    # Metadata.

    def metadata(self, index: int, image: Image, delta: Delta) -> None:
        """The first member to apply an entry brings it here."""
        if index <= self.image_index:
            return
        self.image_index = index
        self.dark -= {node for node in delta.brokers if self._registered_anew(image, node)}
        for gone in delta.topics_deleted:
            self._deleted(gone.name)
        for change in delta.partitions:
            self._changed(change.topic_partition, change.after)
        for name, topic in image.topics.items():
            self.topics[name] = (topic.topic_id, len(topic.partitions))

    def there(self, topic: str) -> int:
        """How many partitions a topic has; 0: there is none."""
        return self.topics.get(topic, (None, 0))[1]

    def _deleted(self, name: str) -> None:
        """Its records, and what was promised of them, are gone."""
        self.topics.pop(name, None)
        for tp in [tp for tp in self.registers if tp.topic == name]:
            del self.registers[tp]
        for key in [key for key in self.copies if key[1].topic == name]:
            del self.copies[key]
        self.contents = {k: v for k, v in self.contents.items() if k[0].topic != name}

    def removed(self, node: int, tp: TopicPartition) -> None:
        """A replica is deleted."""
        self.copies.pop((node, tp), None)

    def _registered_anew(self, image: Image, node: int) -> bool:
        broker = image.brokers.get(node)
        epoch = -1 if broker is None else broker.broker_epoch
        known = self.broker_epochs.get(node, -1)
        self.broker_epochs[node] = epoch
        return epoch != known

    def _changed(self, tp: TopicPartition, state: PartitionRecord) -> None:
        register = self.register(tp)
        before = register.state
        register.state = state
        if before is None:
            register.certain = set(state.isr)
            return
        if state.leader_epoch < before.leader_epoch:
            raise Violation("one-leader", f"{tp}: {state} after {before}")
        if state.leader not in (NO_LEADER, before.leader) and state.leader not in state.isr:
            raise Violation("one-leader", f"{tp}: the leader is outside the ISR: {state}")
        if state.unclean and state.leader_epoch != before.leader_epoch:
            if self.unclean:
                self._elected_unclean(tp, register, state)
                return
            if not before.unclean and not before.recovering:  # by length nothing may be lost
                raise Violation("unclean", f"{tp}: {state} with unclean election off")
        for member in set(state.isr) - set(before.isr):
            if member not in self.dark:
                register.certain.add(member)
        register.certain &= set(state.isr) | set(state.elr)
        self._consider_giving_up(tp, register)
        if not register.certain and state.leader != NO_LEADER:
            register.certain = {state.leader}
        self._isr_holds(tp, register)

    def _elected_unclean(
        self, tp: TopicPartition, register: Register, state: PartitionRecord
    ) -> None:
        self.world.counts["unclean elections"] += 1
        self.world.note("checks", f"{tp}: an unclean election, losses are allowed")
        register.give_ups += 1
        register.rebase = register.by_election = True
        register.certain = {state.leader}

    # Replicas.

    def look(  # noqa: PLR0917
        self,
        node: int,
        process: int,
        tp: TopicPartition,
        topic_id: UUID,
        read: Read,
        start: int,
        end: int,
        truncations: int,
        high_watermark: int,
        leads_in: int | None,
    ) -> None:
        """Judge a replica after something happened to it. ``leads_in``: epoch, None: follows.

        A replica of a topic that is deleted, and perhaps made anew, is not judged any more.
        """
        if self.topics.get(tp.topic, (None, 0))[0] != topic_id:
            return
        copy = self.copies.get((node, tp))
        if copy is None or copy.process != process:
            copy = self._restarted(node, process, tp, copy, read, start, end)
            copy.truncations = truncations
        if copy.truncations != truncations or end < copy.end or start > end:
            self._cut(copy, truncations, read, start, end)
        if end > copy.end:
            self._read(tp, node, copy, read(copy.end))
            copy.end = end
        copy.start = start
        register = self.register(tp)
        if copy.exempt and self._still_exempt(copy, register, leads_in, high_watermark):
            pass
        elif leads_in is not None:
            self._leads(tp, node, copy, register, leads_in, high_watermark)
        elif high_watermark > copy.checked:
            self._prefix(tp, node, copy, register, high_watermark)
        copy.leads_in = leads_in
        copy.high_watermark = high_watermark

    def _restarted(  # noqa: PLR0917
        self,
        node: int,
        process: int,
        tp: TopicPartition,
        old: Copy | None,
        read: Read,
        start: int,
        end: int,
    ) -> Copy:
        copy = self.copies[node, tp] = Copy(process)
        self._read(tp, node, copy, read(start))
        copy.end = end
        register = self.register(tp)
        copy.exempt = register.give_ups > 0
        if old is not None and end < min(old.end, register.end) and node in register.certain:
            raise Violation(
                "kill-lost",
                f"n{node} {tp}: the log ended at {old.end}, {register.end} were committed; after "
                f"the restart it ends at {end}",
            )
        return copy

    def _read(self, tp: TopicPartition, node: int, copy: Copy, found: list[Batch]) -> None:
        contents = self.contents
        for batch in found:
            known = contents.setdefault((tp, batch.epoch, batch.base), batch)
            if known is not batch and known != batch:
                raise Violation("epoch-matching", f"n{node} {tp} has {batch}, others have {known}")
        copy.batches += found

    def _cut(self, copy: Copy, truncations: int, read: Read, start: int, end: int) -> None:
        copy.truncations = truncations
        known = {batch.base: batch for batch in copy.batches}
        copy.batches = []
        same = start
        for batch in read(start):
            if known.get(batch.base) != batch:
                break
            copy.batches.append(batch)
            same = batch.last + 1
        copy.end = same
        copy.checked = min(copy.checked, copy.end)

    def _leads(  # noqa: PLR0917
        self, tp: TopicPartition, node: int, copy: Copy, register: Register, epoch: int, hw: int
    ) -> None:
        known = register.leaders.setdefault(epoch, (node, copy.process))
        if known != (node, copy.process):
            raise Violation(
                "one-leader",
                f"{tp}: n{node} (process {copy.process}) leads in epoch {epoch}, as n{known[0]} "
                f"(process {known[1]}) did",
            )
        if copy.leads_in == epoch and hw < copy.high_watermark:
            raise Violation(
                "high-watermark-back",
                f"n{node} {tp}: {hw} after {copy.high_watermark} in epoch {epoch}",
            )
        state = register.state
        if copy.leads_in != epoch and state is not None and state.leader_epoch == epoch:
            self._takes_over(tp, node, copy, register)
        register.start = max(register.start, copy.start)
        if copy.start > register.end:
            raise Violation("retention", f"n{node} {tp} starts at {copy.start}, {register.end} are")
        if hw > copy.checked:
            self._prefix(tp, node, copy, register, min(hw, register.end))
            if hw > register.end:
                self._commit(tp, node, copy, register, hw)
            copy.checked = hw

    def _still_exempt(self, copy: Copy, register: Register, leads_in: int | None, hw: int) -> bool:
        """A replica that holds what was given up is not judged until it has come over."""
        state = register.state
        assert state is not None
        if leads_in is not None:
            copy.exempt = leads_in < state.leader_epoch
            return copy.exempt
        held = [b for b in copy.batches if b.last < hw]
        at = bisect_left(register.batches, copy.start, key=lambda batch: batch.last)
        copy.exempt = held != register.batches[at : at + len(held)]
        copy.checked = min(copy.checked, register.end)
        return copy.exempt

    def _takes_over(self, tp: TopicPartition, node: int, copy: Copy, register: Register) -> None:
        """A new leader, still leading by the newest metadata, holds all that is committed."""
        if register.rebase:
            register.rebase = False
            self._rebase(tp, copy, register)
        elif copy.end < register.end:
            raise Violation(
                "committed-lost",
                f"{tp}: n{node} leads in epoch {register.state and register.state.leader_epoch}, "
                f"its log ends at {copy.end}, {register.end} are committed; "
                f"n{sorted(register.certain)} should have them",
            )
        self._prefix(tp, node, copy, register, register.end)

    def _rebase(self, tp: TopicPartition, copy: Copy, register: Register) -> None:
        """Rule 33 gave something up: what the new leader holds counts from here on."""
        low, deleted_to = max(copy.start, register.start), register.start
        first = bisect_left(register.batches, low, key=lambda batch: batch.last)
        same = first
        held = copy.batches[copy.index_of(low) :]
        for mine, theirs in zip(held, register.batches[first:], strict=False):
            if mine != theirs:
                break
            same += 1
        lost = register.batches[same:]
        by_election, register.by_election = register.by_election, False
        if lost and self.durable and not by_election:
            gone = [b for b in lost if b.identity in register.acked]
            if gone:
                raise Violation(
                    "acknowledged-lost", f"{tp}: {gone[0]} was acknowledged with flush.messages=1"
                )
        if lost:
            self.world.note("checks", f"{tp}: lost, as rule 33 allows: from {lost[0]}")
            register.batches = register.batches[:same]
            register.end = register.batches[-1].last + 1 if same > first else low
            register.end = min(register.end, copy.end)
            register.start = min(register.start, register.end)
            while register.batches and register.batches[-1].last >= register.end:
                register.batches.pop()  # retention had taken it, and the new leader never had it
            register.sequences.clear()
            register.epochs.clear()
            for batch in register.batches[first:]:  # others' producers it may not know: KIP-360
                if not batch.attributes & CONTROL:
                    producer = batch.producer_id, batch.producer_epoch
                    register.sequences[producer] = batch.next_sequence
            gone = {b.identity for b in lost}
            register.acked = {  # what was deleted is not asked for, though offsets begin lower now
                k: v for k, v in register.acked.items() if k not in gone and v[0] >= deleted_to
            }
            for (_, owner), other in self.copies.items():
                if owner == tp and other is not copy:
                    other.checked = min(other.checked, register.end)
                    other.exempt = True
        if copy.start > register.end:  # its log begins behind all that was left
            register.batches = []
            register.start = register.end = copy.start
            register.sequences.clear()
            register.epochs.clear()
            register.acked.clear()

    def _prefix(
        self, tp: TopicPartition, node: int, copy: Copy, register: Register, up_to: int
    ) -> None:
        """Below ``up_to`` the replica holds what the register holds."""
        low = max(copy.checked, copy.start, register.start)
        if up_to <= low:
            return
        mine = [b for b in copy.batches[copy.index_of(low) :] if b.last < up_to]
        at = bisect_left(register.batches, low, key=lambda batch: batch.last)
        theirs = [b for b in register.batches[at:] if b.last < up_to]
        if mine != theirs:
            odd = next(
                ((m, t) for m, t in zip(mine, theirs, strict=False) if m != t),
                (mine[len(theirs) :], theirs[len(mine) :]),
            )
            raise Violation("prefix", f"n{node} {tp}, below {up_to}: {odd[0]}; committed: {odd[1]}")
        copy.checked = up_to

    def _commit(
        self, tp: TopicPartition, node: int, copy: Copy, register: Register, hw: int
    ) -> None:
        for batch in copy.batches[copy.index_of(register.end) :]:
            if batch.last >= hw:
                break
            register.batches.append(batch)
            register.end = batch.last + 1
            self.commits += 1
            if batch.producer_id >= 0 and not (batch.attributes & CONTROL or tp.topic in INTERNAL):
                self._sequence(tp, register, batch)
        state = register.state
        assert state is not None
        for gone in register.certain - set(state.isr):
            other = self.copies.get((gone, tp))
            if other is None or other.end < register.end:
                register.certain.discard(gone)
        self._isr_holds(tp, register, except_node=node)

    def _sequence(self, tp: TopicPartition, register: Register, batch: Batch) -> None:
        key = (batch.producer_id, batch.producer_epoch)
        newest = register.epochs.get(batch.producer_id, -1)
        if batch.producer_epoch < newest and not self.forgotten(
            tp, batch.producer_id, newest, MAX_SEQUENCE
        ):
            raise Violation("producer-epoch", f"{tp}: {batch} is committed after epoch {newest}")
        register.epochs[batch.producer_id] = max(newest, batch.producer_epoch)
        expected = register.sequences.get(key)
        if expected is None:
            strict = batch.producer_id in self.strict and not register.give_ups
            expected = 0 if strict else batch.sequence
        if batch.sequence > expected and self.forgotten(tp, *batch.identity):
            self.world.counts["producers begun anew where they were not known"] += 1
        elif batch.sequence != expected:
            raise Violation(
                "sequence", f"{tp}: {batch} is committed, sequence {expected} would be next"
            )
        register.sequences[key] = batch.next_sequence

    def forgotten(
        self, tp: TopicPartition, producer_id: int, producer_epoch: int, sequence: int
    ) -> bool:
        """Whether all that a producer had committed before a sequence is deleted.

        A replica whose log began anew behind the deleted records does not know the producer, and
        takes the first batch that comes, whatever its sequence (KIP-360; Apache Kafka, too).
        """
        register = self.register(tp)
        at = bisect_left(register.batches, register.start, key=lambda known: known.last)
        return register.start > 0 and not any(
            known.identity[:2] == (producer_id, producer_epoch) and known.sequence < sequence
            for known in register.batches[at:]
        )

    def _isr_holds(
        self, tp: TopicPartition, register: Register, except_node: int | None = None
    ) -> None:
        state = register.state
        assert state is not None
        if register.rebase:
            return
        for member in state.isr:
            copy = self.copies.get((member, tp))
            if copy is None or member == except_node or member not in register.certain:
                continue
            if copy.end < register.end:
                raise Violation(
                    "isr-holds",
                    f"{tp}: up to {register.end} is committed, n{member} of the ISR {state.isr} "
                    f"(partition epoch {state.partition_epoch}) has {copy.end}",
                )

    # Answers.

    def acknowledged(self, tp: TopicPartition, node: int, batch: Batch) -> None:
        """A leader says that a batch is committed (acks=all)."""
        register = self.register(tp)
        copy = self.copies.get((node, tp))
        if copy is None or copy.exempt or register.rebase:
            return
        found = self.committed_at(tp, batch.base)
        key = batch.identity
        if found is None or (found.base, found.identity) != (batch.base, key):
            raise Violation(
                "acknowledged", f"n{node} {tp} acknowledges {batch}; committed there: {found}"
            )
        register.acked[key] = (batch.base, self.world.now_us)

    def committed_at(self, tp: TopicPartition, offset: int) -> Batch | None:
        """The committed batch that holds an offset."""
        batches = self.register(tp).batches
        at = bisect_left(batches, offset, key=lambda known: known.last)
        return batches[at] if at < len(batches) and batches[at].base <= offset else None

    def has(
        self, tp: TopicPartition, producer_id: int, sequence: int, producer_epoch: int = 0
    ) -> bool:
        """Whether a producer's batch is committed (and perhaps compacted), or may be: it is on a
        replica.
        """
        key = (producer_id, producer_epoch, sequence)
        held = [copy.batches for (_, owner), copy in self.copies.items() if owner == tp]
        held.append(self.register(tp).batches)
        return any(b.identity == key for batches in held for b in batches)

    def finish(self) -> None:
        """At the end, after healing: all replicas equal, every acknowledged batch there, once."""
        for tp, register in self.registers.items():
            if register.state is not None:
                self._finish(tp, register, register.state)

    def _finish(self, tp: TopicPartition, register: Register, state: PartitionRecord) -> None:
        places = {b.identity: b.base for b in register.batches}
        for key, (base, _) in register.acked.items():
            if base >= register.start and places.get(key) != base:
                raise Violation(
                    "committed-lost", f"{tp}: {key} was acknowledged at {base}: {places}"
                )
        copies = {n: self.copies.get((n, tp)) for n in state.replicas}
        leader = copies.get(state.leader)
        for node, copy in copies.items():
            if copy is None or leader is None:
                raise Violation("liveness", f"{tp}: n{node} has no replica, state {state}")
            start = max(copy.start, leader.start)
            mine = [b for b in copy.batches if b.base >= start]
            theirs = [b for b in leader.batches if b.base >= start]
            if mine != theirs:
                raise Violation("replicas-differ", f"{tp}: n{node} and leader n{state.leader}")
