"""Data directories of earlier versions open in this one, with everything that was in them.

``make_data.py`` beside this file says what they are and wrote them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import uuid
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kept.client.admin.transactions import list_transactions
from kept.client.client import SILENT_MS, IdempotentProducer, OutRecord
from kept.client.transactional_producer import TransactionalProducer
from kept.storage import layout
from kept.storage.errors import OutOfOrderSequenceNumber
from kept.storage.inspect.check import check_directory
from kept.storage.producers import snapshots
from kept.storage.producers.producer_states import ProducerBatch, ProducerState, ProducerStates
from kept.storage.records import build_batch, records
from kept.storage.segments import offset_index, time_index, txn_index
from kept.storage.segments.swap import SwapGroup, SwapPlan
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import IsolationLevel, TopicPartition
from kept.testing import Cluster

GOLDEN = Path(__file__).resolve().parent
CASES = [
    pytest.param(version / kind, id=f"{version.name}-{kind}", marks=marks)
    for version in sorted((GOLDEN / "data").iterdir())
    for kind, marks in (("clean", pytest.mark.slow), ("unclean", ()))
]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_make_data", GOLDEN / "make_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_data = load()


@pytest.fixture(params=CASES)
def golden(request, tmp_path):
    """(what is expected, a directory for a cluster whose node 0 has a copy of the data)."""
    source = request.param
    expected = json.loads((source.parent / "expected.json").read_text())[source.name]
    shutil.copytree(source, tmp_path / "node-0" / "data")
    return expected, tmp_path


@pytest.fixture
def start(golden, kept_cluster):
    """Start a node on the copy."""

    def run(**settings: Any) -> Cluster:
        return kept_cluster(directory=golden[1], **{**make_data.SETTINGS, **settings})

    return run


def without_offsets(partitions):
    """Where groups' offsets are, later versions may write what they like."""
    return {name: p for name, p in partitions.items() if not name.startswith("__")}


def in_partition(cluster, name):
    """A partition as the HTTP API and a client show it."""
    return make_data.describe(cluster)["partitions"][name]


def test_everything_is_there(golden, start):
    """Also what is missing, with a reason, and no file is damaged."""
    expected, directory = golden
    logs = str(directory / "node-0" / "data" / "log")
    assert [str(one) for one in check_directory(logs) if one.damaged] == []
    cluster = start(log_cleaner_enable=False)
    found = make_data.describe(cluster)
    for part in ("cluster_id", "cluster_config", "topics", "groups"):
        assert found[part] == expected[part], part
    assert without_offsets(found["partitions"]) == without_offsets(expected["partitions"])
    for name, partition in expected["partitions"].items():
        assert found["partitions"][name]["records"] == partition["records"], name
    users = expected["partitions"]["users-0"]
    there = {record[0] for record in users["records"]}
    for offset in range(users["first_dirty_offset"]):
        answer = make_data.api(cluster).get(
            "compaction/why-missing", topic="users", partition=0, offset=offset
        )
        assert answer["fate"] == ("present" if offset in there else "removed"), answer
    assert cluster.stop() == 0
    assert [str(one) for one in check_directory(logs)] == []
    cluster.start()
    again = make_data.describe(cluster)
    assert without_offsets(again["partitions"]) == without_offsets(expected["partitions"])
    assert again["groups"] == expected["groups"]


def test_producers_are_remembered(golden, start):
    expected = golden[0]
    producer_id, epoch, following = expected["producer"]
    end = expected["partitions"]["producers-0"]["high_watermark"]
    cluster = start(log_cleaner_enable=False)
    rows = [
        OutRecord(b"p", b"again", timestamp=make_data.FUTURE_MS),
        OutRecord(b"q", b"again", timestamp=make_data.FUTURE_MS),
    ]
    tp = TopicPartition("producers", 0)

    def producer(sequence: int) -> IdempotentProducer:
        return IdempotentProducer(producer_id, epoch, {tp: sequence})

    with cluster.client() as client:
        for back in (2, 10):
            (same,) = client.produce("producers", rows, producer=producer(following - back))
            assert same.base_offset == end - back, "a duplicate is answered with its offset"
        assert client.bounds("producers")[0][1] == end
        with pytest.raises(OutOfOrderSequenceNumber):
            client.produce("producers", rows, producer=producer(following + 2))
        (done,) = client.produce("producers", rows, producer=producer(following))
        assert done.base_offset == end
        assert client.init_producer().id > producer_id, "ids are never given twice"


