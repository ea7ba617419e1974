"""The history of a git repository as a changelog in a compacted topic, and back again.

    python examples/git_changelog.py [--repo PATH]            (`make demo`, `make demo REPO=PATH`)

It starts a node of kept, streams the first-parent history of HEAD into a compacted topic, watches
its segments and dirty ratio grow, compacts it, reads it with an ordinary Kafka client
(confluent-kafka), and compares what is left with `git ls-tree -r HEAD`, blob by blob. The last line
is `equal`, or names the first difference; then the exit status is 1.

One record is one change of one file:

    key      the path, as git stores it (bytes)
    value    the content of the blob; for a symbolic link its target; null when the file was deleted
    headers  commit: the id of the commit, in hex; mode: git's file mode, such as 100644

A rename is a deletion and an addition. Submodules hold no content of this repository and are left
out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from kept.testing import Cluster

TOPIC = "git-changelog"
SUBMODULE = "160000"
GONE = "000000"
RECORD_OVERHEAD = 4096  # more than headers, key and framing of one record take
SEGMENTS = 12  # so many closed segments the whole history would fill
SMALLEST_SEGMENT = 64 * 1024
LARGEST_SEGMENT = 64 * 1024 * 1024
LARGEST_BLOB = 512 * 1024 * 1024
STAGES = 8  # lines of progress while streaming
WAIT_S = 60
QUIET = {"log_level": 3}  # librdkafka says only what is wrong


class Change(NamedTuple):
    """A file as a commit left it; blob is None when the commit deleted it."""

    commit: str
    path: bytes
    mode: str
    blob: str | None


class Git:
    """A repository, by git's own commands."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.environ = {**os.environ, "GIT_NO_REPLACE_OBJECTS": "1", "LC_ALL": "C"}
        self.head = "HEAD"
        self.skipped_submodules: set[bytes] = set()

    def command(self, *arguments: str) -> list[str]:
        return ["git", "-C", self.path, *arguments]

    def run(self, *arguments: str) -> bytes | None:
        """What the command prints, None when it fails."""
        command = self.command(*arguments)
        done = subprocess.run(command, capture_output=True, env=self.environ, check=False)
        return done.stdout if done.returncode == 0 else None

    def must(self, *arguments: str) -> bytes:
        """What the command prints; the end when it fails."""
        printed = self.run(*arguments)
        if printed is None:
            give_up(f"git {' '.join(arguments)} failed in {self.path}", 2)
        return printed

    def changes(self) -> Iterator[Change]:
        """Every change on the first-parent history of HEAD, oldest first."""
        arguments = ("log", "--first-parent", "-m", "--root", "--reverse", "--raw", "-z")
        arguments += (
            "--no-renames",
            "--no-abbrev",
            "--no-show-signature",
            "--format=%x01%H",
            self.head,
        )
        process = subprocess.Popen(
            self.command(*arguments), stdout=subprocess.PIPE, env=self.environ
        )
        assert process.stdout is not None
        tokens = split_at_nul(process.stdout)
        commit = ""
        for token in tokens:
            line = token.lstrip(b"\n")
            if line.startswith(b"\x01"):
                commit = line[1:].decode()
            elif line.startswith(b":"):
                old_mode, new_mode, _, blob, _ = line[1:].decode().split(" ")
                change = self.change(commit, next(tokens), old_mode, new_mode, blob)
                if change is not None:
                    yield change
        if process.wait():
            give_up("git log failed", 2)

    def change(
        self, commit: str, path: bytes, old_mode: str, new_mode: str, blob: str
    ) -> Change | None:
        """The change as it concerns content: a submodule is nothing."""
        if SUBMODULE in (old_mode, new_mode):
            self.skipped_submodules.add(path)
        was_file = old_mode not in (GONE, SUBMODULE)
        if new_mode not in (GONE, SUBMODULE):
            return Change(commit, path, new_mode, blob)
        return Change(commit, path, GONE, None) if was_file else None

    def tree(self) -> dict[bytes, tuple[str, str]]:
        """Path to (mode, blob id) of every file of HEAD."""
        files = {}
        for entry in self.must("ls-tree", "-r", "-z", "--full-tree", self.head).split(b"\0"):
            if entry:
                about, _, path = entry.partition(b"\t")
                mode, _, blob = about.decode().split(" ")
                if mode != SUBMODULE:
                    files[path] = (mode, blob)
        return files


