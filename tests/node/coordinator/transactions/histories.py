"""Histories of a core and its markers as prose: commands at the margin, effects indented below.

A command is a line that starts at the margin; what happens follows, indented by two spaces. ``#``
begins a comment. Appends commit at once unless ``hold appends`` was said; then ``commit append``,
``reject append ERROR`` and ``time out append ERROR`` end the oldest one. Markers are answered at
once unless ``hold markers`` was said; then ``markers NODE [PARTITION=ERROR...]`` answers the
request that is under way, ``markers NODE broken`` breaks it. Producer ids are drawn at once unless
``hold ids`` was said; then ``draw`` and ``draw fails ERROR``.
"""

from __future__ import annotations

import shlex
from collections import Counter

from kio.schema.errors import ErrorCode
from msgspec.structs import replace

from kept.node.coordinator.common.events import (
    AppendCommitted,
    AppendRecords,
    AppendRejected,
    AppendStaged,
    AppendTimedOut,
    EndMarker,
    Response,
)
from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions import markers as mk
from kept.node.coordinator.transactions.connection_order import ConnectionOrder
from kept.node.coordinator.transactions.core import TransactionCore
from kept.node.coordinator.transactions.id_pattern import compile_pattern
from kept.node.coordinator.transactions.records import (
    TransactionMetadata,
    TransactionRecord,
    TransactionState,
    decode_record,
    partitions_by_topic,
)
from kept.steps import run_to_end
from kept.storage.types import TopicPartition
from tests.support import histories as support
from tests.support.histories import milliseconds

STATE_PARTITION = 0
WALL_MS = 1_000_000
"""The wall clock when the history begins."""


def partition(text: str) -> TopicPartition:
    topic, _, number = text.rpartition("-")
    return TopicPartition(topic, int(number))


class Words(support.Words):
    """Of a command about producers."""

    def producer(self) -> tuple[int, int]:
        """``as PRODUCER_ID/EPOCH``."""
        pid, _, epoch = self.option("as", "-1/-1").partition("/")
        return int(pid), int(epoch)


class Leader:
    """A partition of an image."""

    def __init__(self, leader: int) -> None:
        self.leader = leader


class Image:
    """Leaders of partitions; those not named are led by node 1."""

    def __init__(self, leaders: dict[TopicPartition, int | None]) -> None:
        self.leaders = dict(leaders)

    def partition(self, topic: str, number: int) -> Leader | None:
        leader = self.leaders.get(TopicPartition(topic, number), 1)
        return None if leader is None else Leader(leader)


