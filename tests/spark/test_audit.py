"""The audit finds what was planted on the disks of real nodes, and says what it cannot see."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kept.cli.run import run
from kept.client.client import OutRecord
from kept.pipeline import jobs
from kept.pipeline.jobs import audits, exports
from kept.testing import Cluster
from tests.spark.planting import all_batches, altered, edit, forget_manifests
from tests.spark.topics import COMPACTED, compact, eventually

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1800)]

WRONG = 2  # the node that has faults of its own
HISTORY = [
    ("a", b"1"),
    ("b", b"1"),
    ("a", b"2"),
    ("c", b"1"),
    ("d", b"1"),
    ("d", None),
    ("e", b"1"),
]
OF_ONE = {
    ("missing", 0, 3, WRONG),
    ("superseded", 1, 0, WRONG),
    ("resurrected", 2, 4, WRONG),
    ("divergent", 3, 1, -1),
}
OF_ALL = {("missing", 0, 6, n) for n in range(3)} | {("resurrected", 3, 4, n) for n in range(3)}


def written(cluster: Cluster) -> str:
    """Four partitions, all with the same history and then some that closes the segment."""
    topic = cluster.create_topic(
        partitions=4, replication_factor=3, config={**COMPACTED, "segment.bytes": "1500"}
    )
    with cluster.client() as client:
        for key, value in [*HISTORY, *((f"f{n}", b"x" * 400) for n in range(8))]:
            records = [OutRecord(key.encode(), value, (), None, p) for p in range(4)]
            client.produce(topic, records)
    return topic


def await_all_in_sync(cluster: Cluster, topic: str) -> None:
    def there() -> bool:
        with cluster.client() as client:
            found = client.metadata([topic]).topics[topic].partitions.values()
            return [len(p.isr) for p in found if p.leader >= 0] == [3] * 4

    eventually(there)


def found(audit: jobs.Audit) -> set[tuple[str, int, int, int]]:
    assert audit.total == len(audit.findings)
    return {(f.kind, f.partition, f.offset, f.replica) for f in audit.findings}


def test_planted_faults_are_found_by_kind_and_offset(
    spark: Any, kept_cluster: Any, tmp_path: Path
) -> None:
    cluster = kept_cluster(3, log_cleaner_enable="false")
    topic, where = written(cluster), cluster.bootstrap
    before = [all_batches(cluster, 0, topic, p) for p in range(4)]
    assert run(["compact", "now", topic, "--wait", "--bootstrap", where]) == 0
    left = {0: before[0][0], 4: before[0][4]}.keys()
    eventually(
        lambda: all(
            not left & all_batches(cluster, n, topic, p).keys() for n in range(3) for p in range(4)
        )
    )
    clean = jobs.audit(spark, where, topic)
    assert clean.clean and clean.replicas == [0, 1, 2] and clean.looks == 1
    assert any("every replica lost" in one for one in clean.blind)
    reference = str(tmp_path / "reference")
    jobs.export(spark, where, topic, reference)

    for node in range(3):
        cluster.stop(node)
    for partition in range(4):
        forget_manifests(cluster, topic, partition)
    for node in range(3):
        edit(cluster, node, topic, 0, cut=(6,))
        edit(cluster, node, topic, 3, cut=(5,), put={4: before[3][4]})
    edit(cluster, WRONG, topic, 0, cut=(3,))
    edit(cluster, WRONG, topic, 1, put={0: before[1][0]})
    edit(cluster, WRONG, topic, 2, cut=(5,), put={4: before[2][4]})
    other = altered(before[3][1], lambda records: records.replace(b"b\x021", b"b\x022"))
    assert other != before[3][1]
    edit(cluster, WRONG, topic, 3, put={1: other})
    for node in range(3):
        cluster.start(node, wait=False)
    cluster.await_ready()
    await_all_in_sync(cluster, topic)

    assert found(jobs.audit(spark, where, topic, patience_s=0)) == OF_ONE
    more = jobs.audit(spark, where, topic, reference=reference, patience_s=0)
    assert found(more) == OF_ONE | OF_ALL
    assert not any("every replica lost" in one for one in more.blind)


def test_a_key_of_the_reference_that_is_written_all_the_time_is_not_missing(
    spark: Any, kept_broker: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each look it is on no replica below the end that was noted: it was compacted away."""
    topic, reference = kept_broker.create_topic(config=COMPACTED), str(tmp_path / "reference")
    bounds_of, looks = audits.bounds_of, []

    def write() -> None:
        with kept_broker.client() as client:
            client.produce(topic, [OutRecord(b"hot", b"x" * 1900)])

    def noted(client: Any, name: str) -> Any:
        bounds = bounds_of(client, name)
        if len(looks) % 2 == 0:
            for _ in range(2):
                write()
            compact(kept_broker, topic)
        looks.append(bounds)
        return bounds

    write()
    jobs.export(spark, kept_broker.bootstrap, topic, reference)
    monkeypatch.setattr(audits, "bounds_of", noted)
    audit = jobs.audit(spark, kept_broker.bootstrap, topic, reference=reference, patience_s=0)
    assert audit.clean and audit.records == 1 and len(looks) == 2
    assert audits.TOO_OLD not in audit.blind


