"""Bytes in flight, of one node: what requests and responses may hold in memory together.

Every connection draws on it for request bytes beyond its small base buffer and for response bytes
that its peer has not taken yet, through the :meth:`~MemoryBudget.account` of its network, which may
hold a part of the whole. A connection that finds either of them empty stops reading until bytes
come back.

Nobody waits for ever. The first to draw always may, so that a request larger than the whole budget
still passes. Requests are drawn for as their bytes come in, so several that are half read may hold
all there is: therefore one of those that hold something already may pass the limit at a time, until
it gives back. What is out is thus at most the limit, one request, and what responses forced.

What batches inflate to is drawn in turn (:class:`BudgetShare`). Who draws on a share holds nothing
of it while it waits, and who has drawn waits for nothing, so shares cannot deadlock either, not
even while frames hold the whole budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

LOGINS_SHARE: Final = 16
"""What clients that have not logged in may hold, as a part of what is in flight: a login fits into
what each connection has besides, so that few draw on it at all."""


class MemoryBudget:
    """A limit in bytes with a queue of those who wait for it, perhaps inside another one.

    ``limit_bytes`` is the most that may be out; ``used_bytes`` what is out now. What is drawn here
    is drawn on ``parent``, too. ``account_limit_bytes`` is what each account may hold; None: no
    less than the whole.
    """

    __slots__ = (
        "__weakref__",
        "_accounts",
        "_passing",
        "_refused_by",
        "_waiters",
        "account_limit_bytes",
        "limit_bytes",
        "parent",
        "used_bytes",
    )

    def __init__(
        self,
        limit_bytes: int,
        account_limit_bytes: int | None = None,
        parent: MemoryBudget | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.account_limit_bytes = account_limit_bytes
        self.parent = parent
        self.used_bytes = 0
        self._waiters: dict[Callable[[], None], None] = {}
        """Each once, the first to come first."""
        self._passing: object | None = None
        """Who may pass the limit, since it holds a part of what it needs."""
        self._refused_by: MemoryBudget | None = None
        self._accounts: WeakValueDictionary[str, MemoryBudget] = WeakValueDictionary()

    def account(self, network: str) -> MemoryBudget:
        """What one network may draw (:func:`kept.cluster.security.addresses.network_of`); kept
        while somebody uses it.
        """
        account = self._accounts.get(network)
        if account is None:
            limit = self.account_limit_bytes
            account = MemoryBudget(self.limit_bytes if limit is None else limit, parent=self)
            self._accounts[network] = account
        return account

    def resize(self, limit_bytes: int, account_limit_bytes: int) -> None:
        """Set other limits; what is out stays out."""
        self.limit_bytes, self.account_limit_bytes = limit_bytes, account_limit_bytes
        for account in self._accounts.values():
            account.limit_bytes = account_limit_bytes

    def acquire(self, size_bytes: int, holder: object | None = None) -> bool:
        """Draw; False when that would pass the limit and something is out already.

        ``holder`` names who draws, if it holds something that it gives back only once it has this,
        too: one such may pass the limit.
        """
        level: MemoryBudget | None = self
        while level is not None:
            if not level._admits(size_bytes, holder):
                self._refused_by = None if level is self else level
                return False
            level = level.parent
        level = self
        while level is not None:
            if level.used_bytes and level.used_bytes + size_bytes > level.limit_bytes:
                level._passing = holder
            level.used_bytes += size_bytes
            level = level.parent
        return True

    def _admits(self, size_bytes: int, holder: object | None) -> bool:
        if not self.used_bytes or self.used_bytes + size_bytes <= self.limit_bytes:
            return True
        return holder is not None and (self._passing is None or self._passing is holder)

    def overdraw(self, size_bytes: int) -> None:
        """Draw without asking: for responses, which must leave once they are made."""
        self.used_bytes += size_bytes
        if self.parent is not None:
            self.parent.overdraw(size_bytes)

    def release(self, size_bytes: int, holder: object | None = None) -> None:
        """Return bytes, and let those who wait try again. A ``holder`` returns all that it held."""
        self.used_bytes -= size_bytes
        passed = holder is not None and self._passing is holder
        if passed:
            self._passing = None
        if self.parent is not None:
            self.parent.release(size_bytes, holder)
        if self._waiters and (passed or self.used_bytes < self.limit_bytes):
            waiters, self._waiters = self._waiters, {}
            for waiter in waiters:
                waiter()

    def wait(self, callback: Callable[[], None]) -> None:
        """After a refusal: call back once, when bytes have come back; the caller tries again."""
        (self._refused_by or self)._waiters[callback] = None

    def forget(self, callback: Callable[[], None]) -> None:
        """Who waited is gone."""
        level: MemoryBudget | None = self
        while level is not None:
            level._waiters.pop(callback, None)
            level = level.parent

    def available(self, callback: Callable[[], None]) -> bool:
        """Whether something is left; if not, call back once when bytes have come back."""
        level: MemoryBudget | None = self
        while level is not None:
            if level.used_bytes >= level.limit_bytes:
                level._waiters[callback] = None
                return False
            level = level.parent
        return True

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left."""
        level: MemoryBudget | None = self
        while level is not None:
            if level.used_bytes >= level.limit_bytes:
                return True
            level = level.parent
        return False

    @property
    def under_pressure(self) -> bool:
        """Whether more than half is out: time to hold nothing that is only useful later."""
        return 2 * self.used_bytes > self.limit_bytes or (
            self.parent is not None and self.parent.under_pressure
        )


