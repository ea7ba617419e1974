"""Futures whose callbacks run at once: who is called when, and what becomes of errors."""

from __future__ import annotations

import asyncio

import pytest

from kept.node.runtime.completable_future import CompletableFuture, all_of
from tests.support.loops import run


def test_callbacks_are_called_within_the_call_that_sets_the_result():
    future: CompletableFuture[int] = CompletableFuture()
    called: list[int] = []
    future.add_done_callback(lambda done: called.append(done.result()))
    doubled = future.map(lambda value: 2 * value)
    assert not future.done() and not doubled.done()
    future.set_result(3)
    assert (called, doubled.result()) == ([3], 6)
    future.add_done_callback(lambda done: called.append(done.result()))
    assert called == [3, 3]
    assert CompletableFuture.completed(4).map(str).result() == "4"


def test_an_error_goes_to_who_asks_for_the_result():
    future: CompletableFuture[int] = CompletableFuture()
    mapped = future.map(lambda value: value + 1)
    future.set_exception(KeyError("gone"))
    for each in (future, mapped):
        assert isinstance(each.exception(), KeyError)
        with pytest.raises(KeyError, match="gone"):
            each.result()
    divided = CompletableFuture.completed(0).map(lambda value: 1 // value)
    assert isinstance(divided.exception(), ZeroDivisionError)


def test_a_callback_that_fails_hurts_nobody_else(capfd):
    future: CompletableFuture[int] = CompletableFuture()
    called: list[int] = []
    future.add_done_callback(lambda done: done.result() // 0)
    future.add_done_callback(lambda done: called.append(done.result()))
    future.set_result(1)
    assert called == [1]
    assert "callback failed" in capfd.readouterr().err


def test_all_of_several_is_there_with_the_last():
    several: list[CompletableFuture[int]] = [CompletableFuture() for _ in range(3)]
    together = all_of(several)
    for value in (2, 0, 1):
        assert not together.done()
        several[value].set_result(value)
    assert together.result() == [0, 1, 2]
    assert all_of([]).result() == []
    failed: CompletableFuture[int] = CompletableFuture()
    together = all_of([CompletableFuture.completed(1), failed])
    failed.set_exception(KeyError("gone"))
    assert isinstance(together.exception(), KeyError)


@run
async def test_it_may_be_awaited():
    future: CompletableFuture[int] = CompletableFuture()
    waiting = asyncio.ensure_future(awaited(future))
    given_up = asyncio.ensure_future(awaited(future))
    await asyncio.sleep(0)
    given_up.cancel()
    future.set_result(5)
    assert await waiting == 5
    assert await awaited(CompletableFuture.completed(6)) == 6
    with pytest.raises(asyncio.CancelledError):
        await given_up
    failed: CompletableFuture[int] = CompletableFuture()
    failed.set_exception(KeyError("gone"))
    with pytest.raises(KeyError):
        await failed


async def awaited(future: CompletableFuture[int]) -> int:
    return await future
