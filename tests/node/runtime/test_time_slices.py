"""Long work in slices: at once where it is small, one slice a turn where it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest

from kept.node.runtime.time_slices import IN_PLACE_STEPS, TURN_S, SlicedTask, TimeSlices


class Turns:
    """What :class:`TimeSlices` needs of a loop, with each turn called by the test."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.calls: list[object] = []
        self.now = 0.0

    def call_soon(self, callback: object, *args: object, context: object = None) -> None:
        self.calls.append(callback)

    def get_debug(self) -> bool:
        return False

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for callback in calls:
            callback()

    def clock(self) -> float:
        """Half a turn's time for each look."""
        self.now += TURN_S / 2
        return self.now


class Counted:
    """Work of ``items`` items: how many were done, and whether it was closed."""

    def __init__(self, items: int, fails_at: int = -1) -> None:
        self.items, self.fails_at = items, fails_at
        self.done = 0
        self.closed = False

    def steps(self) -> Generator[None, None, str]:
        try:
            for number in range(self.items):
                if number == self.fails_at:
                    raise ValueError("item")
                self.done += 1
                yield
            return "made"
        finally:
            self.closed = True


@pytest.fixture
def turns():
    loop = asyncio.new_event_loop()
    yield Turns(loop)
    loop.close()


def test_a_few_items_are_done_in_place(turns) -> None:
    slices = TimeSlices(turns, turns.clock)
    assert slices.run(Counted(IN_PLACE_STEPS - 1).steps()) == "made"
    assert not turns.calls
    with pytest.raises(ValueError, match="item"):
        slices.run(Counted(9, fails_at=3).steps())


def test_many_works_share_one_slice_a_turn(turns) -> None:
    slices = TimeSlices(turns, turns.clock)
    works = [Counted(1000) for _ in range(5)]
    results = [slices.run(work.steps()) for work in works]
    assert all(isinstance(result, SlicedTask) for result in results)
    assert [work.done for work in works] == [IN_PLACE_STEPS] * 5
    most = 0
    for _ in range(4000):
        before = sum(work.done for work in works)
        turns.turn()
        most = max(most, sum(work.done for work in works) - before)
        spread = max(work.done for work in works) - min(work.done for work in works)
        assert spread <= 3 or any(work.closed for work in works)
        if all(work.closed for work in works):
            break
    assert all(result.result() == "made" for result in results)
    assert most <= 3, "a turn's time is for all works together"
    assert slices._works == type(slices._works)()


def test_what_is_cancelled_ends_where_it_is(turns) -> None:
    slices = TimeSlices(turns, turns.clock)
    work, other = Counted(1000), Counted(100)
    result, kept = slices.run(work.steps()), slices.run(other.steps())
    turns.turn()
    result.cancel()
    done = work.done
    while turns.calls and not kept.done():
        turns.turn()
    assert work.closed and work.done == done < 1000
    assert kept.result() == "made"


def test_an_error_is_the_results(turns) -> None:
    slices = TimeSlices(turns, turns.clock)
    result = slices.run(Counted(1000, fails_at=500).steps())
    while not result.done():
        turns.turn()
    with pytest.raises(ValueError, match="item"):
        result.result()
