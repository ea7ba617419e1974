"""The load program against a real node: what it counts, and that it takes no error for success."""

from __future__ import annotations

import time

import frames
import pytest
from harness import Bench

from kept.storage.types import Codec
from kept.testing import Cluster


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("load"), 1.0)


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as cluster:
        yield cluster


def frame(topic: str, acks: int = -1, partition: int = 0) -> bytes:
    batch = frames.batch(1024, 400, Codec.NONE, int(time.time() * 1000))
    return frames.produce(topic, batch, acks, partition)


def test_every_request_sent_is_in_the_log(bench, cluster):
    topic = cluster.create_topic(partitions=2)
    request = frame(topic, partition=1)
    got = bench.run_load("send", cluster.port(), request, 3, 5, 60)
    assert (got["requests"], got["bytes"]) == (60, 60 * len(request))
    with cluster.client() as client:
        bounds = client.bounds(topic)
    assert bounds[0] == (0, 0)
    assert bounds[1] == (0, 60 * 2)  # two records a batch


def test_the_paced_load_tells_latencies_in_order(bench, cluster):
    got = bench.run_load("pace", cluster.port(), frame(cluster.create_topic()), 500, 100)
    assert got["requests"] == 100
    assert 0 < got["p50_ms"] <= got["p99_ms"] <= got["p999_ms"] <= got["max_ms"]


@pytest.mark.parametrize("mode", [("send", 1, 5, 10), ("pace", 500, 10)])
def test_a_refused_request_fails_the_run(bench, cluster, mode):
    topic = cluster.create_topic(config={"max.message.bytes": "500"})
    with pytest.raises(RuntimeError, match="error code 10"):  # MESSAGE_TOO_LARGE
        bench.run_load(mode[0], cluster.port(), frame(topic), *mode[1:])


def test_a_partition_that_is_not_there_fails_the_run(bench, cluster):
    with pytest.raises(RuntimeError, match="error code 3"):
        bench.run_load("send", cluster.port(), frame(cluster.create_topic(), 1, 7), 1, 1, 1)


def test_what_fails_is_told_and_the_run_goes_on(bench, cluster, capsys):
    with bench.attempt("this"):
        bench.run_load("send", cluster.port(), frame(cluster.create_topic(), 1, 7), 1, 1, 1)
    assert bench.failed == [f"this: load send on port {cluster.port()}: load: error code 3"]
    assert "failed: this" in capsys.readouterr().err
    with bench.attempt("that"):
        raise KeyError("absent")
    assert bench.failed[1:] == ["that: KeyError: 'absent'"]
    assert "Traceback" in capsys.readouterr().err
