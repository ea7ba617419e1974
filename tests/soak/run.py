"""The soak: three nodes, writers, faults at random; then the tables, the replicas and the disk."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final

from kept.client.admin.cluster import elect_leaders, reassign
from kept.client.admin.topics import NewTopic
from kept.storage.types import TopicPartition
from kept.testing import Cluster
from tests.failover.nodes import CATCH_UP_S, Nodes
from tests.soak.load import KINDS, PARTITIONS, Writer

SETTINGS: Final = {
    "log_cleaner_backoff_ms": "200",
    "log_cleaner_threads": "2",
    "default_replication_factor": "3",
    "min_insync_replicas": "2",
}
PREFERRED: Final = 0
TIMEOUT_MS: Final = 60_000
REPLICA_BYTES: Final = 4 << 20
"""What one replica of a partition may ever take: some 0.2 MB are alive in it, and 1.1 MB was most
in ten minutes; a loaded machine cleans later.
"""
CLEANED_BYTES: Final = 1 << 20
"""What it may take at the end, once all is compacted."""
ROUND_S: Final = 60.0
"""Time between two looks at everything."""
COMMAND_S: Final = 300
TRIES: Final = 5


class Soak:
    """One run of the soak."""

    def __init__(self, cluster: Cluster, seed: int, per_second: float) -> None:
        self.cluster, self.nodes, self.draw = cluster, Nodes(cluster), random.Random(seed)
        self.events: Counter[str] = Counter()
        self.most_bytes = 0
        with cluster.client() as client:
            client.create_topics([NewTopic(k.name, PARTITIONS, 3, k.config) for k in KINDS])
            for kind in KINDS:
                client.bounds(kind.name)
        share = per_second / len(KINDS)
        self.writers = [
            Writer(cluster.bootstrap, k.name, k, f"{seed}-{k.name}", share) for k in KINDS
        ]
        self.actions = {
            self.kill: 4,
            self.kill_all: 1,
            self.kill_two: 1,
            self.stop: 2,
            self.stall: 2,
            self.move_leader: 4,
        }

    @property
    def sent(self) -> int:
        """Records so far."""
        return sum(writer.sent for writer in self.writers)

    def round(self, seconds: float) -> None:
        """Faults under load, then a look at everything."""
        end = time.monotonic() + seconds
        for writer in self.writers:
            writer.start()
        try:
            while time.monotonic() < end:
                self.step()
        finally:
            for writer in self.writers:
                writer.pause()
        self.check()

    def check(self) -> dict[str, dict[str, str]]:
        """Tables, and replicas by ``kept compact verify``; returns what compaction could still
        remove, by topic and key.
        """
        for writer in self.writers:
            self.nodes.await_in_sync(writer.topic)
        self.look_at_disk(REPLICA_BYTES)
        checked = {writer.topic: writer.check() for writer in self.writers}
        for writer in self.writers:
            self.kept("compact", "verify", writer.topic)
        print(
            f"{self.sent} records sent, {sum(count for count, _ in checked.values())} are left; "
            f"tables and replicas are equal; most bytes of a replica so far {self.most_bytes}",
            flush=True,
        )
        return {topic: left for topic, (_, left) in checked.items() if left}

    def finish(self) -> None:
        """Compact everything; what is left must be exactly what was promised.

        A pass that is asked for leaves to the next what a slow machine has not committed in time.
        Nothing else is forgiven: what contradicts a promise, or another replica, fails at once.
        """
        for _ in range(TRIES):
            for writer in self.writers:
                self.kept("compact", "now", writer.topic, "--wait")
            left = self.check()
            if not left:
                break
            some = {topic: dict(list(keys.items())[:5]) for topic, keys in left.items()}
            print(f"left to the next pass: {some}", flush=True)
        assert not left, f"{TRIES} passes did not remove {some}"
        self.cluster.wait_until(
            lambda: self.largest() <= CLEANED_BYTES, f"replicas shrink to {CLEANED_BYTES}", 60
        )
        print(f"events: {dict(self.events)}; at the end {self.largest()} bytes in the largest")

    def kept(self, *arguments: str) -> None:
        """Run a command, which must succeed."""
        done = subprocess.run(
            [sys.executable, "-m", "kept", *arguments, "--bootstrap", self.cluster.bootstrap],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, f"kept {' '.join(arguments)}: {done.stdout}"

    # The disk.

    def largest(self) -> int:
        """Bytes of the largest replica."""
        found = 0
        for node in self.nodes.numbers:
            for directory in Path(self.cluster.log_dir(node)).glob("soak-*"):
                size = 0
                for path in directory.glob("*"):
                    with contextlib.suppress(FileNotFoundError):
                        size += path.stat().st_size
                found = max(found, size)
        return found

    def look_at_disk(self, limit: int) -> None:
        """No replica may take more than the limit, whatever is going on."""
        size = self.largest()
        self.most_bytes = max(self.most_bytes, size)
        assert size <= limit, f"a replica takes {size} bytes, more than {limit}"

    # What happens.

    def step(self) -> None:
        """One event; then the writers go on."""
        (action,) = self.draw.choices(list(self.actions), list(self.actions.values()))
        before = [writer.acknowledged for writer in self.writers]
        action()
        self.events[action.__name__] += 1

        def goes_on() -> bool:
            assert not any(w.failed for w in self.writers), [w.failed[:3] for w in self.writers]
            return all(w.acknowledged > b for w, b in zip(self.writers, before, strict=True))

        self.cluster.wait_until(goes_on, "every writer is acknowledged", 2 * CATCH_UP_S)
        self.look_at_disk(REPLICA_BYTES)
        time.sleep(self.draw.random() * 3)

    def any_of(self, count: int) -> list[int]:
        """Some nodes."""
        return self.draw.sample(list(self.nodes.numbers), count)

    def again(self, some: list[int]) -> None:
        """Start them in any order; a majority is needed before one is ready."""
        for node in some:
            time.sleep(self.draw.random() * 2)
            self.cluster.start(node, wait=False)
        self.cluster.await_ready(CATCH_UP_S)
        self.nodes.back(*some)

    def kill(self) -> None:
        """kill -9."""
        some = self.any_of(1)
        self.nodes.kill(*some)
        self.again(some)

    def kill_two(self) -> None:
        """The one and the other: a majority is gone."""
        some = self.any_of(2)
        self.nodes.kill(*some)
        self.again(some)

    def kill_all(self) -> None:
        """All shut down uncleanly."""
        some = self.any_of(3)
        self.nodes.kill(*some)
        self.again(some)

    def stop(self) -> None:
        """In order."""
        (node,) = self.any_of(1)
        self.nodes.stop(node)
        self.again([node])

    def stall(self) -> None:
        """It stands still, shorter or longer than its session."""
        with self.nodes.stalled(*self.any_of(1)):
            time.sleep(self.draw.uniform(0.2, 12))

    def move_leader(self) -> None:
        """Another replica is preferred, and elected as soon as it is in sync."""
        kind = self.draw.choice(KINDS)
        tp = TopicPartition(kind.name, self.draw.randrange(PARTITIONS))
        order = self.any_of(3)
        self.nodes.await_isr(kind.name)
        with self.cluster.client() as client:
            client.run(reassign({tp: order}, TIMEOUT_MS))
            client.run(elect_leaders(PREFERRED, [tp], TIMEOUT_MS))


def soak(cluster: Cluster, seed: int, seconds: float, per_second: float, records: int = 0) -> Soak:
    """All of it, for so long, and longer if so many records were not sent by then."""
    run = Soak(cluster, seed, per_second)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 or run.sent < records:
        run.round(ROUND_S if left <= 0 else min(left, ROUND_S))
    run.finish()
    return run