def split_at_nul(source: object, chunk_bytes: int = 1 << 16) -> Iterator[bytes]:
    rest = b""
    while chunk := source.read(chunk_bytes):  # type: ignore[attr-defined]
        *whole, rest = (rest + chunk).split(b"\0")
        yield from whole
    if rest.strip():
        yield rest


class Blobs:
    """Contents and sizes of blobs, from one `git cat-file` process each."""

    def __init__(self, git: Git) -> None:
        self.processes = {
            option: subprocess.Popen(
                git.command("cat-file", option),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=git.environ,
            )
            for option in ("--batch", "--batch-check")
        }

    def ask(self, option: str, blob: str) -> tuple[subprocess.Popen[bytes], int]:
        process = self.processes[option]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(blob.encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline().split()
        if len(answer) != 3 or answer[1] != b"blob":
            give_up(f"blob {blob} is not in the repository (a partial clone?)", 2)
        return process, int(answer[2])

    def size(self, blob: str) -> int:
        return self.ask("--batch-check", blob)[1]

    def content(self, blob: str) -> bytes:
        process, size = self.ask("--batch", blob)
        assert process.stdout is not None
        content = process.stdout.read(size)
        process.stdout.read(1)
        return content

    def close(self) -> None:
        for process in self.processes.values():
            process.communicate()


class Plan(NamedTuple):
    """What the history holds, found out before streaming it, and the settings that follow."""

    commits: int
    changes: int
    tombstones: int
    content_bytes: int
    largest: int

    @property
    def max_message_bytes(self) -> int:
        return max(1_048_588, self.largest + RECORD_OVERHEAD)

    @property
    def segment_bytes(self) -> int:
        share = (self.content_bytes + 200 * self.changes) // SEGMENTS
        wanted = min(max(share, SMALLEST_SEGMENT), LARGEST_SEGMENT)
        return max(wanted, self.largest + RECORD_OVERHEAD)

    @property
    def batch_bytes(self) -> int:
        return min(self.segment_bytes // 4, 900_000)


def look_ahead(git: Git, blobs: Blobs) -> Plan:
    commits: set[str] = set()
    sizes: dict[str, int] = {}
    changes = tombstones = total = 0
    for change in git.changes():
        commits.add(change.commit)
        changes += 1
        if change.blob is None:
            tombstones += 1
        else:
            if change.blob not in sizes:
                sizes[change.blob] = blobs.size(change.blob)
            total += sizes[change.blob]
    return Plan(len(commits), changes, tombstones, total, max(sizes.values(), default=0))


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


def mib(size: int) -> str:
    return f"{size / (1 << 20):,.2f} MiB"


def stream(git: Git, blobs: Blobs, plan: Plan, bootstrap: str, api: Api) -> None:
    """Every change becomes a record."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            **QUIET,
            "enable.idempotence": True,
            "linger.ms": 20,
            "batch.size": plan.batch_bytes,
            "message.max.bytes": min(plan.max_message_bytes + RECORD_OVERHEAD, 1_000_000_000),
            "queue.buffering.max.kbytes": 2 * LARGEST_BLOB // 1024,
        }
    )
    failed: list[str] = []

    def delivered(error: object, message: object) -> None:
        if error is not None:
            failed.append(f"{message.key()!r}: {error}")  # type: ignore[attr-defined]

    print(f"{'':<30} {'offsets':>9} {'segments':>8}  {'size':>10}  dirty  c=clean d=dirty a=active")
    waiting = 0
    for done, change in enumerate(git.changes(), 1):
        value = None if change.blob is None else blobs.content(change.blob)
        headers = [("commit", change.commit.encode()), ("mode", change.mode.encode())]
        while True:
            try:
                producer.produce(TOPIC, value, change.path, headers=headers, on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
        waiting += len(value or b"")
        stage = done * STAGES // plan.changes != (done - 1) * STAGES // plan.changes
        if stage or waiting > 64 * 1024 * 1024:
            producer.flush()
            waiting = 0
        if stage:
            show(f"streamed {done} of {plan.changes}", api.partition())
        if failed:
            break
    producer.flush()
    if failed:
        give_up(f"a record was not written: {failed[0]}")


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
    low, high = consumer.get_watermark_offsets(TopicPartition(TOPIC, 0), timeout=WAIT_S)
    consumer.assign([TopicPartition(TOPIC, 0, low)])
    position = low
    while position < high:
        message = consumer.poll(WAIT_S)
        if message is None:
            give_up(f"nothing came within {WAIT_S} s at offset {position} of {high}")
        error = message.error()
        if error is not None:
            if error.name() == "_PARTITION_EOF":
                break
            raise KafkaException(error)
        position = message.offset() + 1
        records += 1
        if message.value() is None:
            tombstones += 1
            table.pop(message.key(), None)
        else:
            mode = dict(message.headers())["mode"].decode()
            table[message.key()] = (mode, message.value())
    consumer.close()
    return table, records, tombstones


def first_difference(
    table: dict[bytes, tuple[str, bytes]], tree: dict[bytes, tuple[str, str]], hash_name: str
) -> str | None:
    """Where the table and HEAD's tree differ, None where they do not."""
    for path in sorted({*table, *tree}):
        name = os.fsdecode(path)
        if path not in table:
            return f"{name} is in HEAD but not in the topic"
        if path not in tree:
            return f"{name} is in the topic but not in HEAD"
        (mode, content), (mode_there, blob) = table[path], tree[path]
        if mode != mode_there:
            return f"{name} has mode {mode} in the topic, {mode_there} in HEAD"
        found = hashlib.new(hash_name, b"blob %d\0" % len(content) + content).hexdigest()
        if found != blob:
            return f"{name} is blob {found} in the topic, {blob} in HEAD"
    return None


def give_up(message: str, status: int = 1) -> NoReturn:
    print(f"git_changelog: {message}", file=sys.stderr)
    sys.exit(status)


def describe(git: Git, plan: Plan) -> None:
    name = os.path.basename(os.path.abspath(git.path))
    head = git.must("rev-parse", "--short", git.head).decode().strip()
    print(
        f"{name} at {head}: {plan.commits} commits on the first-parent history, "
        f"{plan.changes} changes ({plan.tombstones} deletions), {mib(plan.content_bytes)}, "
        f"largest blob {mib(plan.largest)}"
    )
    if git.must("rev-parse", "--is-shallow-repository").strip() == b"true":
        print("this is a shallow clone: its history begins with the oldest commit that is here")
    if git.skipped_submodules:
        names = ", ".join(sorted(map(os.fsdecode, git.skipped_submodules)))
        print(f"submodules are left out: {names}")
    if plan.largest > LARGEST_BLOB:
        give_up(f"a blob of {mib(plan.largest)} is beyond this example ({mib(LARGEST_BLOB)})")


def create_topic(plan: Plan, bootstrap: str) -> None:
    config = {
        "cleanup.policy": "compact",
        "segment.bytes": str(plan.segment_bytes),
        "max.message.bytes": str(plan.max_message_bytes),
    }
    topic = NewTopic(TOPIC, num_partitions=1, replication_factor=1, config=config)
    admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})
    admin.create_topics([topic])[TOPIC].result(WAIT_S)
    print(f"topic {TOPIC}: {', '.join(f'{k}={v}' for k, v in config.items())}\n")


