"""``kept compact status`` and ``retry`` where a replica fails that does not lead."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from kept.cli.commands import compact as commands
from kept.cli.commands.compact import compact
from kept.cli.run import run as run_command
from kept.cli.shell import Failure
from kept.client.json_api import HttpFailed

REASON = "t: check of generation 3.7: offset 9: it must survive, and is not in the output"
QUIET = "t:0 is not uncleanable: there is nothing to try again"


def stands(node: int, *, leads: bool, state: str = "idle", reason: str = "clean") -> dict[str, Any]:
    others = [{"replica": n, "held": "3.7", "applied": "3.6", "behind": True} for n in (1, 2)]
    return {
        "topic": "t",
        "partition": 0,
        "node": node,
        "leads": leads,
        "state": state,
        "reason": reason,
        "dirty_ratio": 0.0,
        "clean_bytes": 1,
        "dirty_bytes": 0,
        "first_dirty_offset": 0,
        "cleanable_end_offset": 0,
        "generation": "3.7",
        "published": "3.7",
        "last_compaction_ms": 1,
        "awaits": [],
        "replicas": others if leads else [],
    }


class Node:
    """One node's API: 0 leads, 1 may fail."""

    def __init__(self, number: int, states: dict[int, str]) -> None:
        self.number, self.failing = number, states.get(number) == "uncleanable"
        self.posts: list[tuple[str, Any]] = []
        self.gets, self.gone = 0, False

    def is_there(self) -> bool:
        return True

    def get(self, path: str, **_: object) -> dict[str, Any]:
        assert path == "compaction"
        self.gets += 1
        told = ("uncleanable", REASON) if self.failing else ("idle", "clean")
        one = stands(self.number, leads=self.number == 0, state=told[0], reason=told[1])
        return {"partitions": [copy.deepcopy(one)]}

    def post(self, path: str, body: dict[str, Any], **query: int) -> dict[str, Any]:
        self.posts.append((path, {**body, **query}))
        if self.gone:
            raise HttpFailed("node-1:9092: connection refused")
        if not self.failing:
            raise HttpFailed(QUIET, 400)
        return {**body, "retrying": True}


@pytest.fixture
def run(monkeypatch):
    def run(
        states: dict[int, str], *arguments: str, gone: int | None = None
    ) -> tuple[Any, dict[int, Node]]:
        nodes = {number: Node(number, states) for number in range(3)}
        looks: list[str] = []

        def each_node(*_: Any) -> dict[int, Node]:
            if gone is not None and looks:
                return {number: node for number, node in nodes.items() if number != gone}
            looks.append("the nodes are looked up")
            return nodes

        if gone is not None:
            nodes[gone].gone = True
        monkeypatch.setattr(commands, "each_node", each_node)
        monkeypatch.setattr(commands, "request_any", lambda _, request, __: request(nodes[0]))
        return CliRunner().invoke(compact, [*arguments, "--bootstrap", "localhost:1"]), nodes

    return run


def test_status_says_what_fails_where(run) -> None:
    done, _ = run({1: "uncleanable"}, "status", "t", "--json")
    (one,) = json.loads(done.output)["partitions"]
    assert one["state"] == "idle", "as its leader says"
    assert {r["replica"]: r["reason"] for r in one["replicas"]} == {1: REASON, 2: None}
    done, _ = run({1: "uncleanable"}, "status")
    assert "it must survive" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("topics", "away", "is_said"),
    [((), [], True), ((), [2], False), (("nope", "t"), [], False), (("t",), [], True)],
)
def test_nothing_is_lost_only_where_every_node_said_so(
    monkeypatch, capsys, topics, away, is_said
) -> None:
    def lost(_bootstrap: Any, topic: str | None = None) -> list[Any]:
        if topic == "nope":
            raise HttpFailed("no topic nope")
        return []

    monkeypatch.setattr(commands, "_lost", lost)
    monkeypatch.setattr(commands, "nodes_away", lambda _: away)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status = run_command(["compact", "lost", *topics, "--bootstrap", "localhost:1"])
    assert status == int("nope" in topics)
    said = capsys.readouterr().err
    assert ("no replica had to truncate acknowledged records" in said) == is_said
    assert ("no topic nope" in said) == ("nope" in topics)


@pytest.mark.parametrize("topics", [(), ("plain", "other")])
def test_no_topic_is_compacted_only_where_none_is_named(monkeypatch, capsys, topics) -> None:
    def status_of(_nodes: Any, topic: str | None) -> list[Any]:
        if topic is not None:
            raise HttpFailed(f"{topic} is not compacted")
        return []

    monkeypatch.setattr(commands, "each_node", lambda *_: {})
    monkeypatch.setattr(commands, "_status", status_of)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status = run_command(["compact", "status", *topics, "--bootstrap", "localhost:1"])
    assert status == int(bool(topics))
    assert ("no topic is compacted" in capsys.readouterr().err) == (not topics)


def test_retry_asks_the_replica_that_fails(run) -> None:
    done, nodes = run({1: "uncleanable"}, "retry", "t:0")
    assert done.exit_code == 0, done.output
    assert "trying t:0 again on node 1" in done.output
    body = {"topic": "t", "partition": 0}
    assert nodes[1].posts == [("compaction/retry", {**body, "node": 1})] and not nodes[2].posts


def test_where_nothing_fails_the_leader_says_so(run) -> None:
    done, nodes = run({}, "retry", "t:0")
    assert done.exit_code != 0 and QUIET in str(done.exception or done.output)
    assert [len(node.posts) for node in nodes.values()] == [1, 0, 0]


def test_the_leader_is_asked_as_ever(run) -> None:
    done, nodes = run({0: "uncleanable"}, "retry", "t:0", "--json")
    said = json.loads(done.output)
    assert said == {"topic": "t", "partition": 0, "retrying": True, "replicas": []}
    assert nodes[0].posts == [("compaction/retry", {"topic": "t", "partition": 0})]


def test_each_node_is_asked_once(run) -> None:
    _, nodes = run({1: "uncleanable"}, "retry", "t:0")
    assert [node.gets for node in nodes.values()] == [1, 1, 1]


def test_a_replica_that_goes_meanwhile_is_named(run) -> None:
    done, nodes = run({1: "uncleanable"}, "retry", "t:0", gone=1)
    assert nodes[1].posts, "it was there when it was asked for its state"
    assert isinstance(done.exception, Failure) and not done.output, done.output
    said = "t:0 also fails on others: node 1 was not reached (node-1:9092: connection refused)"
    assert str(done.exception) == said
