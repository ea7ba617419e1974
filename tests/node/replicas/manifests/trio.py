"""Three nodes with a compacted topic of three replicas, and what is in their files."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kept.client.admin import cluster as operations
from kept.client.client import Client, OutRecord
from kept.client.core.metadata import Endpoint
from kept.client.json_api import HttpFailed, JsonApi
from kept.storage.records import headers, records
from kept.storage.types import TopicPartition
from kept.testing import Cluster

CONFIG = {
    "cleanup.policy": "compact",
    "delete.retention.ms": "0",
    "segment.bytes": "2000",
    "min.cleanable.dirty.ratio": "0.99",
    "min.insync.replicas": "1",
}
DEADLINE_S = 60.0


@dataclass
class Trio:
    """The cluster, its one topic, and a client."""

    cluster: Cluster
    client: Client
    topic: str

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, 0)

    # The partition.

    def partition(self) -> Any:
        return self.client.metadata([self.topic]).topics[self.topic].partitions[0]

    @property
    def leader(self) -> int:
        return self.partition().leader

    def until(self, condition, what: str) -> None:
        self.cluster.wait_until(condition, what, DEADLINE_S)

    def until_leader(self, *candidates: int) -> int:
        self.until(lambda: self.leader in candidates, f"one of {candidates} leads")
        return self.leader

    def until_in_sync(self, *members: int) -> None:
        self.until(lambda: sorted(self.partition().isr) == sorted(members), f"the ISR is {members}")

    def elect(self, node: int) -> None:
        """Have a node lead: it must be the preferred one."""
        self.client.run(operations.elect_leaders(operations.PREFERRED, [self.tp], 10_000))
        self.until_leader(node)

    def elect_preferred(self, node: int) -> None:
        """As :meth:`elect`, unless it leads already."""
        if self.leader != node:
            self.elect(node)

    # Records.

    def put(self, *rows: tuple[bytes, bytes | None], producer: Any = None) -> None:
        self.client.produce(
            self.topic,
            [OutRecord(key=key, value=value) for key, value in rows],
            producer=producer,
        )

    def fill(self, count: int, keys: int = 7, start: int = 0) -> None:
        """Batches of one record."""
        for i in range(start, start + count):
            self.put((b"k%d" % (i % keys), b"%06d" % i * 20))

    def table(self) -> dict[bytes, bytes | None]:
        """What a reader makes of the topic."""
        found: dict[bytes, bytes | None] = {}
        for record in self.client.read(self.topic):
            found[record.key] = record.value
        return found

    def live(self) -> dict[bytes, bytes]:
        return {key: value for key, value in self.table().items() if value is not None}

    def offsets(self) -> list[int]:
        return [record.offset for record in self.client.read(self.topic)]

    # Compaction.

    def api(self, node: int) -> JsonApi:
        return JsonApi(Endpoint(self.cluster.host(node), self.cluster.port(node)), 60.0)

    def status(self, node: int) -> dict[str, Any]:
        (found,) = self.api(node).get("compaction", topic=self.topic)["partitions"]
        return found

    def clean(self) -> dict[str, Any]:
        """A pass on the leader, until it is done there."""

        def go() -> bool:
            nonlocal said
            body = {"topic": self.topic, "partition": 0, "wait": True}
            (said,) = self.api(self.leader).post("compaction/now", body)["partitions"]
            # A segment that retention removes under a pass is an error; the next pass succeeds.
            return said["done"] or "everything is clean" in said.get("reason", "")

        said: dict[str, Any] = {}
        self.until(go, "a pass is done")
        return said

    def clean_until_gone(self, victim: int) -> None:
        """Ask the leader for passes until a node has come to its fail point."""

        def gone() -> bool:
            if self.cluster.running(victim):
                with suppress(HttpFailed, OSError):
                    body = {"topic": self.topic, "partition": 0}
                    self.api(self.leader).post("compaction/now", body)
                time.sleep(0.1)
            return not self.cluster.running(victim)

        self.until(gone, f"node {victim} has died at its fail point")

    def until_applied(self, *nodes: int) -> None:
        """All of them have applied what the leader has."""

        def same() -> bool:
            try:
                wanted = self.status(self.leader)["generation"]
                return all(self.status(node)["generation"] == wanted for node in nodes)
            except (HttpFailed, OSError):
                return False

        self.until(same, f"{nodes} have applied what the leader has")

    # Files.

    def directory(self, node: int) -> str:
        return os.path.join(self.cluster.log_dir(node), f"{self.topic}-0")

    def files(self, node: int) -> list[tuple[Any, ...]]:
        """Every record (and batch without one) that a node's files have below its last segment."""
        rows: list[tuple[Any, ...]] = []
        for path in sorted(glob.glob(os.path.join(self.directory(node), "*.log"))):
            with open(path, "rb") as source:
                data = source.read()
            for at, header in headers(data):
                batch = data[at : at + header.size_bytes]
                rows.append((header.base_offset, header.last_offset, header.partition_leader_epoch))
                rows += [(r.offset, r.timestamp, r.key, r.value) for r in records(batch)]
        return rows

    def until_equal(self) -> None:
        """The files of all replicas hold the same, and nothing that was not finished."""
        first, *others = self.partition().replicas

        def equal() -> bool:
            try:
                wanted = self.files(first)
                same = all(self.files(node) == wanted for node in others)
            except FileNotFoundError:
                return False  # it is being replaced
            return same and not any(self.left_over(node) for node in (first, *others))

        self.until(equal, "the files are equal")

    def left_over(self, node: int) -> list[str]:
        """Files of work that was not finished."""
        names = os.listdir(self.directory(node))
        return [n for n in names if n.endswith((".cleaned", ".swap", ".tmp"))]


@contextmanager
def trio(
    config: dict[str, str] | None = None, replicas: int = 3, **settings: Any
) -> Iterator[Trio]:
    """A trio; its cleaner runs only when it is asked."""
    settings = {
        "log_cleaner_enable": "false",
        "log_segment_delete_delay_ms": "0",
        "auto_leader_rebalance_enable": "false",
        "replica_lag_time_max_ms": "5000",
        **settings,
    }
    with Cluster(nodes=3, **settings) as cluster:
        topic = cluster.create_topic(
            replication_factor=replicas, config={**CONFIG, **(config or {})}
        )
        with cluster.client() as client:
            yield Trio(cluster, client, topic)
