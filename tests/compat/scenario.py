"""One story for every client: senders with all codecs and a group, while a node dies and returns.

A client is a set of adapters (:class:`Client`); :func:`over_a_kill` and :func:`over_restarts` tell
the story, with its checks: what was acknowledged is in the log once and in order, the members have
seen all of it, what they committed is committed, and who comes later goes on from there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kept.storage.types import TopicPartition
from kept.testing import Cluster
from tests.tools import kafka_dist

PARTITIONS = 3
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
DEADLINE_S = 60.0


class Sender(Protocol):
    """An idempotent producer with acks=all and one codec."""

    def send(self, values: Sequence[bytes]) -> None:
        """Send values to the partitions in turn; returns when all are acknowledged."""

    def close(self) -> None: ...


class Member(Protocol):
    """A member of a group, used by one thread."""

    def poll(self) -> list[bytes]:
        """What came within a moment."""

    def commit(self) -> None:
        """Commit what was polled; the client's retriable errors are swallowed."""

    def close(self) -> None: ...


class Client(Protocol):
    """A client library."""

    def create(self, bootstrap: str, topic: str) -> None:
        """Create a topic of PARTITIONS partitions and three replicas."""

    def sender(self, bootstrap: str, topic: str, codec: str) -> Sender: ...

    def member(self, bootstrap: str, topic: str, group: str) -> Member: ...


class Reading:
    """A member at work in a thread of its own."""

    def __init__(self, make: Any, seen: Counter[bytes]) -> None:
        self._seen = seen
        self._stop = threading.Event()
        self._make = make
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            member = self._make()
            while not self._stop.is_set():
                values = member.poll()
                if values:
                    self._seen.update(values)
                    member.commit()
            member.close()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error


def leader(cluster: Cluster, topic: str, partition: int = 0) -> int:
    """The node that leads a partition."""
    with cluster.client() as client:
        return client.topic(topic).partitions[partition].leader


def story_over_a_kill(
    cluster: Cluster,
    topic: str,
    command: Sequence[str],
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Run a program that writes a topic and reads it in a group; what it says of it, as JSON.

    When it prints "half", and its group of the topic's name has committed that, a leader is killed
    and started again. ``held`` is what the log then has.
    """
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            if first == "half\n":
                cluster.wait_until(
                    lambda: committed(cluster, topic, topic) == held(cluster, topic),
                    "what was read is committed",
                )
                victim = leader(cluster, topic)
                cluster.kill(victim)
                cluster.start(victim)
            out, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert first == "half\n", "no node was killed"
    return {**json.loads(out.splitlines()[-1]), "held": held(cluster, topic)}


def held(cluster: Cluster, topic: str) -> int:
    """How many offsets a topic has."""
    with cluster.client() as client:
        return sum(end - start for start, end in client.bounds(topic).values())


def check_log(cluster: Cluster, topic: str, sent: Iterable[bytes]) -> None:
    """Everything sent is there once, and every codec's numbers rise in every partition."""
    last: dict[tuple[bytes, int], int] = {}
    found: Counter[bytes] = Counter()
    with cluster.client() as client:
        for record in client.read(topic):
            value = bytes(record.value)
            found[value] += 1
            codec, _, number = value.partition(b":")
            assert last.get((codec, record.partition), -1) < int(number), "out of order"
            last[codec, record.partition] = int(number)
    assert found == Counter(sent)


def committed(cluster: Cluster, topic: str, group: str) -> int:
    """The sum of a group's offsets."""
    with cluster.client() as client:
        places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        return sum(client.committed(group, places).values())


def undisturbed(cluster: Cluster, client: Client) -> None:
    """Nothing happens."""
    _story(cluster, client, lambda _, go_on: go_on())


def over_a_kill(cluster: Cluster, client: Client) -> None:
    """A leader is killed and comes back."""

    def kill(topic: str, go_on: Callable[[], None]) -> None:
        victim = leader(cluster, topic)
        cluster.kill(victim)
        go_on()
        cluster.start(victim)
        cluster.await_ready()

    _story(cluster, client, kill)


def over_restarts(cluster: Cluster, client: Client) -> None:
    """All nodes are restarted in turn, as for an upgrade."""

    def restart(_: str, go_on: Callable[[], None]) -> None:
        for number in range(len(cluster)):
            cluster.stop(number)
            go_on()
            cluster.start(number)
            cluster.await_ready()
            go_on()

    _story(cluster, client, restart)


def _story(
    cluster: Cluster, client: Client, happening: Callable[[str, Callable[[], None]], None]
) -> None:
    topic = group = cluster.topic("story")
    client.create(cluster.bootstrap, topic)
    senders = {codec: client.sender(cluster.bootstrap, topic, codec) for codec in CODECS}
    seen: Counter[bytes] = Counter()
    sent: list[bytes] = []
    reading: list[Reading] = []

    def join() -> None:
        reading.append(Reading(lambda: client.member(cluster.bootstrap, topic, group), seen))

    def go_on(count: int = 60) -> None:
        """Send more and wait until it has been read."""
        for codec, sender in senders.items():
            first = len(sent)
            values = [b"%s:%d" % (codec.encode(), first + i) for i in range(count)]
            sender.send(values)
            sent.extend(values)
        cluster.wait_until(
            lambda: len(seen) == len(sent) or any(one.error for one in reading),
            "everything sent is read",
            DEADLINE_S,
        )

    try:
        join()
        go_on()
        join()
        go_on()
        happening(topic, go_on)
        go_on()
        reading.pop(0).stop()
        go_on()
    finally:
        for one in reading:
            one.stop()
        for sender in senders.values():
            sender.close()
    check_log(cluster, topic, sent)
    assert set(seen) == set(sent)
    assert max(seen.values()) <= 3, "read again and again"
    resumed: Counter[bytes] = Counter()
    assert committed(cluster, topic, group) == len(sent)
    late = Reading(lambda: client.member(cluster.bootstrap, topic, group), resumed)
    try:
        more = [b"late:%d" % number for number in range(len(sent), len(sent) + 9)]
        sender = client.sender(cluster.bootstrap, topic, "none")
        sender.send(more)
        sender.close()
        cluster.wait_until(lambda: len(resumed) >= len(more), "who resumes reads", DEADLINE_S)
    finally:
        late.stop()
    assert resumed == Counter(more)


def console_round_trip(bootstrap: str, topic: str, count: int) -> list[str]:
    """Lines ``key:value`` that Kafka's console producer writes, as its console consumer reads them,
    a member of the group ``topic``.
    """
    at = ("--bootstrap-server", bootstrap, "--topic", topic)
    lines = "".join(f"k{i}:v{i}\n" for i in range(count))
    parsed = ("--reader-property", "parse.key=true", "--reader-property", "key.separator=:")
    kafka_dist.tool("org.apache.kafka.tools.ConsoleProducer", *at, *parsed, stdin=lines)
    shown = ("--formatter-property", "print.key=true", "--formatter-property", "key.separator=:")
    wanted = ("--from-beginning", "--max-messages", str(count), "--group", topic)
    consumer = "org.apache.kafka.tools.consumer.ConsoleConsumer"
    read = kafka_dist.tool(consumer, *at, *wanted, *shown)
    return [line for line in read.splitlines() if re.match(r"k\d+:", line)]
