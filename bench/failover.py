"""How long a producer waits when a node of three is killed or stops.

The producer is librdkafka with its defaults (acks=all), one message every 5 ms to one partition.
*without an acknowledgement* is the longest time between two acknowledgements from the fault until a
message produced after it is acknowledged. *new leader accepts* is from the fault until one of the
two other nodes takes an acks=1 request for the partition: what the cluster needs, whatever the
client does. Each fault starts with a fresh topic and three nodes in sync. A node that is stopped is
continued after 15 s: librdkafka asks for a new leader when it loses a connection or a request times
out (``socket.timeout.ms``, 60 s), so a longer stop would measure that time-out.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import frames
from harness import Bench
from three_node_clusters import HOST, NODES, Trio

from kept.storage.types import Codec

EVERY_S = 0.005
STEADY_ACKS = 200
DEADLINE_S = 90.0
PROBE_PAUSE_S = 0.002
SETTLE_S = 0.5
ENOUGH = 20
"""Measurements for a 95th percentile."""
ERROR_AT = 4 + 4 + 2 + 4 + 4
"""Where a Produce v7 answer has the error of its one partition, without the topic's name."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to which node, and how often it is measured."""

    name: str
    leads: bool
    controls: bool
    stops_s: float
    """For how long the node is stopped; 0 means that it is killed."""
    times: dict[str, int]


FAULTS = (
    Fault("kill -9 of the leader", True, False, 0, {"kept": 20, "kafka": 5}),
    Fault("kill -9 of the controller", False, True, 0, {"kept": 5, "kafka": 5}),
    Fault("kill -9 of both in one", True, True, 0, {"kept": 5, "kafka": 5}),
    Fault("SIGSTOP of the leader for 15 s", True, False, 15.0, {"kept": 5, "kafka": 5}),
)


class Flow:
    """A producer that never rests, and when it was told of each message."""

    def __init__(self, bootstrap: str, topic: str, partition: int) -> None:
        from confluent_kafka import Producer

        self._producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
        self._topic, self._partition = topic, partition
        self.acknowledged: list[tuple[float, float]] = []
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Flow:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            self._send(time.monotonic())
            due += EVERY_S
            while (left := due - time.monotonic()) > 0:
                self._producer.poll(left)

    def _send(self, now: float) -> None:
        def told(error: Any, _: Any) -> None:
            if error is None:
                self.acknowledged.append((now, time.monotonic()))
            else:
                self.failed.append(str(error))

        self._producer.produce(self._topic, b"x" * 100, partition=self._partition, on_delivery=told)

    def await_acks(self, count: int) -> None:
        """Until so many more are acknowledged."""
        wanted = len(self.acknowledged) + count
        _wait(lambda: len(self.acknowledged) >= wanted, f"{count} more acknowledgements")

    def await_produced_after(self, moment: float) -> None:
        """Until a message from after that moment is acknowledged."""
        _wait(lambda: self._first_after(moment) is not None, "a message from after the fault")

    def _first_after(self, moment: float) -> float | None:
        return next((at for sent, at in list(self.acknowledged) if sent > moment), None)

    def gap(self, moment: float) -> float:
        """The longest silence from the last acknowledgement before ``moment`` on."""
        end = self._first_after(moment)
        assert end is not None
        told = sorted(at for _, at in self.acknowledged)
        start = max((at for at in told if at <= moment), default=moment)
        inside = [at for at in told if start <= at <= end]
        return max(b - a for a, b in itertools.pairwise(inside))


class Knock:
    """Asks the other nodes again and again to take a record, until one does."""

    def __init__(self, trio: Trio, topic: str, partition: int, victim: int) -> None:
        data = frames.batch(100, 50, Codec.NONE, int(time.time() * 1000))
        self._frame = frames.produce(topic, data, acks=1, partition=partition)
        self._error_at = ERROR_AT + len(topic)
        ports = [trio.nodes.port(i) for i in range(NODES) if i != victim]
        self._sockets = [socket.create_connection((HOST, port), 5) for port in ports]
        self._threads = [threading.Thread(target=self._knock, args=(s,)) for s in self._sockets]
        self._over = threading.Event()
        self.accepted: list[float] = []

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def _knock(self, connection: socket.socket) -> None:
        connection.settimeout(DEADLINE_S)
        reader = connection.makefile("rb")
        while not self._over.is_set():
            connection.sendall(self._frame)
            body = reader.read(int.from_bytes(reader.read(4), "big"))
            if body[self._error_at : self._error_at + 2] == bytes(2):
                self.accepted.append(time.monotonic())
                self._over.set()
            time.sleep(PROBE_PAUSE_S)


def measure(trio: Trio, fault: Fault, topic: str) -> tuple[float, float | None]:
    """(seconds without an acknowledgement, until a new leader accepts) of one fault."""
    trio.create_topic(topic)
    controller = trio.controller()
    together = fault.leads and fault.controls
    partition, leader = trio.partition_led_by(topic, lambda n: (n == controller) == together)
    victim = leader if fault.leads else controller
    with Flow(trio.bootstrap, topic, partition) as flow:
        flow.await_acks(STEADY_ACKS)
        knock = Knock(trio, topic, partition, victim) if fault.leads else None
        with _fault(trio, fault, victim) as moment:
            if knock is not None:
                knock.start()
            try:
                flow.await_produced_after(moment)
                if knock is not None:
                    _wait(lambda: knock.accepted, "a new leader that accepts")
            finally:
                if knock is not None:
                    knock.stop()
        gap = flow.gap(moment)
        if flow.failed:
            raise RuntimeError(f"{trio.name}: {len(flow.failed)} not delivered: {flow.failed[0]}")
    trio.await_in_sync(topic)
    trio.delete_topic(topic)
    time.sleep(SETTLE_S)
    return gap, None if knock is None else min(knock.accepted) - moment


@contextlib.contextmanager
def _fault(trio: Trio, fault: Fault, victim: int) -> Iterator[float]:
    moment = time.monotonic()
    if not fault.stops_s:
        trio.nodes.kill(victim)
        try:
            yield moment
        finally:
            trio.nodes.start(victim)
        return
    trio.nodes.pause(victim)
    waking = threading.Timer(fault.stops_s, trio.nodes.resume, (victim,))
    waking.start()
    try:
        yield moment
    finally:
        waking.join()


def failover(bench: Bench, trio: Trio) -> None:
    """The section."""
    for number, fault in enumerate(FAULTS):
        times = max(1, round(fault.times[trio.name] * bench.scale))
        got = []
        for i in range(times):
            with bench.attempt(f"{fault.name}, {trio.name}"):
                got.append(measure(trio, fault, f"fault-{number}-{i}"))
        if not got:
            continue
        gaps = [gap for gap, _ in got]
        accepts = [accept for _, accept in got if accept is not None]
        _add(bench, trio, f"{fault.name}: no acknowledgement", gaps)
        if accepts:
            _add(bench, trio, f"{fault.name}: new leader accepts", accepts)


def _add(bench: Bench, trio: Trio, name: str, values: list[float]) -> None:
    """Median, and the 95th of a hundred where there are enough to speak of one."""
    bench.add("failover", f"{name}, median", trio.name, "s", statistics.median(values))
    if len(values) >= ENOUGH:
        p95 = sorted(values)[-1 - len(values) // 20]
        bench.add("failover", f"{name}, p95", trio.name, "s", p95)


def _wait(condition: Any, what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"not within {DEADLINE_S:.0f} s: {what}")
        time.sleep(0.002)
