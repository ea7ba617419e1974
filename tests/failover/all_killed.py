"""All three nodes are killed again and again under an idempotent producer whose messages time out:
what its client sees of it, with kept or with Apache Kafka.

    python -m tests.failover.all_killed --brokers kept --kills 20
    python -m tests.failover.all_killed --brokers kafka --kills 20

A round is kill -9 of all three at once, when all replicas are in sync; two start together, the
third one within three seconds of them. The topic is compacted and rolls every two seconds. Half of
the records have a key of their own, the others one of a few. Each round tells how long it took
until two nodes listened again, and from then to an acknowledgement with acks=all: of a client that
tries all nodes all the time (*probe*), and of librdkafka on every partition (*load*). At the end:
what librdkafka said of itself, what is there twice, and whether anything that was acknowledged is
gone. ``--set name=value`` gives librdkafka a setting. The seed repeats orders and pauses, not the
timing.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import socket
import statistics
import tempfile
import threading
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from kept.client.client import Client
from kept.client.protocol import messages as protocol
from kept.storage.errors import KeptError
from kept.storage.records import build_batch
from kept.testing import Cluster
from kept.testing.ports import free_port
from tests.support.request_values import produce_values
from tests.tools import kafka_dist

NODES: Final = 3
PARTITIONS: Final = 3
KEYS: Final = 50
EVERY_S: Final = 0.004
TIMEOUT_MS: Final = 20_000
"""``message.timeout.ms``."""
THIRD_S: Final = 3.0
PAUSE_S: Final = (0.5, 5.0)
"""How long the load goes on between two rounds."""
DEADLINE_S: Final = 120.0
TRY_S: Final = 0.005
TOPIC: Final = "compacted"
PROBED: Final = "probed"
COMPACTED: Final = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.01",
    "segment.ms": "2000",
}
CLEANER: Final = {"log_cleaner_backoff_ms": 500}
REASON: Final = re.compile(r"epoch bump|fatal|out.of.order", re.IGNORECASE)


def key_of(number: int) -> str:
    """Every second record has a key that no other has."""
    return f"own {number}" if number % 2 else f"shared {number // 2 % KEYS}"


class Load:
    """Rising numbers until stopped; a producer that met a fatal error is replaced."""

    def __init__(self, bootstrap: str, settings: Mapping[str, str]) -> None:
        self.sent = 0
        self.acknowledged: set[int] = set()
        self.times: list[list[float]] = [[] for _ in range(PARTITIONS)]
        """When each partition acknowledged something."""
        self.failed: Counter[str] = Counter()
        self.fatal: list[str] = []
        self.reasons: Counter[str] = Counter()
        """Why librdkafka raised its epoch or gave up, by its own word, without the numbers."""
        self._log = logging.Logger("librdkafka")
        self._log.addFilter(self._said)
        self._settings = {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "message.timeout.ms": TIMEOUT_MS,
            "linger.ms": 0,
            "batch.size": 4000,
            "debug": "eos",
            "error_cb": self._error,
            **settings,
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _said(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if REASON.search(text):
            self.reasons[re.sub(r"\d+", "N", text.rpartition("]: ")[2])[:160]] += 1
        return False

    def _error(self, error: Any) -> None:
        if error.fatal():
            self.fatal.append(str(error))

    def _run(self) -> None:
        while not self._stop.is_set():
            before = len(self.fatal)
            producer = Producer(self._settings, logger=self._log)
            while not self._stop.is_set() and len(self.fatal) == before:
                self._send(producer)
                producer.poll(EVERY_S)
            if len(self.fatal) > before:
                producer.purge()
            if left := producer.flush(DEADLINE_S):
                self.failed["neither acknowledged nor refused"] += left

    def _send(self, producer: Producer) -> None:
        number = self.sent

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                self.failed[error.name()] += 1
                return
            self.acknowledged.add(number)
            self.times[message.partition()].append(time.monotonic())

        try:
            producer.produce(
                TOPIC,
                str(number),
                key_of(number),
                partition=number % PARTITIONS,
                on_delivery=delivered,
            )
        except (BufferError, KafkaException):  # full, or a fatal error that poll() tells of
            return
        self.sent += 1

    def first_since(self, moment: float) -> float | None:
        """When the last of the partitions acknowledged something after a moment; None: not yet."""
        found = [bisect_right(times, moment) for times in self.times]
        if any(at == len(times) for at, times in zip(found, self.times, strict=True)):
            return None
        return max(times[at] for at, times in zip(found, self.times, strict=True))

    def stop(self) -> None:
        """End it, once everything that was sent is acknowledged or refused."""
        self._stop.set()
        self._thread.join()


class Reader:
    """Reads along, so that what is cleaned later was seen."""

    def __init__(self, bootstrap: str) -> None:
        self.found: dict[tuple[int, int], tuple[str, int]] = {}
        """(Partition, offset) -> (key, number)."""
        self._ends = [0] * PARTITIONS
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "reader",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "topic.metadata.refresh.interval.ms": 2000,
                "log_level": 0,
            }
        )
        self._consumer.assign([TopicPartition(TOPIC, n, 0) for n in range(PARTITIONS)])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stop.is_set():
            for message in self._consumer.consume(1000, 0.1):
                if message.error() is None:
                    place = message.partition(), message.offset()
                    self.found[place] = message.key().decode(), int(message.value())
                    self._ends[place[0]] = place[1] + 1
        self._consumer.close()

    def until(self, ends: list[int]) -> None:
        """Wait until it has come to these offsets."""
        wait(lambda: all(map(int.__ge__, self._ends, ends)), f"read up to {ends}")

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        self._thread.join()


class Probe:
    """Tries to append with acks=all, at all nodes all the time, until one acknowledges."""

    def __init__(self, addresses: list[tuple[str, int]]) -> None:
        self.listening: dict[int, float] = {}
        """Since when each node accepts connections."""
        self.acknowledged: float | None = None
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number, address))
            for number, address in enumerate(addresses)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, address: tuple[str, int]) -> None:
        while not self._over.is_set():
            try:
                with socket.create_connection(address, 5) as connection:
                    self.listening.setdefault(number, time.monotonic())
                    connection.settimeout(30)
                    while self.acknowledged is None and not self._over.is_set():
                        if self._append(connection):
                            self.acknowledged = self.acknowledged or time.monotonic()
                        time.sleep(TRY_S)
                    return
            except OSError:
                time.sleep(TRY_S)

    @staticmethod
    def _append(connection: socket.socket) -> bool:
        batch = build_batch([(int(time.time() * 1000), None, b"probe", ())])
        values = produce_values(PROBED, batch, acks=-1, timeout=10_000)
        connection.sendall(protocol.encode_request(0, 9, 1, "probe", values))
        size = int.from_bytes(exactly(connection, 4), "big")
        response = protocol.decode_response(0, 9, exactly(connection, size))[1]
        return int(response.responses[0].partition_responses[0].error_code) == 0

    def back(self) -> float | None:
        """When the second node began to accept connections; None: not yet."""
        times = sorted(self.listening.values())
        return times[1] if len(times) > 1 else None

    def stop(self) -> None:
        """End it."""
        self._over.set()
        for thread in self._threads:
            thread.join()


@dataclass(frozen=True)
class Round:
    """Seconds: from the kill until two nodes listened, and from then to acknowledgements."""

    back_s: float
    probe_s: float
    load_s: float


@dataclass(frozen=True)
class Outcome:
    """What was seen. ``twice``: numbers that are at several offsets. ``lost``: acknowledged, and
    not there.
    """

    rounds: list[Round]
    load: Load
    twice: list[int]
    lost: list[int]

    def __str__(self) -> str:
        load = self.load
        times = [
            f"{name}: median {statistics.median(values):.2f} s, most {max(values):.2f} s"
            for name, values in (
                ("kill to two listening", [one.back_s for one in self.rounds]),
                ("from there to probe", [one.probe_s for one in self.rounds]),
                ("from there to load", [one.load_s for one in self.rounds]),
            )
        ]
        return "\n".join(
            [
                f"{len(self.rounds)} kills, {load.sent} records sent",
                *times,
                f"{len(load.acknowledged)} acknowledged, failed: {dict(load.failed)}",
                f"fatal errors: {load.fatal}",
                f"twice: {len(self.twice)} {self.twice[:10]}; lost: {self.lost[:10]}",
                *(f"librdkafka, {count} times: {why}" for why, count in load.reasons.items()),
            ]
        )


def kill_again_and_again(
    cluster: Any, kills: int, seed: int, settings: Mapping[str, str]
) -> Outcome:
    """All rounds over a cluster of three nodes that has just started."""
    draw = random.Random(seed)
    addresses = [
        (host, int(port))
        for host, _, port in (one.rpartition(":") for one in cluster.bootstrap.split(","))
    ]
    with Client(cluster.bootstrap) as client:
        client.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=3, config=COMPACTED)
        client.create_topic(PROBED, partitions=1, replication_factor=3)
        client.bounds(TOPIC)
    rounds = []
    with Load(cluster.bootstrap, settings) as load, Reader(cluster.bootstrap) as reader:
        began = time.monotonic()
        wait(lambda: load.first_since(began) is not None, "the first acknowledgements")
        for _ in range(kills):
            wait(lambda: is_in_sync(cluster.bootstrap), "all replicas are in sync")
            time.sleep(draw.uniform(*PAUSE_S))
            rounds.append(one_round(cluster, addresses, draw, load))
            print(rounds[-1], dict(load.failed), load.fatal, flush=True)
        load.stop()
        ends = ends_of(cluster.bootstrap)
        reader.until(ends)
    return judged(rounds, load, reader, read_whole(cluster.bootstrap, ends))


def one_round(
    cluster: Any, addresses: list[tuple[str, int]], draw: random.Random, load: Load
) -> Round:
    """Kill all, start them again, until the load is acknowledged on every partition."""
    order = draw.sample(range(NODES), NODES)
    third_s = draw.uniform(0, THIRD_S)
    with ThreadPoolExecutor(NODES) as pool:
        killed = time.monotonic()
        list(pool.map(cluster.kill, order))
        probe = Probe(addresses)
        try:
            starting = [pool.submit(cluster.start, node) for node in order[:2]]
            time.sleep(third_s)
            starting.append(pool.submit(cluster.start, order[2]))
            wait(lambda: probe.acknowledged is not None, "the probe is acknowledged")
            back = probe.back()
            assert back is not None and probe.acknowledged is not None
            first = min(probe.listening.values())
            wait(lambda: load.first_since(first) is not None, "the load is acknowledged")
            loaded = load.first_since(first)
            assert loaded is not None
            wait(lambda: len(probe.listening) == NODES, "all nodes listen")
        finally:
            probe.stop()
        for one in starting:
            one.result()
    return Round(back - killed, probe.acknowledged - back, loaded - back)


def judged(
    rounds: list[Round],
    load: Load,
    along: Reader,
    at_the_end: dict[tuple[int, int], tuple[str, int]],
) -> Outcome:
    """What is twice, and what is lost: of a key that others have, if nothing newer is there."""
    places: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    newest: dict[tuple[int, str], int] = {}
    for place, (_, number) in sorted((along.found | at_the_end).items()):
        places[number].add(place)
    for (partition, _), (key, number) in sorted(at_the_end.items()):
        newest[partition, key] = max(number, newest.get((partition, key), -1))
    lost = [
        number
        for number in sorted(load.acknowledged)
        if newest.get((number % PARTITIONS, key_of(number)), -1) < number
    ]
    return Outcome(rounds, load, [n for n, found in places.items() if len(found) > 1], lost)


def is_in_sync(bootstrap: str) -> bool:
    """Whether all replicas of both topics are in the ISR, as somebody says."""
    try:
        with Client(bootstrap) as client:
            topics = client.metadata([TOPIC, PROBED]).topics.values()
    except KeptError:
        return False
    return all(len(one.isr) == NODES for view in topics for one in view.partitions.values())


def ends_of(bootstrap: str) -> list[int]:
    """The end of each partition."""
    with Client(bootstrap) as client:
        bounds = client.bounds(TOPIC)
    return [bounds[number][1] for number in range(PARTITIONS)]


def read_whole(bootstrap: str, ends: list[int]) -> dict[tuple[int, int], tuple[str, int]]:
    """What is there, up to these offsets."""
    reader = Reader(bootstrap)
    reader.until(ends)
    return reader.found


def wait(condition: Callable[[], bool], what: str) -> None:
    """Raises TimeoutError."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {DEADLINE_S:.0f} s: {what}")
        time.sleep(TRY_S)


def exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Raises OSError."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data


def main() -> None:
    """One run."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--brokers", choices=("kept", "kafka"), default="kept")
    given.add_argument("--kills", type=int, default=20)
    given.add_argument("--seed", type=int, default=1)
    given.add_argument("--set", action="append", default=[], metavar="name=value")
    options = given.parse_args()
    settings = dict(one.split("=", 1) for one in options.set)
    with tempfile.TemporaryDirectory(prefix="all-killed-") as folder:
        if options.brokers == "kept":
            cluster: Any = Cluster(NODES, **CLEANER)
        else:
            ports = [free_port(above=[1]) for _ in range(NODES)]
            cluster = kafka_dist.Cluster(Path(folder), ports, **CLEANER)
        with cluster:
            print(kill_again_and_again(cluster, options.kills, options.seed, settings))


if __name__ == "__main__":
    main()
