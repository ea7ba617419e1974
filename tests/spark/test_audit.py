"""The audit finds what was planted on the disks of real nodes, and says what it cannot see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kept.cli.shell import run
from kept.client.blocking import OutRecord
from kept.pipeline import jobs
from kept.testing import Cluster
from tests.spark.planting import all_batches, altered, edit
from tests.spark.topics import COMPACTED, eventually

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1800)]

WRONG = 2  # the node that has faults of its own
HISTORY = [
    ("a", b"1"), ("b", b"1"), ("a", b"2"), ("c", b"1"), ("d", b"1"), ("d", None), ("e", b"1"),
]  # fmt: skip
OF_ONE = {
    ("missing", 0, 3, WRONG), ("superseded", 1, 0, WRONG), ("resurrected", 2, 4, WRONG),
    ("divergent", 3, 1, -1),
}  # fmt: skip
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
    eventually(lambda: all(
        not left & all_batches(cluster, n, topic, p).keys() for n in range(3) for p in range(4)
    ))  # fmt: skip
    clean = jobs.audit(spark, where, topic)
    assert clean.clean and clean.replicas == [0, 1, 2] and clean.looks == 1
    assert any("every replica lost" in one for one in clean.blind)
    reference = str(tmp_path / "reference")
    jobs.export(spark, where, topic, reference)

    for node in range(3):
        cluster.stop(node)
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
