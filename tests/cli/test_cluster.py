"""``kept cluster`` against three real nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kept.cli.commands import cluster as cluster_commands
from kept.cli.run import run
from kept.client.admin.cluster import Reassignment
from kept.client.client import OutRecord
from kept.client.core.metadata import Endpoint
from kept.client.json_api import JsonApi
from kept.storage.types import TopicPartition
from kept.testing import Cluster
from tests.cli.conftest import Kept, Ran
from tests.support.fake_client import FakeClient


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(nodes=3) as cluster:
        yield cluster


@pytest.fixture
def kept(three) -> Kept:
    return Kept(three.bootstrap)


@pytest.fixture
def topic(three) -> str:
    return three.create_topic(partitions=3)


def replicas_of(kept, topic):
    described = kept("topic", "describe", topic, "--json").json["partitions"]
    return {p["partition"]: (p["leader"], p["replicas"]) for p in described}


def test_status_of_three_nodes(kept, topic):
    found = kept("cluster", "status", "--check", "--json").json
    assert [node["node_id"] for node in found["nodes"]] == [0, 1, 2]
    assert {tuple(node["roles"]) for node in found["nodes"]} == {("broker", "controller")}
    assert found["voters"] == [0, 1, 2]
    assert found["controller_id"] in (0, 1, 2)
    assert found["term"] >= 1
    assert all(node["epoch"] >= 0 and node["fenced"] is False for node in found["nodes"])
    assert found["partitions"]["under_replicated"] == found["partitions"]["offline"] == []
    lines = kept("cluster", "status").lines
    assert lines[1].startswith(f"Controller: node {found['controller_id']}, term ")
    assert lines[3].split()[:4] == ["NODE", "ROLES", "STATE", "ADDRESS"]


def test_status_counts_internal_partitions_apart(kept, three, topic):
    three.create_topic(partitions=1)
    with three.client() as client:
        client.commit("readers", {TopicPartition(topic, 0): 0})
    found = kept("cluster", "status", "--json").json
    assert found["partitions"]["internal"] == 50
    listed = kept("topic", "list", "--json").json
    own = sum(each["partitions"] for each in listed)
    assert found["partitions"]["total"] == own + 50
    led = [node["internal_leaders"] for node in found["nodes"]]
    assert sum(led) == 50
    assert [node["internal_replicas"] for node in found["nodes"]] == [50] * 3
    lines = kept("cluster", "status").lines
    assert f"Partitions: {own} and 50 internal" in lines
    assert lines[3].split()[-3:] == ["LEADERS", "REPLICAS", "INTERNAL"]
    shown = [list(map(int, line.split()[-3:])) for line in lines[4:7]]
    assert shown == [
        [node["leaders"] - node["internal_leaders"], node["replicas"] - 50, 50]
        for node in found["nodes"]
    ]


@pytest.mark.slow
def test_status_without_a_controller_tells_what_is_known():
    with Cluster(nodes=3) as cluster:
        topic = cluster.create_topic()
        cluster.kill(0)
        cluster.kill(1)
        kept = Kept(cluster.bootstrap)
        seen: list[Ran] = []

        def unknown() -> bool:  # if it led itself, it needs a moment to know that nobody follows
            seen.append(kept("cluster", "status", "--json"))
            return bool(seen[-1].json["controller_id"] == -1)

        cluster.wait_until(unknown, "node 2 knows of no controller")
        told = seen[-1]
        assert told.json["controller_id"] == -1
        assert told.json["voters"] is told.json["observers"] is None, "[] would say: there are none"
        assert [node["node_id"] for node in told.json["nodes"]] == [0, 1, 2]
        assert told.json["partitions"]["total"] >= 1, topic
        why = told.json["quorum_unknown"]
        assert "DescribeQuorum" in why and f"no controller answers ({why})" in told.err
        assert "no controller answers" in kept("cluster", "status", "--check", status=1).err
        refused = kept("cluster", "unregister", 1, status=1)
        assert "no controller answers" in refused.err
        for command in (("topic", "create", "new"), ("cluster", "elect", "--all")):
            with kept.started(*command, text=True) as waits:
                said = waits.stderr.readline()
            assert "no controller has answered yet: none is elected; the voters are nodes" in said
            assert "0, 1, 2, of which 0, 1 do not answer; still trying" in said


def test_compaction_is_described_as_the_leaders_say(kept, three):
    name = three.create_topic(partitions=3, config={"cleanup.policy": "compact"})
    described = kept("topic", "describe", name, "--json").json
    assert described["compacted"]
    assert [p["reason"] for p in described["partitions"]] == ["everything is clean"] * 3


def test_leaders_leave_a_node_and_come_back(kept, topic):
    before = replicas_of(kept, topic)
    led = [p for p, (leader, _) in before.items() if leader == 2]
    assert led, "three partitions on three nodes"
    kept("cluster", "drain", 2, "--leaders")
    after = replicas_of(kept, topic)
    assert all(leader != 2 for leader, _ in after.values())
    assert {p: sorted(r) for p, (_, r) in after.items()} == {p: [0, 1, 2] for p in before}
    moved = kept("cluster", "reassign", f"{topic}:{led[0]}", "--to", "2,0,1", "--wait", "--json")
    assert moved.json[0]["replicas"] == [2, 0, 1]
    told = kept("cluster", "elect", topic, "--json").json
    assert {one["partition"]: one["changed"] for one in told}[led[0]] is True
    assert replicas_of(kept, topic)[led[0]][0] == 2
    assert "nothing to do" in kept("cluster", "elect", f"{topic}:{led[0]}").out


def test_replicas_move_with_their_records(kept, three):
    topic = three.create_topic(partitions=1, replication_factor=1)
    (home,) = replicas_of(kept, topic)[0][1]
    target = (home + 1) % 3
    with three.client() as client:
        client.produce(topic, [OutRecord(b"k", b"%d" % n) for n in range(100)])
    kept("cluster", "reassign", topic, "--to", target, "--throttle", 10_000_000, "--wait")
    assert replicas_of(kept, topic)[0] == (target, [target])
    with three.client() as client:
        assert [r.value for r in client.read(topic)] == [b"%d" % n for n in range(100)]
    assert kept("cluster", "reassign").out == "nothing is being moved\n"
    assert kept("cluster", "reassign", "--status", "--json").json == []
    assert "nothing to do" in kept("cluster", "reassign", topic, "--cancel").out


def test_what_cannot_be_is_said(kept, topic):
    assert (
        "has nowhere to go: each other node has one already"
        in kept("cluster", "drain", 1, status=1).err
    )
    assert "there is no node 9; nodes: 0, 1, 2" in kept("cluster", "drain", 9, status=1).err
    unknown = kept("cluster", "reassign", f"{topic}:0", "--to", "0,7", status=1)
    assert "7" in unknown.err
    few = kept("cluster", "reassign", topic, "--to", "0", status=1)
    assert "has 3 replicas and --to names 1 node;" in few.err
    assert "has partitions 0 to 2" in kept("cluster", "elect", f"{topic}:3", status=1).err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["elect"], "name partitions or give --all"),
        (["elect", "t", "--all"], "name partitions or give --all"),
        (["reassign", "--to", "1"], "--to needs a topic"),
        (["reassign", "t", "--to", "1,x"], "not a list of node ids"),
        (["reassign", "t", "--to", "1,1"], "names a node twice"),
        (["reassign", "t", "--to", "1", "--cancel"], "exclude each other"),
        (["reassign", "t", "--cancel", "--throttle", "9"], "--cancel and --throttle exclude"),
        (["reassign", "t", "--wait"], "--wait needs --to"),
    ],
)
def test_wrong_usage(offline, arguments, said):
    assert said in offline("cluster", *arguments, status=2).err


def test_moves_are_shown_of_the_topics_that_are_named(monkeypatch, capfd):
    moving = {TopicPartition(name, 0): Reassignment((1, 2), (2,), (1,)) for name in ("a", "b")}

    class Moving(FakeClient):
        def run(self, operation: Any) -> Any:
            operation.close()
            return moving

    monkeypatch.setattr(cluster_commands, "open_client", lambda _: Moving({"a": 2, "b": 1}))
    for topics, shown in (((), ["a", "b"]), (("a",), ["a"]), (("a:1",), [])):
        assert run(["cluster", "reassign", *topics, "--json"]) == 0
        assert [row["topic"] for row in json.loads(capfd.readouterr().out)] == shown


def await_fenced(cluster: Cluster, count: int) -> None:
    """Wait until the nodes that run know of so many fenced brokers; a command each time is dear."""
    nodes = [JsonApi(Endpoint("localhost", cluster.port(i)), 30) for i in range(2)]

    def counts() -> set[int]:
        return {sum(b["fenced"] for b in node.get("cluster")["brokers"]) for node in nodes}

    cluster.wait_until(lambda: counts() == {count}, f"{count} nodes are fenced")


@pytest.mark.slow
def test_a_dead_node_is_seen(kept_cluster):
    cluster = kept_cluster(nodes=3)
    topic = cluster.create_topic(partitions=3)
    kept = Kept(cluster.bootstrap)
    cluster.kill(2)
    await_fenced(cluster, 1)
    assert "1 fenced node" in kept("cluster", "status", "--check", status=1).err
    found = kept("cluster", "status", "--json").json
    assert [n["node_id"] for n in found["nodes"] if n["fenced"]] == [2]
    assert {p["topic"] for p in found["partitions"]["under_replicated"]} == {topic}
    assert found["partitions"]["offline"] == []
    # The node is still listed in Metadata for a while: nothing waits for it.
    assert len(kept("topic", "describe", topic, "--json").json["partitions"]) == 3
    assert kept("group", "list", "--json").json == []
    described = kept("broker", "config", "describe", "--json")
    assert {row["broker"] for row in described.json} == {"0", "1"}
    assert described.err == "kept: node 2 does not answer; its settings are not shown\n"
    setting = ("--config", "log.cleaner.threads=2")
    told = kept("broker", "config", "set", 0, 2, *setting, status=1).err
    assert told == "kept: broker 2 is fenced: it does not answer\n"
    assert described.json == kept("broker", "config", "describe", "--json").json
    rows = {row["node"]: row for row in kept("top", "--json", "--interval", 0.5).json["nodes"]}
    assert {number: row["state"] for number, row in rows.items()} == {
        0: "active",
        1: "active",
        2: "fenced",
    }
    assert (rows[2]["leaders"], rows[2]["replicas"]) == (0, 3)
    cluster.start(2)
    await_fenced(cluster, 0)
    cluster.wait_until(
        lambda: kept("cluster", "status", "--check", status=None).status == 0, "all are back"
    )
