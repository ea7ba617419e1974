"""A file system that is really full: the log directory goes offline, nothing acknowledged is lost.

Needs root for a small tmpfs of its own; where that is not allowed the fail points of
``test_faults.py`` stand alone.
"""

from __future__ import annotations

import os
import subprocess
import urllib.error
import urllib.request

import pytest

from kept.storage.errors import KeptError
from kept.storage.records import headers, records
from kept.testing import Cluster
from tests.support.request_values import one_batch
from tests.tools.small_disk import SIZE_BYTES, small_disk


@pytest.fixture
def small(tmp_path):
    """A directory on a file system of 3 MiB."""
    with small_disk(tmp_path / "small") as path:
        yield path


def everything(wire, topic):
    """The records of a topic by offset."""
    found, offset, end = {}, 0, wire.end_offset(topic)
    while offset < end:
        data = bytes(wire.fetch(topic, offset, partition_max_bytes=1 << 20).records)
        for record in records(data):
            assert record.offset not in found
            found[record.offset] = record.value
        offset = max(header.next_offset for _, header in headers(data))
    return found


def fill(wire, topic, count=400):
    """Produce until refused: (values acknowledged by offset, the code of the refusal)."""
    acked = {}
    for _ in range(count):
        batch = one_batch(1, 20_000)
        try:
            found = wire.produce(topic, batch, acks=-1)
        except ConnectionError:
            return acked, None
        if int(found.error_code):
            return acked, int(found.error_code)
        acked[found.base_offset] = b"v" * 20_000
    raise AssertionError("the file system is not full")


def status_of(cluster, path):
    try:
        with urllib.request.urlopen(cluster.url() + path, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.slow
def test_the_only_disk_is_full(small, connect):
    with Cluster(log_dirs=small / "log") as cluster:
        topic = cluster.create_topic(config={"segment.bytes": "300000"})
        acked, code = fill(connect(cluster.port()), topic)
        assert len(acked) > 50 and code in (56, None)
        assert cluster.wait() == 1
        said = cluster.log()
        assert "log directory offline" in said and "No space left on device" in said
        assert str(small) in said and "no log directory is left" in said
        # Still full: a start says so, and destroys nothing.
        cluster.start(wait=False)
        wait_for_end_or_ready(cluster)
        if cluster.running():
            cluster.kill()
        # An operator makes room.
        subprocess.run(["mount", "-o", f"remount,size={8 * SIZE_BYTES}", str(small)], check=True)
        cluster.start()
        wire = connect(cluster.port())
        assert everything(wire, topic).items() >= acked.items()
        assert int(wire.produce(topic, one_batch(1), acks=-1).error_code) == 0


def wait_for_end_or_ready(cluster):
    starts = cluster.log().count(" ready on ")
    cluster.wait_until(
        lambda: not cluster.running() or cluster.log().count(" ready on ") > starts, "started"
    )


def test_one_of_two_disks_is_full(small, connect, tmp_path):
    dirs = f"{small}/log,{tmp_path}/roomy"
    with Cluster(log_dirs=dirs) as cluster:
        topics = [cluster.create_topic(config={"segment.bytes": "300000"}) for _ in range(2)]
        on_small = next(t for t in topics if (small / "log" / f"{t}-0").exists())
        on_roomy = next(t for t in topics if t != on_small)
        assert status_of(cluster, "/readyz")[0] == 200
        wire = connect(cluster.port())
        kept = {wire.produce(on_roomy, one_batch(1, 50), acks=-1).base_offset: b"v" * 50}
        acked, code = fill(wire, on_small)
        assert (len(acked) > 50, code) == (True, 56)
        assert cluster.running()
        # The other one serves, and the failed one says why.
        assert everything(wire, on_roomy) == kept
        assert int(wire.produce(on_roomy, one_batch(1), acks=-1).error_code) == 0
        refused = wire.produce(on_small, one_batch(1), acks=-1)
        assert int(refused.error_code) == 56
        assert "No space left on device" in (refused.error_message or "")
        code, text = status_of(cluster, "/readyz")
        assert str(small) in text and "No space left" in text, (code, text)
        assert status_of(cluster, "/healthz")[0] == 200
        assert cluster.stop() == 0
        assert not os.path.exists(small / "log" / ".kafka_cleanshutdown")
        subprocess.run(["mount", "-o", f"remount,size={8 * SIZE_BYTES}", str(small)], check=True)
        cluster.start()
        wire = connect(cluster.port())
        assert everything(wire, on_small).items() >= acked.items()
        assert int(wire.produce(on_small, one_batch(1), acks=-1).error_code) == 0


@pytest.mark.slow
def test_the_disk_of_the_metadata_is_full(small, tmp_path):
    with Cluster(log_dirs=tmp_path / "log", metadata_log_dir=small / "meta") as cluster:
        first = cluster.create_topic()
        with open(small / "filler", "wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)):
                    pass
            except OSError:
                pass
        acked, failure = [first], None
        for _ in range(200):
            try:
                acked.append(cluster.create_topic(config={"retention.ms": "1000"}))
            except (KeptError, OSError) as error:
                failure = error
                break
        assert failure is not None
        assert cluster.wait() == 1
        assert "the metadata log failed" in cluster.log()
        assert str(small) in cluster.log() and "No space left" in cluster.log()
        (small / "filler").unlink()
        cluster.start()
        with cluster.client() as client:
            assert set(acked) <= set(client.metadata().topics)
        cluster.create_topic()
