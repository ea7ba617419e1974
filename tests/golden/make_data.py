"""Make ``tests/golden/data/<version>/``: data directories that every later version must open.

::

    .venv/bin/python tests/golden/make_data.py            # for this version, what is not there
    .venv/bin/python tests/golden/make_data.py --force    # all, while the version is not released

A directory of a released version is never made again. Two nodes write the same history; ``clean``
was stopped, ``unclean`` was killed (kill -9) in the middle of a swap, with records after the last
checkpoint. ``expected.json`` says what a client must find in each; see ``describe``. Records are
compared with what was sent while the directories are made, so that it is not this version's bugs
that become the standard. The node of ``transactions`` was killed with a transaction in each state;
what must become of them is written here.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import kept
from kept.client.client import Client, OutRecord
from kept.client.consume.consumer import GroupConsumer
from kept.client.consume.positions import EARLIEST
from kept.client.core.calls import ToLeader
from kept.client.core.metadata import Endpoint
from kept.client.json_api import JsonApi
from kept.client.transactional_producer import TransactionalProducer
from kept.node.coordinator.transactions.records import TransactionState, decode_record
from kept.node.metadata.internal_topics import TRANSACTION_STATE
from kept.storage.records import records
from kept.storage.types import Codec, TopicPartition
from kept.testing import Cluster

HERE: Final = Path(__file__).resolve().parent / "data"
SETTINGS: Final = {
    "offsets_topic_num_partitions": 2,
    "offsets_retention_minutes": 2_147_483_647,
    "kept_metrics_partitions": "all",
}
"""Of the nodes that write the data and of those that read it: nothing in it may get too old."""
FOREVER: Final = str((1 << 63) - 1)
CENTURY_MS: Final = 3_155_760_000_000
START_MS: Final = 1_790_000_000_000
FUTURE_MS: Final = 4_102_444_800_000
"""1 January 2100: sequence numbers are remembered for a day after their batch's timestamp."""
DELETE_RECORDS: Final = 21
CODECS: Final = (Codec.NONE, Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD)

_SMALL: Final = {"segment.bytes": "2000", "index.interval.bytes": "150", "segment.ms": FOREVER}
_COMPACTED: Final = {
    **_SMALL,
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "1.0",  # never by itself, only when asked
    "delete.retention.ms": str(CENTURY_MS),
}
_DELETED: Final = {**_SMALL, "cleanup.policy": "delete", "retention.ms": "-1"}
TOPICS: Final[dict[str, tuple[int, dict[str, str]]]] = {
    "users": (2, _COMPACTED),
    "expiring": (1, {**_COMPACTED, "delete.retention.ms": "0"}),
    "swapping": (1, _COMPACTED),
    "highest": (
        1,
        {
            **_COMPACTED,
            "kept.compaction.strategy": "highest-version",
            "kept.compaction.version.header": "v",
        },
    ),
    "events": (2, _DELETED),
    "codecs": (1, {**_DELETED, "segment.bytes": "1048576"}),
    "append-time": (1, {**_DELETED, "message.timestamp.type": "LogAppendTime"}),
    "producers": (1, {**_DELETED, "message.timestamp.after.max.ms": FOREVER}),
    "empty": (1, {}),
    "gone": (1, _DELETED),
    "again": (1, _DELETED),
}


