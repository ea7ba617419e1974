"""Whose place is taken when all are: in which order, and by whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from kept.node.runtime.connection_slots import ConnectionSlots

WAITING, SERVED, KNOWN = range(3)
PROXY = "10.0.0.1"


@dataclass(eq=False)
class Guest:
    """Who comes from ``host``."""

    host: str


@dataclass
class House:
    """Places of which those who wait and those who are served may lose theirs."""

    limit: int
    kept_idle: int = 0
    places: ConnectionSlots[Guest] = field(default_factory=lambda: ConnectionSlots(3))
    left: list[str] = field(default_factory=list)
    """The addresses of those who had to go."""

    def come(self, host: str, rank: int = WAITING, times: int = 1) -> int:
        """So many come who have, or soon get, this rank; how many found a place."""
        return sum(self._enter(host, rank) for _ in range(times))

    def _enter(self, host: str, rank: int) -> bool:
        if len(self.places) >= self.limit:
            other = self.places.pop_beyond_share(
                host, self.limit, (WAITING,), (SERVED,), kept_idle=self.kept_idle
            )
            if other is None:
                return False
            self.left.append(other.host)
        self.places.put(Guest(host), rank)
        return True

    def of(self, host: str) -> int:
        """So many are there from an address."""
        return sum(guest.host == host for guest in self.places.members())


def silent(number: int) -> str:
    """An address of a network of its own."""
    return f"2001:db8:0:{number:x}::1"


def test_many_silent_networks_end_nothing_and_keep_nobody_out() -> None:
    house = House(256)
    assert house.come(PROXY, SERVED, 100) == 100
    for number in range(1, 256):
        assert house.come(silent(number))
    assert house.left == [silent(number) for number in range(1, 100)], "who waited longest"
    assert house.come(PROXY, SERVED, 50) == 50
    assert house.places.of_rank(SERVED) == 150


def test_who_is_silent_ends_nothing_within_his_share_either() -> None:
    house = House(256)
    house.come(PROXY, SERVED, 150)
    for number in (1, 2, 3):
        assert house.come(silent(number), WAITING, 64) == 64
    assert house.places.of_rank(SERVED) == 150 and len(house.places) == 256


def test_who_waits_beyond_his_networks_share_goes_first() -> None:
    house = House(8)
    house.come("10.0.0.2")
    house.come("10.0.0.3", WAITING, 7)
    house.come("10.0.0.4")
    assert house.left == ["10.0.0.3"], "though another waited longer"
    house.come("10.0.0.3")
    assert house.left == 2 * ["10.0.0.3"], "his own, where he has his share"


def test_where_nobody_waits_the_newest_of_the_greediest_goes() -> None:
    house = House(8)
    house.come(PROXY, SERVED, 8)
    assert house.come("10.0.0.2", SERVED, 3) == 2
    assert house.left == 2 * [PROXY]


def test_who_has_another_rank_goes_for_nobody_and_counts_in_no_share() -> None:
    house = House(8)
    house.come(PROXY, KNOWN, 8)
    assert not house.come("10.0.0.2") and not house.left
    house = House(8)
    house.come(PROXY, KNOWN, 4)
    for host in (PROXY, "10.0.0.3", "10.0.0.2", "10.0.0.2"):
        house.come(host)
    house.come("10.0.0.4")
    assert house.left == ["10.0.0.2"], "the share is one of the four that are left"


def test_some_who_wait_may_stay_until_they_are_served() -> None:
    house = House(8, kept_idle=2)
    house.come(PROXY, SERVED, 6)
    house.come("10.0.0.2", WAITING, 2)
    assert not house.come(PROXY), "it has its share, and no more than two wait"
    house.come("10.0.0.3")
    assert house.left == [PROXY]
    house.come("10.0.0.4")
    assert house.left == [PROXY, "10.0.0.2"], "now three wait"
    assert house.come(PROXY, SERVED), "and so one gives way to anybody"


def test_in_a_network_an_address_gives_way_to_one_that_has_fewer() -> None:
    house = House(8)
    house.come("2001:db8::1", SERVED, 8)
    assert house.come("2001:db8::2", SERVED, 8) == 4
    assert (house.of("2001:db8::1"), house.of("2001:db8::2")) == (4, 4)
    assert not house.come("2001:db8::1", SERVED)
    assert house.come("10.0.0.2", SERVED) and house.of("2001:db8::2") == 3, "the newest goes"


def test_in_a_network_who_waits_gives_way_to_an_address_that_has_fewer_only() -> None:
    house = House(8, kept_idle=8)
    house.come("2001:db8::1", WAITING)
    house.come("2001:db8::2", WAITING, 7)
    house.come("2001:db8::2", WAITING, 100)
    assert (house.of("2001:db8::1"), house.of("2001:db8::2")) == (1, 7)
    house.come("2001:db8::3", WAITING, 100)
    assert house.of("2001:db8::3") >= 3


@dataclass(eq=False)
class User:
    """Who has logged in."""

    name: str
    host: str = ""


def test_of_those_who_logged_in_the_newest_of_the_greediest_makes_room_for_a_quarter() -> None:
    places: ConnectionSlots[User] = ConnectionSlots(3)
    users = [User(name) for name in "aabaabaa"]
    for user in users[:-1]:
        places.put(user, KNOWN)

    def taken() -> User | None:
        return places.pop_of_greediest(8, KNOWN, lambda user: user.name)

    places.put(User("stranger"), WAITING)
    places.put(users[-1], KNOWN)
    assert taken() is users[7] and taken() is users[6]
    assert taken() is None, "three quarters are theirs"
    many: ConnectionSlots[User] = ConnectionSlots(3)
    for name in "aabbccdd":
        many.put(User(name), KNOWN)
    assert many.pop_of_greediest(8, KNOWN, lambda user: user.name) is None, "nobody has more"
