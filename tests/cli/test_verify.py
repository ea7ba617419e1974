"""``kept compact verify`` on three real nodes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from kept.client.admin.topics import NewTopic
from kept.client.client import Client, OutRecord
from tests.cli.conftest import Kept

pytestmark = pytest.mark.slow
CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": "20000",
    "min.cleanable.dirty.ratio": "0.3",
    "delete.retention.ms": "0",
}


def fill(bootstrap: str, topic: str) -> None:
    draw = random.Random(1)
    with Client(bootstrap) as client:
        client.create_topics([NewTopic(topic, 2, 3, CONFIG)])
        for _ in range(60):
            rows = [
                (b"k%d" % draw.randrange(200), None if draw.random() < 0.1 else os.urandom(50))
                for _ in range(100)
            ]
            client.produce(topic, [OutRecord(key, value) for key, value in rows])


def flip(path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    with path.open("r+b") as file:
        file.write(content)


def test_replicas_are_compared_by_what_is_on_their_disks(kept_cluster):
    cluster = kept_cluster(nodes=3, log_cleaner_backoff_ms=100)
    kept = Kept(cluster.bootstrap)
    fill(cluster.bootstrap, "t")
    cluster.wait_until(
        lambda: all(
            p["generation"] and p["state"] == "idle"
            for p in kept("compact", "status", "t", "--json").json["partitions"]
        ),
        "both partitions are compacted",
    )
    found = kept("compact", "verify", "t", "--json").json["partitions"]
    assert [one["equal"] for one in found] == [True, True]
    assert all(one["generation"] and one["covered_end"] > 0 for one in found)
    assert all(one["replicas"] == [0, 1, 2] for one in found)

    segments = sorted((Path(cluster.log_dir(1)) / "t-0").glob("*.log"))
    flip(segments[0], segments[0].stat().st_size - 3)
    said = kept("compact", "verify", "t:0", status=1)
    assert "DIFFERENT" in said.out
    assert "node 1: " in said.out and "wrong CRC" in said.out
    assert kept("compact", "verify", "t:1").status == 0

    cluster.kill(2)
    cluster.wait_until(
        lambda: "away: 2" in kept("compact", "verify", "t:1", status=None).out, "node 2 is fenced"
    )
    assert (
        "there is no t:7: topic t has partitions 0 to 1"
        in kept("compact", "verify", "t:7", status=1).err
    )
    assert "no topic nosuch" in kept("compact", "verify", "nosuch", status=1).err
