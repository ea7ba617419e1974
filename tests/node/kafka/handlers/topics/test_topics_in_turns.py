"""Topics of very many partitions are made, grown and deleted in turns: others are served meanwhile.

What is counted is work, by a clock that nothing else moves.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from kept.cluster.controller import topics
from kept.cluster.metadata import image
from kept.cluster.metadata.records import RECORDS_PER_STEP
from kept.node.replicas.replica_manager import ReplicaManager
from kept.node.runtime.time_slices import IN_PLACE_S
from tests.support.request_values import topic_values

PARTITIONS: Final = 200
AT_ONCE: Final = 32
"""Items that a work may do in place."""
MOST: Final = 2 * (AT_ONCE + RECORDS_PER_STEP)
"""Of one kind in one turn, in which one work may end and another begin."""


class Work:
    """How much of each kind of work was done in which turn of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.now_s = 0.0
        self.turn = 0
        self.done: dict[str, Counter[int]] = {}
        monkeypatch.setattr("kept.node.runtime.time_slices.perf_counter", lambda: self.now_s)
        for owner, name in (
            (topics, "_new_partition"),
            (topics, "check_assignment"),
            (image._Step, "add"),
            (ReplicaManager, "_change"),
            (ReplicaManager, "_host"),
            (ReplicaManager, "_remove"),
        ):
            self.done[name] = Counter()
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self.done[name][self.turn] += 1
            self.now_s += IN_PLACE_S / AT_ONCE
            return work(*given, **named)

        return counted

    async def during(self, awaitable: Awaitable[Any]) -> Any:
        for counts in self.done.values():
            counts.clear()
        working = asyncio.ensure_future(awaitable)
        while not working.done():
            self.turn += 1
            await asyncio.sleep(0)
        return await working

    def most(self, name: str) -> int:
        """In one turn, of all partitions."""
        assert self.done[name].total() >= PARTITIONS, name
        return max(self.done[name].values())


@pytest.fixture
def work(monkeypatch) -> Work:
    return Work(monkeypatch)


@pytest.fixture
def node(work, lone_node) -> Any:
    return lone_node()


def created(node: Any, work: Work, *wanted: dict[str, Any]) -> None:
    answer = node.run(
        work.during(node.request(19, 7, topics=wanted, timeout=60_000, validate_only=False))
    )
    assert [topic.error_code.name for topic in answer.topics] == ["none"] * len(wanted)


def manual(name: str, partitions: int) -> dict[str, Any]:
    assignments = [{"partition_index": number, "broker_ids": [0]} for number in range(partitions)]
    return topic_values(name, -1) | {"replication_factor": -1, "assignments": assignments}


def test_a_topic_of_many_partitions_is_decided_applied_and_opened_in_turns(node, work) -> None:
    created(node, work, topic_values("t", PARTITIONS))
    for name in ("_new_partition", "add", "_change", "_host"):
        assert work.most(name) <= MOST, name
    assert len(node.node.parts.table.replicas) == PARTITIONS


def test_replicas_that_a_client_gives_are_checked_in_turns(node, work) -> None:
    created(node, work, manual("t", PARTITIONS))
    assert work.most("check_assignment") <= MOST and work.most("_new_partition") <= MOST


def test_what_a_request_s_next_topic_is_decided_on_is_made_in_turns(node, work) -> None:
    created(node, work, topic_values("t", PARTITIONS), topic_values("u", 1))
    assert work.most("add") <= MOST
    assert len(node.node.parts.table.replicas) == PARTITIONS + 1


def test_partitions_are_added_and_deleted_with_their_topic_in_turns(node, work) -> None:
    created(node, work, topic_values("t", 1))
    grown = {"name": "t", "count": 1 + PARTITIONS, "assignments": None}
    asked = node.request(37, 3, topics=[grown], timeout=60_000, validate_only=False)
    (result,) = node.run(work.during(asked)).results
    assert result.error_code.name == "none"
    for name in ("_new_partition", "add", "_change", "_host"):
        assert work.most(name) <= MOST, name
    gone = {"name": "t", "topic_id": None}
    (deleted,) = node.run(work.during(node.request(20, 6, topics=[gone], timeout=60_000))).responses
    assert deleted.error_code.name == "none"
    assert work.most("_remove") <= MOST and not node.node.parts.table.replicas
