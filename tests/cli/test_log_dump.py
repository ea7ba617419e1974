"""``kept log dump``: as DumpLogSegments where that knows the file, and as JSON."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from kept.cluster.metadata.replica_history import ReplicaHistory, write_history
from kept.node.coordinator.transactions.records import TransactionMetadata, TransactionRecord
from kept.node.coordinator.transactions.records import TransactionState as State
from kept.storage.checkpoints import read_properties
from kept.storage.disk import Disk
from kept.storage.producers import snapshots
from kept.storage.producers.producer_states import ProducerStates
from kept.storage.records import build_batch, crc32c, headers
from kept.storage.records.header import CRC_START
from kept.storage.segments import txn_index
from kept.storage.types import Codec, TimestampType, TopicPartition
from tests.tools import kafka_dist

NOW = 1_700_000_000_000
CRC_AT, ATTRIBUTES_AT = 17, 22


def records(count: int) -> list:
    return [
        (NOW + n, None if n % 5 == 1 else b"k%d" % n, None if n % 5 == 2 else b"v", (("h", b"x"),))
        for n in range(count)
    ]


@pytest.fixture
def segment(tmp_path) -> Path:
    """One segment with batches of every kind that a log can hold."""
    batches = [
        build_batch(records(6), base_offset=6 * n, codec=codec, leader_epoch=n)
        for n, codec in enumerate(Codec)
    ]
    at = 6 * len(batches)
    batches.append(
        build_batch(
            records(3),
            base_offset=at,
            producer_id=7,
            producer_epoch=1,
            base_sequence=2**31 - 2,
            is_transactional=True,
            timestamp_type=TimestampType.LOG_APPEND_TIME,
        )
    )
    marker = [(NOW, struct.pack(">hh", 0, 1), struct.pack(">hi", 0, 9), ())]
    batches.append(
        build_batch(
            marker,
            base_offset=at + 3,
            producer_id=7,
            producer_epoch=1,
            is_transactional=True,
            is_control=True,
        )
    )
    path = tmp_path / f"{0:020d}.log"
    path.write_bytes(b"".join(batches))
    return path


@pytest.mark.java
def test_the_lines_are_those_of_dump_log_segments(offline, segment):
    theirs = kafka_dist.dump([segment], "--deep-iteration", "--print-data-log")
    ours = offline("log", "dump", segment).lines
    assert [line.rstrip() for line in ours] == [line.rstrip() for line in theirs.splitlines()]


def test_timestamp_types_are_spelt_as_apache_kafka_does(offline, segment):
    batches = [line for line in offline("log", "dump", segment).lines if "baseOffset" in line]
    assert f" CreateTime: {NOW + 5} " in batches[0]
    assert any(" LogAppendTime: " in line for line in batches)


def test_json_is_an_object_a_line(offline, segment):
    found = [json.loads(line) for line in offline("log", "dump", segment, "--json").lines]
    assert {one["file"] for one in found} == {str(segment)}
    batches = [one for one in found if one["kind"] == "batch"]
    assert [b["codec"] for b in batches[:5]] == [c.name.lower() for c in Codec]
    held = [one for one in found if one["kind"] == "record"]
    assert [one["offset"] for one in held] == list(range(33))
    assert (held[0]["key"], held[0]["value"], held[1]["key"]) == ("k0", "v", None)
    assert held[0]["headers"] == [{"key": "h", "value": "x"}]
    assert [one["sequence"] for one in held[-3:]] == [2**31 - 2, 2**31 - 1, 0]
    assert found[-1]["kind"] == "control" and found[-1]["coordinator_epoch"] == 9


def test_damage_is_where_it_is_and_fails(offline, segment):
    segment.write_bytes(segment.read_bytes()[:-7])
    ran = offline("log", "dump", segment, "--json", status=1)
    assert json.loads(ran.lines[-1])["kind"] == "damage"
    assert "1 place damaged" in ran.err
    assert "DAMAGED" in offline("log", "dump", segment, status=1).lines[-1]


def test_a_codec_that_does_not_exist_is_damage_and_what_follows_is_dumped(offline, tmp_path):
    """The CRC is right: some other program has written it."""
    batches = [bytearray(build_batch(records(1), base_offset=n)) for n in range(3)]
    batches[1][ATTRIBUTES_AT] = 5
    struct.pack_into(">I", batches[1], CRC_AT, crc32c(batches[1][CRC_START:]))
    path = tmp_path / f"{0:020d}.log"
    path.write_bytes(b"".join(batches))
    found = [json.loads(x) for x in offline("log", "dump", path, "--json", status=1).lines]
    assert [one["kind"] for one in found] == ["log", "batch", "record", "damage", "batch", "record"]
    damage = found[3]
    assert (damage["path"], damage["position"], damage["offset"]) == (str(path), len(batches[0]), 1)
    assert "compression type 5, which does not exist" in damage["why"]


def test_what_is_damaged_of_metadata_and_of_compaction_is_found(offline, kept_cluster):
    cluster = kept_cluster()
    topic = cluster.create_topic(config={"cleanup.policy": "compact"})
    with cluster.client() as client:
        from kept.client.client import OutRecord

        for n in range(3):
            client.produce(topic, [OutRecord(b"k", b"%d" % n)])
    offline("compact", "now", topic, "--wait", "--bootstrap", cluster.bootstrap)
    cluster.stop()
    data = Path(cluster.data_dir())
    whole = offline("log", "check", data)
    assert whole.lines == [f"{data}: nothing damaged"]
    partition = data / "log" / f"{topic}-0"
    (manifest,) = partition.glob("manifest-*[0-9]")
    (removals,) = partition.glob("removals-*[0-9]")
    for path, looked_at in (
        (data / "meta" / "metadata.wal", (data, data / "meta")),
        (data / "meta" / "hard-state", (data, data / "meta")),
        (partition / "manifest-applied", (data, data / "log", partition)),
        (manifest, (data, data / "log", partition)),
        (removals, (data, data / "log", partition)),
    ):
        before = path.read_bytes()
        damaged = bytearray(before)
        damaged[len(damaged) // 3] ^= 1
        path.write_bytes(damaged)
        for directory in looked_at:
            ran = offline("log", "check", directory, "--json", status=1)
            assert [one["path"] for one in ran.json if one["damaged"]] == [str(path)], directory
        path.write_bytes(before)
    manifest.unlink()
    assert "it is missing" in offline("log", "check", partition, status=1).out
    (partition / "manifest-applied").unlink()
    (partition / "held-manifest").write_bytes(b"")
    assert "given up" in offline("log", "check", partition).out, "a start said that, and goes on"
    wal = data / "meta" / "metadata.wal"
    whole_wal = wal.read_bytes()
    wal.unlink()
    for directory in (data, data / "meta"):
        ran = offline("log", "check", directory, "--json", status=1)
        assert str(wal) in [one["path"] for one in ran.json if one["damaged"]], directory
    wal.write_bytes(whole_wal[:100])  # entries are gone that this node had applied, and no other
    properties = read_properties(Disk(), str(data / "log" / "meta.properties"))
    node_id = int(properties["node.id"])
    for whose, damaged in ((node_id, [str(wal)]), (node_id + 1, [])):
        write_history(Disk(), str(data / "meta"), ReplicaHistory(whose, applied_index=1000))
        for directory in (data, data / "meta"):
            ran = offline("log", "check", directory, "--json", status=None)
            found = [one["path"] for one in ran.json if one["damaged"]]
            assert [one for one in found if Path(one).parent == wal.parent] == damaged, directory
    for file in (data / "meta").iterdir():
        file.unlink()
    assert (
        "metadata.wal is not there: no metadata were checked" in offline("log", "check", data).out
    )


def test_a_compacted_log_is_what_its_manifest_says(offline, kept_cluster):
    """Compaction leaves gaps: no other trace is left of a file that was cut between two batches."""
    cluster = kept_cluster()
    topic = cluster.create_topic(config={"cleanup.policy": "compact,delete"})
    with cluster.client() as client:
        from kept.client.client import OutRecord

        for n in range(12):
            client.produce(topic, [OutRecord(b"k%d" % (n % 6), b"%d" % n)])
        offline("compact", "now", topic, "--wait", "--bootstrap", cluster.bootstrap)
        client.produce(topic, [OutRecord(b"k0", b"newer")])
        (start,) = client.delete_records({TopicPartition(topic, 0): 7}).values()
        assert start == 7
    cluster.stop()
    partition = Path(cluster.log_dir()) / f"{topic}-0"
    assert offline("log", "check", partition).lines == [f"{partition}: nothing damaged"]
    path = partition / f"{0:020d}.log"
    whole = path.read_bytes()
    *_, (last, header) = headers(whole)
    assert header.last_offset == 11
    path.write_bytes(whole[:last])
    ran = offline("log", "check", partition, "--json", status=1)
    ((file, offset),) = [(one["path"], one["offset"]) for one in ran.json if one["damaged"]]
    assert (file, offset) == (str(path), 0)
    path.write_bytes(whole)
    path.with_suffix(".log.swap").write_bytes(whole)  # the next start says what is applied then
    path.write_bytes(whole[:last])
    assert not any(one["damaged"] for one in offline("log", "check", partition, "--json").json)


def test_the_directory_that_one_is_in_has_its_name(offline, tmp_path, monkeypatch):
    """By it the checkpoints beside it know the partition."""
    partition = tmp_path / "t-0"
    partition.mkdir()
    (partition / f"{0:020d}.log").write_bytes(build_batch(records(1)))
    (tmp_path / "recovery-point-offset-checkpoint").write_text("0\n1\nt 0 5\n")
    monkeypatch.chdir(partition)
    assert (
        f"{partition}: damaged (offset 1): ends at 1" in offline("log", "check", ".", status=1).out
    )


def test_files_of_metadata_and_of_compaction(offline, kept_cluster):
    cluster = kept_cluster()
    topic = cluster.create_topic(config={"cleanup.policy": "compact"})
    with cluster.client() as client:
        from kept.client.client import OutRecord

        for n in range(3):
            client.produce(topic, [OutRecord(b"k%d" % (m % 2), b"%d" % n) for m in range(10)])
    offline("compact", "now", topic, "--wait", "--bootstrap", cluster.bootstrap)
    cluster.stop()
    directory = Path(cluster.log_dir()) / f"{topic}-0"
    (manifest,) = directory.glob("manifest-*[0-9]")
    (removals,) = directory.glob("removals-*[0-9]")
    lines = offline("log", "dump", manifest, removals).lines
    assert any("survivors: 2 " in line for line in lines)
    assert lines[-1].endswith("superseded: 28")
    found = [json.loads(x) for x in offline("log", "dump", manifest, removals, "--json").lines]
    assert [one["kind"] for one in found] == [
        "manifest",
        "manifest segment",
        "swap",
        "removals",
        "removed",
    ]
    assert (found[0]["end_offset"], found[1]["survivors"]) == (30, 2)
    assert found[-1]["records"] == 28
    held = manifest.rename(directory / "held-manifest")
    assert any("survivors: 2 " in line for line in offline("log", "dump", held).lines)

    meta = Path(cluster.data_dir()) / "meta"
    for file in (meta / "metadata.wal", meta / "hard-state", meta / "log-directories"):
        assert len(offline("log", "dump", file).lines) > 1, file
    assert offline("log", "dump", directory / "manifest-applied").lines[-1].endswith("manifest 0.1")
    mark = directory.parent / ".kafka_cleanshutdown"
    assert "clean stop, brokerEpoch: " in offline("log", "dump", mark).out
    said = offline("log", "dump", meta / "metadata.wal", "--json").out
    assert f"name='{topic}'" in said
    assert json.loads(said.splitlines()[0])["kind"] == "metadata"


def test_a_file_of_somebody_else_is_refused(offline, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    said = offline("log", "dump", tmp_path / "notes.txt", status=1).err
    assert "not a file of a data directory; expected *.log" in said
    assert all(name in said for name in ("partition.metadata", "metadata.wal", "snapshot-*"))
    assert "no such file" in offline("log", "dump", tmp_path / "none.log", status=1).err


def test_each_of_several_files_and_directories_is_told(offline, segment, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    files = (tmp_path / "notes.txt", tmp_path / "none.log", tmp_path, segment)
    ran = offline("log", "dump", *files, status=1, errors=3)
    for line, said in zip(
        ran.err.splitlines(), ("not a file of", "no such file", "is a directory"), strict=True
    ):
        assert said in line
    assert f"Dumping {segment}" in ran.lines and "k0" in ran.out, "the last one is dumped"
    partition = segment.parent
    twice = offline("log", "check", tmp_path / "none", partition, "--json", status=1)
    assert "no such directory" in twice.err
    assert isinstance(twice.json, list)
    assert (
        f"{partition}: nothing damaged"
        in offline("log", "check", partition, tmp_path / "none", status=1).out
    )


@pytest.fixture
def transaction_state(tmp_path) -> Path:
    """Every kind of record that ``__transaction_state`` may hold, and what else may be there."""
    ongoing = frozenset({TopicPartition("t", 1), TopicPartition("t", 0), TopicPartition("u", 3)})
    held = [
        ("bank", TransactionMetadata(7, 0, 60_000, State.EMPTY, last_update_ms=5), 1),
        ("bank", TransactionMetadata(7, 0, 60_000, State.ONGOING, ongoing, 4, 5, 7), 1),
        (
            'b"ä\n',
            TransactionMetadata(
                7,
                32767,
                60_000,
                State.PREPARE_ABORT,
                frozenset({TopicPartition("t", 1)}),
                4,
                5,
                previous_producer_id=7,
                next_producer_id=9,
                last_epoch=4,
                client_version=2,
            ),
            1,
        ),
        ("bank", TransactionMetadata(7, 0, 60_000, State.COMPLETE_COMMIT, frozenset(), 4, 5), 0),
        ("bank", TransactionMetadata(7, 0, 60_000, State.EMPTY), 0),
        ("bank", None, 1),
    ]
    rows = [TransactionRecord(*fields).encode() for fields in held]
    unknown = struct.pack(">hh", 5, 1) + b"x"
    rows += [(unknown, b"yy"), (unknown, None)]
    path = tmp_path / "__transaction_state-3" / f"{0:020d}.log"
    path.parent.mkdir()
    path.write_bytes(
        b"".join(build_batch([(NOW, *row, ())], base_offset=n) for n, row in enumerate(rows))
    )
    return path


@pytest.mark.java
def test_transactions_are_printed_as_dump_log_segments_does(offline, transaction_state):
    theirs = kafka_dist.dump(
        [transaction_state], "--transaction-log-decoder", "--print-data-log"
    ).splitlines()
    ours = offline("log", "dump", transaction_state).lines
    assert [line.rstrip() for line in ours] == [line.rstrip() for line in theirs]


def test_transactions_are_told_with_their_names(offline, transaction_state):
    found = [json.loads(line) for line in offline("log", "dump", transaction_state, "--json").lines]
    held = [one for one in found if one["kind"] == "record"]
    third = held[2]["transaction"]
    assert held[2]["transactional_id"] == 'b"ä\n'
    assert (third["state"], third["lastEpoch"], third["nextProducerId"]) == ("PrepareAbort", 4, 9)
    assert held[5]["transaction"] is None and "transaction" not in held[6]
    lines = offline("log", "dump", transaction_state).lines
    assert any(line.endswith(" payload: <DELETE>") for line in lines)


def test_a_transaction_that_cannot_be_read_is_damage(offline, transaction_state):
    key = TransactionRecord("bank", None).encode()[0]
    transaction_state.write_bytes(build_batch([(NOW, key, b"\0\7", ())]))
    result = offline("log", "dump", transaction_state, status=1)
    assert any("a transaction of version 7" in line for line in result.lines)


@pytest.mark.java
def test_producers_and_aborted_transactions_are_printed_as_dump_log_segments_does(
    offline, tmp_path
):
    states = ProducerStates(1000)
    states.update(1, 0, 5, 2, 9, NOW, True)
    states.update(2, 0, 5, 2, 12, NOW, False)
    states.update_marker(3, 4, 13, NOW, 7, True)
    states.update(4, 0, 2**31 - 2, 4, 20, NOW, True)
    snapshot, index = tmp_path / f"{30:020d}.snapshot", tmp_path / f"{0:020d}.txnindex"
    snapshot.write_bytes(snapshots.encode(states))
    index.write_bytes(txn_index.encode([txn_index.AbortedTxn(1, 0, 10, 5)]))
    theirs = kafka_dist.dump([snapshot, index]).splitlines()
    ours = offline("log", "dump", snapshot, index).lines
    assert [line.rstrip() for line in ours] == [line.rstrip() for line in theirs]
