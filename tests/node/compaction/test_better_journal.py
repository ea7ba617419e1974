"""Which replicas are asked why a record is missing, once the leader does not know."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from kept.compaction.cleaner.removal_log import Fate, Reason
from kept.node.admin import leader_routing
from kept.storage.errors import KeptError, NetworkException
from kept.storage.types import TopicPartition

TP = TopicPartition("t", 0)
UNKNOWN = {
    "fate": Fate.REMOVED.value,
    "reason": Reason.FOLLOWED.value,
    "offset": 7,
    "explanation": "removed in generation 3.7 as the leader decided",
}


def asked(
    monkeypatch, topics: dict[str, Any], refusal: KeptError | None = None
) -> tuple[list[int], Any]:
    """Whom node 9 asks, of the replicas 0 (away, fenced), 1 (unknown) and 2; and the outcome."""
    found: list[int] = []

    async def ask_json(_node: Any, replica: int, *_: Any) -> Any:
        found.append(replica)
        if refusal is not None:
            raise refusal
        return {
            "fate": "removed",
            "reason": "a newer record",
            "generation": "g",
            "explanation": "x",
        }

    monkeypatch.setattr(leader_routing, "ask_json", ask_json)
    brokers = {0: SimpleNamespace(fenced=True), 2: SimpleNamespace(fenced=False)}
    node: Any = SimpleNamespace(node_id=9, image=SimpleNamespace(topics=topics, brokers=brokers))
    return found, asyncio.run(leader_routing.better_journal(node, TP, UNKNOWN))


def test_a_replica_that_is_away_is_not_waited_for(monkeypatch):
    topic = SimpleNamespace(partitions=[SimpleNamespace(replicas=(0, 1, 2))])
    found, answer = asked(monkeypatch, {"t": topic})
    assert found == [2]
    assert answer["reason"] == "a newer record"


def test_a_topic_that_was_deleted_meanwhile_has_no_replicas(monkeypatch):
    assert asked(monkeypatch, {}) == ([], {})


def test_where_nobody_knows_those_that_are_away_are_named(monkeypatch):
    topic = SimpleNamespace(partitions=[SimpleNamespace(replicas=(0, 2))])
    found, answer = asked(monkeypatch, {"t": topic}, NetworkException("it has just gone"))
    assert found == [2] and answer["explanation"] == (
        "removed in generation 3.7 as the leader decided; nodes 0, 2 are away and may know more"
    )
    topic.partitions[0].replicas = (0,)
    _, answer = asked(monkeypatch, {"t": topic})
    assert answer["explanation"].endswith("; node 0 is away and may know more")
