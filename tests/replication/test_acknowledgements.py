"""Very many that wait for the high watermark are told in turn, each once and in order."""

from __future__ import annotations

from typing import Any

import pytest

from kept.replication.partition import Partition
from kept.replication.replica import ACKNOWLEDGED_AT_ONCE
from kept.replication.replica_effects import AcknowledgementsLeft
from kept.storage.errors import NotLeaderOrFollower
from tests.support import partitions as tools
from tests.support.listener import RecordedListener

MANY = 3 * ACKNOWLEDGED_AT_ONCE
LEFT = AcknowledgementsLeft()


class Waiting:
    """Who waits at a partition, and what they were told: (number, error's type)."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.effects: list[Any] = []
        partition.listener = RecordedListener(self.effects)
        self.told: list[tuple[int, Any]] = []
        self.tokens: list[int] = []

    def produce(self, count: int = 1) -> None:
        for _ in range(count):
            self.wait(tools.produce(self.partition).last_offset + 1)

    def wait(self, end_offset: int) -> None:
        number = len(self.tokens)
        self.tokens.append(
            self.partition.when_committed(
                end_offset, lambda error: self.told.append((number, error and type(error)))
            )
        )

    def replicate(self) -> None:
        """The follower has all."""
        self.partition.fetch(self.partition.log_end_offset, 1000, replica_id=1)

    def tell_the_rest(self) -> None:
        while self.partition.acknowledge_next():
            pass


@pytest.fixture
def waiting(replicated: Partition) -> Waiting:
    return Waiting(replicated)


def committed(*numbers: int) -> list[tuple[int, Any]]:
    return [(number, None) for number in numbers]


def test_few_are_told_within_the_call_that_commits(waiting) -> None:
    waiting.produce(ACKNOWLEDGED_AT_ONCE // 2)
    waiting.replicate()
    assert waiting.told == committed(*range(ACKNOWLEDGED_AT_ONCE // 2))
    assert LEFT not in waiting.effects


def test_very_many_are_told_one_at_a_time_and_who_comes_meanwhile_behind_them(waiting) -> None:
    waiting.produce(MANY)
    waiting.replicate()
    assert not waiting.told and waiting.effects.count(LEFT) == 1
    waiting.wait(1)
    waiting.produce(MANY)
    waiting.replicate()
    assert not waiting.told and waiting.effects.count(LEFT) == 1
    assert waiting.partition.acknowledge_next() and waiting.told == committed(0)
    waiting.tell_the_rest()
    assert waiting.told == committed(*range(2 * MANY + 1))
    waiting.wait(1)
    assert waiting.told[-1] == (2 * MANY + 1, None), "nobody is left to wait behind"


def test_a_leader_that_is_alone_by_now_tells_in_order(waiting) -> None:
    """A coordinator's appends are to commit in their order."""
    waiting.produce(MANY)
    waiting.replicate()
    tools.lead(waiting.partition, 3, (0,), version=1)
    assert waiting.partition.core.alone
    waiting.produce()
    assert not waiting.told
    waiting.tell_the_rest()
    assert waiting.told == committed(*range(MANY + 1))


def test_who_gives_up_in_its_turn_is_told_then_and_not_again(waiting) -> None:
    waiting.produce(MANY)
    waiting.replicate()
    waiting.produce()
    forgotten = waiting.tokens[5], waiting.tokens[-1]
    for token in (*forgotten, *forgotten):
        waiting.partition.forget_commit(token)
    assert waiting.told == committed(5)
    waiting.replicate()
    waiting.tell_the_rest()
    assert waiting.told[1:] == committed(*(n for n in range(MANY) if n != 5))
    waiting.partition.check_invariants()


def test_what_was_committed_stays_so_when_the_leadership_ends(waiting) -> None:
    """And what was not is told at once: of the next leader's records nothing is here yet."""
    waiting.produce(MANY)
    waiting.replicate()
    waiting.produce(MANY)
    waiting.partition.resign()
    assert waiting.told == [(n, NotLeaderOrFollower) for n in range(MANY, 2 * MANY)]
    waiting.wait(1)
    assert waiting.told.pop() == (2 * MANY, NotLeaderOrFollower)
    waiting.tell_the_rest()
    assert waiting.told[MANY:] == committed(*range(MANY))


def test_one_that_fails_keeps_none_from_being_told(waiting) -> None:
    def fail(_: Any) -> None:
        raise KeyError("a bug of ours")

    end_offset = tools.produce(waiting.partition).last_offset + 1
    waiting.partition.when_committed(end_offset, fail)
    waiting.produce(MANY)
    waiting.replicate()
    with pytest.raises(KeyError):
        waiting.partition.acknowledge_next()
    waiting.tell_the_rest()
    assert waiting.told == committed(*range(MANY))