class NodeMemory:
    """The budgets of one node, which all its listeners share."""

    def __init__(
        self,
        *,
        in_flight_bytes: int,
        in_flight_bytes_per_network: int,
        inflating_bytes: int,
        waiting_bytes: int,
        responses_bytes: int,
    ) -> None:
        self.in_flight = MemoryBudget(in_flight_bytes, in_flight_bytes_per_network)
        """What requests and responses hold as they come and go."""
        self.inflating = BudgetShare(self.in_flight, inflating_bytes)
        """What batches hold that are inflated, to be checked or read."""
        self.waiting = MemoryBudget(waiting_bytes, waiting_bytes // 4)
        """What requests hold that wait for others: replicas, disks, the controller, producers."""
        self.responses = MemoryBudget(responses_bytes)
        """What responses hold while they are made in slices."""
        logins_bytes = in_flight_bytes // LOGINS_SHARE
        self.logins = MemoryBudget(logins_bytes, logins_bytes // 4)
        """What requests of clients hold that have not logged in: not on ``in_flight``, since
        strangers would keep others' requests waiting."""


class BudgetShare:
    """A part of a budget that is drawn in turn: first come, first served.

    ``limit_bytes`` is the most that may be out of it; the first to draw always may, whatever else
    holds the budget.
    """

    __slots__ = ("_budget", "_queue", "limit_bytes", "used_bytes")

    def __init__(self, budget: MemoryBudget, limit_bytes: int) -> None:
        self._budget = budget
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()

    def draw(self, size_bytes: int, granted: Callable[[], None]) -> None:
        """Call ``granted`` once ``size_bytes`` are drawn, which may be at once."""
        self._queue.append((size_bytes, granted))
        if len(self._queue) == 1:
            self._serve()

    def release(self, size_bytes: int) -> None:
        """Return bytes; those whose turn it is get theirs."""
        self.used_bytes -= size_bytes
        self._budget.release(size_bytes)
        self._serve()

    def _serve(self) -> None:
        while self._queue:
            size_bytes, granted = self._queue[0]
            budget = self._budget
            if self.used_bytes and (
                self.used_bytes + size_bytes > self.limit_bytes
                or budget.used_bytes + size_bytes > budget.limit_bytes
            ):
                return
            self._queue.popleft()
            self.used_bytes += size_bytes
            budget.overdraw(size_bytes)
            granted()
