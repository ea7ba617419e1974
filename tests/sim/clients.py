"""Clients of a simulated cluster: idempotent producers and consumers that know nothing of faults.

A producer writes numbered batches to one partition with acks=all or acks=1, several in flight, and
retries each until it is answered, as librdkafka does: it finds the leader, starts again from the
first unanswered batch, and takes a new producer id only when its sequence is refused. With acks=all
such a refusal is a broken promise, unless rule 33 gave the promise up.

A consumer reads one partition from its start and follows it; whatever it reads must be committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kept.storage.records import build_batch
from kept.storage.types import TopicPartition
from tests.sim.batches import Batch, decode
from tests.sim.network import NO_ANSWER, REFUSED
from tests.sim.world import MS, Violation

if TYPE_CHECKING:
    from tests.sim.cluster import ClusterHistory

RETRY_MS = 100
REQUEST_TIMEOUT_MS = 3000


@dataclass(frozen=True, slots=True)
class ProduceRequest:
    tp: TopicPartition
    data: bytes
    acks: int
    timeout_ms: int = 2000


@dataclass(frozen=True, slots=True)
class ProduceAnswer:
    """``error`` is the class name of a KeptError, empty for success."""

    error: str
    base_offset: int = -1


@dataclass(frozen=True, slots=True)
class ReadRequest:
    tp: TopicPartition
    offset: int
    max_bytes: int = 4096


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    error: str
    data: bytes = b""
    high_watermark: int = -1
    log_start_offset: int = -1


@dataclass(slots=True)
class _Sending:
    sequence: int
    count: int
    data: bytes
    answered: bool = False
    in_flight: bool = False


class Client:
    """What producers and consumers share: who leads, as somebody alive says."""

    def __init__(self, history: ClusterHistory, client_id: int, tp: TopicPartition) -> None:
        self.history = history
        self.world = history.world
        self.network = history.network
        self.client_id = client_id
        self.tp = tp
        self.leader: int | None = None
        self.stopped = False
        self.unclaimed = False
        """Of a topic that may be deleted, and made anew: nobody keeps count of its records."""

    def give_up(self) -> None:
        """Its topic is gone, or soon will be."""
        self.stopped = True

    def find_leader(self, then: Any) -> None:
        """Ask any machine; call ``then()`` later whatever the outcome."""
        machine = self.world.random.choice(self.history.machines)

        def answered(answer: Any) -> None:
            if answer is not NO_ANSWER and answer is not REFUSED:
                self.leader = answer.get(self.tp)
            self.world.after(self.world.between(1, RETRY_MS) * MS, then)

        self.network.call(self.client_id, machine.node_id, "metadata", None, answered, 500)


class Producer(Client):
    """See the module."""

    def __init__(  # noqa: PLR0917
        self, history: ClusterHistory, client_id: int, tp: TopicPartition, acks: int, window: int,
        pace_ms: int,
    ) -> None:  # fmt: skip
        super().__init__(history, client_id, tp)
        self.acks = acks
        self.window = window
        self.pace_ms = pace_ms
        self.producer_id = history.next_producer_id(acks)
        self.producer_epoch = 0
        self.sequence = 0
        self.queue: list[_Sending] = []
        self.acknowledged = 0
        self.acknowledged_us = 0
        self.attempt = 0
        self.first_is_there = False
        self.late_duplicates = 0

    def start(self) -> None:
        self.world.after(self.world.between(0, 500) * MS, self.produce)

    def produce(self) -> None:
        """Another batch, if the window has room."""
        if self.stopped and (self.unclaimed or not self.queue):
            return
        if not self.stopped:
            self.world.after(self.world.between(1, 2 * self.pace_ms) * MS, self.produce)
            if len(self.queue) < (self.window if self.first_is_there else 1):
                self.queue.append(self._make())
        self.send()

    def _make(self) -> _Sending:
        count = self.world.random.choice((1, 1, 2, 5))
        now = self.history.client_clock_ms
        size = self.world.random.choice((10, 10, 200))
        records = [
            (now, b"k", f"{self.producer_id}-{self.sequence + i}".encode().ljust(size, b"."), ())
            for i in range(count)
        ]
        data = build_batch(
            records, producer_id=self.producer_id, producer_epoch=self.producer_epoch,
            base_sequence=self.sequence,
        )  # fmt: skip
        made = _Sending(self.sequence, count, data)
        self.sequence += count
        return made

    def send(self) -> None:
        """Everything that is not under way, in order, to the leader."""
        if self.leader is None:
            if self.queue and not any(one.in_flight for one in self.queue):
                self.find_leader(self.send_again)
            return
        for one in self.queue:
            if not one.in_flight and not one.answered:
                one.in_flight = True
                self.network.call(
                    self.client_id, self.leader, "produce",
                    ProduceRequest(self.tp, one.data, self.acks),
                    lambda answer, one=one, attempt=self.attempt: self.answered(
                        one, attempt, answer
                    ),
                    REQUEST_TIMEOUT_MS,
                )  # fmt: skip

    def send_again(self) -> None:
        if self.stopped and self.unclaimed:
            return
        if self.leader is None:
            self.world.after(RETRY_MS * MS, self.find_leader, self.send_again)
        else:
            self.send()

    def answered(self, one: _Sending, attempt: int, answer: Any) -> None:
        if one not in self.queue or (self.stopped and self.unclaimed):
            return
        error = answer.error if isinstance(answer, ProduceAnswer) else "no answer"
        if error in ("", "DuplicateSequenceNumber"):
            one.answered = True
            self.first_is_there = True
            self.acknowledged += 1
            self.acknowledged_us = self.world.now_us
            while self.queue and self.queue[0].answered:
                self.queue.pop(0)
            return
        if attempt != self.attempt:
            return
        if error in ("OutOfOrderSequenceNumber", "UnknownProducerId") and one is self.queue[0]:
            self._refused(error)
            return
        self._retry()

    def _refused(self, error: str) -> None:
        """The first batch that is not acknowledged does not fit: something before it is gone.

        Or it is there itself: a restarted replica remembers only a producer's last batch (as
        Kafka's snapshot does), so that an older one that comes again is refused.
        """
        register = self.history.checks.register(self.tp)
        first = self.queue[0]
        if self.unclaimed:
            self.stopped = True
            return
        if self.history.checks.has(self.tp, self.producer_id, first.sequence, self.producer_epoch):
            self.late_duplicates += 1
        elif self._overtaken():
            self.world.counts["batches overtaken where the producer was not known"] += 1
        elif self.acks == -1 and not register.give_ups:
            raise Violation(
                "sequence-refused",
                f"{self.tp}: producer {self.producer_id} is refused #{first.sequence} with "
                f"{error}; all before it is acknowledged",
            )
        self.producer_id = self.history.next_producer_id(self.acks)
        self.producer_epoch = self.sequence = 0
        self.first_is_there = False
        self.queue = [self._make()]
        self._retry()

    def _overtaken(self) -> bool:
        """A leader that did not know the producer any more took a later batch before the first."""
        checks, first = self.history.checks, self.queue[0]
        who = (self.tp, self.producer_id)
        return checks.forgotten(*who, self.producer_epoch, first.sequence) and any(
            checks.has(*who, one.sequence, self.producer_epoch) for one in self.queue[1:]
        )

    def _retry(self) -> None:
        """Everything again, in order, to whoever leads now; what is under way is forgotten."""
        self.attempt += 1
        self.leader = None
        for one in self.queue:
            one.in_flight = False
        self.find_leader(self.send_again)


class Consumer(Client):
    """See the module."""

    def __init__(self, history: ClusterHistory, client_id: int, tp: TopicPartition) -> None:
        super().__init__(history, client_id, tp)
        self.offset = 0
        self.read = 0

    def start(self) -> None:
        self.world.after(self.world.between(100, 1000) * MS, self.fetch)

    def fetch(self) -> None:
        if self.stopped:
            return
        if self.leader is None:
            self.find_leader(self.fetch_from_leader)
        else:
            self.fetch_from_leader()

    def fetch_from_leader(self) -> None:
        if self.leader is None:
            self.world.after(RETRY_MS * MS, self.fetch)
            return
        request = ReadRequest(self.tp, self.offset)
        self.network.call(
            self.client_id, self.leader, "read", request, self.answered, REQUEST_TIMEOUT_MS
        )

    def answered(self, answer: Any) -> None:
        register = self.history.checks.register(self.tp)
        if not isinstance(answer, ReadAnswer):
            self.leader = None
        elif answer.error == "OffsetOutOfRange":
            if not register.give_ups and self.offset >= register.start:
                raise Violation(
                    "consumer-out-of-range",
                    f"{self.tp}: offset {self.offset} is out of range at n{self.leader}, "
                    f"{register.end} are committed",
                )
            self.offset = max(0, answer.log_start_offset)
        elif answer.error:
            self.leader = None
        else:
            self._take(answer)
        self.world.after(self.world.between(20, 200) * MS, self.fetch)

    def _take(self, answer: ReadAnswer) -> None:
        register = self.history.checks.register(self.tp)
        for batch in decode(answer.data):
            if batch.last < self.offset:
                continue
            self._check(batch)
            if batch.base > self.offset and not register.give_ups and register.start == 0:
                raise Violation("consumer-gap", f"{self.tp}: {batch} follows offset {self.offset}")
            self.offset = batch.last + 1
            self.read += batch.count

    def _check(self, batch: Batch) -> None:
        found = self.history.checks.committed_at(self.tp, batch.base)
        if found != batch and not self.history.checks.register(self.tp).give_ups:
            raise Violation(
                "consumer-uncommitted",
                f"{self.tp}: a consumer read {batch} from n{self.leader}; committed: {found}",
            )
