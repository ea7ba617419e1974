"""What Prometheus' own judge says of ``/metrics``; what scraping 10,000 partitions costs others."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import urllib.request

import pytest

from kept.client.client import OutRecord
from kept.client.consume.consumer import GroupConsumer
from kept.client.consume.positions import EARLIEST
from kept.node.metrics import exposition
from kept.node.metrics.lazy_metrics import LazyMetrics
from tests.tools import judges

SCRAPED = {
    "kept_log_cleaner_compactions_total",
    "kept_log_cleaner_cleaned_bytes_total",
    "kept_log_cleaner_dirty_ratio",
    "kept_log_cleaner_duration_seconds_bucket",
    "kept_bytes_in_total",
    "kept_records_in_total",
    "kept_bytes_out_total",
    "kept_records_out_total",
    "kept_request_seconds_bucket",
    "kept_connections",
    "kept_under_replicated_partitions",
    "kept_offline_partitions",
    "kept_isr_shrinks_total",
    "kept_isr_expands_total",
    "kept_raft_term",
    "kept_raft_leader",
    "kept_raft_commit_lag",
    "kept_manifest_generation",
    "kept_tombstones_pending",
    "kept_log_cleaner_uncleanable_partitions",
    "kept_fsync_seconds_bucket",
    "kept_open_fds",
    "kept_resident_memory_bytes",
    "kept_group_lag",
    "kept_build_info",
}
"""What operators build on."""


@pytest.mark.slow
@pytest.mark.promtool
def test_promtool_finds_nothing_to_say(kept_cluster):
    cluster = kept_cluster(kept_metrics_partitions="all")
    topic = cluster.create_topic(
        partitions=2, config={"cleanup.policy": "compact", "segment.bytes": "4096"}
    )
    with cluster.client() as client:
        for n in range(40):
            client.produce(topic, [OutRecord(b"k%d" % (n % 3), bytes(500), partition=0)])
        reader = GroupConsumer(client, 'a "group" \\ of\nits own', [topic], reset=EARLIEST)
        while not reader.poll():
            pass
        reader.close()
    command = [sys.executable, "-m", "kept", "compact", "now", topic, "--wait"]
    subprocess.run(
        [*command, "--bootstrap", cluster.bootstrap], check=True, capture_output=True, timeout=60
    )
    with urllib.request.urlopen(f"{cluster.url()}/metrics", timeout=60) as answer:
        text = answer.read()
    names = {line.split(b"{")[0].split(b" ")[0].decode() for line in text.splitlines()}
    assert names >= SCRAPED, SCRAPED - names
    judged = subprocess.run(
        [judges.promtool(), "check", "metrics"],
        input=text,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (judged.returncode, judged.stdout + judged.stderr) == (0, b"")


TOPICS, PARTITIONS = 100, 100
SLICE_MS = 2.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_scrape_of_10000_partitions_holds_the_loop_for_a_moment_only(lone_node, monkeypatch):
    """CPU time of this thread: what else the machine does is not the scrape's."""
    lone = lone_node(kept_metrics_partitions="all")
    node = lone.node
    metrics = LazyMetrics(node.parts.runtime, node.parts._new_metrics)
    slices = []

    class Watched(exposition.Pace):
        def __init__(self):
            super().__init__()
            self.began = time.thread_time()

        async def checkpoint(self):
            until, taken = self._until, time.thread_time() - self.began
            await super().checkpoint()
            if self._until != until:  # it paused
                slices.append(taken * 1000)
                self.began = time.thread_time()

    async def scrape():
        size = 0
        async for chunk in metrics.render():
            size += len(chunk)
        return size

    for number in range(TOPICS):
        lone.run(
            node.parts.topics.create(
                f"topic-{number}",
                num_partitions=PARTITIONS,
                replication_factor=1,
                configs={"cleanup.policy": "compact"},
            )
        )
    gc.collect()
    gc.freeze()
    try:
        lone.run(scrape())
        monkeypatch.setattr(exposition, "Pace", Watched)
        size = lone.run(scrape())
    finally:
        gc.unfreeze()
    slices.sort()
    print(f"{size} bytes, {len(slices)} slices, {sum(slices):.0f} ms, longest {slices[-3:]}")
    assert size > 1_000_000 and len(slices) > 200
    # What is printed is the measure; on a crowded machine a slice costs more CPU, too.
    assert slices[len(slices) // 2] < SLICE_MS
