"""Which transaction markers go to which node, and what their answers mean.

A :class:`~kept.state_machine.StateMachine`, one a node, over all partitions of
``__transaction_state`` that it leads. Partitions are grouped by their leader; one WriteTxnMarkers
is under way to each node, with all that waits for it. A marker is never given up: only an answer,
the deletion of its partition, or the loss of the state partition ends it.

Duties of the shell: step :class:`ImageChanged` with each image, the first one before anything else,
and one that is current before a state partition is loaded, since a partition that the image lacks
counts as deleted; answer each :class:`SendMarkers` by :class:`MarkersResponseReceived` or
:class:`MarkersFailed`, each :class:`ConfirmLeadership` by :class:`LeadershipConfirmed`.

Who coordinates is proven for two things only: what got no answer (the shell waits for the proof
before it steps :class:`MarkersFailed`, but not after a bug of ours), and what was refused by who
may know a later coordinator. A marker that is sent for the first time, or again after any other
error, or once its partition has a leader, carries no proof, also where the leader is another one by
then. A coordinator that was replaced and does not know it yet may send these. A leader refuses them
by what it knows of the producer and of the connection, and takes them where it has forgotten the
producer and the connection is newer than its leadership (rule 50).

An answer is of the marker that was sent, coordinator epoch and all: one that is no longer wanted
changes nothing (KAFKA-16352). Where we differ: at INVALID_PRODUCER_EPOCH Kafka stops sending, and
the transaction hangs until a failover; we go on, if we still lead.

Source: Kafka's ``TransactionMarkerChannelManager``, ``TransactionMarkerRequestCompletionHandler``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Final, Protocol

from kio.schema.errors import ErrorCode
from msgspec import Struct

from kept.node.coordinator.common.events import EndMarker
from kept.node.coordinator.common.timers import Timers
from kept.node.coordinator.transactions.events import MarkersWritten, NoteTransaction, WriteMarkers
from kept.storage.errors import InvariantViolation
from kept.storage.types import TopicPartition

PARTITIONS_PER_REQUEST: Final = 500
"""Of one answer, which is handled at a stretch: a transaction that ends by it takes 35 us."""
FIRST_BACKOFF_MS: Final = 20
LAST_BACKOFF_MS: Final = 1_000

_WRITTEN: Final = frozenset(
    {
        ErrorCode.none,
        ErrorCode.unsupported_version,
        ErrorCode.unsupported_for_message_format,
    }
)
"""The partition has the marker, or can have none."""
_DOUBTED: Final = frozenset(
    {ErrorCode.transaction_coordinator_fenced, ErrorCode.invalid_producer_epoch}
)
"""Somebody else may be the coordinator."""
_EXPECTED: Final = frozenset(
    {
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.not_leader_or_follower,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.request_timed_out,
        ErrorCode.kafka_storage_error,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
    }
)
"""Another time, without a word."""


class PartitionView(Protocol):
    """A partition in an image; leader -1: none."""

    @property
    def leader(self) -> int:
        """The node that leads it."""
        ...


class ImageView(Protocol):
    """What is needed of the cluster's image, which is immutable."""

    def partition(self, topic: str, partition: int, /) -> PartitionView | None:
        """A partition; None: there is none."""
        ...


# Events, with events.WriteMarkers.


class ImageChanged(Struct, frozen=True):
    """Leaders may have moved, topics may be gone."""

    image: ImageView


class StatePartitionUnloaded(Struct, frozen=True):
    """This node leads that partition of ``__transaction_state`` no more."""

    state_partition: int


class MarkersResponseReceived(Struct, frozen=True):
    """The response to a :class:`SendMarkers`: (producer id, partition, error)."""

    node: int
    answers: tuple[tuple[int, TopicPartition, ErrorCode], ...]


class MarkersFailed(Struct, frozen=True):
    """There is no response to a :class:`SendMarkers`: no connection, or it broke."""

    node: int


class LeadershipConfirmed(Struct, frozen=True):
    """Whether this node leads that partition of ``__transaction_state``, by the controller."""

    state_partition: int
    is_leader: bool


Event = (
    WriteMarkers
    | ImageChanged
    | StatePartitionUnloaded
    | MarkersResponseReceived
    | MarkersFailed
    | LeadershipConfirmed
)

# Effects, with events.MarkersWritten.


class MarkerEntry(Struct, frozen=True):
    """A marker, and the partitions that it goes to."""

    marker: EndMarker
    partitions: frozenset[TopicPartition]


class SendMarkers(Struct, frozen=True):
    """Send a WriteTxnMarkers to ``node``, which may be this one. Markers of one request have
    different producer ids.
    """

    node: int
    entries: tuple[MarkerEntry, ...]


class ConfirmLeadership(Struct, frozen=True):
    """Let the controller say who leads that partition of ``__transaction_state``."""

    state_partition: int


Effect = SendMarkers | MarkersWritten | ConfirmLeadership | NoteTransaction


class MarkerJob(Struct, frozen=True):
    """A marker of a state partition: what partitions wait under."""

    state_partition: int
    marker: EndMarker


