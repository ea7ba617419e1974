"""A deleted key that comes back: the same steps on three nodes of Apache Kafka and of kept.

A node is away while a key is deleted and the tombstone is compacted away. Then it returns, catches
up, is in sync, and is elected. Where each replica compacts for itself, it still has the key's last
value and never hears of the deletion: a reader sees the deleted key as live.

    python bench/resurrection.py [--broker kept|kafka]

Prints what was read before and after, for each; exits with 1 when the key is live again on kept.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

import three_node_clusters
from three_node_clusters import NODES, Trio

from kept.client.admin.cluster import elect_leaders, reassign
from kept.client.admin.topics import NewTopic
from kept.client.client import OutRecord
from kept.storage.types import TopicPartition

TOPIC = "accounts"
KEY = b"alice"
SETTINGS = {
    "cleanup.policy": "compact",
    "delete.retention.ms": "0",
    "min.cleanable.dirty.ratio": "0.01",
    "segment.ms": "500",
}
CLEANER = {"log_cleaner_backoff_ms": "200"}
PREFERRED = 0
TIMEOUT_MS = 30_000


class Outcome(NamedTuple):
    """What a reader of the whole log saw of the key; None: nothing, or only its deletion."""

    before: bytes | None
    """While the node was away, after compaction."""
    after: bytes | None
    """When the node leads."""
    away: int

    @property
    def came_back(self) -> bool:
        return self.before is None and self.after is not None


def records(trio: Trio) -> list[tuple[bytes | None, bytes | None]]:
    """(key, value) of all that the leader serves, in order."""
    with trio.client() as client:
        return [(record.key, record.value) for record in client.read(TOPIC)]


def value_of_key(trio: Trio) -> bytes | None:
    return dict(records(trio)).get(KEY)


def write(trio: Trio, key: bytes, value: bytes | None) -> None:
    with trio.client() as client:
        client.produce(TOPIC, [OutRecord(key, value, partition=0)])


def compacted_away(trio: Trio) -> bool:
    """Whether nothing of the key is left, not even the tombstone; another record lets logs roll."""
    write(trio, b"clock", b"tick")
    return all(key != KEY for key, _ in records(trio))


def outcome(trio: Trio) -> Outcome:
    """The story, step by step."""
    tp = TopicPartition(TOPIC, 0)
    with trio.client() as client:
        client.create_topics([NewTopic(TOPIC, 1, NODES, SETTINGS)])
    trio.await_in_sync(TOPIC)
    write(trio, KEY, b"alive")
    view = trio.partitions(TOPIC)[0]
    controller = trio.controller()
    away = next(n for n in view.replicas if n not in (view.leader, controller))
    trio.await_in_sync(TOPIC)
    trio.nodes.kill(away)
    write(trio, KEY, None)
    trio.wait_until(lambda: compacted_away(trio), "the tombstone is compacted away")
    before = value_of_key(trio)
    trio.nodes.start(away)
    trio.await_in_sync(TOPIC)
    others = [n for n in range(NODES) if n != away]
    with trio.client() as client:
        client.run(reassign({tp: [away, *others]}, TIMEOUT_MS))
        trio.wait_until(lambda: trio.partitions(TOPIC)[0].replicas[0] == away, "it is preferred")
        client.run(elect_leaders(PREFERRED, [tp], TIMEOUT_MS))
    trio.wait_until(lambda: trio.partitions(TOPIC)[0].leader == away, f"node {away} leads")
    return Outcome(before, value_of_key(trio), away)


@contextlib.contextmanager
def running(broker: str) -> Iterator[Trio]:
    with (
        three_node_clusters.kept(**CLEANER)
        if broker == "kept"
        else three_node_clusters.kafka(**CLEANER) as trio
    ):
        yield trio


def main() -> int:
    """Tell the story of each system."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--broker", choices=("kept", "kafka"), action="append")
    status = 0
    for broker in parser.parse_args().broker or ("kafka", "kept"):
        with running(broker) as trio:
            found = outcome(trio)
        print(f"{broker}: deleted while node {found.away} was away, compacted: {found.before!r}")
        said = "IT CAME BACK" if found.came_back else "it stays deleted"
        print(f"{broker}: node {found.away} is back and leads: {found.after!r}: {said}", flush=True)
        status |= broker == "kept" and found.came_back
    return status


if __name__ == "__main__":
    sys.exit(main())