def test_a_key_of_the_reference_may_have_been_deleted_and_its_tombstone_be_gone(
    spark: Any, kept_broker: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kept_broker.create_topic(config={**COMPACTED, "delete.retention.ms": "0"})
    reference, bounds_of, asked = str(tmp_path / "reference"), exports.bounds_of, []

    def bounds(*arguments: Any) -> Any:
        asked.append(time.time_ns() // 1_000_000)
        return bounds_of(*arguments)

    def write(key: bytes, value: bytes | None) -> None:
        with kept_broker.client() as client:
            client.produce(topic, [OutRecord(key, value)])

    def left() -> set[bytes]:
        write(b"other", b"x" * 1900)  # closes the segment
        compact(kept_broker, topic)
        with kept_broker.client() as client:
            return {record.key for record in client.read(topic)}

    write(b"deleted", b"1")
    monkeypatch.setattr(exports, "bounds_of", bounds)
    made = jobs.export(spark, kept_broker.bootstrap, topic, reference)
    assert made.taken_ms <= asked[0], "what is deleted while it reads counts as deleted since"
    write(b"deleted", None)
    eventually(lambda: left() == {b"other"})
    audit = jobs.audit(spark, kept_broker.bootstrap, topic, reference=reference, patience_s=0)
    assert audit.clean and audits.TOO_OLD in audit.blind
    note = tmp_path / "reference" / "_kept.json"
    said = json.loads(note.read_text())
    said["config"]["delete.retention.ms"] = "86400000"
    note.write_text(json.dumps(said))
    with kept_broker.client() as client:
        client.alter_topic(topic, {"delete.retention.ms": "86400000"})
    audit = jobs.audit(spark, kept_broker.bootstrap, topic, reference=reference, patience_s=0)
    assert found(audit) == {("missing", 0, 0, 0)}, "so soon a tombstone cannot be gone"
    assert audits.TOO_OLD not in audit.blind


def test_only_what_stays_is_reported_however_much_there_is(
    spark: Any, kept_broker: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [("missing", (1, 2, 3)), ("missing", (2, 3, 4)), ("missing", (2, 3, 5))]

    def find(*_: Any, **__: Any) -> Any:
        kind, offsets = looks.pop(0)
        rows = [(kind, "t", 0, offset, None, 1, "why") for offset in offsets]
        named = "topic string, partition int, offset bigint, key binary, replica int, detail string"
        return spark.createDataFrame(rows, f"kind string, {named}")

    monkeypatch.setattr(audits, "find", find)
    monkeypatch.setattr(audits, "MOST", 1)
    audit = jobs.audit(spark, kept_broker.bootstrap, kept_broker.create_topic(), patience_s=300)
    assert (audit.total, audit.looks) == (2, 3)
    assert [one.offset for one in audit.findings] == [2]


def test_what_looks_superseded_is_looked_for_as_long_as_there_is_patience(
    spark: Any, kept_broker: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [1, 1, 1, 0]

    def find(*_: Any, **__: Any) -> Any:
        row = "'superseded' kind, 't' topic, 0 partition, 5L offset, cast(null as binary) key"
        found = spark.range(left.pop(0))
        return found.selectExpr(*row.split(", "), "2 replica", "'why' detail")

    monkeypatch.setattr(audits, "find", find)
    audit = jobs.audit(spark, kept_broker.bootstrap, kept_broker.create_topic(), patience_s=300)
    assert audit.clean and audit.looks == 4


def test_a_look_is_made_again_when_the_topic_moved_under_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyspark.errors import PySparkException

    monkeypatch.setattr(audits, "PAUSE_S", 0)
    said = [
        "kept.client.consume.range_reader.OffsetsLost: t:0: offsets 0 to 4 are lost: "
        "the log starts at 5 now",
        "kept.pipeline.options.BadOption: replica: t:0 is not in sync on node 2",
    ]

    def look() -> str:
        if said:
            raise PySparkException(message=said.pop(0))
        return "seen"

    assert audits._steady(look, time.monotonic() + 60) == "seen"
    said = ["kept.client.consume.range_reader.OffsetsLost: t:0"]
    with pytest.raises(PySparkException, match="OffsetsLost"):
        audits._steady(look, time.monotonic())
    said = ["ZeroDivisionError: a strategy's own"]
    with pytest.raises(PySparkException, match="own"):
        audits._steady(look, time.monotonic() + 60)
