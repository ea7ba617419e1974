"""``kept compact lost``: what an unclean election cost, told by the replica that had it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from kept.client.admin.topics import NewTopic
from kept.client.client import Client, OutRecord
from tests.cli.conftest import Kept

pytestmark = pytest.mark.slow
CONFIG = {
    "cleanup.policy": "compact",
    "unclean.leader.election.enable": "true",
    "min.insync.replicas": "1",
}


def view(bootstrap: str):
    with Client(bootstrap) as client:
        return client.metadata(["t"]).topics["t"].partitions[0]


def test_what_an_unclean_election_cost(kept_cluster):
    cluster = kept_cluster(nodes=3)
    with Client(cluster.bootstrap) as client:
        client.create_topics([NewTopic("t", 1, 2, CONFIG)])
        client.produce("t", [OutRecord(b"both", b"1")])
        cluster.wait_until(lambda: len(view(cluster.bootstrap).isr) == 2, "in sync")
        first = view(cluster.bootstrap)
        old, new = first.leader, next(n for n in first.replicas if n != first.leader)
        cluster.kill(new)
        for key, value in [(b"alice", b"2"), (b"bob", None), (b"\xff", b"3")]:
            client.produce("t", [OutRecord(key, value)])
    cluster.kill(old)
    cluster.start(new)
    survivors = f"localhost:{cluster.port(new)}"
    cluster.wait_until(lambda: view(survivors).leader == new, f"node {new} leads, uncleanly")
    with Client(survivors) as client:
        client.produce("t", [OutRecord(b"after", b"5")])
    cluster.start(old)
    kept = Kept(cluster.bootstrap)
    cluster.wait_until(
        lambda: kept("compact", "lost", "--json").json["reports"], f"node {old} has cut its log"
    )
    (report,) = kept("compact", "lost", "t", "--json").json["reports"]
    assert (report["topic"], report["partition"], report["node"]) == ("t", 0, old)
    assert (report["first_offset"], report["end_offset"]) == (1, 4)
    assert report["committed_to"] <= 4
    assert report["incomplete"] is None
    assert report["records"] == [
        {"offset": 1, "key": "alice"},
        {"offset": 2, "key": "bob", "tombstone": True},
        {"offset": 3, "key_base64": "/w=="},
    ]
    (path,) = (Path(cluster.log_dir(old)) / "t-0").glob("lost-*.json")
    assert json.loads(path.read_text()) == report
    assert "alice, bob" in kept("compact", "lost").out
    said = kept("compact", "why-missing", "t", "0", "1", "--json").json
    assert said["fate"] == "present"
    assert said["lost_in_another_epoch"][0]["keys"] == [{"offset": 1, "key": "alice"}]
    with urllib.request.urlopen(f"{cluster.url(old)}/metrics", timeout=60) as answer:
        assert b"kept_committed_records_lost_total 3.0\n" in answer.read()
    assert "no topic nosuch" in kept("compact", "lost", "nosuch", status=1).err


def test_what_a_leader_alone_acknowledged_is_reported_when_the_mark_is_cleared(kept_cluster):
    """It led alone, so that its checkpoint knows an older high watermark, and when it comes back
    the next leader has the third replica in its ISR.
    """
    cluster = kept_cluster(nodes=5)
    plain = {name: text for name, text in CONFIG.items() if name != "cleanup.policy"}
    with Client(cluster.bootstrap) as client:
        client.create_topics([NewTopic("t", 1, 3, plain)])
        client.produce("t", [OutRecord(None, b"%d" % n) for n in range(50)])
        cluster.wait_until(lambda: len(view(cluster.bootstrap).isr) == 3, "in sync")
        first = view(cluster.bootstrap)
    old, new, third = first.leader, *(n for n in first.replicas if n != first.leader)
    other = next(n for n in range(5) if n not in first.replicas)
    elsewhere = f"localhost:{cluster.port(other)}"
    for node in (new, third):
        cluster.kill(node)
    cluster.wait_until(lambda: view(elsewhere).isr == (old,), "it leads alone")
    with Client(f"localhost:{cluster.port(old)}") as client:
        client.produce("t", [OutRecord(None, b"%d" % n) for n in range(50, 80)])
    cluster.kill(old)
    cluster.start(new)
    cluster.wait_until(lambda: view(elsewhere).leader == new, f"node {new} leads, uncleanly")
    with Client(elsewhere) as client:
        client.produce("t", [OutRecord(None, b"after")])
    cluster.start(third)
    cluster.wait_until(lambda: set(view(elsewhere).isr) == {new, third}, "the mark is cleared")
    cluster.start(old)
    kept = Kept(elsewhere)
    cluster.wait_until(
        lambda: kept("compact", "lost", "--json").json["reports"], f"node {old} has cut its log"
    )
    (report,) = kept("compact", "lost", "t", "--json").json["reports"]
    assert (report["node"], report["first_offset"], report["end_offset"]) == (old, 50, 80)
    assert 50 <= report["committed_to"] <= 80
    assert [record["offset"] for record in report["records"]] == list(range(50, 80))
    said = [line for line in cluster.log(old).splitlines() if 'event="log truncated"' in line]
    assert len(said) == 1 and "level=warning" in said[0]