class History:
    """Runs commands on a core and a sender of markers, and says what they did."""

    core_class = TransactionCore
    sender_class = mk.MarkerSender

    def __init__(self) -> None:
        self.settings: dict[str, int] = {"transaction_version": 2}
        self.now = 0
        self.wall_offset = WALL_MS
        self.request = 0
        self.next_producer_id = 7
        self.epoch = 1
        self.held: set[str] = set()
        self.log: list[TransactionRecord] = []
        self.appends: list[AppendRecords] = []
        self.sent: dict[int, mk.SendMarkers] = {}
        self.leaders: dict[TopicPartition, int | None] = {}
        self.lines: list[str] = []
        self.connections = ConnectionOrder()
        self.newest_connection = -1
        self.core = self._new_core()
        self.sender = self.sender_class()
        self.sender.step(mk.ImageChanged(Image({})), 0)

    def _new_core(self) -> TransactionCore:
        settings = ev.TransactionSettings(**self.settings)
        core = self.core_class(settings, STATE_PARTITION, self.epoch, self.connections)
        core.wall_offset_ms = self.wall_offset
        run_to_end(core.loaded(self.now))
        return core

    def run(self, line: str) -> list[str]:
        """Carry out one command; the effects, one a line."""
        self.lines = []
        words = shlex.split(line)
        getattr(self, "do_" + words[0])(Words(words[1:]))
        self.core.check_invariants()
        self.sender.check_invariants()
        return self.lines

    def _step(self, event: ev.Event) -> None:
        self._perform(self.core.step(event, self.now))

    def _step_sender(self, event: mk.Event) -> None:
        self._perform(self.sender.step(event, self.now))

    def _perform(self, effects: tuple[ev.Effect | mk.Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case ev.MarkersWritten():
                    self.lines.append(f"written {describe_partitions(effect.partitions)}")
                    self._step(effect)
                case ev.WriteMarkers():
                    self._step_sender(effect)
                case AppendRecords():
                    self.lines += map(describe_record, effect.records)
                    self.appends.append(effect)
                    self._step(AppendStaged(effect.append, len(self.log)))
                    if "appends" not in self.held:
                        self._commit_oldest()
                case mk.SendMarkers():
                    marks = [describe_entry(entry) for entry in effect.entries]
                    self.lines += [f"send to {effect.node}: {mark}" for mark in marks]
                    self.sent[effect.node] = effect
                    if "markers" not in self.held:
                        self._answer_markers(effect.node, {})
                case ev.AllocateProducerId():
                    if "ids" in self.held:
                        self.lines.append("draw a producer id")
                    else:
                        self.do_draw(Words([]))
                case mk.ConfirmLeadership():
                    self.lines.append(f"confirm leadership of {effect.state_partition}")
                case ev.NoteTransaction():
                    self.lines.append(f"note: {effect.subject}: {effect.text}")
                case Response():
                    self.lines.append(f"answer #{effect.request}: {describe_result(effect.result)}")

    def _commit_oldest(self) -> None:
        append = self.appends.pop(0)
        self.log += append.records
        self._step(AppendCommitted(append.append))

    def _answer_markers(self, node: int, errors: dict[TopicPartition, ErrorCode]) -> None:
        sent = self.sent.pop(node)
        answers = tuple(
            (entry.marker.producer_id, tp, errors.get(tp, ErrorCode.none))
            for entry in sent.entries
            for tp in sorted(entry.partitions)
        )
        self._step_sender(mk.MarkersResponseReceived(node, answers))

    def _next_request(self) -> int:
        self.request += 1
        return self.request

    # Commands.

    def do_set(self, words: Words) -> None:
        """Other settings, which need a restart."""
        self.settings.update({w.partition("=")[0]: int(w.partition("=")[2]) for w in words.words})
        self.do_restart(words)

    def do_init(self, words: Words) -> None:
        pid, epoch = words.producer()
        timeout = words.option("timeout", "60s")
        timeout_ms = 2**31 - 1 if timeout == "never" else milliseconds(timeout)
        request = self._next_request()
        self._step(ev.InitProducerId(request, words.words[0], timeout_ms, pid, epoch))

    def do_add(self, words: Words) -> None:
        pid, epoch = words.producer()
        tv2, offsets = words.flag("tv2"), words.flag("offsets")
        ordinal = words.option("over")
        self._step(
            ev.AddPartitions(
                self._next_request(),
                words.words[0],
                pid,
                epoch,
                frozenset(map(partition, words.words[1:])),
                2 if tv2 else 0,
                self._connection(ordinal, 25 if offsets else 24),
            )
        )

    def do_verify(self, words: Words) -> None:
        pid, epoch = words.producer()
        partitions = frozenset(map(partition, words.words[1:]))
        request = self._next_request()
        self._step(ev.VerifyPartitions(request, words.words[0], pid, epoch, partitions))

    def _end(self, words: Words, *, is_commit: bool) -> None:
        pid, epoch = words.producer()
        tv2, ordinal = words.flag("tv2"), words.option("over")
        self._step(
            ev.EndTransaction(
                self._next_request(),
                words.words[0],
                pid,
                epoch,
                is_commit,
                2 if tv2 else 0,
                self._connection(ordinal, 26),
            )
        )

    def do_commit(self, words: Words) -> None:
        if words.words == ["append"]:
            self._commit_oldest()
        else:
            self._end(words, is_commit=True)

    def do_abort(self, words: Words) -> None:
        self._end(words, is_commit=False)

    def do_after(self, words: Words) -> None:
        """Time passes; every timer on the way fires at its own moment."""
        until = self.now + milliseconds(words.words[0])
        while (due := self._next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            before = len(self.lines)
            self._perform(self.core.tick(self.now))
            self._perform(self.sender.tick(self.now))
            if len(self.lines) > before:
                self.lines.insert(before, f"at {self.now}ms:")
        self.now = until

    def _next_deadline(self) -> int | None:
        deadlines = (self.core.next_deadline_ms, self.sender.next_deadline_ms)
        return min((d for d in deadlines if d is not None), default=None)

    def do_stall(self, words: Words) -> None:
        """The process stands still: time passes, and nothing happens meanwhile."""
        self.now += milliseconds(words.words[0])
        self._perform(self.core.restart_timeouts(self.now))
        self._perform(self.core.tick(self.now))

    def do_wall(self, words: Words) -> None:
        """Somebody sets the wall clock."""
        (jump,) = words.words
        self.wall_offset += milliseconds(jump.lstrip("-")) * (-1 if jump[0] == "-" else 1)
        self.core.wall_offset_ms = self.wall_offset

    def do_hold(self, words: Words) -> None:
        self.held.update(words.words)

    def do_release(self, words: Words) -> None:
        self.held.difference_update(words.words)
        while self.appends and "appends" not in self.held:
            self._commit_oldest()
        while self.sent and "markers" not in self.held:
            self._answer_markers(min(self.sent), {})

    def do_reject(self, words: Words) -> None:
        append = self.appends.pop()
        self._step(AppendRejected(append.append, ErrorCode[words.words[1]]))

    def do_time(self, words: Words) -> None:
        self._step(AppendTimedOut(self.appends[0].append, ErrorCode[words.words[2]]))

    def do_markers(self, words: Words) -> None:
        node = int(words.words[0])
        if words.words[1:] == ["broken"]:
            del self.sent[node]
            self._step_sender(mk.MarkersFailed(node))
            return
        errors = [w.partition("=") for w in words.words[1:]]
        self._answer_markers(node, {partition(p): ErrorCode[e] for p, _, e in errors})

    def do_led(self, words: Words) -> None:
        """``led PARTITION=NODE...``: a new image; -1 nobody, ``gone`` deleted, ``back`` by 1."""
        for word in words.words:
            name, _, leader = word.partition("=")
            leaders = {"gone": None, "back": 1}
            self.leaders[partition(name)] = leaders[leader] if leader in leaders else int(leader)
        self._step_sender(mk.ImageChanged(Image(self.leaders)))

    def do_confirm(self, words: Words) -> None:
        is_leader = words.words == ["yes"]
        self._step_sender(mk.LeadershipConfirmed(STATE_PARTITION, is_leader))

    def do_draw(self, words: Words) -> None:
        if words.flag("fails"):
            self._step(ev.ProducerIdAllocationFailed(ErrorCode[words.words[0]]))
            return
        self.next_producer_id += 1
        self._step(ev.ProducerIdAllocated(self.next_producer_id - 1))

    def do_bump(self, words: Words) -> None:
        """``bump ID to EPOCH``: as after as many transactions."""
        name, epoch = words.words[0], int(words.option("to"))
        held = self.core.ids.hold(name)
        held.committed = replace(held.committed, epoch=epoch)
        self.log.append(TransactionRecord(name, held.committed))

    def _connection(self, ordinal: str | None, api_key: int) -> ev.ClientConnection | None:
        if not ordinal:
            return None
        self.newest_connection = max(self.newest_connection, int(ordinal))
        return ev.ClientConnection(int(ordinal), api_key)

    def do_list(self, words: Words) -> None:
        states = [s for s in words.option("states", "").split(",") if s]
        pattern, longer = words.option("pattern"), words.option("longer")
        producers = [int(p) for p in words.option("producers", "").split(",") if p]
        wanted = ev.TransactionFilter(
            [s for s in TransactionState if s.kafka_name in states],
            producers,
            milliseconds(longer) if longer else -1,
            compile_pattern(pattern),
        )
        listed = self.core.list_transactions(wanted, self.now + self.wall_offset)
        for t in filter(None, listed):
            self.lines.append(f"{t.transactional_id} {t.producer_id} {t.state.kafka_name}")

    def do_counts(self, _: Words) -> None:
        self.lines += [f"{count} {what}" for what, count in sorted(self.core.counts.items())]
        states = sorted(Counter(self.core.ids.states()).items())
        self.lines += [f"{count} in {state.kafka_name}" for state, count in states]

    def do_written(self, words: Words) -> None:
        """``written PARTITION... as PRODUCER_ID/EPOCH by EPOCH``, whoever waits for it."""
        coordinator_epoch = int(words.option("by"))
        marker = EndMarker(*words.producer(), coordinator_epoch, is_commit=True)
        partitions = frozenset(map(partition, words.words))
        self._step(ev.MarkersWritten(STATE_PARTITION, marker, partitions))

    def do_describe(self, words: Words) -> None:
        t = self.core.describe(words.words[0])
        if t is None:
            self.lines.append("no such id")
            return
        since = f" since {t.start_ms}" if t.start_ms >= 0 else ""
        self.lines.append(
            f"{t.transactional_id} {t.state.kafka_name} {t.producer_id}/{t.epoch} "
            f"{t.timeout_ms}ms{since}: {describe_partitions(t.partitions) or 'no partitions'}"
        )

    def do_restart(self, words: Words) -> None:
        """The node dies, and the next one reads what is committed, as bytes; ``restart with 1``:
        and the oldest append that was not, which that node had when it was elected.
        """
        for append in self.appends[: int(words.option("with", "0"))]:
            self.log += append.records
        self.connections, self.newest_connection = ConnectionOrder(), -1
        self.do_lead(Words(["again"]))

    def do_lead(self, _: Words) -> None:
        """``lead again``: this node, in the next epoch."""
        self._leave()
        self.connections.lead_again(self.newest_connection)
        self.epoch += 1
        self.core = self.core_class(
            ev.TransactionSettings(**self.settings), STATE_PARTITION, self.epoch, self.connections
        )
        self.core.wall_offset_ms = self.wall_offset
        for record in self.log:
            self.core.replay(reread(record))
        self._perform(run_to_end(self.core.loaded(self.now)))

    def do_unload(self, _: Words) -> None:
        self._perform(self.core.unload())
        self._leave()
        self.core = self._new_core()

    def _leave(self) -> None:
        """What is under way is answered to nobody later; its appends may, or may not, be there."""
        self.appends.clear()
        self._step_sender(mk.StatePartitionUnloaded(STATE_PARTITION))


def reread(record: TransactionRecord) -> TransactionRecord:
    """A record as it comes back from the log."""
    back = decode_record(*record.encode())
    assert back is not None
    return back


def describe_partitions(partitions: frozenset[TopicPartition]) -> str:
    return " ".join(
        f"{topic}-{','.join(map(str, numbers))}"
        for topic, numbers in partitions_by_topic(partitions)
    )


def describe_record(record: TransactionRecord) -> str:
    m = record.metadata
    if m is None:
        return f"append {record.transactional_id} forgotten"
    return f"append {record.transactional_id} {describe_metadata(m)}"


def describe_metadata(m: TransactionMetadata) -> str:
    last = f" last {m.last_epoch}" if m.last_epoch >= 0 else ""
    following = f" next {m.next_producer_id}" if m.next_producer_id >= 0 else ""
    where = f" {describe_partitions(m.partitions)}" if m.partitions else ""
    version = " tv2" if m.client_version else ""
    return f"{m.state.kafka_name} {m.producer_id}/{m.epoch}{last}{following}{where}{version}"


def describe_entry(entry: mk.MarkerEntry) -> str:
    return f"{describe_marker(entry.marker)} {describe_partitions(entry.partitions)}"


def describe_marker(marker: EndMarker) -> str:
    kind = "commit" if marker.is_commit else "abort"
    version = " tv2" if marker.version else ""
    return f"{kind} of {marker.producer_id}/{marker.epoch} by {marker.coordinator_epoch}{version}"


def describe_result(result: object) -> str:
    match result:
        case ev.StaleConnection():
            return "close the stale connection"
        case ev.InitProducerIdResult() | ev.EndTransactionResult() if result.error is ev.NO_ERROR:
            return f"none {result.producer_id}/{result.epoch}"
        case ev.VerifyPartitionsResult() if result.error is ev.NO_ERROR and result.absent:
            return f"absent {describe_partitions(result.absent)}"
    return result.error.name
