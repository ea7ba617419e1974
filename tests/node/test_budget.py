"""Bytes in flight."""

from __future__ import annotations

from kept.node.budget import Budget


def test_the_first_always_may_and_others_wait():
    budget = Budget(100)
    assert budget.take(500)
    assert not budget.take(1)
    woken = []
    budget.wait(lambda: woken.append(budget.take(60)))
    budget.wait(lambda: woken.append(budget.take(60)))
    budget.give(450)
    assert woken == [False, False]
    budget.give(50)
    assert budget.used_bytes == 0


def test_those_who_wait_are_called_once_in_order():
    budget = Budget(100)
    budget.take(100)
    order = []
    for name in "abc":
        budget.wait(lambda name=name: order.append((name, budget.take(40))))
    budget.give(100)
    assert order == [("a", True), ("b", True), ("c", False)]
    budget.give(80)
    assert len(order) == 3
    assert not budget.exhausted


def test_responses_are_counted_even_beyond_the_limit():
    budget = Budget(10)
    budget.force(25)
    assert budget.exhausted
    assert not budget.take(1)
    budget.give(25)
    assert budget.take(1)
