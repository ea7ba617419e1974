"""Every kind of file a node keeps, damaged in every way: it recovers and says so, or refuses.

Never wrong data: what is served is what was written, all of it unless a ``.log`` itself lost bytes.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import shutil
from pathlib import Path
from random import Random
from uuid import UUID

import pytest

from kept.client.client import OutRecord
from kept.cluster.metadata.metadata_node import MetadataNode
from kept.cluster.metadata.snapshot import write_snapshot
from kept.node.config.node_config import NodeConfig
from kept.node.kafka import api
from kept.node.node import Node
from kept.storage.disk import Disk
from kept.storage.errors import CorruptMessage, DamagedData, KeptError
from kept.storage.records import check_replica, headers, records
from kept.storage.segments import txn_index
from kept.storage.types import IsolationLevel
from kept.testing import Cluster
from tests.support.slow import rest_slow


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] if data else data


DAMAGES = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "flip": lambda data: flip(data, len(data) // 2),
    "garbage": lambda data: b"\x07garbage" * 9,
    "missing": None,
}
KINDS = {
    "last log": "log/plain-0/*.log",
    "first log": "log/plain-0/*.log",
    "cleaned log": "log/table-0/*.log",
    "index": "log/*/*.index",
    "timeindex": "log/*/*.timeindex",
    "txnindex": "log/*/*.txnindex",
    "snapshot": "log/*/*.snapshot",
    "leader epochs": "log/*/leader-epoch-checkpoint",
    "partition.metadata": "log/*/partition.metadata",
    "recovery points": "log/recovery-point-offset-checkpoint",
    "high watermarks": "log/replication-offset-checkpoint",
    "log starts": "log/log-start-offset-checkpoint",
    "cleaner offsets": "log/cleaner-offset-checkpoint",
    "meta.properties": "log/meta.properties",
    "clean mark": "log/.kafka_cleanshutdown",
    "manifest": "log/table-0/manifest-[0-9]*",
    "applied mark": "log/table-0/manifest-applied",
    "journal": "log/table-0/removals-*",
    "metadata log": "meta/metadata.wal",
    "metadata snapshot": "meta/snapshot-*",
    "hard state": "meta/hard-state",
}
LOGS = ("last log", "first log", "cleaned log")


def lone_node(directory: str, **settings: str) -> Node:
    return Node(NodeConfig.load(None, settings, {}, port=0, data_dir=directory))


def delete_first(topic: str, count: int) -> dict:
    partition = {"partition_index": 0, "offset": count}
    return {"topics": [{"name": topic, "partitions": [partition]}], "timeout": 10_000}


async def led(node: Node) -> None:
    """Until all partitions are that are online: a log whose epoch is later than the metadata's is
    led in a later one still, for which the controller is asked first.
    """
    partitions = node.parts.table.partitions.values()
    async with asyncio.timeout(30):
        while not all(p.is_leader or p.offline is not None for p in partitions):
            await asyncio.sleep(0.001)


def contents(node: Node) -> dict[str, dict[int, tuple]]:
    """What consumers get: records by offset, for each partition that is served."""
    found = {}
    for tp, partition in node.parts.table.partitions.items():
        if tp.topic.startswith("__"):
            continue
        mine = found[f"{tp}"] = {}
        offset, end = partition.log_start_offset, partition.high_watermark
        while offset < end:
            try:
                fetched = partition.fetch(
                    offset, 1 << 20, isolation=IsolationLevel.READ_UNCOMMITTED
                )
            except DamagedData:  # the client has CORRUPT_MESSAGE
                offset += 1
                continue
            if fetched.slice is None:
                break
            data = node.parts.runtime.disk.pread(*fetched.slice)
            for position, header in headers(data):
                try:
                    check_replica(data, position)
                except CorruptMessage:  # any client refuses it too
                    mine["corrupt"] = header.base_offset
                    offset = end
                    break
                batch = data[position : position + header.size_bytes]
                mine |= {
                    r.offset: (r.timestamp, r.key, r.value)
                    for r in records(batch)
                    if r.offset >= partition.log_start_offset
                }
                offset = header.next_offset
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Directories of a node that was stopped, and of one that was killed."""
    root = tmp_path_factory.mktemp("written")
    with Cluster(
        directory=root / "nodes",
        log_cleaner_backoff_ms=50,
        replica_high_watermark_checkpoint_interval_ms=100,
    ) as cluster:
        small = {"segment.bytes": "1500", "index.interval.bytes": "200"}
        with cluster.client() as client:
            client.create_topic("plain", partitions=1, config=small)
            table = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", **small}
            client.create_topic("table", partitions=1, config=table)

            def fill(rounds):
                for n in rounds:
                    rows = [OutRecord(key=b"k%d" % i, value=b"%d" % n * 9) for i in range(5)]
                    client.produce("plain", rows)
                    client.produce("table", rows)

            fill(range(40))
            path = Path(cluster.log_dir()) / "table-0"
            cluster.wait_until(lambda: (path / "manifest-applied").exists(), "compacted")
            client.request(21, delete_first("plain", 12))
            cluster.stop()
            shutil.copytree(cluster.data_dir(), root / "stopped")
            cluster.start()
        with cluster.client() as client:
            client.produce("plain", [OutRecord(key=b"k", value=b"last")])
        cluster.wait_until(
            lambda: "plain 0 201" in (path.parent / "replication-offset-checkpoint").read_text(),
            "the high watermark is written",
        )
        cluster.kill()
        shutil.copytree(cluster.data_dir(), root / "killed")
    for name in ("stopped", "killed"):
        # What a node alone does not write yet, or only after 4 MiB.
        meta = str(root / name / "meta")
        member = MetadataNode.open(
            meta, Disk({}), node_id=0, directory_id=UUID(int=1), random=Random(1).randrange
        )
        write_snapshot(Disk({}), meta, member.image, member.term)
        entry = txn_index.AbortedTxn(99, 20, 24, 25)
        log = sorted((root / name / "log" / "plain-0").glob("*.log"))[1]
        log.with_suffix(".txnindex").write_bytes(txn_index.encode([entry]))
    return root


