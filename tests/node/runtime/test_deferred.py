"""Results that go on at once: who is called when, and what becomes of errors."""

from __future__ import annotations

import asyncio

import pytest

from kept.node.runtime.deferred import Deferred, all_of
from tests.support.loops import run


def test_callbacks_are_called_within_the_call_that_sets_the_result():
    deferred: Deferred[int] = Deferred()
    called: list[int] = []
    deferred.add_done_callback(lambda done: called.append(done.result()))
    doubled = deferred.map(lambda value: 2 * value)
    assert not deferred.done() and not doubled.done()
    deferred.set_result(3)
    assert (called, doubled.result()) == ([3], 6)
    deferred.add_done_callback(lambda done: called.append(done.result()))
    assert called == [3, 3]
    assert Deferred.of(4).map(str).result() == "4"


def test_an_error_goes_to_who_asks_for_the_result():
    deferred: Deferred[int] = Deferred()
    mapped = deferred.map(lambda value: value + 1)
    deferred.set_exception(KeyError("gone"))
    for each in (deferred, mapped):
        assert isinstance(each.exception(), KeyError)
        with pytest.raises(KeyError, match="gone"):
            each.result()
    divided = Deferred.of(0).map(lambda value: 1 // value)
    assert isinstance(divided.exception(), ZeroDivisionError)


def test_a_callback_that_fails_hurts_nobody_else(capfd):
    deferred: Deferred[int] = Deferred()
    called: list[int] = []
    deferred.add_done_callback(lambda done: done.result() // 0)
    deferred.add_done_callback(lambda done: called.append(done.result()))
    deferred.set_result(1)
    assert called == [1]
    assert "callback failed" in capfd.readouterr().err


def test_all_of_several_is_there_with_the_last():
    several: list[Deferred[int]] = [Deferred() for _ in range(3)]
    together = all_of(several)
    for value in (2, 0, 1):
        assert not together.done()
        several[value].set_result(value)
    assert together.result() == [0, 1, 2]
    assert all_of([]).result() == []
    failed: Deferred[int] = Deferred()
    together = all_of([Deferred.of(1), failed])
    failed.set_exception(KeyError("gone"))
    assert isinstance(together.exception(), KeyError)


@run
async def test_it_may_be_awaited():
    deferred: Deferred[int] = Deferred()
    waiting = asyncio.ensure_future(awaited(deferred))
    given_up = asyncio.ensure_future(awaited(deferred))
    await asyncio.sleep(0)
    given_up.cancel()
    deferred.set_result(5)
    assert await waiting == 5
    assert await awaited(Deferred.of(6)) == 6
    with pytest.raises(asyncio.CancelledError):
        await given_up
    failed: Deferred[int] = Deferred()
    failed.set_exception(KeyError("gone"))
    with pytest.raises(KeyError):
        await failed


async def awaited(deferred: Deferred[int]) -> int:
    return await deferred