class History:
    """What was sent: per partition the records by offset, as ``shown`` shows them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.sent: dict[str, dict[int, list[Any]]] = {}

    def send(
        self,
        topic: str,
        rows: Iterable[tuple[int, str | bytes | None, str | bytes | None, tuple[Any, ...]]],
        *,
        partition: int = 0,
        codec: Codec = Codec.NONE,
        producer: Any = None,
    ) -> int:
        """One batch; its base offset. Rows are (timestamp, key, value, headers)."""
        out = [
            OutRecord(_bytes(key), _bytes(value), headers, timestamp, partition)
            for timestamp, key, value, headers in rows
        ]
        (done,) = self.client.produce(topic, out, codec=codec, producer=producer)
        known = self.sent.setdefault(f"{topic}-{partition}", {})
        for number, r in enumerate(out):
            offset = done.base_offset + number
            known[offset] = [offset, r.timestamp, shown(r.key), shown(r.value), _headers(r.headers)]
        return done.base_offset

    def forget(self, topic: str) -> None:
        """The topic was deleted."""
        self.sent.pop(f"{topic}-0", None)

    def agrees(self, expected: dict[str, Any]) -> None:
        """Everything found was sent; what may not be missing is there."""
        for name, found in expected["partitions"].items():
            sent = self.sent.get(name, {})
            by_offset = {record[0]: record for record in found["records"]}
            if name.startswith("__"):
                continue
            for offset, record in by_offset.items():
                same = slice(2, 5) if name.startswith("append-time") else slice(0, 5)
                assert record[same] == sent[offset][same], (name, record, sent[offset])
            topic = name.rpartition("-")[0]
            if TOPICS[topic][1].get("cleanup.policy") == "compact":
                assert _winners(topic, by_offset) == _winners(topic, sent), name
            else:
                start = found["log_start_offset"]
                assert set(by_offset) == {o for o in sent if o >= start}, name


def _winners(topic: str, records: dict[int, list[Any]]) -> dict[str, Any]:
    """The record of each key that counts; a tombstone and no record at all are the same."""
    found: dict[str, list[Any]] = {}
    for _, record in sorted(records.items()):
        before = found.get(str(record[2]))
        if topic == "highest" and before is not None and _version(before) > _version(record):
            continue
        found[str(record[2])] = record
    return {key: record for key, record in found.items() if record[3] is not None}


def _version(record: list[Any]) -> int:
    return int(record[4][0][1]["hex"], 16)


def _bytes(text: str | bytes | None) -> bytes | None:
    return text.encode() if isinstance(text, str) else text


def shown(data: bytes | None) -> Any:
    """Bytes in JSON: printable ASCII as a string, others as ``{"hex": …}``."""
    if data is None:
        return None
    text = data.decode("latin-1")
    return text if text.isascii() and text.isprintable() else {"hex": data.hex()}


def _headers(headers: Iterable[tuple[str, bytes | None]]) -> list[list[Any]]:
    return [[name, shown(value)] for name, value in headers]


# What is in it, as a client and the HTTP API say.


def api(cluster: Cluster) -> JsonApi:
    """The HTTP API of the node."""
    return JsonApi(Endpoint("localhost", cluster.port()))


def describe(cluster: Cluster) -> dict[str, Any]:
    """Topics with their settings, partitions with their records, groups with their offsets."""
    http = api(cluster)
    topics, partitions = {}, {}
    with cluster.client() as client:
        names = [topic["name"] for topic in http.get("topics")["topics"]]
        described = client.topic_configs(names)
        for name in names:
            one = http.get(f"topics/{name}")
            values = {entry.name: entry.value for entry in described[name]}
            config = {setting: values[setting] for setting in one["config"]}
            topics[name] = {"topic_id": one["topic_id"], "config": config}
            bounds = client.bounds(name)
            for p in one["partitions"]:
                number = p["partition"]
                compaction = p["compaction"] or {}
                assert bounds[number] == (p["log_start_offset"], p["high_watermark"])
                partitions[f"{name}-{number}"] = {
                    "log_start_offset": p["log_start_offset"],
                    "high_watermark": p["high_watermark"],
                    "generation": compaction.get("generation"),
                    "first_dirty_offset": compaction.get("first_dirty_offset"),
                    "records": _records(client, name, number),
                }
        groups = {one.group: _group(client, one.group) for one in client.list_groups()}
        cluster_config = {entry.name: entry.value for entry in client.broker_configs("")}
    return {
        "cluster_id": http.get("cluster")["cluster_id"],
        "cluster_config": cluster_config,
        "topics": topics,
        "partitions": partitions,
        "groups": groups,
    }


def _records(client: Client, topic: str, partition: int) -> list[Any]:
    return [
        [r.offset, r.timestamp, shown(r.key), shown(r.value), _headers(r.headers)]
        for r in client.read(topic, [partition])
    ]


def _group(client: Client, group: str) -> dict[str, Any]:
    found = client.describe_group(group)
    offsets = client.committed(group)
    return {
        "state": found.state,
        "protocol_type": found.protocol_type,
        "offsets": {f"{tp.topic}-{tp.partition}": n for tp, n in sorted(offsets.items())},
    }


# The history.


def compact(cluster: Cluster, topic: str, partition: int | None = None) -> None:
    """One pass over a partition, or over all of them."""
    asked = {"topic": topic, "wait": True}
    if partition is not None:
        asked["partition"] = partition
    for one in api(cluster).post("compaction/now", asked)["partitions"]:
        assert one["done"], one


def fill_compacted(cluster: Cluster, history: History) -> None:
    """Two passes with tombstones and all codecs, then a dirty tail."""
    for generation in range(2):
        for number in range(6):
            at = START_MS + generation * 100_000 + number * 1000
            codec = CODECS[number % len(CODECS)]
            rows: list[Any] = [
                (at + k, f"user{(number * k) % 12}", f"{generation}.{number}.{k} " + "x" * 40, ())
                for k in range(1, 5)
            ]
            headers = (("why", b"test"), ("no", None))
            rows.append((at + 9, f"left{generation}.{number}", "soon deleted", headers))
            for partition in (0, 1):
                history.send("users", rows, partition=partition, codec=codec)
            history.send("expiring", rows, codec=codec)
            history.send("swapping", rows, codec=codec)
        for number in range(0, 6, 2):
            at = START_MS + generation * 100_000 + 50_000
            rows = [(at, f"left{generation}.{number}", None, ())]
            history.send("users", rows, partition=number % 4 // 2)
            history.send("expiring", rows)
        rows = [(START_MS + generation * 100_000 + 60_000, "filler", "f" * 1850, ())]
        for topic, partition in (("users", 0), ("users", 1), ("expiring", 0), ("swapping", 0)):
            history.send(topic, rows, partition=partition)
        compact(cluster, "users")
        if generation == 0:
            compact(cluster, "expiring")
    tail = [(START_MS + 900_000, b"\x00binary\xff", b"\xfe" * 5, ()), (START_MS, "empty", "", ())]
    history.send("users", tail)
    for number in range(20):
        version = (number * 7) % 11
        rows = [(START_MS + number, "one", "v" * 100, (("v", version.to_bytes(8, "big")),))]
        history.send("highest", rows)
    history.send("highest", [(START_MS, "end", "e" * 1850, (("v", bytes(8)),))])
    compact(cluster, "highest")


def fill_others(cluster: Cluster, history: History) -> list[int]:
    """Everything that is not compacted; the idempotent producer's (id, epoch, next sequence)."""
    client = history.client
    for number in range(40):
        rows: list[Any] = [(START_MS + number, f"e{number}", "event " * 10, ())]
        history.send("events", rows, partition=number % 2)
    history.send("events", [(START_MS + 50, None, None, ()), (START_MS + 40, None, "x", ())])
    delete_records(client, "events", 0, 17)
    for codec in CODECS:
        rows = [(START_MS + n, f"{codec.name}{n}", "same " * 20, (("n", b"1"),)) for n in range(20)]
        history.send("codecs", rows, codec=codec)
    history.send("append-time", [(START_MS, "a", "1", ()), (START_MS + 1, "b", "2", ())])
    history.send("append-time", [(START_MS, "c", "3", ())], codec=Codec.GZIP)
    producer = client.init_producer()
    for number in range(7):
        rows = [(FUTURE_MS + number, f"p{number}", "once", ()), (FUTURE_MS, "second", "once", ())]
        history.send("producers", rows, producer=producer)
    for topic in ("gone", "again"):
        history.send(topic, [(START_MS, "lost", "with its topic", ())])
    client.delete_topics(["gone", "again"])
    history.forget("gone")
    history.forget("again")
    client.create_topic("again", partitions=1, config=TOPICS["again"][1])
    history.send("again", [(START_MS, "kept", "under another id", ())])
    client.alter_topic("users", {"max.message.bytes": "200000"}, delete=["index.interval.bytes"])
    client.create_partitions("empty", 3)
    client.alter_broker("", {"message.max.bytes": "1500000"})
    return [producer.id, producer.epoch, producer.sequences[TopicPartition("producers", 0)]]


