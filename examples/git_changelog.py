"""The history of a git repository as a changelog in a compacted topic, and back again.

    python examples/git_changelog.py [--repo PATH] [--part 1|2]     (`make demo [REPO=PATH]`)

Two parts. The first starts one node of kept, streams the first-parent history of HEAD into a
compacted topic, watches its segments and dirty ratio grow and compacts it. The second starts three
nodes, streams the same history to three replicas, kills the leader (kill -9) in the middle of it
and starts it again. After each part the topic is read with an ordinary Kafka client
(confluent-kafka) and compared with `git ls-tree -r HEAD`, blob by blob. The last line is `equal`,
or names the first difference; then the exit status is 1.

One record is one change of one file:

    key      the path, as git stores it (bytes)
    value    the content of the blob; for a symbolic link its target; null when the file was deleted
    headers  commit: the id of the commit, in hex; mode: git's file mode, such as 100644

A rename is a deletion and an addition. Submodules hold no content of this repository and are left
out.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
import urllib.request
from collections.abc import Callable

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic
from git_history import (
    LARGEST_BLOB,
    RECORD_OVERHEAD,
    Blobs,
    Change,
    Git,
    Plan,
    describe,
    first_difference,
    give_up,
    look_ahead,
    mib,
)

from kept.testing import Cluster, NodeFailed

TOPIC = "git-changelog"
STAGES = 8  # lines of progress while streaming
WAIT_S = 60
QUIET = {"log_level": 2}  # of librdkafka only what is grave: it also says that a node went away


class Api:
    """kept's own JSON API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=WAIT_S) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            f"{self.url}/api/v1/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Kept": "1"},
        )
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return json.load(answer)

    def partition(self) -> dict:
        (partition,) = self.get(f"topics/{TOPIC}")["partitions"]
        return partition

    def compact(self) -> None:
        answer = self.post("compaction/now", {"topic": TOPIC, "wait": True})
        (outcome,) = answer["partitions"]
        if "error" in outcome:
            give_up(f"compaction failed: {outcome['error']}")


def show_heading() -> None:
    print(f"{'':<30} {'offsets':>9} {'segments':>8}  {'size':>10}  dirty  c=clean d=dirty a=active")


def show(what: str, partition: dict) -> None:
    """One line: how the log stands, a letter for each segment: clean, dirty, active."""
    kinds = "".join(s["kind"][0] for s in partition["segments"])
    shown = kinds if len(kinds) <= 24 else f"{kinds[:10]}..{kinds[-10:]}"
    print(
        f"{what:<30} {partition['log_end_offset']:>9} {len(kinds):>8}  "
        f"{mib(partition['size_bytes']):>10}  "
        f"{partition['compaction']['dirty_ratio']:>5.2f}  {shown}",
        flush=True,
    )


class Streaming:
    """Every change becomes a record, acknowledged by all replicas that are in sync."""

    def __init__(self, git: Git, blobs: Blobs, plan: Plan, bootstrap: str) -> None:
        self.git, self.blobs, self.plan = git, blobs, plan
        self.acknowledged: Callable[[int], None] = lambda _number: None
        self.failed: list[str] = []
        self.producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                **QUIET,
                "enable.idempotence": True,  # and so acks=all
                "linger.ms": 20,
                "batch.size": plan.batch_bytes,
                "message.max.bytes": min(plan.max_message_bytes + RECORD_OVERHEAD, 1_000_000_000),
                "queue.buffering.max.kbytes": 2 * LARGEST_BLOB // 1024,
            }
        )

    def run(self, before: Callable[[int], None], stage: Callable[[int], None]) -> None:
        """Stream it all; `before` is called before each change, `stage` a few times."""
        waiting = 0
        for number, change in enumerate(self.git.changes(), 1):
            before(number)
            waiting += self.produce(number, change)
            is_stage = (
                number * STAGES // self.plan.changes != (number - 1) * STAGES // self.plan.changes
            )
            if is_stage or waiting > 64 * 1024 * 1024:
                self.flush()
                waiting = 0
            if is_stage:
                stage(number)
        self.flush()

    def produce(self, number: int, change: Change) -> int:
        value = None if change.blob is None else self.blobs.content(change.blob)
        headers = [("commit", change.commit.encode()), ("mode", change.mode.encode())]
        delivered = functools.partial(self.delivered, number)
        while True:
            try:
                self.producer.produce(
                    TOPIC, value, change.path, partition=0, headers=headers, on_delivery=delivered
                )
                break
            except BufferError:
                self.producer.poll(0.1)
        self.producer.poll(0)
        return len(value or b"")

    def flush(self) -> None:
        self.producer.flush()
        if self.failed:
            give_up(f"a record was not written: {self.failed[0]}")

    def delivered(self, number: int, error: object, message: object) -> None:
        if error is not None:
            self.failed.append(f"{message.key()!r}: {error}")  # type: ignore[attr-defined]
        else:
            self.acknowledged(number)


