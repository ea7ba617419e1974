"""A checked load: what librdkafka was told is acknowledged must be there, in order, once.

The producer is idempotent with acks=all. It sends rising numbers, the same ones never twice, so
that whatever is read back afterwards shows what was lost, repeated or swapped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from kept.testing import Cluster

PARTITIONS: Final = 3
INSECURE: Final[Mapping[str, str]] = MappingProxyType({})
"""No security: of a client that is told nothing of it."""
PATIENCE_S: Final = 120
"""How long a record may wait to be acknowledged before that is an error of the producer."""
PROGRESS: Final = 30
"""So many records of each partition, sent since, show that it is written to again."""
READ_S: Final = 60
PASSING: Final = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT)
"""Errors of a consumer that it gets over by itself."""


class Load:
    """Numbers in rising order to every partition of one topic, until stopped.

    ``client``: settings of librdkafka for its security.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        *,
        partitions: int = PARTITIONS,
        client: Mapping[str, str] = INSECURE,
    ) -> None:
        self.topic, self.partitions, self.sent, self.client = topic, partitions, 0, client
        self.acknowledged: dict[tuple[int, int], int] = {}
        self.times: list[list[float]] = [[time.monotonic()] for _ in range(partitions)]
        """When each partition's records were acknowledged."""
        self.newest = [-1] * partitions
        """The last number of each that is acknowledged."""
        self.repeated = 0
        """Acknowledged without a place: written before, said DUPLICATE_SEQUENCE_NUMBER."""
        self.failed: list[str] = []
        self._producer = Producer(
            {
                **client,
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "message.timeout.ms": 1000 * PATIENCE_S,
                "request.timeout.ms": 5000,
                "socket.timeout.ms": 6000,  # a stalled node is given up then, by default in 60 s
                "linger.ms": 0,
                "batch.size": 4000,
                "log_level": 0,
                "error_cb": self._error,
            }
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set() and not self.failed:
            self._producer.produce(
                self.topic,
                str(self.sent),
                partition=self.sent % self.partitions,
                on_delivery=self._delivered,
            )
            self.sent += 1
            self._producer.poll(0.002)
        left = self._producer.flush(PATIENCE_S + 10)
        if left:
            self.failed.append(f"{left} records were neither acknowledged nor refused")

    def _error(self, error: Any) -> None:
        if error.fatal():
            self.failed.append(f"fatal: {error}")

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.failed.append(f"{int(message.value())}: {error}")
            return
        partition, number = message.partition(), int(message.value())
        self._acknowledge((partition, message.offset()), number)
        self.times[partition].append(time.monotonic())
        self.newest[partition] = max(self.newest[partition], number)

    def _acknowledge(self, place: tuple[int, int | None], number: int) -> None:
        partition, offset = place
        if offset is None:
            self.repeated += 1
            return
        if (partition, offset) in self.acknowledged:
            self.failed.append(f"{place} is acknowledged for two records")
        self.acknowledged[partition, offset] = number

    def goes_on(self, cluster: Cluster, deadline_s: float = PATIENCE_S) -> None:
        """Wait until records that were sent from now on are acknowledged on every partition.

        Not those that were on their way: a slow client hears of them when all is over for long.
        """
        enough = self.sent + PROGRESS * self.partitions

        def more() -> bool:
            assert not self.failed, self.failed[:5]
            return min(self.newest) >= enough

        cluster.wait_until(more, "records are acknowledged on every partition", deadline_s)

    def goes_quiet(self, seconds: float = 2.0, deadline_s: float = PATIENCE_S) -> None:
        """Wait until nothing was acknowledged for some time."""
        end = time.monotonic() + deadline_s
        while time.monotonic() - max(times[-1] for times in self.times) < seconds:
            assert time.monotonic() < end, f"still acknowledged after {deadline_s} s"
            time.sleep(0.05)

    def gap_s(self, since: float, until: float | None = None) -> float:
        """The longest time without an acknowledgement that any partition had."""
        end = time.monotonic() if until is None else until
        longest = 0.0
        for times in self.times:
            last = since
            for moment in [*(t for t in times if since < t < end), end]:
                longest, last = max(longest, moment - last), moment
        return longest

    def stop(self) -> None:
        """End it, once everything that was sent is acknowledged."""
        self._stop.set()
        self._thread.join()


class Reader:
    """Reads a topic while all of it happens: what was read once may not be taken back.

    It never starts again from an older offset, nor skips one: an offset that is out of range is an
    error, a record comes once.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        *,
        partitions: int = PARTITIONS,
        client: Mapping[str, str] = INSECURE,
    ) -> None:
        self.found: dict[tuple[int, int], int] = {}
        self.failed: list[str] = []
        self._next = [0] * partitions
        self._consumer = Consumer(
            {
                **client,
                "bootstrap.servers": bootstrap,
                "group.id": "checker",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "topic.metadata.refresh.interval.ms": 2000,
                "socket.timeout.ms": 6000,
                "log_level": 0,
            }
        )
        self._consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
        self._bootstrap, self._topic, self._client = bootstrap, topic, client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            for message in self._consumer.consume(1000, 0.1):
                self._take(message)
        self._consumer.close()

    def _take(self, message: Any) -> None:
        error = message.error()
        if error is not None:
            if error.fatal() or (not error.retriable() and error.code() not in PASSING):
                self.failed.append(str(error))
            return
        partition, offset = message.partition(), message.offset()
        if offset != self._next[partition]:
            self.failed.append(f"{partition}:{offset} came, not {self._next[partition]}")
        self._next[partition] = offset + 1
        self.found[partition, offset] = int(message.value())

    def until(self, count: int, *, compared: bool = True) -> None:
        """Wait until so many records were read: goes on as long as more come. When none come for
        too long, it is ``compared`` with what another consumer reads.
        """
        deadline = time.monotonic() + READ_S
        before = 0
        while len(self.found) < count:
            if len(self.found) > before:
                before, deadline = len(self.found), time.monotonic() + READ_S
            assert not self.failed, self.failed[:5]
            if time.monotonic() >= deadline:
                fault = f"{before} of {count} records read, up to {self._next}"
                if compared:
                    there = read_all(self._bootstrap, self._topic, len(self._next), self._client)
                    fault += f"; who begins now reads {len(there)}"
                raise AssertionError(fault)
            time.sleep(0.02)

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        self._thread.join(READ_S)
        assert not self._thread.is_alive(), f"the consumer does not close within {READ_S} s"


def _end(consumer: Consumer, place: TopicPartition) -> int:
    """Where a partition ends. librdkafka gives this up with the first address that it tries, which
    may be one of no use here, such as ``::1`` where there is no IPv6.
    """
    deadline = time.monotonic() + READ_S
    while True:
        try:
            end: int = consumer.get_watermark_offsets(place, timeout=READ_S)[1]
        except KafkaException:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
        else:
            return end


def read_all(
    bootstrap: str, topic: str, partitions: int, client: Mapping[str, str] = INSECURE
) -> dict[tuple[int, int], int]:
    """Every record of a topic: (partition, offset) -> number."""
    consumer = Consumer({**client, "bootstrap.servers": bootstrap, "group.id": "ends"})
    places = [TopicPartition(topic, number) for number in range(partitions)]
    ends = [_end(consumer, place) for place in places]
    consumer.close()
    reader = Reader(bootstrap, topic, partitions=partitions, client=client)
    try:
        reader.until(sum(ends), compared=False)
    finally:
        reader.stop()
    assert not reader.failed, reader.failed[:5]
    return reader.found


def check(cluster: Cluster, load: Load, reader: Reader | None = None) -> None:
    """Everything sent was acknowledged, is where it was said to be, once and in order.

    And what somebody read meanwhile is still there.
    """
    assert not load.failed, load.failed[:10]
    assert len(load.acknowledged) + load.repeated == load.sent
    found = read_all(cluster.bootstrap, load.topic, load.partitions, load.client)
    lost = {place: n for place, n in load.acknowledged.items() if found.get(place) != n}
    assert not lost, f"{len(lost)} acknowledged records are not there: {sorted(lost)[:10]}"
    if reader is not None:
        assert not reader.failed, reader.failed[:5]
        gone = {place: n for place, n in reader.found.items() if found.get(place) != n}
        assert not gone, f"{len(gone)} records that were read are not there: {sorted(gone)[:10]}"
    for number in range(load.partitions):
        values = [found[place] for place in sorted(found) if place[0] == number]
        expected = list(range(number, load.sent, load.partitions))
        if values != expected:
            pairs = zip(values, expected, strict=False)
            shorter = min(len(values), len(expected))
            at = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
            raise AssertionError(
                f"partition {number} differs at record {at}: it has {values[at : at + 5]}, sent "
                f"was {expected[at : at + 5]}"
            )


def under_load(
    cluster: Cluster,
    topic: str,
    events: Callable[[Load], None],
    client: Mapping[str, str] = INSECURE,
) -> Load:
    """Let something happen under load, which must go on before and afterwards; then check it."""
    load = Load(cluster.bootstrap, topic, client=client)
    reader = Reader(cluster.bootstrap, topic, client=client)
    try:
        load.goes_on(cluster)
        events(load)
        load.goes_on(cluster)
        load.stop()
        reader.until(load.sent)
    finally:
        load.stop()
        reader.stop()
    check(cluster, load, reader)
    return load
