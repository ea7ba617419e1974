"""A bounded number of places, and in which order they are taken from those who have one.

Pure. Each member has a rank; of a rank the one goes first that has had it longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Places(Generic[T]):
    """Members by rank, from 0 on."""

    def __init__(self, ranks: int) -> None:
        self._by_rank: tuple[dict[T, None], ...] = tuple({} for _ in range(ranks))

    def __len__(self) -> int:
        return sum(map(len, self._by_rank))

    def of_rank(self, rank: int) -> int:
        """So many have it."""
        return len(self._by_rank[rank])

    def members(self, first_rank: int = 0) -> Iterator[T]:
        """Those of this rank and of higher ones."""
        for members in self._by_rank[first_rank:]:
            yield from members

    def put(self, member: T, rank: int) -> None:
        """It has this rank from now on, the last of those that have it."""
        self.discard(member)
        self._by_rank[rank][member] = None

    def discard(self, member: T) -> None:
        """It has no place; again is no fault."""
        for members in self._by_rank:
            members.pop(member, None)

    def pop_first(
        self, ranks: tuple[int, ...], may_go: Callable[[T], bool] = lambda _: True
    ) -> T | None:
        """Take the place from the first member of the first of ``ranks`` that has one which
        ``may_go``; None: there is none.
        """
        for rank in ranks:
            for member in self._by_rank[rank]:
                if may_go(member):
                    del self._by_rank[rank][member]
                    return member
        return None

    def pop_last(self, rank: int, may_go: Callable[[T], bool] = lambda _: True) -> T | None:
        """Take the place from the member which ``may_go`` that has had ``rank`` for the shortest
        time, if any.
        """
        members = self._by_rank[rank]
        for member in reversed(members):
            if may_go(member):
                del members[member]
                return member
        return None