class Failover:
    """Kills the leader in the middle of the stream, and starts it again later."""

    def __init__(self, cluster: Cluster, streaming: Streaming) -> None:
        self.cluster, self.streaming = cluster, streaming
        changes = streaming.plan.changes
        self.kill_before = changes * 9 // 16 + 1
        self.start_before = changes * 13 // 16 + 1
        self.victim = -1
        self.killed_at = 0.0
        self.gap_s = 0.0
        self.back = False
        streaming.acknowledged = self.acknowledged

    def before(self, number: int) -> None:
        """Called before the change of this number is streamed."""
        if number == self.kill_before:
            self.victim = self.leader()["leader"]
            pid = self.cluster.pid(self.victim)
            self.killed_at = time.monotonic()
            self.cluster.kill(self.victim)
            print(
                f"killed node {self.victim} (kill -9 of process {pid}), the leader, before "
                f"record {number}"
            )
        elif number == self.start_before:
            self.streaming.flush()
            self.start()

    def acknowledged(self, number: int) -> None:
        """The first record that only the new leader can have taken ends the gap."""
        if number >= self.kill_before and not self.gap_s:
            self.gap_s = time.monotonic() - self.killed_at

    def start(self) -> None:
        """Start the killed node again, if that was not done."""
        if not self.back:
            self.back = True
            self.cluster.start(self.victim)
            print(f"started node {self.victim} again")

    def leader(self) -> dict:
        """The partition as its leader sees it."""
        found: list[dict] = []

        def led() -> bool:
            for i in filter(self.cluster.running, range(len(self.cluster))):
                partition = Api(self.cluster.url(i)).partition()
                if partition["leader"] == i:
                    found.append(partition)
            return bool(found)

        self.cluster.wait_until(led, "the partition has a leader", WAIT_S)
        return found[-1]

    def await_replicas(self) -> dict:
        """Wait until all three replicas are in sync and equally long; how the leader stands."""
        ends: set[int] = set()

        def equal() -> bool:
            partitions = [Api(self.cluster.url(i)).partition() for i in range(len(self.cluster))]
            ends.clear()
            ends.update(p["log_end_offset"] for p in partitions)
            return len(ends) == 1 and all(len(p["isr"]) == len(self.cluster) for p in partitions)

        try:
            self.cluster.wait_until(equal, "three replicas in sync", WAIT_S)
        except NodeFailed as failed:
            give_up(
                f"node {self.victim} did not catch up, the logs end at {sorted(ends)}: {failed}"
            )
        return self.leader()

    def compact(self) -> list[dict]:
        """Compact on the leader; how the replicas stand once all have applied what it came to."""
        Api(self.cluster.url(self.leader()["leader"])).compact()
        found: list[dict] = []

        def same() -> bool:
            found[:] = [Api(self.cluster.url(i)).partition() for i in range(len(self.cluster))]
            generations = {p["compaction"]["generation"] for p in found}
            return len(generations) == 1 and None not in generations

        self.cluster.wait_until(same, "the replicas are at one generation", WAIT_S)
        return found


def read_back(plan: Plan, bootstrap: str) -> tuple[dict[bytes, tuple[str, bytes]], int, int]:
    """The topic as a table, path to (mode, content); how many records and tombstones it has."""
    most = min(plan.max_message_bytes + RECORD_OVERHEAD, 1_000_000_000)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            **QUIET,
            "group.id": "git-changelog-reader",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "fetch.message.max.bytes": most,
            "fetch.max.bytes": max(most, 52_428_800),
            "receive.message.max.bytes": max(most, 52_428_800) + 1_000_000,
        }
    )
    table: dict[bytes, tuple[str, bytes]] = {}
    records = tombstones = 0
    consumer.assign([TopicPartition(TOPIC, 0, OFFSET_BEGINNING)])
    while True:
        message = consumer.poll(WAIT_S)
        if message is None:
            give_up(f"nothing came within {WAIT_S} s after {records} records")
        error = message.error()
        if error is not None:
            if error.name() == "_PARTITION_EOF":
                break
            raise KafkaException(error)
        records += 1
        if message.value() is None:
            tombstones += 1
            table.pop(message.key(), None)
        else:
            mode = dict(message.headers())["mode"].decode()
            table[message.key()] = (mode, message.value())
    consumer.close()
    return table, records, tombstones


def compare(git: Git, table: dict[bytes, tuple[str, bytes]]) -> None:
    """Say equal, or name the first difference and end."""
    tree = git.tree()
    hash_name = (git.run("rev-parse", "--show-object-format") or b"sha1").decode().strip()
    difference = first_difference(table, tree, hash_name)
    if difference is not None:
        give_up(f"different: {difference}")
    print(f"{len(tree)} files of HEAD against the topic, blob by blob:\nequal")


