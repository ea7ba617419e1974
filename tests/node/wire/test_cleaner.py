"""The cleaner in a real node: workers, results, failures, and kill -9 at every step of a swap."""

from __future__ import annotations

import pytest

from kept.storage.records import records
from tests.support.wire_cleaner import CONFIG, fill

STEPS = [
    "compaction.manifest",
    *(
        pytest.param(step, marks=pytest.mark.slow)
        for step in (
            "swap.prepared",
            "swap.deleted",
            "swap.group",
            "swap.done",
            "compaction.swapped",
            "compaction.marked",
        )
    ),
]


def latest(wire, topic):
    """(latest value by key, records read)."""
    end = wire.end_offset(topic)
    found, offset, count = {}, 0, 0
    while offset < end:
        data = bytes(wire.fetch(topic, offset).records)
        if not data:
            break
        for record in records(data):
            if record.offset >= offset:
                found[record.key] = record.value
                count += 1
        last = data_end(data)
        offset = max(last, offset + 1)
    return found, count


def data_end(data):
    from kept.storage.records import headers

    return max(header.next_offset for _, header in headers(data))


def test_a_log_is_cleaned_and_says_so(kept_cluster, connect):
    cluster = kept_cluster(log_cleaner_backoff_ms=100)
    topic = cluster.create_topic(config=CONFIG)
    wire = connect(cluster.port())
    expected = fill(wire, topic)
    cluster.wait_until(lambda: latest(wire, topic)[1] < 400, "the log is cleaned")
    assert latest(wire, topic)[0] == expected
    cluster.wait_until(lambda: 'event="log cleaned"' in cluster.log(), "the line is written")
    cluster.kill()
    cluster.start()
    assert latest(connect(cluster.port()), topic)[0] == expected


@pytest.mark.parametrize("step", STEPS)
def test_kill_9_in_a_swap(kept_cluster, connect, step):
    cluster = kept_cluster(log_cleaner_enable="false", log_cleaner_backoff_ms=100)
    topic = cluster.create_topic(config=CONFIG)
    expected = fill(connect(cluster.port()), topic)
    end = connect(cluster.port()).end_offset(topic)
    cluster.stop()
    cluster.start(fail_point=step, wait=False, log_cleaner_enable="true")
    assert cluster.wait() == -9
    cluster.start(log_cleaner_enable="false")
    wire = connect(cluster.port())
    assert wire.end_offset(topic) == end
    assert latest(wire, topic)[0] == expected
    cluster.stop()
    cluster.start(log_cleaner_enable="true")
    wire = connect(cluster.port())
    fill(wire, topic, rounds=10)
    cluster.wait_until(lambda: latest(wire, topic)[1] < 400, "the log is cleaned")
    assert set(latest(wire, topic)[0]) == set(expected)


def test_a_worker_that_dies_is_a_reason_and_a_retry(kept_cluster, connect):
    cluster = kept_cluster(log_cleaner_enable="false", log_cleaner_backoff_ms=100)
    topic = cluster.create_topic(config=CONFIG)
    expected = fill(connect(cluster.port()), topic)
    cluster.stop()
    cluster.start(fail_point="compaction.built=kill", log_cleaner_enable="true")
    cluster.wait_until(lambda: "log not cleaned" in cluster.log(), "the failure is told")
    assert cluster.running()
    wire = connect(cluster.port())
    assert latest(wire, topic)[0] == expected
    cluster.stop()
    cluster.start()
    wire = connect(cluster.port())
    cluster.wait_until(lambda: latest(wire, topic)[1] < 400, "the log is cleaned")
    assert latest(wire, topic)[0] == expected