class NodeResumes(Struct, frozen=True):
    """A node that could not be reached gets another request."""

    node: int


class TryAgain(Struct, frozen=True):
    """Partitions that refused a marker get it again."""

    number: int
    job: MarkerJob
    partitions: frozenset[TopicPartition]


Waiting = defaultdict[MarkerJob, set[TopicPartition]]


def _waiting() -> Waiting:
    return defaultdict(set)


class MarkerSender:
    """Decides which markers go to which node, and when they are sent again."""

    def __init__(self) -> None:
        self._image: ImageView | None = None
        self._unwritten: dict[MarkerJob, set[TopicPartition]] = {}
        """All that is wanted; each partition is in one of the following, too."""
        self._queues: defaultdict[int, Waiting] = defaultdict(_waiting)
        self._in_flight: dict[int, dict[MarkerJob, frozenset[TopicPartition]]] = {}
        self._leaderless: Waiting = _waiting()
        self._doubted: dict[int, list[tuple[MarkerJob, TopicPartition, ErrorCode]]] = {}
        """By state partition: refused by who may know a later coordinator."""
        self._retries: dict[int, TryAgain] = {}

        self._attempts: dict[MarkerJob, Counter[TopicPartition]] = {}
        self._failures: dict[int, int] = {}
        """In a row, by node; it gets nothing until its timer fires."""
        self._timers: Timers[NodeResumes | TryAgain] = Timers()
        self._last_retry = 0
        self._now_ms = 0
        self._effects: list[Effect] = []

    def step(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Handle an event; the effects, in the order in which to carry them out."""
        self._now_ms = now_ms
        match event:
            case WriteMarkers():
                self._write(MarkerJob(event.state_partition, event.marker), event.partitions)
            case ImageChanged():
                self._image_changed(event)
            case StatePartitionUnloaded():
                self._drop(event.state_partition)
            case MarkersResponseReceived():
                self._answered(event)
            case MarkersFailed():
                self._failed(event.node)
            case LeadershipConfirmed():
                self._confirmed(event)
        return self._drain_effects()

    def tick(self, now_ms: int) -> tuple[Effect, ...]:
        """Fire the timers that are due."""
        self._now_ms = now_ms
        while (timer := self._timers.pop_due(now_ms)) is not None:
            if isinstance(timer, TryAgain):
                del self._retries[timer.number]
                self._route(timer.job, timer.partitions)
        return self._drain_effects()

    @property
    def next_deadline_ms(self) -> int | None:
        """When to call :meth:`tick` next."""
        return self._timers.next_deadline_ms

    @property
    def pending(self) -> int:
        """Partitions that have no marker yet."""
        return sum(map(len, self._unwritten.values()))

    @property
    def without_leader(self) -> int:
        """Those of them that nobody leads."""
        return sum(map(len, self._leaderless.values()))

    # Where partitions go.

    def _write(self, job: MarkerJob, partitions: frozenset[TopicPartition]) -> None:
        known = self._unwritten.setdefault(job, set())
        new = partitions - known
        known |= new
        self._route(job, new)

    def _route(self, job: MarkerJob, partitions: Iterable[TopicPartition]) -> None:
        """Queue partitions of a job that is wanted for their leaders."""
        wanted = self._unwritten.get(job, set())
        deleted = set()
        for tp in sorted(wanted.intersection(partitions)):
            if self._image is None:
                self._leaderless[job].add(tp)
                continue
            partition = self._image.partition(tp.topic, tp.partition)
            if partition is None:
                deleted.add(tp)
            elif partition.leader < 0:
                self._leaderless[job].add(tp)
            else:
                self._queues[partition.leader][job].add(tp)
        self._written(job, deleted)

    def _image_changed(self, event: ImageChanged) -> None:
        self._image = event.image
        waiting = [self._leaderless, *self._queues.values()]
        self._leaderless, self._queues = _waiting(), defaultdict(_waiting)
        for jobs in waiting:
            for job, partitions in jobs.items():
                self._route(job, partitions)

    def _written(self, job: MarkerJob, partitions: set[TopicPartition]) -> None:
        """Partitions need no marker of this job any more."""
        wanted = self._unwritten.get(job)
        done = frozenset() if wanted is None else frozenset(wanted & partitions)
        if wanted is None or not done:
            return
        wanted -= done
        if not wanted:
            del self._unwritten[job]
            self._attempts.pop(job, None)
        self._effects.append(MarkersWritten(job.state_partition, job.marker, done))

    def _again(self, job: MarkerJob, partitions: set[TopicPartition]) -> None:
        """Partitions of a job get its marker again, after a while."""
        wanted = frozenset(partitions & self._unwritten.get(job, set()))
        if not wanted:
            return
        attempts = self._attempts.setdefault(job, Counter())
        attempts.update(wanted)
        attempt = max(attempts[tp] for tp in wanted)
        self._last_retry += 1
        retry = self._retries[self._last_retry] = TryAgain(self._last_retry, job, wanted)
        key = ("retry", str(self._last_retry))
        self._timers.set(key, self._now_ms + _backoff_ms(attempt), retry)

    def _drop(self, state_partition: int) -> None:
        """Forget the markers of a partition; what is under way finds nobody when it is answered."""
        places: list[dict[MarkerJob, Any]] = [self._unwritten, self._attempts, self._leaderless]
        for jobs in (*places, *self._queues.values(), *self._in_flight.values()):
            for job in [job for job in jobs if job.state_partition == state_partition]:
                del jobs[job]
        for retry in tuple(self._retries.values()):
            if retry.job.state_partition == state_partition:
                del self._retries[retry.number]
                self._timers.cancel(("retry", str(retry.number)))
        self._doubted.pop(state_partition, None)

    # Requests and their answers.

    def _drain_effects(self) -> tuple[Effect, ...]:
        """The effects, and requests to nodes that have none under way."""
        for node in sorted(self._queues):
            if node not in self._in_flight and self._timers.deadline(_node_key(node)) is None:
                self._send(node)
        effects, self._effects = self._effects, []
        return tuple(effects)

    def _send(self, node: int) -> None:
        queue = self._queues[node]
        sent: dict[MarkerJob, frozenset[TopicPartition]] = {}
        room = PARTITIONS_PER_REQUEST
        for job, partitions in queue.items():
            if room == 0:
                break
            if partitions:
                sent[job] = frozenset(sorted(partitions)[:room])
                room -= len(sent[job])
        for job, taken in sent.items():
            queue[job] -= taken
            if not queue[job]:
                del queue[job]
        if sent:
            self._in_flight[node] = sent
            entries = tuple(MarkerEntry(job.marker, part) for job, part in sent.items())
            self._effects.append(SendMarkers(node, entries))
        if not queue or not sent:
            del self._queues[node]

    def _answered(self, event: MarkersResponseReceived) -> None:
        self._failures.pop(event.node, None)
        sent = self._in_flight.pop(event.node, {})
        answers = {(pid, tp): error for pid, tp, error in event.answers}
        for job, partitions in sent.items():
            written, again = set(), set()
            for tp in sorted(partitions):
                error = answers.get((job.marker.producer_id, tp), ErrorCode.unknown_server_error)
                if error in _WRITTEN:
                    written.add(tp)
                elif error in _DOUBTED:
                    self._doubt(job, tp, error)
                else:
                    again.add(tp)
                    if error not in _EXPECTED:
                        self._note(job, f"{tp.place} refused its marker: {error.name}")
            self._written(job, written)
            self._again(job, again)

    def _failed(self, node: int) -> None:
        attempt = self._failures[node] = self._failures.get(node, 0) + 1
        self._timers.set(_node_key(node), self._now_ms + _backoff_ms(attempt), NodeResumes(node))
        for job, partitions in self._in_flight.pop(node, {}).items():
            self._route(job, partitions)

    # Doubts about who the coordinator is.

    def _doubt(self, job: MarkerJob, tp: TopicPartition, error: ErrorCode) -> None:
        if job.state_partition not in self._doubted:
            self._doubted[job.state_partition] = []
            self._effects.append(ConfirmLeadership(job.state_partition))
        self._doubted[job.state_partition].append((job, tp, error))

    def _confirmed(self, event: LeadershipConfirmed) -> None:
        if not event.is_leader:
            self._drop(event.state_partition)
            return
        for job, tp, error in self._doubted.pop(event.state_partition, []):
            if error is ErrorCode.invalid_producer_epoch:
                self._note(job, f"{tp.place} knows a later epoch: its marker counts as written")
                self._written(job, {tp})
            else:
                self._again(job, {tp})

    def _note(self, job: MarkerJob, text: str) -> None:
        self._effects.append(NoteTransaction(f"producer {job.marker.producer_id}", text))

    def check_invariants(self) -> None:
        """Raise InvariantViolation when the state contradicts itself."""
        places: list[tuple[MarkerJob, TopicPartition]] = []
        in_flight = [
            (job, tp)
            for sent in self._in_flight.values()
            for job, partitions in sent.items()
            for tp in partitions
        ]
        for jobs in (self._leaderless, *self._queues.values()):
            places += [(job, tp) for job, partitions in jobs.items() for tp in partitions]
        for doubts in self._doubted.values():
            places += [(job, tp) for job, tp, _ in doubts]
        places += [(r.job, tp) for r in self._retries.values() for tp in r.partitions]
        wanted = [(job, tp) for job, partitions in self._unwritten.items() for tp in partitions]
        if sorted(places + in_flight, key=str) != sorted(wanted, key=str):
            raise InvariantViolation(f"wanted are {wanted}, waiting {places}, sent {in_flight}")


def _backoff_ms(attempt: int) -> int:
    return min(FIRST_BACKOFF_MS << min(attempt - 1, 16), LAST_BACKOFF_MS)


def _node_key(node: int) -> tuple[str, ...]:
    return ("node", str(node))