def create_topic(plan: Plan, bootstrap: str, replicas: int) -> None:
    config = {
        "cleanup.policy": "compact",
        "segment.bytes": str(plan.segment_bytes),
        "max.message.bytes": str(plan.max_message_bytes),
    }
    topic = NewTopic(TOPIC, num_partitions=1, replication_factor=replicas, config=config)
    admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})
    admin.create_topics([topic])[TOPIC].result(WAIT_S)
    shown = ", ".join(f"{k}={v}" for k, v in config.items())
    print(f"topic {TOPIC}: replication factor {replicas}, {shown}\n")


def settings(plan: Plan) -> dict[str, object]:
    """What nodes need to take this history."""
    if plan.max_message_bytes <= 64 * 1024 * 1024:
        return {}
    return {"socket.request.max.bytes": plan.max_message_bytes + 16 * 1024 * 1024}


def on_one_node(git: Git, blobs: Blobs, plan: Plan) -> None:
    with Cluster(**settings(plan)) as cluster:
        print(f"kept listens on {cluster.bootstrap}, HTTP on the same port (/metrics, /api/v1/)")
        api = Api(cluster.url())
        create_topic(plan, cluster.bootstrap, 1)
        show_heading()
        Streaming(git, blobs, plan, cluster.bootstrap).run(
            before=lambda _number: None,
            stage=lambda number: show(f"streamed {number} of {plan.changes}", api.partition()),
        )
        before = api.partition()
        api.compact()
        after = api.partition()
        show("compacted", after)
        table, records, tombstones = read_back(plan, cluster.bootstrap)
    less = 100 - 100 * after["size_bytes"] / before["size_bytes"]
    print(
        f"\nbefore compaction {plan.changes} records, {mib(before['size_bytes'])}, "
        f"{len(before['segments'])} segments\n"
        f"after compaction  {records} records ({tombstones} tombstones, which stay for "
        f"delete.retention.ms), {mib(after['size_bytes'])}, {len(after['segments'])} segments\n"
        f"compaction saved  {plan.changes - records} records, "
        f"{mib(before['size_bytes'] - after['size_bytes'])} ({less:.0f}%)\n"
    )
    compare(git, table)


def on_three_nodes(git: Git, blobs: Blobs, plan: Plan) -> None:
    by_hand = {"log.cleaner.enable": "false"}
    with Cluster(nodes=3, **settings(plan), **by_hand) as cluster:
        print(f"three nodes of kept listen on {cluster.bootstrap}")
        create_topic(plan, cluster.bootstrap, 3)
        streaming = Streaming(git, blobs, plan, cluster.bootstrap)
        failover = Failover(cluster, streaming)
        show_heading()
        streaming.run(
            before=failover.before,
            stage=lambda number: show(f"streamed {number} of {plan.changes}", failover.leader()),
        )
        failover.start()
        end = failover.await_replicas()
        _, before, _ = read_back(plan, cluster.bootstrap)
        if before != plan.changes:
            give_up(f"different: {plan.changes} records were acknowledged, the topic has {before}")
        replicas = failover.compact()
        show("compacted", replicas[end["leader"]])
        table, records, _ = read_back(plan, cluster.bootstrap)
    print(
        f"\nnode {failover.victim} died; node {end['leader']} leads in epoch "
        f"{end['leader_epoch']}; failover gap {failover.gap_s:.2f} s (from the kill until a later "
        f"record was acknowledged)\n"
        f"in sync again: {', '.join(f'node {i}' for i in sorted(end['isr']))}, "
        f"all at offset {end['log_end_offset']}\n"
        f"compacted by node {end['leader']}, applied by all: generation "
        f"{replicas[0]['compaction']['generation']}, {records} of {plan.changes} records left, "
        f"{', '.join(mib(p['size_bytes']) for p in replicas)}\n"
    )
    compare(git, table)


PARTS = {
    1: ("One node: stream, compact, read back", on_one_node),
    2: ("Three nodes: stream, kill the leader in the middle, read back", on_three_nodes),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--repo", default=".", help="a git repository (default: this directory)")
    parser.add_argument("--part", type=int, choices=PARTS, help="only one of the two parts")
    given = parser.parse_args()
    git = Git(given.repo)
    if git.run("rev-parse", "--git-dir") is None:
        give_up(f"{git.path} is not a git repository; name one with --repo", 2)
    head = git.run("rev-parse", "--verify", "-q", "HEAD^{commit}")
    if head is None:
        print("the repository has no commits: an empty history makes an empty tree\nequal")
        return
    git.head = head.decode().strip()  # HEAD may move meanwhile
    blobs = Blobs(git)
    try:
        plan = look_ahead(git, blobs)
        describe(git, plan)
        if plan.changes == 0:
            print(f"no commit changes a file; HEAD has {len(git.tree())} files\nequal")
            return
        for number in [given.part] if given.part else PARTS:
            title, part = PARTS[number]
            print(f"\n{number}. {title}\n")
            part(git, blobs, plan)
    finally:
        blobs.close()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
