"""``kept cluster voter`` against three real nodes, one of which loses its metadata disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from kept.testing import Cluster
from tests.cli.conftest import Kept

pytestmark = pytest.mark.slow


@pytest.fixture
def three() -> Iterator[Cluster]:
    with Cluster(nodes=3) as cluster:
        yield cluster


def quorum(kept: Kept) -> dict[int, str | None]:
    found = kept("cluster", "status", "--json").json
    return {node["node_id"]: node["quorum"] for node in found["nodes"]}


def parts(kept: Kept) -> list[str | None]:
    return sorted(str(part) for part in quorum(kept).values())


def test_a_voter_with_an_empty_disk_is_an_observer_until_it_is_added(three):
    kept = Kept(three.bootstrap)
    topic = three.create_topic()
    assert parts(kept) == ["leader", "voter", "voter"]
    lost = next(number for number, part in quorum(kept).items() if part == "voter")
    three.stop(lost)
    meta = os.path.join(three.data_dir(lost), "meta")
    shutil.rmtree(meta)
    three.start(lost)
    three.wait_until(
        lambda: quorum(kept)[lost] == "observer, the disk it voted with is lost", "it observes"
    )
    assert kept("cluster", "status", "--json").json["observers"] == [lost]
    added = kept("cluster", "voter", "add", lost)
    assert added.lines == ["the voters are 0, 1, 2"]
    assert parts(kept) == ["leader", "voter", "voter"]
    again = kept("cluster", "voter", "add", lost, status=1)
    assert f"node {lost} votes already" in again.err
    # It votes: with another one gone, the two of them are the majority.
    other = next(n for n, part in quorum(kept).items() if n != lost and part == "voter")
    three.kill(other)
    kept("topic", "create", "later", "--partitions", 1)
    three.start(other)
    assert {topic, "later"} <= {t["name"] for t in kept("topic", "list", "--json").json}


def test_voters_are_removed_and_added_one_at_a_time(three):
    kept = Kept(three.bootstrap)
    assert "does not vote" in kept("cluster", "voter", "remove", 7, status=1).err
    assert "does not follow" in kept("cluster", "voter", "add", 7, status=1).err
    leader = next(n for n, part in quorum(kept).items() if part == "leader")
    kept("cluster", "voter", "remove", leader)
    three.wait_until(
        lambda: parts(kept) == ["leader", "observer", "voter"], "another one leads, it observes"
    )
    kept("cluster", "voter", "remove", next(n for n, p in quorum(kept).items() if p == "voter"))
    assert parts(kept) == ["leader", "observer", "observer"]
    last = next(n for n, part in quorum(kept).items() if part == "leader")
    refused = kept("cluster", "voter", "remove", last, status=1)
    assert f"node {last} is the last voter" in refused.err
    dead = next(n for n in range(3) if n != last)
    three.kill(dead)
    three.wait_until(lambda: kept("cluster", "status", "--json").json["nodes"][dead]["fenced"], "")
    assert "does not follow" in kept("cluster", "voter", "add", dead, status=1).err
    # One that is gone for good is forgotten, and no check asks for it any more.
    assert "1 fenced node" in kept("cluster", "status", "--check", status=1).err
    alive = next(n for n in range(3) if n not in (last, dead))
    assert f"{alive} is alive: stop it" in kept("cluster", "unregister", alive, status=1).err
    assert f"node {last} votes" in kept("cluster", "unregister", last, status=1).err
    assert kept("cluster", "unregister", dead).lines == [f"node {dead} is unregistered"]
    kept("cluster", "status", "--check")
    for node in range(3):
        if node not in (last, dead):
            kept("cluster", "voter", "add", node)
    three.start(dead)
    three.wait_until(lambda: quorum(kept)[dead] == "observer", "it is back")
    kept("cluster", "voter", "add", dead)
    assert parts(kept) == ["leader", "voter", "voter"]
    # Not without a living majority.
    gone = [n for n, part in quorum(kept).items() if part == "voter"]
    three.kill(gone[0])
    refused = kept("cluster", "voter", "remove", gone[1], status=1)
    assert "no majority" in refused.err