@pytest.mark.parametrize(
    "source", sorted(GOLDEN.glob("data/*/transactions")), ids=lambda source: source.parent.name
)
def test_transactions_come_to_their_ends(source, tmp_path, kept_cluster):
    """Also the one that was decided before the kill, and the one that nobody ended."""
    expected = json.loads((source.parent / "expected.json").read_text())["transactions"]
    shutil.copytree(source, tmp_path / "node-0" / "data")
    quick = {"transaction_abort_timed_out_transaction_cleanup_interval_ms": 50}
    cluster = kept_cluster(directory=tmp_path, **make_data.SETTINGS, **quick)

    def states() -> dict[str, str]:
        listed = client.run(list_transactions([], SILENT_MS))
        return {one.transactional_id: one.state for one in listed}

    with cluster.client() as client:
        cluster.wait_until(lambda: states() == expected["states"], "all have ended")
        for name, values in expected["records"].items():
            topic, _, number = name.rpartition("-")
            found = client.read(topic, [int(number)], isolation=IsolationLevel.READ_COMMITTED)
            assert [record.value.decode() for record in found] == values
        for name, (producer_id, epoch) in expected["producers"].items():
            with TransactionalProducer(client, name) as producer:
                assert (producer.producer_id, producer.epoch > epoch) == (producer_id, True)
                producer.produce("transfers", [OutRecord(None, b"next", partition=0)])
    logs = str(tmp_path / "node-0" / "data" / "log")
    assert cluster.stop() == 0
    assert [str(one) for one in check_directory(logs)] == []


def test_it_is_compacted_further(golden, start):
    expected = golden[0]["partitions"]
    cluster = start()
    ends = {}
    with cluster.client() as client:
        for topic, key in (("users", b"user1"), ("expiring", b"user1"), ("swapping", b"user1")):
            row = OutRecord(key, b"newest", timestamp=make_data.START_MS, partition=0)
            filler = OutRecord(b"filler", b"f" * 1850, timestamp=make_data.START_MS, partition=0)
            client.produce(topic, [row])
            client.produce(topic, [filler])
            ends[topic] = client.produce(topic, [filler])[0].base_offset + 1
    for topic, end in ends.items():
        before = expected[f"{topic}-0"]
        make_data.compact(cluster, topic, 0)
        found = in_partition(cluster, f"{topic}-0")
        assert found["high_watermark"] == end
        generation = int((before["generation"] or "0.0").rpartition(".")[2])
        assert int(found["generation"].rpartition(".")[2]) == generation + 1
        by_key = {str(record[2]): record for record in found["records"]}
        assert by_key["user1"][3] == "newest"
        assert [r[3] for r in found["records"] if r[2] == "user1"] == ["newest"]
        old = {str(r[2]): r for r in before["records"] if r[2] not in ("user1", "filler")}
        clean = before["first_dirty_offset"] if topic == "expiring" else 0
        gone = {key for key, r in old.items() if r[3] is None and r[0] < clean}
        assert bool(gone) == (topic == "expiring")
        assert {k: r for k, r in by_key.items() if k in old} == {
            k: r for k, r in old.items() if k not in gone
        }
    kept_before = {name: in_partition(cluster, name) for name in ("users-0", "swapping-0")}
    cluster.kill()
    cluster.start()
    for name, partition in kept_before.items():
        assert in_partition(cluster, name)["records"] == partition["records"]


def test_deletions_that_a_stop_interrupted_are_finished(golden, start):
    """More of them than the data has, so that they are being removed while the logs open."""
    log_dir = golden[1] / "node-0" / "data" / "log"
    (source,) = (GOLDEN / "data").glob("0.1.0/clean/log/gone-0.*-delete")
    for number in range(300):
        shutil.copytree(source, log_dir / f"gone-0.{number:032x}-delete")
    cluster = start(log_cleaner_enable=False)
    cluster.wait_until(lambda: not list(log_dir.glob("*-delete")), "deletions are finished")
    assert "gone" not in make_data.describe(cluster)["topics"]


def test_every_name_still_has_a_log_that_dumps(golden):
    from kept.storage.inspect.dump import entries

    files = sorted((golden[1] / "node-0" / "data" / "log").glob("*-*/0*"))
    assert len(files) > 50
    for file in files:
        if file.suffix in (".log", ".index", ".timeindex", ".snapshot"):
            assert not [e for e in entries(str(file)) if e.kind == "damage"], file