def compact(api: Api) -> None:
    answer = api.post("compaction/now", {"topic": TOPIC, "wait": True})
    (outcome,) = answer["partitions"]
    if "error" in outcome:
        give_up(f"compaction failed: {outcome['error']}")


def round_trip(git: Git, blobs: Blobs, plan: Plan) -> None:
    room = {}
    if plan.max_message_bytes > 64 * 1024 * 1024:
        room["socket.request.max.bytes"] = plan.max_message_bytes + 16 * 1024 * 1024
    with Cluster(**room) as cluster:
        print(f"kept listens on {cluster.bootstrap}, HTTP on the same port (/metrics, /api/v1/)")
        api = Api(cluster.url())
        create_topic(plan, cluster.bootstrap)
        stream(git, blobs, plan, cluster.bootstrap, api)
        before = api.partition()
        compact(api)
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
    tree = git.tree()
    hash_name = (git.run("rev-parse", "--show-object-format") or b"sha1").decode().strip()
    difference = first_difference(table, tree, hash_name)
    if difference is not None:
        give_up(f"different: {difference}")
    print(f"{len(tree)} files of HEAD against the topic, blob by blob:\nequal")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--repo", default=".", help="a git repository (default: this directory)")
    git = Git(parser.parse_args().repo)
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
        round_trip(git, blobs, plan)
    finally:
        blobs.close()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
