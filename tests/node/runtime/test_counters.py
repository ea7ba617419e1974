"""Metrics: counters, and the text as Prometheus' own parser reads it."""

import asyncio
import sys
import threading
import time

import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kept.node.admin.compaction.compaction_status import (
    CompactionStatus,
    CompactionView,
    ReplicaGenerations,
)
from kept.node.metrics.lazy_metrics import LazyMetrics
from kept.node.runtime.histogram import Histogram
from kept.storage.records import build_batch, check
from kept.storage.types import TopicPartition


def scrape(lone):
    status, headers, body = lone.http("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def metrics_of(lone):
    """The metrics of a node, made anew."""
    parts = lone.node.parts
    return LazyMetrics(parts.runtime, parts._new_metrics)


def one(found, name, **labels):
    return found[(name, *sorted(labels.items()))]


def test_what_a_fresh_node_says(lone):
    found = scrape(lone)
    assert one(found, "kept_ready") == 1
    assert one(found, "kept_partitions") == 0
    assert one(found, "kept_bytes_in_total") == 0
    assert one(found, "kept_resident_memory_bytes") > 10_000_000
    assert 0 < one(found, "kept_open_fds") < one(found, "kept_max_fds")
    assert one(found, "kept_raft_leader") == 0
    room = {key[0]: value for key, value in found.items() if key[0].startswith("kept_log_direc")}
    assert 0 < room["kept_log_directory_free_bytes"] <= room["kept_log_directory_size_bytes"]
    assert any(key[0] == "kept_build_info" for key in found)
    names = {key[0] for key in found}
    assert {
        "kept_log_cleaner_compactions_total",
        "kept_log_cleaner_cleaned_bytes_total",
        "kept_log_cleaner_duration_seconds_bucket",
        "kept_under_replicated_partitions",
        "kept_offline_partitions",
        "kept_connections",
    } <= names


PROMISED = {
    "compactions": "kept_log_cleaner_compactions_total",
    "bytes cleaned": "kept_log_cleaner_cleaned_bytes_total",
    "dirty ratio by partition": "kept_log_cleaner_dirty_ratio",
    "time of a pass": "kept_log_cleaner_duration_seconds",
    "bytes in": "kept_bytes_in_total",
    "records in": "kept_records_in_total",
    "bytes out": "kept_bytes_out_total",
    "records out": "kept_records_out_total",
    "latency by API": "kept_request_seconds",
    "connections": "kept_connections",
    "under-replicated": "kept_under_replicated_partitions",
    "offline": "kept_offline_partitions",
    "ISR shrinks": "kept_isr_shrinks_total",
    "ISR expands": "kept_isr_expands_total",
    "Raft term": "kept_raft_term",
    "Raft leader": "kept_raft_leader",
    "Raft commit lag": "kept_raft_commit_lag",
    "manifest generation": "kept_manifest_generation",
    "its lag per replica": "kept_manifest_replica_lag",
    "tombstones pending": "kept_tombstones_pending",
    "uncleanable, with reason": "kept_log_cleaner_uncleanable",
    "fsync time": "kept_fsync_seconds",
    "file descriptors": "kept_open_fds",
    "resident memory": "kept_resident_memory_bytes",
    "lag of a group": "kept_group_lag",
    "transactions by state": "kept_transactions",
    "transactions begun": "kept_transactions_started_total",
    "transactions committed": "kept_transactions_committed_total",
    "transactions aborted": "kept_transactions_aborted_total",
    "transactions timed out": "kept_transactions_timed_out_total",
    "markers to be written": "kept_transaction_markers_pending",
    "markers without a leader": "kept_transaction_markers_without_leader",
    "hanging transactions": "kept_late_transactions",
    "appends of transactions tried again": "kept_transaction_append_retries_total",
    "time of verification": "kept_transaction_verification_seconds",
    "time of ends of transactions": "kept_transaction_end_seconds",
    "time of loading transactions": "kept_transaction_load_seconds",
    "producer ids": "kept_producer_ids",
    "failed verification": "kept_transaction_verification_failures_total",
    "build": "kept_build_info",
}
"""What an operator is promised, and the family that keeps it."""


def test_everything_promised_is_there_with_help_and_a_unit(lone):
    _, _, body = lone.http("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    lines = body.decode().splitlines()
    helps = dict(line.split(" ", 3)[2:] for line in lines if line.startswith("# HELP "))
    kinds = dict(line.split(" ", 3)[2:] for line in lines if line.startswith("# TYPE "))
    missing = {what for what, name in PROMISED.items() if name not in helps}
    assert not missing
    assert helps.keys() == kinds.keys()
    for name, text in helps.items():
        assert name.startswith("kept_") and len(text) > 10 and text[-1] in ".", (name, text)
        assert name.endswith("_total") == (kinds[name] == "counter"), name
        if kinds[name] == "histogram":
            assert name.endswith("_seconds"), name


def test_counters(lone):
    metrics = lone.node.parts.counters
    metrics.produced(2, 7, 900)
    metrics.fetched(300)
    metrics.fetched(70, to_replica=True)
    metrics.refused()
    metrics.request(0, 0.0002)
    metrics.request(0, 0.3)
    metrics.fsync(0.004)
    found = scrape(lone)
    assert one(found, "kept_bytes_in_total") == 900
    assert one(found, "kept_records_in_total") == 7
    assert one(found, "kept_batches_in_total") == 2
    assert one(found, "kept_batches_refused_total") == 1
    assert one(found, "kept_bytes_out_total") == 300
    assert one(found, "kept_replication_bytes_out_total") == 70
    assert one(found, "kept_request_seconds_count", api="produce") == 2
    assert one(found, "kept_request_seconds_bucket", api="produce", le="0.0001") == 0
    assert one(found, "kept_request_seconds_bucket", api="produce", le="0.00025") == 1
    assert one(found, "kept_request_seconds_bucket", api="produce", le="+Inf") == 2
    assert one(found, "kept_request_seconds_sum", api="produce") == pytest.approx(0.3002)
    assert one(found, "kept_fsync_seconds_count") >= 1


def test_a_histogram_counts_each_once():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert (histogram.count, histogram.total) == (5, 104.0)


def status(state="waiting", ratio=0.0, reason=""):
    words = f"{state}: {reason}"
    return CompactionStatus(state, reason, words, 0, 0, "", 0, 0, ratio, 0.5, None, None)


def partitions(found, name):
    return {(dict(key[1:])["topic"], dict(key[1:])["partition"]) for key in found if key[0] == name}


def test_series_only_for_partitions_that_need_attention(lone, monkeypatch):
    lone.create("fine", cleanup_policy="compact")
    lone.create("dirty", cleanup_policy="compact")
    lone.create("broken", cleanup_policy="compact")
    lone.create("plain")
    states = {
        "fine": status(ratio=0.4),
        "dirty": status("due", 0.75),
        "broken": status("uncleanable", 0.1, 'a "quoted"\nreason\\'),
    }
    monkeypatch.setattr(CompactionView, "status_of", lambda self, tp: states.get(tp.topic))
    found = scrape(lone)
    assert partitions(found, "kept_log_cleaner_dirty_ratio") == {("dirty", "0"), ("broken", "0")}
    assert one(found, "kept_log_cleaner_dirty_ratio", topic="dirty", partition="0") == 0.75
    assert (
        one(
            found,
            "kept_log_cleaner_uncleanable",
            topic="broken",
            partition="0",
            reason='a "quoted"\nreason\\',
        )
        == 1
    )
    assert one(found, "kept_log_cleaner_uncleanable_partitions") == 1
    assert one(found, "kept_log_cleaner_dirty_partitions") == 2
    assert one(found, "kept_partitions") == 4
    assert one(found, "kept_internal_partitions") == 0
    lone.create("__consumer_offsets", 2)
    found = scrape(lone)
    assert one(found, "kept_partitions") == 6
    assert one(found, "kept_internal_partitions") == 2


def test_replicas_that_lag_behind_the_published_generation(lone, monkeypatch):
    lone.create("t", cleanup_policy="compact")
    replicas = (
        ReplicaGenerations(1, "2.7", "2.4", True),
        ReplicaGenerations(2, "2.7", "2.7", False),
        ReplicaGenerations(3, None, "1.9", True),
        ReplicaGenerations(4, None, None, True),
    )
    known = replace(status(), published="2.7", replicas=replicas)
    monkeypatch.setattr(CompactionView, "status_of", lambda self, tp: known)
    found = scrape(lone)
    lags = {
        replica: one(
            found, "kept_manifest_replica_lag", topic="t", partition="0", replica=str(replica)
        )
        for replica in (1, 3, 4)
    }
    assert lags == {1: 3, 3: 7, 4: 7}
    assert ("replica", "2") not in {label for key in found for label in key[1:]}


def test_every_partition_when_asked(lone_node):
    lone = lone_node(kept_metrics_partitions="all")
    lone.create("fine", 2, cleanup_policy="compact")
    lone.create("plain")
    found = scrape(lone)
    assert partitions(found, "kept_log_cleaner_dirty_ratio") == {("fine", "0"), ("fine", "1")}
    assert len(partitions(found, "kept_partition_size_bytes")) == 3


def test_an_offline_partition(lone):
    lone.create("t")
    gone = lone.node.parts.table.partitions.pop(TopicPartition("t", 0))
    found = scrape(lone)
    assert one(found, "kept_offline_partitions") == 1
    assert partitions(found, "kept_partition_offline") == {("t", "0")}
    lone.node.parts.table.partitions[TopicPartition("t", 0)] = gone


def test_group_lag(lone, monkeypatch):
    lone.create("t", 2, message_timestamp_before_max_ms=str(2**62))
    hosted = lone.node.parts.table.replicas[TopicPartition("t", 0)]
    hosted.partition.append(check(build_batch([(1, b"k", b"v", ())] * 5), hosted.rules, 1), 1)
    hosted.partition.write()

    committed = [("g", "t", 0, 2), ("g", "t", 1, 0), ("g", "gone", 0, 1), ("ahead", "t", 0, 9)]
    monkeypatch.setattr(lone.node.parts.groups, "committed", lambda: iter(committed))
    found = scrape(lone)
    assert one(found, "kept_group_lag", group="g", topic="t") == 3
    assert one(found, "kept_group_lag", group="ahead", topic="t") == 0
    assert not any(("topic", "gone") in key for key in found)


def test_a_pass_is_counted(lone_node):
    lone = lone_node(log_cleaner_backoff_ms="3600000", kept_metrics_partitions="all")
    lone.create("t", cleanup_policy="compact", message_timestamp_before_max_ms=str(2**62))
    hosted = lone.node.parts.table.replicas[TopicPartition("t", 0)]
    for _ in range(3):
        hosted.partition.append(check(build_batch([(1, b"k", b"v" * 99, ())]), hosted.rules, 1), 1)
    hosted.partition.write()
    _, answer = lone.post("/api/v1/compaction/now", topic="t", wait=True)
    assert answer["partitions"][0]["done"] is True
    found = scrape(lone)
    assert one(found, "kept_log_cleaner_compactions_total") == 1
    assert one(found, "kept_log_cleaner_cleaned_bytes_total") > 200
    assert one(found, "kept_log_cleaner_removed_records_total") == 2
    assert one(found, "kept_log_cleaner_duration_seconds_count") == 1
    assert one(found, "kept_manifest_generation", topic="t", partition="0") == 1


def test_a_registry_can_have_it(lone):
    found = lone.run(metrics_of(lone).started())
    assert b"kept_connections" in generate_latest(found.registry)


def test_the_text_is_what_prometheus_client_writes(lone_node):
    """Rendered in slices, and the registry at once."""
    lone = lone_node(kept_metrics_partitions="all")
    lone.create("t", 120, cleanup_policy="compact")
    metrics = lone.run(metrics_of(lone).started())

    async def sliced():
        return b"".join([chunk async for chunk in metrics.render()])

    def stable(text):
        return [line for line in text.splitlines() if b"bytes" not in line and b"fds" not in line]

    found = stable(lone.run(sliced()))
    assert found == stable(generate_latest(metrics.registry))
    assert sum(b"kept_partition_isr{" in line for line in found) == 120


def test_rendering_lets_others_run(lone):
    """While 500 partitions are rendered, others run at least every 20 ms of CPU (aim: 2 ms)."""
    lone.create("many", 500, cleanup_policy="compact")
    lone.run(lone.node.warmed_up())
    gaps, metrics = [], metrics_of(lone)

    async def both():
        async def watch():
            last = time.thread_time()
            while True:
                await asyncio.sleep(0)
                now = time.thread_time()
                gaps.append(now - last)
                last = now

        watcher = asyncio.ensure_future(watch())
        async for _ in metrics.render():
            pass
        gaps.clear()
        text = b"".join([chunk async for chunk in metrics.render()])
        watcher.cancel()
        return text

    text = lone.run(both())
    assert b"kept_partitions 500" in text
    assert sorted(gaps)[-2] < 0.02
    assert len(gaps) > 10


def test_nothing_heavy_is_imported_for_counting():
    import subprocess

    modules = "kept.node.http.routes, kept.node.metrics.definitions"
    code = f"import sys, {modules}; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_library_is_imported_in_a_thread(lone, monkeypatch):
    metrics = lone.node.parts.metrics
    places, make = [], metrics._make

    def watched():
        places.append(threading.current_thread().name)
        return make()

    monkeypatch.setattr(metrics, "_make", watched)
    for _ in range(2):
        scrape(lone)
    (place,) = places
    assert place.startswith("call")