def test_a_tail_torn_by_a_power_cut_is_cut_off(golden, start):
    expected = golden[0]["partitions"]["codecs-0"]
    directory = golden[1] / "node-0" / "data" / "log"
    (directory / ".kafka_cleanshutdown").unlink(missing_ok=True)
    log = max((directory / "codecs-0").glob("*.log"))
    whole = log.read_bytes()
    log.write_bytes(whole + whole[: len(whole) // 5])
    (directory / "recovery-point-offset-checkpoint").unlink(missing_ok=True)
    cluster = start(log_cleaner_enable=False)
    assert in_partition(cluster, "codecs-0") == expected
    assert log.read_bytes() == whole


# The worked examples of docs/formats.

FORMATS = GOLDEN.parent.parent / "docs" / "formats"
NOW = make_data.START_MS
LINE = re.compile(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} {1,2}){1,16})", re.MULTILINE)


def example(page, name):
    """The bytes of the hex dump that follows "Example `name`" on a page."""
    text = (FORMATS / page).read_text().partition(f"xample `{name}`")[2].split("```")[1]
    padded = "\n".join(line + "  " for line in text.splitlines())
    return bytes.fromhex("".join(LINE.findall(padded)))


def manifest_example():
    from pyroaring import BitMap

    from kept.compaction.manifest.manifest import Manifest, OutputSegment
    from kept.storage.types import Generation

    horizon = NOW + 86_400_000
    digest = bytes(range(16))
    segment = OutputSegment(
        0, 40, BitMap([5, 7, 9]), BitMap(), {horizon: BitMap([7])}, (), digest, 400
    )
    topic_id = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
    found = Manifest(topic_id, 0, Generation(2, 1), 0, 40, 40, NOW, horizon, (segment,))
    return found, SwapPlan((SwapGroup((0,), (0, 20)),))


def test_the_example_of_a_manifest():
    from kept.compaction.manifest import manifest

    data = example("manifest.md", "manifest")
    assert manifest.encode(*manifest_example()) == data
    assert manifest.decode("example", data) == manifest_example()


def test_the_example_of_the_mark(tmp_path):
    from kept.compaction.manifest.apply import MARK, read_mark, write_mark
    from kept.storage.disk import Disk
    from kept.storage.types import Generation

    write_mark(str(tmp_path), Disk({}), Generation(2, 1))
    assert (tmp_path / MARK).read_bytes() == example("manifest.md", "mark")
    assert read_mark(str(tmp_path), Disk({})) == Generation(2, 1)


def test_the_example_of_the_journal():
    from pyroaring import BitMap

    from kept.compaction.cleaner import removal_log
    from kept.storage.types import Generation

    removed = {removal_log.Reason.SUPERSEDED: [(0, BitMap(range(5)))]}
    record = removal_log.Removals(Generation(2, 1), NOW, removed)
    data = example("manifest.md", "removals")
    assert removal_log.encode(record) == data
    assert removal_log.decode("example", data) == record


def test_the_examples_of_a_segment():
    rows = [(NOW, b"k", b"v", (("h", b"1"),)), (NOW + 1, b"k", None, ())]
    batch = example("segment.md", "batch")
    assert build_batch(rows, base_offset=5, leader_epoch=2) == batch
    assert [tuple(r) for r in records(batch)] == [(5, *rows[0]), (6, *rows[1])]
    index = offset_index.encode_entries(array("i", [9, 14]), array("i", [4200, 8400]))
    assert index == example("segment.md", "index")
    times = time_index.encode_entries(array("q", [NOW]), array("i", [9]))
    assert times == example("segment.md", "timeindex")
    aborted = txn_index.encode([AbortedTxn(7, 100, 104, 105)])
    assert aborted == example("segment.md", "txnindex")
    states, state = ProducerStates(1), ProducerState(1, NOW)
    state.batches.append(ProducerBatch(4, 104, 4, NOW))
    states.restore([(7, state)])
    assert snapshots.encode(states) == example("segment.md", "snapshot")


def test_the_id_on_the_page_of_checkpoints():
    (text,) = re.findall(r"topic_id: (\S{22})", (FORMATS / "checkpoints.md").read_text())
    assert layout.decode_uuid(text) == manifest_example()[0].topic_id
