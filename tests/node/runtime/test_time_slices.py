"""Long work in slices: at once where it is small, one slice a turn where it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator

import pytest

from kept.node.runtime.time_slices import IN_PLACE_S, IN_PLACE_STEPS, TURN_S, SlicedTask, TimeSlices


class Turns:
    """What :class:`TimeSlices` needs of a loop, with each turn called by the test."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.calls: list[object] = []
        self.now = 0.0
        self.each_look_s = 0.0
        """How much time goes by from one look at the clock to the next."""

    def call_soon(self, callback: object, *args: object, context: object = None) -> None:
        self.calls.append(callback)

    def get_debug(self) -> bool:
        return False

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for callback in calls:
            callback()

    def clock(self) -> float:
        self.now += self.each_look_s
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


def test_items_that_take_long_are_not_many_in_place(turns) -> None:
    slices, work = TimeSlices(turns, turns.clock), Counted(IN_PLACE_STEPS - 1)
    turns.each_look_s = IN_PLACE_S / 2
    result = slices.run(work.steps())
    assert isinstance(result, SlicedTask) and work.done == 2
    while not result.done():
        turns.turn()
    assert result.result() == "made"


def test_many_works_share_one_slice_a_turn(turns) -> None:
    slices = TimeSlices(turns, turns.clock)
    works = [Counted(1000) for _ in range(5)]
    results = [slices.run(work.steps()) for work in works]
    turns.each_look_s = TURN_S / 2
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


def test_a_turn_is_used_by_others_when_one_ends_or_waits(turns) -> None:
    slices, works = TimeSlices(turns, turns.clock), [Counted(40) for _ in range(5)]
    results = [slices.run(work.steps()) for work in works]
    waiting = slices.run(Counted(1000).steps(), lambda: Memory(3))
    results.append(slices.run(Counted(40).steps()))
    turns.turn()
    assert [result.result() for result in results] == ["made"] * 6
    assert not waiting.done() and not turns.calls


def test_what_is_cancelled_ends_where_it_is(turns) -> None:
    slices = TimeSlices(turns, turns.clock)
    work, other = Counted(1000), Counted(100)
    result, kept = slices.run(work.steps()), slices.run(other.steps())
    turns.each_look_s = TURN_S / 2
    turns.turn()
    result.cancel()
    done = work.done
    while turns.calls and not kept.done():
        turns.turn()
    assert work.closed and work.done == done < 1000
    assert kept.result() == "made"


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_its_last_item_cancels_ends_and_others_go_on(turns, fails, capsys) -> None:
    """As a load whose last append takes the partition offline."""
    slices, other = TimeSlices(turns, turns.clock), Counted(IN_PLACE_STEPS + 5)

    def cancels() -> Generator[None, None, str]:
        yield from Counted(IN_PLACE_STEPS).steps()
        work.cancel()
        if fails:
            raise ValueError("a bug of ours")
        return "made"

    work = slices.run(cancels())
    kept = slices.run(other.steps())
    while turns.calls:
        turns.turn()
    assert work.cancelled() and kept.result() == "made"
    assert ("a bug of ours" in capsys.readouterr().err) is fails


def test_an_error_is_the_results(turns) -> None:
    slices = TimeSlices(turns, turns.clock)
    result = slices.run(Counted(1000, fails_at=500).steps())
    while not result.done():
        turns.turn()
    with pytest.raises(ValueError, match="item"):
        result.result()


@pytest.mark.parametrize("items", [0, IN_PLACE_STEPS + 5])
def test_what_was_cancelled_below_it_ends_it_and_no_other_work(turns, items) -> None:
    slices, others = TimeSlices(turns, turns.clock), [Counted(100), Counted(100)]
    before, cancelled = slices.run(others[0].steps()), turns.loop.create_future()
    cancelled.cancel()

    def takes() -> Generator[None, None, str]:
        yield from Counted(items).steps()
        return cancelled.result()

    results = [before, slices.run(takes()), slices.run(others[1].steps())]
    while turns.calls:
        turns.turn()
    assert [result.cancelled() for result in results] == [False, True, False]
    assert [results[n].result() for n in (0, 2)] == ["made"] * 2


class Memory:
    """Has room for so many items, then lets whoever wants more wait."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.waiting: list[Callable[[], None]] = []

    def draw(self, resume: Callable[[], None]) -> bool:
        if not self.room:
            self.waiting.append(resume)
            return False
        self.room -= 1
        return True

    def forget(self, resume: Callable[[], None]) -> None:
        self.waiting.remove(resume)


def test_work_without_memory_waits_and_others_go_on(turns) -> None:
    slices, memory = TimeSlices(turns, turns.clock), Memory(100)
    turns.each_look_s = TURN_S / 5
    large, other = Counted(1000), Counted(50)
    result = slices.run(large.steps(), lambda: memory)
    kept = slices.run(other.steps())
    while turns.calls:
        turns.turn()
    assert kept.result() == "made" and not result.done()
    assert len(memory.waiting) == 1, "and its turns cost nothing"
    held = large.done
    memory.room = 1 << 20
    memory.waiting.pop()()
    while turns.calls:
        turns.turn()
    assert result.result() == "made" and held < 200


def test_work_that_waits_for_memory_ends_when_it_is_cancelled(turns) -> None:
    slices, memory = TimeSlices(turns, turns.clock), Memory(0)
    work = Counted(1000)
    result = slices.run(work.steps(), lambda: memory)
    turns.turn()
    assert memory.waiting and not turns.calls
    result.cancel()
    assert work.closed and not memory.waiting
