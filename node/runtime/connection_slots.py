"""A bounded number of places, and in which order they are taken from those who have one.

Pure. Each member has a rank; of a rank the one goes first that has had it longest. Networks (an
IPv4 address, a /64 of IPv6) have equal shares, a quarter at most: where one has more than its share
it gives way to those that have less, and in one an address to those that have fewer. Who is idle
goes before who is served. Who has logged in stays, but that a quarter of the places is taken from
the user who has most, if he has more than a quarter: else whoever may log in could hold them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, Generic, Protocol, TypeVar

from kept.cluster.security.addresses import network_of

MIN_SHARES: Final = 4
"""A network's share is one place of so many, or of as many as there are networks."""


class Member(Protocol):
    """Who has a place."""

    @property
    def host(self) -> str:
        """The address that it comes from."""


T = TypeVar("T", bound=Member)


class ConnectionSlots(Generic[T]):
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
        self, ranks: tuple[int, ...], is_evictable: Callable[[T], bool] = lambda _: True
    ) -> T | None:
        """Take the place from the first member that ``is_evictable`` of the first of ``ranks`` that
        has one; None: there is none.
        """
        for rank in ranks:
            for member in self._by_rank[rank]:
                if is_evictable(member):
                    del self._by_rank[rank][member]
                    return member
        return None

    def pop_last(self, rank: int) -> T | None:
        """Take the place from the member that has had ``rank`` for the shortest time, if any."""
        members = self._by_rank[rank]
        return members.popitem()[0] if members else None

    def pop_of_greediest(
        self,
        limit: int,
        rank: int,
        user_of: Callable[[T], str],
        is_evictable: Callable[[T], bool] = lambda _: True,
    ) -> T | None:
        """Take a place for whoever has yet to log in, where all ``limit`` are taken: that of the
        newest of ``rank`` that ``is_evictable``, of the user who has most of that, if it is more
        than a quarter of all, and while ``rank`` has more than three quarters. Of less than four
        places none is taken.
        """
        members, quarter = self._by_rank[rank], limit // MIN_SHARES
        if len(members) <= limit - quarter:
            return None
        ((greedy, most),) = Counter(map(user_of, members)).most_common(1)
        if most <= quarter:
            return None
        for member in reversed(members):
            if user_of(member) == greedy and is_evictable(member):
                del members[member]
                return member
        return None

    def pop_beyond_share(
        self,
        host: str,
        limit: int,
        idle: tuple[int, ...],
        served: tuple[int, ...],
        *,
        kept_idle: int = 0,
        is_evictable: Callable[[T], bool] = lambda _: True,
    ) -> T | None:
        """Take a place for one more member from ``host``, where all ``limit`` are taken. Other
        ranks than ``idle`` and ``served`` keep theirs, and count in no share.

        Of the ranks ``idle`` one that ``is_evictable`` gives way whose network has more than its
        share, or is that of ``host`` and has its share; else any, while there are more than
        ``kept_idle``.
        Then the newest of ``served`` does, the highest rank first, of the address that has most: in
        the network that has most, if that is more than its share and that of ``host`` has less, or
        in its own where that has its share and ``host`` has fewer. Then any of ``idle``, where the
        network has less than its share.
        """
        network = network_of(host)
        hosts = Counter(member.host for rank in (*idle, *served) for member in self._by_rank[rank])
        taken = Counter[str]()
        for address, count in hosts.items():
            taken[network_of(address)] += count
        shared = limit - len(self) + taken.total()
        share = max(1, shared // max(MIN_SHARES, len(taken.keys() | {network})))
        has_less = taken[network] < share

        def is_beyond_share(member: T) -> bool:
            of = network_of(member.host)
            if of == network:
                return not has_less and hosts[member.host] >= hosts[host] and is_evictable(member)
            return taken[of] > share and is_evictable(member)

        other = self.pop_first(idle, is_beyond_share)
        if other is None and sum(map(self.of_rank, idle)) > kept_idle:
            other = self.pop_first(idle, is_evictable)
        if other is None and has_less:
            greedy = max(taken, key=taken.__getitem__, default=network)
            other = self._pop_newest(greedy, served) if taken[greedy] > share else None
        elif other is None:
            other = self._pop_newest(network, served, more_than=hosts[host] + 1)
        if other is None and has_less:
            other = self.pop_first(idle, is_evictable)
        return other

    def _pop_newest(self, network: str, ranks: tuple[int, ...], more_than: int = 0) -> T | None:
        """Of the address of ``network`` that has most of ``ranks``, if those are so many."""
        newest = [member for rank in reversed(ranks) for member in reversed(self._by_rank[rank])]
        hosts = Counter(member.host for member in newest if network_of(member.host) == network)
        for greedy, most in hosts.most_common(1):
            if most > more_than:
                member = next(one for one in newest if one.host == greedy)
                self.discard(member)
                return member
        return None
