"""A bounded number of places, and in which order they are taken from those who have one.

Pure. Each member has a rank; of a rank the one goes first that has had it longest. Networks (an
IPv4 address, a /64 of IPv6) have equal shares, a quarter at most: where one has more than its share
it gives way to those that have less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, Generic, Protocol, TypeVar

MIN_SHARES: Final = 4
"""A network's share is one place of so many, or of as many as there are networks."""


class Member(Protocol):
    """Who has a place."""

    @property
    def network(self) -> str:
        """Where it comes from (:func:`kept.cluster.security.addresses.network_of`)."""


T = TypeVar("T", bound=Member)


class Places(Generic[T]):
    """Members by rank, from 0 on."""

    def __init__(self, ranks: int) -> None:
        self._by_rank: tuple[dict[T, None], ...] = tuple({} for _ in range(ranks))

    def __len__(self) -> int:
        return sum(map(len, self._by_rank))

    def __contains__(self, member: T) -> bool:
        return any(member in members for members in self._by_rank)

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

    def pop_last(self, rank: int) -> T | None:
        """Take the place from the member that has had ``rank`` for the shortest time, if any."""
        members = self._by_rank[rank]
        return members.popitem()[0] if members else None

    def pop_beyond_share(
        self,
        network: str,
        limit: int,
        idle: tuple[int, ...],
        may_go: Callable[[T], bool] = lambda _: True,
    ) -> T | None:
        """Take a place for one more member of ``network``, where all ``limit`` are taken.

        Of the ranks ``idle`` one which ``may_go`` gives way to its own network, and to others where
        its network has more than its share, or theirs less. Where theirs has less, so does the
        newest of the highest rank of the network that has most, if that is more than its share.
        """
        taken = Counter(member.network for member in self.members())
        share = max(1, limit // max(MIN_SHARES, len(taken.keys() | {network})))
        has_less = taken[network] < share

        def gives_way(member: T) -> bool:
            own = member.network == network and not has_less
            return may_go(member) and (own or taken[member.network] > share)

        other = self.pop_first(idle, gives_way)
        if other is None and has_less:
            (greedy, most), *_ = taken.most_common(1)
            if most > share:
                other = self._pop_newest(greedy)
            other = other or self.pop_first(idle, may_go)
        return other

    def _pop_newest(self, network: str) -> T | None:
        for members in reversed(self._by_rank):
            for member in reversed(members):
                if member.network == network:
                    del members[member]
                    return member
        return None
