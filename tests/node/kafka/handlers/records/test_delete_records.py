"""DeleteRecords: what moves while many partitions are looked at is not missed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kept.node.kafka.handlers.records import delete_records
from kept.node.kafka.handlers.records.delete_records import DeleteRecordsHandler
from kept.steps import Steps, run_to_end
from kept.storage.types import TopicPartition
from tests.support.given import Given
from tests.support.loops import run


class Trimmed:
    """A partition whose follower follows as soon as it was looked at."""

    def __init__(self) -> None:
        self.low = 0
        self.waiters: list[Callable[[], None]] = []

    def delete_records(self, offset: int) -> int:
        return offset

    def low_watermark(self, _live: set[int]) -> int:
        return self.low

    def add_waiter(self, moved: Callable[[], None]) -> None:
        self.waiters.append(moved)

    def remove_waiter(self, moved: Callable[[], None]) -> None:
        self.waiters.remove(moved)

    async def finish(self, steps: Steps[Any]) -> Any:
        """Slices of a loop in which others run before the last item."""
        waiting = run_to_end(steps)
        self.low = 5
        for moved in self.waiters:
            moved()
        await asyncio.sleep(0)
        return waiting


@run
async def test_a_move_while_others_are_looked_at_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delete_records, "LIVENESS_CHECK_S", 3_600)
    partition = Trimmed()
    parts: Any = [
        Given(loop=asyncio.get_running_loop(), slices=partition),
        Given(image=Given(brokers={})),
        Given(partition=lambda _: partition),
    ]
    handler = DeleteRecordsHandler(*parts)
    deletion = delete_records._Deletion(TopicPartition("t", 0))
    deletion.begin(parts[2], 5)
    answer = await handler._wait([deletion], 7_200)
    ((result,),) = [topic["partitions"] for topic in answer["topics"]]
    assert (result["low_watermark"], result["error_code"]) == (5, 0)
    assert not partition.waiters