@pytest.fixture(scope="module")
def model(written, tmp_path_factory):
    """What is to be read from the undamaged directories."""
    found = {}
    for state in ("stopped", "killed"):
        path = tmp_path_factory.mktemp("model") / "data"
        shutil.copytree(written / state, path)
        outcome, found[state], _ = start(str(path))
        assert outcome is None
        assert len(found[state]["plain-0"]) == {"stopped": 188, "killed": 189}[state]
        assert 5 <= len(found[state]["table-0"]) < 200
    return found


def start(directory: str):
    """(the refusal or None, what is served, why partitions are offline)."""

    async def main():
        node = lone_node(directory, **{"log.cleaner.enable": "false"})
        try:
            await node.start()
        except (KeptError, FileNotFoundError) as error:
            return error, {}, []
        try:
            await node.warmed_up()
            await led(node)
            offline = [why for t in node.parts.table.by_name.values() for why in t.offline.values()]
            return None, contents(node), offline
        finally:
            await node.stop()

    api.preload()
    return asyncio.run(main())


def damage(root: Path, kind: str, how: str) -> list[str]:
    """Damage the files of a kind; their paths."""
    paths = sorted(
        path
        for path in root.rglob("*")
        if path.is_file() and fnmatch.fnmatch(str(path.relative_to(root)), KINDS[kind])
    )
    if kind in ("last log", "first log"):
        paths = paths[-1:] if kind == "last log" else paths[:1]
    elif kind == "cleaned log":
        paths = [max(paths, key=lambda p: p.stat().st_size)]
    for path in paths:
        data = path.read_bytes()
        if DAMAGES[how] is None:
            path.unlink()
        elif kind in LOGS and how == "flip":
            # Inside a batch's CRC: nothing covers base offset and leader epoch.
            starts = [position for position, _ in headers(data)]
            path.write_bytes(flip(data, starts[len(starts) // 2] + 25))
        else:
            path.write_bytes(DAMAGES[how](data))
    return [str(p) for p in paths]


def first_behind(paths: list[str]) -> dict[str, int]:
    """Where the segment behind a closed one of these begins, by partition."""
    found = {}
    for path in map(Path, paths):
        behind = [int(log.stem) for log in path.parent.glob("*.log") if log.stem > path.stem]
        if behind:
            found[path.parent.name] = min(behind)
    return found


@pytest.mark.parametrize("how", rest_slow(["flip", "missing", "half", "empty", "garbage"], 3))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", rest_slow(["killed", "stopped"], 1))
def test_damaged(written, model, tmp_path, caplog, capfd, state, kind, how):  # noqa: PLR0917
    path = tmp_path / "data"
    shutil.copytree(written / state, path)
    damaged = damage(path, kind, how)
    if not damaged:
        assert (state, kind) == ("killed", "clean mark")
        return
    behind = first_behind(damaged) if kind in LOGS else {}
    before = [Path(p).read_bytes() if os.path.exists(p) else None for p in damaged]
    refusal, found, offline = start(str(path))
    said = caplog.text + capfd.readouterr().err
    if refusal is not None:
        assert any(
            name in str(refusal) or os.path.dirname(name) in str(refusal) for name in damaged
        ), f"which file? {refusal}"
        after = [Path(p).read_bytes() if os.path.exists(p) else None for p in damaged]
        assert after == before, "a refusal changes nothing"
        return
    assert "Traceback" not in said
    expected = model[state]
    for name, wanted in expected.items():
        if name not in found:
            assert offline, f"{name} is not served, and nobody says why"
            assert any(os.path.basename(p) in why for why in offline for p in damaged), offline
            assert any(os.path.dirname(p) in said for p in damaged)
            continue
        served = dict(found[name])
        corrupt = served.pop("corrupt", None)
        if kind == "log starts":
            # As in Apache Kafka: what DeleteRecords hid inside the first segment shows again.
            served = {o: r for o, r in served.items() if o >= min(wanted)}
        assert all(wanted.get(offset) == record for offset, record in served.items()), "wrong data"
        if kind not in LOGS:
            assert served == wanted, f"{name} lost {sorted(set(wanted) - set(served))[:5]}"
        elif served != wanted and corrupt is None:
            whole = {o for o in wanted if o >= behind.get(name, max(wanted) + 1)}
            assert whole <= set(served), "a lone node has nowhere else what was flushed"
            assert any(os.path.dirname(p) in said for p in damaged), "lost without a word"
    again, found_again, _ = start(str(path))
    assert again is None
    for name, served in found.items():
        assert found_again.get(name) == served, "the next start says something else"
