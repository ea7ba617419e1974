"""Which replicas are asked why a record is missing, once the leader does not know."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from kept.compaction.journal import Fate, Reason
from kept.node import on_demand
from kept.storage.types import TopicPartition

TP = TopicPartition("t", 0)
UNKNOWN = {"fate": Fate.REMOVED.value, "reason": Reason.FOLLOWED.value, "offset": 7}


def asked(monkeypatch, topics: dict[str, Any]) -> tuple[list[int], Any]:
    """Whom node 9 asks, of the replicas 0 (away, fenced), 1 (unknown) and 2; and the outcome."""
    found: list[int] = []

    async def ask_json(_node: Any, replica: int, *_: Any) -> Any:
        found.append(replica)
        return {
            "fate": "removed",
            "reason": "a newer record",
            "generation": "g",
            "explanation": "x",
        }

    monkeypatch.setattr(on_demand, "ask_json", ask_json)
    brokers = {0: SimpleNamespace(fenced=True), 2: SimpleNamespace(fenced=False)}
    node: Any = SimpleNamespace(node_id=9, image=SimpleNamespace(topics=topics, brokers=brokers))
    return found, asyncio.run(on_demand.better_journal(node, TP, UNKNOWN))


def test_a_replica_that_is_away_is_not_waited_for(monkeypatch):
    topic = SimpleNamespace(partitions=[SimpleNamespace(replicas=(0, 1, 2))])
    found, answer = asked(monkeypatch, {"t": topic})
    assert found == [2]
    assert answer["reason"] == "a newer record"


def test_a_topic_that_was_deleted_meanwhile_has_no_replicas(monkeypatch):
    assert asked(monkeypatch, {}) == ([], {})