def delete_records(client: Client, topic: str, partition: int, offset: int) -> None:
    """Move a log's start."""
    entry = {"partition_index": partition, "offset": offset}
    values = {"topics": [{"name": topic, "partitions": [entry]}], "timeout": 10_000}
    answer = client.request(DELETE_RECORDS, values, ToLeader(topic, partition))
    assert int(answer.topics[0].partitions[0].error_code) == 0, answer


def fill_groups(client: Client) -> None:
    """A group that had a member, and offsets of one that never had."""
    member = GroupConsumer(client, "readers", ["codecs", "users"], reset=EARLIEST)
    read = 0
    while read < 100:
        read += len(member.poll())
    member.close()
    client.commit("simple", {TopicPartition("events", 0): 20, TopicPartition("events", 1): 3})


def write(cluster: Cluster) -> tuple[History, list[int]]:
    """The history that both directories have."""
    client = cluster.client()
    for topic, (partitions, config) in TOPICS.items():
        client.create_topic(topic, partitions=partitions, config=config)
    history = History(client)
    fill_compacted(cluster, history)
    producer = fill_others(cluster, history)
    fill_groups(client)
    return history, producer


def make(directory: Path, killed: bool) -> dict[str, Any]:
    """Write one data directory; what is expected of it."""
    with tempfile.TemporaryDirectory() as work, Cluster(directory=work, **SETTINGS) as cluster:
        history, producer = write(cluster)
        if killed:
            cluster.stop()
            history.client.close()
            cluster.start(fail_point="swap.deleted")
            history.client = cluster.client()
            history.send("users", [(START_MS + 910_000, "user1", "after the start", ())])
            history.send("events", [(START_MS + 60, "late", "after the start", ())], partition=1)
            history.client.commit("simple", {TopicPartition("events", 1): 5})
            api(cluster).post("compaction/now", {"topic": "swapping"})
            assert cluster.wait() == -9
        else:
            expected = describe(cluster)
            cluster.stop()
        history.client.close()
        shutil.copytree(cluster.data_dir(), directory)
        if killed:
            assert list(directory.glob("log/swapping-0/*.swap"))
            cluster.start(log_cleaner_enable=False)
            expected = describe(cluster)
        history.agrees(expected)
    return {**expected, "producer": producer}


