"""Bytes in flight."""

from __future__ import annotations

from kept.node.runtime.memory_budget import BudgetShare, MemoryBudget


def test_the_first_always_may_and_others_wait():
    budget = MemoryBudget(100)
    assert budget.acquire(500)
    assert not budget.acquire(1)
    woken = []
    budget.wait(lambda: woken.append(budget.acquire(60)))
    budget.wait(lambda: woken.append(budget.acquire(60)))
    budget.release(450)
    assert woken == [False, False]
    budget.release(50)
    assert budget.used_bytes == 0


def test_those_who_wait_are_called_once_in_order():
    budget = MemoryBudget(100)
    budget.acquire(100)
    order = []
    for name in "abc":
        budget.wait(lambda name=name: order.append((name, budget.acquire(40))))
    budget.release(100)
    assert order == [("a", True), ("b", True), ("c", False)]
    budget.release(80)
    assert len(order) == 3
    assert not budget.exhausted


def test_responses_are_counted_even_beyond_the_limit():
    budget = MemoryBudget(10)
    budget.overdraw(25)
    assert budget.exhausted
    assert not budget.acquire(1)
    budget.release(25)
    assert budget.acquire(1)


def test_at_the_limit_nothing_is_left():
    budget = MemoryBudget(100)
    budget.overdraw(150)
    woken = []
    budget.wait(lambda: woken.append("waits"))
    budget.release(50)
    assert budget.exhausted and woken == []
    assert not budget.available(lambda: woken.append("asked"))
    budget.release(1)
    assert budget.available(lambda: woken.append("never"))
    assert woken == ["waits", "asked"]


def test_one_of_those_who_hold_something_may_pass_the_limit():
    """Else two requests that are half read would wait for each other for ever."""
    budget = MemoryBudget(100)
    assert budget.acquire(50, "a") and budget.acquire(50, "b")
    assert not budget.acquire(30), "who holds nothing can wait"
    assert budget.acquire(30, "a"), "who holds something can not"
    assert not budget.acquire(30, "b"), "one at a time"
    woken = []
    budget.wait(lambda: woken.append(budget.acquire(60, "b")))
    assert budget.acquire(30, "a") and budget.used_bytes == 160
    budget.release(110, "a")
    assert woken == [True] and budget.used_bytes == 110
    assert not budget.acquire(1, "c")
    budget.release(110, "b")
    assert budget.used_bytes == 0 and budget.acquire(100)


def test_the_next_may_pass_though_the_limit_is_still_passed():
    budget = MemoryBudget(100)
    for name in "abc":
        budget.acquire(30, name)
    assert budget.acquire(80, "a")
    woken = []
    for name in "bc":
        assert not budget.acquire(80, name)
        budget.wait(lambda name=name: woken.append((name, budget.acquire(80, name))))
    budget.overdraw(200)  # responses
    budget.release(110, "a")
    assert woken == [("b", True), ("c", False)]


def test_an_address_may_hold_its_part_and_no_more():
    budget = MemoryBudget(100, 40)
    mine, yours = budget.account("192.0.2.1"), budget.account("192.0.2.2")
    assert budget.account("192.0.2.1") is mine
    assert mine.acquire(40) and not mine.acquire(1)
    woken = []
    mine.wait(lambda: woken.append("mine"))
    assert yours.acquire(40) and budget.used_bytes == 80
    assert not yours.acquire(30)
    yours.wait(lambda: woken.append("yours"))
    yours.release(40)
    assert woken == ["yours"], "what others give back helps no address beyond its part"
    mine.release(40)
    assert woken == ["yours", "mine"] and budget.used_bytes == 0


def test_an_account_waits_for_whichever_refused():
    budget = MemoryBudget(100, 60)
    mine, yours = budget.account("a"), budget.account("b")
    yours.acquire(60)
    mine.acquire(10)
    assert not mine.acquire(40), "the whole is too full"
    woken = []
    mine.wait(lambda: woken.append(mine.acquire(40)))
    yours.release(60)
    assert woken == [True]


def test_an_account_nobody_uses_is_forgotten():
    budget = MemoryBudget(100, 40)
    account = budget.account("a")
    account.acquire(5)
    account.release(5)
    del account
    assert not budget._accounts


def test_a_share_is_drawn_in_turn():
    share = BudgetShare(MemoryBudget(1000), 100)
    order = []
    for name, size in (("a", 60), ("b", 60), ("c", 10)):
        share.draw(size, lambda name=name: order.append(name))
    assert order == ["a"], "c would fit, and b came first"
    share.release(60)
    assert order == ["a", "b", "c"]
    share.release(70)
    assert share.used_bytes == 0


def test_a_share_never_waits_for_the_rest_of_the_budget():
    budget = MemoryBudget(100)
    share = BudgetShare(budget, 25)
    budget.overdraw(100)  # frames that wait to be checked hold all of it
    order = []
    share.draw(500, lambda: order.append("a"))
    share.draw(5, lambda: order.append("b"))
    assert order == ["a"] and budget.used_bytes == 600
    share.release(500)
    assert order == ["a", "b"]
    share.release(5)
    assert (share.used_bytes, budget.used_bytes) == (0, 100)


def test_who_finds_nothing_left_is_called_once_when_something_is():
    budget = MemoryBudget(100, 60)
    account, woken = budget.account("a"), []
    back, gone = (lambda: woken.append("back")), (lambda: woken.append("gone"))
    assert account.available(back)
    budget.overdraw(100)
    assert not account.available(back) and not account.available(back), "the whole is used up"
    assert not account.available(gone)
    account.forget(gone)
    budget.release(1)
    budget.release(1)
    assert woken == ["back"]
    account.overdraw(60)
    budget.release(98)
    assert not account.available(back), "the account is"
    account.release(1)
    assert woken == ["back", "back"]