# Transactions.


def make_transactions(directory: Path) -> dict[str, Any]:
    """Write a data directory with a transaction in each state; what is to become of them."""
    settings = {**SETTINGS, "transaction_state_log_num_partitions": 1}
    with tempfile.TemporaryDirectory() as work, Cluster(directory=work, **settings) as cluster:
        with cluster.client() as client:
            client.create_topic("transfers", partitions=2, config=_DELETED)
            given = {name: TransactionalProducer(client, name) for name in ENDS}
            for name, partitions in (("committed", 2), ("aborted", 1), ("open", 2), ("decided", 2)):
                rows = [
                    OutRecord(None, f"{name} {n}".encode(), (), START_MS, n)
                    for n in range(partitions)
                ]
                given[name].produce("transfers", rows)
            given["committed"].commit()
            given["aborted"].abort()
            given["decided"].commit()
            cluster.kill()
        shutil.copytree(cluster.data_dir(), directory)
    assert _states(directory / "log" / f"{TRANSACTION_STATE}-0") == STATES
    return {
        "states": ENDS,
        "producers": {name: [one.producer_id, one.epoch] for name, one in given.items()},
        "records": {
            f"transfers-{n}": [f"{name} {n}" for name in ("committed", "decided")] for n in (0, 1)
        },
    }


STATES: Final = {
    "idle": TransactionState.EMPTY,
    "committed": TransactionState.COMPLETE_COMMIT,
    "aborted": TransactionState.COMPLETE_ABORT,
    "open": TransactionState.ONGOING,
    "decided": TransactionState.PREPARE_COMMIT,
}
"""As the node was killed: within the 5 ms before the last one is noted as complete."""
ENDS: Final = {
    "idle": "Empty",
    "committed": "CompleteCommit",
    "aborted": "CompleteAbort",
    "open": "CompleteAbort",
    "decided": "CompleteCommit",
}
"""After a start: the open one has timed out, whenever that is."""


def _states(directory: Path) -> dict[str, TransactionState]:
    """The last state of each transactional id in a log."""
    found = {}
    for path in sorted(directory.glob("*.log")):
        for record in records(path.read_bytes()):
            assert record.key is not None
            decoded = decode_record(record.key, record.value)
            assert decoded is not None and decoded.metadata is not None
            found[decoded.transactional_id] = decoded.metadata.state
    return found


MAKERS: Final[dict[str, Callable[[Path], dict[str, Any]]]] = {
    "clean": lambda directory: make(directory, False),
    "unclean": lambda directory: make(directory, True),
    "transactions": make_transactions,
}


def main() -> None:
    """Write this version's data directories."""
    target = HERE / kept.__version__
    if "--force" in sys.argv:
        shutil.rmtree(target, ignore_errors=True)
    missing = [name for name in MAKERS if not (target / name).exists()]
    if not missing:
        raise SystemExit(f"{target} is there; a released version's data stays as it is")
    target.mkdir(parents=True, exist_ok=True)
    written = target / "expected.json"
    expected = json.loads(written.read_text()) if written.exists() else {}
    expected |= {name: MAKERS[name](target / name) for name in missing}
    written.write_text(_written(expected) + "\n")
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{target}: {size} bytes")


def _written(value: Any, depth: int = 0) -> str:
    """JSON with one record a line: diffs stay readable."""
    pad = " " * (depth + 1)
    if isinstance(value, dict) and value and depth < 5:
        inner = [f"{pad}{json.dumps(k)}: {_written(value[k], depth + 1)}" for k in sorted(value)]
    elif isinstance(value, list) and value and isinstance(value[0], list):
        inner = [pad + json.dumps(one) for one in value]
    else:
        return json.dumps(value, sort_keys=True)
    left, right = "{}" if isinstance(value, dict) else "[]"
    return f"{left}\n" + ",\n".join(inner) + f"\n{pad[:-1]}{right}"


if __name__ == "__main__":
    main()
